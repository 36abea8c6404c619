"""README.md and docs/, run as they are printed.

Commands and Python blocks of a document run in its order, in one folder. The lines of text that it
shows have to be those that were printed: with their numbers where a command ran with the flags that
are printed and no others, and without them elsewhere.
"""

import ast
import collections
import contextlib
import functools
import importlib.metadata
import itertools
import json
import pathlib
import re
import shlex
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pytest

from mf_aggregators.privacy import ledgers
from stackoverflow_nwp import datasets, docstrings, federated_text, vocabulary
from stackoverflow_nwp.federated_text import Example
from tests import document_commands, documents
from tests.document_commands import Ran
from tests.documents import ROOT, Block, Command
from tests.simulations.examples.cifar10_classification import cifar10_files
from tests.simulations.worker_processes import WorkerProcess, free_port

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
    "run-cifar10": (
        "--num_rounds=4",
        "--clients_per_round=2",
        "--evaluate_every=4",
        "--cifar10_dir=cifar10",
    ),
}
_WORDS = ("the", "model", "returns", "a", "list", "of", ".", "values", "for", "each")
# Flags of pip and of the tests.
_OTHERS_FLAGS = ("--no-deps", "--all")
# Contents of files, which tests of their own read.
_FILES = ("csv", "toml")
_REMOTE = re.compile(r"\b10\.0\.0\.(\d+):8000\b")
_NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\b")
# Where lines of a comment end depends on the numbers in them.
_NEXT_LINE_OF_COMMENT = re.compile(r"\n[ ]*# ")
_RUN = re.compile(r"\bruns/[\w:-]+")


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
        vocabulary.load_word_counts(path)
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
    cifar10_files.write_binary(tmp_path / "cifar10", 20)
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

    def start(self, command: Command) -> None:
        """Starts two workers as the command says, but for the port, which may be taken."""
        document_commands.check_flags(command)
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
    from simulations.examples.digit_classification import data, run_digits, task

    forms = data.load()
    made = task.federated_task(forms, 10, 10, 3, 0)
    return {
        **vars(run_digits),
        "clients": data.clients(forms, 10),
        "seed": 0,
        "model_fn": made.model_fn,
        "keras_model": task.keras_model,
        "evaluate": made.evaluate,
    }


def _given_to_recipe() -> dict[str, Any]:
    import tensorflow_federated as tff

    return {"tff": tff}


_GIVEN: Mapping[str, Callable[[], dict[str, Any]]] = {
    "README.md": _given_to_readme,
    "docs/builders.md": _given_to_builders,
    "docs/tasks.md": _given_to_tasks,
    "docs/training-recipe.md": _given_to_recipe,
}


# Blocks


def _run_document(name: str, is_long_test: bool) -> None:
    module = types.ModuleType("__document__")
    module.__dict__.update(_GIVEN.get(name, dict)())
    ran: list[Ran] = []
    shown: list[tuple[Block, int]] = []
    workers = _Workers()
    with contextlib.ExitStack() as stack:
        stack.callback(workers.kill)
        stack.callback(plt.close, "all")
        for block in documents.blocks(name, documents.read(name)):
            if block.language == "bash":
                ran += _run_commands(block, is_long_test, workers)
            elif block.language == "python":
                if block.is_long and not is_long_test:
                    continue
                text = block.text if is_long_test else block.small_text or block.text
                exec(compile(workers.named_in(text), block.where, "exec"), module.__dict__)
            elif block.language in ("", "text"):
                shown.append((block, len(ran)))
            else:
                assert block.language in _FILES, f"{block.where}: no test knows {block.language}"
        workers.end()
    for block, before in shown:
        if not block.is_message:
            _check_printed(block, _printer_of(block, ran, before))


def _run_commands(block: Block, is_long_test: bool, workers: _Workers) -> list[Ran]:
    ran = []
    for command in block.commands():
        if not document_commands.is_ours(command):
            assert block.only_parsed, f"{command}: it is run, or only parsed for a reason"
            _check_others_command(command)
            continue
        document_commands.check_runs_from_the_clone(command)
        document_commands.check_flags(command)
        if block.only_parsed or (block.is_long_command(command) and not is_long_test):
            continue
        if command.name == "start-tff-worker":
            workers.start(command)
            continue
        appended = block.appended_to(command)
        if is_long_test and block.as_printed_when_long:
            appended = []
        named = {flag.partition("=")[0] for flag in (*command.arguments, *appended)}
        small = [flag for flag in _SMALL.get(command.name, ()) if flag.split("=")[0] not in named]
        with_workers = [workers.named_in(word) for word in (*command.arguments, *small, *appended)]
        with contextlib.ExitStack() as stack:
            if command.name == "run-stackoverflow" and not is_long_test:
                stack.enter_context(_without_lstm())
            ran.append(document_commands.run(command, with_workers))
    return ran


@contextlib.contextmanager
def _without_lstm() -> Iterator[None]:
    """Lets next words follow from the last word alone: TensorFlow traces an LSTM for long."""

    def keras_model(task: Any) -> Any:
        import tensorflow as tf

        size = task.vocab_size + task.special_tokens.get_number_of_special_tokens()
        inputs = tf.keras.Input((None,))
        return tf.keras.Model(inputs, tf.keras.layers.Embedding(size, size)(inputs))

    with mock.patch("stackoverflow_nwp.task.NextWordTask.keras_model", keras_model):
        yield


def _check_others_command(command: Command) -> None:
    """Checks a program that is not this project's for the files and names that it is given."""
    program, *words = command.words
    name = program.rsplit("/", 1)[-1]
    assert name in ("python3", "python3.11", "uv", "pip", "ssh"), f"{command}: what is it?"
    if words[:1] == ["quickstart.py"]:
        assert (ROOT / words[0]).is_file()
        assert words[1:] in (["train"], ["test"], ["docs"]), command
    for option, value in itertools.pairwise(words):
        if option == "-r":
            assert (ROOT / value).is_file(), command
        if option == "--extra":
            extras = importlib.metadata.metadata("mf-aggregators").get_all("Provides-Extra")
            assert value in (extras or []), command


def _printer_of(block: Block, ran: list[Ran], before: int) -> Ran:
    if block.output_of is None:
        assert before, f"{block.where}: no command before it has printed anything"
        return ran[before - 1]
    words = set(block.output_of.split())
    found = [each for each in ran if words <= {each.command.name, *each.command.arguments}]
    assert len(found) == 1, f"{block.where}: {len(found)} commands have the words of its marker"
    return found[0]


def _check_printed(block: Block, ran: Ran) -> None:
    normal = _without_blanks if ran.as_printed else _without_numbers
    shown, printed = (
        {normal(line) for line in _NEXT_LINE_OF_COMMENT.sub(" ", text).splitlines()} - {""}
        for text in (block.text, ran.printed)
    )
    assert shown == printed, (
        f"{block.where}: of {ran.command}\nit shows {sorted(shown - printed)}\n"
        f"and not {sorted(printed - shown)}"
    )


def _without_blanks(line: str) -> str:
    return " ".join(line.split())


def _without_numbers(line: str) -> str:
    return _NUMBER.sub("#", _RUN.sub("runs/#", _without_blanks(line)))


@pytest.mark.parametrize("name", documents.names())
def test_documents_run_as_printed(name: str, place: pathlib.Path) -> None:
    _run_document(name, is_long_test=False)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", documents.names_of_long())
def test_documents_run_at_their_size(name: str, place: pathlib.Path) -> None:
    _run_document(name, is_long_test=True)


# What is not run


def _blocks() -> list[Block]:
    return [
        block
        for name in documents.names()
        for block in documents.blocks(name, documents.read(name))
    ]


def test_few_blocks_are_only_parsed() -> None:
    found = collections.Counter(block.only_parsed for block in _blocks() if block.only_parsed)

    assert found == documents.REASONS


def test_messages_are_those_of_the_code() -> None:
    shown = [block for block in _blocks() if block.is_message]
    patterns = _messages_of_the_code()

    assert shown
    for block in shown:
        text = block.text.strip()
        if text.endswith("..."):
            beginning = re.escape(text.removesuffix("...").strip())
            assert any(pattern.startswith(beginning) for pattern in patterns), block.where
        else:
            assert any(re.fullmatch(pattern, text) for pattern in patterns), block.where


def _messages_of_the_code() -> list[str]:
    """Patterns of the strings in the code that are long enough to be a message."""
    found = []
    for package in ("mf_aggregators", "simulations", "stackoverflow_nwp"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                parts: list[ast.expr] = []
                if isinstance(node, ast.JoinedStr):
                    parts = node.values
                elif isinstance(node, ast.Constant):
                    parts = [node]
                texts = [
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+"
                    for part in parts
                    if isinstance(part, ast.Constant | ast.FormattedValue)
                ]
                pattern = "".join(texts)
                if len(pattern.replace(".+", "")) > 40:
                    found.append(pattern)
    return found


def test_the_ledger_that_is_shown_is_read(tmp_path: pathlib.Path) -> None:
    (shown,) = (block for block in _blocks() if block.language == "csv")
    (tmp_path / "ledger.csv").write_text(shown.text, encoding="utf-8")

    record = ledgers.load(tmp_path / "ledger.csv", num_rounds=4)

    assert record.client_ids == ("ada", "Bo, the second")
    assert [list(rounds) for rounds in record.rounds_of_clients] == [[0], [3]]


def test_overrides_are_those_of_the_project() -> None:
    (shown,) = (block for block in _blocks() if "override-dependencies" in block.text)
    own = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    # A project of one's own has no package that needs sqlalchemy, as the site's tools do here.
    assert _overrides(shown.text) == [*_overrides(own), "sqlalchemy ; python_version < '0'"]
    assert len(_overrides(own)) == 2


def _overrides(text: str) -> list[str]:
    match = re.search(r"^override-dependencies = (\[.*?^\])", text, re.DOTALL | re.MULTILINE)
    assert match is not None
    found: list[str] = ast.literal_eval(match[1])
    return found


# Commands and flags in sentences


def _in_sentences() -> list[tuple[str, str]]:
    """Documents, and what stands between single backquotes in them, on one line."""
    return [
        (name, " ".join(code.split()))
        for name in documents.names()
        for code in re.findall(r"`([^`]+)`", documents.without_blocks(documents.read(name)))
    ]


def test_flags_in_sentences_are_those_of_commands() -> None:
    of_all = frozenset().union(*map(_flags_of, document_commands.all_commands()))
    num_commands = 0

    for name, code in _in_sentences():
        command = Command(name, tuple(shlex.split(code)) if " --" in code else (code,))
        given = [word for word in command.words if word.startswith("--")]
        if document_commands.is_ours(command):
            num_commands += bool(given)
            # A flag without its value is named, and not given.
            values = [flag for flag in given if re.search(r"=[^A-Z]", flag)]
            if values:
                document_commands.check_some_flags(command, values)
            known = _flags_of(command)
        elif command.words[0].startswith("--"):
            known = of_all
        else:
            continue
        for flag in given:
            assert _name_of(flag) in {*known, "help", "version"} or flag in _OTHERS_FLAGS, (
                f"{name}: {code}"
            )

    assert num_commands >= 5


@functools.cache
def _flags_of(command: Command) -> frozenset[str]:
    return document_commands.flag_names(command)


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").partition("=")[0]


# Lines of prose


@pytest.mark.parametrize("name", documents.names())
def test_lines_of_prose_are_short(name: str) -> None:
    over_long = documents.over_long_lines(documents.read(name))

    assert not over_long, f"{name} has lines of more than {documents.LONGEST_LINE} characters"


# The checks themselves


@pytest.mark.parametrize(
    "text",
    [
        "```bash\n.venv/bin/mf-report --no_such_flag=1\n```\n",
        "```bash\n.venv/bin/mf-factorize --mechanism=best\n```\n",
        "```bash\nmf-factorize --mechanism=identity --num_rounds=2 --output=x\n```\n",
        "```bash\n.venv/bin/python benchmarks/nothing.py\n```\n",
        "```bash\npip install .\n```\n",
        "```bash\n.venv/bin/run-digits --target_epsilon=1 --noise_multiplier=1\n```\n",
        '```bash\n.venv/bin/compare-mechanisms --output_dir=x --flags="--vocabulary=8"\n```\n',
        "```bash\n.venv/bin/reproduce-paper --only=bandmf-table-99\n```\n",
        "```bash\n.venv/bin/reproduce-paper --list\n```\n\n```text\nbandmf-table-99\n```\n",
        "```python\nimport mf_aggregators as mfa\n\nmfa.workloads.prefix_product(3)\n```\n",
        "```ruby\nputs 1\n```\n",
    ],
)
def test_what_is_wrong_in_a_document_is_found(
    text: str, place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "read", lambda name: text)
    # What is only parsed is checked as well.
    for marked in (text, text.replace("```bash", "<!-- test: long -->\n```bash", 1)):
        monkeypatch.setattr(documents, "read", lambda name, marked=marked: marked)
        with pytest.raises((AssertionError, AttributeError)):
            _run_document("docs/none.md", is_long_test=False)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- test: only parsed: nobody likes it -->\n```bash\nls\n```\n",
        "<!-- test: only parsed: installs packages -->\n\nWords.\n\n```bash\nls\n```\n",
        "<!-- test: faster -->\n```bash\nls\n```\n",
        "<!-- test:\nmf-audit + --canaries=2\n-->\n```bash\n.venv/bin/mf-plan\n```\n",
        "<!-- test:\n9 becomes 3\n-->\n```python\nprint(8)\n```\n",
    ],
)
def test_a_marker_that_means_nothing_is_found(text: str) -> None:
    with pytest.raises(ValueError, match=r"^docs/none\.md"):
        documents.blocks("docs/none.md", text)


_LONG = "word " * 20 + "w"


@pytest.mark.parametrize(
    ("text", "over_long"),
    [
        (f"{_LONG[:-1]}\n", []),
        (f"{_LONG[:-1]}\n{_LONG}\n", [2]),
        (f"# {_LONG}\n\n- {_LONG}\n", [1, 3]),
        (f"| {_LONG} |\n", []),
        (f"```bash\n{_LONG}\n```\n{_LONG}\n", [4]),
        (f"<!-- test:\n{_LONG}\n-->\n{_LONG}\n", [4]),
        (f"[{_LONG}](a.md)\n![{_LONG}](a.png)\n", []),
        (f"See [{_LONG}](a.md)\n", [1]),
    ],
)
def test_lines_that_are_too_long_are_found(text: str, over_long: list[int]) -> None:
    assert documents.over_long_lines(text) == over_long
