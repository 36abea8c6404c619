"""Clients' data sets, evaluations of one model; zeroing, clipping, noise and measurements."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
import tensorflow_federated as tff
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.tff import processes
from simulations.runs.run_plan import SCHEDULES
from simulations.training import training_parts
from simulations.training.training_parts import client_datasets, keras_evaluation
from tests.mf_aggregators import brute_force

_NUM_ROUNDS = 6
_PARTICIPATION = mfa.participation.MinSeparation(3)
_VECTOR = tff.TensorType(np.float32, [3])


def _numbered(**sizes: int) -> tff.simulation.datasets.ClientData:
    """Clients whose examples are numbers: of the client with the second size, 1000 on."""
    return tff.simulation.datasets.TestClientData(
        {
            name: list(range(1000 * place, 1000 * place + size))
            for place, (name, size) in enumerate(sizes.items())
        }
    )


def _batches(dataset: tf.data.Dataset) -> list[list[int]]:
    return [[int(number) for number in batch] for batch in dataset.as_numpy_iterator()]


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    epochs=st.integers(1, 3),
    max_examples=st.none() | st.integers(1, 14),
    seed=st.integers(0, 2**64),
    round_index=st.integers(0, 10**6),
)
def test_every_epoch_is_the_same_sample_in_batches(
    size: int,
    batch_size: int,
    epochs: int,
    max_examples: int | None,
    seed: int,
    round_index: int,
) -> None:
    make = client_datasets(_numbered(a=size, b=3), batch_size, epochs, max_examples, seed)
    batches = _batches(make("a", round_index))
    length = size if max_examples is None else min(size, max_examples)
    per_epoch = -(-length // batch_size)
    assert len(batches) == epochs * per_epoch
    first = batches[:per_epoch]
    assert batches == first * epochs
    assert [len(batch) for batch in first[:-1]] == [batch_size] * (per_epoch - 1)
    sample = [number for batch in first for number in batch]
    assert len(set(sample)) == len(sample) == length
    assert set(sample) <= set(range(size))


def test_the_sample_depends_on_seed_round_and_client_alone() -> None:
    data = _numbered(a=50, b=50)
    expected = _batches(client_datasets(data, 7, 1, 20, 3)("b", 5))
    # Neither other calls, nor other clients, nor the generators of TensorFlow and NumPy matter.
    tf.keras.utils.set_random_seed(11)
    make = client_datasets(
        tff.simulation.datasets.TestClientData({"b": list(range(1000, 1050))}), 7, 1, 20, 3
    )
    make("b", 4)
    dataset = make("b", 5)
    assert _batches(dataset) == expected
    assert _batches(dataset) == expected
    assert _batches(client_datasets(data, 7, 1, 20, 4)("b", 5)) != expected
    assert _batches(make("b", 6)) != expected
    of_a = _batches(client_datasets(data, 7, 1, 20, 3)("a", 5))
    assert [[number + 1000 for number in batch] for batch in of_a] != expected


def _dense() -> tf.keras.Model:
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))


def _convolutional() -> tf.keras.Model:
    """The same function of the same weights."""
    inputs = tf.keras.Input((3,))
    outputs = tf.keras.layers.Conv1D(1, 3)(tf.keras.layers.Reshape((3, 1))(inputs))
    return tf.keras.Model(inputs, tf.keras.layers.Flatten()(outputs))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("model", [_dense, _convolutional])
def test_each_evaluation_is_of_its_own_weights_and_examples(
    model: Callable[[], tf.keras.Model],
) -> None:
    made = []

    def compiled() -> tf.keras.Model:
        made.append(model())
        made[-1].compile(loss="mse", metrics=["mae"])
        return made[-1]

    def learning_model() -> tff.learning.models.VariableModel:
        return tff.learning.models.from_keras_model(
            model(),
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
        )

    evaluate, shape = keras_evaluation(compiled), model().weights[0].shape
    generator = np.random.default_rng(0)
    for number in range(4):
        if number == 2:
            tff.learning.algorithms.build_unweighted_fed_avg(
                learning_model,
                client_optimizer_fn=tff.learning.optimizers.build_sgdm(learning_rate=0.1),
            )
        kernel, bias = generator.normal(size=(3, 1)), generator.normal(size=1)
        inputs = generator.normal(size=(50 + number, 3))
        targets = generator.normal(size=(50 + number, 1))
        errors = inputs @ kernel + bias - targets
        found = evaluate([kernel.reshape(shape), bias], inputs, targets, batch_size=16)
        assert found.keys() == {"loss", "mae"}
        np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
        np.testing.assert_allclose(found["mae"], np.mean(np.abs(errors)), rtol=1e-5)
    # An evaluation is traced once: only the first model was ever evaluated.
    assert [each.test_function is not None for each in made] == [True] + [False] * (len(made) - 1)


def _aggregator(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "factorization": mfa.factorizations.banded(_NUM_ROUNDS, 3),
        "participation": _PARTICIPATION,
        "noise_multiplier": 0.0,
        "allow_no_noise": True,
        "clip_norm": 1.0,
        "clients_per_round": 4,
        **changes,
    }
    return training_parts.aggregator(arguments.pop("factorization"), **arguments)


def _process(value_type: Any = _VECTOR, **changes: Any) -> tff.templates.AggregationProcess:
    return _aggregator(**changes).create(value_type)


@functools.cache
def _usual_process() -> tff.templates.AggregationProcess:
    """One for several tests: it takes seconds to make."""
    return _process()


def _update(*entries: float) -> np.ndarray:
    return np.array(entries, np.float32)


_UPDATES = [
    _update(0.3, 0.0, 0.4),  # of norm 0.5: passes
    _update(0.0, -1.2, 1.6),  # of norm 2: clipped
    _update(30.0, 40.0, 0.0),  # of norm 50: zeroed, or clipped
    _update(0.6, 0.0, 0.8),  # of norm 1, rounded
    _update(0.1, np.nan, 0.1),
    _update(0.1, -np.inf, 0.1),
]


@pytest.mark.long
@pytest.mark.parametrize("zeroing_norm", [pytest.param(None, marks=pytest.mark.long), 10.0])
def test_the_state_tells_the_schema_of_the_noise(zeroing_norm: float | None) -> None:
    """Wherever the aggregator stands among others, at first and after a round."""
    weighted = tff.aggregators.as_weighted_aggregator(_aggregator(zeroing_norm=zeroing_norm))
    for process, arguments in (
        (_process(zeroing_norm=zeroing_norm), (_UPDATES,)),
        (weighted.create(_VECTOR, tff.TensorType(np.float32)), (_UPDATES, [1.0] * 6)),
    ):
        first = process.initialize()
        for state in (first, process.next(first, *arguments).state):
            assert processes.participations_in(state) == (_PARTICIPATION,)


def test_measurements_of_a_round_with_zeroing() -> None:
    process = _process(zeroing_norm=10.0, clip_norm=1.01)
    output = process.next(process.initialize(), _UPDATES)
    found = output.measurements
    assert found["num_updates"] == 6
    assert found["non_finite_updates"] == 2
    assert found["update_norm"] == pytest.approx((0.5 + 2.0 + 50.0 + 1.0) / 4, rel=1e-6)
    assert found["max_update_norm"] == pytest.approx(50.0, rel=1e-6)
    assert found["zeroed_fraction"] == pytest.approx(1 / 6)
    assert found["clipped_fraction"] == pytest.approx(1 / 6)
    kept = _UPDATES[0] + _UPDATES[1] * 1.01 / 2.0 + _UPDATES[3]
    np.testing.assert_allclose(output.result, kept / 4, rtol=1e-5, atol=1e-7)
    assert found["released_norm"] == pytest.approx(np.linalg.norm(kept) / 4, rel=1e-5)
    # What the inner processes measure is kept.
    assert found["zeroing"]["dp_query_metrics"]["rounds_released"] == 1
    assert found["zeroing_norm"] == pytest.approx(10.0)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("zeroing_norm", [pytest.param(None, marks=pytest.mark.long), 10.0])
def test_a_clip_norm_that_adapts_is_released_and_not_measured(zeroing_norm: float | None) -> None:
    clip = mfa.AdaptiveClip(1.01, update_period=1)
    process = _process(zeroing_norm=zeroing_norm, clip_norm=clip)
    output = process.next(process.initialize(), _UPDATES)
    assert "clipped_fraction" not in output.measurements
    found = training_parts.released_clip(output.measurements)
    # Of norms 0.5, 1, 2 and 50, NaN and infinity. What is zeroed, infinity as well, is within.
    within, above = (4, 1) if zeroing_norm else (2, 2)
    fraction = 0.5 + (within - above) / 2 / 4
    assert found["clip_norm"] == pytest.approx(1.01)
    assert found["unclipped_fraction"] == pytest.approx(fraction)
    assert found["next_clip_norm"] == pytest.approx(1.01 * np.exp(0.5 - fraction))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("bad", "position", "zeroing_norm"),
    [
        (np.nan, 2, 5.0),
        (np.inf, 2, 5.0),
        pytest.param(np.nan, 0, None, marks=pytest.mark.long),
        pytest.param(np.inf, 2, None, marks=pytest.mark.long),
        pytest.param(-np.inf, 0, None, marks=pytest.mark.long),
    ],
)
def test_a_broken_update_breaks_no_measurement(
    bad: float, position: int, zeroing_norm: float | None
) -> None:
    process = _process(zeroing_norm=zeroing_norm)
    broken = _update(3.0, 3.0, 3.0)
    broken[position] = bad
    output = process.next(process.initialize(), [_update(0.6, 0.8, 0.0), broken])
    assert np.all(np.isfinite(output.result))
    assert output.measurements["non_finite_updates"] == 1
    assert output.measurements["update_norm"] == pytest.approx(1.0, rel=1e-6)
    assert output.measurements["max_update_norm"] == pytest.approx(1.0, rel=1e-6)
    assert output.measurements["zeroed_fraction"] == 0.0


def test_without_finite_updates_norms_are_zero() -> None:
    process = _usual_process()
    state = process.initialize()
    for updates in ([], [_update(np.nan, 0.0, 0.0)]):
        found = process.next(state, updates).measurements
        assert found["num_updates"] == len(updates)
        assert found["update_norm"] == 0.0
        assert found["max_update_norm"] == 0.0
        assert found["clipped_fraction"] == 0.0
        assert found["released_norm"] == 0.0


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("zeroing_norm", [None, pytest.param(0.5, marks=pytest.mark.long), 20.0])
def test_one_client_moves_the_sum_by_at_most_the_clip_norm(zeroing_norm: float | None) -> None:
    # The same noise in all calls, from one seed: what differs is the client.
    clip_norm, divisor = 1.5, 4
    process = _process(
        zeroing_norm=zeroing_norm,
        clip_norm=clip_norm,
        clients_per_round=divisor,
        noise_multiplier=1.0,
        seed=3,
    )
    others = [_update(0.3, -0.1, 0.2), _update(4.0, 0.4, 0.1)]
    without = np.array(process.next(process.initialize(), others).result, np.float64)
    generator = np.random.default_rng(5)
    furthest = 0.0
    for magnitude in [1e-3, 0.4, 0.6, 1.0, 5.0, 19.0, 21.0, 1e4, 1e38]:
        direction = generator.normal(size=3)
        direction *= magnitude / np.max(np.abs(direction))
        output = process.next(process.initialize(), [*others, direction.astype(np.float32)])
        change = divisor * float(np.linalg.norm(np.array(output.result, np.float64) - without))
        assert change <= clip_norm * (1 + 1e-5)
        furthest = max(furthest, change)
    # The bound is reached unless what is kept is smaller than the clip norm.
    if zeroing_norm != 0.5:
        assert furthest == pytest.approx(clip_norm, rel=1e-4)


@pytest.mark.long
def test_the_aggregators_noise_has_the_expected_norm() -> None:
    # For d independent normal numbers, |noise|^2 / variance is chi-squared of d degrees of
    # freedom: 2 x 6 tests, each false with probability 1e-8.
    num_parameters = 4000
    arguments: dict[str, Any] = {
        "participation": _PARTICIPATION,
        "noise_multiplier": 0.7,
        "clip_norm": 3.0,
        "clients_per_round": 5,
    }
    factorization = mfa.factorizations.banded(mfa.workloads.prefix_sum(_NUM_ROUNDS), 3)
    expected = training_parts.expected_noise_norm(
        factorization, num_parameters=num_parameters, **arguments
    )
    # The check can tell: rounds differ by more than its width.
    assert np.max(expected) > 1.2 * np.min(expected)
    low, high = scipy.stats.chi2.ppf([1e-8, 1 - 1e-8], num_parameters)
    process = _process(tff.TensorType(np.float32, [num_parameters]), **arguments)
    state = process.initialize()
    for index in range(_NUM_ROUNDS):
        output = process.next(state, [np.zeros(num_parameters, np.float32)])
        state = output.state
        found = float(output.measurements["released_norm"])
        assert found == pytest.approx(np.linalg.norm(output.result), rel=1e-5)
        assert low < num_parameters * (found / expected[index]) ** 2 < high


def test_the_rate_of_a_round_is_gathered_in_a_graph_and_ends_with_the_last() -> None:
    rate = tf.function(training_parts.rate_of_round([0.5, 0.25, 0.125]), autograph=False)
    found = [float(rate(tf.constant(i))) for i in range(5)]
    assert found == [0.5, 0.25, 0.125, 0.125, 0.125]


def _models_of_tff(gradients: np.ndarray, momentum: float, rates: np.ndarray) -> np.ndarray:
    """The model after every round of TFF's momentum SGD, started at zero."""
    optimizer = tff.learning.optimizers.schedule_learning_rate(
        # The rate that is given here must not matter.
        tff.learning.optimizers.build_sgdm(123.0, momentum),
        training_parts.rate_of_round(rates),
    )
    weights = tf.zeros(gradients.shape[1:], tf.float32)
    state = optimizer.initialize(tf.TensorSpec(weights.shape, tf.float32))
    models = []
    for gradient in gradients:
        state, weights = optimizer.next(state, weights, tf.constant(gradient, tf.float32))
        models.append(weights.numpy())
    return np.array(models, np.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.95])
@pytest.mark.parametrize("name", SCHEDULES)
def test_tffs_momentum_sgd_is_algorithm_2_under_every_schedule(name: str, momentum: float) -> None:
    num_rounds = 40
    gradients = np.random.default_rng(3).normal(size=(num_rounds, 3))
    rates = SCHEDULES[name].rates(num_rounds, 0.7)
    found = _models_of_tff(gradients, momentum, rates)
    expected = brute_force.models_of_algorithm_2(gradients, momentum, rates)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_bands", [1, 4, 24])
def test_noisy_training_is_the_momentum_workload(num_bands: int) -> None:
    # What the optimizer makes of noisy gradients G + C^-1 Z is -(M G + B Z), B = M C^-1, for
    # any C: a C that is optimised for M needs no other run.
    num_rounds, momentum = 24, 0.9
    generator = np.random.default_rng(num_bands)
    rates = SCHEDULES["warmup_cooldown"].rates(num_rounds, 0.7)
    workload = mfa.workloads.momentum_sgd(num_rounds, momentum, rates)
    factorization = mfa.factorizations.banded(workload, num_bands)
    gradients = generator.normal(size=(num_rounds, 3))
    z = 2.0 * generator.normal(size=(num_rounds, 3))
    found = _models_of_tff(gradients + factorization.noise_rows(z), momentum, rates)
    expected = -(workload @ gradients + factorization.decoder_matrix(workload) @ z)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
