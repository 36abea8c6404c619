"""Noise rows in TensorFlow: equal to the NumPy recursion, and truly random."""

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators import noise_recursions, tensor_noise, workloads
from mf_aggregators.factorizations import (
    Factorization,
    TreeAggregationFactorization,
    banded,
    banded_inverse,
    blt,
    identity,
    optimal,
    structured,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.noise_recursions import (
    NoiseRecursion,
    StateSpaceNoise,
    ToeplitzNoise,
    WindowNoise,
)
from tests.mf_aggregators.statistics_of_noise import check_standard_normal

_NUM_ROUNDS = 9
_SPECS = (
    tf.TensorSpec((2, 3), tf.float32),
    tf.TensorSpec((), tf.float64),
    tf.TensorSpec((0,), tf.float32),
    tf.TensorSpec((4,), tf.bfloat16),
)


def _factorizations() -> list[Factorization]:
    workload = workloads.prefix_sum(_NUM_ROUNDS)
    return [
        identity(_NUM_ROUNDS),
        banded(workload, 1),
        banded(workload, 2),
        banded(workload, 4),
        banded(workload, _NUM_ROUNDS),
        optimal(workload),
        tree_aggregation(_NUM_ROUNDS),
        tree_aggregation(_NUM_ROUNDS, "full"),
        toeplitz(_NUM_ROUNDS, 3),
        toeplitz(_NUM_ROUNDS, 3, equal_column_norms=True),
        toeplitz(_NUM_ROUNDS, equal_column_norms=True),
        blt(_NUM_ROUNDS, 2),
        banded_inverse(_NUM_ROUNDS, 4),
        structured(optimal(workload), 2, 2),
        structured(optimal(workload), _NUM_ROUNDS, 0),
    ]


def _rows(recursion: NoiseRecursion, seed: np.ndarray) -> list[list[np.ndarray]]:
    state = tensor_noise.initial_state(recursion, _SPECS, tf.constant(seed))
    step = tf.function(lambda state: tensor_noise.next_row(recursion, state, _SPECS))
    rows = []
    for _ in range(recursion.num_rounds):
        row, state = step(state)
        rows.append([tensor.numpy() for tensor in row])
    return rows


@pytest.mark.parametrize("factorization", _factorizations(), ids=str)
def test_rows_are_those_of_the_dense_product(factorization: Factorization) -> None:
    seed = np.array([2**62 + 12345, -(2**61) - 999], dtype=np.int64)
    z = _rows(identity(_NUM_ROUNDS).noise_recursion(), seed)
    rows = _rows(factorization.noise_recursion(), seed)
    if isinstance(factorization, TreeAggregationFactorization):
        # Its stream draws one row of Z a round: a square matrix of its own.
        inverse = factorization.noise_rows(np.eye(_NUM_ROUNDS))
    else:
        inverse = np.linalg.inv(factorization.strategy_matrix())
    for position, spec in enumerate(_SPECS):
        of_z = np.array([row[position] for row in z])
        of_noise = np.array([row[position] for row in rows])
        assert of_noise.dtype == (np.float64 if spec.dtype == tf.float64 else np.float32)
        expected = np.tensordot(inverse, of_z, axes=1)
        np.testing.assert_allclose(of_noise, expected, rtol=1e-5, atol=1e-5)
        state_rows = noise_recursions.apply(factorization.noise_recursion(), of_z)
        np.testing.assert_allclose(of_noise, state_rows, rtol=1e-5, atol=1e-5)


def test_rows_of_z_are_independent_standard_normals() -> None:
    """Across seeds from the operating system; false alarm once in ten million runs."""
    samples = []
    for _ in range(400):
        rows = _rows_of_z(tensor_noise.seed_from_bytes(os.urandom(16)))
        samples.append(np.concatenate([np.ravel(tensor) for row in rows for tensor in row]))
    check_standard_normal(np.array(samples))


@tf.function
def _three_rows(seed: tf.Tensor) -> list[list[tf.Tensor]]:
    return [
        tensor_noise._row_of_z(seed, tf.constant(row, tf.int64), _SPECS[:2]) for row in range(3)
    ]


def _rows_of_z(seed: np.ndarray) -> list[list[np.ndarray]]:
    return [[tensor.numpy() for tensor in row] for row in _three_rows(tf.constant(seed))]


def test_a_coordinate_is_a_function_of_seed_row_and_coordinate_alone() -> None:
    seed = tf.constant(tensor_noise.seed_from_bytes(bytes(range(16))))
    row = tf.constant(5, tf.int64)
    short = tensor_noise._row_of_z(seed, row, [tf.TensorSpec((7,), tf.float32)])[0].numpy()
    long = tensor_noise._row_of_z(seed, row, [tf.TensorSpec((70,), tf.float32)])[0].numpy()
    np.testing.assert_array_equal(long[:4], short[:4])
    again = tensor_noise._row_of_z(seed, row, [tf.TensorSpec((70,), tf.float32)])[0].numpy()
    np.testing.assert_array_equal(long, again)


def test_tails_reach_beyond_those_of_single_precision_samplers() -> None:
    """Samplers that replace uniforms below 1e-7 never exceed 5.68 standard deviations.

    Among 5e7 pairs five such radii are expected; the seed is fixed.
    """
    key = tf.constant([12345], tf.uint64)
    draw = tf.function(lambda counter: tensor_noise._standard_normal(key, counter, 5_000_000))
    largest = 0.0
    for stream in range(20):
        samples = draw(tf.constant([0, stream], tf.uint64)).numpy()
        largest = max(largest, float(np.max(np.hypot(samples[0::2], samples[1::2]))))
    assert largest > np.sqrt(-2 * np.log(1e-7))


def test_no_entry_of_z_occurs_twice() -> None:
    """Over rows, tensors and coordinates: 2^53 radii make a chance repeat unlikely."""
    spec = [tf.TensorSpec((1000,), tf.float64), tf.TensorSpec((1000,), tf.float64)]
    seed = tf.constant(tensor_noise.seed_from_bytes(os.urandom(16)))
    entries = np.concatenate(
        [
            tensor.numpy()
            for row in range(20)
            for tensor in tensor_noise._row_of_z(seed, tf.constant(row, tf.int64), spec)
        ]
    )
    assert len(np.unique(entries)) == len(entries)


@pytest.mark.parametrize("factorization", _factorizations(), ids=str)
def test_rows_past_the_last_round_fail(factorization: Factorization) -> None:
    recursion = factorization.noise_recursion()
    seed = tf.constant(tensor_noise.seed_from_bytes(bytes(16)))
    state = tensor_noise.initial_state(recursion, _SPECS, seed)
    state = state._replace(round_index=tf.constant(_NUM_ROUNDS, tf.int64))
    step = tf.function(lambda state: tensor_noise.next_row(recursion, state, _SPECS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="noise for 9 rounds"):
        step(state)


def test_the_state_of_banded_noise_is_counted_in_bytes() -> None:
    recursion = banded(workloads.prefix_sum(_NUM_ROUNDS), 4).noise_recursion()
    # Three earlier rows of six float32, one float64 and four float32 for bfloat16.
    assert tensor_noise.state_bytes(recursion, _SPECS) == 3 * (6 * 4 + 8 + 4 * 4)
    state = tensor_noise.initial_state(recursion, _SPECS, tf.zeros([2], tf.int64))
    sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in state.history]
    assert sum(sizes) == tensor_noise.state_bytes(recursion, _SPECS)


def _recursions() -> list[NoiseRecursion]:
    """Weights of every kind at random: phases, sources, feedback, windows longer than the run."""
    generator = np.random.default_rng(6)
    n, phases, states = _NUM_ROUNDS, 3, 4
    left, right = generator.normal(size=(2, n, 2))
    none = np.empty((n, 0))
    scales = generator.uniform(0.5, 2.0, n)
    outputs, decays, inputs, feedbacks = generator.normal(size=(4, phases, states)) / 2.0
    return [
        WindowNoise(n, generator.normal(size=(n, 3)), left, right, scales),
        WindowNoise(n, generator.normal(size=(1, 3)), left, right),
        WindowNoise(n, generator.normal(size=(n, 1)), left, right),
        WindowNoise(n, generator.normal(size=(1, n)), none, none, scales),
        WindowNoise(n, generator.normal(size=(n, n + 2)), left, right),
        ToeplitzNoise(n, np.array([2.0])),
        ToeplitzNoise(n, np.array([2.0, -0.5, 0.25]), scales),
        StateSpaceNoise(
            phases=generator.integers(0, phases, n),
            gains=generator.normal(size=phases),
            outputs=outputs,
            sources=generator.integers(0, states, (phases, states)),
            decays=decays,
            inputs=inputs,
            feedbacks=feedbacks,
        ),
    ]


@pytest.mark.parametrize("index", range(len(_recursions())))
def test_random_weights_give_the_rows_that_numpy_gives(index: int) -> None:
    """NumPy's rows are held against the definitions in their own test; Z is the same here."""
    recursion = _recursions()[index]
    seed = np.array([-(2**60) - 7, 2**63 - 5], dtype=np.int64)
    z = _rows(identity(_NUM_ROUNDS).noise_recursion(), seed)
    for scaled in (recursion, noise_recursions.scaled_to_sensitivity_one(recursion, 1.75)):
        rows = _rows(scaled, seed)
        for position, spec in enumerate(_SPECS):
            of_z = np.array([row[position] for row in z])
            of_noise = np.array([row[position] for row in rows])
            expected = noise_recursions.apply(scaled, of_z.astype(np.float64))
            tolerance = 1e-12 if spec.dtype == tf.float64 else 2e-5
            np.testing.assert_allclose(of_noise, expected, rtol=tolerance, atol=tolerance)
        state = tensor_noise.initial_state(scaled, _SPECS, tf.constant(seed))
        sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in state.history]
        assert sum(sizes) == tensor_noise.state_bytes(scaled, _SPECS)


@pytest.mark.parametrize(
    "factorization",
    [
        blt(2000, 2),
        tree_aggregation(2000),
        toeplitz(2000, 4, coefficients="square_root"),
    ],
    ids=str,
)
def test_thousands_of_rounds_in_single_precision(factorization: Factorization) -> None:
    spec = [tf.TensorSpec((3,), tf.float32)]
    recursion = factorization.noise_recursion()
    seed = tf.constant(tensor_noise.seed_from_bytes(bytes(range(16))))

    @tf.function
    def run() -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.TensorArray(tf.float32, factorization.num_rounds)
        z = tf.TensorArray(tf.float32, factorization.num_rounds)
        state = tensor_noise.initial_state(recursion, spec, seed)
        for i in tf.range(factorization.num_rounds, dtype=tf.int64):
            (row,), state = tensor_noise.next_row(recursion, state, spec)
            position = tf.cast(i, tf.int32)
            rows = rows.write(position, row)
            z = z.write(position, tensor_noise._row_of_z(seed, i, spec)[0])
        return rows.stack(), z.stack()

    rows, z = (tensor.numpy() for tensor in run())
    exact = noise_recursions.apply(recursion, z.astype(np.float64))
    assert np.max(np.abs(rows - exact)) < 2e-6 * np.max(np.abs(exact))
