"""Checks of inputs: matrices, JSON, dataclasses and words, and their memory.

Inputs that a text repeats are printed with all of their digits.

Memory counts only once it is used. Without checks before a lot of it is allocated, what is too
large for the machine ends in the kernel's killing this process or another one.
"""

import contextlib
import dataclasses
import decimal
import inspect
import json
import math
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error, FloatArray

try:
    import resource
except ImportError:  # Not on Windows.
    resource = None  # type: ignore[assignment]

_MEMINFO = pathlib.Path("/proc/meminfo")
_STATUS = pathlib.Path("/proc/self/status")
_CONTROL_GROUP = pathlib.Path("/sys/fs/cgroup")
_KILOBYTE = 1024
# Numbers outside of these bounds have an exponent where all digits are shown.
_LEAST_IN_FULL, _MOST_IN_FULL = decimal.Decimal("1e-6"), decimal.Decimal("1e16")
# Smaller amounts are not checked.
_ALWAYS_THERE = 1 << 26


def in_full(value: float, factor: int = 1) -> str:
    """Returns all digits of a number, as in ``48`` and ``1234.5649``.

    For what a guarantee assumes, and for flags: rounded either way, it would be another.

    Args:
      value: Any float.
      factor: A whole number to multiply it by exactly, as 100 for per cent.
    """
    if not math.isfinite(value):
        return format(value, "g")
    exact = decimal.Decimal(repr(float(value))) * factor
    if exact and not _LEAST_IN_FULL <= abs(exact) < _MOST_IN_FULL:
        return f"{exact.normalize():e}"
    text = f"{exact:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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


def check_words(text: str | None, name: str) -> None:
    """Checks words that a document repeats: they can be read, and begin no line of their own.

    Args:
      text: The words; None if nobody told any.
      name: The fact.

    Raises:
      ValueError: If there are none, or they have line ends or characters that nobody sees.
    """
    if text is not None and not (text.strip() and text.isprintable()):
        raise ValueError(f"{name} must be words in one line, found {numbers.shown(text)}.")


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
    *,
    is_strict: bool = False,
) -> Any:
    """Returns the value of a JSON text, as ``json.loads`` does.

    Args:
      text: The text.
      object_pairs_hook: Makes an object of its pairs; None for a dict.
      is_strict: Whether repeated keys, NaN and infinity are refused.

    Raises:
      ValueError: If it is none, is nested more deeply than Python can follow, or has a key or
        number that is refused.
    """
    hook = _unique if is_strict else object_pairs_hook
    try:
        found = json.loads(text, object_pairs_hook=hook)  # noqa: TID251
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None
    if is_strict:
        json.dumps(found, allow_nan=False)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [key for key, _ in pairs if sum(key == each for each, _ in pairs) > 1]
        raise ValueError(f"the key {twice[0]!r} is there twice")
    return found


class FixedSeedWarning(UserWarning):
    """The noise comes from a seed that was given: whoever knows it can subtract the noise.

    Use it when a test fixes the seed, and the warning is to be silenced.

    Example:
      >>> import warnings
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(8), once, noise_multiplier=2.0)
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("ignore", mfa.noise.FixedSeedWarning)
      ...     aggregator = mfa.Aggregator(mechanism, 1.0, clients_per_round=10, seed=0)
    """


class _InsufficientMemoryError(Error, MemoryError):
    """More memory is needed than there is; the message says how much."""


def _available_bytes() -> float:
    """Returns how much memory this process can still use; infinity where that is unknown.

    It is the lesser of the memory that the machine has available, and of what is left to the
    control group of a container.
    """
    machine = _bytes_by_name(_MEMINFO)
    free = machine.get("MemAvailable", math.inf) + machine.get("SwapFree", 0.0)
    try:
        most = (_CONTROL_GROUP / "memory.max").read_text()
        used = (_CONTROL_GROUP / "memory.current").read_text()
        statistics = (_CONTROL_GROUP / "memory.stat").read_text()
        # Files that are kept in memory can be dropped.
        reclaimable = dict(line.split() for line in statistics.splitlines()).get("inactive_file", 0)
        return max(0.0, min(free, float(most) - float(used) + float(reclaimable)))
    except (OSError, ValueError):
        # No such group, or its limit is the word max.
        return free


def check_memory(needed_bytes: float, what: str, advice: str) -> None:
    """Checks that there is memory for something, before any of it is allocated.

    Args:
      needed_bytes: A lower estimate of what it needs, any number from 0.
      what: What needs it, for the message: the beginning of a sentence.
      advice: What to do if there is too little: a half-sentence in the imperative.

    Raises:
      MemoryError: If less is available.
    """
    if needed_bytes <= _ALWAYS_THERE:
        return
    available = _available_bytes()
    if needed_bytes > available:
        raise _InsufficientMemoryError(
            f"{what} needs {_readable(needed_bytes)} of memory at least, and "
            f"{_readable(available)} are available: {advice}."
        )


def check_rounds(num_rounds: int, bytes_per_round: float, what: str) -> None:
    """Checks that there is memory for an object that grows with the rounds.

    Args:
      num_rounds: The rounds n, at least 1.
      bytes_per_round: A lower estimate; n times as much where n x n matrices are made.
      what: What needs it, such as ``the tree``.

    Raises:
      MemoryError: If there is too little.
    """
    check_memory(
        num_rounds * bytes_per_round, f"{what} for {num_rounds} rounds", "use fewer rounds"
    )


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """A context in which allocating more than is available raises MemoryError.

    Without it, the kernel grants such memory and kills a process when it is used. Programs that are
    started in it inherit the limit.
    """
    available = _available_bytes()
    if resource is None or not math.isfinite(available):
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(_bytes_by_name(_STATUS).get("VmData", 0.0) + available)
    limit = min([limit, *(each for each in (before, most) if each != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _bytes_by_name(path: pathlib.Path) -> dict[str, float]:
    """The numbers of the lines "Name: number kB" of a file of /proc, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for name, value in re.findall(r"^(\w+):\s*(\d+) kB$", path.read_text(), re.MULTILINE):
            found[name] = float(value) * _KILOBYTE
    return found


def _readable(number: float) -> str:
    # Integers of any size may be asked for.
    return f"{min(number, 10**300) / 1e9:.3g} GB"
