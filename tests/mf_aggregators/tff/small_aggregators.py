"""Aggregators of six rounds in TFF, and values of nested tensors for them."""

import collections
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators import aggregator as numpy_aggregator
from mf_aggregators.aggregator import Options
from mf_aggregators.kernel.claim import Claim, Pattern
from mf_aggregators.noise import NoiseStorage
from mf_aggregators.tff import dp_query
from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery, MatrixFactorizationSumQuery

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
        **changes,
    }
    return mfa.mf_dp_aggregator(arguments.pop("factorization"), **arguments)


def make_process(value_type: Any, **changes: Any) -> tff.templates.AggregationProcess:
    """The process of an aggregator, of a fixed seed if one is given."""
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
    query = make_aggregator(**changes).query(specs)
    state, zeros = query.initial_global_state(), query.initial_sample_state()
    released = []
    for _ in range(rounds):
        result, state, _ = query.get_noised_result(zeros, state)
        released.append([np.asarray(tensor) for tensor in tf.nest.flatten(result)])
    return released


def sum_of(query: Any, params: Any, records: Any) -> Any:
    """The sum of clients' records, as a process makes it."""
    sums = query.initial_sample_state()
    for record in records:
        sums = tf.nest.map_structure(tf.add, sums, query.preprocess_record(params, record))
    return sums


def sum_query(
    recursion: Any,
    specs: Any,
    *,
    l2_norm_clip: float = 1.0,
    noise_stddev: float = 0.0,
    seed: int | None = None,
    participation: Any = None,
    sums: Any = None,
) -> MatrixFactorizationSumQuery:
    """A query by the numbers that it is made of."""
    flat_specs = dp_query._checked_specs(specs)
    claim = Claim(recursion, Pattern((0,)), noise_stddev / l2_norm_clip, 0.5)
    storage = NoiseStorage.STATE
    parts = dp_query.NoiseParts.of(
        [claim], l2_norm_clip, flat_specs, storage=storage, sums=sums, participation=participation
    )
    number = numpy_aggregator._seed_of(seed)
    return MatrixFactorizationSumQuery(parts, specs, seed=number)


def adaptive_query(
    recursion: Any,
    specs: Any,
    *,
    clip: mfa.AdaptiveClip,
    noise_multiplier: float,
    clients_per_round: float,
    metrics: Any = None,
    kind: type[AdaptiveClipSumQuery] = AdaptiveClipSumQuery,
    **arguments: Any,
) -> AdaptiveClipSumQuery:
    """A query with a clip norm that adapts, for a C of sensitivity 1."""
    options = Options(
        mechanism=mfa.Mechanism(mfa.factorizations.identity(1), PARTICIPATION, noise_multiplier),
        clip_norm=clip,
        clients_per_round=clients_per_round,
        seed=None,
        noise_storage="state",
        noise_directory=None,
        secure_aggregation_bits=None,
        largest_cohort=None,
        allow_no_noise=True,
        metrics=metrics,
    )
    norm = options.norm
    vectors = dp_query._vector_specs(specs, metrics)
    stddev = noise_multiplier * norm
    mechanism = sum_query(recursion, vectors, l2_norm_clip=norm, noise_stddev=stddev, **arguments)
    return kind(mechanism, specs, options)


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
