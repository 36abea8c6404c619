"""Numbers and arrays: their types, checks of arguments, errors, and numbers as text.

Checks say what was found and what was expected.

Numbers of guarantees are printed so that no printed number is better than the computed one: an
epsilon, a delta, a rho and a required noise multiplier are rounded up; a lower bound is rounded
down. A float stands for the shortest decimal that is read as that float: 1e-4 means 0.0001.
Decimal arithmetic is exact, so a printed number, read as a float again, is never on the wrong side
of the value.
"""

import dataclasses
import decimal
import hashlib
import math
import operator
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol, SupportsIndex, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
_Integers: TypeAlias = np.int32 | np.int64 | np.uint8 | np.uint32
IntArray: TypeAlias = npt.NDArray[_Integers]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ComplexArray: TypeAlias = npt.NDArray[np.complex128]
# Real numbers, as in rows of noise: floats, or integers in quantization steps.
RealArray: TypeAlias = npt.NDArray[np.float32 | np.float64 | _Integers]
# Types of entries that are refused as numbers, though NumPy converts them without an error.
_NO_NUMBERS = (
    *(bool, np.bool_, str, bytes, type(None), np.ma.MaskedArray),
    *(np.complexfloating, np.datetime64, np.timedelta64),
)
# The most characters of a value that are shown in a message.
_MOST_SHOWN = 80
# The digits that a format may have: every decimal of at most 15 digits survives as a float.
_DIGITS = tuple(map(str, range(1, 16)))
# A precision that is enough for all decimal digits of any float.
_ALL_DIGITS = 1100


class Dataclass(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]


class Error(Exception):
    """Base class of all errors of this library that have a type of their own.

    Use it when a program has to catch every refusal of this library but those of wrong arguments.

    Arguments of wrong values or types raise plain ValueErrors and TypeErrors, as everywhere in
    Python. Each subclass is one of Python's own errors too, such as ValueError or OSError.

    Example:
      >>> import mf_aggregators as mfa
      >>> try:
      ...     mfa.load("nowhere")
      ... except mfa.Error as error:
      ...     print(type(error).__name__)
      CheckpointError
    """


class NotProved(Error, ValueError):  # noqa: N818
    """Raised if the kernel does not prove a claim; the message says why."""


class ReleaseError(Error, RuntimeError):
    """Raised if a round must not be released: nothing was released, and the state is unchanged."""


def shown(value: object) -> str:
    """Returns a value as text for a message; arrays and long values by shape, length or type."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"an array of shape {shape}"
    text = repr(value)
    if len(text) <= _MOST_SHOWN and "\n" not in text:
        return text
    length = f" of length {len(value)}" if hasattr(value, "__len__") and shape != () else ""
    return f"a {type(value).__name__}{length}"


def positive_integer(value: object, name: str) -> int:
    """Returns ``value`` as an int, or raises ValueError unless it is an integer of at least 1."""
    return integer_at_least(value, 1, name)


def integer_at_least(value: object, smallest: int, name: str) -> int:
    """Returns ``value`` as an int, or raises ValueError unless it is one and >= ``smallest``."""
    value = _scalar(value)
    try:
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, SupportsIndex):
            raise TypeError
        integer = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, found {shown(value)}.") from None
    if integer < smallest:
        raise ValueError(f"{name} must be at least {smallest}, found {integer}.")
    return integer


def non_negative_integer(value: object, name: str) -> int:
    """Returns ``value`` as an int, or raises ValueError unless it is an integer of at least 0."""
    return integer_at_least(value, 0, name)


def set_checked(frozen: Dataclass, **checks: Callable[[object, str], object]) -> None:
    """Replaces attributes of a frozen dataclass by checked values; an allowed None stays None.

    Args:
      frozen: The instance, inside its ``__post_init__``.
      **checks: For each attribute, a function of its value and name, such as those of this module.

    Raises:
      ValueError: If one of the checks raises it.
    """
    types = {each.name: each.type for each in dataclasses.fields(frozen)}
    for name, check in checks.items():
        value = getattr(frozen, name)
        if value is not None or type(None) not in get_args(types[name]):
            object.__setattr__(frozen, name, check(value, name))


def set_positive_integers(frozen: Dataclass, *names: str) -> None:
    """Replaces attributes of a frozen dataclass by ints, which must be at least 1."""
    set_checked(frozen, **dict.fromkeys(names, positive_integer))


def finite_number(value: object, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is a finite number."""
    return _checked(value, name, "must be finite", lambda _: True)


def number(value: object, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is a real number.

    Args:
      value: A number of Python or NumPy, or an array of no dimensions; infinity and NaN are taken.
        A text of digits is no number, and neither is a truth value.
      name: What to call it in messages.

    Raises:
      ValueError: If it is something else.
    """
    array = _reals(value, name, "a number")
    if array.ndim:
        raise ValueError(f"{name} must be a number, found {shown(value)}.")
    return float(array)


def fraction(value: object, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is a number from 0 to 1."""
    return _checked(value, name, "must be between 0 and 1", lambda x: 0.0 <= x <= 1.0)


def positive_number(value: object, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is finite and above zero."""
    return _checked(value, name, "must be above zero", lambda x: x > 0.0)


def non_negative_number(value: object, name: str) -> float:
    """Returns ``value`` as a float, or raises ValueError unless it is finite and >= 0."""
    return _checked(value, name, "must not be negative", lambda x: x >= 0.0)


def epsilon(value: object, name: str = "epsilon") -> float:
    """Returns the epsilon of a guarantee as a float, or raises ValueError unless it is >= 0."""
    return _checked(value, name, "must not be negative", lambda x: x >= 0.0, is_finite=False)


def delta(value: object, name: str = "delta") -> float:
    """Returns the delta of a guarantee as a float, or raises ValueError unless 0 < delta < 1."""
    return _checked(value, name, "must be above 0 and below 1", lambda x: 0.0 < x < 1.0)


def _checked(
    value: object, name: str, must: str, holds: Callable[[float], bool], *, is_finite: bool = True
) -> float:
    """Returns a value as a float, or raises ValueError unless a condition holds; NaN never does."""
    found = number(value, name)
    if is_finite and not math.isfinite(found):
        must = "must be finite"
    elif holds(found):
        return found
    raise ValueError(f"{name} {must}, found {found}.")


def real_array(values: object, name: str) -> FloatArray:
    """Returns ``values`` as a float64 array of any shape; NaN and infinity are taken.

    Args:
      values: Anything that NumPy can convert; texts of digits and truth values are no numbers.
      name: What to call it in messages.

    Returns:
      The array; the argument itself where it already is one.

    Raises:
      ValueError: If it holds anything but real numbers, or its rows differ in length.
    """
    return _reals(values, name, "an array of numbers, and real")


def _reals(values: object, name: str, must: str) -> FloatArray:
    """Returns values as a float64 array, or raises ValueError unless all are real numbers."""
    try:
        array = np.asarray(values)
        # NumPy converts truth values between numbers to ones, so entries are checked before.
        given = np.array(values, object) if isinstance(values, (list, tuple)) else array
        is_mixed = given.dtype.kind == "O" and any(
            isinstance(_scalar(each), _NO_NUMBERS) for each in given.flat
        )
        is_masked = isinstance(values, np.ma.MaskedArray) and np.any(values.mask)
        if is_mixed or is_masked or array.dtype.kind in "bSUVmMc":
            raise TypeError
        return array.astype(np.float64, copy=False)
    except OverflowError:
        raise ValueError(f"{name} must be finite, found an integer too large for floats.") from None
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be {must}, found {shown(values)}.") from None


def _scalar(value: object) -> object:
    """Returns the number in an array without dimensions, and any other value unchanged."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def digest(described: str, arrays: Iterable[RealArray] = (), key: bytes = b"") -> bytes:
    """Returns a 32-byte digest of a text and of arrays: their dtypes, shapes and numbers.

    Args:
      described: The text.
      arrays: The arrays.
      key: A secret of at most 64 bytes, without which the digest tells nothing; empty for none.
    """
    found = hashlib.blake2b(described.encode(), digest_size=32, key=key)
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.digest()


def rounded_up(value: float, form: str = ".4g") -> str:
    """Returns a value as text with few digits, rounded up: never below the value.

    Args:
      value: Any float.
      form: As ``format`` takes it: ``.4g`` for four significant digits, ``.3f`` for three
        decimals.

    Returns:
      The text; that of ``format`` for what is not finite.

    Raises:
      ValueError: If the format is no such one, or has more than 15 digits.
    """
    return _rounded(value, form, decimal.ROUND_CEILING)


def rounded_down(value: float, form: str = ".4g") -> str:
    """Returns a value as text with few digits, rounded down: never above it, for lower bounds.

    Args:
      value: Any float.
      form: As in :func:`rounded_up`.

    Returns:
      The text; that of ``format`` for what is not finite.

    Raises:
      ValueError: If the format is no such one, or has more than 15 digits.
    """
    return _rounded(value, form, decimal.ROUND_FLOOR)


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun as text, such as ``1 round`` or ``3 rounds``.

    Args:
      number: The number.
      noun: The noun in the singular.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def pair(epsilon: float, delta: float, form: str = ".4g") -> str:
    """Returns epsilon and delta as text, such as ``(8, 1e-06)``, both rounded up.

    Args:
      epsilon: The epsilon.
      delta: The delta, which is shown to six significant digits.
      form: The format of epsilon, as in :func:`rounded_up`.

    Raises:
      ValueError: If the format is none of :func:`rounded_up`.
    """
    return f"({rounded_up(epsilon, form)}, {rounded_up(delta, '.6g')})"


def stated_pair(epsilon: float, delta: float, form: str = ".4g") -> str:
    """Returns ``(8, 1e-06)-DP`` as text, or a text that says that there is no finite epsilon.

    Args:
      epsilon: The epsilon, or infinity.
      delta: As in :func:`pair`.
      form: As in :func:`pair`.

    Raises:
      ValueError: As in :func:`pair`.
    """
    if math.isfinite(epsilon):
        return f"{pair(epsilon, delta, form)}-DP"
    return f"no finite epsilon at delta {rounded_up(delta, '.6g')}"


def _rounded(value: float, form: str, rounding: str) -> str:
    digits, kind = form[1:-1], form[-1:]
    if form[:1] != "." or kind not in ("f", "g") or digits not in _DIGITS:
        raise ValueError(f"form must be like '.4g' or '.3f', of 1 to 15 digits, found {form!r}.")
    if not math.isfinite(value):
        return format(value, form)
    exact = decimal.Decimal(repr(float(value)))
    if kind == "f":
        context = decimal.Context(prec=_ALL_DIGITS, rounding=rounding)
        return f"{exact.quantize(decimal.Decimal(1).scaleb(-int(digits)), context=context):f}"
    return format(float(decimal.Context(prec=int(digits), rounding=rounding).plus(exact)), form)
