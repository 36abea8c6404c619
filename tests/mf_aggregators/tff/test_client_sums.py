"""Everything that leaves the clients is listed, and a second update without noise is refused."""

import collections
import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

import mf_aggregators as mfa
from mf_aggregators.tff import client_sums, processes
from mf_aggregators.tff.client_sums import UnnoisedSumError, _ClientSum, _ClientTensor
from tests.refusals import refuses

_UPDATE = tff.to_type(
    collections.OrderedDict(
        kernel=tff.TensorType(np.float32, [3, 2]),
        bias=tff.TensorType(np.float32, [2]),
        scale=tff.TensorType(np.float32),
    )
)


def _aggregator(factorization: Any = None, **changes: Any) -> Any:
    options = {"noise_multiplier": 1.0, "clip_norm": 1.0, "clients_per_round": 2, "seed": 1}
    return mfa.mf_dp_aggregator(
        factorization or mfa.factorizations.identity(4),
        participation=mfa.participation.MinSeparation(2),
        **(options | changes),
    )


def _process(factory: Any) -> Any:
    return factory.create(_UPDATE)


@pytest.mark.parametrize(
    ("changes", "operation"),
    [
        ({}, "federated_aggregate"),
        ({"secure_aggregation_bits": 32}, "federated_secure_modular_sum"),
    ],
    ids=["open", "secure"],
)
def test_an_aggregator_makes_one_sum_of_updates_and_their_number(
    changes: dict[str, Any], operation: str
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        process = _process(_aggregator(**changes))
    # TFF's usual context, in which the process is made, has no secure sum.
    assert any("simulates one" in str(each.message) for each in warned) == bool(changes)
    (only,) = client_sums.of(process.next)
    assert only.operation == operation
    assert only.is_noised
    assert only.tensors == (
        _ClientTensor("steps/kernel", (3, 2)),
        _ClientTensor("steps/bias", (2,)),
        _ClientTensor("steps/scale", ()),
        _ClientTensor("num_records", ()),
        _ClientTensor("least_steps", ()),
    )
    assert str(only).endswith("least_steps [], with noise on steps")
    client_sums.check(process.next)


def test_what_factories_around_it_send_is_listed_as_well() -> None:
    process = _process(tff.aggregators.zeroing_factory(1.0, _aggregator()))
    sums = client_sums.of(process.next)
    assert sum(each.is_noised for each in sums) == 1
    # How many updates were zeroed is a number of its own.
    others = [each for each in sums if not each.is_noised]
    assert others
    client_sums.check(process.next)


def _call(process: Any, context: Any) -> None:
    """Has a context call the round of a process, with no clients."""
    arguments: list[Any] = [("state", None), ("value", [])]
    context.invoke(process.next, tff.structure.Struct(arguments))


class _Context:
    """Counts what is run, and runs nothing."""

    number = 0

    def invoke(self, computation: Any, argument: Any) -> None:
        self.number += 1


def _refused_at_its_first_call(process: Any, said: str) -> None:
    context = _Context()
    processes.raise_refusals(context)
    for _ in range(2):
        with refuses(said, error=UnnoisedSumError):
            _call(process, context)
    assert context.number == 0


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "around",
    [
        tff.aggregators.UnweightedMeanFactory,
        lambda sums: tff.aggregators.UnweightedMeanFactory(
            tff.aggregators.zeroing_factory(1.0, sums)
        ),
        lambda sums: tff.aggregators.zeroing_factory(
            1.0, tff.aggregators.UnweightedMeanFactory(sums)
        ),
    ],
)
def test_a_mean_of_the_mean_is_refused(around: Any) -> None:
    process = _process(around(_aggregator()))
    with refuses("twice"):
        client_sums.check(process.next)
    _refused_at_its_first_call(process, "twice")


def test_a_weighted_mean_of_the_mean_is_refused_and_equal_weights_are_not() -> None:
    weight = tff.TensorType(np.float32)
    divided = tff.aggregators.MeanFactory(_aggregator()).create(_UPDATE, weight)
    once = tff.aggregators.as_weighted_aggregator(_aggregator()).create(_UPDATE, weight)
    with refuses("twice"):
        client_sums.check(divided.next)
    client_sums.check(once.next)


def test_a_mean_of_other_values_is_not_refused() -> None:
    process = _process(tff.aggregators.UnweightedMeanFactory())
    client_sums.check(process.next, needs_noise=False)


_AROUND = tff.aggregators


def _norm(is_secure: bool = False) -> Any:
    return _AROUND.PrivateQuantileEstimationProcess.no_noise(
        0.5, 0.5, 1.0, secure_estimation=is_secure
    )


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    "around",
    [
        lambda sums: _AROUND.clipping_factory(_norm(), sums),
        lambda sums: _AROUND.zeroing_factory(_norm(), sums),
        lambda sums: _AROUND.zeroing_factory(3.0, _AROUND.clipping_factory(_norm(), sums)),
        lambda sums: _AROUND.clipping_factory(_norm(), _AROUND.concat_factory(sums)),
        lambda sums: _AROUND.clipping_factory(_norm(is_secure=True), sums),
        # With noise of its own, which no guarantee of the aggregator accounts for.
        lambda sums: _AROUND.clipping_factory(
            _AROUND.PrivateQuantileEstimationProcess(
                tfp.QuantileEstimatorQuery(1.0, 0.5, 1.0, 5.0, 10.0)
            ),
            sums,
        ),
        lambda sums: tff.learning.robust_aggregator(
            weighted=False, debug_measurements_fn=lambda _: sums
        ),
    ],
)
def test_a_norm_around_it_that_follows_from_another_sum_is_refused(around: Any) -> None:
    """One client's norm would move what others send in later rounds."""
    process = _process(around(_aggregator()))
    with refuses("AdaptiveClip", "without noise", error=UnnoisedSumError):
        client_sums.check(process.next)
    _refused_at_its_first_call(process, "AdaptiveClip")


def test_a_plain_call_of_a_process_refuses_its_other_sums() -> None:
    process = _process(tff.aggregators.UnweightedMeanFactory(_aggregator()))
    state = process.initialize()
    with refuses("twice", error=UnnoisedSumError):
        process.next(state, [])


def test_a_process_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    context = _Context()
    checked: list[Any] = []
    processes.raise_refusals(context)
    monkeypatch.setattr(client_sums, "check", lambda next_fn, **_: checked.append(next_fn))
    made = [_process(_aggregator()) for _ in range(2)]
    for process in (made[0], made[0], made[1], made[0]):
        _call(process, context)
    assert [id(each) for each in checked] == [id(each.next) for each in made]
    assert context.number == 4


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "around",
    [
        lambda sums: _AROUND.clipping_factory(1.0, _AROUND.zeroing_factory(2.0, sums)),
        lambda sums: _AROUND.zeroing_factory(
            1.0, sums, zeroed_count_sum_factory=_AROUND.SecureSumFactory(1, 0)
        ),
        lambda sums: _AROUND.concat_factory(tff.learning.add_debug_measurements(sums)),
    ],
)
def test_a_norm_around_it_that_is_fixed_is_not_refused(around: Any) -> None:
    client_sums.check(_process(around(_aggregator())).next)


def test_an_adaptive_norm_of_its_own_is_not_refused() -> None:
    aggregator = _aggregator(clip_norm=mfa.AdaptiveClip(1.0, update_period=1))
    client_sums.check(aggregator.create(_UPDATE).next)


def test_a_large_state_goes_to_the_worker_in_pieces_that_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three tiles of state vectors, of a megabyte each: in one message, two pieces and three."""
    blt = mfa.factorizations.blt(4, 2, mfa.participation.MinSeparation(2))
    type_of_update = tff.TensorType(np.float32, [140_000])
    process = _aggregator(blt, noise_storage="state").create(type_of_update)
    first, update = process.initialize(), np.ones(140_000, np.float32)
    joining, found = client_sums._joining, list[int]()

    def joined(kind: Any) -> Any:
        found.append(len(kind))
        return joining(kind)

    monkeypatch.setattr(client_sums, "_joining", joined)
    one, released = process.next(first, [update]), []
    for size in (2**30, 2**21, 2**10):
        monkeypatch.setattr(client_sums, "_BYTES_OF_PIECE", size)
        two = process.next(one.state, [tf.constant(update)])
        released.append((two.result, *processes.states_in(two.state)[0].history))
    assert found == [2, 3]
    for each in released[1:]:
        for one, other in zip(each, released[0], strict=True):
            np.testing.assert_array_equal(one, other)


_SENT = ("steps", "num_records", "least_steps")


def _rounds(kind: Any, told: Any) -> Any:
    """A process of two states that adds up updates, and counts clients, with no noise.

    Args:
      kind: The type of what clients send.
      told: From the two states, both numbers, to one that clients are told.
    """

    @tff.tensorflow.computation(np.float32, np.float32)
    def times(update: Any, number: Any) -> Any:
        sent = (
            tf.zeros([3], tf.int64) + tf.cast(update * number, tf.int64),
            tf.constant(1, tf.int64),
            tf.constant(-1, tf.int64),
        )
        return kind.python_container(zip(_SENT, sent, strict=True))

    @tff.tensorflow.computation(np.float32)
    def one(update: Any) -> Any:
        return 0.0 * update + 1.0

    state_type = tff.FederatedType((np.float32, np.float32), tff.SERVER)

    @tff.federated_computation(state_type, tff.FederatedType(np.float32, tff.CLIENTS))
    def next_fn(state: Any, value: Any) -> Any:
        number = tff.federated_broadcast(told(state))
        private = tff.federated_sum(tff.federated_map(times, (value, number)))
        count = tff.federated_sum(tff.federated_map(one, value))
        # The count of this round is what the next one has in the second state.
        return tff.federated_zip((state[1], count)), private

    return next_fn


def test_a_count_that_comes_back_after_two_rounds_is_found() -> None:
    kind = tff.to_type(
        collections.OrderedDict(
            zip(_SENT, (tff.TensorType(np.int64, [3]), np.int64, np.int64), strict=True)
        )
    )
    with refuses("federated_sum", error=UnnoisedSumError):
        client_sums.check(_rounds(kind, lambda state: state[0]))

    @tff.federated_computation
    def constant() -> Any:
        return tff.federated_value(2.0, tff.SERVER)

    client_sums.check(_rounds(kind, lambda state: constant()))


def test_a_process_without_noise_is_refused() -> None:
    process = _process(tff.aggregators.SumFactory())
    with refuses("federated_sum", "kernel [3, 2]", "bias [2]", error=UnnoisedSumError):
        client_sums.check(process.next)


def _with_another_sum(measured: Any) -> Any:
    """A process that adds up a function of the updates as well, without noise."""

    def measure(updates: Any) -> Any:
        return collections.OrderedDict(
            other=tff.federated_sum(tff.federated_map(measured, updates))
        )

    return tff.aggregators.add_measurements(_aggregator(), client_measurement_fn=measure)


def test_a_second_update_without_noise_is_refused_and_a_number_is_not() -> None:
    @tff.tensorflow.computation(_UPDATE)
    def same(update: Any) -> Any:
        return update

    @tff.tensorflow.computation(_UPDATE)
    def in_part(update: Any) -> Any:
        return update["bias"]

    process = _process(_with_another_sum(same))
    with pytest.raises(UnnoisedSumError):
        client_sums.check(process.next)
    _refused_at_its_first_call(process, "second sum")
    # Less than an update may be a metric, and is listed.
    process = _process(_with_another_sum(in_part))
    client_sums.check(process.next)
    assert any(
        each.tensors == (_ClientTensor("", (2,)),) and not each.is_noised
        for each in client_sums.of(process.next)
    )


def _sum(is_noised: bool, *shapes: tuple[int, ...]) -> _ClientSum:
    tensors = tuple(_ClientTensor(str(i), shape) for i, shape in enumerate(shapes))
    return _ClientSum("federated_sum", tensors, is_noised)


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        (_sum(False, (3, 2), (2,)), True),
        (_sum(False, (2,), (3, 2), (7,)), True),
        (_sum(False, (3, 2)), False),
        (_sum(False, (3, 2), (3, 2)), False),
        (_sum(True, (3, 2), (2,)), False),
        (_sum(False), False),
    ],
)
def test_shapes_are_compared_with_how_often_they_are_there(
    other: _ClientSum, is_refused: bool
) -> None:
    sums = (other, _sum(True, (3, 2), (2,), ()))
    if is_refused:
        with pytest.raises(UnnoisedSumError):
            client_sums._check_shapes(sums)
    else:
        client_sums._check_shapes(sums)
    # Of updates that are single numbers, nothing tells a metric from an update.
    client_sums._check_shapes((other, _sum(True, (), ())))
