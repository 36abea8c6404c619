"""Audits of clip norms that adapt, intact and broken: each false alarm in one of a million runs."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import mf_aggregators as mfa
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.audit import Claim
from mf_aggregators.audit.adaptive_clipping import ClippingResult, audit_clipping
from mf_aggregators.participation import MinSeparation
from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery
from tests.mf_aggregators import broken_adaptive_queries, random_recursions
from tests.mf_aggregators.tff.small_aggregators import adaptive_query
from tests.refusals import refuses

FALSE_ALARM = 1e-6
_NUM_ROUNDS, _CLIENTS = 3, 7
_SCHEMA = MinSeparation(2)
_MULTIPLIER = 1.0 / 3.0
# The indicators have 83 % of the squared mu.
_CLIP = AdaptiveClip(0.3, update_period=1, clipped_count_stddev=0.55 * _MULTIPLIER)


def _audit(kind: type | None, trials: int) -> ClippingResult:
    """Audits a kind of query in a graph; None for the aggregator in NumPy."""
    factorization = mfa.factorizations.banded(
        mfa.workloads.prefix_sum(_NUM_ROUNDS), 2, participation=_SCHEMA
    )
    sensitivity = factorization.sensitivity(_SCHEMA).value
    recursion = random_recursions.divided(factorization.noise_recursion(), sensitivity)

    def build(specs: Any) -> Any:
        assert kind is not None
        return adaptive_query(
            recursion,
            specs,
            kind=kind,
            clip=_CLIP,
            noise_multiplier=_MULTIPLIER,
            clients_per_round=_CLIENTS,
        )

    mechanism = mfa.Mechanism(factorization, _SCHEMA, _MULTIPLIER)
    claim = Claim(mechanism, _CLIP.initial_norm, _CLIENTS)
    built: Callable[[Any], Any] | mfa.Aggregator = build
    if kind is None:
        built = mfa.Aggregator(mechanism, _CLIP, _CLIENTS)
    return audit_clipping(built, claim, trials=trials, false_alarm_rate=FALSE_ALARM)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("place", ["graph", "numpy"])
def test_an_intact_mechanism_keeps_its_claim_and_the_attack_comes_close(place: str) -> None:
    result = _audit(AdaptiveClipSumQuery if place == "graph" else None, 500)
    assert not result.exceeded
    # What 500 runs with and without the client can show of mu = 3 at this rate, and no less.
    assert result.mu_lower_bound > 1.6
    # The attacker needs the indicator for that: updates alone have sqrt(0.17) of mu.
    assert result.power == pytest.approx(3.0, rel=0.2)


# The short test breaks the query in ``tff/test_adaptive_query.py``.
@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "trials"), [("IndicatorWithoutNoise", 300), ("IndicatorLeftOut", 2000)]
)
def test_broken_mechanisms_are_found(name: str, trials: int) -> None:
    result = _audit(getattr(broken_adaptive_queries, name), trials)
    assert result.exceeded


@pytest.mark.long
def test_results_that_are_not_finite_are_refused() -> None:
    class _Infinite(AdaptiveClipSumQuery):
        def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
            result, state = super().get_noised_result(sample_state, global_state)
            return result + np.inf, state

    with refuses("finite"):
        _audit(_Infinite, 10)
