"""Audits of clip norms that adapt, intact and broken: each false alarm in one of a million runs."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.aggregator import AggregatorState
from mf_aggregators.audit import Claim
from mf_aggregators.audit.adaptive_clipping import ClippingResult, audit_clipping
from mf_aggregators.participation import MinSeparation
from tests.refusals import refuses

FALSE_ALARM = 1e-6
_NUM_ROUNDS, _CLIENTS = 3, 7
_SCHEMA = MinSeparation(2)
_MULTIPLIER = 1.0 / 3.0
# The indicators have 83 % of the squared mu.
_CLIP = AdaptiveClip(0.3, update_period=1, clipped_count_stddev=0.55 * _MULTIPLIER)


class _IndicatorWithoutNoise(mfa.Aggregator):
    """The fraction is released as it is."""

    def next(self, state: AggregatorState, updates: Any) -> tuple[AggregatorState, Any]:
        updates = list(updates)
        assert state.clip is not None
        within = sum(np.linalg.norm(each) <= state.clip.norm for each in updates)
        self._fraction = 0.5 + float(within - 0.5 * len(updates)) / _CLIENTS
        return super().next(state, updates)

    def metrics(self, state: AggregatorState) -> dict[str, float]:
        return {**super().metrics(state), "unclipped_fraction": self._fraction}


class _Infinite(mfa.Aggregator):
    """Releases are infinite."""

    def next(self, state: AggregatorState, updates: Any) -> tuple[AggregatorState, Any]:
        after, mean = super().next(state, updates)
        return after, mean + np.inf


def _audit(trials: int, kind: type[mfa.Aggregator] = mfa.Aggregator, **drawn: Any) -> Any:
    """Audits an aggregator of a kind, of a mechanism that may have other noise than is claimed."""
    factorization = mfa.factorizations.banded(_NUM_ROUNDS, 2, participation=_SCHEMA)
    mechanism = mfa.Mechanism(factorization, _SCHEMA, _MULTIPLIER)
    aggregator = kind(dataclasses.replace(mechanism, **drawn), _CLIP, _CLIENTS)
    claim = Claim(mechanism, _CLIP.initial_norm, _CLIENTS)
    return audit_clipping(aggregator, claim, trials=trials, false_alarm_rate=FALSE_ALARM)


@pytest.mark.long
def test_an_intact_mechanism_keeps_its_claim_and_the_attack_comes_close() -> None:
    result: ClippingResult = _audit(500)
    assert not result.exceeded
    # What 500 runs with and without the client can show of mu = 3 at this rate, and no less.
    assert result.mu_lower_bound > 1.6
    # The attacker needs the indicator for that: updates alone have sqrt(0.17) of mu.
    assert result.power == pytest.approx(3.0, rel=0.2)


# The short test breaks TFF's query in ``tff/test_adaptive_query.py``.
@pytest.mark.long
def test_broken_mechanisms_are_found() -> None:
    assert _audit(300, _IndicatorWithoutNoise).exceeded
    # Noise as for updates alone: the indicator is not in the sensitivity.
    norm = NoiseSplit.of(_MULTIPLIER, 0.55 * _MULTIPLIER).vector_norm
    assert _audit(2000, noise_multiplier=_MULTIPLIER / norm).exceeded


def test_results_that_are_not_finite_are_refused() -> None:
    with refuses("finite"):
        _audit(10, _Infinite)
