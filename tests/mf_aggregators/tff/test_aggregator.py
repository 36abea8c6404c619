"""The aggregator in TensorFlow Federated's own execution."""

import ast
import asyncio
import collections
import pathlib
import pprint
import traceback
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators
import mf_aggregators as mfa
from mf_aggregators import aggregator as numpy_aggregator
from mf_aggregators.noise import places
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy.statements import Statement
from mf_aggregators.private_metrics import PrivateMetrics
from mf_aggregators.tff import processes
from mf_aggregators.tff.aggregator import _sum_of_records
from mf_aggregators.tff.dp_query import SampleState
from mf_aggregators.tff.processes import NoiseState
from tests.examples import examples
from tests.mf_aggregators.tff import secure_sum_table
from tests.mf_aggregators.tff.small_aggregators import (
    BFLOAT16,
    NEST,
    NUM_ROUNDS,
    flat,
    leaves,
    make_aggregator,
    make_process,
    nest_of,
    process_with_noise,
    process_without_noise,
    query_rounds,
    small_matrix,
)
from tests.refusals import refuses

pytestmark = pytest.mark.begun_first


@pytest.mark.long
def test_any_nest_of_floats_keeps_its_type() -> None:
    process = make_process(NEST, noise_multiplier=1.0)
    output_type = process.next.type_signature.result.result.member
    assert output_type == NEST
    output = process.next(process.initialize(), [nest_of(0.1), nest_of(0.2)])
    dtypes = [np.asarray(leaf).dtype for leaf in leaves(output.result)]
    assert dtypes == [np.float32, np.float64, BFLOAT16, np.float32]
    assert np.all(np.isfinite(flat(output.result)))


def test_without_noise_the_clipped_mean_is_exact() -> None:
    process = process_without_noise(tff.TensorType(np.float32, [2]))
    clients = [np.array([0.6, 0.0], np.float32), np.array([3.0, 4.0], np.float32)]
    output = process.next(process.initialize(), clients)
    np.testing.assert_allclose(output.result, [1.2 / 4, 0.8 / 4], rtol=1e-6)
    # A smaller cohort gives a smaller aggregate: the divisor is fixed in advance.
    alone = process.next(process.initialize(), clients[:1])
    np.testing.assert_allclose(alone.result, [0.15, 0.0], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_bad_update_moves_the_result_by_at_most_its_share(bad: float) -> None:
    process = process_without_noise(NEST)
    state = process.initialize()
    good = [nest_of(0.1), nest_of(-0.05)]
    without = flat(process.next(state, good).result)
    spoilt = flat(process.next(state, [*good, nest_of(bad)]).result)
    assert np.all(np.isfinite(spoilt))
    # bfloat16 has 8 bits of mantissa, so sums of it are that rough.
    assert np.linalg.norm(spoilt - without) <= 1.0 / 4 + 5e-3


def test_one_client_never_moves_the_average_too_far() -> None:
    """Magnitudes and orders that floats add up wrongly, in exact arithmetic.

    Without noise the released float64 numbers are whole steps over four, without rounding.
    """
    process = make_process(tff.TensorType(np.float64, [3]), clip_norm=0.7)
    state = process.initialize()
    generator = np.random.default_rng(3)
    for _ in range(examples(200, one_in=12)):
        size = int(generator.integers(2, 9))
        updates = generator.choice([-1.0, 1.0], size=(size, 3))
        updates *= 2.0 ** generator.integers(-45, 5, size=(size, 1)).astype(np.float64)
        updates *= 1.0 + 2.0 ** -generator.integers(1, 50, size=(size, 3)).astype(np.float64)
        with_it = process.next(state, list(updates)).result
        updates[generator.integers(size)] = 0.0
        without = process.next(state, list(generator.permutation(updates))).result
        differences = zip(with_it.tolist(), without.tolist(), strict=True)
        moved = sum((Fraction(one) - Fraction(other)) ** 2 for one, other in differences)
        assert moved <= (Fraction(0.7) / 4) ** 2


def test_measurements_say_how_many_clients_there_were_and_should_be() -> None:
    process = make_process(tff.TensorType(np.float32, [2]), clients_per_round=3.0)
    for num_clients in (0, 1, 3, 5):
        output = process.next(process.initialize(), [np.ones(2, np.float32)] * num_clients)
        assert output.measurements["num_clients"] == num_clients
        assert output.measurements["clients_per_round"] == 3.0


def test_measurements_count_rounds_and_reveal_no_seed() -> None:
    process = process_with_noise()
    output = process.next(process.initialize(), [np.zeros(2, np.float32)])
    assert output.measurements["dp_query_metrics"] == {"rounds_released": 1}


@pytest.mark.parametrize(
    "value_type",
    [
        tff.FederatedType(np.float32, tff.CLIENTS),
        tff.FunctionType(None, np.float32),
        tff.SequenceType(np.float32),
        tff.types.to_type([tff.SequenceType(np.float32)]),
        tff.types.to_type([tff.FunctionType(np.float32, np.float32)]),
        tff.StructType([np.float32]),
        None,
        np.float32,
    ],
    ids=str,
)
def test_types_that_hold_more_than_tensors_are_refused_as_tff_does(value_type: Any) -> None:
    with refuses("containers", error=TypeError) as raised:
        make_aggregator().create(value_type)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_])
def test_other_types_than_floats_are_refused(dtype: Any) -> None:
    with refuses("floating-point", error=TypeError):
        make_process(tff.TensorType(dtype, [2]))


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"noise_multiplier": -1.0}, ValueError, ["noise_multiplier"]),
        ({"noise_multiplier": float("nan")}, ValueError, ["noise_multiplier"]),
        ({"allow_no_noise": False}, ValueError, ["noise_multiplier", "allow_no_noise"]),
        ({"noise_multiplier": "1"}, ValueError, ["noise_multiplier", "'1'"]),
        ({"noise_multiplier": True}, ValueError, ["noise_multiplier", "True"]),
        ({"clip_norm": "1"}, ValueError, ["clip_norm", "'1'"]),
        ({"clients_per_round": "4"}, ValueError, ["clients_per_round", "'4'"]),
        ({"largest_cohort": "4"}, ValueError, ["largest_cohort", "'4'"]),
        ({"secure_aggregation_bits": "32"}, ValueError, ["secure_aggregation_bits"]),
        ({"participation": "min_sep"}, TypeError, ["participation"]),
        ({"factorization": 7}, TypeError, ["Mechanism"]),
        ({"noise_storage": "tape"}, ValueError, ["'auto'", "'state'", "'disk'"]),
        ({"factorization": "nowhere"}, mfa.checkpoints.CheckpointError, ["nowhere"]),
    ],
)
def test_bad_arguments_are_refused(
    changes: dict[str, Any], error: type[Exception], names: list[str]
) -> None:
    with refuses(*names, error=error):
        make_aggregator(**changes)


def test_a_checkpoint_directory_serves_as_the_factorization(tmp_path: pathlib.Path) -> None:
    mfa.checkpoints.save(small_matrix(), tmp_path / "c")
    specs = tf.TensorSpec([5], tf.float32)
    first, second, itself = (
        query_rounds(specs, NUM_ROUNDS, factorization=each, noise_multiplier=1.0, seed=1)
        for each in (tmp_path / "c", str(tmp_path / "c"), small_matrix())
    )
    np.testing.assert_array_equal(first, itself)
    np.testing.assert_array_equal(second, itself)


@pytest.mark.long
def test_the_mean_of_half_precision_is_cast_once() -> None:
    """Sums and numbers of clients beyond float16's largest number, 65,504, and with noise."""
    halves = [tf.float16.as_numpy_dtype, tf.bfloat16.as_numpy_dtype]
    value_type = tff.types.to_type([*((half, [2]) for half in halves), np.float32])

    def means(entry: float, count: int, clients: float, noise_multiplier: float) -> Any:
        process = make_process(
            value_type,
            noise_multiplier=noise_multiplier,
            clip_norm=1e5,
            clients_per_round=clients,
        )
        assert process.next.type_signature.result.result.member == value_type
        update = [*(np.full([2], entry).astype(half) for half in halves), np.float32(0.0)]
        return process.next(process.initialize(), [update] * count).result[:2]

    of_many, noised = means(1.0, 2, 7e4, 0.0), means(1e4, 10, 10, 1e-3)
    for half, found in zip(halves, of_many, strict=True):
        assert found.dtype == half
        np.testing.assert_array_equal(found, np.full([2], 2 / 7e4).astype(half))
    # Ten standard deviations of the noise, and a rounding.
    for half, found, relative in zip(halves, noised, (2.0**-11, 2.0**-8), strict=True):
        assert found.dtype == half
        largest = 10 * 1e-3 * 1e5 * 2**0.5 / 10 + relative * 1e4
        np.testing.assert_allclose(np.asarray(found, np.float64), 1e4, rtol=0.0, atol=largest)


_ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"a": _ONES, "c": [_ONES]}, "names"),
        ({"b": [_ONES], "a": _ONES}, "names"),
        ([_ONES, [_ONES]], "names"),
        ({"a": _ONES, "b": {"x": _ONES}}, "value.b"),
        ({"a": _ONES, "b": [np.ma.masked_array(_ONES, [True, False])]}, "MaskedArray"),
        ({"a": tf.sparse.from_dense(_ONES), "b": [_ONES]}, "SparseTensor"),
    ],
)
def test_updates_are_plain_arrays_that_are_matched_by_name(update: Any, said: str) -> None:
    """TFF itself adds them up by position, and hidden entries with the others."""
    tensor = tff.TensorType(np.float32, [2])
    process = process_without_noise(tff.to_type(collections.OrderedDict(a=tensor, b=[tensor])))
    right = {"a": 0.1 * _ONES, "b": [0.2 * _ONES]}
    output = process.next(process.initialize(), [right, collections.OrderedDict(right)])
    np.testing.assert_allclose(output.result["b"][0], 0.1, rtol=1e-6)
    with refuses(said, error=(TypeError, ValueError)):
        process.next(output.state, [right, update])


# What is printed of states, queries and aggregators tells no seed and no row of noise.


_PARTICIPATION = mfa.participation.MinSeparation(3)
_TYPE = tff.TensorType(np.float32, [3])
_CLIP_NORMS = [1.0, mfa.AdaptiveClip(0.5)]


def _aggregator(clip_norm: float | mfa.AdaptiveClip = 1.0) -> Any:
    return mfa.mf_dp_aggregator(
        mfa.factorizations.banded(mfa.workloads.prefix_sum(6), 3),
        participation=_PARTICIPATION,
        noise_multiplier=1.0,
        clip_norm=clip_norm,
        clients_per_round=2,
        noise_storage="state",
    )


def _printed(value: Any) -> str:
    """All that Python, a notebook, a debugger and a log print of a value."""
    return "\n".join([repr(value), str(value), f"{value}", pprint.pformat(value), f"{[value]!r}"])


def _check(text: str, seed: Any, history: Any = ()) -> None:
    """No integer of the seed or of the history stands in a text."""
    integers = [*np.ravel(seed), *(each for rows in history for each in np.ravel(rows))]
    # Short ones stand in any text.
    secrets = {digits for digits in map(str, integers) if len(digits) > 6}
    assert len(secrets) >= 2
    assert not [digits for digits in secrets if digits in text]


def test_a_state_of_tff_prints_no_seed_wherever_it_is_nested() -> None:
    process = tff.aggregators.zeroing_factory(10.0, _aggregator()).create(_TYPE)
    state = process.next(process.initialize(), [np.ones(3, np.float32)]).state
    noise = state["inner_agg"].query_state.numerator_state
    assert isinstance(noise, NoiseState)
    learning = tff.learning.templates.LearningAlgorithmState(
        global_model_weights=(),
        distributor=(),
        client_work=collections.OrderedDict(rate=0.1),
        aggregator=state,
        finalizer=(),
    )
    text = _printed(learning)
    assert "round_index=1, seed=<secret>" in text
    _check(text, noise.seed, noise.history)
    for argument in (learning, (state, state), {"state": state}):
        with pytest.raises(TypeError) as raised:
            process.next(argument, [np.ones(3, np.float32)])
        _check("".join(traceback.format_exception(raised.value)), noise.seed, noise.history)


# What is raised where a process refuses a round, out of what TFF raises.


_LIBRARY = pathlib.Path(mf_aggregators.__file__).parent
_MESSAGE = 'It\'s "refused" (the record is in C:\\a [1] b/[2]).'


class _WorkerError(Exception):
    """As gRPC prints it."""

    def __init__(self, message: str) -> None:
        escaped = message.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
        super().__init__(
            '<RPC that terminated with:\n\tdetails = "Failed to run computation: assertion failed: '
            f"[{escaped}] [Condition x < y did not hold element-wise:] [x = ] [1]\n\t [[{{node}}]]"
        )


class _Context:
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def invoke(self, computation: Any, argument: Any) -> Any:
        if self.error is not None:
            raise self.error
        return computation, argument


class _AsyncContext(_Context):
    async def invoke(self, computation: Any, argument: Any) -> Any:
        return super().invoke(computation, argument)


def _invoked(context: Any) -> Any:
    found = context.invoke("next", 1)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


@pytest.mark.parametrize("kind", [_Context, _AsyncContext])
def test_a_context_raises_what_is_refused_in_one_line_and_all_else_as_it_is(kind: Any) -> None:
    of_others = _WorkerError("Labels must be below 10.")
    for error in (of_others, KeyError("x"), _WorkerError("")):
        context = kind(error)
        processes.raise_refusals(context)
        with pytest.raises(type(error)) as raised:
            _invoked(context)
        assert raised.value is error
    context = kind(None)
    processes.raise_refusals(context)
    assert _invoked(context) == ("next", 1)
    context = kind(_WorkerError(processes.refusal(_MESSAGE)))
    for _ in range(3):
        processes.raise_refusals(context)
        with pytest.raises(processes.RefusalError) as refused:
            _invoked(context)
        assert str(refused.value) == _MESSAGE
        assert refused.value.__suppress_context__
        # One wrapper, however often an aggregator is made.
        assert [entry.name for entry in refused.traceback].count("_clear_errors") == 1


@pytest.mark.parametrize("kind", [_Context, _AsyncContext])
def test_a_context_without_a_secure_sum_says_which_one_simulates_it(kind: Any) -> None:
    context = kind(ValueError('details = "Cannot embed a federated value. while evaluating"\n'))
    processes.raise_refusals(context)
    with refuses("set_sync_test_cpp_execution_context", error=processes.RefusalError) as refused:
        _invoked(context)
    assert "\n" not in str(refused.value)


def test_a_context_whose_methods_are_fixed_is_left_as_it_is() -> None:
    class _Fixed:
        __slots__ = ()

        def invoke(self, computation: Any, argument: Any) -> Any:
            raise _WorkerError(processes.refusal(_MESSAGE))

    context = _Fixed()
    processes.raise_refusals(context)
    with pytest.raises(_WorkerError) as raised:
        _invoked(context)
    # Whoever runs it finds the reason, whole.
    assert processes.RefusalError.reason_of(raised.value) == _MESSAGE
    assert processes.RefusalError.reason_of(processes.RefusalError("Why.")) == "Why."
    assert processes.RefusalError.reason_of(ValueError("another error")) is None


def test_every_check_in_a_graph_says_what_is_refused() -> None:
    """Its message is one that contexts know: no check of the library is left out."""
    checks = [
        (path.name, each)
        for path in sorted(_LIBRARY.rglob("*.py"))
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.Call) and ".debugging." in f".{ast.unparse(each.func)}"
    ]
    assert len(checks) >= 5
    for name, check in checks:
        (message,) = [each.value for each in check.keywords if each.arg == "message"]
        assert isinstance(message, ast.Call), name
        assert ast.unparse(message.func) == "processes.refusal", name


# Statements of runs of the aggregator in TensorFlow Federated.


_TOLD: dict[str, Any] = {
    "population": 200,
    "public_data": "none",
    "enforcement": "Each phone keeps a timer.",
    "delta": 1e-5,
}
_ROUNDS = 3


def _ledger(rounds: int) -> list[list[str]]:
    return [[f"phone {i}", f"tablet {i}"] for i in range(rounds)]


def _small(**changes: Any) -> Any:
    matrix = mfa.factorizations.banded(_ROUNDS, 2)
    mechanism = changes.pop("mechanism", mfa.Mechanism(matrix, MinSeparation(3), 1.0))
    return mfa.mf_dp_aggregator(mechanism, **{"clip_norm": 0.5, "clients_per_round": 2, **changes})


def _facts(statement: Statement) -> dict[str, Any]:
    document: dict[str, Any] = statement.to_dict()
    return {name: each["value"] for name, each in document["facts"].items()}


def test_a_run_of_a_learning_process_is_stated_with_its_record(tmp_path: pathlib.Path) -> None:
    """The record that graphs write has the digest of the claim that the guarantee is of."""
    aggregator = _small(noise_directory=tmp_path)
    process = aggregator.create(tff.TensorType(np.float32, [2]))
    state = process.initialize()
    for _ in range(2):
        state = process.next(state, [np.ones(2, np.float32)] * 2).state
    found = aggregator.statement(_ledger(2), state=state, round_counts=[2, 2], **_TOLD)
    facts = _facts(found)
    assert (facts["clip_norm"], facts["clients_per_round"]) == ("0.5", "2")
    assert (facts["seed_is_fixed"], facts["secure_sums"]) == (False, False)
    assert facts["aggregator"] == f"mf_dp_aggregator of mf_aggregators {mfa.__version__}"
    assert (found.status, found.stated) == ("open", aggregator.mechanism.guarantee(1e-5))
    (stream,) = places.ReleasedSums.streams(tmp_path)
    record = places.ReleasedSums.read(tmp_path, stream)
    digest = found.to_dict()["noise"]["digest"]
    assert record.of_rounds == {0: digest, 1: digest}
    assert (found.evidence.num_sums, found.evidence.record_sha256) == (2, record.sha256)
    # Without the state, the only run of the directory is taken.
    assert aggregator.statement(_ledger(2), **_TOLD).evidence == found.evidence
    with refuses("ledger", "1", "2"):
        aggregator.statement(_ledger(1), state=state, **_TOLD)
    spent = aggregator.spend(state, tff.TensorType(np.float32, [2]))
    whole = aggregator.statement(_ledger(3), state=spent, **_TOLD)
    assert (whole.status, whole.evidence.num_sums) == ("finished", 2)
    with refuses("state", "0"):
        aggregator.statement(_ledger(2), state=(), **_TOLD)


def test_secure_sums_are_those_of_the_aggregator() -> None:
    found = _small(secure_aggregation_bits=32).statement(_ledger(_ROUNDS), **_TOLD)
    fact = found.to_dict()["facts"]["secure_sums"]
    assert fact["value"] is True
    assert "32 bits" in fact["origin"]
    assert "not checked" in fact["origin"]
    with refuses("secure_sums", "open"):
        _small().statement(_ledger(_ROUNDS), secure_sums=True, **_TOLD)


def test_metrics_and_indicators_have_their_share_of_the_noise() -> None:
    metrics = PrivateMetrics.of_training(10.0, 100, counts_clients=False)
    clips: list[float | mfa.AdaptiveClip] = [0.5, mfa.AdaptiveClip(initial_norm=0.5)]
    for clip in clips:
        found = _small(clip_norm=clip, metrics=metrics).statement(_ledger(_ROUNDS), **_TOLD)
        assert found.facts.clip == clip
        assert found.facts.metrics == metrics
        assert found.facts.split == metrics.split_noise(1.0, clip, 2)
        assert "loss (0 to 10)" in found.to_markdown()


# Sums of clients: the integers that they add, open and secure, and that no other sums are made.


_BITS = sorted({row.bits for row in secure_sum_table.rows()})


@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
def test_a_clip_norm_that_adapts_in_secure_sums() -> None:
    """Updates and indicators are integers of a secure sum, and no other sum of clients is made."""
    clip = mfa.AdaptiveClip(0.5, update_period=1)
    process = make_process(
        tff.TensorType(np.float32, [2]), clip_norm=clip, secure_aggregation_bits=28
    )
    tff.test.assert_not_contains_unsecure_aggregation(process.next)
    clients = [np.array([0.3, 0.0], np.float32), np.array([0.0, 3.0], np.float32)]
    output = process.next(process.initialize(), clients)
    np.testing.assert_allclose(output.result, [0.3 / 4, 0.5 / 4], rtol=1e-6)
    found = output.measurements["dp_query_metrics"]
    assert found["unclipped_fraction"] == pytest.approx(0.5)
    one = process.next(output.state, clients[:1])
    found = one.measurements["dp_query_metrics"]
    assert found["unclipped_fraction"] == pytest.approx(0.5 + 0.5 / 4)
    assert found["next_clip_norm"] == pytest.approx(0.5 * np.exp(-0.125))


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize(
    "bits",
    [
        bits if bits in (_BITS[0], _BITS[-1]) else pytest.param(bits, marks=pytest.mark.long)
        for bits in _BITS
    ],
)
def test_secure_sums_of_all_bits_of_the_documents_are_those_of_integers(bits: int) -> None:
    clients = min(row.clients for row in secure_sum_table.rows() if row.bits == bits)
    steps = numpy_aggregator._integer_sums(bits, clients, clients).steps_per_clip_norm
    process = make_process(
        tff.TensorType(np.float64, [3]),
        factorization=mfa.factorizations.identity(1),
        clients_per_round=clients,
        secure_aggregation_bits=bits,
    )
    updates = [np.array(each) for each in ([-0.9, 0.1, 0.0], [-0.7, -0.3, 0.2], [-0.51, 0.22, 0.8])]
    output = process.next(process.initialize(), updates)
    total = [
        sum(round(entry * steps) for entry in entries) for entries in zip(*updates, strict=True)
    ]
    np.testing.assert_allclose(output.result, np.array(total) / steps / clients, rtol=1e-14)


@pytest.mark.usefixtures("_simulated_secure_sums")
def test_the_computation_of_a_secure_sum_has_no_other_sum_of_clients() -> None:
    value_type = tff.TensorType(np.float32, [2])
    secure = make_process(value_type, noise_multiplier=1.0, secure_aggregation_bits=32).next
    tff.test.assert_contains_secure_aggregation(secure)
    tff.test.assert_not_contains_unsecure_aggregation(secure)
    in_the_open = make_process(value_type, noise_multiplier=1.0).next
    with pytest.raises(AssertionError):
        tff.test.assert_not_contains_unsecure_aggregation(in_the_open)


@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
def test_a_round_of_more_clients_than_a_secure_sum_holds_is_refused() -> None:
    process = make_process(tff.TensorType(np.float32, [3]), secure_aggregation_bits=32)
    state = process.initialize()
    updates = [np.ones(3, np.float32)] * 4
    process.next(state, updates)
    with refuses("4", "clients", error=processes.RefusalError):
        process.next(state, [*updates, updates[0]])


# Both sides of 2^31, where TFF's type of a Python integer changes, and both ends.
_SOME_BITS = [24, 31, 32, 62]


def _summed(dtype: Any, size: int, bits: int | None) -> Any:
    def zero() -> SampleState:
        return SampleState((tf.zeros([size], tf.int64),), *[tf.zeros([], tf.int64)] * 2)

    record_type = tff.types.to_type(SampleState(((dtype, [size]),), np.int64, np.int64))
    return _sum_of_records(zero, record_type, bits)


def test_sums_are_those_of_integers_without_a_bound() -> None:
    summed = _summed(np.int32, 2, None)
    generator = np.random.default_rng(0)
    for count, low in ((0, 0), (1, -(2**31)), (9, 2**30), (40, -(2**31))):
        vectors = generator.integers(low, 2**31, (count, 2)).astype(np.int32)
        # Large and small ones: not all sums fit into 32 bits.
        vectors >>= generator.integers(0, 9, (count, 1)).astype(np.int32)
        found = summed([SampleState((vector,), np.int64(1), np.int64(-2)) for vector in vectors])
        assert found.steps[0].dtype == np.int64
        assert found.steps[0].tolist() == [sum(map(int, column)) for column in vectors.T]
        assert (found.num_records, found.least_steps) == (count, -2 * count)


def _check_sums(bits: int) -> None:
    """The largest sums of both signs, of few clients and of many, and the sum of none."""
    most = (1 << (bits - 1)) - 1
    summed = _summed(np.int64, 3, bits)
    for clients in (
        [[most, -most, 0]],
        [[most // 5, -(most // 5), -1]] * 5,
        # In residues, five of these leave int64 from 61 bits on.
        [[-1, -2, most], [-1, -2, 0], [-1, -2, 0], [-1, -2, 0], [-1, 8, -most]],
        [],
    ):
        found = summed(
            [SampleState((np.array(each),), np.int64(1), np.int64(-2)) for each in clients]
        )
        assert (found.num_records, found.least_steps) == (len(clients), -2 * len(clients))
        assert found.steps[0].tolist() == [
            sum(entries) for entries in zip([0] * 3, *clients, strict=True)
        ]


@pytest.mark.short_cases(1)
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize("bits", _SOME_BITS)
def test_a_secure_sum_is_the_sum(bits: int) -> None:
    _check_sums(bits)


@pytest.mark.long_cases(5)
@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize("bits", [bits for bits in range(24, 63) if bits not in _SOME_BITS])
def test_a_secure_sum_of_any_width_is_the_sum(bits: int) -> None:
    _check_sums(bits)
