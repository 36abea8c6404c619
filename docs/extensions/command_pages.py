"""Writes a page for each console command, from its ``--help``.

Pages are written into ``docs/commands/``.
"""

import contextlib
import importlib.metadata
import pathlib
import re
import sys
import sysconfig
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from unittest import mock

from absl import flags

from docs.extensions import generated_pages
from mf_aggregators.commands import command_line

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "commands"
_Define: TypeAlias = Callable[[flags.FlagValues], None]
_EXAMPLES = "\nExamples:\n"
# Matches words to set as code: quoted text, flags and names with underscores.
_CODE = re.compile(r"`[^`]+`|--\w+(?:=[\w.,|/]*\w)?|\b[a-z0-9]+_\w+\b")


def names() -> list[str]:
    """Returns the names of all console commands."""
    return sorted(entry_points())


def text(name: str) -> str:
    """Returns the page of a console command as Markdown.

    Args:
      name: The command.
    """
    description, values = _definition(name)
    body, _, examples = description.partition(_EXAMPLES)
    lines = [f"# {name}", ""]
    body = body.strip().removeprefix(f"{name}: ")
    body = body[:1].upper() + body[1:]
    for paragraph in body.split("\n\n"):
        lines += [_marked_up(" ".join(paragraph.split())), ""]
    if examples.strip():
        lines += ["## Examples", "", "```bash", _dedented(examples), "```", ""]
    lines += [
        "## Flags",
        "",
        "Each is given as `--name=value`; one that is true or false, as `--name` or `--noname`.",
        "`--flagfile=FILE` reads flags from a file, one a line.",
        "",
    ]
    for title, group in values.flags_by_module_dict().items():
        lines += [f"### {title}", ""]
        for flag in group:
            lines += [f"`--{flag.name}`", f": {_meaning(flag)}", ""]
    return "\n".join(lines)


def write(directory: pathlib.Path = _DIRECTORY) -> None:
    """Writes the pages of all commands, and removes pages of commands that do not exist any more.

    Args:
      directory: Where pages go; created if it is missing.
    """
    generated_pages.write(directory, {f"{name}.md": text(name) for name in names()}, ".md")


def entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Returns the entry points of the installed commands, by name.

    The installed distribution is read, because the metadata in a clone's folder may be left from an
    older build.
    """
    (distribution,) = importlib.metadata.Distribution.discover(
        name="mf-aggregators", path=[sysconfig.get_path("purelib")]
    )
    found = distribution.entry_points.select(group="console_scripts")
    return {each.name: each for each in found}


def _definition(name: str) -> tuple[str, flags.FlagValues]:
    """Returns the description and the flags of a command, before any flags are parsed."""
    found: list[tuple[str, flags.FlagValues]] = []

    def record(description: str, define_flags: _Define, *rest: object, **others: object) -> int:
        found.append((description, command_line.flags_of(define_flags)))
        return 0

    with (
        mock.patch.object(command_line, "run", record),
        mock.patch.object(sys, "argv", [name]),
        contextlib.suppress(SystemExit),
    ):
        entry_points()[name].load()()
    return found[0]


def _meaning(flag: flags.Flag) -> str:
    choices = getattr(flag.parser, "enum_values", None) or ()
    meaning = (flag.help or "").removeprefix(f"<{'|'.join(choices)}>: ").partition(";\n")[0]
    sentences = [_marked_up(meaning)]
    if choices:
        sentences.append(f"One of {', '.join(f'`{choice}`' for choice in choices)}.")
    default = flag.default
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, list):
        default = ",".join(default)
    if default not in (None, ""):
        sentences.append(f"Default: `{default}`.")
    return " ".join(sentences)


def _marked_up(words: str) -> str:
    """Returns plain text as Markdown: flags become code, and all other mark-up is escaped."""
    parts = []
    place = 0
    for match in _CODE.finditer(words):
        parts += [_escaped(words[place : match.start()]), f"`{match[0].strip('`')}`"]
        place = match.end()
    return "".join([*parts, _escaped(words[place:])])


def _escaped(words: str) -> str:
    return re.sub(r"([\\*_<>\[\]$|#~])", r"\\\1", words)


def _dedented(examples: str) -> str:
    lines = [line for line in examples.strip("\n").splitlines() if line.strip()]
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[margin:] for line in lines)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Sphinx extension that writes the commands' pages before Sphinx looks for sources."""
    app.connect("builder-inited", lambda app: write())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
