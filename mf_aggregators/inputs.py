"""Checks of matrices, files and dataclasses that come from outside."""

import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray

_Enum = TypeVar("_Enum", bound=enum.Enum)


def check_types(frozen: Any, *names: str) -> None:
    """Raises ValueError unless attributes of a dataclass are of the types that it declares.

    A float is any number except NaN, and a truth value is no number. A type that is declared as a
    text is not checked.

    Args:
      frozen: The instance, while it is being made.
      *names: The attributes; all of them if none is named.
    """
    for field in dataclasses.fields(frozen):
        if not names or field.name in names:
            value = getattr(frozen, field.name)
            if not _is_of(value, field.type):
                kind = inspect.formatannotation(field.type)
                raise ValueError(
                    f"{field.name} must be of type {kind}, found {validation.shown(value)}."
                )


def _is_of(value: Any, kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, str):
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(value, part) for part in parts)
    if origin is tuple and isinstance(value, tuple):
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        return len(kinds) == len(value) and all(map(_is_of, value, kinds))
    if kind in (int, float):
        numbers = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
        return isinstance(value, numbers) and not isinstance(value, bool) and value == value
    return isinstance(value, origin or kind)


def num_rows(matrix: Any, name: str) -> int:
    """Returns the number of rows of what is to be a matrix, before it is copied or checked."""
    try:
        return len(matrix)
    except TypeError:
        raise ValueError(
            f"{name} must be an int, a workloads.Workload or a square matrix, found "
            f"{validation.shown(matrix)}."
        ) from None


def square_matrix(matrix: Any, name: str) -> FloatArray:
    """Returns ``matrix`` as a finite, square (n, n) float64 array with n >= 1.

    Args:
      matrix: Anything that NumPy can convert.
      name: What to call it in messages.

    Returns:
      The array; the argument itself where it already is one.

    Raises:
      ValueError: If the array is not two-dimensional and square, or holds NaN or
        infinite entries.
    """
    array = validation.real_array(matrix, name)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.shape[0] == 0:
        raise ValueError(f"{name} must be a square matrix, found an array of shape {array.shape}.")
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, found NaN or infinite entries.")
    return array


def lower_triangular(matrix: Any, name: str) -> FloatArray:
    """Returns ``matrix`` as an (n, n) float64 array, lower triangular and invertible.

    Args:
      matrix: Anything that NumPy can convert.
      name: What to call it in messages.

    Returns:
      The array; the argument itself where it already is one.

    Raises:
      ValueError: If the array is not square and finite, has a non-zero entry above
        the diagonal (a later round would change an earlier output), or a zero on the
        diagonal (it would be singular).
    """
    array = square_matrix(matrix, name)
    # A triangle at a time: a comparison of whole copies costs twice the memory.
    if any(np.any(array[i, i + 1 :]) for i in range(array.shape[0] - 1)):
        raise ValueError(f"{name} must be lower triangular, found entries above the diagonal.")
    if not np.all(np.diagonal(array)):
        raise ValueError(f"{name} must be non-singular, found a zero on its diagonal.")
    return array


def parsed_json(
    text: str | bytes,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Returns the value of a JSON text, as ``json.loads`` does.

    Args:
      text: The text.
      object_pairs_hook: Makes an object of its pairs; None for a dict.

    Raises:
      ValueError: If it is none, or is nested more deeply than Python can follow.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)  # noqa: TID251
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


def strict_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text whose objects have no key twice, and no NaN or infinity.

    Args:
      text: The text.

    Raises:
      ValueError: If it is none, or has such a key or number.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = [key for key, _ in pairs if sum(key == each for each, _ in pairs) > 1]
            raise ValueError(f"the key {twice[0]!r} is there twice")
        return found

    found = parsed_json(text, unique)
    json.dumps(found, allow_nan=False)
    return found


def archived_arrays(file: Any) -> dict[str, Any]:
    """Returns the arrays of an ``.npz`` file by name, in the order in which they were written.

    Args:
      file: Its path, or the open file.

    Raises:
      OSError: If it cannot be read.
      ValueError: If it is damaged, or is no such file.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError:
        raise
    except Exception as error:
        # NumPy's reader raises many types for a damaged archive.
        reason = str(error) or type(error).__name__
        raise ValueError(f"the archive of arrays is damaged ({reason})") from error


def member(kind: type[_Enum], name: str, argument: str) -> _Enum:
    """Returns the member of an enumeration that has a value, or raises ValueError.

    Args:
      kind: The enumeration.
      name: The value.
      argument: What to call it in the message.
    """
    try:
        return kind(name)
    except ValueError:
        names = ", ".join(repr(each.value) for each in kind)
        raise ValueError(f"{argument} must be one of {names}, found {name!r}.") from None
