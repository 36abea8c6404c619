"""Flags of commands, each defined in the group of its subject, under which ``--help`` lists it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags


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

    def repeated(self, name: str, meaning: str) -> None:
        """Defines a flag that may be given several times; its value is the list of texts."""
        self._define(flags.DEFINE_multi_string, name, meaning, [])

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
