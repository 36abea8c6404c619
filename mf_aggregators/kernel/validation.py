"""Checks of arguments and input, with messages that say what was found and what was expected."""

import dataclasses
import enum
import inspect
import json
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray

# Scalars of NumPy that float() converts all the same.
_NO_NUMBERS_OF_NUMPY = (np.complexfloating, np.datetime64, np.timedelta64)

# Types of entries that NumPy converts to numbers without an error.
_NO_NUMBERS = (bool, np.bool_, str, bytes)

# The most characters of a value in a message.
_MOST_SHOWN = 80

_Enum = TypeVar("_Enum", bound=enum.Enum)


def shown(value: Any) -> str:
    """Returns a value as a message shows it: arrays and what is long by shape, length or type."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"an array of shape {shape}"
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > _MOST_SHOWN:
        return f"a {type(value).__name__} of length {len(value)}"
    text = repr(value)
    if len(text) <= _MOST_SHOWN and "\n" not in text:
        return text
    try:
        return f"a {type(value).__name__} of length {len(value)}"
    except TypeError:
        return f"a {type(value).__name__}"


def positive_integer(value: Any, name: str) -> int:
    """Returns ``value`` as an int, or raises ValueError unless it is an integer of at least 1."""
    return integer_at_least(value, 1, name)


def integer_at_least(value: Any, smallest: int, name: str) -> int:
    """Returns ``value`` as an int, or raises ValueError unless it is one and >= ``smallest``."""
    value = _scalar(value)
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        integer = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, found {shown(value)}.") from None
    if integer < smallest:
        raise ValueError(f"{name} must be at least {smallest}, found {integer}.")
    return integer


def set_positive_integers(frozen: Any, *names: str) -> None:
    """Makes attributes of a frozen dataclass ints: NumPy's integers compare and save otherwise.

    Args:
      frozen: The instance, while it is being made.
      *names: The attributes.

    Raises:
      ValueError: If one is no integer of at least 1.
    """
    for name in names:
        object.__setattr__(frozen, name, positive_integer(getattr(frozen, name), name))


def finite_number(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is a finite number."""
    found = number(value, name)
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite, found {found}.")
    return found


def number(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is a real number.

    Args:
      value: A number of Python or NumPy, or an array of no dimensions; infinity and NaN are taken.
        A text of digits is no number, and neither is a truth value.
      name: What to call it in messages.

    Raises:
      ValueError: If it is something else.
    """
    value = _scalar(value)
    try:
        is_other = isinstance(value, (bool, np.bool_, str, bytes, bytearray, *_NO_NUMBERS_OF_NUMPY))
        if is_other or isinstance(value, np.ndarray):
            raise TypeError
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, found an integer beyond floats.") from None
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, found {shown(value)}.") from None


def fraction(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is a number from 0 to 1."""
    found = number(value, name)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, found {found}.")
    return found


def positive_number(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is finite and above zero."""
    found = finite_number(value, name)
    if found <= 0.0:
        raise ValueError(f"{name} must be above zero, found {found}.")
    return found


def non_negative_number(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is finite and >= 0."""
    found = finite_number(value, name)
    if found < 0.0:
        raise ValueError(f"{name} must not be negative, found {found}.")
    return found


def epsilon(value: Any) -> float:
    """Returns the epsilon of a guarantee as a float, or raises ValueError unless it is >= 0."""
    found = number(value, "epsilon")
    # Written so that NaN does not pass.
    if not found >= 0.0:
        raise ValueError(f"epsilon must not be negative, found {found}.")
    return found


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
                raise ValueError(f"{field.name} must be of type {kind}, found {shown(value)}.")


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


def delta(value: Any) -> float:
    """Returns the delta of a guarantee as a float, or raises ValueError unless 0 < delta < 1."""
    found = finite_number(value, "delta")
    if not 0.0 < found < 1.0:
        raise ValueError(f"delta must be above 0 and below 1, found {found}.")
    return found


def real_array(values: Any, name: str) -> FloatArray:
    """Returns ``values`` as a float64 array of any shape; NaN and infinity are taken.

    Args:
      values: Anything that NumPy can convert; texts of digits and truth values are no numbers.
      name: What to call it in messages.

    Returns:
      The array; the argument itself where it already is one.

    Raises:
      ValueError: If it holds anything but real numbers, or its rows differ in length.
    """
    try:
        array = np.asarray(values)
        kind = array.dtype.kind
        # NumPy makes ones of truth values between numbers.
        given = np.array(values, object) if isinstance(values, (list, tuple)) else array
        is_mixed = given.dtype.kind == "O" and any(
            isinstance(each, _NO_NUMBERS) for each in given.flat
        )
        if is_mixed or kind in "bSUmM":
            raise TypeError
        if kind != "c":
            return array.astype(np.float64, copy=False)
    except OverflowError:
        raise ValueError(f"{name} must be finite, found an integer beyond floats.") from None
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an array of numbers, found {shown(values)}.") from None
    raise ValueError(f"{name} must be real, found complex numbers.")


def num_rows(matrix: Any, name: str) -> int:
    """Returns the number of rows of what is to be a matrix, before it is copied or checked."""
    try:
        return len(matrix)
    except TypeError:
        raise ValueError(
            f"{name} must be an int, a workloads.Workload or a square matrix, found "
            f"{shown(matrix)}."
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
    array = real_array(matrix, name)
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


def _scalar(value: Any) -> Any:
    """What an array without dimensions holds; anything else as it is."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


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


def of_float32(value: float, name: str) -> float:
    """Returns a positive number that float32 can hold at full precision, or raises ValueError.

    A sum of 2^32 such numbers does not overflow either.

    Args:
      value: The number.
      name: What to call it in the message.
    """
    number = positive_number(value, name)
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) * 2.0**-32
    if not smallest <= number <= largest:
        raise ValueError(
            f"{name} must be between {smallest:.1e} and {largest:.1e}, found {number}: outside, "
            "float32 arithmetic would lose it or sums of it."
        )
    return number


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
