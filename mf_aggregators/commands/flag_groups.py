"""Flags of commands, each defined in the group of its subject, and the help that lists them.

``--help`` prints what a command does, its flags by subject, and examples. A command's description
is text in paragraphs. A line ``Examples:`` begins its last part: shell commands, indented, which
may go on after a backslash, and comments that begin with ``#``.
"""

import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

# The attribute of a flag that lists the flags of which one is required.
_ALTERNATIVES = "required_alternatives"

_NARROWEST, _WIDEST = 40, 100
# Where the output is no terminal, or its width is unknown.
_USUAL_SIZE = (80, 24)
_INDENT = "  "
_HANGING_INDENT = "      "
_EXAMPLES = "Examples:"
# Placeholders for the values of required flags, by type of flag.
_PLACEHOLDERS = {
    "int": "INTEGER",
    "float": "NUMBER",
    "path": "PATH",
    "multi path": "PATH",
    "string enum": "NAME",
}
# One word of a shell command, with its quotes.
_SHELL_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def require(values: flags.FlagValues, *names: str) -> None:
    """Requires one of some flags, which ``command_line.run`` checks.

    Args:
      values: Where they are defined already.
      *names: Their names; a single one for a flag that cannot be left out.
    """
    setattr(values[names[0]], _ALTERNATIVES, names)


def required(values: flags.FlagValues) -> list[tuple[str, ...]]:
    """Returns the flags of each :func:`require`, in the order of their definition.

    Args:
      values: The flags of a command.
    """
    defined = [flag for group in values.flags_by_module_dict().values() for flag in group]
    return [getattr(flag, _ALTERNATIVES) for flag in defined if hasattr(flag, _ALTERNATIVES)]


def resolved_path(text: str) -> str:
    """Returns a path that a user typed, with a leading ``~`` or ``~name`` replaced.

    Shells leave ``--flag=~/file`` as it is. A file whose name begins with a tilde is ``./~file``.

    Args:
      text: The path.

    Raises:
      ValueError: If it is empty, or there is no such home directory.
    """
    if not text:
        raise ValueError("it names no path. Leave the flag out, or say where.")
    if not text.startswith("~"):
        return text
    found = os.path.expanduser(text)
    if found == text:
        user = text[1:].partition(os.sep)[0]
        raise ValueError(
            f"there is no home directory {f'of {user!r}' if user else 'of this user'} for ~. Write "
            "the path in full, or ./~ for a name that begins with a tilde."
        )
    return found


class _PathParser(flags.ArgumentParser):  # type: ignore[misc, unused-ignore]
    """Resolves paths where they are parsed, so that what is checked is what is written."""

    def parse(self, argument: str) -> str:
        return resolved_path(argument)

    def flag_type(self) -> str:
        return "path"


class _OnceFlag(flags.Flag):  # type: ignore[misc, unused-ignore]
    """A flag of words, of text or of a path, of which a second one would drop the first.

    A ledger or a run that is left out makes an epsilon too small without a word. Numbers, choices
    and switches are in what is printed: of them the last one counts, so that they may be given
    after a ``--flagfile``. The same value again drops nothing.
    """

    def parse(self, argument: Any) -> None:
        first, was_given = self.value, self.present
        super().parse(argument)
        if was_given and self.value != first:
            advice = "give one"
            if isinstance(self.parser, flags.ListParser):
                advice = f"write --{self.name}={','.join([*first, *self.value])}"
            raise flags.IllegalFlagValueError(
                f"--{self.name} is given twice, and the first one would be lost: {advice}."
            )


class FlagGroup:
    """Defines the flags of one subject.

    ``--help`` lists groups, and the flags of a group, in the order in which they were first
    defined. A group may be continued elsewhere, under the same title.
    """

    def __init__(
        self,
        values: flags.FlagValues,
        title: str,
        default_texts: Mapping[str, str] | None = None,
    ) -> None:
        """Initialises the group.

        Args:
          values: Where flags are defined.
          title: The subject, such as ``Privacy``.
          default_texts: Sentences on the defaults of flags that have None here because their
            default depends on other flags, by name; each follows the meaning of its flag.
        """
        self._values = values
        self._title = title
        self._default_texts = default_texts or {}

    def string(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes any text, once."""
        self._define(_define_once, name, meaning, default, parser=flags.ArgumentParser())

    def path(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes the path of a file or directory, once (``resolved_path``)."""
        self._define(_define_once, name, meaning, default, parser=_PathParser())

    def integer(
        self, name: str, meaning: str, default: int | None = None, lower_bound: int | None = None
    ) -> None:
        """Defines a flag that takes an integer."""
        self._define(flags.DEFINE_integer, name, meaning, default, lower_bound=lower_bound)

    def number(self, name: str, meaning: str, default: float | None = None) -> None:
        """Defines a flag that takes a real number."""
        self._define(flags.DEFINE_float, name, meaning, default)

    def number_or_word(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes a number, or a word in its place; the last one given counts."""
        self._define(flags.DEFINE_string, name, meaning, default)

    def boolean(self, name: str, meaning: str, default: bool | None = None) -> None:
        """Defines a flag that is set by ``--name`` and unset by ``--noname``."""
        self._define(flags.DEFINE_bool, name, meaning, default)

    def choice(
        self, name: str, choices: Sequence[str], meaning: str, default: str | None = None
    ) -> None:
        """Defines a flag that takes one of several words."""
        self._define(flags.DEFINE_enum, name, meaning, default, enum_values=list(choices))

    def words(self, name: str, meaning: str, default: Sequence[str] | None = None) -> None:
        """Defines a flag that takes words with commas between them, once."""
        words = None if default is None else list(default)
        self._define(_define_once, name, meaning, words, parser=flags.ListParser())

    def repeated_paths(self, name: str, meaning: str) -> None:
        """Defines a flag for a path that may be given several times; its value is a list."""
        self._define(_define_paths, name, meaning, [])

    def _define(
        self, define: Callable[..., Any], name: str, meaning: str, default: Any, **options: Any
    ) -> None:
        define(
            name,
            default,
            help=" ".join(filter(None, [meaning, self._default_texts.get(name)])),
            flag_values=self._values,
            module_name=self._title,
            **options,
        )


def _define_once(
    name: str,
    default: Any,
    help: str,
    parser: flags.ArgumentParser,  # type: ignore[type-arg, unused-ignore]
    **others: Any,
) -> None:
    is_list = isinstance(parser, flags.ListParser)
    serializer = flags.CsvListSerializer(",") if is_list else flags.ArgumentSerializer()
    flags.DEFINE_flag(_OnceFlag(parser, serializer, name, default, help), **others)


def _define_paths(name: str, default: Sequence[str], help: str, **others: Any) -> None:
    flags.DEFINE_multi(
        _PathParser(), flags.ArgumentSerializer(), name, list(default), help, **others
    )


def help_width() -> int:
    """Returns the columns of the terminal, within 40 to 100; 80 where there is none."""
    return min(max(shutil.get_terminal_size(_USUAL_SIZE).columns, _NARROWEST), _WIDEST)


def usage(program: str, values: flags.FlagValues) -> str:
    """Returns the line that says how a command is called, with the flags that it requires.

    Args:
      program: The command's name.
      values: Its flags, not necessarily parsed.
    """
    words = ["Usage:", program]
    for names in required(values):
        given = [f"--{name}={_placeholder(values[name])}" for name in names]
        words.append(given[0] if len(given) == 1 else f"({'|'.join(given)})")
    return " ".join([*words, "[--name=value ...]"])


def _placeholder(flag: "flags.Flag[Any]") -> str:
    """The placeholder for the value of a flag."""
    return _PLACEHOLDERS.get(flag.parser.flag_type(), "TEXT")


def help_text(program: str, description: str, values: flags.FlagValues, columns: int) -> str:
    """Returns the help of a command.

    Args:
      program: The command's name.
      description: What it does, with examples, as the module says.
      values: Its flags, not necessarily parsed.
      columns: The longest that a line may be, where its words allow it.

    Returns:
      Paragraphs, the flags by group in the order of their definition, and the examples.
    """
    body, _, examples = description.partition(f"\n{_EXAMPLES}\n")
    paragraphs = [_filled(paragraph, columns) for paragraph in body.strip().split("\n\n")]
    # Long alternatives may be broken behind a bar.
    how = _filled(usage(program, values).replace("|", "| "), columns, 2 * _INDENT)
    paragraphs.append(how.replace("| ", "|"))
    paragraphs.append(
        _filled(
            "Flags: each is given as --name=value; one that is true or false, as --name or "
            "--noname. --flagfile=FILE reads flags from a file, one a line.",
            columns,
        )
    )
    for title, group in values.flags_by_module_dict().items():
        paragraphs.append("\n".join([title, *(_described(flag, columns) for flag in group)]))
    if examples.strip():
        lines = [_example(each, columns) for each in _joined_lines(examples)]
        paragraphs.append("\n".join([_EXAMPLES, *lines]))
    return "\n\n".join(paragraphs)


def _described(flag: "flags.Flag[Any]", columns: int) -> str:
    choices = "|".join(getattr(flag.parser, "enum_values", None) or ())
    # absl adds them to the text of a flag, as it adds that a flag may be repeated.
    meaning = (flag.help or "").removeprefix(f"<{choices}>: ").partition(";\n")[0]
    if len(choices) > columns - len(_HANGING_INDENT):
        choices = choices.replace("|", "| ")
    sentences = [f"--{flag.name}:", choices and f"{choices}.", meaning, _default(flag)]
    filled = textwrap.fill(
        " ".join(filter(None, sentences)),
        columns,
        initial_indent=_INDENT,
        subsequent_indent=_HANGING_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("| ", "|")


def _default(flag: "flags.Flag[Any]") -> str:
    default = flag.default
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, list):
        default = ",".join(default)
    return "" if default in (None, "") else f"Default: {default}."


def _filled(paragraph: str, columns: int, hanging_indent: str = "") -> str:
    return textwrap.fill(
        paragraph,
        columns,
        subsequent_indent=hanging_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _joined_lines(examples: str) -> list[str]:
    """Commands and comments, each on one line."""
    return [line.strip() for line in re.sub(r"\\\n\s*", "", examples).strip().splitlines()]


def _example(line: str, columns: int) -> str:
    if line.startswith("#"):
        return textwrap.fill(
            line, columns, initial_indent=_INDENT, subsequent_indent=f"{_INDENT}# "
        )
    rows: list[str] = []
    for word in _SHELL_WORD.findall(line):
        # Room for the backslash of a line that goes on.
        if rows and len(f"{rows[-1]} {word} \\") <= columns:
            rows[-1] += f" {word}"
        else:
            rows.append(f"{_INDENT * (2 if rows else 1)}{word}")
    return " \\\n".join(rows)
