"""Checks of inputs (matrices, JSON, dataclasses, texts), and of the memory that they need.

Numbers that a text repeats are printed with all of their digits.

The operating system grants memory before it is used. Without these checks, an allocation that is
too large for the machine would end with the system killing this process or another one.
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
from typing import TypeVar

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
# Numbers outside of these bounds are printed with an exponent.
_LEAST_IN_FULL, _MOST_IN_FULL = decimal.Decimal("1e-6"), decimal.Decimal("1e16")
_Part = TypeVar("_Part")
# Smaller amounts of memory are not checked.
_ALWAYS_THERE = 1 << 26


def in_full(value: float, factor: int = 1) -> str:
    """Returns all digits of a number, as in ``48`` and ``1234.5649``.

    Use it for assumptions of a guarantee and for flags, because a rounded number would be another
    one.

    Args:
      value: Any float.
      factor: A whole number by which the value is multiplied exactly, such as 100 for per cent.
    """
    if not math.isfinite(value):
        return format(value, "g")
    exact = decimal.Decimal(repr(float(value))) * factor
    if exact and not _LEAST_IN_FULL <= abs(exact) < _MOST_IN_FULL:
        return f"{exact.normalize():e}"
    text = f"{exact:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def check_types(frozen: numbers.Dataclass, *names: str) -> None:
    """Raises ValueError unless attributes of a dataclass have their declared types.

    For float, any number except NaN is accepted, but no bool. A type that is declared as a string
    is not checked.

    Args:
      frozen: The instance, in its ``__post_init__``.
      *names: The attributes to check; all attributes if none is named.
    """
    for field in dataclasses.fields(frozen):
        if not names or field.name in names:
            value = getattr(frozen, field.name)
            if not _is_of(value, field.type):
                kind = inspect.formatannotation(field.type)
                raise ValueError(
                    f"{field.name} must be of type {kind}, found {numbers.shown(value)}."
                )


def _is_of(value: object, kind: object) -> bool:
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
    declared = origin or kind
    return isinstance(declared, type) and isinstance(value, declared)


def check_words(text: str | None, name: str) -> None:
    """Checks a text that a document repeats: it has to be one line of visible characters.

    Args:
      text: The text; None if it is not stated.
      name: The name of the fact, for messages.

    Raises:
      ValueError: If the text is empty, or has line ends or invisible characters.
    """
    if text is not None and not (text.strip() and text.isprintable()):
        raise ValueError(f"{name} must be a text of one line, found {numbers.shown(text)}.")


def square_matrix(matrix: object, name: str) -> FloatArray:
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


def lower_triangular(matrix: object, name: str) -> FloatArray:
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
    # Row by row, because comparing whole copies takes twice the memory.
    if any(np.any(array[i, i + 1 :]) for i in range(array.shape[0] - 1)):
        raise ValueError(f"{name} must be lower triangular, found entries above the diagonal.")
    if not np.all(np.diagonal(array)):
        raise ValueError(f"{name} must be non-singular, found a zero on its diagonal.")
    return array


def parsed_json(
    text: str | bytes,
    object_pairs_hook: Callable[[list[tuple[str, object]]], object] | None = None,
    *,
    is_strict: bool = False,
) -> object:
    """Returns the value of a JSON text, as ``json.loads`` does.

    Args:
      text: The text.
      object_pairs_hook: Makes an object from its pairs; None for a dict.
      is_strict: Whether repeated keys, NaN and infinity are refused.

    Raises:
      ValueError: If the text is not JSON, is nested too deeply for Python, or has a key or number
        that is refused.
    """
    hook = _unique if is_strict else object_pairs_hook
    try:
        found = json.loads(text, object_pairs_hook=hook)  # noqa: TID251
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None
    if is_strict:
        json.dumps(found, allow_nan=False)
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [key for key, _ in pairs if sum(key == each for each, _ in pairs) > 1]
        raise ValueError(f"the key {twice[0]!r} occurs twice")
    return found


def part(document: object, kind: type[_Part], *names: str) -> _Part:
    """Returns a value within a JSON document, after a check of its type.

    Args:
      document: The document.
      kind: The type of the value.
      *names: The names of the objects that hold the value, and its own; none for the document.

    Raises:
      KeyError: If a name is missing.
      TypeError: If the value has another type, or a name is not one of an object.
    """
    for name in names:
        document = part(document, dict)[name]
    if not isinstance(document, kind):
        raise TypeError(f"a {kind.__name__} was expected, found {numbers.shown(document)}")
    return document


class FixedSeedWarning(UserWarning):
    """A warning that the noise comes from a given seed, so that it can be subtracted.

    Use it when a test with a fixed seed should not warn.

    Example:
      >>> import warnings
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(8), once, noise_multiplier=2.0)
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("ignore", mfa.noise.FixedSeedWarning)
      ...     aggregator = mfa.Aggregator(mechanism, 1.0, clients_per_round=10, seed=0)
      >>> aggregator.initialize().round_index
      0
    """


class _InsufficientMemoryError(Error, MemoryError):
    """More memory is needed than is available; the message says how much."""


def _available_bytes() -> float:
    """Returns how many bytes this process can still use; infinity if that is unknown.

    It is the smaller one of the machine's available memory and the rest of the limit of a
    container's control group.
    """
    machine = _bytes_by_name(_MEMINFO)
    free = machine.get("MemAvailable", math.inf) + machine.get("SwapFree", 0.0)
    try:
        most = (_CONTROL_GROUP / "memory.max").read_text()
        used = (_CONTROL_GROUP / "memory.current").read_text()
        statistics = (_CONTROL_GROUP / "memory.stat").read_text()
        # The page cache of files can be dropped.
        reclaimable = dict(line.split() for line in statistics.splitlines()).get("inactive_file", 0)
        return max(0.0, min(free, float(most) - float(used) + float(reclaimable)))
    except (OSError, ValueError):
        # There is no control group, or it has no limit.
        return free


def check_memory(needed_bytes: float, what: str, advice: str) -> None:
    """Checks that there is enough memory for an object, before it is allocated.

    Args:
      needed_bytes: A lower estimate of the bytes that it needs, at least 0.
      what: The object that needs the memory, as the beginning of the message.
      advice: What to do if there is too little memory, as a clause in the imperative.

    Raises:
      MemoryError: If less memory is available.
    """
    if needed_bytes <= _ALWAYS_THERE:
        return
    available = _available_bytes()
    if needed_bytes > available:
        raise _InsufficientMemoryError(
            f"{what} needs at least {_readable(needed_bytes)} of memory, and "
            f"{_readable(available)} are available: {advice}."
        )


def check_rounds(num_rounds: int, bytes_per_round: float, what: str) -> None:
    """Checks that there is enough memory for an object that grows with the rounds.

    Args:
      num_rounds: The rounds n, at least 1.
      bytes_per_round: A lower estimate of the bytes for each round (proportional to n for n x n
        matrices).
      what: The object that needs the memory, such as ``the tree``.

    Raises:
      MemoryError: If there is too little.
    """
    check_memory(
        num_rounds * bytes_per_round, f"{what} for {num_rounds} rounds", "use fewer rounds"
    )


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """A context in which allocating more than the available memory raises MemoryError.

    Without it, the operating system grants such memory, and kills a process when it is used.
    Processes that are started in the context inherit the limit.
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
    # The number may be an integer of any size.
    return f"{min(number, 10**300) / 1e9:.3g} GB"
