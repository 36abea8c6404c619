"""Noise of the aggregator's rounds: its distribution, where it is kept, what it is added to."""

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.factorizations.factorization import bands_of_matrix
from mf_aggregators.noise import NOISE_FORMAT
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from mf_aggregators.tff import processes
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.mf_aggregators.tff.small_aggregators import (
    NUM_ROUNDS,
    PARTICIPATION,
    make_aggregator,
    make_process,
    process_with_noise,
    query_rounds,
    small_matrix,
)
from tests.refusals import refuses

pytestmark = pytest.mark.begun_first

_Maker = Callable[[int], mfa.factorizations.Factorization]


def _banded(num_rounds: int) -> mfa.factorizations.Factorization:
    return mfa.factorizations.banded(mfa.workloads.prefix_sum(num_rounds), 8)


_MECHANISMS: dict[str, _Maker] = {
    "identity": mfa.factorizations.identity,
    "banded": _banded,
    "optimal": lambda n: mfa.factorizations.optimal(mfa.workloads.prefix_sum(n)),
    "tree_online": mfa.factorizations.tree_aggregation,
    "tree_full": lambda n: mfa.factorizations.tree_aggregation(n, "full"),
    "toeplitz": lambda n: mfa.factorizations.toeplitz(n, 8, equal_column_norms=True),
    "toeplitz_of_all_bands": lambda n: mfa.factorizations.toeplitz(n, equal_column_norms=True),
    "blt": lambda n: mfa.factorizations.blt(n, 3, mfa.participation.MinSeparation(8)),
    "banded_inverse": lambda n: mfa.factorizations.banded_inverse(
        n, 8, mfa.participation.MinSeparation(8)
    ),
    "structured": lambda n: mfa.factorizations.structured(mfa.factorizations.toeplitz(n), 2, 2),
}


def _saved_and_restored(state: Any, structure: Any, directory: pathlib.Path) -> Any:
    manager = tff.program.FileProgramStateManager(directory)
    asyncio.run(manager.save(state, version=1))
    return asyncio.run(manager.load(1, structure))


# One of each kind of recursion.
_KINDS = ("identity", "banded", "optimal", "tree_online", "blt", "banded_inverse")


# Several blocks of rounds, for noise on disk, in each.
@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize(
    ("mechanism", "storage", "num_rounds"),
    [
        # In the state, tests of the rows have every kind, too, and so has the comparison with the
        # aggregator in NumPy.
        *((mechanism, "state", 14) for mechanism in (*_KINDS, "structured")),
        # On disk, rows that follow from rows.
        *((mechanism, "disk", 64 if mechanism in _KINDS else 14) for mechanism in _MECHANISMS),
    ],
)
def test_the_noise_is_that_of_the_mechanism_across_a_save_and_restore(
    mechanism: str, storage: str, num_rounds: int, tmp_path: pathlib.Path
) -> None:
    """N^-1 Y / stddev is white over all rounds; a new process and worker go on in the middle.

    N is the matrix of the streamed rows, C^-1 but for trees. Each coordinate is a draw of
    n entries of Z, whose means, variances, covariances and distribution are tested. A false
    alarm once in ten million runs. A worker holds nothing of any mechanism: that another one
    goes on is tested for one of each kind, and on disk.
    """
    factorization = _MECHANISMS[mechanism](num_rounds)
    dimension, multiplier, clip_norm, cohort = 2000, 0.7, 3.0, 5

    def build() -> tff.templates.AggregationProcess:
        return make_process(
            tff.TensorType(np.float32, [dimension]),
            factorization=factorization,
            noise_multiplier=multiplier,
            clip_norm=clip_norm,
            clients_per_round=cohort,
            noise_storage=storage,
            noise_directory=tmp_path / "noise",
        )

    process = build()
    state = process.initialize()
    rows = []
    for i in range(num_rounds):
        if i == num_rounds // 2 + 2:
            if num_rounds == 64:
                processes.end_workers()
            process = build()
            state = _saved_and_restored(state, process.initialize(), tmp_path / "states")
        output = process.next(state, [np.zeros(dimension, np.float32)])
        rows.append(output.result)
        state = output.state
    stddev = multiplier * clip_norm * factorization.sensitivity(PARTICIPATION)
    streamed = noise_rows.dense(factorization.noise_recursion())
    whitened = np.linalg.solve(streamed, np.array(rows, np.float64)) * cohort / stddev
    check_standard_normal(whitened.T)


def _noised(directory: pathlib.Path, storage: str) -> Any:
    return make_process(
        tff.TensorType(np.float32, [3]),
        noise_multiplier=1.0,
        noise_storage=storage,
        noise_directory=directory,
    )


@pytest.mark.parametrize("storage", ["state", pytest.param("disk", marks=pytest.mark.long)])
def test_the_noise_of_a_round_is_not_added_to_other_data(
    storage: str, tmp_path: pathlib.Path
) -> None:
    """From an older state, the same data is released again, and other data is refused."""
    process = _noised(tmp_path / "noise", storage)
    state = process.initialize()
    cohort = [np.array([0.3, 0.1, -0.2], np.float32), np.array([0.0, 0.5, 0.1], np.float32)]
    other = [np.array([0.3, 0.1, -0.2], np.float32), np.array([0.0, 0.5, 0.2], np.float32)]
    first = process.next(state, cohort)
    second = process.next(first.state, other)
    again = _noised(tmp_path / "noise", storage)
    np.testing.assert_array_equal(again.next(state, cohort).result, first.result)
    # The same updates summed in another order.
    np.testing.assert_allclose(again.next(state, cohort[::-1]).result, first.result, atol=1e-6)
    with refuses("released", error=Exception):
        again.next(state, other)
    np.testing.assert_array_equal(again.next(first.state, other).result, second.result)
    # Another run has noise of its own.
    again.next(again.initialize(), other)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("storage", ["state", "disk"])
@pytest.mark.parametrize("size_of_cohort", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_first_round_of_nothing_is_recorded_like_any_other(
    storage: str, size_of_cohort: int, tmp_path: pathlib.Path
) -> None:
    """An empty first cohort, or updates of zeros, do not leave the noise free for a client."""
    process = _noised(tmp_path / "noise", storage)
    state, other = process.initialize(), process.initialize()
    nothing = [np.zeros(3, np.float32)] * size_of_cohort
    client = [np.array([0.3, 0.1, -0.2], np.float32)]
    first = process.next(state, nothing)
    again = _noised(tmp_path / "noise", storage)
    for each in (process, again):
        with refuses("released", error=Exception):
            each.next(state, client)
        np.testing.assert_array_equal(each.next(state, nothing).result, first.result)
    # Another start has noise of its own, and its first round may be of anything.
    released = again.next(other, client)
    assert np.all(np.isfinite(released.result))
    with refuses("released", error=Exception):
        again.next(other, nothing)
    again.next(first.state, client)


@pytest.mark.long
def test_a_start_is_no_round(tmp_path: pathlib.Path) -> None:
    """Nothing is drawn or recorded before the first round."""
    process = _noised(tmp_path / "noise", "disk")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    states = [process.initialize() for _ in range(2)]
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not np.array_equal(*(processes.states_in(state)[0].seed for state in states))
    for state in states:
        # What tells an initial state from others in TFF, whose event is a placeholder.
        assert state.is_init_state
        assert not process.next(state, []).state.is_init_state


_VALUE = tff.TensorType(np.float32, [3])
_OTHER_PROCESSES: dict[str, dict[str, Any]] = {
    "noise multiplier": {"noise_multiplier": 2.0},
    "clip norm": {"clip_norm": 1.5},
    "clients per round": {"clients_per_round": 5},
    "matrix": {"factorization": mfa.factorizations.banded(NUM_ROUNDS, 2)},
    "rounds": {"factorization": mfa.factorizations.banded(2 * NUM_ROUNDS, 3)},
    "schema": {"participation": mfa.participation.MinSeparation(2)},
    "storage": {"noise_storage": "disk"},
    "largest cohort": {"largest_cohort": 50},
}


def _query(**changes: Any) -> Any:
    options = {"noise_multiplier": 1.0, "noise_storage": "state", **changes}
    return make_aggregator(**options).query(tf.TensorSpec([3], tf.float32))


def _goes_on(query: Any, state: Any) -> None:
    query.get_noised_result(query.initial_sample_state(), state)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("change", _OTHER_PROCESSES)
def test_a_state_of_another_process_is_refused(change: str) -> None:
    """Two sums under one row at two scales tell the sum; and noise is for one mechanism."""
    state = _query().initial_global_state()
    _goes_on(_query(), state)
    with refuses("fresh state", error=tf.errors.InvalidArgumentError):
        _goes_on(_query(**_OTHER_PROCESSES[change]), state)


def test_states_are_of_one_rule_of_a_clip_norm_and_of_one_choice_of_metrics() -> None:
    """A process compares their fingerprints, as the test above has it."""
    clip, spec = mfa.AdaptiveClip(0.5), tf.TensorSpec([3], tf.float32)
    changes: list[dict[str, Any]] = [
        {"clip_norm": clip},
        {"clip_norm": mfa.AdaptiveClip(0.5, update_period=2)},
        {"clip_norm": mfa.AdaptiveClip(0.25)},
        {"clip_norm": clip, "clients_per_round": 5},
        *(
            {"clip_norm": clip, "metrics": PrivateMetrics((BoundedMetric("loss", 0.0, largest),))}
            for largest in (1.0, 2.0)
        ),
    ]
    aggregators = [make_aggregator(noise_multiplier=1.0, **change) for change in changes]
    queries = [each._query(spec, is_recorded=False) for each in aggregators]
    assert len({query.mechanism.fingerprints for query in queries}) == len(changes)


@pytest.mark.long
def test_a_longer_plan_does_not_go_on_with_the_noise_of_a_shorter_one() -> None:
    """Calibrated anew for twice the rounds, noise is larger, and the first rows had less."""
    process = []
    for rounds, most in ((NUM_ROUNDS, 3), (2 * NUM_ROUNDS, 6)):
        mechanism = mfa.calibrate(
            mfa.factorizations.toeplitz(rounds, 2),
            mfa.participation.MinSeparation(2, most),
            epsilon=8.0,
            delta=1e-5,
        )
        process.append(
            mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=4).create(_VALUE)
        )
    state = process[0].initialize()
    for _ in range(NUM_ROUNDS):
        state = process[0].next(state, [np.ones(3, np.float32)]).state
    with refuses("fresh state", error=processes.RefusalError):
        process[1].next(state, [np.ones(3, np.float32)])


def test_the_state_of_an_older_version_is_refused() -> None:
    """It had the number of the noise format where the fingerprint is."""
    query = _query()
    state = query.initial_global_state()
    older = state._replace(fingerprint=tf.constant(NOISE_FORMAT, tf.int64))
    with refuses("version 2", error=tf.errors.InvalidArgumentError):
        _goes_on(query, older)


def test_without_a_directory_a_row_is_added_to_one_sum() -> None:
    """By any process of an aggregator in this Python process."""
    process = process_with_noise()
    another = make_process(tff.TensorType(np.float32, [2]), noise_multiplier=1.0)
    state = process.initialize()
    released = process.next(state, [np.ones(2, np.float32)])
    for each in (process, another):
        again = each.next(state, [np.ones(2, np.float32)])
        np.testing.assert_array_equal(again.result, released.result)
        with refuses("released", error=processes.RefusalError):
            each.next(state, [np.full(2, 0.1, np.float32)])


@pytest.mark.parametrize("storage", ["state", pytest.param("disk", marks=pytest.mark.long)])
def test_a_spent_round_is_never_released_and_later_rows_stay(
    storage: str, tmp_path: pathlib.Path
) -> None:
    options: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "noise_storage": storage,
        "noise_directory": tmp_path / "noise",
        "clip_norm": mfa.AdaptiveClip(1.0),
    }
    made = make_aggregator(**options)
    process, client = made.create(_VALUE), [np.full(3, 0.2, np.float32)]
    state = process.next(process.initialize(), client).state
    undisturbed = process.next(process.next(state, []).state, client)
    # The round that was lost stood in the record, and the process that goes on is another one.
    after = make_aggregator(**options).spend({"aggregator": state}, _VALUE)["aggregator"]
    with refuses("spent", error=processes.RefusalError):
        process.next(state, [])
    found = process.next(after, client)
    ours, theirs = (
        each.state.query_state.numerator_state.mechanism for each in (found, undisturbed)
    )
    assert int(ours.round_index) == 3
    tf.nest.map_structure(np.testing.assert_array_equal, ours, theirs)
    # An empty round moves the norm, and a spent one does not.
    assert after.query_state.numerator_state.clip == state.query_state.numerator_state.clip
    with refuses("fresh state", error=processes.RefusalError):
        make_aggregator(**{**options, "noise_multiplier": 2.0}).spend(state, _VALUE)
    with refuses("noise states"):
        made.spend((state, state), _VALUE)


def test_a_state_of_other_tensors_is_not_spent() -> None:
    state = _query().initial_global_state()
    with refuses("fresh state", error=processes.RefusalError):
        make_aggregator(noise_multiplier=1.0).spend(state, tff.TensorType(np.float32, [4]))


def test_scaling_the_matrix_does_not_change_a_run() -> None:
    bands = bands_of_matrix(small_matrix().strategy_matrix(), 3)

    def row(factorization: mfa.factorizations.Factorization, dtype: tf.DType) -> np.ndarray:
        specs = tf.TensorSpec([5], dtype)
        return query_rounds(specs, factorization=factorization, noise_multiplier=1.0, seed=3)[0][0]

    for dtype, scale in ((tf.float32, 1e-90), (tf.float64, 1e90)):
        unscaled, scaled = (
            row(mfa.factorizations.BandedFactorization(factor * bands), dtype)
            for factor in (1.0, scale)
        )
        np.testing.assert_allclose(scaled, unscaled, rtol=1e-5)
    dense = mfa.factorizations.DenseFactorization(1e-90 * small_matrix().strategy_matrix())
    np.testing.assert_allclose(row(dense, tf.float64), unscaled, rtol=1e-5)


def test_a_round_past_the_last_one_fails_and_says_why() -> None:
    process = process_with_noise()
    state = process.initialize()
    for _ in range(NUM_ROUNDS):
        state = process.next(state, [np.zeros(2, np.float32)]).state
    with pytest.raises(processes.RefusalError) as raised:
        process.next(state, [np.zeros(2, np.float32)])
    assert str(raised.value) == (
        "The factorization has noise for 6 rounds, and one more round was asked for: its noise row "
        "would repeat an earlier one. Stop training, or extend the mechanism."
    )
