"""The base class of guarantees: objects that only a check of the kernel makes."""

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

_Kind = TypeVar("_Kind", bound="Proved")


class Proved:
    """Numbers that were proved: a final class of them cannot be made, altered or pickled."""

    __slots__ = ()

    def __new__(cls, *arguments: object, **options: object) -> "Proved":
        """Raises TypeError: checks of the kernel make it."""
        raise TypeError(f"a check of the kernel makes a {cls.__name__}, of a claim: nothing else.")

    def __init_subclass__(cls) -> None:
        if cls.__bases__ != (Proved,):
            raise TypeError(f"{cls.__bases__[0].__name__} has no subclasses.")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of a guarantee cannot be set: check another claim.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} of a guarantee cannot be deleted.")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a guarantee is not pickled: send its claim, and check that again.")

    def __copy__(self: _Kind) -> _Kind:
        return self

    def __deepcopy__(self: _Kind, memo: object) -> _Kind:
        return self


def made(kind: type[_Kind], values: Mapping[str, Any]) -> _Kind:
    """Returns a guarantee of these values, which the caller has proved.

    Args:
      kind: Its class.
      values: Its attributes by name.
    """
    found = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found
