"""Data sets of clients, functions of seed, round and client alone; evaluations of one model."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.training.task_parts import client_datasets, keras_evaluation


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
