"""The aggregator in NumPy, without TensorFlow: what ``mf_dp_aggregator`` releases, bit for bit.

    aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=100)
    state = aggregator.initialize()
    state, release = aggregator.next(state, updates)

``updates`` is an iterable of one structure of arrays for each client (dicts, lists, tuples and
named tuples of arrays, whichever framework makes them), of which one at a time is in memory.
``release`` has the structure of the first: (the sum of the clipped updates + row i of
``noise_multiplier * clip_norm * sens(C) * C^-1 Z``) / clients_per_round (BandMF Alg. 1).

The same seed and updates give the same integers as in the graphs of ``tff``, and the same bits of
what is released. So each of the two is a test of the other, and this one says in plain operations
what is done. A framework that adds up by itself (a secure sum, for one) takes the two halves of
``next``: :meth:`Aggregator.record` on each client, and :meth:`Aggregator.release` on the sum.
"""

import copy
import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mf_aggregators import adaptive_clip, atomic_files, inputs
from mf_aggregators.adaptive_clip import AdaptiveClip, ClipState, NoiseSplit
from mf_aggregators.kernel import draws, gaussian, integers, validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray, RealArray
from mf_aggregators.kernel.blocks import Blocks
from mf_aggregators.kernel.draws import DEFAULT_SOURCE, NoiseSource
from mf_aggregators.kernel.errors import Error
from mf_aggregators.kernel.integer_rows import IntegerRows, Rounding, RowLayout, total_size
from mf_aggregators.kernel.rows import IndependentNoise, NoiseState, fingerprint
from mf_aggregators.kernel.rows_in_files import RowsInFiles
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise import NOISE_FORMAT, nests
from mf_aggregators.noise import noise_directory as noise_directories
from mf_aggregators.noise.costs import NoiseStorage

# Files of this format are never mistaken for those of another.
_STATE_FORMAT = 2
# Stands in the record for a round that was spent: no digest is as short.
_SPENT = b"spent"
_ANOTHER_PROCESS = (
    "give both a noise_directory, or make the aggregator of the mechanism in the process that "
    "releases, and move the state by save_state and load_state"
)
_NO_TEMPLATE = (
    "without an update, nothing says what is to be released: call "
    "aggregator.with_template(an update).{method}, or make the aggregator with template=."
)

# The shape, the dtype's name and the path (``nests.named_leaves``) of each array of an update.
_Tensors: TypeAlias = tuple[tuple[tuple[int, ...], str, str], ...]


class ReleaseError(Error, RuntimeError):
    """A round that must not be released; nothing was, and the state is as it was."""


class StateError(Error, ValueError):
    """A file that holds no state that a run can go on from."""


@dataclasses.dataclass(frozen=True, eq=False)
class AggregatorState:
    """Where a run stands between rounds. A value: no round changes it.

    Attributes:
      round_index: The round that comes next, from 0.
      seed: (2,) int64: the secret that all noise follows from.
      stream: (2,) int64: the name of the stream of noise, which is not secret.
      tensors: The shape, the dtype's name and the path of each array of an update, in the order of
        ``noise.nests``; None before the first update, where no template was given.
      histories: What rows need of earlier rounds, where they are kept in memory.
      clip: The clip norm that adapts; None for a constant one.
      identity: Tells the aggregator that the state is of, with all of its options, from others.
    """

    round_index: int
    seed: IntArray = dataclasses.field(repr=False)
    stream: IntArray
    tensors: _Tensors | None
    histories: tuple[NoiseState, ...] = dataclasses.field(repr=False)
    clip: ClipState | None
    identity: bytes = dataclasses.field(repr=False)


class _ReleaseRecord:
    """Digests of the sums that rows of noise were added to: in this process, or in a directory.

    Copies of an aggregator share it, and all aggregators of a process that have no directory share
    one. Other processes share the directory's digests.
    """

    _of_process: ClassVar[dict[tuple[str, int], bytes]] = {}

    def __init__(self, directory: pathlib.Path | None) -> None:
        self._directory, self._process = directory, os.getpid()
        # A state may go on with an aggregator that was made anew, as in a notebook.
        self._digests = self._of_process if directory is None else {}

    def first(self, stream: str, i: int, found: bytes) -> bytes:
        """Returns the first digest of a stream's round: ``found``, if there is no other."""
        known = self._digests.get((stream, i), found)
        if known == found:
            known = self._write(atomic_files.write_once, stream, i, found) or found
        # The first of several threads releases.
        before = self._digests.setdefault((stream, i), known)
        return known if before == found else before

    def spend(self, stream: str, i: int) -> None:
        """Records that a round's row is never released from now on."""
        self._write(atomic_files.write_bytes, stream, i, _SPENT)
        self._digests[stream, i] = _SPENT

    def _write(self, write: Callable[..., Any], stream: str, i: int, content: bytes) -> Any:
        """Writes the record of a round into the directory, if there is one."""
        if self._directory is None:
            if os.getpid() != self._process:
                raise ReleaseError(
                    "The aggregator was made in another process, which may add this round's noise "
                    f"to other data: {_ANOTHER_PROCESS}."
                )
            return None
        path = self._directory / "released" / stream / f"round-{i}"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write(path, content)

    def __deepcopy__(self, _: Any) -> "_ReleaseRecord":
        return self

    def __reduce__(self) -> Any:
        if self._directory is None:
            raise ReleaseError(
                "An aggregator without a noise directory is not pickled: the copy would not know "
                f"which rows of noise this one has used. {_ANOTHER_PROCESS.capitalize()}."
            )
        return _ReleaseRecord, (self._directory,)


class Aggregator:
    """Clips updates, adds them up in integers, adds the round's row of noise, and averages.

    It holds no state of a run but a record of what each round's noise was added to, so that a round
    that is repeated from an older state is refused with other updates: the difference of two sums
    under one row would have no noise. Without a ``noise_directory``, all aggregators of a process
    share a record that ends with it: then the object is not pickled, and a forked process releases
    nothing with it. With one, the record is in the directory.

    A state goes on with an aggregator of the same mechanism and options, or of a mechanism that
    extends it, and with no other.

    The state has the secret seed. Whoever can read it can subtract the noise.

    A run that states its guarantee reads ``mechanism``. Sums are divided by ``clients_per_round``.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        clip_norm: float | AdaptiveClip,
        clients_per_round: float,
        *,
        template: Any = None,
        seed: int | None = None,
        noise_storage: str = NoiseStorage.STATE.value,
        noise_directory: str | os.PathLike[str] | None = None,
        noise_source: str = DEFAULT_SOURCE.value,
        secure_aggregation_bits: int | None = None,
        largest_cohort: int | None = None,
        allow_no_noise: bool = False,
    ) -> None:
        """Creates the aggregator.

        Args:
          mechanism: What the run's guarantee is about. Nothing here draws clients: where it has a
            sampling scheme, every round takes those whom ``scheme.sampler(seed)`` draws, in secret.
          clip_norm: The L2 norm to which each client's whole update is clipped: a number, or how
            it adapts.
          clients_per_round: What the noisy sum is divided by, fixed in advance: the cohort size.
          template: A structure like an update, of arrays or of anything with a shape and a dtype.
            None takes that of the first update. If the number of clients is drawn, it is needed: a
            round without clients is released like any other.
          seed: For tests only: an integer that all noise follows from, with a warning. None draws
            a fresh secret from the operating system.
          noise_storage: Where rows that later ones follow from are kept: "state", in memory, or
            "disk", in files below ``noise_directory``.
          noise_directory: A private directory for rows and the record of what was released; None
            for a temporary one where rows need one.
          noise_source: What random bits come from: "chacha20" or "philox".
          secure_aggregation_bits: The width of the integers of a secure sum, 24 to 62; None for
            64 in the open.
          largest_cohort: The most updates of a sum, as for ``mf_dp_aggregator``.
          allow_no_noise: Whether ``noise_multiplier`` may be zero, which protects nobody.

        Raises:
          TypeError: If an argument has the wrong type.
          ValueError: If a number is out of its range, or a directory cannot be used.
        """
        if not isinstance(mechanism, Mechanism):
            raise TypeError(
                f"mechanism must be a Mechanism, found {validation.shown(mechanism)}: "
                "mf_aggregators.calibrate or mf_aggregators.load makes one."
            )
        if mechanism.noise_multiplier == 0.0 and allow_no_noise is not True:
            raise ValueError(
                "noise_multiplier is 0, which adds no noise and protects nobody: say "
                "allow_no_noise=True for a run without privacy, to compare with."
            )
        self.mechanism = mechanism
        self.clients_per_round = validation.positive_number(clients_per_round, "clients_per_round")
        self._sums = integers.integer_sums(
            secure_aggregation_bits,
            mechanism.largest_cohort(largest_cohort, secure_aggregation_bits),
            clients_per_round,
        )
        self._storage = inputs.member(NoiseStorage, noise_storage, "noise_storage")
        if self._storage is NoiseStorage.AUTO:
            raise ValueError("noise_storage must be 'state' or 'disk' here, found 'auto'.")
        self._source = inputs.member(NoiseSource, noise_source, "noise_source")
        is_on_disk = self._storage is NoiseStorage.DISK
        self._directory: pathlib.Path | None = None
        if noise_directory is not None or is_on_disk:
            self._directory = noise_directories.open_directory(noise_directory)
        self._fixed_seed = draws.seed_of(seed)
        first = mechanism.horizons[0]
        self._multiplier = first.noise_multiplier
        self._clip: AdaptiveClip | None = None
        self._split: NoiseSplit | None = None
        if isinstance(clip_norm, AdaptiveClip):
            self._clip = clip_norm
            self._split = adaptive_clip.split_noise(
                self._multiplier,
                clip_norm.clipped_count_stddev_for(self._multiplier, self.clients_per_round),
            )
            self._norm = self._split.vector_norm
            self._sums.check_means(self._norm, self._split.indicator_weight)
        else:
            self._norm = validation.of_float32(clip_norm, "clip_norm")
        self._check_floats()
        self._unit = self._norm / self._sums.steps_per_clip_norm
        recursion = mechanism.noise_recursion()
        if self._multiplier == 0.0:
            recursion = IndependentNoise(recursion.num_rounds)
        if self._multiplier > 0.0 and mechanism.extends is not None:
            self._rows = IntegerRows.continuing(first.noise_recursion(), recursion)
            horizons = mechanism.factorization.plans
        else:
            self._rows, horizons = IntegerRows.of(recursion), ()
        self._blocks = Blocks.of(recursion, horizons) if is_on_disk else None
        self._rounding = Rounding.of(self._rows, self._blocks)
        self._template = template
        # A temporary directory ends with the process that made it.
        self._record = _ReleaseRecord(None if noise_directory is None else self._directory)
        self._identities = tuple(map(self._identity, mechanism.horizons))
        if template is not None:
            self._check_size(_tensors_of(template))

    def with_template(self, template: Any) -> "Aggregator":
        """Returns the same aggregator, with the same record, for updates like a template.

        Args:
          template: A structure of arrays, or of anything with a shape and a dtype.

        Raises:
          TypeError: If something in it is not floating point.
          ValueError: If no guarantee is stated for updates of this size.
        """
        self._check_size(_tensors_of(template))
        other = copy.copy(self)
        other._template = template
        return other

    def initialize(self) -> AggregatorState:
        """Returns the state before the first round, with a fresh secret unless it is fixed.

        Raises:
          ValueError: If the number of clients is drawn and there is no template.
        """
        scheme = self.mechanism.sampling
        if self._template is None and scheme is not None and scheme.has_random_sizes:
            raise ValueError(
                "the aggregator needs template=, arrays of an update's shapes and dtypes: the "
                "number of clients is drawn, and a batch without any is released like any other."
            )
        drawn = np.frombuffer(secrets.token_bytes(32), "<i8").astype(np.int64)
        seed, stream = drawn[:2] if self._fixed_seed is None else self._fixed_seed, drawn[2:]
        clip = None if self._clip is None else self._clip.first_state
        state = AggregatorState(0, seed, stream, None, (), clip, self._identities[-1])
        if self._template is None:
            return state
        return self._with_tensors(state, _tensors_of(self._template))

    def next(self, state: AggregatorState, updates: Iterable[Any]) -> tuple[AggregatorState, Any]:
        """Runs a round.

        Args:
          state: What :meth:`initialize` or the last round returned.
          updates: One structure of arrays for each client, all of the same shapes and dtypes. They
            are taken one by one.

        Returns:
          The next state, and what is released: the noisy mean, in the structure of the first
          update (of the template, if there is none) and in its dtypes.

        Raises:
          OSError: If the noise directory cannot be written.
          ReleaseError: If there is noise for no further round, there are more clients than a sum
            may have, or the round's noise was added to other updates before.
          TypeError: If an update has arrays that are not floating point.
          ValueError: If an update has other tensors, names or containers than the first, or there
            is neither an update nor a template.
        """
        structure, number = self._template, 0
        total: list[IntArray] | None = None
        for update in updates:
            structure = update if structure is None else structure
            if state.tensors is None:
                state = self._with_tensors(state, _tensors_of(update))
            record = self.record(state, update)
            total = record if total is None else [a + b for a, b in zip(total, record, strict=True)]
            number += 1
        if structure is None:
            raise ValueError(_NO_TEMPLATE.format(method="next(state, updates)"))
        if total is None:
            vector = self._vector(_tensors_of(structure))
            total = [np.zeros(shape, np.int64) for shape, *_ in vector]
        return self.release(state, total, number, structure)

    def record(self, state: AggregatorState, update: Any) -> list[IntArray]:
        """Returns what a client adds to the sum: its clipped update as integers.

        Args:
          state: The state before the round. It has the secret seed, and must not leave the server:
            a client takes the first state of an aggregator of its own, with the server's ``clip``.
          update: Its update.

        Returns:
          An int64 array for each tensor, and a scalar one for the clipped-count indicator where
          the clip norm adapts. All zeros if an entry is NaN or infinite.

        Raises:
          TypeError: If it has anything but plain arrays of floating point.
          ValueError: If it has other tensors, names or containers than updates before.
        """
        arrays, tensors = nests.leaves_of(update), _tensors_of(update, is_array=True)
        if state.tensors is not None:
            self._with_tensors(state, tensors)
        if self._split is None or state.clip is None:
            vector = arrays
        else:
            clipped, indicator = integers.clip_with_indicator(arrays, state.clip.norm)
            vector = [*clipped, np.asarray(indicator * self._split.indicator_weight)]
        return integers.clip_to_grid(vector, self._norm, self._sums.steps_per_clip_norm)

    def release(
        self, state: AggregatorState, sums: Sequence[IntArray], num_clients: int, template: Any
    ) -> tuple[AggregatorState, Any]:
        """Releases a round whose records were added up elsewhere.

        The same sums give the same bits as often as they are released. So a server that keeps the
        sums of a round, in a file for its owner alone, until the next state is saved can release
        them again after a crash, even if the round's clients are gone.

        Args:
          state: The state before the round.
          sums: The sum of what :meth:`record` returned for each client: exact, in int64.
          num_clients: How many clients that were.
          template: A structure like an update.

        Returns:
          As :meth:`next` does.

        Raises:
          OSError: As there.
          ReleaseError: As there.
          TypeError: If the sums are no plain arrays of int64.
          ValueError: If the sums have other shapes than updates of the template, or are larger than
            those of so many records can be: a sum modulo a power of two has a sign.
        """
        number = validation.integer_at_least(num_clients, 0, "num_clients")
        tensors = _tensors_of(template)
        state = self._continued(self._with_tensors(state, tensors))
        vector = self._vector(tensors)
        largest = number * self._sums.steps_per_clip_norm
        if len(sums) != len(vector):
            raise ValueError(
                f"sums must be {len(vector)} arrays, as record() returns them, found {len(sums)}."
            )
        for array, (shape, *_) in zip(sums, vector, strict=True):
            found = getattr(array, "dtype", "")
            is_numpy = isinstance(array, np.ndarray | np.generic) and nests.is_plain(array)
            if not is_numpy or found != np.int64:
                raise TypeError(
                    f"sums of records must be plain NumPy arrays of int64, found a "
                    f"{type(array).__name__} {found}".rstrip()
                    + "."
                )
            if array.shape != shape:
                raise ValueError(f"a sum has shape {array.shape}, and its tensor {shape}.")
            # A residue of a negative sum would tell more of a client than its clip norm.
            if np.any(array > largest) or np.any(array < -largest):
                raise ValueError(
                    f"no {number} records have such a sum: numbers modulo a power of two have to "
                    "be taken with their sign."
                )
        i = self._next_round(state)
        if number > self._sums.largest_cohort:
            raise ReleaseError(
                f"More than {self._sums.largest_cohort} clients reported, and the integers that "
                "their updates are summed in could overflow: nothing is released of this round."
            )
        step = float(self._rows.steps[i] * self._stddev(tensors))
        if self._multiplier > 0.0:
            self._check_released(state, sums, step)
        flats, histories = self._next_row(state)
        rows = self._layout(tensors).tensors(flats)
        clip = state.clip
        # Noise and sum alike are in units of this round's norm, which was known before it.
        scales = [1.0] * len(vector)
        if clip is not None and self._split is not None:
            per_indicator = 1.0 / (self._split.indicator_weight * self.clients_per_round)
            scales = [*([clip.norm] * len(tensors)), per_indicator]
        released = [
            self._noised(steps, row, step, scale)
            for steps, row, scale in zip(sums, rows, scales, strict=True)
        ]
        if self._clip is not None and clip is not None:
            *released, indicators = released
            fraction = adaptive_clip.INDICATOR_WITHIN + float(indicators)
            clip = self._clip.following(clip, fraction)
        # As tensorflow-privacy's NormalizedQuery divides.
        clients = np.float32(self.clients_per_round)
        means = []
        for noised, (_, dtype, _) in zip(released, tensors, strict=True):
            wide = noised.astype(nests.NOISE_DTYPES[dtype])
            means.append(np.asarray(wide / wide.dtype.type(clients), dtype))
        following = dataclasses.replace(state, round_index=i + 1, histories=histories, clip=clip)
        return following, nests.in_structure(template, means)

    def spend(self, state: AggregatorState) -> AggregatorState:
        """Gives up a round: its row of noise is never released from now on.

        For a server that crashed after ``next`` and before ``save_state`` and can release neither
        the same updates nor their sum again. Nobody knows whether the round's release left the
        server, so the clients of the round count as having taken part, and stay in the ledger. The
        clip norm stays.

        Args:
          state: The state before the round. The same state may be spent again.

        Returns:
          The state after the round: save it.

        Raises:
          OSError: If the noise directory cannot be written.
          ReleaseError: If there is noise for no further round, or the state is that of another
            aggregator.
          ValueError: If neither the state nor a template says what updates are like.
        """
        state = self._continued(state)
        i = self._next_round(state)
        if state.tensors is None:
            if self._template is None:
                raise ValueError(_NO_TEMPLATE.format(method="spend(state)"))
            state = self._with_tensors(state, _tensors_of(self._template))
        self._record.spend(_name(state), i)
        _, histories = self._next_row(state)
        return dataclasses.replace(state, round_index=i + 1, histories=histories)

    def metrics(self, state: AggregatorState) -> dict[str, float]:
        """Returns what may be shown of a state: the rounds released, and the clip norm's numbers.

        Args:
          state: The state after a round.

        Returns:
          ``rounds_released``, with those that were spent, and, where the clip norm adapts, the last
          released round's ``clip_norm`` and ``unclipped_fraction`` and the ``next_clip_norm``: all
          of them released with noise.
        """
        found: dict[str, float] = {"rounds_released": state.round_index}
        if state.clip is not None:
            found["clip_norm"] = state.clip.released_norm
            found["unclipped_fraction"] = state.clip.released_fraction
            found["next_clip_norm"] = state.clip.norm
        return found

    def save_state(self, state: AggregatorState, path: str | os.PathLike[str]) -> None:
        """Writes a state, whole or not at all, for its owner alone: it has the secret seed.

        Args:
          state: The state.
          path: The file, by convention ``.npz``.

        Raises:
          OSError: If it cannot be written.
          ReleaseError: If it is the state of another aggregator.
        """
        self._check_identity(state)
        described = {
            "state_format": _STATE_FORMAT,
            "round_index": state.round_index,
            "identity": state.identity.hex(),
            "tensors": state.tensors,
        }
        arrays = {f"history_{n}": each.history for n, each in enumerate(state.histories)}
        with atomic_files.writing(path, mode=0o600) as file:
            np.savez(
                file,
                described=np.array(json.dumps(described)),
                seed=state.seed,
                stream=state.stream,
                clip=np.array([] if state.clip is None else state.clip, np.float64),
                **arrays,
            )

    def load_state(self, path: str | os.PathLike[str]) -> AggregatorState:
        """Reads what :meth:`save_state` wrote, for the same mechanism or one that extends it.

        Args:
          path: The file.

        Raises:
          StateError: If it is missing, damaged, open to others (whoever reads it can subtract the
            noise), of another mechanism or other options, or of a version whose noise is another
            one; or if updates of its size are refused by a mechanism that extends it.
        """
        try:
            noise_directories.check_private(path, "the state")
            arrays = inputs.archived_arrays(path)
            described = inputs.parsed_json(str(arrays["described"]))
            if described["state_format"] != _STATE_FORMAT:
                raise ValueError(
                    f"its format is {described['state_format']}, and this version of "
                    f"mf_aggregators reads format {_STATE_FORMAT} alone: finish a run in the "
                    "version that began it"
                )
            i, tensors = int(described["round_index"]), described["tensors"]
            if described["identity"] not in [each.hex() for each in self._identities]:
                raise ValueError(
                    "it is of another mechanism or another extension, of other options, or of a "
                    "version with other noise"
                )
            if tensors is not None:
                tensors = tuple(
                    (tuple(shape), str(dtype), str(path)) for shape, dtype, path in tensors
                )
                self._check_size(tensors)
            clip = None
            if len(arrays["clip"]):
                clip = ClipState._make(map(float, arrays["clip"]))
                clip = clip._replace(num_fractions=int(clip.num_fractions))
            state = AggregatorState(
                i,
                draws.checked_seed(arrays["seed"]),
                draws.checked_seed(arrays["stream"]),
                tensors,
                (),
                clip,
                self._identities[-1],
            )
            if tensors is None or self._storage is NoiseStorage.DISK:
                return state
            kept = [arrays[f"history_{n}"] for n in range(len(self._layout(tensors).segments))]
            return dataclasses.replace(state, histories=tuple(NoiseState(i, each) for each in kept))
        except Exception as error:
            # The contents of a damaged file may be anything.
            raise StateError(
                f"{os.fspath(path)} holds no state that this aggregator can go on from ({error}): "
                "use the state and the mechanism of one run."
            ) from error

    def _identity(self, horizon: Mechanism) -> bytes:
        """The fingerprint of a horizon of this run and all options that determine released bits."""
        options = [
            NOISE_FORMAT,
            self._source.value,
            self._storage.value,
            self._norm if self._clip is None else repr(self._clip),
            self.clients_per_round,
            self._sums.steps_per_clip_norm,
            self._sums.largest_cohort,
        ]
        return fingerprint([horizon.to_dict(), options], horizon.noise_recursion())

    def _next_round(self, state: AggregatorState) -> int:
        """The round that comes next; raises ReleaseError if there is no noise for it."""
        if state.round_index >= self.mechanism.num_rounds:
            raise ReleaseError(
                f"The factorization has noise for {self.mechanism.num_rounds} rounds, and one more "
                "round was asked for: its noise row would repeat an earlier one. Stop training, or "
                "use a factorization for more rounds."
            )
        return state.round_index

    def _check_identity(self, state: AggregatorState) -> None:
        """Raises ReleaseError if a state is of no horizon of this aggregator."""
        if state.identity not in self._identities:
            raise ReleaseError(
                "The state is that of another aggregator: of another mechanism, another extension "
                "or other options. Its rows of noise were added in other steps, so that a release "
                "here could tell them. Go on with the aggregator of the state."
            )

    def _continued(self, state: AggregatorState) -> AggregatorState:
        """The state as one of the whole run, whose size is checked where it begins to be."""
        self._check_identity(state)
        if state.identity != self._identities[-1] and state.tensors is not None:
            self._check_size(state.tensors)
        return dataclasses.replace(state, identity=self._identities[-1])

    def _with_tensors(self, state: AggregatorState, tensors: _Tensors) -> AggregatorState:
        """The state for updates of these tensors; raises ValueError if it is for others."""
        if state.tensors is not None:
            nests.check_same(_named(state.tensors), _named(tensors))
            return state
        self._check_size(tensors)
        histories: tuple[NoiseState, ...] = ()
        if self._storage is NoiseStorage.STATE:
            segments = self._layout(tensors).segments
            histories = tuple(self._rows.initial_state(segment.size) for segment in segments)
        return dataclasses.replace(state, tensors=tensors, histories=histories)

    def _check_floats(self, tensors: _Tensors = ()) -> None:
        """Raises ValueError if releases could become zero or infinite."""
        multiplier = self._multiplier
        if self._split is not None:
            multiplier = self._split.update_noise_multiplier
        dtypes = [dtype for _, dtype, _ in tensors]
        clip = self._clip or self._norm
        adaptive_clip.check_floats(clip, multiplier, self.clients_per_round, dtypes)

    def _check_size(self, tensors: _Tensors) -> None:
        """Raises ValueError if no guarantee is stated for updates of this size."""
        self._check_floats(tensors)
        size = total_size(self._layout(tensors).segments)
        self._sums.check_rounding(size)
        if self._multiplier > 0.0:
            gaussian.check_charged(size, self.mechanism.num_rounds)
            self.mechanism.check_rounded(size, self._sums.largest_cohort, self._storage)
            # Which refuses what rounding would take too much of.
            self._stddev(tensors)

    def _vector(self, tensors: _Tensors) -> _Tensors:
        """What is summed: the tensors themselves, or float64 and an indicator."""
        if self._split is None:
            return tensors
        return (*((shape, "float64", path) for shape, _, path in tensors), ((), "float64", ""))

    def _layout(self, tensors: _Tensors) -> RowLayout:
        vector = self._vector(tensors)
        dtypes = tuple(nests.NOISE_DTYPES[dtype] for _, dtype, _ in vector)
        return RowLayout(tuple(shape for shape, *_ in vector), dtypes)

    def _stddev(self, tensors: _Tensors) -> float:
        """The standard deviation of Z, with what hides the roundings; 1 where there is no noise."""
        if self._multiplier == 0.0:
            return 1.0
        return self._rounding.enlarged(
            self._multiplier * self._norm,
            clip_norm=self._norm,
            num_parameters=total_size(self._layout(tensors).segments),
            largest_cohort=self._sums.largest_cohort,
        )

    def _next_row(self, state: AggregatorState) -> tuple[list[IntArray], tuple[NoiseState, ...]]:
        """The row of each segment, in steps, and what the next rows need."""
        i, segments = state.round_index, self._layout(state.tensors or ()).segments
        if self._multiplier == 0.0:
            return [np.zeros(segment.size, np.int64) for segment in segments], state.histories
        if self._blocks is not None and self._directory is not None:
            folder = self._directory / "rows" / _name(state)
            files = RowsInFiles(self._rows, self._blocks, self._source, state.seed, folder)
            return [files.row(segment, i) for segment in segments], ()
        made = [
            self._rows.next_row(history, segment.row_of_z(self._source, state.seed, i))
            for history, segment in zip(state.histories, segments, strict=True)
        ]
        return [row for row, _ in made], tuple(history for _, history in made)

    def _noised(self, steps: IntArray, row: RealArray, step: float, scale: float) -> FloatArray:
        """A sum and a row of noise, each in steps of its own, as floats of their integer sum."""
        if self._multiplier == 0.0:
            return np.asarray(steps.astype(np.float64) * (self._unit * scale))
        # All that follows is a function of these integers, whatever it rounds.
        released = np.rint(steps.astype(np.float64) * self._unit / step).astype(np.int64) + row
        return np.asarray(released.astype(np.float64) * (step * scale))

    def _check_released(
        self, state: AggregatorState, sums: Sequence[IntArray], step: float
    ) -> None:
        """Records what the round's noise is added to; raises ReleaseError if it was to other."""
        # The same sums beside the same row, but in other steps, would reveal the sums.
        how = repr((state.tensors, step, self._unit, state.clip and state.clip.norm)).encode()
        digest = hashlib.blake2b(how, digest_size=32, key=state.seed.tobytes())
        for array in sums:
            digest.update(np.ascontiguousarray(array).tobytes())
        found = digest.digest()
        before = self._record.first(_name(state), state.round_index, found)
        if before == _SPENT:
            raise ReleaseError(
                f"Round {state.round_index} was spent: its noise is never released. Go on from the "
                "state that spend returned."
            )
        if before != found:
            raise ReleaseError(
                "The noise of this round was added to other data before, so this aggregate is not "
                "released: the difference of the two would have no noise. Go on from this state "
                "with the clients and data of that time, release the sum that was kept, or give "
                "the round up by spend(state)."
            )


def _tensors_of(structure: Any, *, is_array: bool = False) -> _Tensors:
    """The shapes, dtypes and paths of the leaves of a structure.

    Raises:
      TypeError: If one is not plain, or not floating point.
    """
    return tuple(
        (*nests.tensor_of(leaf, path, is_array=is_array), path)
        for path, leaf in nests.named_leaves(structure)
    )


def _name(state: AggregatorState) -> str:
    return "stream-" + "-".join(map(str, state.stream.tolist()))


def _named(tensors: _Tensors) -> list[tuple[str, str]]:
    return [(path, f"{dtype}{list(shape)}") for shape, dtype, path in tensors]
