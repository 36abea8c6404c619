"""Checks of numbers and arrays, with messages that say what was found and what was expected."""

import math
import operator
from typing import Any

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray

# Scalars of NumPy that float() converts all the same.
_NO_NUMBERS_OF_NUMPY = (np.complexfloating, np.datetime64, np.timedelta64)

# Types of entries that NumPy converts to numbers without an error.
_NO_NUMBERS = (bool, np.bool_, str, bytes)

# The most characters of a value in a message.
_MOST_SHOWN = 80


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


def _scalar(value: Any) -> Any:
    """What an array without dimensions holds; anything else as it is."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


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
