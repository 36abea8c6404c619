"""Command-line flags that are defined as dataclass fields; docstrings have their help texts."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from absl import flags

from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Dataclass

_FLAG = "flag"
_Value = TypeVar("_Value")
_SECTION = re.compile(r"^(?:Attributes|Flags):\n((?:  .+\n)+)", re.MULTILINE)
# Matches one entry of a docstring's section, with its further lines, which are indented more.
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n {3,}.*)*)", re.MULTILINE)
_INTEGERS = (int, int | None)


@dataclasses.dataclass(frozen=True)
class Flag:
    """Properties of a dataclass field that is a command-line flag.

    Attributes:
      group: The title of its group of flags.
      choices: The words that the flag takes, or a function that returns them; None for any value.
      is_path: Whether the flag's value is the path of a file or directory.
      is_of_the_run: Whether a run that is resumed must keep its value.
      is_positive: Whether the flag's value must be above 0.
      least: The least value; None for any.
      most: The largest value; None for any.
      below: A number that the value must be below; None for any.
    """

    group: str
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    is_path: bool = False
    is_of_the_run: bool = True
    is_positive: bool = False
    least: float | None = None
    most: float | None = None
    below: float | None = None


def flag(
    group: str,
    default: _Value = dataclasses.MISSING,  # type: ignore[assignment]  # As in dataclasses.field.
    **details: object,
) -> _Value:
    """Returns a dataclass field that is a flag; ``details`` are attributes of :class:`Flag`."""
    found = Flag(group, **details)  # type: ignore[arg-type]  # Flag's attributes differ in type.
    return dataclasses.field(default=default, metadata={_FLAG: found})


def fields_of(documented: Dataclass | type) -> Mapping[str, tuple[Flag, dataclasses.Field]]:
    """Returns, by name, the flags of a dataclass or its instance, as pairs (properties, field)."""
    every = [field for field in dataclasses.fields(documented) if _FLAG in field.metadata]
    return {each.name: (each.metadata[_FLAG], each) for each in every}


def check(made: Dataclass, prefix: str = "") -> None:
    """Raises ValueError if a field's value is not a number in the range of its flag.

    Args:
      made: An instance of a dataclass.
      prefix: What the message writes before the name of the field.
    """
    for own, (details, field) in fields_of(made).items():
        name, value = f"{prefix}{own}", getattr(made, own)
        if value is None:
            continue
        if details.is_positive and field.type in _INTEGERS:
            numbers.positive_integer(value, name)
        elif details.is_positive:
            numbers.positive_number(value, name)
        elif details.least is not None and (numbers.finite_number(value, name) < details.least):
            raise ValueError(f"{name} must be at least {details.least:g}, found {value}.")
        if details.most is not None and value > details.most:
            raise ValueError(f"{name} must be at most {details.most:g}, found {value}.")
        if details.below is not None and value >= details.below:
            raise ValueError(f"{name} must be below {details.below:g}, found {value}.")


def texts_of(documented: object) -> dict[str, str]:
    """Returns the help texts in the ``Attributes:`` or ``Flags:`` section of a docstring, by name.

    Args:
      documented: A class or a function whose docstring has one of the two sections.
    """
    section = _SECTION.search(f"{inspect.getdoc(documented)}\n")
    assert section is not None
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section[1])}


def define(
    values: flags.FlagValues,
    documented: type,
    groups: Collection[str],
    default_texts: Mapping[str, str] | None = None,
) -> None:
    """Defines command-line flags for those fields of a dataclass that belong to given groups.

    Args:
      values: The absl flag values to define the flags in.
      documented: The dataclass, whose docstring has their help.
      groups: The titles of the groups.
      default_texts: The help on defaults that other flags decide, by name.
    """
    texts = texts_of(documented)
    for name, (details, field) in fields_of(documented).items():
        if details.group not in groups:
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        group, text = FlagGroup(values, details.group, default_texts or {}), texts[name]
        kind = field.type
        if details.choices is not None:
            choices = details.choices() if callable(details.choices) else details.choices
            group.choice(name, choices, text, default)
        elif kind is bool:
            group.boolean(name, text, default)
        elif kind in _INTEGERS:
            group.integer(name, text, default)
        elif kind in (float, float | None):
            group.number(name, text, default)
        elif details.is_path:
            group.path(name, text, default)
        elif kind == float | str:
            group.number_or_word(name, text, default)
        elif kind in (tuple[float, ...], tuple[float, ...] | None):
            group.words(name, text, default and [f"{each:g}" for each in default])
        else:
            group.string(name, text, default)
