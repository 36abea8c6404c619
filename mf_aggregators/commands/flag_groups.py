"""Flags of commands, each defined in the group of its subject, under which ``--help`` lists it."""

from collections.abc import Mapping, Sequence

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
        flags.DEFINE_string(
            name,
            default,
            self._help(name, meaning),
            flag_values=self._values,
            module_name=self._title,
        )

    def integer(
        self, name: str, meaning: str, default: int | None = None, lower_bound: int | None = None
    ) -> None:
        """Defines a flag that takes an integer."""
        flags.DEFINE_integer(
            name,
            default,
            self._help(name, meaning),
            lower_bound=lower_bound,
            flag_values=self._values,
            module_name=self._title,
        )

    def number(self, name: str, meaning: str, default: float | None = None) -> None:
        """Defines a flag that takes a real number."""
        flags.DEFINE_float(
            name,
            default,
            self._help(name, meaning),
            flag_values=self._values,
            module_name=self._title,
        )

    def boolean(self, name: str, meaning: str, default: bool | None = None) -> None:
        """Defines a flag that is set by ``--name`` and unset by ``--noname``."""
        flags.DEFINE_bool(
            name,
            default,
            self._help(name, meaning),
            flag_values=self._values,
            module_name=self._title,
        )

    def choice(
        self, name: str, choices: Sequence[str], meaning: str, default: str | None = None
    ) -> None:
        """Defines a flag that takes one of several words."""
        flags.DEFINE_enum(
            name,
            default,
            list(choices),
            self._help(name, meaning),
            flag_values=self._values,
            module_name=self._title,
        )

    def words(self, name: str, meaning: str, default: Sequence[str] | None = None) -> None:
        """Defines a flag that takes words with commas between them."""
        flags.DEFINE_list(
            name,
            None if default is None else list(default),
            self._help(name, meaning),
            flag_values=self._values,
            module_name=self._title,
        )

    def repeated(self, name: str, meaning: str) -> None:
        """Defines a flag that may be given several times; its value is the list of texts."""
        flags.DEFINE_multi_string(
            name,
            [],
            self._help(name, meaning),
            flag_values=self._values,
            module_name=self._title,
        )

    def _help(self, name: str, meaning: str) -> str:
        return " ".join(filter(None, [meaning, self._default_texts.get(name)]))
