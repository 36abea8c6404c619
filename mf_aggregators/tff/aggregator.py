"""The aggregator that brings matrix-factorization noise into ``tff.learning``."""

import collections
import contextlib
import os
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from mf_aggregators import checkpoints
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.aggregator import Options
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import Participation, check
from mf_aggregators.privacy import statements
from mf_aggregators.privacy.ledgers import GivenLedger, RoundTimes
from mf_aggregators.privacy.statements import Statement
from mf_aggregators.private_metrics import PrivateMetrics
from mf_aggregators.tff import graph_check, processes, tensor_rows
from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery, MatrixFactorizationSumQuery, Query
from mf_aggregators.tff.processes import NoiseState, RefusalError


class MatrixFactorizationFactory(tff.aggregators.UnweightedAggregationFactory):
    """A ``tff.aggregators`` factory: clipped mean plus the correlated noise of the round.

    A run that states its guarantee reads ``mechanism``.
    """

    def __init__(self, options: Options) -> None:
        self.mechanism, self._options = options.mechanism, options

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """Returns the aggregation process for updates of a type, as TFF's base class requires.

        Raises:
          TypeError: If the type is none of tensors in Python containers, as of federated values,
            functions and sequences, or holds a tensor that is not floating point.
          ValueError: If the noise state would be too large for TFF's processes, the noise
            directory cannot be used or is too small, secure sums of updates of this size
            would have too few bits, or the noise has more than 2^40 numbers in all rounds
            together, which is what guarantees are stated for.
        """
        specs, sums = self._update_specs(value_type), self._options.sums
        # Records for a sum that is not secure have integers of 32 bits, as many as a float32 has.
        dtype = tf.int64 if sums.is_secure else tf.int32
        query = self._query(specs, is_recorded=True, record_dtype=dtype)
        graph_check.check(query)
        mean = _MeanQuery(query, self._options, specs)
        graph_check.check_states(mean, "_numerator", specs)
        record_sums = _RecordSums(sums.bits if sums.is_secure else None)
        process = tff.aggregators.DifferentiallyPrivateFactory(mean, record_sums).create(value_type)
        return _measured(process, mean, self._options)

    def query(self, specs: Any) -> Query:
        """Returns a DPQuery that clips records, sums them and adds noise; TFF runs it.

        In ``tff.aggregators.DifferentiallyPrivateFactory(NormalizedQuery(query, n))`` it releases
        the bits of the aggregator, in sums that TFF adds up in 64 bits. That factory's
        ``initialize`` runs a round of zeros on the state that it returns. So a query keeps a record
        of released sums only with a noise directory, and then refuses other data in the first round
        of that factory: without one, do not run a round twice.

        Args:
          specs: A structure of tf.TensorSpec: the tensors of an update, without metrics.

        Raises:
          TypeError: As :meth:`create` does.
          ValueError: As :meth:`create` does.
        """
        query = self._query(specs, is_recorded=False)
        graph_check.check(query)
        return query

    def spend(self, state: Any, value_type: Any) -> Any:
        """Returns the state after a round that crashed and must never be released.

        After a crash between a release and the saving of its state, the row of the round may have
        left the server, so that it must not be added to the sum of other clients. No row is added
        to anything here, and the record refuses the row from now on. The clip norm stays. The
        clients of the round count as having taken part: keep the round in the ledger.

        Args:
          state: The last state that was saved: the aggregator's own, or that of a learning process
            with one aggregator of this library.
          value_type: The type of an update, as :meth:`create` takes it.

        Raises:
          RefusalError: If the state is of another process, or there is no round left.
          ValueError: If the state has no aggregator of this library, or several.
        """
        query = self._query(self._update_specs(value_type), is_recorded=True)
        mechanism = query if isinstance(query, MatrixFactorizationSumQuery) else query.mechanism
        noise = _noise_state(state)
        if int(noise.fingerprint) not in mechanism.fingerprints:
            raise RefusalError(tensor_rows.OTHER_PROCESS)
        try:
            # NumPy turns Python integers into int64, and TensorFlow would make int32 of them.
            before = tf.nest.map_structure(lambda leaf: tf.constant(np.asarray(leaf)), noise)
            after = tf.function(mechanism.spent, autograph=False)(before)
        except tf.errors.InvalidArgumentError as error:
            raise RefusalError(RefusalError.reason_of(error) or str(error)) from None
        plain = tf.nest.map_structure(lambda tensor: tensor.numpy(), after)
        return plain.put_into(state)

    def statement(
        self, ledger: GivenLedger | RoundTimes, *, state: Any = None, **options: object
    ) -> Statement:
        """Returns the privacy statement of a run of this aggregator.

        Args:
          ledger: As ``mf_aggregators.Aggregator.statement`` takes it.
          state: As there: the newest state of the aggregation process, or of a learning process
            with one aggregator of this library.
          **options: ``population``, ``public_data``, ``enforcement`` and others, as there.

        Raises:
          LedgerError: As there.
          RecordError: As there.
          TypeError: As there.
          ValueError: As there, and if the state has no aggregator of this library, or several.
        """
        noise = None if state is None else _noise_state(state)
        stream = None if noise is None else "stream-{}-{}".format(*map(int, noise.stream))
        sums = self._options.sums
        known = statements.KnownFacts(
            options=self._options,
            program="mf_dp_aggregator",
            secure_sums=sums.is_secure,
            origin_of_sums=(
                f"the aggregator asks for secure sums of {sums.bits} bits; that the "
                "machines make them so is not checked"
                if sums.is_secure
                else "the aggregator adds updates up in the open"
            ),
            stream=stream,
            num_rounds=None if noise is None else int(noise.round_index),
        )
        return known.statement(ledger, **options)  # type: ignore[arg-type]  # It checks them.

    def _update_specs(self, value_type: Any) -> Any:
        """Returns the tensors of an update without metrics, or raises TypeError for other types."""
        is_struct = isinstance(value_type, tff.StructType)
        specs = None
        if not is_struct or getattr(value_type, "python_container", None) is not None:
            with contextlib.suppress(TypeError, ValueError):
                specs = tff.types.type_to_tf_tensor_specs(value_type)
        if specs is None:
            raise TypeError(
                "a factory takes tensors in Python containers, of the types that tff.types.to_type "
                f"makes, found the type {value_type}."
            )
        return specs if self._options.metrics is None else specs["update"]

    def _query(self, specs: Any, *, is_recorded: bool, record_dtype: tf.DType = tf.int64) -> Query:
        # TFF's context is made to raise this library's refusals in the place where TFF runs the
        # query.
        is_secure = is_recorded and self._options.sums.is_secure
        context = tff.framework.get_context_stack().current
        processes.raise_refusals(context, needs_secure_sums=is_secure)
        query = MatrixFactorizationSumQuery.of_options(
            self._options, specs, is_recorded=is_recorded, record_dtype=record_dtype
        )
        is_split = self._options.split is not None
        return AdaptiveClipSumQuery(query, specs, self._options) if is_split else query


def _noise_state(state: Any) -> NoiseState:
    """Returns the one noise state in a state; raises ValueError if there is none or several."""
    found = processes.states_in(state)
    if len(found) != 1:
        raise ValueError(
            f"the state has {len(found)} noise states of this library: pass the state of a single "
            "aggregator."
        )
    return found[0]


class _MeanQuery(tfp.NormalizedQuery):
    """Divides a query's noisy sum by the expected number of clients, in the types of updates.

    Records of this query are narrower than their sums, so only :class:`_RecordSums` may add them
    up.
    """

    def __init__(self, query: Query, options: Options, specs: Any) -> None:
        super().__init__(query, options.clients_per_round)
        self._specs = specs

    def get_noised_result(self, sample_state: Any, global_state: Any) -> tuple[Any, Any, Any]:
        """Returns the mean, the next state and a DpEvent."""
        mean, state, event = super().get_noised_result(sample_state, global_state)
        cast = tf.nest.map_structure(
            lambda tensor, spec: tf.cast(tensor, spec.dtype), mean, self._specs
        )
        return cast, state, event


class _RecordSums(tff.aggregators.UnweightedAggregationFactory):
    """A stateless TFF factory that adds up clipped records and measures their number."""

    def __init__(self, bits: int | None) -> None:
        self._bits = bits

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """Returns the process that sums records of a type, as TFF's base class requires."""
        specs = tff.types.type_to_tf_tensor_specs(value_type)

        def zero() -> Any:
            return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, tf.int64), specs)

        summed = _sum_of_records(zero, value_type, self._bits)

        @tff.federated_computation
        def initialize() -> Any:
            return tff.federated_value((), tff.SERVER)

        @tff.federated_computation(
            initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
        )
        def next_fn(state: Any, records: Any) -> Any:
            total = summed(records)
            return tff.templates.MeasuredProcessOutput(state, total, total.num_records)

        return tff.templates.AggregationProcess(initialize, next_fn)


def _measured(
    process: tff.templates.AggregationProcess, query: _MeanQuery, options: Options
) -> tff.templates.AggregationProcess:
    """Returns TFF's process of a query, but without a first round, and with client counts.

    The ``initialize`` of DifferentiallyPrivateFactory runs a round of zeros on the state that it
    returns, to learn the type of its event. That would be a first use of the noise of the first
    round, and the record of sums could not tell it from an empty first cohort.

    With private metrics, no exact number of clients is measured.
    """
    state_type, value_type = process.next.type_signature.parameter

    @tff.tensorflow.computation
    def first_state() -> Any:
        return state_type.member.python_container(
            query_state=query.initial_global_state(),
            # The process that adds up records keeps no state.
            agg_state=(),
            dp_event=dp_accounting.UnsupportedDpEvent().to_named_tuple(),
            is_init_state=tf.constant(True),
        )

    @tff.tensorflow.computation(process.next.type_signature.result.measurements.member)
    def with_clients(measured: Any) -> Any:
        found = collections.OrderedDict(
            dp_query_metrics=measured["dp_query_metrics"],
            clients_per_round=tf.constant(options.clients_per_round, tf.float64),
        )
        if options.metrics is None:
            found["num_clients"] = measured["dp"]
        return found

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_eval(first_state, tff.SERVER)

    @tff.federated_computation(state_type, value_type)
    def next_fn(state: Any, value: Any) -> Any:
        output = process.next(state, value)
        measured = tff.federated_map(with_clients, output.measurements)
        return tff.templates.MeasuredProcessOutput(output.state, output.result, measured)

    return tff.templates.AggregationProcess(initialize, next_fn)


def _sum_of_records(zero: Any, record_type: Any, bits: int | None) -> Any:
    """Returns the computation that adds up clients' integer records in 64 bits, in any order.

    A secure sum is computed modulo 2^bits. The result is the exact sum if that is within (-2^(bits
    - 1), 2^(bits - 1)), even if partial sums wrap around. The modulus is a power of two because it
    divides 2^64: TFF's simulation of a secure sum adds up in int64 and reduces afterwards, which is
    wrong for another modulus if the sum leaves int64.

    Args:
      zero: Returns the sum of no records, in int64.
      record_type: The type of a record: int32 and int64, or int64 alone for a secure sum.
      bits: The width of the integers of a secure sum, the sign included: 2 to 62; None for a sum
        that is not secure.
    """
    if bits is None:
        return _open_sum(zero, record_type)
    modulus = np.int64(1 << bits)

    @tff.tensorflow.computation(tff.tensorflow.computation(zero).type_signature.result)
    def whole(total: Any) -> Any:
        return tf.nest.map_structure(
            lambda residue: tf.where(residue >= modulus // 2, residue - modulus, residue), total
        )

    @tff.federated_computation(tff.FederatedType(record_type, tff.CLIENTS))
    def summed(records: Any) -> Any:
        # The modulus is an int64, because TFF takes a Python integer below 2^31 for an int32, and
        # then cannot reduce the clients' int64 numbers by it.
        residues = tff.backends.mapreduce.federated_secure_modular_sum(records, modulus)
        return tff.federated_map(whole, residues)

    return summed


class _OpenSum(NamedTuple):
    """A sum of clients' records, of which the recent ones are added up in int32 for speed.

    Attributes:
      total: The sum of earlier records, int64.
      recent: The sum of all later records, in the dtypes of records.
      bound: int64 scalar: an upper bound on the magnitudes of the int32 entries of ``recent``.
    """

    total: Any
    recent: Any
    bound: Any


def _open_sum(zero: Any, record_type: Any) -> Any:
    """Returns the computation of :func:`_sum_of_records` for a sum that is not secure."""
    map_structure = tf.nest.map_structure

    @tff.tensorflow.computation
    def nothing() -> Any:
        specs = tff.types.type_to_tf_tensor_specs(record_type)
        recent = map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), specs)
        return _OpenSum(zero(), recent, tf.zeros([], tf.int64))

    def widened(total: Any, recent: Any) -> Any:
        return map_structure(lambda sums, steps: sums + tf.cast(steps, tf.int64), total, recent)

    def largest(record: Any) -> tf.Tensor:
        narrow = [each for each in tf.nest.flatten(record) if each.dtype == tf.int32]
        ends = [tf.cast(tf.reduce_max(each), tf.int64) for each in narrow]
        ends += [-tf.cast(tf.reduce_min(each), tf.int64) for each in narrow]
        # The maximum of an empty tensor is the least int32, so zero is among the candidates.
        return tf.reduce_max(tf.stack([tf.zeros([], tf.int64), *ends]))

    sum_type = nothing.type_signature.result

    @tff.tensorflow.computation(sum_type, record_type)
    def accumulate(done: Any, record: Any) -> Any:
        own = largest(record)
        bound = done.bound + own
        return tf.cond(
            bound <= tf.int32.max,
            lambda: _OpenSum(done.total, map_structure(tf.add, done.recent, record), bound),
            lambda: _OpenSum(widened(done.total, done.recent), record, own),
        )

    @tff.tensorflow.computation(sum_type, sum_type)
    def merge(one: Any, other: Any) -> Any:
        total = map_structure(tf.add, widened(one.total, one.recent), other.total)
        return _OpenSum(total, other.recent, other.bound)

    @tff.tensorflow.computation(sum_type)
    def whole(done: Any) -> Any:
        return widened(done.total, done.recent)

    @tff.federated_computation(tff.FederatedType(record_type, tff.CLIENTS))
    def summed(records: Any) -> Any:
        return tff.federated_aggregate(records, nothing(), accumulate, merge, whole)

    return summed


def mf_dp_aggregator(
    mechanism: Mechanism | Factorization | str | os.PathLike[str],
    *,
    participation: Participation | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float | AdaptiveClip,
    clients_per_round: float,
    seed: int | None = None,
    noise_storage: str = "auto",
    noise_directory: str | os.PathLike[str] | None = None,
    secure_aggregation_bits: int | None = None,
    largest_cohort: int | None = None,
    allow_no_noise: bool = False,
    metrics: PrivateMetrics | None = None,
) -> MatrixFactorizationFactory:
    """Returns an aggregator with matrix-factorization noise (MF-DP-FTRL, BandMF Algorithm 1).

    Use it when TensorFlow Federated trains: it is the ``model_aggregator`` of a learning process.

    In round i the aggregate is (sum of the clients' clipped updates + row i of
    ``noise_multiplier * clip_norm * sens(C) * C^-1 Z``) / clients_per_round. Updates are clipped
    and rounded to multiples of clip_norm / 2^30 or, for secure sums, of a larger step, and are
    added up as integers: whatever the others send, one client moves the sum by at most the
    clip norm. There is noise for ``factorization.num_rounds`` rounds; a further one is refused
    with ``mf_aggregators.tff.processes.RefusalError``.

    The state holds the round, the secret seed of its noise and the schema that the noise is
    scaled to (``mf_aggregators.tff.processes.participations_in``), and a fingerprint: a process
    of another mechanism, or with other options, refuses the state. ``next`` is refused if it is
    called twice from one state with different clients, because two sums under one row of noise
    reveal their difference. The record of released sums is in ``noise_directory``; without one it
    ends with the Python process, and nothing refuses an older state with another cohort after a
    restart. ``simulations`` shows a loop that resumes safely; TFF's ``run_training_process`` and
    ``train_model`` do not save who was drawn.
    Mime Lite sends a second update, which needs an aggregator of its own
    (``mf_aggregators.tff.client_sums``).

    The measurements of a round have ``num_clients``, how many updates were summed, beside
    ``clients_per_round``, what their sum was divided by: where they differ, the model moves by
    too little or too much. The number is exact, without noise. Where a data sampler draws the
    clients, it is to be kept as secret as who they are.

    With ``clip_norm=AdaptiveClip(...)`` the clip norm of a round follows from what earlier rounds
    released, and so does the scale of the round's noise. The measurements then have, below
    ``dp_query_metrics``, the round's ``clip_norm``, the ``unclipped_fraction`` of its clients and
    the ``next_clip_norm``: all of them are released with noise, and part of the guarantee.
    In it, leaving a client out removes its indicator as well as its update.

    Pass it as ``model_aggregator`` to ``tff.learning.algorithms.build_unweighted_fed_avg``,
    or, wrapped in ``tff.aggregators.as_weighted_aggregator``, to
    ``build_weighted_fed_avg``: clients count equally in both, because a weighted mean
    has no bounded sensitivity.

    Args:
      mechanism: What the run's guarantee is about (``mf_aggregators.calibrate``), with all of its
        horizons where the run was extended. Nothing here draws clients: where it has a sampling
        scheme, every round has to take those whom ``scheme.sampler(seed)`` draws, in secret. Or,
        in the long spelling, a factorization or the directory of its checkpoint, with the two
        arguments that follow. A run that goes on after its last round needs the first spelling
        (``Mechanism.extended``): its rows of noise stay bit for bit, and it accepts the states of
        the horizons before.
      participation: With a factorization: the schema that the run enforces; the noise is scaled to
        the sensitivity of C under it.
      noise_multiplier: With a factorization: standard deviation of Z over (clip norm times
        sensitivity); ``mf_aggregators.accounting`` relates it to epsilon. Zero adds no noise, and
        is refused without ``allow_no_noise``.
      clip_norm: The L2 norm to which each client's whole update is clipped: a number, or how it
        adapts (``mf_aggregators.AdaptiveClip``).
      clients_per_round: What the noisy sum is divided by: the cohort size, fixed in
        advance. A smaller cohort gives a smaller aggregate, not a weaker guarantee.
      seed: For tests only: an integer that all noise follows from, with a warning. None
        draws a fresh secret from the operating system.
      noise_storage: Where the noise of earlier rounds is kept: "state" (in the aggregator's
        state), "disk" (in files below ``noise_directory``), or "auto" for the cheaper one
        that fits; ``mf-plan --model_size`` shows what it costs.
      noise_directory: A private directory of the machine that TFF's worker runs on. Rows in
        it are a cache; a record in it makes a round fail whose noise was added to other
        data before. None takes a temporary one, which is deleted when Python ends: a run that is
        resumed makes its rows again, and has no record of the rounds before.
      secure_aggregation_bits: The width of the integers of a secure sum, 24 to 62, where the
        server may see nothing but sums (``tff.aggregators.SecureModularSumFactory``). Updates
        are rounded to the finest step that ``largest_cohort`` of them cannot overflow. None
        adds them up in the open, in 64 bits.
      largest_cohort: The most clients that a round may have; a round with more releases
        nothing. None stands for ``clients_per_round`` in a secure sum, and for 2^22 else. Where
        the number of clients is drawn at random, as by Poisson sampling, no round may reach it:
        a refused round tells that its batch was larger than this, and amplification rests on
        nobody knowing who was drawn. A mechanism with such a scheme has all clients in the place
        of ``clients_per_round``; with a factorization, give such a number.
      allow_no_noise: Whether ``noise_multiplier`` may be zero: such an aggregator only clips and
        averages, and gives no privacy.
      metrics: Metrics of clients that are released inside the same guarantee
        (``mf_aggregators.private_metrics``). What clients send then has two parts, ``update`` and
        ``metrics``, a number for each metric by its name; the measurements have the released means
        below ``dp_query_metrics``, and no exact number of clients. None for none.

    Returns:
      A ``tff.aggregators.UnweightedAggregationFactory``.

    Raises:
      CheckpointError: If the checkpoint cannot be read.
      TypeError: If an argument has the wrong type.
      ValueError: If a number is out of its range.

    Example:
      >>> import numpy as np
      >>> import tensorflow_federated as tff
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> matrix = mfa.factorizations.banded(8, num_bands=4, participation=timers)
      >>> mechanism = mfa.calibrate(matrix, timers, epsilon=8.0, delta=1e-6)
      >>> aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=100)
      >>> process = aggregator.create(tff.TensorType(np.float32, [3]))
      >>> print(process.next.type_signature.result["result"])
      float32[3]@SERVER
    """
    if isinstance(mechanism, Mechanism):
        if (participation, noise_multiplier) != (None, None):
            raise TypeError(
                "a Mechanism has its participation and noise multiplier: leave out participation= "
                "and noise_multiplier=."
            )
        made = mechanism
    elif isinstance(mechanism, (Factorization, str, os.PathLike)):
        if participation is None or noise_multiplier is None:
            raise TypeError(
                "a factorization needs participation= and noise_multiplier= as well: "
                "mf_aggregators.calibrate(factorization, participation, epsilon=, delta=) makes a "
                "Mechanism, which has all three."
            )
        factorization = (
            mechanism if isinstance(mechanism, Factorization) else checkpoints.load(mechanism)
        )
        made = Mechanism(factorization, check(participation), noise_multiplier)
    else:
        raise TypeError(
            "mechanism must be a Mechanism, a Factorization or the directory of a checkpoint, "
            f"found {numbers.shown(mechanism)}."
        )
    options = Options(
        mechanism=made,
        clip_norm=clip_norm,
        clients_per_round=clients_per_round,
        seed=seed,
        noise_storage=noise_storage,
        noise_directory=noise_directory,
        secure_aggregation_bits=secure_aggregation_bits,
        largest_cohort=largest_cohort,
        allow_no_noise=allow_no_noise,
        metrics=metrics,
    )
    return MatrixFactorizationFactory(options)
