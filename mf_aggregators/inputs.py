"""Checks of matrices, files, dataclasses and choices that come from outside.

The kernel refuses a grid of sums that could overflow. The checks of a grid here are about what it
does to means: no guarantee rests on them.
"""

import dataclasses
import enum
import hashlib
import inspect
import json
import math
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.integers import IntegerSums
from mf_aggregators.kernel.numbers import FloatArray, IntArray

_Enum = TypeVar("_Enum", bound=enum.Enum)

# The number of updates is one of the integers of a secure sum. In fewer bits, it could wrap around
# to a number that is allowed.
_FEWEST_SECURE_BITS, _MOST_SECURE_BITS = 24, 62
# The largest change of an update by rounding, in clip norms.
_LARGEST_ROUNDING = 0.05
# The largest change of an indicator or a metric by rounding, as a fraction of its range.
_LARGEST_ROUNDING_OF_A_MEAN = 0.02


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
                    f"{field.name} must be of type {kind}, found {numbers.shown(value)}."
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
    """Returns the number of rows of a matrix argument, before it is copied or checked."""
    try:
        return len(matrix)
    except TypeError:
        raise ValueError(
            f"{name} must be an int, a workloads.Workload or a square matrix, found "
            f"{numbers.shown(matrix)}."
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
    array = numbers.real_array(matrix, name)
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
    """Returns the value of a JSON text; refuses repeated keys, NaN and infinity.

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


class FixedSeedWarning(UserWarning):
    """The noise comes from a seed that was given: whoever knows it can subtract the noise."""


def seed_of(number: int | None) -> IntArray | None:
    """Returns the (2,) int64 seed of a number that was given, for tests: of all of its digits.

    The caller's caller is warned of it.

    Args:
      number: A non-negative integer of any size; None for none, of which there is no seed.

    Raises:
      ValueError: If it is negative or no integer.
    """
    if number is None:
        return None
    said = "a fixed seed makes the noise predictable: use it in tests only."
    warnings.warn(said, FixedSeedWarning, stacklevel=3)
    number = numbers.integer_at_least(number, 0, "seed")
    digest = hashlib.sha256(f"mf_aggregators seed {number}".encode()).digest()
    return np.frombuffer(digest, "<i8", count=2).astype(np.int64)


def integer_sums(
    secure_aggregation_bits: int | None, largest_cohort: int | None, clients_per_round: float
) -> IntegerSums:
    """Returns how updates become integers.

    Args:
      secure_aggregation_bits: The width of a secure sum's integers; None for an open sum.
      largest_cohort: The most updates in a sum; None for ``clients_per_round``, rounded up, in
        a secure sum, and for 2^22 in an open one.
      clients_per_round: The expected number of updates.

    Raises:
      ValueError: If a number is out of its range, or a cohort of the expected size could not be
        added up.
    """
    expected = math.ceil(numbers.of_float32(clients_per_round, "clients_per_round"))
    if largest_cohort is not None:
        largest_cohort = numbers.positive_integer(largest_cohort, "largest_cohort")
        if largest_cohort < expected:
            raise ValueError(
                f"largest_cohort must be at least clients_per_round, {expected}, found "
                f"{largest_cohort}."
            )
    if secure_aggregation_bits is None:
        return IntegerSums(largest_cohort or max(IntegerSums.largest_cohort, expected))
    bits = numbers.positive_integer(secure_aggregation_bits, "secure_aggregation_bits")
    if not _FEWEST_SECURE_BITS <= bits <= _MOST_SECURE_BITS:
        raise ValueError(
            f"secure_aggregation_bits must be between {_FEWEST_SECURE_BITS} and "
            f"{_MOST_SECURE_BITS}, found {bits}."
        )
    return IntegerSums(largest_cohort or expected, bits, is_secure=True)


def rounding(sums: IntegerSums, num_parameters: int) -> float:
    """Returns the most that rounding to nearest changes an update by, in clip norms (L2).

    Args:
      sums: The grid.
      num_parameters: The entries of an update.
    """
    return math.sqrt(num_parameters) / (2.0 * sums.steps_per_clip_norm)


def check_rounding(sums: IntegerSums, num_parameters: int) -> None:
    """Raises ValueError if rounding could change updates of a size by more than 5 %.

    Args:
      sums: The grid.
      num_parameters: The entries of an update.
    """
    found = rounding(sums, num_parameters)
    if found > _LARGEST_ROUNDING:
        raise ValueError(
            f"in sums of {sums.largest_cohort} clients within {sums.bits} bits, rounding could "
            f"change an update of {num_parameters} parameters by {found:.2g} clip norms, "
            f"and {_LARGEST_ROUNDING:g} is allowed: use more secure_aggregation_bits or a "
            "smaller largest_cohort."
        )


def check_means(sums: IntegerSums, vector_norm: float, *weights: float) -> None:
    """Raises ValueError if rounding could change an indicator or a metric by 2 % of its range.

    Args:
      sums: The grid.
      vector_norm: The norm of the vectors that have indicators and metrics as coordinates.
      *weights: The length in the vector of the range of each kind; 0 for a kind without one.
    """
    step = vector_norm / sums.steps_per_clip_norm
    found = max((step / weight for weight in weights if weight > 0.0), default=0.0)
    if found > _LARGEST_ROUNDING_OF_A_MEAN:
        raise ValueError(
            f"in sums of {sums.largest_cohort} clients within {sums.bits} bits, rounding could "
            f"change the unclipped fraction or a private metric by {found:.2g} of its "
            f"range, and {_LARGEST_ROUNDING_OF_A_MEAN:g} is allowed: use more "
            "secure_aggregation_bits, a smaller largest_cohort or, for the fraction, a smaller "
            "clipped_count_stddev."
        )
