"""Random bits in TensorFlow: those of NumPy, for every source, word for word."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.kernel import draws
from mf_aggregators.kernel.draws import NoiseSource
from mf_aggregators.tff import tensor_rows
from tests.examples import examples

_INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
)


@given(
    st.sampled_from(NoiseSource),
    st.tuples(_INT64, _INT64),
    st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 1)),
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 2**33), st.integers(2**32 - 3, 2**32)), st.integers(1, 9)
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_blocks_are_those_of_numpy(
    source: NoiseSource,
    seed: tuple[int, int],
    row: int,
    ranges: list[tuple[int, int]],
    is_dynamic: bool,
) -> None:
    numbers = [
        (tf.constant(first, tf.int64), tf.constant(count) if is_dynamic else count)
        for first, count in ranges
    ]
    found = tensor_rows.of_source(source)(
        tf.constant(seed, tf.int64), tf.constant(row, tf.int64), *numbers
    )
    for words, (first, count) in zip(found, ranges, strict=True):
        expected = draws._random_blocks(source, np.array(seed, np.int64), row, first, count)
        assert words.dtype == tf.uint32
        np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("source", NoiseSource)
def test_many_blocks_are_those_of_numpy(source: NoiseSource) -> None:
    """In a graph, in which counts of blocks choose how they are computed."""
    seed = np.array([-5, 2**62], np.int64)

    @tf.function(autograph=False)
    def draw(seed: tf.Tensor, row: tf.Tensor, first: tf.Tensor) -> list[tf.Tensor]:
        return tensor_rows.of_source(source)(seed, row, (first, 3000), (first + 2**60, 8))

    first_block = tf.constant(2**32 - 1500, tf.int64)
    many, few = draw(tf.constant(seed), tf.constant(9, tf.int64), first_block)
    for words, first, count in ((many, 2**32 - 1500, 3000), (few, 2**60 + 2**32 - 1500, 8)):
        np.testing.assert_array_equal(words, draws._random_blocks(source, seed, 9, first, count))
