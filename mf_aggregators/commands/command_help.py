"""What ``--help`` prints: what a command does, its flags by subject, and examples.

A command's description is text in paragraphs. A line ``Examples:`` begins its last part: shell
commands, indented, which may go on after a backslash, and comments that begin with ``#``.
"""

import re
import shutil
import textwrap
from typing import Any

from absl import flags

from mf_aggregators.commands import flag_groups

_NARROWEST, _WIDEST = 40, 100
# Where the output is no terminal, or its width is unknown.
_USUAL_SIZE = (80, 24)
_INDENT = "  "
_HANGING_INDENT = "      "
_EXAMPLES = "Examples:"
# What stands for the values of required flags, by type of flag.
_PLACEHOLDERS = {
    "int": "INTEGER",
    "float": "NUMBER",
    "path": "PATH",
    "multi path": "PATH",
    "string enum": "NAME",
}
# What the shell takes for one word, quotes kept.
_SHELL_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def width() -> int:
    """Returns the columns of the terminal, within 40 to 100; 80 where there is none."""
    return min(max(shutil.get_terminal_size(_USUAL_SIZE).columns, _NARROWEST), _WIDEST)


def usage(program: str, values: flags.FlagValues) -> str:
    """Returns the line that says how a command is called: with which flags at least.

    Args:
      program: The command's name.
      values: Its flags, not necessarily parsed.
    """
    words = ["Usage:", program]
    for names in flag_groups.required(values):
        given = [f"--{name}={_placeholder(values[name])}" for name in names]
        words.append(given[0] if len(given) == 1 else f"({'|'.join(given)})")
    return " ".join([*words, "[--name=value ...]"])


def _placeholder(flag: "flags.Flag[Any]") -> str:
    """What stands for the value of a flag."""
    return _PLACEHOLDERS.get(flag.parser.flag_type(), "TEXT")


def text(program: str, description: str, values: flags.FlagValues, columns: int) -> str:
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
    paragraphs.append(_filled(usage(program, values), columns, 2 * _INDENT))
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
