"""Flags of commands, each defined in the group of its subject, under which ``--help`` lists it."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

# The attribute of a flag that lists the flags of which one is required.
_ALTERNATIVES = "required_alternatives"


def require(values: flags.FlagValues, *names: str) -> None:
    """Says that a command needs one of some flags; ``command_line.run`` checks all that it needs.

    Args:
      values: Where they are defined already.
      *names: Their names: one for a flag that cannot be left out.
    """
    setattr(values[names[0]], _ALTERNATIVES, names)


def required(values: flags.FlagValues) -> list[tuple[str, ...]]:
    """Returns what :func:`require` was told of flags, in the order of their definition.

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
    """Resolves paths: in one place, so that what is checked is what is written."""

    def parse(self, argument: str) -> str:
        return resolved_path(argument)

    def flag_type(self) -> str:
        return "path"


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
        """Defines a flag that takes any text."""
        self._define(flags.DEFINE_string, name, meaning, default)

    def path(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes the path of a file or directory; see ``resolved_path``."""
        self._define(_define_path, name, meaning, default)

    def integer(
        self, name: str, meaning: str, default: int | None = None, lower_bound: int | None = None
    ) -> None:
        """Defines a flag that takes an integer."""
        self._define(flags.DEFINE_integer, name, meaning, default, lower_bound=lower_bound)

    def number(self, name: str, meaning: str, default: float | None = None) -> None:
        """Defines a flag that takes a real number."""
        self._define(flags.DEFINE_float, name, meaning, default)

    def boolean(self, name: str, meaning: str, default: bool | None = None) -> None:
        """Defines a flag that is set by ``--name`` and unset by ``--noname``."""
        self._define(flags.DEFINE_bool, name, meaning, default)

    def choice(
        self, name: str, choices: Sequence[str], meaning: str, default: str | None = None
    ) -> None:
        """Defines a flag that takes one of several words."""
        self._define(flags.DEFINE_enum, name, meaning, default, enum_values=list(choices))

    def words(self, name: str, meaning: str, default: Sequence[str] | None = None) -> None:
        """Defines a flag that takes words with commas between them."""
        words = None if default is None else list(default)
        self._define(flags.DEFINE_list, name, meaning, words)

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


def _define_path(name: str, default: str | None, help: str, **others: Any) -> None:
    flags.DEFINE(
        _PathParser(), name, default, help, serializer=flags.ArgumentSerializer(), **others
    )


def _define_paths(name: str, default: Sequence[str], help: str, **others: Any) -> None:
    flags.DEFINE_multi(
        _PathParser(), flags.ArgumentSerializer(), name, list(default), help, **others
    )
