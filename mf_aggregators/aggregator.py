"""The aggregator in NumPy, which releases the same bits as ``mf_dp_aggregator`` in TFF.

    aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=100)
    state = aggregator.initialize()
    state, release = aggregator.next(state, updates)

``updates`` is an iterable with one update for each client: a structure of arrays (dicts, lists,
tuples and named tuples of arrays, from any framework). Only one update at a time is in memory.
``release`` has the structure of an update: (the sum of the clipped updates + row i of
``noise_multiplier * clip_norm * sens(C) * C^-1 Z``) / clients_per_round (BandMF Alg. 1).

For the same seed and updates, this code and the TensorFlow graphs of ``tff`` compute the same
integers and release the same bits, so each of the two tests the other. If another program adds the
updates up (in a secure sum, for example), call the two halves of ``next``:
:meth:`Aggregator.record` for each client, and :meth:`Aggregator.release` for the sum.
"""

import collections
import copy
import dataclasses
import enum
import hashlib
import itertools
import json
import math
import operator
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from mf_aggregators import adaptive_clip, atomic_files, checkpoints, inputs, private_metrics
from mf_aggregators.adaptive_clip import AdaptiveClip, ClipState, NoiseSplit
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.integers import IntegerSums, RowLayout
from mf_aggregators.kernel.numbers import Error, FloatArray, IntArray, ReleaseError
from mf_aggregators.kernel.release import Release, ReleaseRecord, ReleaseState
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise import fast_tiles, places
from mf_aggregators.noise.places import NoiseStorage
from mf_aggregators.privacy import statements
from mf_aggregators.privacy.ledgers import GivenLedger, RoundTimes
from mf_aggregators.privacy.statements import Statement
from mf_aggregators.private_metrics import FLOAT32_RANGE, PrivateMetrics

__all__ = ["Aggregator", "AggregatorState", "Options", "ReleaseError", "StateError"]

# The number of the state's file format, which a file names.
_STATE_FORMAT = 3
# A secure sum also adds up the number of updates. In fewer bits, that number could wrap around to a
# number that is allowed.
_FEWEST_SECURE_BITS, _MOST_SECURE_BITS = 24, 62
# The smallest positive and the largest number of float16.
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-24, 65504.0
# The largest change of an update by rounding, in clip norms.
_LARGEST_ROUNDING = 0.05
# The floating-point dtypes of models, and the dtypes that their noise is computed in.
NOISE_DTYPES = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
}
# The largest change of an indicator or a metric by rounding, as a fraction of its range.
_LARGEST_ROUNDING_OF_A_MEAN = 0.02
_Enum = TypeVar("_Enum", bound=enum.Enum)
# A nest of arrays, and the dtype or the shape of a leaf.
_Nest = TypeVar("_Nest")
_Kind = TypeVar("_Kind")
_NO_TEMPLATE = (
    "the shapes of updates are not known yet: call aggregator.with_template(an update).{method}, "
    "or make the aggregator with template=."
)

# The shape, the dtype's name and the path (``named_leaves``) of each array of an update.
_Tensors: TypeAlias = tuple[tuple[tuple[int, ...], str, str], ...]


class StateError(Error, ValueError):
    """A file has no state from which the run can continue."""


class Options:
    """The checked options of an aggregator, in NumPy or in TensorFlow Federated.

    Attributes:
      mechanism: The mechanism; ``Aggregator`` describes all options.
      clip_norm: The clip norm, or how it adapts.
      clients_per_round: The number by which noisy sums are divided.
      seed: (2,) int64: a fixed seed for tests; None to draw a secret one.
      noise_directory: The directory of rows and of the record of sums; None for a temporary one.
      metrics: Private metrics that are released with the updates; None for none.
      sums: The integer grid to which vectors are rounded, and the largest number of vectors in a
        sum.
      storage: Where rows of noise are kept.
      rule: How the clip norm adapts; with metrics and a constant clip norm, the constant rule;
        otherwise None.
      split: How noise is split between updates, indicators and metrics; None without a rule.

    """

    def __init__(
        self,
        *,
        mechanism: Mechanism,
        clip_norm: float | AdaptiveClip,
        clients_per_round: float,
        seed: int | None,
        noise_storage: str,
        noise_directory: str | os.PathLike[str] | None,
        secure_aggregation_bits: int | None,
        largest_cohort: int | None,
        allow_no_noise: bool,
        metrics: PrivateMetrics | None = None,
    ) -> None:
        """Checks the options.

        Raises:
          TypeError: If an option has the wrong type.
          ValueError: If a number is out of its range, or releases could become zero or infinite.
        """
        if mechanism.noise_multiplier == 0.0 and allow_no_noise is not True:
            raise ValueError(
                "noise_multiplier is 0, which adds no noise and protects nobody: use "
                "mf_aggregators.accounting.noise_multiplier(epsilon, delta), or give "
                "allow_no_noise=True for a baseline without privacy."
            )
        self.mechanism, self.seed, self.metrics = mechanism, _seed_of(seed), metrics
        # A relative path would be another directory after a change of the working directory.
        self.noise_directory = None if noise_directory is None else os.path.abspath(noise_directory)
        self.clients_per_round = numbers.positive_number(clients_per_round, "clients_per_round")
        most = mechanism.largest_cohort(largest_cohort, secure_aggregation_bits)
        self.sums = _integer_sums(secure_aggregation_bits, most, self.clients_per_round)
        self.rule: AdaptiveClip | None = None
        if isinstance(clip_norm, AdaptiveClip):
            self.rule = clip_norm
        else:
            clip_norm = _of_float32(clip_norm, "clip_norm")
            self.rule = None if metrics is None else AdaptiveClip.constant(clip_norm)
        self.clip_norm, first = clip_norm, mechanism.horizons[0].noise_multiplier
        self.split: NoiseSplit | None = None
        if self.rule is not None:
            self.split = private_metrics.noise_split(
                clip_norm, metrics, self.clients_per_round, [first]
            )
        if self.split is not None:
            weights = self.split.indicator_weight, self.split.metric_weight
            _check_means(self.sums, self.split.vector_norm, *weights)
        self.storage = _member(NoiseStorage, noise_storage, "noise_storage")
        self.check_floats()

    @property
    def norm(self) -> float:
        """The largest L2 norm of the vector that a client adds to the sum."""
        if self.split is not None:
            return self.split.vector_norm
        assert not isinstance(self.clip_norm, AdaptiveClip)
        return self.clip_norm

    def check_rounding(self, num_parameters: int) -> None:
        """Raises ValueError if rounding could change updates of a size by more than 5 %.

        Args:
          num_parameters: The entries of an update.
        """
        _check_rounding(self.sums, num_parameters)

    def check_floats(self, dtypes: Iterable[str] = ()) -> None:
        """Raises ValueError if releases could become zero or infinite.

        Args:
          dtypes: The dtypes of the tensors of an update.
        """
        norms, first = {"clip_norm": self.norm}, self.norm
        multiplier = self.mechanism.horizons[0].noise_multiplier
        if self.rule is not None and self.split is not None:
            norms = dict(zip(("smallest_norm", "largest_norm"), self.rule.bounds, strict=True))
            first, multiplier = self.rule.initial_norm, self.split.update_noise_multiplier
        _check_floats(norms, first, multiplier, self.clients_per_round, dtypes)


@dataclasses.dataclass(frozen=True, eq=False)
class AggregatorState:
    """The state of a run between two rounds; immutable.

    Attributes:
      noise: The round, the secret seed, and the data of earlier rounds that further rows of noise
        need. Only the kernel creates and changes it.
      tensors: The shape, the dtype's name and the path of each array of an update, in the order of
        ``named_leaves``; None before the first update if no template was given.
      clip: The state of an adaptive clip norm; None for a constant clip norm.
    """

    noise: ReleaseState
    tensors: _Tensors | None
    clip: ClipState | None
    # The directory of the record that knows the used rows. In another process than the one that
    # started the run or loaded the state, no other record does.
    _directory: str | os.PathLike[str] | None = dataclasses.field(default=None, repr=False)
    _process: int = dataclasses.field(default_factory=os.getpid, repr=False)

    @property
    def round_index(self) -> int:
        """The index of the next round, from 0."""
        return self.noise.round_index


class Aggregator:
    """Clips updates, adds them up in integers, adds the round's row of noise, and averages.

    Use it when your own loop trains, in PyTorch, JAX, NumPy or another framework.

    The aggregator keeps a record of the sum to which each round's noise was added. If a round is
    repeated from an older state, other updates are refused, because the difference of two sums with
    the same row of noise would have no noise. With a ``noise_directory``, the record is in this
    directory. Without one, all aggregators of a process share a record, which ends with the
    process; the aggregator then cannot be pickled. A forked process can release neither with it nor
    from a state that was made before the fork, unless both have one directory.

    A state can be continued only by an aggregator with the same options and the same mechanism, or
    an extension of this mechanism.

    The state has the secret seed. Whoever can read it can subtract the noise.

    The guarantee is that of the attribute ``mechanism``.

    Example:
      >>> import numpy as np
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> matrix = mfa.factorizations.banded(8, num_bands=4, participation=timers)
      >>> mechanism = mfa.calibrate(matrix, timers, epsilon=8.0, delta=1e-6)
      >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=10)
      >>> state = aggregator.initialize()
      >>> state, mean = aggregator.next(state, [{"kernel": np.full(3, 0.1)}] * 10)
      >>> state.round_index, mean["kernel"].shape
      (1, (3,))
    """

    def __init__(
        self,
        mechanism: Mechanism,
        clip_norm: float | AdaptiveClip,
        clients_per_round: float,
        *,
        template: object = None,
        seed: int | None = None,
        noise_storage: str = NoiseStorage.STATE.value,
        noise_directory: str | os.PathLike[str] | None = None,
        secure_aggregation_bits: int | None = None,
        largest_cohort: int | None = None,
        allow_no_noise: bool = False,
    ) -> None:
        """Creates the aggregator.

        Args:
          mechanism: The mechanism, which has the guarantee. The aggregator does not draw clients:
            if the mechanism has a sampling scheme, pass in each round the updates of the clients
            that ``scheme.sampler(seed)`` draws, and keep the draws secret.
          clip_norm: The L2 norm to which each client's whole update is clipped: a number, or an
            ``AdaptiveClip``.
          clients_per_round: The number by which the noisy sum is divided, fixed in advance: the
            planned cohort size.
          template: A structure like an update, of arrays or of anything with a shape and a dtype.
            None uses the first update. A template is required if the number of clients is random,
            because a round without clients is released as well.
          seed: For tests only: an integer that determines all noise, with a warning. None draws a
            secret seed from the operating system.
          noise_storage: Where the rows that later rows need are kept: "state", in memory, or
            "disk", in files below ``noise_directory``.
          noise_directory: A private directory for rows and for the record of sums. None keeps the
            record in memory, and rows of "disk" in a temporary directory.
          secure_aggregation_bits: The width of the integers of a secure sum, 24 to 62; None for an
            open sum of 64-bit integers.
          largest_cohort: The largest number of updates in a sum, as for ``mf_dp_aggregator``.
          allow_no_noise: Whether ``noise_multiplier`` may be zero, which protects nobody.

        Raises:
          TypeError: If an argument has the wrong type.
          ValueError: If a number is out of its range, or a directory cannot be used.
        """
        if not isinstance(mechanism, Mechanism):
            raise TypeError(
                f"mechanism must be a Mechanism, found {numbers.shown(mechanism)}: "
                "mf_aggregators.calibrate or mf_aggregators.load makes one."
            )
        self._options = options = Options(
            mechanism=mechanism,
            clip_norm=clip_norm,
            clients_per_round=clients_per_round,
            seed=seed,
            noise_storage=noise_storage,
            noise_directory=noise_directory,
            secure_aggregation_bits=secure_aggregation_bits,
            largest_cohort=largest_cohort,
            allow_no_noise=allow_no_noise,
        )
        if options.storage is NoiseStorage.AUTO:
            raise ValueError("noise_storage must be 'state' or 'disk' here, found 'auto'.")
        self.mechanism, self.clients_per_round = mechanism, options.clients_per_round
        is_on_disk = options.storage is NoiseStorage.DISK
        directory: pathlib.Path | None = None
        if noise_directory is not None or is_on_disk:
            directory = places.open_directory(noise_directory)
        self._release = mechanism.release(
            options.norm,
            options.sums,
            # A temporary directory ends with the process that made it.
            record=ReleaseRecord(None if noise_directory is None else directory),
            is_on_disk=is_on_disk,
            directory=directory,
            label=repr((options.rule, options.clients_per_round)),
            compiled=fast_tiles.load,
        )
        self._template = template
        if template is not None:
            self._of_tensors(_tensors_of(template))

    def with_template(self, template: object) -> "Aggregator":
        """Returns an aggregator with the same options and record, for updates like a template.

        Args:
          template: A structure of arrays, or of anything with a shape and a dtype.

        Raises:
          TypeError: If an array of the template is not floating point.
          ValueError: If no guarantee is stated for updates of this size.

        Example:
          >>> import numpy as np
          >>> import mf_aggregators as mfa
          >>> sizes = {"population": 100, "clients_per_round": 10}
          >>> scheme = mfa.participation.PoissonSampling(8, 1, **sizes)
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, scheme, noise_multiplier=2.0)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=10)
          >>> aggregator = aggregator.with_template({"bias": np.zeros(3)})
          >>> state, mean = aggregator.next(aggregator.initialize(), [])  # nobody was drawn
          >>> mean["bias"].shape
          (3,)
        """
        self._of_tensors(_tensors_of(template))
        other = copy.copy(self)
        other._template = template
        return other

    def initialize(self) -> AggregatorState:
        """Returns the state before the first round, with a new secret seed unless one is fixed.

        Raises:
          ValueError: If the number of clients is random and there is no template.
        """
        scheme = self.mechanism.sampling
        if self._template is None and scheme is not None and scheme.has_random_sizes:
            raise ValueError(
                "the aggregator needs template=, arrays of an update's shapes and dtypes: batch "
                "sizes are random, and an empty batch is released like any other."
            )
        tensors = None if self._template is None else _tensors_of(self._template)
        clip = None if self._options.rule is None else self._options.rule.first_state
        noise = self._of_tensors(tensors).start(self._options.seed)
        return AggregatorState(noise, tensors, clip, self._options.noise_directory)

    def next(
        self, state: AggregatorState, updates: Iterable[_Nest]
    ) -> tuple[AggregatorState, _Nest]:
        """Runs one round: clips and adds up the updates, and releases the noisy mean.

        Args:
          state: The state that :meth:`initialize` or the last round returned.
          updates: One structure of arrays for each client, all of the same shapes and dtypes. They
            are read one by one.

        Returns:
          The next state, and the release: the noisy mean, with the structure and dtypes of the
            first update (of the template, if there are no updates).

        Raises:
          OSError: If the noise directory cannot be written.
          ReleaseError: If the mechanism has no further round, if there are more clients than
            ``largest_cohort``, or if this round's noise was added to other updates before.
          TypeError: If an update has arrays that are not floating point.
          ValueError: If an update has other shapes, dtypes, names or containers than the first
            update, or if there is neither an update nor a template.
        """
        remaining = iter(updates)
        first = list(itertools.islice(remaining, 1))
        structure = self._template if self._template is not None or not first else first[0]
        if structure is None:
            raise ValueError(_NO_TEMPLATE.format(method="next(state, updates)"))
        state = _with_tensors(state, _tensors_of(structure))
        vectors = (self._vector_of(state, update) for update in itertools.chain(first, remaining))
        release = self._of_tensors(state.tensors)
        self._check_noise(release, state)
        noise, released = release.next(state.noise, vectors, self._scales(state))
        # A template has the structure of an update.
        return self._following(state, noise, released, structure)  # type: ignore[arg-type]

    def record(self, state: AggregatorState, update: object) -> list[IntArray]:
        """Returns a client's clipped update as integers, which can be added up and released.

        Args:
          state: The state before the round. It has the secret seed, so the server's state must not
            leave the server: a client uses the first state of its own aggregator, with the server's
            ``clip``.
          update: The client's update.

        Returns:
          An int64 array for each array of the update, and a scalar for the clipped-count indicator
          if the clip norm adapts. All zeros if an entry is NaN or infinite.

        Raises:
          TypeError: If the update has anything but plain floating-point arrays.
          ValueError: If the update has other shapes, dtypes, names or containers than earlier
            updates.

        Example:
          >>> import numpy as np
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=10)
          >>> (record,) = aggregator.record(aggregator.initialize(), np.full(3, 0.1))
          >>> record.shape, record.dtype
          ((3,), dtype('int64'))
        """
        known = _with_tensors(state, _tensors_of(update, is_array=True))
        return self._of_tensors(known.tensors).clipped(self._vector_of(known, update))

    def release(
        self, state: AggregatorState, sums: Sequence[IntArray], num_clients: int, template: _Nest
    ) -> tuple[AggregatorState, _Nest]:
        """Releases a round, given the sum of the clients' records.

        Releasing the same sums again gives the same bits. So if a server saves the sums of a round
        in a private file until the next state is saved, it can release them again after a crash,
        even if the round's clients are gone.

        Args:
          state: The state before the round.
          sums: The exact sums over clients of the arrays that :meth:`record` returned, in int64.
          num_clients: The number of these clients.
          template: A structure like an update.

        Returns:
          The next state and the release, as :meth:`next` does.

        Raises:
          OSError: As there.
          ReleaseError: As there.
          TypeError: If the sums are not plain int64 arrays.
          ValueError: If the sums have other shapes than updates of the template, or are larger than
            possible for ``num_clients`` records (a sum modulo a power of two has to be converted to
            signed integers).

        Example:
          >>> import numpy as np
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
          >>> state, updates = aggregator.initialize(), [np.full(3, 0.1), np.full(3, 0.2)]
          >>> first, second = (aggregator.record(state, update) for update in updates)
          >>> sums = [a + b for a, b in zip(first, second)]
          >>> _, mean = aggregator.release(state, sums, num_clients=2, template=updates[0])
          >>> _, same = aggregator.next(state, updates)
          >>> np.array_equal(mean, same)
          True
        """
        state = _with_tensors(state, _tensors_of(template))
        release = self._of_tensors(state.tensors)
        self._check_noise(release, state)
        noise, released = release.release(state.noise, sums, num_clients, self._scales(state))
        return self._following(state, noise, released, template)

    def spend(self, state: AggregatorState) -> AggregatorState:
        """Gives a round up: its row of noise is never added to a sum from now on.

        Call this if a server crashed between ``next`` and ``save_state``, and has neither the same
        updates nor their sum to release again. The round's release may have left the server, so the
        clients of the round count as having taken part, and stay in the ledger. The clip norm does
        not change.

        Args:
          state: The state before the round. Spending the same state again is allowed.

        Returns:
          The state after the round: save it.

        Raises:
          OSError: If the noise directory cannot be written.
          ReleaseError: If the mechanism has no further round, or the state belongs to another
            aggregator.
          ValueError: If neither the state nor a template has the shapes of updates.

        Example:
          >>> import numpy as np
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> sizes = {"clip_norm": 1.0, "clients_per_round": 2}
          >>> aggregator = mfa.Aggregator(mechanism, **sizes, template=np.zeros(3))
          >>> aggregator.spend(aggregator.initialize()).round_index
          1
        """
        if state.tensors is None:
            if self._template is None:
                raise ValueError(_NO_TEMPLATE.format(method="spend(state)"))
            state = _with_tensors(state, _tensors_of(self._template))
        release = self._of_tensors(state.tensors)
        self._check_noise(release, state)
        noise = release.spend(state.noise)
        return self._moved(state, noise)

    def metrics(self, state: AggregatorState) -> dict[str, float]:
        """Returns the numbers of a state that may be published: rounds released, and clip norms.

        Args:
          state: The state after a round.

        Returns:
          ``rounds_released`` (with rounds that were spent). If the clip norm adapts, also
          ``clip_norm`` and ``unclipped_fraction`` of the last released round, and
          ``next_clip_norm``, which depend on clients only through noisy releases.

        Example:
          >>> import numpy as np
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
          >>> state, _ = aggregator.next(aggregator.initialize(), [np.zeros(3)] * 2)
          >>> aggregator.metrics(state)
          {'rounds_released': 1}
        """
        found: dict[str, float] = {"rounds_released": state.round_index}
        if state.clip is not None:
            found["clip_norm"] = state.clip.released_norm
            found["unclipped_fraction"] = state.clip.released_fraction
            found["next_clip_norm"] = state.clip.norm
        return found

    def statement(
        self,
        ledger: GivenLedger | RoundTimes,
        *,
        population: int,
        public_data: str,
        enforcement: str,
        state: AggregatorState | None = None,
        **options: object,
    ) -> Statement:
        """Returns the privacy statement of a run of this aggregator.

        Args:
          ledger: Who took part in which round, as for ``Mechanism.observed``.
          population: The number of clients from which cohorts were drawn.
          public_data: The other data that the training used, in a few words, such as ``none``.
          enforcement: What makes clients keep to the planned participation, as a sentence.
          state: The newest state of the run: its rounds and record of sums are compared with the
            ledger. None reads them from the noise directory, if it has exactly one run.
          **options: ``delta``, ``round_counts``, ``responsible`` and others: see
            ``privacy.statements.KnownFacts.statement``.

        Returns:
          The statement: ``to_markdown`` has the text, and ``to_dict`` the JSON document.

        Raises:
          LedgerError: If the ledger cannot be read.
          RecordError: As ``privacy.statements.KnownFacts.statement`` raises it.
          ReleaseError: If the state belongs to another aggregator.
          TypeError: As ``privacy.statements.KnownFacts.statement`` raises it.
          ValueError: If the ledger does not fit this aggregator's run, or an argument is out of its
            range.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(2)
          >>> mechanism = mfa.calibrate(matrix, once, epsilon=8.0, delta=1e-6)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=1)
          >>> told = {"public_data": "none", "enforcement": "Devices count.", "delta": 1e-6}
          >>> statement = aggregator.statement([["ada"], ["bo"]], population=2, **told)
          >>> print(statement.to_markdown().splitlines()[0])
          # Privacy statement
        """
        return self.known_facts(state).statement(
            ledger,
            population=population,
            public_data=public_data,
            enforcement=enforcement,
            **options,  # type: ignore[arg-type]  # KnownFacts.statement checks them.
        )

    def known_facts(
        self, state: AggregatorState | None, program: str = "Aggregator"
    ) -> statements.KnownFacts:
        """Returns the facts for a statement that follow from this aggregator and its run's state.

        Args:
          state: The newest state; None if it is not known.
          program: The name of the program, for the statement.

        Raises:
          ReleaseError: If it is the state of another aggregator.
        """
        if state is not None:
            self._of_tensors(state.tensors).check_state(state.noise)
        return statements.KnownFacts(
            options=self._options,
            program=program,
            stream=None if state is None else state.noise.stream_name,
            num_rounds=None if state is None else state.round_index,
        )

    def save_state(self, state: AggregatorState, path: str | os.PathLike[str]) -> None:
        """Writes a state atomically, readable only by its owner, because it has the secret seed.

        Args:
          state: The state.
          path: The file, by convention ``.npz``.

        Raises:
          OSError: If the file cannot be written.
          ReleaseError: If it is the state of another aggregator.

        Example:
          >>> import pathlib, tempfile
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> matrix = mfa.factorizations.identity(8)
          >>> mechanism = mfa.Mechanism(matrix, once, noise_multiplier=2.0)
          >>> aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
          >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.npz"
          >>> aggregator.save_state(aggregator.initialize(), path)
          >>> aggregator.load_state(path).round_index
          0
        """
        arrays = self._of_tensors(state.tensors).arrays_of(state.noise)
        described = {"state_format": _STATE_FORMAT, "tensors": state.tensors}
        with atomic_files.writing(path, mode=0o600) as file:
            np.savez(
                file,
                described=np.array(json.dumps(described)),
                clip=np.array([] if state.clip is None else state.clip, np.float64),
                **arrays,
            )

    def load_state(self, path: str | os.PathLike[str]) -> AggregatorState:
        """Reads a state that :meth:`save_state` wrote, also for a mechanism extended since.

        Args:
          path: The file.

        Returns:
          The state, for :meth:`next`.

        Raises:
          StateError: If the file is missing, damaged, or readable by others (who could subtract the
            noise); if the state belongs to another mechanism, other options, or a version that
            draws noise differently; or if the extended mechanism refuses updates of this size.
        """
        try:
            places.check_private(path, "the state")
            arrays = checkpoints.archived_arrays(path)
            described = inputs.part(inputs.parsed_json(str(arrays["described"])), dict)
            if described["state_format"] != _STATE_FORMAT:
                raise ValueError(
                    f"its format is {described['state_format']}, and this version of "
                    f"mf_aggregators reads only format {_STATE_FORMAT}: finish the run with the "
                    "version that began it"
                )
            tensors = described["tensors"]
            if tensors is not None:
                tensors = tuple(
                    (tuple(shape), str(dtype), str(path)) for shape, dtype, path in tensors
                )
            clip = None
            if len(arrays["clip"]):
                clip = ClipState._make(map(float, arrays["clip"]))
                clip = clip._replace(num_fractions=int(clip.num_fractions))
            noise = self._of_tensors(tensors).state_of(arrays)
            return AggregatorState(noise, tensors, clip, self._options.noise_directory)
        except Exception as error:
            # The contents of a damaged file may be anything.
            raise StateError(
                f"{os.fspath(path)} holds no state from which this aggregator can continue "
                f"({error}): use the state and the mechanism of the same run."
            ) from error

    def _of_tensors(self, tensors: _Tensors | None) -> Release:
        """The kernel's release for these tensors; raises ValueError if no guarantee covers it."""
        if tensors is None:
            return self._release
        self._options.check_floats(dtype for _, dtype, _ in tensors)
        vector = tensors
        if self._options.split is not None:
            # The clipped-count indicator comes after the tensors.
            wide = ((shape, "float64", path) for shape, _, path in tensors)
            vector = (*wide, ((), "float64", ""))
        shapes = tuple(shape for shape, *_ in vector)
        dtypes = tuple(NOISE_DTYPES[dtype] for _, dtype, _ in vector)
        layout = RowLayout(shapes, dtypes)
        self._options.check_rounding(layout.size)
        return self._release.with_layout(layout)

    def _check_noise(self, release: Release, state: AggregatorState) -> None:
        """Raises ReleaseError for other noise than the mechanism's, or a forked process's state."""
        here, there = self._options.noise_directory, state._directory
        is_shared = False
        if here is not None and there is not None:
            is_shared = os.path.realpath(here) == os.path.realpath(there)
        if not is_shared and (there is not None or state._process != os.getpid()):
            raise ReleaseError(
                "the run began in another directory, or in the process that this one was forked "
                "from, where the same rows of noise may be used: give the noise_directory in which "
                "it began, or start the run in the process that releases."
            )
        if release.noise_digests != self._release.noise_digests:
            raise ReleaseError(
                "the noise to be released is not that of the mechanism: nothing is released."
            )

    def _vector_of(self, state: AggregatorState, update: object) -> list[FloatArray]:
        """The arrays of an update, with the clipped-count indicator if the clip norm adapts."""
        _with_tensors(state, _tensors_of(update, is_array=True))
        arrays = [np.asarray(leaf) for _, leaf in named_leaves(update)]
        if self._options.split is None or state.clip is None:
            return arrays
        clipped, indicator = adaptive_clip.clip_with_indicator(arrays, state.clip.norm)
        return [*clipped, np.asarray(indicator * self._options.split.indicator_weight)]

    def _scales(self, state: AggregatorState) -> list[float]:
        """The factors by which released integers are multiplied, known before the round."""
        tensors = state.tensors or ()
        if state.clip is None or self._options.split is None:
            return [1.0] * len(tensors)
        per_indicator = 1.0 / (self._options.split.indicator_weight * self.clients_per_round)
        return [*([state.clip.norm] * len(tensors)), per_indicator]

    def _following(
        self,
        state: AggregatorState,
        noise: ReleaseState,
        released: Sequence[FloatArray],
        structure: _Nest,
    ) -> tuple[AggregatorState, _Nest]:
        """The next state, and the noisy mean in the structure of updates."""
        clip = state.clip
        if self._options.rule is not None and clip is not None:
            *released, indicators = released
            fraction = adaptive_clip.INDICATOR_WITHIN + float(indicators)
            clip = self._options.rule.following(clip, fraction)
        # tensorflow-privacy's NormalizedQuery divides in the same way.
        clients = np.float32(self.clients_per_round)
        means = []
        for noised, (_, dtype, _) in zip(released, state.tensors or (), strict=True):
            wide = noised.astype(NOISE_DTYPES[dtype])
            means.append(np.asarray(wide / wide.dtype.type(clients), dtype))
        following = dataclasses.replace(self._moved(state, noise), clip=clip)
        return following, in_structure(structure, means)

    def _moved(self, state: AggregatorState, noise: ReleaseState) -> AggregatorState:
        """The state after a round that this aggregator's record has."""
        return dataclasses.replace(state, noise=noise, _directory=self._options.noise_directory)


def _with_tensors(state: AggregatorState, tensors: _Tensors) -> AggregatorState:
    """The state with these tensors; raises ValueError if it has others already."""
    if state.tensors is None:
        return dataclasses.replace(state, tensors=tensors)
    check_same(_named(state.tensors), _named(tensors))
    return state


def _tensors_of(structure: object, *, is_array: bool = False) -> _Tensors:
    """The shapes, dtypes and paths of the leaves of a structure.

    Raises:
      TypeError: If a leaf is not a plain array, or not floating point.
    """
    return tuple(
        (*_tensor_of(leaf, path, is_array=is_array), path) for path, leaf in named_leaves(structure)
    )


def _named(tensors: _Tensors) -> list[tuple[str, str]]:
    return [(path, f"{dtype}{list(shape)}") for shape, dtype, path in tensors]


# ----- Checks of options and arrays.


def _member(kind: type[_Enum], name: str, argument: str) -> _Enum:
    """Returns the member of an enumeration that has a value, or raises ValueError.

    Args:
      kind: The enumeration.
      name: The value.
      argument: The name of the argument, for the message.
    """
    try:
        return kind(name)
    except ValueError:
        names = ", ".join(repr(each.value) for each in kind)
        raise ValueError(f"{argument} must be one of {names}, found {name!r}.") from None


def _check_floats(
    norms: Mapping[str, float],
    first_norm: float,
    noise_multiplier: float,
    clients_per_round: float,
    dtypes: Iterable[str] = (),
) -> None:
    """Raises ValueError if releases could become zero or infinite by the range of their floats.

    Args:
      norms: The least and the largest clip norm by the names of their options.
      first_norm: The clip norm of the first round.
      noise_multiplier: The noise multiplier of the updates.
      clients_per_round: The divisor of the sums.
      dtypes: The dtypes of the released tensors.
    """
    for name, norm in norms.items():
        for what, number in ((name, norm), (f"the noise at {name}", norm * noise_multiplier)):
            if number or noise_multiplier:
                _of_float32(number, what)
                _of_float32(number / clients_per_round, f"{what} over clients_per_round")
    # A noise number is almost certainly below 16 standard deviations.
    largest = max(norms.values())
    most = max(min(largest, _LARGEST_HALF), 16.0 * largest * noise_multiplier)
    least = first_norm * noise_multiplier if noise_multiplier else clients_per_round
    of_means = [each / clients_per_round for each in (least, most)]
    if "float16" in dtypes and not (of_means[0] >= _SMALLEST_HALF and of_means[1] <= _LARGEST_HALF):
        raise ValueError(
            f"the mean of updates of norm up to {largest:g}, with noise multiplier "
            f"{noise_multiplier:g} and clients_per_round {clients_per_round:g}, could be infinite "
            "or zero in float16: use float32 tensors."
        )


def _seed_of(number: int | None) -> IntArray | None:
    """Returns the (2,) int64 seed that is a hash of a given number, for tests.

    The warning names the line that creates the aggregator.

    Args:
      number: A non-negative integer of any size; None returns None.

    Raises:
      ValueError: If the number is negative or not an integer.
    """
    if number is None:
        return None
    said = "a fixed seed makes the noise predictable: use it in tests only."
    warnings.warn(said, inputs.FixedSeedWarning, stacklevel=4)
    number = numbers.integer_at_least(number, 0, "seed")
    digest = hashlib.sha256(f"mf_aggregators seed {number}".encode()).digest()
    return np.frombuffer(digest, "<i8", count=2).astype(np.int64)


def _integer_sums(
    secure_aggregation_bits: int | None, largest_cohort: int | None, clients_per_round: float
) -> IntegerSums:
    """Returns the integer grid to which updates are rounded, for open or secure sums.

    Args:
      secure_aggregation_bits: The width of a secure sum's integers; None for an open sum.
      largest_cohort: The most updates in a sum; None for ``clients_per_round``, rounded up, in
        a secure sum, and for 2^22 in an open one.
      clients_per_round: The expected number of updates.

    Raises:
      ValueError: If a number is out of its range, or the sum of a cohort of the expected size could
        overflow.
    """
    expected = math.ceil(_of_float32(clients_per_round, "clients_per_round"))
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


def _of_float32(value: float, name: str) -> float:
    """Returns a positive number that float32 can hold at full precision, or raises ValueError.

    A sum of 2^32 such numbers does not overflow either.

    Args:
      value: The number.
      name: What to call it in the message.
    """
    found = numbers.positive_number(value, name)
    smallest, largest = FLOAT32_RANGE
    if not smallest <= found <= largest:
        between = f"between {smallest:.1e} and {largest:.1e}"
        raise ValueError(f"{name} must be {between}, for float32 arithmetic, found {found}.")
    return found


def _rounding(sums: IntegerSums, num_parameters: int) -> float:
    """Returns the most that rounding to nearest changes an update by, in clip norms (L2).

    Args:
      sums: The grid.
      num_parameters: The entries of an update.
    """
    return math.sqrt(num_parameters) / (2.0 * sums.steps_per_clip_norm)


def _check_rounding(sums: IntegerSums, num_parameters: int) -> None:
    """Raises ValueError if rounding could change updates of a size by more than 5 %.

    Args:
      sums: The grid.
      num_parameters: The entries of an update.
    """
    found = _rounding(sums, num_parameters)
    if found > _LARGEST_ROUNDING:
        raise ValueError(
            f"in secure sums of {sums.largest_cohort} clients with {sums.bits} bits, rounding "
            f"could change an update of {num_parameters} parameters by {found:.2g} clip norms, and "
            f"at most {_LARGEST_ROUNDING:g} is allowed: use more secure_aggregation_bits or a "
            "smaller largest_cohort."
        )


def _check_means(sums: IntegerSums, vector_norm: float, *weights: float) -> None:
    """Raises ValueError if rounding could change an indicator or a metric by 2 % of its range.

    Args:
      sums: The grid.
      vector_norm: The norm of the vectors that have indicators and metrics as coordinates.
      *weights: For indicators and for metrics, the length of their range in the vector; 0 if there
        are none.
    """
    step = vector_norm / sums.steps_per_clip_norm
    found = max((step / weight for weight in weights if weight > 0.0), default=0.0)
    if found > _LARGEST_ROUNDING_OF_A_MEAN:
        raise ValueError(
            f"in secure sums of {sums.largest_cohort} clients with {sums.bits} bits, rounding "
            f"could change the unclipped fraction or a private metric by {found:.2g} of its range, "
            f"and at most {_LARGEST_ROUNDING_OF_A_MEAN:g} is allowed: use more "
            "secure_aggregation_bits, a smaller largest_cohort or, for the fraction, a smaller "
            "clipped_count_stddev."
        )


def _tensor_of(
    leaf: object, path: str = "", *, is_array: bool = False
) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the dtype's name of an array, or of an object that has both.

    Args:
      leaf: The array.
      path: The array's path in the update, for the message.
      is_array: Whether the leaf must have values, and not only a shape and a dtype.

    Raises:
      TypeError: If the leaf is not a plain array of numbers (sparse, ragged, masked or labelled
        arrays and matrices are not), or its dtype is not float64, float32, float16 or bfloat16.
    """
    shape = getattr(leaf, "shape", None)
    is_specification = not is_array and hasattr(leaf, "dtype") and not hasattr(leaf, "__array__")
    if not is_plain(leaf) and (not is_specification or shape is None or None in tuple(shape)):
        raise TypeError(_not_plain(leaf, path))
    # Arrays of other frameworks and specifications of tensors also have dtype and shape.
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or shape is None:
        dtype, shape = np.asarray(leaf).dtype, np.shape(np.asarray(leaf))
    name = (getattr(dtype, "name", None) or str(dtype)).removeprefix("torch.")
    if name not in NOISE_DTYPES:
        raise TypeError(
            f"noise can be added to {', '.join(NOISE_DTYPES)} arrays, found one of dtype {name} "
            f"and shape {tuple(shape)}{path and f' at {path}'}: leave integers and booleans "
            "out of the updates, or cast them to floats."
        )
    return tuple(int(size) for size in shape), name


def _not_plain(leaf: object, path: str) -> str:
    """Returns the error message for a leaf that is not a plain array."""
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
    return (
        f"{f'the leaf {path} of an update' if path else 'an update'} is a {kind}{dtype}, and "
        "updates are dicts, lists, tuples and named tuples of plain arrays of numbers: convert it "
        "to a dense array."
    )


# ----- Nests: dicts, lists, tuples, named tuples and attrs of arrays, in the order of ``tf.nest``.


def named_leaves(nest: object) -> list[tuple[str, object]]:
    """Returns each array of a nest with its path, in the order of ``tf.nest``.

    Dicts are in the order of sorted keys. A path has the kind of each container and the name in it:
    ``['a']`` in a dict (``{1}`` for a key that is no text), ``.kernel`` in a named tuple, ``[0]``
    in a list, ``(0)`` in a tuple.

    Args:
      nest: The nest.
    """
    leaves: list[tuple[str, object]] = []
    _mapped(lambda path, leaf: leaves.append((path, leaf)), nest)
    return leaves


def in_structure(nest: _Nest, leaves: Sequence[object]) -> _Nest:
    """Returns a nest with other leaves.

    Args:
      nest: The nest.
      leaves: As many as it has, in the order of ``tf.nest``.
    """
    following = iter(leaves)
    # Only the leaves are others.
    return _mapped(lambda *_: next(following), nest)  # type: ignore[return-value]


def check_same(
    expected: Sequence[tuple[str, _Kind]],
    found: Sequence[tuple[str, _Kind]],
    is_same: Callable[[_Kind, _Kind], bool] = operator.eq,
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
                "must be those of the run's first update, or of its template or query."
            )


def is_plain(leaf: object) -> bool:
    """Returns whether an object is a dense array of numbers, without mask, labels or units.

    Args:
      leaf: The object.
    """
    kind, layout = type(leaf), str(getattr(leaf, "layout", ""))
    if isinstance(leaf, np.ndarray):
        return kind in (np.ndarray, np.memmap) and leaf.dtype.names is None and leaf.dtype != object
    if kind.__module__.startswith("tensorflow."):
        return hasattr(leaf, "__array__")
    is_sparse = layout.startswith("torch.") and layout != "torch.strided"
    return isinstance(leaf, float | np.generic) or (hasattr(leaf, "__dlpack__") and not is_sparse)


def _mapped(function: Callable[[str, object], object], nest: object, path: str = "") -> object:
    """The nest with ``function`` of path and leaf in each place, in the order of ``tf.nest``."""
    kind: type = type(nest)
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
        return kind(*(_mapped(function, child, f"{path}.{name}") for name, child in pairs))
    if hasattr(kind, "__attrs_attrs__"):
        names = [field.name for field in kind.__attrs_attrs__]
        return kind(*(_mapped(function, getattr(nest, name), f"{path}.{name}") for name in names))
    if isinstance(nest, list | tuple):
        ends = "[]" if isinstance(nest, list) else "()"
        numbered = enumerate(nest)
        return kind(
            _mapped(function, child, f"{path}{ends[0]}{i}{ends[1]}") for i, child in numbered
        )
    return function(path, nest)
