"""Flags of commands, each defined in the group of its subject, and the help that lists them."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

# The attribute of a flag that lists the flags of which one is required.
_ALTERNATIVES = "required_alternatives"


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


def usage(program: str, values: flags.FlagValues) -> str:
    """Returns the line that says how a command is called, with the flags that it requires.

    Args:
      program: The command's name.
      values: Its flags, not necessarily parsed.
    """
    words = ["Usage:", program]
    for names in required(values):
        given = "|".join(f"--{name}=..." for name in names)
        words.append(given if len(names) == 1 else f"({given})")
    return " ".join([*words, "[--name=value ...]"])


def help_text(program: str, description: str, values: flags.FlagValues) -> str:
    """Returns the help of a command: what it does, its usage, and absl's help of its flags.

    Args:
      program: The command's name.
      description: What it does, with examples, as the module says.
      values: Its flags, not necessarily parsed.

    Returns:
      Paragraphs. The flags are listed by group, in the order of its first definition.
    """
    groups = [values.module_help(title).strip() for title in values.flags_by_module_dict()]
    flagfile = "--flagfile=FILE reads flags from a file, one a line."
    return "\n\n".join([description.strip(), usage(program, values), *groups, flagfile])
