"""README.md and docs/, run as they are printed.

Commands and Python blocks of a document run in its order, in one folder. The lines of text that it
shows have to be those that were printed: with their numbers where a command ran with the flags that
are printed and no others, and without them elsewhere.

A block is taken as it stands. Where that would take too long, an HTML comment above its fence,
which a reader of the page does not see, says what the test does instead:

    <!-- test:
    mf-audit --mechanism=blt + --canaries=250
    -->

appends flags to each command of the block that has the words before the plus sign (the last value
of a flag counts). ``only parsed: REASON`` leaves a block with checks of its flags. ``long`` runs it
in the long test alone, ``long: WORDS`` those of its commands that have the words, and ``as printed
in the long test`` runs it there without what is appended. ``WORDS becomes WORDS`` makes Python
smaller for the short test. ``in a shell`` hands a block to bash, for programs of others. Cells of
notebooks (``{code-cell}``) are blocks of Python, and those of tutorials run in the long test alone.
``output of WORDS`` stands above text that another command has printed than the last one, and ``a
message`` above one that no command here brings about.

A line of text that ends in an ellipsis (one character) stands for all printed lines that begin with
the words before it.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pytest

from mf_aggregators.commands import command_line
from mf_aggregators.privacy import ledgers
from stackoverflow_nwp import datasets, docstrings, federated_text
from stackoverflow_nwp.federated_text import Example
from tests import console_commands
from tests.console_commands import ROOT
from tests.examples import of_many
from tests.simulations.examples import fashion_mnist_files
from tests.simulations.worker_processes import WorkerProcess, free_port
from tests.stackoverflow_nwp import last_word_model

pytestmark = pytest.mark.begun_first

_TUTORIALS = "docs/tutorials"
# The build of the site writes it.
_GENERATED = "docs/mechanisms/index.md"
_NAMES = [
    name
    for pattern in ("README.md", "docs/*.md", "docs/mechanisms/*.md", f"{_TUTORIALS}/*.md")
    for path in sorted(ROOT.glob(pattern))
    if (name := str(path.relative_to(ROOT))) != _GENERATED
]
# They train, audit or plan for seconds: the short test checks their flags, and runs the others.
_SLOW = tuple(
    f"docs/{name}.md" for name in ("audit", "commands", "devices", "planning", "tasks", "workers")
)
_OF_DEVELOPERS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_REASONS = (
    "installs packages",
    "needs an environment of its own",
    "needs other machines",
    "trains for hours",
)
_FENCE = re.compile(
    r"(?:^<!-- test:(?P<marks>[^>]*?)-->\n\n?)?"
    r"^```(?P<language>\{code-cell\}[ \w]*|\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_OPTIONS_OF_CELL = re.compile(r"\A(?::.*\n)+\n?")
_IN_THE_ENVIRONMENT = ".venv/bin/"
# Flags of one command may be checked while those of another are.
_RUN_COMMAND = command_line.run
# Sizes of what a document does not size itself: its own flags count, and what its markers append.
_SMALL: Mapping[str, tuple[str, ...]] = {
    "run-stackoverflow": (
        "--num_rounds=8",
        "--clients_per_round=4",
        "--vocab_size=8",
        "--sequence_length=8",
        "--embedding_size=4",
        "--lstm_size=4",
        "--evaluate_every=8",
    ),
    "run-digits": ("--num_rounds=8", "--clients_per_round=4", "--evaluate_every=8"),
    "run-fashion-mnist": (
        "--num_rounds=4",
        "--clients_per_round=2",
        "--evaluate_every=4",
        "--data_dir=fashion_mnist",
    ),
}
_WORDS = ("the", "model", "returns", "a", "list", "of", ".", "values", "for", "each")
# Flags of pip, of the tests, and of the program that checks certificates.
_OTHERS_FLAGS = ("--no-deps", "--all", "--bins=", "--epsilon=", "--probability=")
# Contents of files, which tests of their own read, and code in the style of another language.
_FILES = ("bibtex", "csv", "kotlin", "toml")
_REMOTE = re.compile(r"\b10\.0\.0\.(\d+):8000\b")
_NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\b")
# Where lines of a comment end depends on the numbers in them.
_NEXT_LINE_OF_COMMENT = re.compile(r"\n[ ]*# ")
_RUN = re.compile(r"\bruns/[\w:-]+")
# Ends a line of which a document shows the beginning.
_ELLIPSIS = "…"


# Blocks


@dataclasses.dataclass(frozen=True)
class _Command:
    """A command line: the place of its block, and the words as a shell splits them."""

    where: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program without its directory; for a script that Python runs, the script."""
        return self._split[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words behind the name."""
        return self._split[1:]

    @property
    def is_ours(self) -> bool:
        """Whether it is the project's own."""
        return self.name in _our_commands()

    @property
    def _split(self) -> tuple[str, ...]:
        program, *rest = self.words[0].rsplit("/", 1)[-1], *self.words[1:]
        is_script = program.startswith("python") and rest and rest[0].endswith(".py")
        return tuple(rest) if is_script else (program, *rest)

    def has(self, words: str) -> bool:
        """Whether all words of a marker are among its own."""
        return {self.name, *self.arguments}.issuperset(shlex.split(words))

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


@dataclasses.dataclass(frozen=True)
class _Block:
    """A fenced block: its place, what stands behind and between its fences, and its marks."""

    where: str
    language: str
    text: str
    marks: tuple[str, ...] = ()

    @functools.cached_property
    def commands(self) -> list[_Command]:
        """The commands of a block of bash, in order."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [tuple(shlex.split(line, comments=True)) for line in lines]
        return [_Command(self.where, each) for each in words if each]

    def marked(self, mark: str) -> list[str]:
        """What follows a mark, each time that the block has it."""
        return [each.removeprefix(mark) for each in self.marks if each.startswith(mark)]

    def is_long(self, command: _Command) -> bool:
        """Whether the long test alone runs one of the commands."""
        return "long" in self.marks or any(map(command.has, self.marked("long: ")))

    @property
    def small_text(self) -> str:
        """The text as the short test runs it."""
        text = self.text
        for before, _, after in (each.partition(" becomes ") for each in self.marks):
            text = text.replace(before, after) if after else text
        return text

    def appended_to(self, command: _Command) -> list[str]:
        """The flags that are appended to one of the commands."""
        pairs = [each.split(" + ") for each in self.marks if " + " in each]
        return [flag for words, flags in pairs if command.has(words) for flag in shlex.split(flags)]

    def check_marks(self) -> None:
        """Raises ValueError if a mark means nothing here."""
        for mark in self.marks:
            words, _, rest = mark.removeprefix("long: ").partition(" + ")
            if mark in ("long", "as printed in the long test", "a message", "in a shell"):
                means = True
            elif mark.startswith("only parsed: "):
                means = mark.removeprefix("only parsed: ") in _REASONS
            elif " becomes " in mark:
                means = self.text.count(mark.partition(" becomes ")[0]) == 1
            elif mark.startswith("long: ") or rest:
                means = any(command.has(words) for command in self.commands)
            else:
                means = mark.startswith("output of ")
            if not means:
                raise ValueError(f"{self.where}: no test knows what {mark!r} means here")


@functools.cache
def _our_commands() -> tuple[str, ...]:
    scripts = (ROOT / "benchmarks").glob("*.py")
    commands = console_commands.of_setup()["commands"]
    return (*commands, *sorted(f"benchmarks/{path.name}" for path in scripts))


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _blocks(name: str, text: str) -> list[_Block]:
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        language, content = match["language"], match["text"]
        if language.startswith("{code-cell}"):
            language, content = "python", _OPTIONS_OF_CELL.sub("", content)
        marks = tuple(filter(None, map(str.strip, (match["marks"] or "").splitlines())))
        if name.startswith(_TUTORIALS):
            marks = ("long", *marks)
        found.append(_Block(f"{name}:{line}", language, content, marks))
        found[-1].check_marks()
    num_marked = sum(match["marks"] is not None for match in _FENCE.finditer(text))
    if num_marked != len(re.findall(r"<!--\s*test", text)):
        raise ValueError(f"{name}: a marker of a test is not right above a block")
    return found


def _all_blocks() -> list[_Block]:
    return [block for name in _NAMES for block in _blocks(name, _read(name))]


# Flags


def _check_flags(command: _Command, arguments: tuple[str, ...]) -> None:
    """Lets the command parse flags, and check which ones it requires."""

    def parse(description: str, define_flags: Any, main: Any, *rest: Any, **others: Any) -> int:
        return _RUN_COMMAND(description, define_flags, lambda values: None, *rest, **others)

    with mock.patch.object(command_line, "run", parse):
        _call(command, arguments)


def _call(command: _Command, arguments: tuple[str, ...]) -> str:
    ended = console_commands.call(command.name, *arguments)
    assert ended.status == 0, (
        f"{command}\nwith {' '.join(arguments)}\nended with status {ended.status}:\n"
        f"{ended.errors[-2000:]}"
    )
    return ended.printed


# The place where documents run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A user's cache directory with small data sets in the place of the real ones."""
    root = tmp_path_factory.mktemp("cache")
    directory = root / "mf_aggregators"
    directory.mkdir()
    generator = np.random.default_rng(0)
    examples = []
    for split, clients in (("train", 60), ("heldout", 4), ("test", 4)):
        for client in range(clients):
            for _ in range(4):
                start = int(generator.integers(len(_WORDS)))
                words = [_WORDS[(start + i) % len(_WORDS)] for i in range(5)]
                examples.append(Example(f"{split}_{client}", split, " ".join([*words, "."])))
    fingerprint = docstrings.fingerprint(docstrings.find_packages())
    for name in (f"{datasets.DOCSTRINGS}-{fingerprint}", datasets.STACKOVERFLOW):
        path = directory / f"{name}.sqlite"
        federated_text.write(path, examples)
        # Those of StackOverflow would be downloaded.
        datasets.load_word_counts(federated_text.Contents.of(path))
    return root


@pytest.fixture
def place(
    cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pathlib.Path]:
    """The folder that a document runs in, with the files that its reader is said to have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    notes = [
        {"author": f"author {author}", "text": f"word{5 * author + i} is the word number {i}."}
        for author in range(120)
        for i in range(5)
    ]
    (tmp_path / "notes.jsonl").write_text("".join(f"{json.dumps(note)}\n" for note in notes))
    fashion_mnist_files.write(tmp_path / "fashion_mnist", 100, 10)
    yield tmp_path
    _forget_remote_workers()


def _forget_remote_workers() -> None:
    """Lets TFF compute in this process's own worker again."""
    if "simulations.workers.remote_workers" in sys.modules:
        import tensorflow_federated as tff

        from simulations.workers.remote_workers import DividedContext

        current = tff.framework.get_context_stack().current
        if isinstance(current, DividedContext):
            tff.framework.set_default_context(current.local)


class _Workers:
    """Workers of this machine in the place of those that a document names."""

    def __init__(self) -> None:
        self.processes: list[WorkerProcess] = []

    def start(self, command: _Command) -> None:
        """Starts two workers as the command says, but for the port, which may be taken."""
        _check_flags(command, command.arguments)
        for _ in range(2):
            flags = (each for each in command.arguments if not each.startswith("--port="))
            self.processes.append(WorkerProcess("localhost", free_port(), *flags))
        for process in self.processes:
            process.wait_until_ready()

    def named_in(self, text: str) -> str:
        """Returns a text with their addresses for those of other machines."""
        if not self.processes:
            return text
        return _REMOTE.sub(
            lambda match: self.processes[int(match[1]) % len(self.processes)].address, text
        )

    def end(self) -> None:
        """Ends them as their document says, by SIGTERM with status 0."""
        for process in self.processes:
            assert process.ended(signal.SIGTERM) == 0, process.message()

    def kill(self) -> None:
        """Ends them whatever happened."""
        for process in self.processes:
            process.kill()


# What a reader brings along


def _given_to_readme() -> dict[str, Any]:
    import tensorflow as tf
    import tensorflow_federated as tff

    def model_fn() -> Any:
        inputs = tf.keras.Input((3,))
        return tff.learning.models.from_keras_model(
            tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs)),
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
        )

    return {"model_fn": model_fn}


def _given_to_builders() -> dict[str, Any]:
    import tensorflow as tf

    def client_dataset(client_id: str, round_index: int) -> Any:
        generator = np.random.default_rng([int(client_id), round_index])
        examples = generator.normal(size=(4, 3)).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((examples, examples[:, :1])).batch(4)

    return {
        **_given_to_readme(),
        "client_ids": [str(number) for number in range(60)],
        "client_dataset": client_dataset,
    }


def _given_to_tasks() -> dict[str, Any]:
    from simulations.examples import digits
    from simulations.training.federated_task import image_task

    clients = digits.clients(digits.load(), 10)
    made = image_task(clients, digits.keras_model, 10, 3, 0)
    return {
        **vars(digits),
        "clients": clients,
        "seed": 0,
        "model_fn": made.model_fn,
        "evaluate": made.evaluate,
    }


def _given_to_recipe() -> dict[str, Any]:
    import tensorflow_federated as tff

    return {"tff": tff}


_GIVEN: Mapping[str, Callable[[], dict[str, Any]]] = {
    "README.md": _given_to_readme,
    "docs/index.md": _given_to_readme,
    "docs/builders.md": _given_to_builders,
    "docs/tasks.md": _given_to_tasks,
    "docs/training-recipe.md": _given_to_recipe,
}


# Runs


@dataclasses.dataclass(frozen=True)
class _Ran:
    """A command that has been run, what it printed, and whether its flags were those printed."""

    command: _Command
    printed: str
    as_printed: bool


def _run_document(name: str, text: str, is_long_test: bool) -> None:
    module = types.ModuleType("__document__")
    module.__dict__.update(_GIVEN.get(name, dict)())
    ran: list[_Ran] = []
    shown: list[tuple[_Block, int]] = []
    workers = _Workers()
    with contextlib.ExitStack() as stack:
        stack.callback(workers.kill)
        stack.callback(plt.close, "all")
        for block in _blocks(name, text):
            if block.language == "bash":
                ran += _run_commands(block, is_long_test, workers)
            elif block.language == "python":
                is_left_out = "long" in block.marks and not is_long_test
                if is_left_out or block.marked("only parsed: "):
                    continue
                code = workers.named_in(block.text if is_long_test else block.small_text)
                exec(compile(code, block.where, "exec"), module.__dict__)
            elif block.language in ("", "text"):
                is_of_long_test = "long" in block.marks and not is_long_test
                if "a message" not in block.marks and not is_of_long_test:
                    shown.append((block, len(ran)))
            else:
                assert block.language in _FILES, f"{block.where}: no test knows {block.language}"
        workers.end()
    for block, before in shown:
        _check_printed(block, _printer_of(block, ran, before))


def _run_commands(block: _Block, is_long_test: bool, workers: _Workers) -> list[_Ran]:
    ran: list[_Ran] = []
    if "in a shell" in block.marks:
        subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)
        return ran
    for command in block.commands:
        is_parsed = bool(block.marked("only parsed: "))
        if not command.is_ours:
            assert is_parsed, f"{command}: it is run, or only parsed for a reason"
            _check_others_command(command)
            continue
        program = "python" if command.name.endswith(".py") else command.name
        assert command.words[0] == f"{_IN_THE_ENVIRONMENT}{program}", f"{command}: not on the PATH"
        _check_flags(command, command.arguments)
        if is_parsed or (block.is_long(command) and not is_long_test):
            continue
        if command.name == "start-tff-worker":
            workers.start(command)
            continue
        appended = block.appended_to(command)
        if is_long_test and "as printed in the long test" in block.marks:
            appended = []
        named = {flag.partition("=")[0] for flag in (*command.arguments, *appended)}
        if "--checkpoint" in named:
            # It has its own.
            named.add("--num_rounds")
        small = [flag for flag in _SMALL.get(command.name, ()) if flag.split("=")[0] not in named]
        replaced = {flag.partition("=")[0] for flag in appended}
        kept = [each for each in command.arguments if each.partition("=")[0] not in replaced]
        given = tuple(map(workers.named_in, (*kept, *small, *appended)))
        with last_word_model.in_place_of_the_lstm():
            printed = _call(command, given)
        ran.append(_Ran(command, printed, given == command.arguments))
    return ran


def _check_others_command(command: _Command) -> None:
    """Checks a program that is not this project's for the files and names that it is given."""
    program, *words = command.words
    name = program.rsplit("/", 1)[-1]
    assert name in ("python3", "python3.11", "uv", "pip", "ssh"), f"{command}: what is it?"
    if words[:1] == ["quickstart.py"]:
        assert (ROOT / words[0]).is_file()
        name, flags = words[1], tuple(words[2:])
        assert name == "train" or words[1:] in (["test"], ["docs"]), command
        if flags:
            # It hands them over.
            _check_flags(_Command(command.where, ("run-stackoverflow",)), flags)
    for option, value in itertools.pairwise(words):
        if option == "-r":
            assert (ROOT / value).is_file(), command
        if option == "--extra":
            extras = importlib.metadata.metadata("mf-aggregators").get_all("Provides-Extra")
            assert value in (extras or []), command


def _printer_of(block: _Block, ran: list[_Ran], before: int) -> _Ran:
    if not (words := block.marked("output of ")):
        assert before, f"{block.where}: no command before it has printed anything"
        return ran[before - 1]
    (found,) = (each for each in ran if each.command.has(words[0]))
    return found


def _check_printed(block: _Block, ran: _Ran) -> None:
    normal = _without_blanks if ran.as_printed else _without_numbers
    shown, printed = (
        {normal(line) for line in _NEXT_LINE_OF_COMMENT.sub(" ", text).splitlines()} - {""}
        for text in (block.text, ran.printed)
    )
    all_printed = frozenset(printed)
    for line in [each for each in shown if each.endswith(_ELLIPSIS)]:
        start = line.removesuffix(_ELLIPSIS).rstrip()
        meant = {each for each in all_printed if each.startswith(start)}
        assert meant, f"{block.where}: {ran.command} prints no line that begins with {start!r}"
        shown.remove(line)
        printed -= meant - shown
    assert shown == printed, (
        f"{block.where}: of {ran.command}\nit shows {sorted(shown - printed)}\n"
        f"and not {sorted(printed - shown)}"
    )


def _without_blanks(line: str) -> str:
    return " ".join(line.split())


def _without_numbers(line: str) -> str:
    return _NUMBER.sub("#", _RUN.sub("runs/#", _without_blanks(line)))


def _is_small_in_short_test(name: str) -> bool:
    marks = [mark for block in _blocks(name, _read(name)) for mark in block.marks]
    return any(mark.startswith(("long", "as printed")) or " becomes " in mark for mark in marks)


_SMALL_IN_SHORT_TEST = [*filter(_is_small_in_short_test, _NAMES)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in _SLOW else name
        for name in _NAMES
        # The long test runs these at their size, and no test runs them small.
        if name not in _SLOW or name not in _SMALL_IN_SHORT_TEST
    ],
)
def test_documents_run_as_printed(name: str, place: pathlib.Path) -> None:
    _run_document(name, _read(name), is_long_test=False)


@pytest.mark.parametrize("name", _SLOW)
def test_commands_of_slow_documents_have_their_flags(name: str, place: pathlib.Path) -> None:
    commands = [
        command
        for block in _blocks(name, _read(name))
        if block.language == "bash"
        for command in block.commands
    ]
    assert any(command.is_ours for command in commands)
    for command in commands:
        if command.is_ours:
            _check_flags(command, command.arguments)
        else:
            _check_others_command(command)


# Those that the long test runs where not every case is asked for: training, data of one's own, an
# audit, and a run that ends early.
_SOONER = [f"docs/{name}.md" for name in ("quick-start", "tasks", "audit", "stopping")]
_AT_THEIR_SIZE = sorted(_SMALL_IN_SHORT_TEST, key=lambda name: name not in _SOONER)


@pytest.mark.long
@pytest.mark.parametrize("name", _AT_THEIR_SIZE[: of_many(len(_AT_THEIR_SIZE), len(_SOONER))])
def test_documents_run_at_their_size(name: str, place: pathlib.Path) -> None:
    _run_document(name, _read(name), is_long_test=True)


# What is not run


def test_the_ledger_that_is_shown_is_read(tmp_path: pathlib.Path) -> None:
    (shown,) = (
        block
        for block in _all_blocks()
        if block.language == "csv" and block.text.startswith("client")
    )
    (tmp_path / "ledger.csv").write_text(shown.text, encoding="utf-8")
    record = ledgers.load(tmp_path / "ledger.csv", num_rounds=4)
    assert record.client_ids == ("ada", "Bo, the second")
    assert [list(rounds) for rounds in record.rounds_of_clients] == [[0], [3]]


def test_tests_that_documents_name_are_there() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    known = {name for source in sources for name in re.findall(r"def (test_\w+)\(", source)}
    named = {
        name
        for document in (*_NAMES, *_OF_DEVELOPERS)
        for name in re.findall(r"`(test_\w+(?:\.py)?)`", _read(document))
    }
    assert named
    assert named <= known | files


def test_flags_in_sentences_are_those_of_commands() -> None:
    known = {
        name: {*console_commands.flags_of(name), "help", "version"} for name in _our_commands()
    }
    of_all = set().union(*known.values())
    num_commands = 0
    for name in _NAMES:
        # What stands between single backquotes.
        for code in re.findall(r"`([^`]+)`", _FENCE.sub("", _read(name))):
            code = " ".join(code.split())
            command = _Command(name, tuple(shlex.split(code)) if " --" in code else (code,))
            given = [word for word in command.words if word.startswith("--")]
            if command.is_ours:
                num_commands += bool(given)
                # A flag without its value is named, and not given.
                if values := tuple(flag for flag in given if re.search(r"=[^A-Z]", flag)):
                    with mock.patch.object(command_line, "_required", return_value=[]):
                        _check_flags(command, values)
            elif not command.words[0].startswith("--"):
                continue
            for flag in set(given).difference(_OTHERS_FLAGS):
                words = known.get(command.name, of_all)
                assert flag.removeprefix("--").partition("=")[0] in words, f"{name}: {code}"
    assert num_commands >= 5


@pytest.mark.parametrize("name", _OF_DEVELOPERS)
def test_documents_of_developers_name_files_that_are_there(name: str) -> None:
    prose = _FENCE.sub("", _read(name))
    files = re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|cff|yml|toml))`", prose)
    for path in (*files, *re.findall(r"\]\((?!https://)([^)#]+)", prose)):
        assert any((ROOT / folder / path).exists() for folder in (".", "mf_aggregators")), path
