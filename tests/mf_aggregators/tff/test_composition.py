"""The queries inside those of tensorflow-privacy, and inside TFF's factory of any query.

In their meaning, these are tensorflow-privacy's tests of its queries and TFF's tests of
``DifferentiallyPrivateFactory``.
"""

import pathlib
from typing import Any

import dp_accounting
import hypothesis
import hypothesis.strategies
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp
from tensorflow_privacy.privacy.dp_query.nested_query import NestedSumQuery
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras import (
    make_keras_generic_optimizer_class,
)

import mf_aggregators as mfa
from mf_aggregators.tff import processes
from mf_aggregators.tff.dp_query import MatrixFactorizationSumQuery, SampleState
from tests.examples import examples
from tests.mf_aggregators.tff.small_aggregators import sum_query
from tests.refusals import refuses

_SCALAR = tf.TensorSpec([], tf.float32)
_PAIR = tf.TensorSpec([2], tf.float32)


def _query(
    clip_norm: float = 10.0, noise_stddev: float = 0.0, specs: Any = _SCALAR
) -> MatrixFactorizationSumQuery:
    recursion = mfa.factorizations.identity(3).noise_recursion()
    return sum_query(recursion, specs, l2_norm_clip=clip_norm, noise_stddev=noise_stddev)


def _aggregator(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "participation": mfa.participation.MinSeparation(2),
        "noise_multiplier": 1.0,
        "clip_norm": 0.7,
        "clients_per_round": 3,
        "seed": 5,
        **changes,
    }
    factorization = mfa.factorizations.banded(mfa.workloads.prefix_sum(4), 2)
    return mfa.mf_dp_aggregator(factorization, **arguments)


def _query_of(specs: Any, **changes: Any) -> Any:
    return _aggregator(**changes).query(specs)


def _sum(query: Any, records: list[Any]) -> Any:
    """What a round releases, as plain Python numbers and lists."""
    state = query.initial_global_state()
    params = query.derive_sample_params(state)
    total = query.initial_sample_state(records[0])
    for record in records:
        total = query.accumulate_record(params, total, record)
    result, _, event = query.get_noised_result(total, state)
    # A guarantee is one of all rounds: nothing composes the event of a single one.
    assert not dp_accounting.rdp.RdpAccountant().supports(event)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), result)


def _assert_close(found: Any, expected: Any) -> None:
    tf.nest.assert_same_structure(found, expected)
    flat = zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True)
    for one, other in flat:
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_normalized_query_divides_the_sum() -> None:
    records = [tf.constant([-6.0, 8.0]), tf.constant([4.0, -3.0])]  # The first is halved.
    query = tfp.NormalizedQuery(_query(5.0, specs=_PAIR), 2.0)
    np.testing.assert_allclose(_sum(query, records), [0.5, 0.5], rtol=1e-6)
    as_arrays = [np.asarray(record, np.float64) for record in records]
    np.testing.assert_array_equal(_sum(query, as_arrays), _sum(query, records))


def test_nested_queries_clip_each_their_part_of_python_numbers() -> None:
    pair = [_SCALAR, _SCALAR]
    plain = NestedSumQuery([_query(), _query(specs=pair)])
    _assert_close(_sum(plain, [[1.0, [2.0, 3.0]], [4, [3.0, 2.0]]]), [5.0, [5.0, 5.0]])
    clipping = NestedSumQuery(
        [
            tfp.NormalizedQuery(_query(4.0), 5.0),
            tfp.NormalizedQuery(_query(5.0, specs=pair), 5.0),
        ]
    )
    _assert_close(_sum(clipping, [[1.0, [12.0, 9.0]], [5.0, [1.0, 2.0]]]), [1.0, [1.0, 1.0]])


@pytest.mark.parametrize("clip_norm", [1.0, mfa.AdaptiveClip(1.0)], ids=["constant", "adaptive"])
def test_records_are_plain_arrays_that_are_matched_by_name(clip_norm: Any) -> None:
    query = _query_of({"a": [_PAIR]}, clip_norm=clip_norm)
    params = query.derive_sample_params(query.initial_global_state())
    for other in ({"b": [tf.ones(2)]}, {"a": (tf.ones(2),)}):
        with refuses("containers"):
            query.preprocess_record(params, other)
    masked: Any = np.ma.masked_array(np.ones(2), [True, False])
    sliced = tf.IndexedSlices(tf.ones(1), tf.constant([0]), tf.constant([2]))
    for leaf in (masked, np.ones(2, object), tf.sparse.from_dense(tf.ones(2)), sliced):
        with refuses("['a'][0]", type(leaf).__name__, error=TypeError):
            query.preprocess_record(params, {"a": [leaf]})


@pytest.mark.parametrize("build", ["constant", "adaptive"])
def test_a_record_that_a_sum_would_broadcast_is_refused(build: str) -> None:
    """A number of the clip norm added to four entries would move the sum by two clip norms."""
    specs = [tf.TensorSpec([4], tf.float32)]
    clip = mfa.AdaptiveClip(0.7) if build == "adaptive" else 0.7
    query = _query_of(specs, clip_norm=clip)
    params = query.derive_sample_params(query.initial_global_state())
    for record in ([0.7], [np.array([0.7])], [tf.constant([[0.7] * 4])]):
        with refuses("(4,)"):
            query.preprocess_record(params, record)
        with refuses("(4,)"):
            query.initial_sample_state(record)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    def of_any_size(record: tf.Tensor) -> Any:
        return query.preprocess_record(params, [record])

    of_any_size(tf.zeros([4]))
    with refuses("expected shape", error=tf.errors.InvalidArgumentError):
        of_any_size(tf.zeros([1]))


def test_sums_that_are_no_integers_of_64_bits_are_refused() -> None:
    query = _query(specs=[_PAIR])
    state, total = query.initial_global_state(), query.initial_sample_state()
    for dtype in (tf.int32, tf.float32):
        other = tf.nest.map_structure(lambda tensor, dtype=dtype: tf.cast(tensor, dtype), total)
        with refuses("int64", dtype.name, error=TypeError):
            query.get_noised_result(other, state)
    with refuses("shapes"):
        query.get_noised_result(total._replace(steps=[tf.zeros([], tf.int64)]), state)


def _process(query: Any, value_type: Any, sums: Any = None) -> tff.templates.AggregationProcess:
    factory = tff.aggregators.DifferentiallyPrivateFactory(query, sums)
    return factory.create(tff.types.to_type(value_type))


_LEAST = 2**30


@hypothesis.settings(deadline=None, max_examples=examples(200))
@hypothesis.given(
    data=hypothesis.strategies.data(),
    modulus=hypothesis.strategies.integers(2**20, 2**36),
    clients=hypothesis.strategies.integers(1, 64),
)
def test_no_modular_sum_that_is_released_differs_from_the_sum(
    data: Any, modulus: int, clients: int
) -> None:
    """For any modulus and any clients of two entries within the clip norm."""
    entry = hypothesis.strategies.integers(-_LEAST, _LEAST)
    entries = data.draw(hypothesis.strategies.lists(entry, min_size=clients, max_size=clients))
    lowest = data.draw(hypothesis.strategies.sampled_from([0, -((modulus - 1) // 2)]))

    def modular(number: int) -> tf.Tensor:
        return tf.constant((number - lowest) % modulus + lowest, tf.int64)

    query, total = _query(1.0), sum(entries)
    sums = SampleState(modular(total), modular(clients), modular(-clients * _LEAST))
    try:
        result, _, _ = query.get_noised_result(sums, query.initial_global_state())
    except tf.errors.InvalidArgumentError:
        return
    assert float(result) == pytest.approx(total / _LEAST, abs=1e-6)


@pytest.mark.parametrize(
    ("clients", "least", "changes"),
    [
        (2, -_LEAST, {}),
        (2**22 + 1, -(2**22 + 1) * _LEAST, {}),
        (1, -_LEAST, {"round_index": 3}),
        (1, -_LEAST, {"fingerprint": 1}),
    ],
)
def test_no_graph_leaves_a_check_out(clients: int, least: int, changes: dict[str, Any]) -> None:
    """Those of TFF run what their results need, and no more."""
    query = _query(1.0)
    given = tf.nest.map_structure(np.asarray, query.initial_global_state())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        state, sums = tf.nest.map_structure(
            lambda each: tf.compat.v1.placeholder_with_default(np.int64(each), np.shape(each)),
            (given._replace(**changes), SampleState(0, clients, least)),
        )
        result, _, _ = query.get_noised_result(sums, state)
        with pytest.raises(tf.errors.InvalidArgumentError, match="mf_aggregators"):
            session.run(result)


_FROZEN = ("constant", "tf.function")


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda query: query,
        lambda query: tfp.NormalizedQuery(query, 2.0),
        lambda query: NestedSumQuery([tfp.NormalizedQuery(query, 2.0)]),
    ],
)
def test_a_state_that_a_graph_would_hold_as_a_constant_is_refused(wrapper: Any) -> None:
    query = wrapper(_query(1.0, 1.0, _PAIR))
    template = [tf.zeros([2])] if isinstance(query, NestedSumQuery) else tf.zeros([2])
    state, sums = query.initial_global_state(), query.initial_sample_state(template)

    @tf.function(autograph=False)
    def captured() -> Any:
        return query.get_noised_result(sums, state)[0]

    @tf.function(autograph=False)
    def made_inside() -> Any:
        return query.get_noised_result(sums, query.initial_global_state())[0]

    with tf.Graph().as_default(), refuses(*_FROZEN):
        template = tf.nest.map_structure(lambda _: _PAIR, template)
        query.get_noised_result(query.initial_sample_state(template), query.initial_global_state())
    for frozen in (captured, made_inside):
        with refuses(*_FROZEN):
            frozen()


def test_the_keras_optimizer_of_tensorflow_privacy_runs_eagerly_or_not_at_all() -> None:
    """Its training function would hold the state of its first step."""
    specs = [tf.TensorSpec([3, 1]), tf.TensorSpec([1])]

    def fit(steps: int, **eager: Any) -> None:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
        optimizer = make_keras_generic_optimizer_class(tf.keras.optimizers.legacy.SGD)(
            _query(1.0, 1.0, specs), num_microbatches=2, learning_rate=1.0
        )
        loss = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.NONE)
        model.compile(optimizer, loss, **eager)
        model.fit(np.ones([2 * steps, 3]), np.ones([2 * steps, 1]), batch_size=2, verbose=0)

    for frozen in ({}, {"steps_per_execution": 2}):
        with refuses(*_FROZEN):
            fit(2, **frozen)
    fit(3, run_eagerly=True)
    with refuses("3 rounds", error=tf.errors.InvalidArgumentError):
        fit(4, run_eagerly=True)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("clip_norm", [1.0, mfa.AdaptiveClip(1.0)], ids=["constant", "adaptive"])
def test_a_state_that_moves_on_in_a_graph_is_not_refused(clip_norm: Any) -> None:
    query = _query_of([_PAIR], clip_norm=clip_norm)
    state, sums = query.initial_global_state(), query.initial_sample_state()
    with refuses(*_FROZEN):
        tf.function(lambda: query.get_noised_result(sums, state)[0], autograph=False)()

    @tf.function(autograph=False)
    def rounds(state: Any) -> Any:
        def following(i: Any, state: Any) -> Any:
            return i + 1, query.get_noised_result(sums, state)[1]

        _, state = tf.while_loop(lambda i, _: i < 2, following, (0, state))
        return tf.cond(
            tf.constant(True),
            lambda: query.get_noised_result(sums, state)[:2],
            lambda: query.get_noised_result(sums, state)[:2],
        )

    result, following = rounds(state)
    for _ in range(3):
        expected, state, _ = query.get_noised_result(sums, state)
    np.testing.assert_array_equal(result[0], expected[0])
    tf.nest.map_structure(np.testing.assert_array_equal, following, state)


@pytest.mark.parametrize(
    "clip_norm",
    [
        pytest.param(0.7, id="constant"),
        pytest.param(mfa.AdaptiveClip(0.7, update_period=1), id="adaptive", marks=pytest.mark.long),
    ],
)
def test_tffs_factory_releases_the_bits_of_the_aggregator(clip_norm: Any) -> None:
    """Row after row: its ``initialize`` runs a round, and uses no row for it."""
    aggregator = _aggregator(clip_norm=clip_norm)
    value_type = tff.types.to_type([(np.float32, [3]), np.float64])
    specs = tff.types.type_to_tf_tensor_specs(value_type)
    ours = aggregator.create(value_type)
    theirs = _process(tfp.NormalizedQuery(aggregator.query(specs), 3.0), value_type)
    states = [ours.initialize(), theirs.initialize()]
    clients = [
        [np.array([0.1, -2.0, 0.3], np.float32), 0.2],
        [np.full([3], np.nan, np.float32), 0.1],
        [np.array([0.1, 0.0, -0.01], np.float32), 0.02],
    ]
    for cohort in (clients, clients[::-1], clients[:1], []):
        outputs = [
            process.next(state, cohort)
            for process, state in zip((ours, theirs), states, strict=True)
        ]
        tf.nest.map_structure(np.testing.assert_array_equal, outputs[0].result, outputs[1].result)
        states = [output.state for output in outputs]


@pytest.mark.long
def test_a_record_of_releases_counts_the_round_of_tffs_factory(tmp_path: pathlib.Path) -> None:
    """No noise is used twice: what it ran on zeros when it began has to be of zeros."""
    query = _query_of(_PAIR, noise_directory=tmp_path / "noise", seed=None)
    process = _process(query, (np.float32, [2]))
    state = process.initialize()
    with refuses("released", error=processes.RefusalError):
        process.next(state, [np.array([0.1, 0.2], np.float32)])
