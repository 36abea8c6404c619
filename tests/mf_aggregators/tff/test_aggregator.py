"""The aggregator in TensorFlow Federated's own execution."""

import collections
import os
import pathlib
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.noise import FixedSeedWarning
from mf_aggregators.tff import noise_states, processes
from tests.examples import examples
from tests.mf_aggregators.tff.small_aggregators import (
    BFLOAT16,
    NEST,
    NUM_ROUNDS,
    PARTICIPATION,
    flat,
    leaves,
    make_aggregator,
    make_process,
    nest_of,
    process_with_noise,
    process_without_noise,
    query_rounds,
    small_matrix,
    sum_of,
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
    process = make_process(NEST, **chosen)
    assert process.next.type_signature.result.result.member == NEST
    specs = tff.types.type_to_tf_tensor_specs(NEST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        in_state = {**chosen, "noise_directory": None, "noise_storage": "state"}
        query = make_aggregator(**in_state).query(specs)
    state, alone = process.initialize(), query.initial_global_state()
    before = state
    clients = [nest_of(0.1), nest_of(0.05), nest_of(3.0), nest_of(np.nan)]
    for _ in range(2):
        before = state
        output = process.next(state, clients)
        state = output.state
        updates = [tf.nest.map_structure(tf.constant, update) for update in clients]
        sums = sum_of(query, query.derive_sample_params(alone), updates)
        result, alone, _ = query.get_noised_result(sums, alone)
        known = tf.nest.map_structure(lambda tensor: tensor.numpy(), result)
        np.testing.assert_allclose(flat(output.result) * 4, flat(known), rtol=1e-2, atol=1e-6)
        for name, value in query.derive_metrics(alone).items():
            found = output.measurements["dp_query_metrics"][name]
            assert float(found) == pytest.approx(float(value))
    assert noise_states.participations_in(state) == (PARTICIPATION,)
    with refuses("noise", error=Exception) as raised:
        process.next(before, clients[:2])
    assert "noise of this round was added to other data" in str(processes.refusal_of(raised.value))


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


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("builder", ["unweighted", "weighted"])
def test_federated_averaging_takes_it(builder: str, plain_mean: list[np.ndarray]) -> None:
    optimizer = tff.learning.optimizers.build_sgdm(0.1)
    aggregator = make_aggregator(clip_norm=100.0, clients_per_round=2)
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
def test_it_nests_in_other_factories() -> None:
    nested = tff.aggregators.zeroing_factory(10.0, make_aggregator())
    assert isinstance(nested, tff.aggregators.UnweightedAggregationFactory)
    process = nested.create(tff.TensorType(np.float32, [2]))
    clients = [np.array([0.4, 0.0], np.float32), np.array([11.0, 0.0], np.float32)]
    output = process.next(process.initialize(), clients)
    np.testing.assert_allclose(output.result, [0.1, 0.0], rtol=1e-6)


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
