"""Aggregators of six rounds in TFF, and values of nested tensors for them."""

import collections
import functools
import os
import warnings
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.noise import FixedSeedWarning

NUM_ROUNDS = 6
PARTICIPATION = mfa.participation.MinSeparation(3)
BFLOAT16 = tf.bfloat16.as_numpy_dtype


def small_matrix() -> mfa.factorizations.Factorization:
    """A banded matrix for a few rounds."""
    return mfa.factorizations.banded(mfa.workloads.prefix_sum(NUM_ROUNDS), 3)


def make_aggregator(seed: int | None = None, **changes: Any) -> Any:
    """An aggregator without noise, but for what is changed."""
    arguments: dict[str, Any] = {
        "factorization": small_matrix(),
        "participation": PARTICIPATION,
        "noise_multiplier": 0.0,
        "clip_norm": 1.0,
        "clients_per_round": 4,
        "seed": seed,
        "allow_no_noise": True,
    }
    arguments.update(changes)
    return mfa.mf_dp_aggregator(arguments.pop("factorization"), **arguments)


def make_process(value_type: Any, **changes: Any) -> tff.templates.AggregationProcess:
    """The process of an aggregator, of a fixed seed if one is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return make_aggregator(**changes).create(value_type)


@functools.cache
def process_without_noise(value_type: Any) -> tff.templates.AggregationProcess:
    """A process of the usual arguments, which takes seconds to make, for several tests."""
    return make_process(value_type)


@functools.cache
def process_with_noise() -> tff.templates.AggregationProcess:
    """One with noise, whose rounds several tests look at."""
    return make_process(tff.TensorType(np.float32, [2]), noise_multiplier=1.0)


def query_rounds(specs: Any, rounds: int = 1, **changes: Any) -> list[list[np.ndarray]]:
    """What the aggregator's query releases in rounds of one client's zeros, without TFF."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        query = make_aggregator(**changes).query(specs)
    state, zeros = query.initial_global_state(), query.initial_sample_state(specs)
    released = []
    for _ in range(rounds):
        result, state, _ = query.get_noised_result(zeros, state)
        released.append([np.asarray(tensor) for tensor in tf.nest.flatten(result)])
    return released


# Tensors of several types and shapes, one of them empty.
NEST = tff.types.to_type(
    collections.OrderedDict(
        layer=(tff.TensorType(np.float32, [2, 2]), tff.TensorType(np.float64, [])),
        bfloat=tff.TensorType(BFLOAT16, [3]),
        empty=tff.TensorType(np.float32, [0, 4]),
    )
)


def nest_of(entry: float) -> Any:
    """Tensors of :data:`NEST`, all of whose entries are the same."""
    return collections.OrderedDict(
        layer=(np.full([2, 2], entry, np.float32), np.float64(entry)),
        bfloat=np.full([3], entry).astype(BFLOAT16),
        empty=np.zeros([0, 4], np.float32),
    )


def flat(value: Any) -> np.ndarray:
    """All entries of a nest as one vector."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves(value)])


def leaves(value: Any) -> list[Any]:
    """The tensors of a nest."""
    return [*value["layer"], value["bfloat"], value["empty"]]
