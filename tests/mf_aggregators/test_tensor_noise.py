"""Noise rows in TensorFlow: equal to the NumPy recursion, and truly random."""

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators import noise_recursions, tensor_noise, workloads
from mf_aggregators.factorizations import Factorization, banded, identity, optimal
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
    ]


def _rows(recursion: noise_recursions.NoiseRecursion, seed: np.ndarray) -> list[list[np.ndarray]]:
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
