"""Checks of inputs: matrices, files, dataclasses, choices, nests of arrays, and their memory.

Inputs that a text repeats are printed with all of their digits.

Nests are dicts, lists, tuples, named tuples and attrs, in the order of ``tf.nest``.

The kernel refuses a grid of sums that could overflow. The checks of a grid here are about what it
does to means: no guarantee rests on them.

Memory counts only once it is used. Without checks before a lot of it is allocated, what is too
large for the machine ends in the kernel's killing this process or another one.
"""

import collections
import contextlib
import dataclasses
import decimal
import inspect
import itertools
import json
import math
import operator
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.integers import IntegerSums
from mf_aggregators.kernel.numbers import Error, FloatArray
from mf_aggregators.kernel.sensitivity import DEFAULT_NUM_COORDINATES

try:
    import resource
except ImportError:  # Not on Windows.
    resource = None  # type: ignore[assignment]

# The largest change of an update by rounding, in clip norms.
_LARGEST_ROUNDING = 0.05
# The floating-point dtypes of models, and the dtypes that their noise is computed in.
NOISE_DTYPES = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
}
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


def check_charged(num_parameters: int, num_rounds: int) -> None:
    """Raises ValueError if a run draws more numbers than guarantees are stated for.

    Args:
      num_parameters: The numbers of a row: the model's parameters, and one more where the clip
        norm adapts.
      num_rounds: The rows.
    """
    if num_parameters * num_rounds > DEFAULT_NUM_COORDINATES:
        raise ValueError(
            f"noise of {num_parameters} numbers in each of {num_rounds} rounds is of "
            f"{num_parameters * num_rounds:.3g} numbers, and guarantees are stated for at most "
            f"2^40 ({DEFAULT_NUM_COORDINATES:.2g}): use a smaller model or fewer rounds."
        )


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


def _rounding(sums: IntegerSums, num_parameters: int) -> float:
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
    found = _rounding(sums, num_parameters)
    if found > _LARGEST_ROUNDING:
        raise ValueError(
            f"in sums of {sums.largest_cohort} clients within {sums.bits} bits, rounding could "
            f"change an update of {num_parameters} parameters by {found:.2g} clip norms, "
            f"and {_LARGEST_ROUNDING:g} is allowed: use more secure_aggregation_bits or a "
            "smaller largest_cohort."
        )


def named_leaves(nest: Any) -> list[tuple[str, Any]]:
    """Returns each array of a nest with its path, in the order of ``tf.nest``.

    Dicts are in the order of sorted keys. A path has the kind of each container and the name in it:
    ``['a']`` in a dict (``{1}`` for a key that is no text), ``.kernel`` in a named tuple, ``[0]``
    in a list, ``(0)`` in a tuple.
    """
    leaves: list[tuple[str, Any]] = []
    _mapped(lambda path, leaf: leaves.append((path, leaf)), nest)
    return leaves


def in_structure(nest: Any, leaves: Sequence[Any]) -> Any:
    """Returns a nest with other leaves.

    Args:
      nest: The nest.
      leaves: As many as it has, in the order of ``tf.nest``.
    """
    following = iter(leaves)
    return _mapped(lambda *_: next(following), nest)


def check_same(
    expected: Sequence[tuple[str, Any]],
    found: Sequence[tuple[str, Any]],
    is_same: Callable[[Any, Any], bool] = operator.eq,
) -> None:
    """Raises ValueError unless two nests have the same paths and kinds of leaves.

    Args:
      expected: The path of each expected leaf, and its dtype or shape.
      found: The path of each found leaf, and its dtype or shape.
      is_same: Compares a dtype or shape with another one.
    """
    for pair in itertools.zip_longest(expected, found):
        if None in pair or pair[0][0] != pair[1][0] or not is_same(pair[0][1], pair[1][1]):
            one, other = (
                f"{each[1]} {f'at {each[0]}' if each[0] else 'alone'}" if each else "no more leaves"
                for each in pair
            )
            raise ValueError(
                f"an update must have {one}, found {other}: names, containers, shapes and dtypes "
                "are those of the run's first update, or of its template or query."
            )


def is_plain(leaf: Any) -> bool:
    """Returns whether an object is a dense array of numbers, without mask, labels or units."""
    kind, layout = type(leaf), str(getattr(leaf, "layout", ""))
    if isinstance(leaf, np.ndarray):
        return kind in (np.ndarray, np.memmap) and leaf.dtype.names is None and leaf.dtype != object
    if kind.__module__.startswith("tensorflow."):
        return hasattr(leaf, "__array__")
    is_sparse = layout.startswith("torch.") and layout != "torch.strided"
    return isinstance(leaf, float | np.generic) or (hasattr(leaf, "__dlpack__") and not is_sparse)


def _mapped(function: Callable[[str, Any], Any], nest: Any, path: str = "") -> Any:
    """The nest with ``function`` of path and leaf in each place, in the order of ``tf.nest``."""
    if isinstance(nest, Mapping):
        # The order of insertion is not part of a dict's structure; ``tf.nest`` sorts as well.
        named = (
            (key, f"[{key!r}]" if isinstance(key, str) else f"{{{key!r}}}") for key in sorted(nest)
        )
        found = {key: _mapped(function, nest[key], path + name) for key, name in named}
        in_order = ((key, found[key]) for key in nest)
        is_ordered = isinstance(nest, collections.OrderedDict)
        return collections.OrderedDict(in_order) if is_ordered else dict(in_order)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        pairs = zip(nest._fields, nest, strict=True)
        return type(nest)(*(_mapped(function, child, f"{path}.{name}") for name, child in pairs))
    if hasattr(type(nest), "__attrs_attrs__"):
        names = [field.name for field in type(nest).__attrs_attrs__]
        return type(nest)(
            *(_mapped(function, getattr(nest, name), f"{path}.{name}") for name in names)
        )
    if isinstance(nest, list | tuple):
        ends = "[]" if isinstance(nest, list) else "()"
        numbered = enumerate(nest)
        return type(nest)(
            _mapped(function, child, f"{path}{ends[0]}{i}{ends[1]}") for i, child in numbered
        )
    return function(path, nest)


def of_float32(value: float, name: str) -> float:
    """Returns a positive number that float32 can hold at full precision, or raises ValueError.

    A sum of 2^32 such numbers does not overflow either.

    Args:
      value: The number.
      name: What to call it in the message.
    """
    found = numbers.positive_number(value, name)
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) * 2.0**-32
    if not smallest <= found <= largest:
        between = f"between {smallest:.1e} and {largest:.1e}"
        raise ValueError(f"{name} must be {between}, for float32 arithmetic, found {found}.")
    return found


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
