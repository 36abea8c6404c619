"""Streams of correlated noise for a nest of arrays, in NumPy: any mechanism, any model.

    state = streams.initial_state(factorization.noise_recursion(), weights, seed)
    row, state = streams.next_row(factorization.noise_recursion(), state)

Row i is row i of C^-1 Z at unit variance of Z, in the structure of the weights. Z comes from
``rows_of_z``: the seed alone determines the whole stream. States are values: advancing one
leaves it as it was, so a round that is repeated from a stored state gets the same noise.

Rows are the integers of ``integer_rows``, converted to floats. What is released has a guarantee
bit for bit only where these integers are added to integers, and floats are made of their sum, as
``tff.dp_query`` does: a float of the data plus a float of noise tells more than their sum.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators.arrays import FloatArray, IntArray
from mf_aggregators.noise import rows_of_z
from mf_aggregators.noise.integer_rows import IntegerRows, RowLayout, Segment
from mf_aggregators.noise.recursions import NoiseRecursion, NoiseState
from mf_aggregators.noise.rows_of_z import DEFAULT_SOURCE, NoiseSource

# The floating-point dtypes of models, and what noise for them is computed in.
NOISE_DTYPES = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
}


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseStreamState:
    """Where a stream of noise rows stands.

    Attributes:
      round_index: The round that the next row is for, from 0.
      seed: (2,) int64: the stream's secret.
      source: Where its random bits come from.
      structure: The nest that rows have, with the position of each array in its place.
      layout: The shapes and noise dtypes of the arrays, by position.
      rows: The rows as integers.
      histories: The state of each of the layout's segments, flat vectors.
    """

    round_index: int
    seed: IntArray = dataclasses.field(repr=False)
    source: NoiseSource
    structure: Any
    layout: RowLayout
    rows: IntegerRows
    histories: tuple[NoiseState, ...] = dataclasses.field(repr=False)


def initial_state(
    recursion: NoiseRecursion,
    template: Any,
    seed: IntArray,
    source: NoiseSource = DEFAULT_SOURCE,
) -> NoiseStreamState:
    """Returns the state before the first round.

    Args:
      recursion: The mechanism's noising matrix.
      template: A nest (dicts, lists, tuples, named tuples) of float arrays, or of anything
        with a shape and a dtype: what rows shall look like. Their values do not count.
        Arrays have the order in which ``tf.nest`` flattens them: dicts by sorted keys.
      seed: (2,) int64: the stream's secret.
      source: Where random bits come from.

    Returns:
      The state.

    Raises:
      TypeError: If an array's dtype is not float64, float32, float16 or bfloat16.
      ValueError: If the seed is not (2,) int64.
    """
    structure, layout = _described(template)
    rows = IntegerRows.of(recursion)
    histories = tuple(rows.initial_state(segment.size) for segment in layout.segments)
    # A copy, because the caller's array may be filled with another seed.
    seed = rows_of_z.checked_seed(seed).copy()
    return NoiseStreamState(0, seed, NoiseSource(source), structure, layout, rows, histories)


def next_row(recursion: NoiseRecursion, state: NoiseStreamState) -> tuple[Any, NoiseStreamState]:
    """Returns the noise row of the state's round and the state after it.

    The given state does not change: called with it again, this returns the same row, bit
    for bit. :func:`rows` is faster where all rows are taken one after another.

    Args:
      recursion: The mechanism's noising matrix, the same in every round.
      state: What :func:`initial_state` or an earlier call returned.

    Returns:
      Row ``state.round_index`` of C^-1 Z in the template's structure, float32 or float64
      arrays, and the next state.

    Raises:
      ValueError: If the mechanism has no more rounds.
    """
    # Not left to the segments: a template without entries has none.
    recursion.check_has_round(state.round_index)
    flats, histories = [], []
    i = state.round_index
    for segment, history in zip(state.layout.segments, state.histories, strict=True):
        z = segment.row_of_z(state.source, state.seed, i)
        row, following = state.rows.next_row(history, z)
        flats.append((row * state.rows.steps[i]).astype(segment.dtype))
        histories.append(following)
    next_state = dataclasses.replace(
        state, round_index=state.round_index + 1, histories=tuple(histories)
    )
    return _nested(state.structure, state.layout, flats), next_state


def rows(
    recursion: NoiseRecursion,
    template: Any,
    seed: IntArray,
    source: NoiseSource = DEFAULT_SOURCE,
) -> Iterator[Any]:
    """Returns all noise rows in order: those of :func:`next_row`, without a copy of the history.

    Args:
      recursion: The mechanism's noising matrix.
      template: As for :func:`initial_state`.
      seed: (2,) int64: the stream's secret.
      source: Where random bits come from.

    Returns:
      An iterator of row i of C^-1 Z for every round i of the mechanism; each row is
      computed when it is asked for.

    Raises:
      TypeError: If an array's dtype is not float64, float32, float16 or bfloat16.
      ValueError: If the seed is not (2,) int64.
    """
    structure, layout = _described(template)
    seed = rows_of_z.checked_seed(seed).copy()
    source = NoiseSource(source)

    integer_rows = IntegerRows.of(recursion)

    def flat_rows(segment: Segment) -> Iterator[FloatArray]:
        # Nobody else ever sees this state, so its history can be updated in place.
        history = integer_rows.initial_state(segment.size)
        for i, step in enumerate(integer_rows.steps):
            z = segment.row_of_z(source, seed, i)
            row, history = integer_rows.next_row_in_place(history, z)
            yield (row * step).astype(segment.dtype)

    streams = [flat_rows(segment) for segment in layout.segments]
    return (
        _nested(structure, layout, [next(stream) for stream in streams])
        for _ in range(recursion.num_rounds)
    )


def _described(template: Any) -> tuple[Any, RowLayout]:
    """The template with positions for its arrays, and the arrays' shapes and noise dtypes."""
    tensors = [tensor_of(leaf) for leaf in leaves_of(template)]
    structure = in_structure(template, range(len(tensors)))
    shapes = tuple(shape for shape, _ in tensors)
    return structure, RowLayout(shapes, tuple(NOISE_DTYPES[name] for _, name in tensors))


def leaves_of(nest: Any) -> list[Any]:
    """Returns the arrays of a nest, in the order of ``tf.nest``: dicts by sorted keys."""
    leaves: list[Any] = []
    _mapped(leaves.append, nest)
    return leaves


def in_structure(nest: Any, leaves: Sequence[Any]) -> Any:
    """Returns a nest with other leaves.

    Args:
      nest: The nest.
      leaves: As many as it has, in the order of :func:`leaves_of`.
    """
    following = iter(leaves)
    return _mapped(lambda _: next(following), nest)


def tensor_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the name of the dtype of an array, or of anything that has both.

    Raises:
      TypeError: If the dtype is not float64, float32, float16 or bfloat16.
    """
    # Arrays of other frameworks and plain specifications have these two as well.
    array = leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else np.asarray(leaf)
    name = getattr(array.dtype, "name", str(array.dtype)).removeprefix("torch.")
    if name not in NOISE_DTYPES:
        raise TypeError(
            f"noise can be added to {', '.join(NOISE_DTYPES)} arrays, found one of dtype "
            f"{name} and shape {tuple(array.shape)}: leave integers and flags out of what "
            "is aggregated, or cast them."
        )
    return tuple(int(size) for size in array.shape), name


def _nested(structure: Any, layout: RowLayout, flats: Sequence[FloatArray]) -> Any:
    """A row in the template's structure, from the flat vector of each segment."""
    return in_structure(structure, layout.tensors(flats))


def _mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with ``function`` of each leaf in its place, called in the order of ``tf.nest``."""
    if isinstance(nest, Mapping):
        # The order of insertion is not part of a dict's structure; ``tf.nest`` sorts as well.
        found = {key: _mapped(function, nest[key]) for key in sorted(nest)}
        in_order = ((key, found[key]) for key in nest)
        is_ordered = isinstance(nest, collections.OrderedDict)
        return collections.OrderedDict(in_order) if is_ordered else dict(in_order)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_mapped(function, child) for child in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(_mapped(function, child) for child in nest)
    return function(nest)
