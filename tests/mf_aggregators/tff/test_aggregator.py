"""The aggregator in TensorFlow Federated's own execution."""

import asyncio
import collections
import dataclasses
import functools
import os
import pathlib
import traceback
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators import integer_sums
from mf_aggregators.catalogue.third_party import CheckedFactorization
from mf_aggregators.noise import FixedSeedWarning, recursions
from mf_aggregators.tff import declared_participation, processes
from mf_aggregators.tff.dp_query import MatrixFactorizationSumQuery
from mf_aggregators.tff.grid import IntegerSumFactory
from tests.examples import examples
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.mf_aggregators.tff import secure_sum_table
from tests.refusals import refuses

pytestmark = pytest.mark.begun_first

_NUM_ROUNDS = 6
_PARTICIPATION = mfa.participation.MinSeparation(3)
_BFLOAT16 = tf.bfloat16.as_numpy_dtype


def _factorization() -> mfa.factorizations.Factorization:
    return mfa.factorizations.banded(mfa.workloads.prefix_sum(_NUM_ROUNDS), 3)


def _aggregator(seed: int | None = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "factorization": _factorization(),
        "participation": _PARTICIPATION,
        "noise_multiplier": 0.0,
        "clip_norm": 1.0,
        "clients_per_round": 4,
        "seed": seed,
        "allow_no_noise": True,
    }
    arguments.update(changes)
    return mfa.mf_dp_aggregator(arguments.pop("factorization"), **arguments)


def _process(value_type: Any, **changes: Any) -> tff.templates.AggregationProcess:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return _aggregator(**changes).create(value_type)


@functools.cache
def _without_noise(value_type: Any) -> tff.templates.AggregationProcess:
    """A process of the usual arguments, which takes seconds to make, for several tests."""
    return _process(value_type)


@functools.cache
def _with_noise() -> tff.templates.AggregationProcess:
    """One with noise, whose rounds several tests look at."""
    return _process(tff.TensorType(np.float32, [2]), noise_multiplier=1.0)


def _queried(specs: Any, rounds: int = 1, **changes: Any) -> list[list[np.ndarray]]:
    """What the aggregator's query releases in rounds of one client's zeros, without TFF."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        query = _aggregator(**changes).query(specs)
    state, zeros = query.initial_global_state(), query.initial_sample_state(specs)
    released = []
    for _ in range(rounds):
        result, state, _ = query.get_noised_result(zeros, state)
        released.append([np.asarray(tensor) for tensor in tf.nest.flatten(result)])
    return released


_NEST = tff.types.to_type(
    collections.OrderedDict(
        layer=(tff.TensorType(np.float32, [2, 2]), tff.TensorType(np.float64, [])),
        bfloat=tff.TensorType(_BFLOAT16, [3]),
        empty=tff.TensorType(np.float32, [0, 4]),
    )
)


@pytest.mark.long
def test_rows_of_another_package_are_drawn_and_compared_with_its_matrix() -> None:
    """What its recursion says to NumPy is not enough."""
    matrix = np.eye(_NUM_ROUNDS) + 0.5 * np.eye(_NUM_ROUNDS, k=-1)
    checked = CheckedFactorization(mfa.factorizations.DenseFactorization(matrix))
    specs = tf.TensorSpec([2], tf.float32)
    for multiplier in (0.0, 1.0):
        _aggregator(factorization=checked, noise_multiplier=multiplier).query(specs)
    recursion = checked.noise_recursion()
    assert isinstance(recursion, recursions.DenseNoise)
    object.__setattr__(recursion, "inverse", recursion.inverse * 0.9)
    with refuses("strategy matrix"):
        _process(tff.TensorType(np.float32, [2]), factorization=checked, noise_multiplier=1.0)


def _value(entry: float) -> Any:
    return collections.OrderedDict(
        layer=(np.full([2, 2], entry, np.float32), np.float64(entry)),
        bfloat=np.full([3], entry).astype(_BFLOAT16),
        empty=np.zeros([0, 4], np.float32),
    )


def _flat(value: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in _leaves(value)])


def _leaves(value: Any) -> list[Any]:
    return [*value["layer"], value["bfloat"], value["empty"]]


@pytest.mark.long
def test_any_nest_of_floats_keeps_its_type() -> None:
    process = _process(_NEST, noise_multiplier=1.0)
    output_type = process.next.type_signature.result.result.member
    assert output_type == _NEST
    output = process.next(process.initialize(), [_value(0.1), _value(0.2)])
    dtypes = [np.asarray(leaf).dtype for leaf in _leaves(output.result)]
    assert dtypes == [np.float32, np.float64, _BFLOAT16, np.float32]
    assert np.all(np.isfinite(_flat(output.result)))


def test_without_noise_the_clipped_mean_is_exact() -> None:
    process = _without_noise(tff.TensorType(np.float32, [2]))
    clients = [np.array([0.6, 0.0], np.float32), np.array([3.0, 4.0], np.float32)]
    output = process.next(process.initialize(), clients)
    np.testing.assert_allclose(output.result, [1.2 / 4, 0.8 / 4], rtol=1e-6)
    # A smaller cohort gives a smaller aggregate: the divisor is fixed in advance.
    alone = process.next(process.initialize(), clients[:1])
    np.testing.assert_allclose(alone.result, [0.15, 0.0], rtol=1e-6)


def test_a_constant_clip_norm_is_the_query_of_before_bit_for_bit() -> None:
    """Beside one that is built by hand: all noise is that of the clip norm times the multiplier."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        made = _aggregator(5, noise_multiplier=1.3, clip_norm=0.7)
        specs = [tf.TensorSpec([3], tf.float32)]
        sensitivity = _factorization().sensitivity(_PARTICIPATION).value
        by_hand = MatrixFactorizationSumQuery(
            _factorization().noise_recursion().scaled_to_sensitivity_one(sensitivity),
            specs,
            l2_norm_clip=0.7,
            noise_stddev=1.3 * 0.7,
            seed=5,
            participation=_PARTICIPATION,
        )
        found = made.query(specs)
    assert type(found) is MatrixFactorizationSumQuery
    states = [found.initial_global_state(), by_hand.initial_global_state()]
    tf.nest.assert_same_structure(*states)
    for _ in range(_NUM_ROUNDS):
        results = []
        for number, query in enumerate((found, by_hand)):
            record = [tf.constant([0.5, -2.0, 0.1])]
            params = query.derive_sample_params(states[number])
            sums = query.accumulate_record(params, query.initial_sample_state(specs), record)
            result, states[number], _ = query.get_noised_result(sums, states[number])
            results.append(result[0].numpy())
        np.testing.assert_array_equal(*results)


@pytest.mark.long
def test_a_clip_norm_that_adapts_in_rounds_of_tff(tmp_path: pathlib.Path) -> None:
    """On disk, as the query in TensorFlow alone; and a round's noise is for its own data."""
    chosen: dict[str, Any] = {
        "clip_norm": mfa.AdaptiveClip(0.5, update_period=1, clipped_count_stddev=2.0),
        "noise_multiplier": 0.5,
        "seed": 11,
        "noise_storage": "disk",
        "noise_directory": tmp_path / "noise",
    }
    process = _process(_NEST, **chosen)
    assert process.next.type_signature.result.result.member == _NEST
    specs = tff.types.type_to_tf_tensor_specs(_NEST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        in_state = {**chosen, "noise_directory": None, "noise_storage": "state"}
        query = _aggregator(**in_state).query(specs)
    state, alone = process.initialize(), query.initial_global_state()
    before = state
    clients = [_value(0.1), _value(0.05), _value(3.0), _value(np.nan)]
    for _ in range(2):
        before = state
        output = process.next(state, clients)
        state = output.state
        params = query.derive_sample_params(alone)
        sums = query.initial_sample_state(specs)
        for update in clients:
            tensors = tf.nest.map_structure(tf.constant, update)
            sums = query.accumulate_record(params, sums, tensors)
        result, alone, _ = query.get_noised_result(sums, alone)
        known = tf.nest.map_structure(lambda tensor: tensor.numpy(), result)
        np.testing.assert_allclose(_flat(output.result) * 4, _flat(known), rtol=1e-2, atol=1e-6)
        for name, value in query.derive_metrics(alone).items():
            found = output.measurements["dp_query_metrics"][name]
            assert float(found) == pytest.approx(float(value))
    assert declared_participation.in_state(state) == (_PARTICIPATION,)
    with refuses("noise", error=Exception) as raised:
        process.next(before, clients[:2])
    assert "noise of this round was added to other data" in str(processes.refusal_of(raised.value))


@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
def test_a_clip_norm_that_adapts_in_secure_sums() -> None:
    """Updates and indicators are integers of a secure sum, and no other sum of clients is made."""
    clip = mfa.AdaptiveClip(0.5, update_period=1)
    process = _process(tff.TensorType(np.float32, [2]), clip_norm=clip, secure_aggregation_bits=28)
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_bad_update_moves_the_result_by_at_most_its_share(bad: float) -> None:
    process = _without_noise(_NEST)
    state = process.initialize()
    good = [_value(0.1), _value(-0.05)]
    without = _flat(process.next(state, good).result)
    spoilt = _flat(process.next(state, [*good, _value(bad)]).result)
    assert np.all(np.isfinite(spoilt))
    # bfloat16 has 8 bits of mantissa, so sums of it are that rough.
    assert np.linalg.norm(spoilt - without) <= 1.0 / 4 + 5e-3


def test_one_client_never_moves_the_average_too_far() -> None:
    """Magnitudes and orders that floats add up wrongly, in exact arithmetic.

    Without noise the released float64 numbers are whole steps over four, without rounding.
    """
    process = _process(tff.TensorType(np.float64, [3]), clip_norm=0.7)
    state = process.initialize()
    generator = np.random.default_rng(3)
    for _ in range(examples(200)):
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


_BITS = sorted({row.bits for row in secure_sum_table.rows()})
_ADAPTIVE = mfa.AdaptiveClip(0.5, update_period=1)


def _check_secure_sum(
    monkeypatch: pytest.MonkeyPatch, bits: int, clients: int, **chosen: Any
) -> None:
    """With negative sums, with several rounds of correlated noise, and with the same step."""
    chosen = {
        "noise_multiplier": 0.3,
        "seed": 5,
        "clients_per_round": clients,
        "secure_aggregation_bits": bits,
        **chosen,
    }
    secure = _process(_NEST, **chosen)
    whole = integer_sums.integer_sums
    with monkeypatch.context() as patched:
        patched.setattr(
            integer_sums,
            "integer_sums",
            lambda *args: dataclasses.replace(whole(*args), is_secure=False),
        )
        in_the_open = _process(_NEST, **chosen)
    states = [secure.initialize(), in_the_open.initialize()]
    for updates in ([_value(-0.4)] * 3, [_value(0.01), _value(-7.0)], []):
        outputs = [
            process.next(state, updates)
            for process, state in zip((secure, in_the_open), states, strict=True)
        ]
        one, other = (_flat(output.result) for output in outputs)
        np.testing.assert_array_equal(one, other)
        assert outputs[0].measurements == outputs[1].measurements
        assert outputs[0].measurements["num_clients"] == len(updates)
        states = [output.state for output in outputs]


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
    steps = integer_sums.integer_sums(bits, clients, clients).steps_per_clip_norm
    process = _process(
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


@pytest.mark.long_cases(3)
@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize(
    ("bits", "clients", "clip_norm"),
    [
        *((row.bits, row.clients, 1.0) for row in secure_sum_table.rows()),
        (31, 3, 1.0),
        (62, 3, 1.0),
        # With a sum of indicators beside it.
        *((bits, clients, _ADAPTIVE) for bits, clients in ((24, 1000), (32, 100), (62, 10**6))),
    ],
)
def test_every_secure_sum_of_the_documents_gives_what_an_open_one_gives(
    monkeypatch: pytest.MonkeyPatch, bits: int, clients: int, clip_norm: float | mfa.AdaptiveClip
) -> None:
    _check_secure_sum(monkeypatch, bits, clients, clip_norm=clip_norm)


def test_the_computation_of_a_secure_sum_has_no_other_sum_of_clients() -> None:
    secure = _process(_NEST, noise_multiplier=1.0, secure_aggregation_bits=32).next
    tff.test.assert_contains_secure_aggregation(secure)
    tff.test.assert_not_contains_unsecure_aggregation(secure)
    in_the_open = _process(_NEST, noise_multiplier=1.0).next
    with pytest.raises(AssertionError):
        tff.test.assert_not_contains_unsecure_aggregation(in_the_open)


@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
def test_a_round_of_more_clients_than_a_secure_sum_holds_is_refused() -> None:
    process = _process(tff.TensorType(np.float32, [3]), secure_aggregation_bits=32)
    state = process.initialize()
    updates = [np.ones(3, np.float32)] * 4
    process.next(state, updates)
    with refuses("4", "clients", error=processes.RefusalError):
        process.next(state, [*updates, updates[0]])


_Maker = Callable[[int], mfa.factorizations.Factorization]


def _banded(num_rounds: int) -> mfa.factorizations.Factorization:
    return mfa.factorizations.banded(mfa.workloads.prefix_sum(num_rounds), 8)


_MECHANISMS: dict[str, _Maker] = {
    "identity": mfa.factorizations.identity,
    "banded": _banded,
    "optimal": lambda n: mfa.factorizations.optimal(mfa.workloads.prefix_sum(n)),
    "tree_online": mfa.factorizations.tree_aggregation,
    "tree_full": lambda n: mfa.factorizations.tree_aggregation(n, "full"),
    "toeplitz": lambda n: mfa.factorizations.toeplitz(n, 8, equal_column_norms=True),
    "toeplitz_of_all_bands": lambda n: mfa.factorizations.toeplitz(n, equal_column_norms=True),
    "blt": lambda n: mfa.factorizations.blt(n, 3, mfa.participation.MinSeparation(8)),
    "banded_inverse": lambda n: mfa.factorizations.banded_inverse(
        n, 8, mfa.participation.MinSeparation(8)
    ),
    "structured": lambda n: mfa.factorizations.structured(mfa.factorizations.toeplitz(n), 2, 2),
}


def _saved_and_restored(state: Any, structure: Any, directory: pathlib.Path) -> Any:
    manager = tff.program.FileProgramStateManager(directory)
    asyncio.run(manager.save(state, version=1))
    return asyncio.run(manager.load(1, structure))


# One of each kind of recursion.
_KINDS = ("identity", "banded", "optimal", "tree_online", "blt", "banded_inverse")


# Several blocks of rounds, for noise on disk, in each.
@pytest.mark.long_cases(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("mechanism", "storage", "num_rounds"),
    [
        # In the state, tests of the rows have every kind, too, and so has the comparison with the
        # aggregator in NumPy.
        *((mechanism, "state", 14) for mechanism in _KINDS),
        # On disk, rows that follow from rows.
        *((mechanism, "disk", 64 if mechanism in _KINDS else 14) for mechanism in _MECHANISMS),
    ],
)
def test_the_noise_is_that_of_the_mechanism_across_a_save_and_restore(
    mechanism: str, storage: str, num_rounds: int, tmp_path: pathlib.Path
) -> None:
    """N^-1 Y / stddev is white over all rounds; a new process and worker go on in the middle.

    N is the matrix of the streamed rows, C^-1 but for trees. Each coordinate is a draw of
    n entries of Z, whose means, variances, covariances and distribution are tested. A false
    alarm once in ten million runs. A worker holds nothing of any mechanism: that another one
    goes on is tested for one of each kind, and on disk.
    """
    factorization = _MECHANISMS[mechanism](num_rounds)
    dimension, multiplier, clip_norm, cohort = 2000, 0.7, 3.0, 5

    def build() -> tff.templates.AggregationProcess:
        return _process(
            tff.TensorType(np.float32, [dimension]),
            factorization=factorization,
            noise_multiplier=multiplier,
            clip_norm=clip_norm,
            clients_per_round=cohort,
            noise_storage=storage,
            noise_directory=tmp_path / "noise",
        )

    process = build()
    state = process.initialize()
    rows = []
    for i in range(num_rounds):
        if i == num_rounds // 2 + 2:
            if num_rounds == 64:
                processes.end_workers()
            process = build()
            state = _saved_and_restored(state, process.initialize(), tmp_path / "states")
        output = process.next(state, [np.zeros(dimension, np.float32)])
        rows.append(output.result)
        state = output.state
    stddev = multiplier * clip_norm * factorization.sensitivity(_PARTICIPATION)
    streamed = factorization.noise_recursion().noising_matrix()
    whitened = np.linalg.solve(streamed, np.array(rows, np.float64)) * cohort / stddev
    check_standard_normal(whitened.T)


@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
    ("source", "is_nest"),
    [
        pytest.param("chacha20", False, marks=pytest.mark.long),
        pytest.param("chacha20", True, marks=pytest.mark.long),
        pytest.param("philox", True, marks=pytest.mark.long),
    ],
)
def test_storages_give_the_same_rows(source: str, is_nest: bool, tmp_path: pathlib.Path) -> None:
    factorization = _MECHANISMS["banded"](16)
    results = []
    for storage in ("state", "disk", "auto"):
        process = _process(
            _NEST if is_nest else tff.TensorType(np.float32, [5]),
            factorization=factorization,
            noise_multiplier=1.0,
            seed=4,
            noise_storage=storage,
            noise_source=source,
            noise_directory=tmp_path / storage,
        )
        state, rows = process.initialize(), []
        for _ in range(10):
            output = process.next(state, [_value(0.0) if is_nest else np.zeros(5, np.float32)])
            rows.append(_flat(output.result) if is_nest else output.result)
            state = output.state
        results.append(np.array(rows))
    # bfloat16 has 8 bits of mantissa.
    np.testing.assert_allclose(results[1], results[0], rtol=1e-2, atol=1e-5)
    np.testing.assert_array_equal(results[2], results[0])


def test_sources_differ_under_one_seed() -> None:
    specs = tf.TensorSpec([5], tf.float32)
    philox, chacha20 = (
        _queried(specs, noise_multiplier=1.0, seed=4, noise_source=source)[0][0]
        for source in ("philox", "chacha20")
    )
    assert not np.any(philox == chacha20)


def _noised(directory: pathlib.Path, storage: str, source: str = "chacha20") -> Any:
    return _process(
        tff.TensorType(np.float32, [3]),
        noise_multiplier=1.0,
        noise_storage=storage,
        noise_source=source,
        noise_directory=directory,
    )


@pytest.mark.parametrize("storage", ["state", pytest.param("disk", marks=pytest.mark.long)])
def test_the_noise_of_a_round_is_not_added_to_other_data(
    storage: str, tmp_path: pathlib.Path
) -> None:
    """From an older state, the same data is released again, and other data is refused."""
    process = _noised(tmp_path / "noise", storage)
    state = process.initialize()
    cohort = [np.array([0.3, 0.1, -0.2], np.float32), np.array([0.0, 0.5, 0.1], np.float32)]
    other = [np.array([0.3, 0.1, -0.2], np.float32), np.array([0.0, 0.5, 0.2], np.float32)]
    first = process.next(state, cohort)
    second = process.next(first.state, other)
    again = _noised(tmp_path / "noise", storage)
    np.testing.assert_array_equal(again.next(state, cohort).result, first.result)
    # The same updates summed in another order.
    np.testing.assert_allclose(again.next(state, cohort[::-1]).result, first.result, atol=1e-6)
    with refuses("released", error=Exception):
        again.next(state, other)
    np.testing.assert_array_equal(again.next(first.state, other).result, second.result)
    # Another run has noise of its own.
    again.next(again.initialize(), other)


@pytest.mark.long_cases(2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("storage", "source"),
    [
        ("state", "chacha20"),
        pytest.param("state", "philox", marks=pytest.mark.long),
        pytest.param("disk", "chacha20", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("size_of_cohort", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_first_round_of_nothing_is_recorded_like_any_other(
    storage: str, source: str, size_of_cohort: int, tmp_path: pathlib.Path
) -> None:
    """An empty first cohort, or updates of zeros, do not leave the noise free for a client."""
    process = _noised(tmp_path / "noise", storage, source)
    state, other = process.initialize(), process.initialize()
    nothing = [np.zeros(3, np.float32)] * size_of_cohort
    client = [np.array([0.3, 0.1, -0.2], np.float32)]
    first = process.next(state, nothing)
    again = _noised(tmp_path / "noise", storage, source)
    for each in (process, again):
        with refuses("released", error=Exception):
            each.next(state, client)
        np.testing.assert_array_equal(each.next(state, nothing).result, first.result)
    # Another start has noise of its own, and its first round may be of anything.
    released = again.next(other, client)
    assert np.all(np.isfinite(released.result))
    with refuses("released", error=Exception):
        again.next(other, nothing)
    again.next(first.state, client)


@pytest.mark.long
def test_a_start_is_no_round(tmp_path: pathlib.Path) -> None:
    """Nothing is drawn or recorded before the first round."""
    process = _noised(tmp_path / "noise", "disk")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    states = [process.initialize() for _ in range(2)]
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    for state in states:
        # What tells an initial state from others in TFF, whose event is a placeholder.
        assert state.is_init_state
        assert not process.next(state, []).state.is_init_state


def test_scaling_the_matrix_does_not_change_a_run() -> None:
    bands = recursions.bands_of_matrix(_factorization().strategy_matrix(), 3)

    def row(factorization: mfa.factorizations.Factorization, dtype: tf.DType) -> np.ndarray:
        specs = tf.TensorSpec([5], dtype)
        return _queried(specs, factorization=factorization, noise_multiplier=1.0, seed=3)[0][0]

    for dtype, scale in ((tf.float32, 1e-90), (tf.float64, 1e90)):
        unscaled, scaled = (
            row(mfa.factorizations.BandedFactorization(factor * bands), dtype)
            for factor in (1.0, scale)
        )
        np.testing.assert_allclose(scaled, unscaled, rtol=1e-5)
    dense = mfa.factorizations.DenseFactorization(1e-90 * _factorization().strategy_matrix())
    np.testing.assert_allclose(row(dense, tf.float64), unscaled, rtol=1e-5)


def test_two_starts_of_one_process_have_different_noise() -> None:
    process = _with_noise()
    first, second = (
        process.next(process.initialize(), [np.zeros(2, np.float32)]).result for _ in range(2)
    )
    assert not np.any(first == second)


def test_a_round_past_the_last_one_fails_and_says_why() -> None:
    process = _with_noise()
    state = process.initialize()
    for _ in range(_NUM_ROUNDS):
        state = process.next(state, [np.zeros(2, np.float32)]).state
    with pytest.raises(processes.RefusalError) as raised:
        process.next(state, [np.zeros(2, np.float32)])
    assert str(raised.value) == (
        "The factorization has noise for 6 rounds, and one more round was asked for: its noise row "
        "would repeat an earlier one. Stop training, or use a factorization for more rounds."
    )


def test_measurements_say_how_many_clients_there_were_and_should_be() -> None:
    process = _process(tff.TensorType(np.float32, [2]), clients_per_round=3.0)
    for num_clients in (0, 1, 3, 5):
        output = process.next(process.initialize(), [np.ones(2, np.float32)] * num_clients)
        assert output.measurements["num_clients"] == num_clients
        assert output.measurements["clients_per_round"] == 3.0


def test_measurements_count_rounds_and_reveal_no_seed() -> None:
    process = _with_noise()
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
    for factory in (_aggregator(), IntegerSumFactory()):
        with refuses("containers", error=TypeError) as raised:
            factory.create(value_type)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_])
def test_other_types_than_floats_are_refused(dtype: Any) -> None:
    with refuses("floating-point", error=TypeError):
        _process(tff.TensorType(dtype, [2]))


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"noise_multiplier": -1.0}, ValueError, ["noise_multiplier"]),
        ({"noise_multiplier": float("nan")}, ValueError, ["noise_multiplier"]),
        ({"allow_no_noise": False}, ValueError, ["noise_multiplier", "allow_no_noise"]),
        ({"allow_no_noise": "no"}, ValueError, ["noise_multiplier", "allow_no_noise"]),
        ({"noise_multiplier": "1"}, ValueError, ["noise_multiplier", "'1'"]),
        ({"noise_multiplier": True}, ValueError, ["noise_multiplier", "True"]),
        ({"clip_norm": "1"}, ValueError, ["clip_norm", "'1'"]),
        ({"clients_per_round": "4"}, ValueError, ["clients_per_round", "'4'"]),
        ({"largest_cohort": "4"}, ValueError, ["largest_cohort", "'4'"]),
        ({"secure_aggregation_bits": "32"}, ValueError, ["secure_aggregation_bits"]),
        ({"clip_norm": 0.0}, ValueError, ["clip_norm"]),
        ({"clients_per_round": 0}, ValueError, ["clients_per_round"]),
        ({"participation": "min_sep"}, TypeError, ["participation"]),
        ({"factorization": 7}, TypeError, ["Mechanism"]),
        ({"noise_storage": "tape"}, ValueError, ["'auto'", "'state'", "'disk'"]),
        ({"noise_source": "dice"}, ValueError, ["'chacha20'", "'philox'"]),
        ({"factorization": "nowhere"}, mfa.checkpoints.CheckpointError, ["nowhere"]),
    ],
)
def test_bad_arguments_are_refused(
    changes: dict[str, Any], error: type[Exception], names: list[str]
) -> None:
    with refuses(*names, error=error):
        _aggregator(**changes)


def test_a_checkpoint_directory_serves_as_the_factorization(tmp_path: pathlib.Path) -> None:
    mfa.checkpoints.save(_factorization(), tmp_path / "c")
    specs = tf.TensorSpec([5], tf.float32)
    first, second, itself = (
        _queried(specs, _NUM_ROUNDS, factorization=each, noise_multiplier=1.0, seed=1)
        for each in (tmp_path / "c", str(tmp_path / "c"), _factorization())
    )
    np.testing.assert_array_equal(first, itself)
    np.testing.assert_array_equal(second, itself)


def _model_fn() -> tff.learning.models.VariableModel:
    inputs = tf.keras.Input((2,))
    outputs = tf.keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
    return tff.learning.models.from_keras_model(
        tf.keras.Model(inputs, outputs),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=(tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))),
    )


def _data(size: int) -> tf.data.Dataset:
    x = np.linspace(-1, 1, 2 * size, dtype=np.float32).reshape(size, 2)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] + 1)).batch(4)


@pytest.fixture(scope="module")
def plain_mean() -> list[np.ndarray]:
    """The model after a round of federated averaging without the aggregator."""
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        _model_fn, tff.learning.optimizers.build_sgdm(0.1)
    )
    state = process.next(process.initialize(), [_data(4), _data(12)]).state
    return list(process.get_model_weights(state).trainable)


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("builder", ["unweighted", "weighted"])
def test_federated_averaging_takes_it(builder: str, plain_mean: list[np.ndarray]) -> None:
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    aggregator = _aggregator(clip_norm=100.0, clients_per_round=2)
    if builder == "unweighted":
        process = tff.learning.algorithms.build_unweighted_fed_avg(
            _model_fn, optimizer, model_aggregator=aggregator
        )
    else:
        process = tff.learning.algorithms.build_weighted_fed_avg(
            _model_fn,
            optimizer,
            client_weighting=tff.learning.ClientWeighting.UNIFORM,
            model_aggregator=tff.aggregators.as_weighted_aggregator(aggregator),
        )
    ours = process.next(process.initialize(), [_data(4), _data(12)])
    # Without noise and with a clip norm that nobody reaches, it is the plain mean.
    weights = process.get_model_weights(ours.state).trainable
    for our, their in zip(weights, plain_mean, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5)


@pytest.mark.long
def test_a_learning_process_that_runs_out_of_rounds_raises_a_readable_error() -> None:
    """By itself, though TFF has built it: one line, and no traceback of TFF's executors."""
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        _model_fn,
        tff.learning.optimizers.build_sgdm(0.1),
        model_aggregator=_aggregator(factorization=mfa.factorizations.identity(1)),
    )
    state = process.next(process.initialize(), [_data(4)]).state
    with refuses("factorization", error=processes.RefusalError) as raised:
        process.next(state, [_data(4)])
    printed = "".join(traceback.format_exception(raised.value))
    assert len(printed.splitlines()) <= 12
    assert "grpc" not in printed


@pytest.mark.long
def test_it_nests_in_other_factories() -> None:
    nested = tff.aggregators.zeroing_factory(10.0, _aggregator())
    assert isinstance(nested, tff.aggregators.UnweightedAggregationFactory)
    process = nested.create(tff.TensorType(np.float32, [2]))
    clients = [np.array([0.4, 0.0], np.float32), np.array([11.0, 0.0], np.float32)]
    output = process.next(process.initialize(), clients)
    np.testing.assert_allclose(output.result, [0.1, 0.0], rtol=1e-6)
