"""What the documents print: their fenced blocks, and what a test is told of them.

A block is taken as it stands. Where that would take too long, an HTML comment above its fence,
which a reader of the page does not see, says what a test does instead:

    <!-- test:
    mf-audit --mechanism=blt + --canaries=250
    -->

appends flags to each command of the block that has the words before the plus sign (the last value
of a flag counts), and

    <!-- test: only parsed: installs packages -->

leaves it with checks of its flags, for one of the reasons in ``REASONS``. ``long`` runs a block in
the long test alone, ``long: WORDS`` those of its commands that have the words, and ``as printed in
the long test`` runs it there without what is appended. ``WORDS becomes WORDS`` makes Python smaller
for the short test.
Cells of notebooks (``{code-cell}``) are blocks of Python. Those of tutorials run in the long test
alone.

``output of WORDS`` stands above text that another command has printed than the last one, and
``a message`` above one of the code's own, which no command here brings about.
"""

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Why commands are not run, not even small, and for how many blocks of all documents.
REASONS = {
    "installs packages": 5,
    "needs other machines": 1,
    "trains for hours": 1,
}

LONGEST_LINE = 100

_FENCED_OR_COMMENT = re.compile(r"^```.*?^```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
_BARE_LINK = re.compile(r"!?\[[^\]]*\]\([^)]*\)")
_FENCE = re.compile(
    r"(?:^<!-- test:(?P<marker>[^>]*?)-->\n\n?)?"
    r"^```(?P<language>\{code-cell\}[ \w]*|\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_CELL = "{code-cell}"
_OPTIONS_OF_CELL = re.compile(r"\A(?::.*\n)+\n?")
_TUTORIALS = "docs/tutorials"
# What the build of the site writes there.
_GENERATED = ("docs/mechanisms/index.md",)
_ONLY_PARSED = "only parsed: "
_OUTPUT_OF = "output of "
_LONG = "long"
_LONG_COMMANDS = "long: "
_BECOMES = " becomes "
_MESSAGE = "a message"
_AS_PRINTED = "as printed in the long test"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line of a document.

    Attributes:
      where: The document and the line of its block.
      words: As a shell splits it, without comments.
    """

    where: str
    words: tuple[str, ...]

    @property
    def is_script(self) -> bool:
        """Whether it is a script that Python runs."""
        is_python = self._program.startswith("python") and len(self.words) > 1
        return is_python and self.words[1].endswith(".py")

    @property
    def name(self) -> str:
        """The program without its directory; for a script that Python runs, the script."""
        return self.words[1] if self.is_script else self._program

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words behind the name."""
        return self.words[2:] if self.is_script else self.words[1:]

    @property
    def _program(self) -> str:
        return self.words[0].rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block and its marker.

    Attributes:
      document: Its path below the project's folder.
      line: The line of its fence, from 1.
      language: What stands behind the fence.
      text: What is between the fences.
      only_parsed: Why it is not run; None for a block that is.
      is_long: Whether the long test alone runs it.
      long_commands: Words of commands that the long test alone runs.
      as_printed_when_long: Whether the long test runs it without ``appended``.
      small_text: What the short test runs in place of ``text``; None for the same.
      is_message: Whether it is a message of the code, and no command's result.
      output_of: Words of the command that printed it; None for the one before it.
      appended: Words of a command, and flags for the commands that have them all.
    """

    document: str
    line: int
    language: str
    text: str
    only_parsed: str | None = None
    is_long: bool = False
    long_commands: tuple[frozenset[str], ...] = ()
    as_printed_when_long: bool = False
    small_text: str | None = None
    is_message: bool = False
    output_of: str | None = None
    appended: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = ()

    @property
    def where(self) -> str:
        """The document and the line."""
        return f"{self.document}:{self.line}"

    def commands(self) -> list[Command]:
        """Returns the commands of a block of bash, in order.

        Raises:
          ValueError: If quotes do not close.
        """
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [tuple(shlex.split(line, comments=True)) for line in lines]
        return [Command(self.where, each) for each in words if each]

    def is_long_command(self, command: Command) -> bool:
        """Returns whether the long test alone runs one of the block's commands."""
        return self.is_long or any(_has(command, words) for words in self.long_commands)

    def appended_to(self, command: Command) -> list[str]:
        """Returns the flags that the marker appends to one of the block's commands."""
        return [flag for words, flags in self.appended if _has(command, words) for flag in flags]


def names() -> list[str]:
    """Returns the paths of all documents below the project's folder."""
    found = [ROOT / "README.md"]
    for folder in ("docs", "docs/mechanisms", _TUTORIALS):
        found += sorted((ROOT / folder).glob("*.md"))
    return [name for path in found if (name := str(path.relative_to(ROOT))) not in _GENERATED]


def names_of_long() -> list[str]:
    """Returns the documents that the long test runs otherwise than the short one."""
    return [
        name
        for name in names()
        if any(
            each.is_long or each.long_commands or each.as_printed_when_long or each.small_text
            for each in blocks(name, read(name))
        )
    ]


def read(name: str) -> str:
    """Returns a document's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, text: str) -> list[Block]:
    """Returns the fenced blocks of a document, in order.

    Args:
      name: The document, for messages.
      text: What it holds.

    Raises:
      ValueError: If a marker stands above no block, or says what no test knows.
    """
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        language, content = match["language"], match["text"]
        if language.startswith(_CELL):
            language, content = "python", _OPTIONS_OF_CELL.sub("", content)
        is_long = name.startswith(_TUTORIALS)
        block = Block(name, line, language, content, is_long=is_long)
        found.append(_marked(block, match["marker"] or ""))
    num_markers = len(re.findall(r"<!--\s*test", text))
    if sum(match["marker"] is not None for match in _FENCE.finditer(text)) != num_markers:
        raise ValueError(f"{name}: a marker of a test is not right above a block")
    return found


def over_long_lines(text: str) -> list[int]:
    """Returns which lines of a document's prose are longer than ``LONGEST_LINE``, from 1.

    Rows of tables, lines of fenced blocks and of HTML comments, and lines that are nothing but a
    link or an image may be of any length, because they cannot be wrapped.

    Args:
      text: What the document holds.
    """
    prose = _FENCED_OR_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    return [
        number
        for number, line in enumerate(prose.splitlines(), 1)
        if len(line) > LONGEST_LINE
        and not line.lstrip().startswith("|")
        and not _BARE_LINK.fullmatch(line.strip())
    ]


def without_blocks(text: str) -> str:
    """Returns the prose of a document."""
    return _FENCE.sub("", text)


def _marked(block: Block, marker: str) -> Block:
    for line in filter(None, map(str.strip, marker.splitlines())):
        if line.startswith(_ONLY_PARSED):
            block = dataclasses.replace(block, only_parsed=line.removeprefix(_ONLY_PARSED))
            if block.only_parsed not in REASONS:
                raise ValueError(f"{block.where}: {block.only_parsed!r} is no reason")
        elif line.startswith(_OUTPUT_OF):
            block = dataclasses.replace(block, output_of=line.removeprefix(_OUTPUT_OF))
        elif line == _MESSAGE:
            block = dataclasses.replace(block, is_message=True)
        elif line == _LONG:
            block = dataclasses.replace(block, is_long=True)
        elif line.startswith(_LONG_COMMANDS):
            long_words = frozenset(shlex.split(line.removeprefix(_LONG_COMMANDS)))
            if not any(_has(command, long_words) for command in block.commands()):
                raise ValueError(f"{block.where}: no command has the words of {line!r}")
            block = dataclasses.replace(block, long_commands=(*block.long_commands, long_words))
        elif line == _AS_PRINTED:
            block = dataclasses.replace(block, as_printed_when_long=True)
        elif _BECOMES in line:
            before, after = line.split(_BECOMES)
            if block.text.count(before) != 1:
                raise ValueError(f"{block.where}: {before!r} is not there once")
            block = dataclasses.replace(block, small_text=block.text.replace(before, after))
        elif " + " in line:
            words, flags = (tuple(shlex.split(part)) for part in line.split(" + "))
            if not any(_has(command, words) for command in block.commands()):
                raise ValueError(f"{block.where}: no command has the words of {line!r}")
            pair = (frozenset(words), flags)
            block = dataclasses.replace(block, appended=(*block.appended, pair))
        else:
            raise ValueError(f"{block.where}: no test knows what {line!r} means")
    return block


def _has(command: Command, words: Iterable[str]) -> bool:
    return {command.name, *command.arguments}.issuperset(words)
