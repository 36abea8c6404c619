"""Where training begins, and part-trained models: what leaves clients is the trained part alone."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from simulations.training import model_parts, weights_files
from simulations.training.federated_task import FederatedTask
from tests.refusals import refuses

# Keras warns of the older format of files, which people have.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")

_NAMES = ("first/kernel", "first/bias", "last/kernel", "last/bias")


def _keras_model(units: int = 3) -> tf.keras.Model:
    inputs = tf.keras.Input((2,))
    hidden = tf.keras.layers.Dense(units, "tanh", name="first")(inputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1, name="last")(hidden))


def _model_fn() -> tff.learning.models.VariableModel:
    return tff.learning.models.from_keras_model(
        _keras_model(),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=(tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))),
    )


def _norms(weights: Sequence[np.ndarray], split: str) -> Mapping[str, float]:
    return {"loss": float(sum(np.sum(np.square(weight)) for weight in weights)), "accuracy": 0.0}


@pytest.fixture
def task() -> FederatedTask:
    weights = [np.full(shape, 0.5, np.float32) for shape in ((2, 3), (3,), (3, 1), (1,))]
    return FederatedTask(
        client_ids=("a", "b"),
        client_dataset=lambda client, round_index: None,
        model_fn=_model_fn,
        initial_weights=tuple(weights),
        evaluate=_norms,
        accuracy="accuracy",
        keras_model=_keras_model,
    )


def _others(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    shapes = ((2, 3), (3,), (3, 1), (1,))
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("suffix", [".keras", ".h5", ".weights.h5", "of a run"])
def test_training_begins_with_the_weights_of_a_file(
    task: FederatedTask, tmp_path: pathlib.Path, suffix: str
) -> None:
    weights, path = _others(1), tmp_path / f"model{suffix}"
    if suffix == "of a run":
        path = tmp_path
        weights_files.save(path / weights_files.FINAL_MODEL_FILE, _NAMES, weights)
    else:
        model = _keras_model()
        model.set_weights(weights)
        (model.save_weights if "weights" in suffix else model.save)(path)
    begun = model_parts.beginning_with(task, path, weights_files.sha256(path))
    for found, expected in zip(begun.initial_weights, weights, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.float32
    with refuses("is not what this run began with"):
        model_parts.beginning_with(task, path, "0" * 64)


def test_files_of_other_models_are_refused(task: FederatedTask, tmp_path: pathlib.Path) -> None:
    weights = _others(2)

    def saved(names: Sequence[str], arrays: Sequence[np.ndarray]) -> pathlib.Path:
        weights_files.save(tmp_path / "model.npz", names, arrays)
        return tmp_path / "model.npz"

    for names, arrays, words in (
        (_NAMES[:2], weights[:2], "it has 2 weights, and the task's has 4"),
        (("one/kernel", *_NAMES[1:]), weights, "its weight 1 is one/kernel"),
        (_NAMES, [weights[0].T, *weights[1:]], "for first/kernel it has float32 of shape (3, 2)"),
        (_NAMES, [weights[0].astype(int), *weights[1:]], "for first/kernel it has int64"),
        (_NAMES, [*weights[:3], np.array([np.nan])], "NaN or infinite numbers in last/bias"),
    ):
        with refuses(words):
            model_parts.beginning_with(task, saved(names, arrays), None)
    _keras_model(units=4).save(tmp_path / "other.h5")
    with refuses("cannot be read as weights of this model"):
        model_parts.beginning_with(task, tmp_path / "other.h5", None)
    with refuses("FederatedTask.keras_model"):
        model_parts.beginning_with(
            dataclasses.replace(task, keras_model=None), tmp_path / "other.h5", None
        )
    (tmp_path / "cut.npz").write_bytes((tmp_path / "model.npz").read_bytes()[:-100])
    (tmp_path / "model.txt").write_text("0.5")
    for name, words in (
        ("cut.npz", "is no whole file of a run's final model"),
        ("model.txt", "has to end in .keras, .h5, .hdf5 or .npz"),
        ("none.npz", "is no file of weights and no directory of a run"),
        ("", "has no final_model.npz"),
    ):
        with refuses(words):
            model_parts.beginning_with(task, tmp_path / name, None)
    # What would run code as it is read is no file of weights.
    np.savez(tmp_path / "code.npz", names=np.array(["a"]), weight_0=np.array([print], object))
    with refuses("is no whole file"):
        weights_files.load(tmp_path / "code.npz")


def test_layers_are_named_whole(task: FederatedTask) -> None:
    part = model_parts.training_only(task, ["last"])
    assert [weight.shape for weight in part.initial_weights] == [(3, 1), (1,)]
    assert list(part.frozen_weights) == [0, 1]
    middle = model_parts.training_only(task, ["first/bias", "last/kernel"])
    assert list(middle.frozen_weights) == [0, 3]
    trained = [np.full((3,), 7.0), np.full((3, 1), 8.0)]
    everything = middle.all_weights(trained)
    assert [float(weight.flat[0]) for weight in everything] == [0.5, 7.0, 8.0, 0.5]
    # An evaluation is that of the whole model.
    assert middle.evaluate(trained, "test") == _norms(everything, "test")
    assert not model_parts.training_only(task, ["first", "last"]).frozen_weights
    for name in ("las", "kernel", "first/k", "last/bias/x"):
        with refuses(f"no weight or layer '{name}'", "first/kernel, first/bias"):
            model_parts.training_only(task, ["last", name])


class _Recorder(tff.aggregators.UnweightedAggregationFactory):
    """Makes the processes of another factory, and remembers for which updates."""

    def __init__(self, inner: tff.aggregators.UnweightedAggregationFactory) -> None:
        self._inner = inner
        self.types: list[Any] = []

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        self.types.append(value_type)
        return self._inner.create(value_type)


def _data() -> list[tf.data.Dataset]:
    features = np.array([[1.0, 2.0], [3.0, -1.0]], np.float32)
    examples = tf.data.Dataset.from_tensor_slices((features, features[:, :1]))
    return [examples.batch(2)] * 2


@pytest.mark.long
def test_updates_are_those_of_the_trained_part_and_frozen_weights_stay_bit_for_bit(
    task: FederatedTask,
) -> None:
    weights = _others(3)
    task = dataclasses.replace(task, initial_weights=tuple(weights))
    part = model_parts.training_only(task, ["first/bias", "last"])
    recorder = _Recorder(tff.aggregators.UnweightedMeanFactory())
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        part.model_fn,
        tff.learning.optimizers.build_sgdm(0.1),
        model_aggregator=recorder,
    )
    (updates,) = recorder.types
    shapes = [tuple(each.shape) for each in tff.structure.flatten(updates)]
    assert shapes == [(3,), (3, 1), (1,)]
    state = process.set_model_weights(
        process.initialize(),
        tff.learning.models.ModelWeights(
            list(part.initial_weights), list(part.frozen_weights.values())
        ),
    )
    state = process.next(state, _data()).state
    found = process.get_model_weights(state)
    for weight, initial in zip(found.non_trainable, weights[:1], strict=True):
        np.testing.assert_array_equal(weight, initial)
    for weight, initial in zip(found.trainable, part.initial_weights, strict=True):
        assert np.all(weight != initial)
