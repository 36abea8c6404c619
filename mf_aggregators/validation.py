"""Checks of arguments, with messages that say what was found and what was expected."""

import math
import operator
from typing import Any

import numpy as np

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
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        integer = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, found {shown(value)}.") from None
    if integer < smallest:
        raise ValueError(f"{name} must be at least {smallest}, found {integer}.")
    return integer


def finite_number(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, found {shown(value)}.") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, found {number}.")
    return number


def positive_number(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is finite and above zero."""
    number = finite_number(value, name)
    if number <= 0.0:
        raise ValueError(f"{name} must be above zero, found {number}.")
    return number


def non_negative_number(value: Any, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is finite and >= 0."""
    number = finite_number(value, name)
    if number < 0.0:
        raise ValueError(f"{name} must not be negative, found {number}.")
    return number


def delta(value: Any) -> float:
    """Returns the delta of a guarantee as a float, or raises ValueError unless 0 < delta < 1."""
    number = finite_number(value, "delta")
    if not 0.0 < number < 1.0:
        raise ValueError(f"delta must be above 0 and below 1, found {number}.")
    return number


def num_rows(matrix: Any, name: str) -> int:
    """Returns the number of rows of what is to be a matrix, before it is copied or checked."""
    try:
        return len(matrix)
    except TypeError:
        raise ValueError(
            f"{name} must be an int, a workloads.Workload or a square matrix, found "
            f"{shown(matrix)}."
        ) from None


def square_matrix(matrix: Any, name: str) -> np.ndarray:
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
    if np.iscomplexobj(matrix):
        raise ValueError(f"{name} must be real, found complex numbers.")
    try:
        array = np.asarray(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be an array of numbers, found {type(matrix).__name__}."
        ) from None
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.shape[0] == 0:
        raise ValueError(f"{name} must be a square matrix, found an array of shape {array.shape}.")
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite, found NaN or infinite entries.")
    return array


def lower_triangular(matrix: Any, name: str) -> np.ndarray:
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
