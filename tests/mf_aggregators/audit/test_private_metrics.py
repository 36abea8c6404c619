"""Audits of private metrics, intact and broken: each false alarm in one of a million runs."""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mf_aggregators import accounting, workloads
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.audit import statistics
from mf_aggregators.factorizations import banded
from mf_aggregators.participation import MinSeparation
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery
from tests.mf_aggregators import broken_adaptive_queries, random_recursions
from tests.mf_aggregators.tff.small_aggregators import adaptive_query

FALSE_ALARM, _DELTA = 1e-6, 1e-5
_NUM_ROUNDS, _SCHEMA, _MULTIPLIER = 3, MinSeparation(2), 1.0 / 3.0
_FACTORIZATION = banded(workloads.prefix_sum(_NUM_ROUNDS), 2, participation=_SCHEMA)
# Twice the noise on the updates: metrics and indicator have three quarters of the squared mu.
_METRICS = PrivateMetrics(
    (BoundedMetric("loss", 0.0, 10.0), BoundedMetric("accuracy", 0.0, 1.0)), noise_increase=1.0
)
_ROUNDS = (0, 2)


def _not_constant(part: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=part, shape=part.shape)


@functools.cache
def _runs(kind: type) -> Any:
    """Runs a query many times at once: from (m, 2) updates and metrics by round, (m, n, 3)."""
    sensitivity = _FACTORIZATION.sensitivity(_SCHEMA).value
    query = adaptive_query(
        random_recursions.divided(_FACTORIZATION.noise_recursion(), sensitivity),
        tf.TensorSpec([], tf.float64),
        clip=AdaptiveClip.constant(1.0),
        noise_multiplier=_MULTIPLIER,
        clients_per_round=1,
        metrics=_METRICS,
        kind=kind,
    )

    def one(canary: tf.Tensor) -> tf.Tensor:
        # A graph whose first state is a constant is refused: here each run draws its own seed.
        state, released = tf.nest.map_structure(_not_constant, query.initial_global_state()), []
        for i in range(_NUM_ROUNDS):
            params = query.derive_sample_params(state)
            sums = query.initial_sample_state()
            if i in _ROUNDS:
                metrics = {"loss": 20.0 * canary[1] - 5.0, "accuracy": canary[1]}
                record = {"update": canary[0], "metrics": metrics}
                with_canary = query.preprocess_record(params, record)
                sums = tf.nest.map_structure(
                    lambda there, gone: tf.where(canary[2] > 0.0, there, gone), with_canary, sums
                )
            result, state, _ = query.get_noised_result(sums, state)
            found = query.derive_metrics(state)
            means = found["private_metrics"]
            released.append(
                tf.stack(
                    [
                        result,
                        found["unclipped_fraction"] - 0.5,
                        (means["loss"] - 5.0) / 10.0,
                        means["accuracy"] - 0.5,
                    ]
                )
            )
        return tf.stack(released)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)], autograph=False)
    def all_runs(canaries: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(one, canaries)

    return lambda canary, number: np.array(all_runs(np.tile(np.array(canary, float), (number, 1))))


def _mu_lower_bound(kind: type, update: float, trials: int) -> float:
    """What a likelihood-ratio test shows of mu, whose attacker learns the noise of coordinates."""
    run = _runs(kind)
    strategy = _FACTORIZATION.strategy_matrix()
    stddevs = np.std(strategy @ run((0.0, 0.0, 0.0), max(100, trials)), axis=(0, 1))
    signal = np.zeros((_NUM_ROUNDS, 4))
    # The metrics at the upper ends of their ranges, an update within the norm.
    signal[list(_ROUNDS)] = [update, 0.5, 0.5, 0.5]
    expected = strategy @ signal / stddevs
    weights = expected / np.linalg.norm(expected)
    absent, present = (
        np.einsum("mij,ij->m", strategy @ run((update, 1.0, there), trials) / stddevs, weights)
        for there in (0.0, 1.0)
    )
    power = float(np.linalg.norm(expected))
    (threshold,) = statistics.choose_thresholds(power, trials, trials, FALSE_ALARM / 2.0, ())
    rates = statistics.ErrorRates.of_scores(absent, present, threshold, FALSE_ALARM / 2.0)
    return rates.mu_lower_bound


# The short test has the covariance of what is released, in ``tff/test_private_metrics.py``.
@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize(
    ("update", "trials", "comes_to"),
    # What such attacks show of a mu of 3, and of the sqrt(0.75) of it that metrics have, less
    # five standard deviations.
    [(1.0, 400, 1.5), (0.0, 400, 1.2)],
)
def test_an_intact_mechanism_keeps_its_claim_and_the_attack_comes_close(
    update: float, trials: int, comes_to: float
) -> None:
    found = _mu_lower_bound(AdaptiveClipSumQuery, update, trials)
    assert comes_to < found <= 1.0 / _MULTIPLIER
    stated = accounting.epsilon(_MULTIPLIER, _DELTA)
    assert statistics.epsilon_of_mu(found, _DELTA) <= stated


# The short test breaks the query in ``tff/test_private_metrics.py``.
@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("update", [1.0, 0.0], ids=["update and metrics", "metrics alone"])
def test_metrics_with_half_the_noise_are_found(update: float) -> None:
    found = _mu_lower_bound(broken_adaptive_queries.MetricsWithHalfTheNoise, update, 600)
    assert found > 1.0 / _MULTIPLIER
