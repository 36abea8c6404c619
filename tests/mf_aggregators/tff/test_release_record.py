"""The record of what a round's noise was added to."""

import os
import pathlib

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.noise.rows_of_z import TILE
from mf_aggregators.tff import noise_files
from mf_aggregators.tff.noise_files import ReleaseRecord
from tests.refusals import refuses

_CLIP_NORM = 0.5


def _check(
    directory: pathlib.Path,
    i: int,
    *sums: np.ndarray,
    stream: tuple[int, int] = (1, -2),
    step: float = 1e-9,
) -> None:
    checked = ReleaseRecord.in_directory(directory).check(
        tf.constant(stream, tf.int64),
        tf.constant(i, tf.int64),
        [tf.constant(tensor) for tensor in sums],
        unit=tf.constant(1.0, tf.float64),
        clip_norm=_CLIP_NORM,
        step=tf.constant(step, tf.float64),
    )
    for tensor, given_sum in zip(checked, sums, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), given_sum)


def _updates(count: int) -> np.ndarray:
    """Updates of clients at the clip norm, over 1003 parameters."""
    updates = np.random.default_rng(3).normal(size=(count, 1003)).astype(np.float32)
    return updates * _CLIP_NORM / np.linalg.norm(updates, axis=1, keepdims=True)


def _split(total: np.ndarray) -> tuple[np.ndarray, ...]:
    return total[:600].reshape(20, 30), total[600:1002].astype(np.float64), total[1002]


def test_the_same_updates_in_any_order_pass(tmp_path: pathlib.Path) -> None:
    updates = _updates(500)
    for order in (slice(None), slice(None, None, -1)):
        total = np.zeros(1003, np.float32)
        for update in updates[order]:
            total += update
        _check(tmp_path, 3, *_split(total))


def test_the_same_updates_in_other_steps_of_noise_are_refused(tmp_path: pathlib.Path) -> None:
    """The integers beside one row would differ by a function of the sum alone."""
    _check(tmp_path, 3, *_split(_updates(1)[0]))
    with refuses("released", error=tf.errors.InvalidArgumentError):
        _check(tmp_path, 3, *_split(_updates(1)[0]), step=1.001e-9)


@pytest.mark.parametrize("change", ["another client", "one fewer", "one more"])
def test_one_client_among_hundreds_makes_a_difference(change: str, tmp_path: pathlib.Path) -> None:
    updates = _updates(502)
    _check(tmp_path, 3, *_split(updates[:500].sum(axis=0)))
    other = {
        "another client": updates[1:501],
        "one fewer": updates[:499],
        "one more": updates[:501],
    }[change]
    with refuses("released", error=tf.errors.InvalidArgumentError):
        _check(tmp_path, 3, *_split(other.sum(axis=0)))
    # Other rounds and other streams have noise of their own.
    _check(tmp_path, 4, *_split(other.sum(axis=0)))
    _check(tmp_path, 3, *_split(other.sum(axis=0)), stream=(1, -3))


def test_every_coordinate_counts(tmp_path: pathlib.Path) -> None:
    """A change of a tenth of the clip norm in one coordinate is refused."""
    record = ReleaseRecord.in_directory(tmp_path)

    # Traced once, which takes far longer than a check.
    @tf.function(autograph=False)
    def check(stream: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
        return record.check(
            stream,
            tf.zeros([], tf.int64),
            list(sums),
            unit=tf.constant(1.0, tf.float64),
            clip_norm=_CLIP_NORM,
            step=tf.constant(1e-9, tf.float64),
        )

    # Of each tensor the first and the last, and some between.
    for position in (*range(0, 1003, 9), 599, 600, 1001, 1002):
        stream, total = tf.constant([position, 7], tf.int64), _updates(1)[0]
        check(stream, *map(tf.constant, _split(total)))
        total[position] += 0.1 * _CLIP_NORM
        with refuses("released", error=tf.errors.InvalidArgumentError):
            check(stream, *map(tf.constant, _split(total)))


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_sums_of_gradients_whose_rows_add_up_to_zero_differ(
    size: float, tmp_path: pathlib.Path
) -> None:
    """The gradients of a softmax are such sums, for any data and however small the updates are."""
    generator = np.random.default_rng(5)
    sums = []
    for _ in range(2):
        gradient = generator.normal(size=(512, 10))
        gradient -= gradient.mean(axis=1, keepdims=True)
        gradient *= size * _CLIP_NORM / np.linalg.norm(gradient)
        sums.append(gradient.astype(np.float32))
    _check(tmp_path, 4, sums[0])
    _check(tmp_path, 4, sums[0])
    with refuses("released", error=tf.errors.InvalidArgumentError):
        _check(tmp_path, 4, sums[1])


@pytest.mark.parametrize("i", [0, 1])
def test_a_sum_of_zeros_is_recorded(i: int, tmp_path: pathlib.Path) -> None:
    zeros, total = np.zeros(1003, np.float32), _updates(1)[0]
    for _ in range(2):
        _check(tmp_path, i, *_split(zeros))
    # The difference to the round of nobody would be the sum, without noise.
    with refuses("released", error=tf.errors.InvalidArgumentError):
        _check(tmp_path, i, *_split(total))


@pytest.mark.parametrize("size", [1.0, 1e-2])
@pytest.mark.parametrize(("change", "is_refused"), [(1e-3, True), (1e-6, False)])
def test_sums_that_differ_by_a_thousandth_are_others(
    size: float, change: float, is_refused: bool, tmp_path: pathlib.Path
) -> None:
    """And by a millionth, as when updates are summed in another order, they are the same."""
    total = size * _updates(1)[0].astype(np.float64)
    changed = (1.0 + change) * total
    _check(tmp_path, 1, total)
    if is_refused:
        with refuses("released", error=tf.errors.InvalidArgumentError):
            _check(tmp_path, 1, changed)
    else:
        _check(tmp_path, 1, changed)


def test_a_damaged_record_is_written_again(tmp_path: pathlib.Path) -> None:
    total = _updates(1)[0]
    _check(tmp_path, 2, *_split(total))
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes()[:30])
    _check(tmp_path, 2, *_split(total))
    with refuses("released", error=tf.errors.InvalidArgumentError):
        _check(tmp_path, 2, *_split(2.0 * total))


def test_large_tensors_have_the_numbers_of_small_ones() -> None:
    """Each share is the weighted sum of consecutive entries, however it is added up."""
    for size in (1, 63, 64, 65, TILE, TILE + 1, 3 * TILE + 17):
        sums = np.random.default_rng(size).integers(-(2**40), 2**40, size)
        multiples = np.arange(size) * ((5.0**0.5 - 1.0) / 2.0)
        weighted = sums * (0.5 + multiples - np.floor(multiples))
        length = -(-size // 64)
        expected = [np.sum(weighted[k * length : (k + 1) * length]) for k in range(64)]
        found = noise_files._numbers((tf.constant(sums),))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-3)
