"""The attack on bits: it tells floats of noise at once, and finds nothing in integers."""

import math
import types
from typing import Any

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import mf_aggregators as mfa
from mf_aggregators.audit import Claim
from mf_aggregators.audit.bits import audit_bits
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import MinSeparation
from mf_aggregators.tff.dp_query import MatrixFactorizationSumQuery
from tests.mf_aggregators import small_mechanisms

FALSE_ALARM = 1e-6
_NUM_ROUNDS = 8
_SCHEMA = MinSeparation(3)
_CLIP_NORM = 2.0
_CLIENTS_PER_ROUND = 7
_FACTORIZATIONS = small_mechanisms.factorizations(_NUM_ROUNDS)
_BANDED, _BLT = _FACTORIZATIONS[3], _FACTORIZATIONS[11]


def _claim(noise_multiplier: float) -> Claim:
    mechanism = mfa.Mechanism(_BANDED, _SCHEMA, noise_multiplier)
    return Claim(mechanism, _CLIP_NORM, _CLIENTS_PER_ROUND)


def _aggregator(
    factorization: Factorization, noise_multiplier: float, storage: str, place: str = "tff"
) -> Any:
    if place == "numpy":
        mechanism = mfa.Mechanism(factorization, _SCHEMA, noise_multiplier)
        return mfa.Aggregator(mechanism, _CLIP_NORM, _CLIENTS_PER_ROUND, noise_storage=storage)
    return mfa.mf_dp_aggregator(
        factorization,
        participation=_SCHEMA,
        noise_multiplier=noise_multiplier,
        clip_norm=_CLIP_NORM,
        clients_per_round=_CLIENTS_PER_ROUND,
        noise_storage=storage,
    )


class _FloatAggregator:
    """What version 0.5.0 did, in NumPy: floats of noise are added to a float sum."""

    def __init__(self, factorization: Factorization, noise_multiplier: float) -> None:
        self._factorization = factorization
        self._deviation = noise_multiplier * _CLIP_NORM * factorization.sensitivity(_SCHEMA).value
        self._value_type: Any = None

    def create(self, value_type: Any) -> "_FloatAggregator":
        self._value_type = value_type
        return self

    def initialize(self) -> tuple[int, np.ndarray]:
        z = np.random.default_rng().normal(size=(_NUM_ROUNDS, *self._value_type.shape))
        rows = self._deviation * self._factorization.noise_rows(z)
        return 0, rows.astype(self._value_type.dtype)

    def next(self, state: tuple[int, np.ndarray], clients: list[np.ndarray]) -> Any:
        index, noise = state
        total = np.sum(clients, axis=0) + noise[index]
        mean = total / total.dtype.type(_CLIENTS_PER_ROUND)
        return types.SimpleNamespace(state=(index + 1, noise), result=mean)


@pytest.mark.parametrize("noise_multiplier", [1.0 / 3.0, 1.0, 8.0, 30.0])
@pytest.mark.parametrize("factorization", [_FACTORIZATIONS[0], _BANDED, _BLT], ids=str)
def test_floats_of_noise_are_told_at_once(
    factorization: Factorization, noise_multiplier: float
) -> None:
    """At an epsilon of 18 and one of 0.1, in float64 as well. Guesses are wrong by chance alone.

    Where there is much noise, few numbers of a block are refuted, and sometimes none.
    """
    result = audit_bits(
        lambda: _FloatAggregator(factorization, noise_multiplier),
        _claim(noise_multiplier),
        false_alarm_rate=FALSE_ALARM,
    )
    assert result.exceeded
    assert result.right >= (0.99 if noise_multiplier <= 8.0 else 0.85) * result.trials
    assert result.mu_lower_bound > 1.0 / noise_multiplier


def _with_floats(
    query: MatrixFactorizationSumQuery, sample_state: Any, global_state: Any
) -> tuple[Any, Any, dp_accounting.DpEvent]:
    """Adds noise to the sum in the tensors' own floats, before anything is an integer."""
    rows, step, noise_state = query._noise.next_row(global_state)
    noised = [
        tf.cast(tf.cast(steps, tf.float64) * query._unit, spec.dtype)
        + tf.cast(tf.cast(row, tf.float64) * step * query._noise_stddev, spec.dtype)
        for steps, row, spec in zip(
            tf.nest.flatten(sample_state.steps), rows, query._specs, strict=True
        )
    ]
    result = tf.nest.pack_sequence_as(sample_state.steps, noised)
    return result, noise_state, dp_accounting.UnsupportedDpEvent()


@pytest.mark.long
def test_noise_that_is_added_in_floats_is_told_through_tff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixFactorizationSumQuery, "get_noised_result", _with_floats)
    # It refuses such a query.
    monkeypatch.setattr("mf_aggregators.tff.graph_check.check", lambda query: None)
    result = audit_bits(
        lambda: _aggregator(_BANDED, 2.0, "state"), _claim(2.0), false_alarm_rate=FALSE_ALARM
    )
    assert result.exceeded


@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
    ("index", "storage", "place"),
    [
        (3, "state", "numpy"),
        (11, "disk", "numpy"),
        *(
            pytest.param(index, storage, "tff", marks=pytest.mark.long)
            for index in range(len(_FACTORIZATIONS))
            for storage in ("state", "disk")
        ),
    ],
    ids=str,
)
def test_bits_of_the_aggregator_tell_nothing(index: int, storage: str, place: str) -> None:
    """One guess in two is right, and 2 % more by the claim: false alarms once in a million runs."""
    noise_multiplier = 8.0
    factorization = _FACTORIZATIONS[index]
    result = audit_bits(
        lambda: _aggregator(factorization, noise_multiplier, storage, place),
        _claim(noise_multiplier),
        false_alarm_rate=FALSE_ALARM,
    )
    assert not result.exceeded
    assert result.right <= result.largest_right < 0.9 * result.trials


def test_what_is_allowed_is_the_tail_of_a_binomial() -> None:
    class _Guessing(_FloatAggregator):
        """Releases what depends on no client."""

        def next(self, state: tuple[int, np.ndarray], clients: list[np.ndarray]) -> Any:
            return super().next(state, [np.zeros_like(clients[0])])

    result = audit_bits(
        lambda: _Guessing(_BANDED, 1.0), _claim(1.0), false_alarm_rate=FALSE_ALARM, seed=3
    )
    chance = scipy.stats.norm.cdf(0.5)
    tail = scipy.stats.binom.sf(result.largest_right, result.trials, chance)
    assert (
        tail <= FALSE_ALARM < scipy.stats.binom.sf(result.largest_right - 1, result.trials, chance)
    )
    assert not result.exceeded
    assert abs(result.right - result.trials / 2) < 6.0 * math.sqrt(result.trials / 4)
    assert result.mu_lower_bound < 1.0
