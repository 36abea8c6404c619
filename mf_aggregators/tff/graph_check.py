"""Compares the graphs of a query with the kernel, before a run begins.

A guarantee is about what the kernel computes, and TFF runs graphs. So each new query runs its own
graphs in this process, on numbers that are drawn anew, and what they return is compared with what
the kernel returns, bit for bit:

- Clients: updates of all kinds that could leave the clip norm or the grid.
- Rounds: the first three in a row, over more than a tile of coordinates; the last and drawn ones
  from drawn histories; in the first, the last and a drawn tile. Then rounds that are to be refused.
- Rows in files: the rounds of the first blocks, and the end of the latest block that all blocks
  before can be made for. All blocks have one graph, with weights from files that have checksums.

The graphs are those of the run but for the sizes of tensors, which are cut: all tensors of more
than a tile have the same operations, and all of less. What differs is compared once more: floats
that are added up in another order round another number, with probability 1e-6 at most.
"""

import contextlib
import copy
import dataclasses
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mf_aggregators.kernel import draws, integers
from mf_aggregators.kernel.draws import STANDARD_DEVIATION, TILE
from mf_aggregators.kernel.integers import Segment
from mf_aggregators.kernel.numbers import IntArray, NotProved, RealArray
from mf_aggregators.kernel.release import RowsInFiles
from mf_aggregators.tff import processes
from mf_aggregators.tff.dp_query import (
    AdaptiveClipSumQuery,
    MatrixFactorizationSumQuery,
    NoiseParts,
    SampleState,
)
from mf_aggregators.tff.processes import NoiseState
from mf_aggregators.tff.release_record import ReleaseRecord
from mf_aggregators.tff.rows_on_disk import RowsOnDisk
from mf_aggregators.tff.tensor_rows import TensorNoise

# The number of entries that small tensors are cut to, and the number of a model's first tensors
# that are kept.
_FEW = 5
# The number of random coordinates of a wide row that are compared, besides those at the ends of
# tiles.
_COMPARED = 64
# The number of random rounds that are compared; if each draws many rows of Z, only one is.
_DRAWN_ROUNDS = 3
# The most rows and vectors in a history with which random rounds are compared for wide rows; with
# more, rows are cut further.
_MOST_WIDE_ROWS = 16
# The most rows of Z that are drawn to compare a late block of rounds.
_MOST_ROWS_OF_Z = 600
# The relative tolerance for state vectors, which are floats, as a share of the largest number.
_ROUNDINGS = 1e-11
# The keys of the graphs that were compared with the kernel in this process, and agree.
_graphs_of_kernel: set[tuple[object, ...]] = set()


def check(query: MatrixFactorizationSumQuery | AdaptiveClipSumQuery) -> None:
    """Raises NotProved if a query's graphs compute other numbers than the kernel's release.

    Args:
      query: The query.
    """
    is_scaled = isinstance(query, AdaptiveClipSumQuery)
    mechanism = query.mechanism if isinstance(query, AdaptiveClipSumQuery) else query
    parts = mechanism.parts
    if not mechanism.has_fixed_seed:
        _check_starts(mechanism)
    if isinstance(query, AdaptiveClipSumQuery):
        check_states(query, "mechanism", mechanism.structure)
    # Equal graphs are compared once in a process. The digest depends on all numbers that graphs
    # have.
    graphs = (
        *(parts.release.digest, parts.noise.specs, is_scaled),
        *(parts.record is None, mechanism.record_dtype),
    )
    if graphs in _graphs_of_kernel:
        return
    for _ in range(2):
        found = next(_differences(parts, is_scaled, mechanism.record_dtype), None)
        if found is None:
            _graphs_of_kernel.add(graphs)
            return
    raise NotProved(
        f"TensorFlow's graph differs from the kernel, for which guarantees are proved, in {found}: "
        "nothing can be released with this installation."
    )


class _Inside:
    """A stand-in for the query inside another query, which remembers its arguments."""

    def __init__(self, query: Any) -> None:
        self._query, generator = query, np.random.default_rng()
        self.before, self.after = (
            NoiseState._make([*map(tf.constant, numbers), (tf.constant(generator.normal(size=2)),)])
            for numbers in generator.integers(1, 2**40, (2, 5, 2))
        )
        self.given: tuple[object, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._query, name)

    def initial_global_state(self) -> NoiseState:
        """Returns a noise state with random numbers."""
        return self.before

    def scaled_result(self, sample: SampleState, state: Any, scales: Any = ()) -> tuple[Any, Any]:
        """Returns the sums of the sample as floats, and a random noise state."""
        self.given = (sample, state)
        floats = tf.nest.map_structure(lambda each: tf.cast(each, tf.float64), sample.steps)
        return floats, self.after

    def get_noised_result(self, sample: SampleState, state: Any) -> tuple[Any, Any, None]:
        """Returns the same as ``scaled_result``, and no event."""
        return (*self.scaled_result(sample, state), None)


def check_states(query: Any, name: str, specs: Any) -> None:
    """Raises NotProved if a query alters the sums or noise states of the query inside it.

    Args:
      query: The query, whose round is run on drawn numbers.
      name: The attribute that holds the query inside.
      specs: The structure of the sums of the query inside.
    """
    outside, inside = copy.copy(query), _Inside(getattr(query, name))
    setattr(outside, name, inside)
    generator = np.random.default_rng()
    numbers = [tf.constant(each) for each in generator.integers(1, 2**30, 2)]
    sums = tf.nest.map_structure(lambda _: tf.constant(generator.integers(-(2**30), 2**30)), specs)
    sample = SampleState(sums, *numbers)
    _, after, *_ = outside.get_noised_result(sample, outside.initial_global_state())
    found = *inside.given, *processes.states_in(after)
    expected = sample, inside.before, inside.after
    if not _same(tf.nest.flatten(found), tf.nest.flatten(expected)):
        raise NotProved("a query changes the noise state of the query inside it.")


def _check_starts(query: MatrixFactorizationSumQuery) -> None:
    """Raises NotProved if two starts of one graph share a word of their seeds or streams."""

    @tf.function(autograph=False)
    def started() -> tuple[tf.Tensor, tf.Tensor]:
        state = query.initial_global_state()
        return state.seed, state.stream

    start = started.get_concrete_function()
    one, other = (np.concatenate(start()) for _ in range(2))
    if np.any(one == other):
        raise NotProved("two runs of one TensorFlow graph have the same seed or stream of noise.")


def _differences(parts: NoiseParts, is_scaled: bool, dtype: tf.DType = tf.int64) -> Iterator[str]:
    generator, n, store = np.random.default_rng(), parts.release.num_rounds, parts.noise.store
    wide, narrow = (_cut(parts.noise.specs, most) for most in (TILE + _FEW, _FEW))
    yield from _of_clients(_with_specs(parts, wide), generator, dtype)
    if isinstance(store, RowsOnDisk):
        rounds = {narrow: [*range(min(4, n)), _late_round(store)]}
    else:
        rows = parts.release.rows.recursion
        kept = rows.num_earlier_rows + rows.num_state_vectors
        is_costly = rows.draws_earlier_rows_of_z or kept > _MOST_WIDE_ROWS
        rounds = {wide: [*range(min(3, n))]}
        number = 1 if rows.draws_earlier_rows_of_z else _DRAWN_ROUNDS
        late = [n - 1, *map(int, generator.integers(n, size=number))]
        rounds.setdefault(narrow if is_costly else wide, []).extend(late)
    for specs, chosen in rounds.items():
        with tempfile.TemporaryDirectory() as directory:
            compared = _Rounds(parts, specs, is_scaled, pathlib.Path(directory), generator)
            yield from compared.differences(sorted({*chosen}))


def _cut(specs: Sequence[tf.TensorSpec], most: int) -> tuple[tf.TensorSpec, ...]:
    """Returns the first tensors and each dtype's largest one, cut to fewer entries."""
    sizes = [spec.shape.num_elements() for spec in specs]
    by_size = sorted(range(len(specs)), key=sizes.__getitem__)
    largest = {specs[position].dtype: position for position in by_size}.values()
    return tuple(
        tf.TensorSpec([min(sizes[position], most if position in largest else _FEW)], spec.dtype)
        for position, spec in enumerate(specs)
        if position < _FEW or position in largest
    )


def _with_specs(parts: NoiseParts, specs: tuple[tf.TensorSpec, ...]) -> NoiseParts:
    release = parts.release.with_layout(TensorNoise.layout_of(specs))
    return NoiseParts(release, dataclasses.replace(parts.noise, specs=specs))


# ----- Clients.


def _of_clients(
    parts: NoiseParts, generator: np.random.Generator, dtype: tf.DType
) -> Iterator[str]:
    query = MatrixFactorizationSumQuery(parts, parts.noise.specs, record_dtype=dtype)
    graph, release = tf.function(query.preprocess_record, autograph=False), parts.release
    norm, steps = query.derive_sample_params(query.initial_global_state()), release.sums
    for update in _updates(parts, generator):
        found = graph(norm, tuple(tf.constant(array) for array in update))
        expected = [
            each.astype(dtype.as_numpy_dtype)
            for each in integers.clip_to_grid(update, release.norm, steps.steps_per_clip_norm)
        ]
        numbers = [*found.steps, found.num_records, found.least_steps]
        if not _same(numbers, [*expected, 1, -steps.steps_per_clip_norm]):
            yield "an update of a client"


def _updates(parts: NoiseParts, generator: np.random.Generator) -> Iterator[list[RealArray]]:
    """Yields updates that a wrong graph might clip or round differently than the kernel."""
    norm, sizes = parts.release.norm, [spec.shape[0] for spec in parts.noise.specs]
    whole = generator.normal(size=sum(sizes))
    whole *= norm / max(float(np.linalg.norm(whole)), 1e-9)
    one = np.where(np.arange(len(whole)) == generator.integers(max(1, len(whole))), norm, 0.0)
    step = norm / parts.release.sums.steps_per_clip_norm
    lengths = (0.0, 0.3, 1.0 - 2e-16, 1.0, 1.0 + 3e-16, 1.0 + 1e-6, 1e3, 1e35)
    special = (np.nan, np.inf, -np.inf, 5e-324, 1e-291, 1e-42)
    for flat in (
        *(length * each for length in lengths for each in (whole, one)),
        *(np.where(one > 0.0, each, rest * whole) for each in special for rest in (0.0, 0.1)),
        *((np.rint(0.5 * whole / step) + 0.5) * step, np.rint(whole / step) * step),
    ):
        arrays = np.split(flat, np.cumsum(sizes)[:-1])
        with np.errstate(over="ignore"):
            yield [
                array.astype(spec.dtype.as_numpy_dtype)
                for array, spec in zip(arrays, parts.noise.specs, strict=True)
            ]


# ----- Rounds.


class _Moved:
    """Stands for a store of rows, but makes the rows of later tiles."""

    def __init__(self, store: Any, tiles: tf.Tensor) -> None:
        self.rows, self.initial_history = store.rows, store.initial_history
        self._store, self._tiles = store, tiles

    def next_row(self, segment: Segment, *others: Any) -> Any:
        """Returns a row of the store, for a segment that begins at a later tile."""
        moved = dataclasses.replace(segment, first_tile=segment.first_tile + self._tiles)
        return self._store.next_row(moved, *others)


class _Rounds:
    """Runs rounds of a query with cut tensors, and compares them with the kernel."""

    def __init__(
        self,
        parts: NoiseParts,
        specs: tuple[tf.TensorSpec, ...],
        is_scaled: bool,
        directory: pathlib.Path,
        generator: np.random.Generator,
    ) -> None:
        cut = _with_specs(parts, specs)
        self._release, self._noise, self._record = cut.release, cut.noise, None
        if isinstance(self._noise.store, RowsOnDisk):
            store = dataclasses.replace(self._noise.store, directory=os.fspath(directory))
            self._noise = dataclasses.replace(self._noise, store=store)
        if parts.record is not None:
            self._record = ReleaseRecord(directory, cut.release.noise_digests)
        self._is_scaled, self._directory, self._generator = is_scaled, directory, generator
        self._graph = tf.function(self._result, autograph=False)
        self._seed, self._stream = draws.fresh_seed()
        before, after = (
            sum(segment.num_tiles for segment in each.noise.segments) for each in (parts, cut)
        )
        self._places = [0, before - after, int(generator.integers(before - after + 1))]
        if self._release.blocks is not None:
            # Segments of different widths cannot share the files of a tile, so only one place is
            # compared.
            self._places = self._places[generator.integers(3) :][:1]

    def _query(self, tiles: tf.Tensor) -> MatrixFactorizationSumQuery:
        moved: Any = _Moved(self._noise.store, tiles)
        noise = dataclasses.replace(self._noise, store=moved)
        parts = NoiseParts(self._release, noise, self._record)
        return MatrixFactorizationSumQuery(parts, noise.specs)

    def _result(self, state: Any, sample: SampleState, scale: tf.Tensor, tiles: tf.Tensor) -> Any:
        if not self._is_scaled:
            return self._query(tiles).get_noised_result(sample, state)[:2]
        return self._query(tiles).scaled_result(sample, state, [scale] * len(self._noise.specs))

    def differences(self, rounds: Sequence[int]) -> Iterator[str]:
        """Runs rounds in increasing order, and yields each difference from the kernel."""
        segments, generator = self._noise.segments, self._generator
        columns = [_compared(segment, generator) for segment in segments]
        state = self._query(0).initial_global_state()
        state = state._replace(seed=tf.constant(self._seed), stream=tf.constant(self._stream))
        most = self._release.sums.steps_per_clip_norm
        for i, tiles in zip(rounds, itertools.cycle(self._places), strict=False):
            if i != int(state.round_index):
                histories = tuple(self._drawn(i, each) for each in state.history)
                state = state._replace(round_index=tf.constant(i, tf.int64), history=histories)
            kept = [_at(each, of) for each, of in zip(state.history, columns, strict=True)]
            before, scale = state, float(2.0 ** generator.uniform(-3.0, 3.0))
            sums = [
                generator.integers(-most, most, spec.shape, endpoint=True)
                for spec in self._noise.specs
            ]
            released, state = self._run(state, sums, scale, tiles)
            for number, (segment, of) in enumerate(zip(segments, columns, strict=True)):
                row, after = self._row(segment, tiles, i, of, kept[number])
                summed, found = (
                    np.concatenate([np.asarray(each[position]) for position in segment.positions])
                    for each in (sums, released)
                )
                scales = [scale if self._is_scaled else 1.0]
                (expected,) = self._release.added(i, [summed[of]], [row], scales)
                if not _same([found[of]], [expected.astype(segment.dtype)]):
                    yield f"the release of round {i + 1}"
                history = _at(state.history[number], of)
                if not _close(history[len(history) - len(after) :], after):
                    yield f"the state kept of round {i + 1}"
            following = state.round_index, state.seed, state.stream
            if not _same(following, [i + 1, self._seed, self._stream]):
                yield f"the state after round {i + 1}"
        yield from self._not_refused(before, sums, scale, tiles)

    def _run(
        self,
        state: Any,
        sums: Sequence[IntArray],
        scale: float,
        tiles: int,
        num_records: int = 1,
        wrapped: int = 0,
    ) -> Any:
        least = wrapped - num_records * self._release.sums.steps_per_clip_norm
        counts = tf.constant(num_records, tf.int64), tf.constant(least, tf.int64)
        sample = SampleState(tuple(map(tf.constant, sums)), *counts)
        wide_scale = tf.constant(scale, tf.float64)
        return self._graph(state, sample, wide_scale, tf.constant(tiles, tf.int64))

    def _not_refused(
        self, state: Any, sums: list[IntArray], scale: float, tiles: int
    ) -> Iterator[str]:
        """Yields the releases that the graphs should refuse, but do not refuse."""
        last = tf.constant(self._noise.recursion.num_rounds, tf.int64)
        past = state._replace(round_index=last)
        other = state._replace(fingerprint=state.fingerprint + 1)
        refused: dict[str, tuple[Any, ...]] = {
            "the last round": (past, sums, scale, tiles),
            "states of other runs": (other, sums, scale, tiles),
            "the most clients": (state, sums, scale, tiles, self._release.sums.largest_cohort + 1),
            "sums that wrapped around": (state, sums, scale, tiles, 1, 1),
        }
        if self._record is not None:
            refused["the record of sums"] = (state, [each + 1 for each in sums], scale, tiles)
        if self._record is not None and self._is_scaled:
            refused["the record of scales"] = (state, sums, 2.0 * scale, tiles)
        for name, arguments in refused.items():
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                self._run(*arguments)
                yield name

    def _drawn(self, i: int, history: tf.Tensor) -> tf.Tensor:
        """Returns a random history of a segment before a round, as large as rows of noise."""
        scale = STANDARD_DEVIATION / self._release.rows.row_to_z
        numbers = scale * self._generator.normal(size=history.shape)
        if history.dtype.is_floating:
            return tf.constant(numbers)
        # Rows from before the first round are zero.
        numbers[:, : max(0, history.shape[1] - i)] = 0.0
        return tf.constant(np.rint(numbers), tf.int32)

    def _row(
        self, segment: Segment, tiles: int, i: int, columns: IntArray, history: RealArray
    ) -> tuple[IntArray, RealArray]:
        """Returns the kernel's row of noise in some columns, and the history after it."""
        release, rows = self._release, self._release.rows
        segment = dataclasses.replace(segment, first_tile=segment.first_tile + tiles)
        if release.blocks is not None:
            folder = self._directory / "kernel"
            files = RowsInFiles(rows, release.blocks, self._seed, folder)
            return files.row(segment, i)[columns], history
        first = rows.recursion.normalised.first_row_of_z(i)
        *earlier, z = (segment.row_of_z(self._seed, j)[columns] for j in range(first, i + 1))
        # The state has no rows of Z, so the kernel's history of them is not compared.
        vectors = rows.recursion.normalised.num_state_vectors
        known = np.vstack([history[:vectors], *earlier]) if earlier else history
        row, after = rows.next_row(i, [*known], z)
        after = after[:vectors] if rows.recursion.normalised.draws_earlier_rows_of_z else after
        return row, np.reshape([*after], (-1, len(columns)))


def _compared(segment: Segment, generator: np.random.Generator) -> IntArray:
    """Returns the coordinates to compare: the ends of a segment and its tiles, and random ones."""
    starts = np.arange(0, segment.size, TILE)
    drawn = generator.integers(segment.size, size=_COMPARED)
    return np.unique(np.concatenate([starts, starts[1:] - 1, [segment.size - 1], drawn]))


def _at(history: tf.Tensor, columns: IntArray) -> RealArray:
    """Returns a segment's history at some coordinates: (rows and vectors, columns)."""
    return np.asarray(history)[columns // TILE, :, columns % TILE].T


def _late_round(store: RowsOnDisk) -> int:
    """Returns the last round of the latest block that needs few rows of Z to make."""
    blocks, recursion = store.blocks, store.rows.recursion.normalised
    drawn = blocks.starts[1:] - [blocks.first_row_of_z(block) for block in range(blocks.num_blocks)]
    if recursion.num_earlier_rows or recursion.num_state_vectors:
        drawn = np.cumsum(drawn)
    return int(blocks.starts[1 + np.flatnonzero(drawn <= _MOST_ROWS_OF_Z)[-1]]) - 1


def _same(found: Sequence[object], expected: Sequence[object]) -> bool:
    """Whether two sequences of arrays are equal, bit for bit."""
    return len(found) == len(expected) and all(
        np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for one, other in zip(found, expected, strict=True)
    )


def _close(found: RealArray, expected: RealArray) -> bool:
    """Whether integers are equal, and floats are equal but for rounding errors."""
    allowed = _ROUNDINGS * np.max(np.abs(expected), initial=0.0)
    return bool(np.all(np.abs(found - expected) <= (allowed if found.dtype.kind == "f" else 0)))
