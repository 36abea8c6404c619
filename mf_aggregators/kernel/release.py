"""Releases: the one place where a row of noise is added to a sum of clipped updates.

A :class:`Release` is made from the claim that :func:`kernel.claim.check` proves: the same rows, and
the same sigma in units of the largest norm of the vector that a client adds. It clips the vectors
of clients to a grid, adds them up in integers, asks the record whether the round's row was used,
and adds the row. What is done to vectors before is a function of one client's data and of earlier
releases; what is done to a release afterwards is post-processing.

Roundings take a part of the noise. So Z has a standard deviation that is larger than sigma
(``kernel.integers``). A run that was extended goes on with the noise that it began with, and is
refused if that covers less than the sigma of its claim.

A row of noise that was added to one sum is added to no other: two sums under one row of noise
reveal their difference. So a :class:`ReleaseRecord` keeps the first sum of a row, as a digest that
tells nothing without the seed, and any other sum of that row is refused. Beside it stands the
digest of the claim that the row's noise is of, which is no secret.

**Rows in files.** Rows may be made a block at a time (``Blocks``), one tile of coordinates after
another, and each row of each tile is a file. The files are a cache of a function of (noising
matrix, seed, round): any of them may be missing, damaged or old, and is then made again, from the
first round on where what a block is made from is gone. ``tff.rows_on_disk`` makes the same rows in
a graph, and shares no files with this.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NoReturn, TypeAlias, final

import numpy as np

from mf_aggregators.kernel import draws, integers, numbers
from mf_aggregators.kernel.claim import Claim, Guarantee, Sealed, claim_of, made
from mf_aggregators.kernel.draws import NOISE_FORMAT, PLAIN, TILE, Compiled, Engine
from mf_aggregators.kernel.integers import IntegerRows, IntegerSums, Rounding, RowLayout, Segment
from mf_aggregators.kernel.numbers import FloatArray, IntArray, NotProved, RealArray, ReleaseError
from mf_aggregators.kernel.rows import BandedNoise, Blocks, NoiseRecursion, check_rounds

# The record of a spent round: it is no digest, since digests are longer.
_SPENT = b"spent"
# The names of a state's arrays that are not histories.
_NUMBERS_OF_STATES = "round_index", "seed", "stream", "release"
# The length of the digest at the beginning of a file of rows, in bytes.
_DIGEST_SIZE = 32
_ANOTHER_PROCESS = (
    "An aggregator without a noise directory cannot be pickled or used in another process, which "
    "would not know the rows that were used: give both a noise_directory, or make it in the "
    "process that releases, and move the state by save_state and load_state."
)
# Relative tolerance in the check that the noise of an extended run covers the sigma of its claim.
_TOLERANCE = 1e-12
# For each segment, the vectors of earlier rounds that later rows need.
_Histories: TypeAlias = Sequence[tuple[RealArray, ...]]


@final
class ReleaseRecord:
    """The record of which sum each row of noise was added to, in memory or in a directory.

    All records of a process are one record in its memory. Processes that use one directory
    share its digests. A deep copy of a record is the record itself.
    """

    _of_process: ClassVar[dict[tuple[str, int], bytes]] = {}

    def __init__(self, directory: pathlib.Path | None = None) -> None:
        """Opens the record of a directory, or that of the process.

        Args:
          directory: A private directory that exists; None to keep the record in memory, for this
            process alone.
        """
        self._directory, self._process = directory, os.getpid()
        # All aggregators of a process share these digests, because a state may continue with an
        # aggregator that was made anew, as in a notebook, or that has another directory.
        self._digests = self._of_process

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("ReleaseRecord has no subclasses.")

    def check(self, stream: str, i: int, of_sum: bytes, of_noise: bytes) -> None:
        """Records the digests of a round's sum and noise, or raises if others are recorded already.

        Args:
          stream: The name of the stream of noise.
          i: The round, from 0.
          of_sum: The keyed digest of the sum, 32 bytes.
          of_noise: The digest of the claim (``Claim.noise_digest``), 32 bytes.

        Raises:
          OSError: If the directory cannot be written.
          ReleaseError: If another digest is recorded for the round, or the round was spent, or the
            record is that of another process.
        """
        found = of_sum + of_noise
        known = self._digests.get((stream, i), found)
        if known == found:
            known = self._written(stream, i, found, replaces=False)
        # If several threads release the round, the digest of the first one is kept.
        before = self._digests.setdefault((stream, i), known)
        before = known if before == found else before
        if before == _SPENT:
            raise ReleaseError(f"Round {i} was spent: use the state that spend returned.")
        if before != found:
            raise ReleaseError(
                "The noise of this round was added to other data before, and the difference would "
                "have none. Use the clients and data of that time, the kept sum, or spend(state)."
            )

    def spend(self, stream: str, i: int) -> None:
        """Records that the round's row of noise must never be released from now on.

        Args:
          stream: The name of the stream of noise.
          i: The round, from 0.

        Raises:
          OSError: If the directory cannot be written.
          ReleaseError: If the record is that of another process.
        """
        self._written(stream, i, _SPENT, replaces=True)
        self._digests[stream, i] = _SPENT

    def _written(self, stream: str, i: int, content: bytes, *, replaces: bool) -> bytes:
        """Writes a round's record, if none is there or it replaces that; returns the kept one."""
        if self._directory is None:
            if os.getpid() != self._process:
                raise ReleaseError(_ANOTHER_PROCESS)
            return content
        path = self._directory / "released" / stream / f"round-{i}"
        _write_durably(path, content, replaces=replaces)
        return path.read_bytes()

    def __deepcopy__(self, _: object) -> "ReleaseRecord":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if self._directory is None:
            raise ReleaseError(_ANOTHER_PROCESS)
        return ReleaseRecord, (self._directory,)


@final
@dataclasses.dataclass(init=False, eq=False, repr=False, slots=True)
class ReleaseState(Sealed):
    """The state of a run between two rounds, with the secret seed, which is never printed.

    :class:`Release` alone makes states.

    Attributes:
      round_index: The round that comes next, from 0.
      seed: (2,) int64: the secret that all noise follows from.
      stream: (2,) int64: the public name of the stream of noise.
      histories: For each segment, the vectors of earlier rounds that later rows need, where rows
        are kept in memory. States of adjacent rounds share the vectors that both have.
      digest: The digest of the release.
    """

    round_index: int
    seed: IntArray
    stream: IntArray
    histories: tuple[tuple[RealArray, ...], ...]
    digest: bytes

    def __reduce__(self) -> NoReturn:
        raise TypeError("the state of a release cannot be pickled: use Release.arrays_of.")

    @property
    def stream_name(self) -> str:
        """The public name of the stream of noise, as it stands in names of files."""
        return "stream-" + "-".join(map(str, self.stream.tolist()))


def _state(i: int, seeds: Sequence[IntArray], histories: _Histories, digest: bytes) -> ReleaseState:
    """Makes the state before round i, from a seed and the name of its stream."""
    for array in (*seeds, *itertools.chain.from_iterable(histories)):
        array.flags.writeable = False
    values = dict(zip(("seed", "stream"), seeds, strict=True), histories=tuple(histories))
    return made(ReleaseState, {"round_index": i, "digest": digest, **values})


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """Releases the sums of a run's rounds with the noise of a claim: one row for each sum.

    Attributes:
      horizons: The claims or guarantees of the horizons that the run was extended to, the first one
        first. The last one has the rows, rounds and sigma of the whole run; a sigma of 0 adds no
        noise. Epsilons, deltas and participation do not affect the released numbers. Guarantees
        cannot be altered on the way here.
      norm: The largest L2 norm of a client's vector, the unit of sigma: the clip norm, or the norm
        of the joint vector if clip norms adapt.
      sums: The grid of vectors, and the most of them in a sum.
      layout: The tensors of a vector; None for a release that :meth:`with_layout` gives one.
      record: The record of released sums; by default that of this process.
      is_on_disk: Whether rows are made in blocks and kept in files.
      directory: A private directory for these files.
      label: The caller's options that must be the same for a state and its release.
      compiled: Returns faster functions, see ``draws.Engine``, or none. It is called if a vector
        has a whole tile. Tiles of Z are compared with the kernel when a run begins or continues,
        and in each round.
      rows: The rows of noise as integers, for a Z of standard deviation one.
      blocks: The blocks in which rows are made; None if rows are made one by one.
      stddev: The standard deviation of Z, in the units of vectors; 0 without a layout.
      digests: For each horizon of the run, the first one first, a digest of 32 bytes that differs
        if rows, sigma, norm, grid, layout, storage or label differ in any bit.
      noise_digests: For each horizon, its rounds and the ``noise_digest`` of its claim, which the
        record of sums shows openly.

    Raises:
      NotProved: If the rows are not of the kernel's classes, do not continue those of the horizon
        before, or the drawn noise covers less than the claim's sigma. It is a ValueError.
      TypeError: If an argument has the wrong type.
      ValueError: If roundings would take too much of the noise, the norm is below 1e-250, or
        integers would overflow.
    """

    horizons: Sequence[Claim | Guarantee]
    norm: float
    sums: IntegerSums
    _: dataclasses.KW_ONLY
    layout: RowLayout | None = None
    record: ReleaseRecord = dataclasses.field(default_factory=ReleaseRecord)
    is_on_disk: bool = False
    directory: pathlib.Path | None = None
    label: str = ""
    compiled: Callable[[], Compiled] | None = None
    rows: IntegerRows = dataclasses.field(init=False, repr=False)
    blocks: Blocks | None = dataclasses.field(init=False, repr=False)
    stddev: float = dataclasses.field(init=False)
    digests: tuple[bytes, ...] = dataclasses.field(init=False, repr=False)
    noise_digests: tuple[tuple[int, bytes], ...] = dataclasses.field(init=False, repr=False)
    _claims: tuple[Claim, ...] = dataclasses.field(init=False, repr=False)
    _roundings: tuple[Rounding, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        for each, kind in ((self.sums, IntegerSums), (self.record, ReleaseRecord)):
            if type(each) is not kind:
                raise TypeError(f"a release needs {kind.__name__}, found {numbers.shown(each)}.")
        # The claims are made anew, so that their numbers are those that constructors have checked.
        claims = tuple(map(claim_of, self.horizons))
        norm = numbers.positive_number(self.norm, "norm")
        if norm < integers.LEAST_NORM:
            raise ValueError(f"norm must be at least {integers.LEAST_NORM:g}, found {norm:g}.")
        self._set(horizons=tuple(self.horizons), _claims=claims, norm=norm)
        self._set(sums=dataclasses.replace(self.sums), is_on_disk=bool(self.is_on_disk))
        for each in claims:
            check_rounds(each.rows, each.num_rounds or 0)
        for before, after in itertools.pairwise(claims):
            if not _continues(before.rows, after.rows):
                raise NotProved("the rows of a horizon are not those of the one before, continued.")
        drawn = [each.rows for each in claims]
        if not self.has_noise:
            drawn = [BandedNoise(drawn[-1].num_rounds)]
        rows = [IntegerRows.of(each, drawn[0] if k else None) for k, each in enumerate(drawn)]
        ends = [each.num_rounds for each in drawn]
        blocks = [Blocks.of(each, ends[:k]) for k, each in enumerate(drawn)]
        kept = [each if self.is_on_disk else None for each in blocks]
        found = [(each.num_rounds or each.rows.num_rounds, each.noise_digest) for each in claims]
        self._set(noise_digests=tuple(found), rows=rows[-1], blocks=kept[-1])
        self._set(_roundings=tuple(map(Rounding.of, rows, kept)))
        self._bind()

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Release has no subclasses.")

    def __deepcopy__(self, memo: object) -> "Release":
        return self

    def __getstate__(self) -> dict[str, object]:
        # Guarantees cannot be pickled, so their claims are pickled in their place.
        return {**self.__dict__, "horizons": self._claims}

    @property
    def num_rounds(self) -> int:
        """The number of rounds for which there is noise."""
        return self.noise_digests[-1][0]

    @property
    def digest(self) -> bytes:
        """The last of ``digests``: a state with a digest of another release is refused."""
        return self.digests[-1]

    @property
    def has_noise(self) -> bool:
        """Whether the release adds noise; without noise, nothing is guaranteed."""
        return self._claims[0].sigma > 0.0

    def with_layout(self, layout: RowLayout) -> "Release":
        """Returns the same release, with the same record, for vectors of other tensors.

        Args:
          layout: The tensors.

        Raises:
          NotProved: As the constructor raises it.
          ValueError: As the constructor raises it.
        """
        if layout == self.layout:
            return self
        other = copy.copy(self)
        other._set(layout=layout)
        other._bind()
        return other

    def covered(self, num_parameters: int) -> float:
        """Returns the sigma for which the drawn noise is enough, after all roundings.

        Args:
          num_parameters: The number of entries of a vector.

        Raises:
          ValueError: If roundings would take too much of the noise.
        """
        return self._noise(num_parameters)[1][-1]

    def _noise(self, num_parameters: int) -> tuple[float, list[float]]:
        """Returns the standard deviation of Z, and for each horizon the sigma covered, in norms."""
        first = self._claims[0].sigma
        if not self.has_noise:
            return 0.0, [0.0] * len(self._claims)
        sizes = {"num_parameters": num_parameters, "largest_cohort": self.sums.largest_cohort}
        drawn = self._roundings[0].enlarged(first, **sizes)
        later = (each.covered(drawn, **sizes) for each in self._roundings[1:])
        return drawn, [first, *(min(first, each) for each in later)]

    def start(self, fixed_seed: IntArray | None = None) -> ReleaseState:
        """Returns the state of a new run, with a fresh secret seed and a fresh name of its stream.

        Args:
          fixed_seed: (2,) int64: the seed, in tests alone; None to draw it.

        Raises:
          ReleaseError: If the compiled function draws other noise than the kernel.
        """
        self._check_compiled()
        seed, stream = draws.fresh_seed()
        if fixed_seed is not None:
            seed = draws.checked_seed(fixed_seed).copy()
        return _state(0, (seed, stream), (), self.digest)

    def clipped(
        self,
        vector: Sequence[RealArray],
        into: list[IntArray] | None = None,
        engine: Engine = PLAIN,
    ) -> list[IntArray]:
        """Returns the clipped vector of a client, as integers in quantization steps.

        Args:
          vector: The client's arrays, of the shapes of the layout.
          into: As in ``integers.clip_to_grid``.
          engine: As in ``integers.clip_to_grid``.

        Returns:
          An int64 array for each array; all zeros if an entry is NaN or infinite.

        Raises:
          ValueError: If the arrays have other shapes.
        """
        shapes = self._known.shapes
        if tuple(np.shape(array) for array in vector) != shapes:
            raise ValueError(f"a vector must have arrays of the shapes {shapes}.")
        grid = self.sums.steps_per_clip_norm
        return integers.clip_to_grid(vector, self.norm, grid, into, engine)

    def next(
        self, state: ReleaseState, vectors: Iterable[Sequence[RealArray]], scales: Sequence[float]
    ) -> tuple[ReleaseState, list[FloatArray]]:
        """Clips the vectors of a round's clients, adds them up, and releases the sum with noise.

        Args:
          state: The state before the round.
          vectors: The vector of each client, taken one by one.
          scales: One number for each tensor, by which its release is multiplied. The numbers must
            have been known before the round.

        Returns:
          As :meth:`release` returns them.

        Raises:
          OSError: As :meth:`release` raises it.
          ReleaseError: As :meth:`release` raises it.
          ValueError: If vectors have other shapes.
        """
        shapes = self._known.shapes
        total: list[IntArray] = [np.zeros(shape, np.int64) for shape in shapes]
        record: list[IntArray] = [np.empty(shape, np.int64) for shape in shapes]
        number = 0
        with self._engine() as engine:
            for number, vector in enumerate(vectors, 1):
                self.clipped(vector, record, engine)
                if number <= self.sums.largest_cohort:
                    for sums, steps in zip(total, record, strict=True):
                        np.add(sums, steps, out=sums)
        return self.release(state, total, number, scales)

    def release(
        self,
        state: ReleaseState,
        sums: Sequence[IntArray],
        num_clients: int,
        scales: Sequence[float],
    ) -> tuple[ReleaseState, list[FloatArray]]:
        """Adds the round's row of noise to a sum and releases the result; no row gets two sums.

        Args:
          state: The state before the round.
          sums: The exact int64 sums of the arrays that :meth:`clipped` returned for the clients.
            They are copied first, so that later changes to them are not in the release.
          num_clients: The number of clients.
          scales: As in :meth:`next`.

        Returns:
          The next state, and a float64 array for each tensor: (sum + row) times its scale.

        Raises:
          OSError: If a directory cannot be written.
          ReleaseError: If there is no noise for a further round, there are more clients than a sum
            may have, the state is of another run, or the row was added to another sum.
          TypeError: If the sums are not plain arrays of int64.
          ValueError: If the sums have other shapes, or are larger than ``num_clients`` records
            allow.
        """
        # The sums are copied, so that the recorded sums are the released ones.
        sums = [*copy.deepcopy(sums)]
        number = numbers.integer_at_least(num_clients, 0, "num_clients")
        i = self._next_round(state)
        self._check_sums(sums, number)
        if number > self.sums.largest_cohort:
            most = self.sums.largest_cohort
            raise ReleaseError(f"More than {most} clients reported: their sum could overflow.")
        if not self.has_noise:
            return self._following(state, ()), self.added(i, sums, sums, scales)
        # The digest binds step and scales too: two releases of the same sums and row in different
        # steps would reveal the sums.
        step = float(self.rows.steps[i] * self.stddev)
        how = repr((self.digest, self._known, step, [float(scale) for scale in scales]))
        digest = numbers.digest(how, sums, state.seed.tobytes())
        claimed = next(each for rounds, each in self.noise_digests if i < rounds)
        self.record.check(state.stream_name, i, digest, claimed)
        flats, histories = self._next_row(state)
        released = self.added(i, sums, self._known.tensors(flats), scales)
        return self._following(state, histories), released

    def added(
        self, i: int, sums: Sequence[IntArray], row: Sequence[RealArray], scales: Sequence[float]
    ) -> list[FloatArray]:
        """Returns the release of a sum and a row, without looking at the record.

        Args:
          i: The round.
          sums: The int64 sums of records.
          row: The row of noise, an array of integers for each of ``sums``. Without noise, nothing
            is added.
          scales: As in :meth:`next`.

        Returns:
          A float64 array for each sum.
        """
        unit = self.norm / self.sums.steps_per_clip_norm
        step = float(self.rows.steps[i] * self.stddev)
        released = [np.empty(each.shape) for each in sums]

        def add(scale: float, piece: tuple[RealArray, RealArray, RealArray]) -> None:
            found, each, noise = piece
            wide = each.astype(np.float64)
            if self.has_noise:
                # The release is a function of these integers, so later floating-point roundings are
                # post-processing.
                whole = np.rint(wide * unit / step).astype(np.int64) + noise
                np.multiply(whole.astype(np.float64), step * scale, out=found)
            else:
                np.multiply(wide, unit * scale, out=found)

        with self._engine() as engine:
            for *tensors, scale in zip(released, sums, row, scales, strict=True):
                parts = (engine.pieces([tensor]) for tensor in tensors)
                engine.over(functools.partial(add, scale), [*zip(*parts, strict=True)])
        return released

    def spend(self, state: ReleaseState) -> ReleaseState:
        """Gives up a round: its row of noise must never be released from now on.

        Args:
          state: The state before the round.

        Returns:
          The state after the round.

        Raises:
          OSError: If a directory cannot be written.
          ReleaseError: If there is no noise for a further round, or the state is of another run.
        """
        i = self._next_round(state)
        self.record.spend(state.stream_name, i)
        return self._following(state, self._next_row(state)[1] if self.has_noise else ())

    def check_state(self, state: ReleaseState) -> None:
        """Raises ReleaseError unless a state is of this run, or of a run that this one extends.

        Args:
          state: The state.

        Raises:
          ReleaseError: If the state is of another run.
          TypeError: If the argument is not a state.
        """
        if type(state) is not ReleaseState:
            raise TypeError(f"a release needs its own state, found {numbers.shown(state)}.")
        # Before the first round, a state may be of a release without a layout of tensors.
        known = self.digests if state.round_index else (*self.digests, *self._digests_with(None))
        if state.digest not in known:
            raise ReleaseError(
                "The state belongs to another aggregator: another mechanism, extension, options or "
                "version. Use the aggregator of the state."
            )

    def arrays_of(self, state: ReleaseState) -> dict[str, RealArray]:
        """Returns a state as arrays with its secret seed, which :meth:`state_of` reads again.

        Args:
          state: The state.

        Raises:
          ReleaseError: If the state is of another run.
        """
        self.check_state(state)
        seeds, release = (state.seed, state.stream), np.frombuffer(state.digest, np.uint8)
        values = np.array(state.round_index), *seeds, release
        arrays = dict(zip(_NUMBERS_OF_STATES, values, strict=True))
        arrays |= {f"history_{k}": np.array(each) for k, each in enumerate(state.histories)}
        return {**arrays, "digest": np.frombuffer(_digest_of(arrays), np.uint8)}

    def state_of(self, arrays: Mapping[str, object]) -> ReleaseState:
        """Returns the state that :meth:`arrays_of` wrote, for this run or a run that it extends.

        Args:
          arrays: The arrays; other entries are ignored.

        Raises:
          KeyError: If an array is missing.
          ReleaseError: If the state is of another run.
          ValueError: If a number was altered since it was written.
        """
        numbered = map("history_{}".format, itertools.count())
        names = [*itertools.takewhile(lambda name: name in arrays, numbered)]
        known = {name: np.array(arrays[name]) for name in (*_NUMBERS_OF_STATES, *names)}
        if _digest_of(known) != np.asarray(arrays["digest"], np.uint8).tobytes():
            raise ValueError("its numbers are not as they were written")
        round_index, *seeds, release = (known[name] for name in _NUMBERS_OF_STATES)
        histories = [tuple(known[name]) for name in names]
        seeds = [*map(draws.checked_seed, seeds)]
        state = _state(int(round_index), seeds, histories, release.tobytes())
        self.check_state(state)
        self._check_compiled()
        return state

    def _engine(self) -> contextlib.AbstractContextManager[Engine]:
        size = self._known.size
        functions = self.compiled() if self.compiled is not None and size >= TILE else ()
        return Engine.of_size(size, functions)

    def _check_compiled(self) -> None:
        """Raises ReleaseError if a compiled function draws other noise than the kernel."""
        if self.layout is not None:
            with self._engine() as engine:
                if engine.fill_tile is not None:
                    draws.integers(draws.fresh_seed()[0], 0, 0, 1 << 20, engine)

    @property
    def _known(self) -> RowLayout:
        if self.layout is None:
            raise ValueError("the shapes of vectors are not known: use Release.with_layout.")
        return self.layout

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _bind(self) -> None:
        """Computes the attributes that follow from the layout, or raises ValueError."""
        self._set(digests=self._digests_with(self.layout), stddev=0.0)
        if self.layout is None:
            return
        size = self.layout.size
        drawn, covered = self._noise(size)
        for claim, (rounds, _), most in zip(self._claims, self.noise_digests, covered, strict=True):
            if size * rounds > claim.num_coordinates:
                found = f"{claim.num_coordinates} numbers of noise: {rounds} vectors of {size}"
                raise NotProved(f"the claim is for {found} have more.")
            if not claim.sigma <= most * (1.0 + _TOLERANCE):
                found = f"noise of {claim.sigma!r} norms, and the first horizon's covers {most!r}"
                how = "give num_parameters= to Mechanism.extended"
                raise NotProved(f"{rounds} rounds state {found}: {how}.")
        self._set(stddev=drawn * self.norm)

    def _digests_with(self, layout: RowLayout | None) -> tuple[bytes, ...]:
        grid = self.sums.steps_per_clip_norm, self.sums.largest_cohort
        options = NOISE_FORMAT, self.is_on_disk, self.label, self.norm, grid, layout
        claims = (self.noise_digests[: end + 1] for end in range(len(self.noise_digests)))
        return tuple(numbers.digest(repr((options, each))) for each in claims)

    def _next_round(self, state: ReleaseState) -> int:
        """Returns the next round's index; raises ReleaseError if there is no noise for it."""
        self.check_state(state)
        if state.round_index >= self.num_rounds:
            most = f"There is noise for {self.num_rounds} rounds"
            raise ReleaseError(f"{most}: stop training, or extend the mechanism.")
        return state.round_index

    def _check_sums(self, sums: Sequence[IntArray], number: int) -> None:
        """Raises TypeError or ValueError unless ``number`` clipped records can have these sums."""
        shapes, largest = self._known.shapes, number * self.sums.steps_per_clip_norm
        if len(sums) != len(shapes):
            raise ValueError(f"sums must be {len(shapes)} arrays, found {len(sums)}.")
        for array, shape in zip(sums, shapes, strict=True):
            if type(array) not in (np.ndarray, np.memmap, np.int64) or array.dtype != np.int64:
                raise TypeError(f"sums must be plain arrays of int64, found {type(array)}.")
            if array.shape != shape:
                raise ValueError(f"a sum has shape {array.shape}, and its tensor {shape}.")
            # A negative sum that was taken modulo a power of two would reveal more of a client than
            # its clip norm allows.
            if np.any(array > largest) or np.any(array < -largest):
                how = "take sums modulo a power of two with their sign"
                raise ValueError(f"a sum is too large for {number} records: {how}.")

    def _next_row(self, state: ReleaseState) -> tuple[list[IntArray], list[tuple[RealArray, ...]]]:
        """Returns the next row of each segment, in steps, and the histories after the round."""
        i, segments = state.round_index, self._known.segments
        if self.blocks is not None:
            if self.directory is None:
                raise ValueError("rows in files need a directory.")
            folder = self.directory / "rows" / state.stream_name
            files = RowsInFiles(self.rows, self.blocks, state.seed, folder)
            with self._engine() as engine:
                return [files.row(segment, i, engine) for segment in segments], []
        made, before = [], state.histories
        if i == 0:
            vectors = self.rows.recursion.num_state_vectors
            before = tuple(tuple(np.zeros((vectors, each.size))) for each in segments)
        with self._engine() as engine:
            for history, segment in zip(before, segments, strict=True):
                z = segment.row_of_z(state.seed, i, engine)
                made.append(self.rows.next_row(i, history, z, engine))
        return [row for row, _ in made], [after for _, after in made]

    def _following(self, state: ReleaseState, histories: _Histories) -> ReleaseState:
        seeds = state.seed, state.stream
        return _state(state.round_index + 1, seeds, histories, self.digest)


def _continues(first: NoiseRecursion, whole: NoiseRecursion) -> bool:
    """Returns whether the rows of a longer noising matrix begin with those of a shorter one."""
    number = first.num_rounds
    # Weights of rows of Z, and equal weights of rows of the noise, make different rows.
    if first.draws_earlier_rows_of_z != whole.draws_earlier_rows_of_z:
        return False
    if whole.num_rounds < number or not np.array_equal(first.diagonal, whole.diagonal[:number]):
        return False
    blocks = Blocks.of(first)
    longer = Blocks(whole, blocks.starts)
    pairs = ((blocks.transition(k), longer.transition(k)) for k in range(blocks.num_blocks))
    return all(itertools.starmap(np.array_equal, pairs))


def _digest_of(arrays: Mapping[str, RealArray]) -> bytes:
    """Returns a digest of all numbers of a state, keyed by the seed of the state."""
    return numbers.digest(repr([*arrays]), arrays.values(), arrays["seed"].tobytes())


@dataclasses.dataclass(frozen=True, eq=False)
class RowsInFiles:
    """Rows of one noising matrix and one seed, which are made in blocks and cached in files.

    Attributes:
      rows: The mechanism's rows as integers.
      blocks: The blocks in which rows are made.
      seed: (2,) int64: the stream's secret.
      directory: A private directory for this stream alone.
    """

    rows: IntegerRows
    blocks: Blocks
    seed: IntArray = dataclasses.field(repr=False)
    directory: pathlib.Path

    def row(self, segment: Segment, i: int, engine: Engine = PLAIN) -> IntArray:
        """Returns a segment's row, (segment.size,) int64 in steps; makes its block if needed.

        Each round also makes a share of the next block's tiles, so that no round makes a whole
        block.

        Args:
          segment: The segment of the row.
          i: The round, from 0.
          engine: How tiles are made.

        Raises:
          OSError: If the directory cannot be written.
          ReleaseError: If a compiled function differs from the kernel where they are compared.
        """
        block = int(np.searchsorted(self.blocks.starts, i, side="right")) - 1
        start, end = self.blocks.rounds(block)
        row = np.empty(segment.size, np.int64)
        # The range of tiles of the next block that this round makes.
        places = np.array([i - start, i - start + 1])
        first, last = segment.num_tiles * places // (end - start)

        def fill(number: int) -> None:
            part = row[number * TILE : (number + 1) * TILE]
            first_tile = segment.first_tile + number
            tile = dataclasses.replace(segment, first_tile=first_tile, size=len(part))
            found = self._read(tile, f"row-{i}", np.int32)
            part[:] = self._make(tile, block, engine)[i - start] if found is None else found
            is_next = first <= number < last and end < self.blocks.recursion.num_rounds
            if is_next and self._read(tile, f"row-{end}", np.int32) is None:
                self._make(tile, block + 1, engine)

        engine.over(fill, range(segment.num_tiles))
        return row

    def _make(self, tile: Segment, block: int, engine: Engine) -> IntArray:
        """Makes the rows of a block in one tile, (rows, size) int32, and writes them to files."""
        blocks, unit = self.blocks, self.rows.recursion.normalised
        start, vectors = int(blocks.starts[block]), unit.num_state_vectors
        kept = range(start - blocks.num_earlier_rows(block), start)
        known_rows = [self._read(tile, f"row-{i}", np.int32) for i in kept]
        rows = [each for each in known_rows if each is not None]
        first, zeros = block, np.zeros(vectors * tile.size)
        state = self._read(tile, f"state-{block}", np.float64) if vectors and block else zeros
        if state is None or len(rows) < len(known_rows):
            first, rows, state = 0, [], zeros
        state = state.reshape(vectors, tile.size)
        for number in range(first, block + 1):
            known = np.concatenate([np.reshape(rows, (-1, tile.size)), state])
            draw = functools.partial(self._row_of_z, tile, engine, blocks.first_row_of_z(number))
            made, state = self.rows.block(blocks.transition(number), known, draw)
            for i, row in enumerate(made, int(blocks.starts[number])):
                self._write(tile, f"row-{i}", row)
            if vectors and number + 1 < blocks.num_blocks:
                self._write(tile, f"state-{number + 1}", state)
            rows = [*rows, *made]
            rows = rows[max(0, len(rows) - unit.num_earlier_rows) :]
        # The loop removes files that neither the block before this one nor a later block needs.
        begin = int(blocks.starts[max(block - 1, 0)])
        oldest = {"row": begin - unit.num_earlier_rows, "state": block - 1}
        for path in self._path(tile, "").iterdir():
            kind, _, index = path.name.partition("-")
            if kind in oldest and index.isdigit() and int(index) < oldest[kind]:
                path.unlink(missing_ok=True)
        return made

    def _row_of_z(self, tile: Segment, engine: Engine, first: int, number: int) -> IntArray:
        # Threads work on different tiles, so each tile is computed on one thread.
        alone = dataclasses.replace(engine, pool=None)
        return tile.row_of_z(self.seed, first + number, alone)

    def _path(self, tile: Segment, name: str) -> pathlib.Path:
        return self.directory / f"tile-{tile.first_tile}" / name

    def _read(
        self, tile: Segment, name: str, dtype: type[np.int32 | np.float64]
    ) -> RealArray | None:
        """Returns the numbers of a file; None if it is missing, damaged or of another name."""
        try:
            contents = self._path(tile, name).read_bytes()
        except OSError:
            return None
        body = contents[_DIGEST_SIZE:]
        is_known = contents[:_DIGEST_SIZE] == self._digest(tile, name, body)
        return np.frombuffer(body, dtype) if is_known else None

    def _write(self, tile: Segment, name: str, kept: RealArray) -> None:
        body, path = np.ascontiguousarray(kept).tobytes(), self._path(tile, name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The file gets permissions for its owner alone, also in a folder that others may read.
        path.touch(0o600)
        # If the process is killed while it writes, the digest does not fit, and the file is made
        # again.
        path.write_bytes(self._digest(tile, name, body) + body)

    def _digest(self, tile: Segment, name: str, body: bytes) -> bytes:
        """Returns a file's digest, which also depends on seed, matrix, tile, round and size."""
        label = f"{tile.dtype} {tile.size} {tile.first_tile} {name}"
        return numbers.digest(label, [np.frombuffer(body, np.uint8)], self._key)

    @functools.cached_property
    def _key(self) -> bytes:
        """A digest of the rows' matrix, steps, blocks and seed, the key of the digests in files."""
        starts, seed = self.blocks.starts.tolist(), self.seed.tolist()
        made = [NOISE_FORMAT, self.rows.shift, starts, seed]
        return self.rows.recursion.fingerprint(made)


def _write_durably(path: pathlib.Path, content: bytes, *, replaces: bool) -> None:
    """Writes a private file durably: readers find the whole file or none, also after a crash.

    Args:
      path: The path of the file. Its folder is made if it is missing.
      content: The content.
      replaces: Whether an existing file is replaced; otherwise it stays.

    Raises:
      OSError: If the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            os.replace(partial, path)
        else:
            # Unlike renaming a file, linking it fails if the name is taken.
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
