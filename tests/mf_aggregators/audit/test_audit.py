"""Empirical audits of the aggregator, intact and broken.

Each audit says "violated" of an intact mechanism with probability at most FALSE_ALARM. Where
what TensorFlow Federated executes does not matter, an aggregator in NumPy stands for ours; that
the noise rows of ours are those of every mechanism is tested with the aggregator.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import mf_aggregators as mfa
from mf_aggregators import audit as audits
from mf_aggregators.audit import (
    LARGE_DELTA,
    AuditResult,
    Claim,
    audit,
    audit_drawn,
    statistics,
)
from mf_aggregators.audit.statistics import NoiseModel
from mf_aggregators.factorizations import Factorization
from mf_aggregators.factorizations.factorization import bands_of_matrix
from mf_aggregators.kernel.rows import BandedNoise
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparation,
    Participation,
    PoissonSampling,
    SingleParticipation,
)
from mf_aggregators.tff import graph_check
from mf_aggregators.tff.tensor_rows import SegmentRows
from tests.mf_aggregators import broken_clipping
from tests.mf_aggregators.float_aggregator import FloatAggregator
from tests.mf_aggregators.random_recursions import banded_rows
from tests.refusals import refuses

FALSE_ALARM = 1e-6

_NUM_ROUNDS = 8
_WORKLOAD = mfa.workloads.prefix_sum(_NUM_ROUNDS)
_SCHEMAS: dict[str, Participation] = {"single": SingleParticipation(), "min_sep": MinSeparation(3)}
_MECHANISMS: dict[str, Callable[[Participation], Factorization]] = {
    "identity": lambda schema: mfa.factorizations.identity(_NUM_ROUNDS),
    "tree": lambda schema: mfa.factorizations.tree_aggregation(_NUM_ROUNDS),
    "banded": lambda schema: mfa.factorizations.banded(_WORKLOAD, 2, participation=schema),
    "blt": lambda schema: mfa.factorizations.blt(_NUM_ROUNDS, 2, schema),
}
# mu = 3: epsilon 18.2 at delta 1e-6, and 7.5 at delta 0.1.
_NOISE_MULTIPLIER = 1.0 / 3.0
_CLIP_NORM = 2.0
_CLIENTS_PER_ROUND = 7


def _claim(schema: Participation, noise_multiplier: float = _NOISE_MULTIPLIER) -> Claim:
    # The attack does not look at the matrix, and epsilon depends on the noise multiplier alone.
    matrix = mfa.factorizations.identity(_NUM_ROUNDS)
    mechanism = mfa.Mechanism(matrix, schema, noise_multiplier)
    return Claim(mechanism, _CLIP_NORM, _CLIENTS_PER_ROUND)


def _aggregator(
    factorization: Factorization,
    schema: Participation,
    noise_factor: float = 1.0,
    seed: int | None = None,
) -> Any:
    return mfa.mf_dp_aggregator(
        factorization,
        participation=schema,
        noise_multiplier=noise_factor * _NOISE_MULTIPLIER,
        allow_no_noise=True,
        clip_norm=_CLIP_NORM,
        clients_per_round=_CLIENTS_PER_ROUND,
        seed=seed,
    )


def _aggregator_in_numpy(factorization: Factorization, schema: Participation) -> mfa.Aggregator:
    mechanism = mfa.Mechanism(factorization, schema, _NOISE_MULTIPLIER)
    return mfa.Aggregator(mechanism, _CLIP_NORM, _CLIENTS_PER_ROUND)


def _float_aggregator(
    factorization: Factorization, schema: Participation, noise_factor: float = 1.0
) -> FloatAggregator:
    sensitivity = factorization.sensitivity(schema).value
    stddev = noise_factor * _NOISE_MULTIPLIER * _CLIP_NORM * sensitivity
    return FloatAggregator(factorization, stddev, _CLIP_NORM, _CLIENTS_PER_ROUND)


_INTACT: dict[str, Callable[..., Any]] = {"tff": _aggregator, "numpy": _float_aggregator}


@pytest.mark.long_cases(1)
@pytest.mark.short_cases(3)
@pytest.mark.parametrize("schema", _SCHEMAS)
@pytest.mark.parametrize("mechanism", _MECHANISMS)
@pytest.mark.parametrize("place", ["numpy", pytest.param("tff", marks=pytest.mark.long)])
def test_every_intact_mechanism_leaks_what_it_claims_and_no_more(
    mechanism: str, schema: str, place: str
) -> None:
    _check_intact(mechanism, schema, _INTACT[place])


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("mechanism", ["banded", "blt"])
def test_the_aggregator_leaks_what_it_claims_and_no_more(mechanism: str) -> None:
    _check_intact(mechanism, "min_sep", _aggregator_in_numpy)


def _check_intact(mechanism: str, schema: str, make: Callable[..., Any]) -> None:
    """A lower bound of at least 70 % of the claimed epsilon, which it does not exceed.

    "Exceeded" is a false alarm with probability FALSE_ALARM at most. The expected bound is
    83 % of the claim or more, over ten of its standard deviations above 70 %.
    """
    participation = _SCHEMAS[schema]
    factorization = _MECHANISMS[mechanism](participation)
    result = audit(
        lambda: make(factorization, participation),
        _claim(participation),
        canaries=2000,
        false_alarm_rate=FALSE_ALARM,
    )
    assert not result.exceeded
    assert 0.7 * result.epsilon <= result.epsilon_lower_bound <= result.epsilon
    assert result.epsilon == mfa.accounting.epsilon(_NOISE_MULTIPLIER, 1e-6)
    # The clients that leak most come as often as the schema allows.
    expected = participation.most_participations(_NUM_ROUNDS)
    assert len(result.contribution.rounds) == expected
    # FALSE_ALARM is shared by all that is looked at: two rates at each of three thresholds.
    assert len(result.rates) == 3
    for rates in result.rates:
        for events, trials, bound in (
            (rates.false_positives, rates.absences, rates.false_positive_bound),
            (rates.false_negatives, rates.presences, rates.false_negative_bound),
        ):
            exact = statistics.upper_bound_of_rate(events, trials, FALSE_ALARM / 6.0)
            assert bound == exact
    assert (rates.absences, rates.presences) == (100_000, 2000)


def test_without_the_gaussian_curve_a_large_delta_shows_as_much() -> None:
    """At delta 0.1, 70 % of the claimed epsilon is refuted for any mechanism whatever.

    By 4000 clients, 80 % is expected, with a standard deviation of 2 %.
    """
    schema = SingleParticipation()
    result = audit(
        lambda: _float_aggregator(mfa.factorizations.identity(_NUM_ROUNDS), schema),
        _claim(schema),
        canaries=4000,
        false_alarm_rate=FALSE_ALARM,
    )
    small, large = result.any_mechanism
    assert (small.delta, large.delta) == (1e-6, LARGE_DELTA)
    assert large.epsilon == mfa.accounting.epsilon(_NOISE_MULTIPLIER, LARGE_DELTA)
    assert 0.7 * large.epsilon <= large.epsilon_lower_bound <= large.epsilon
    assert 0.0 < small.epsilon_lower_bound < small.epsilon
    assert not result.exceeded


class _Transposed(mfa.factorizations.BandedFactorization):
    """Draws its noise from the transpose of C, turned to be lower triangular: J C^T J.

    Sensitivity and everything else are those of C.
    """

    def noise_recursion(self) -> BandedNoise:
        turned = self.strategy_matrix().T[::-1, ::-1]
        return banded_rows(bands_of_matrix(turned, 2))


_REPEATED, _REPLACED = 3, 4


def _repeat_a_row_of_z(monkeypatch: pytest.MonkeyPatch) -> None:
    intact = SegmentRows.of_z

    def faulty(self: Any, tile: tf.Tensor, row: tf.Tensor, number: Any) -> tf.Tensor:
        other = tf.constant(_REPEATED, row.dtype)
        return intact(self, tile, tf.where(tf.equal(row, _REPLACED), other, row), number)

    monkeypatch.setattr(SegmentRows, "of_z", faulty)
    # Which would refuse these graphs.
    monkeypatch.setattr(graph_check, "check", lambda query: None)


def _leave_out_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_clipping.install(monkeypatch)


@dataclasses.dataclass(frozen=True)
class _Fault:
    """What is wrong, in an otherwise intact aggregator; and the clients that show it."""

    canaries: int
    noise_factor: float = 1.0
    is_transposed: bool = False
    patch: Callable[[pytest.MonkeyPatch], None] | None = None

    def aggregator(self, factorization: Factorization, seed: int | None = None) -> Any:
        """The faulty aggregator; ``patch`` must be in effect."""
        return _aggregator(
            self._matrix(factorization), SingleParticipation(), self.noise_factor, seed
        )

    def numpy_aggregator(self, factorization: Factorization) -> FloatAggregator:
        """The same in NumPy, for a fault that is no patch."""
        assert self.patch is None
        return _float_aggregator(
            self._matrix(factorization), SingleParticipation(), self.noise_factor
        )

    def _matrix(self, factorization: Factorization) -> Factorization:
        bands = factorization.arrays()["bands"]
        return _Transposed(bands) if self.is_transposed else factorization


_FAULTS = {
    "noise 10 % too small": _Fault(4000, noise_factor=0.9),
    "a row of Z used twice": _Fault(500, patch=_repeat_a_row_of_z),
    "C transposed": _Fault(4000, is_transposed=True),
    "clipping left out": _Fault(500, patch=_leave_out_clipping),
    "noise left out": _Fault(500, noise_factor=0.0),
}


@pytest.fixture(scope="module")
def banded() -> Factorization:
    """C of two bands and equal column norms: its row norms differ, by up to 10 %."""
    return _MECHANISMS["banded"](SingleParticipation())


@pytest.mark.long_cases(1)
@pytest.mark.short_cases(4)
@pytest.mark.parametrize(
    ("fault", "place"),
    [
        *((fault, "tff") for fault, broken in _FAULTS.items() if broken.patch),
        *((fault, "numpy") for fault, broken in _FAULTS.items() if not broken.patch),
        *(
            pytest.param(fault, "tff", marks=pytest.mark.long)
            # TFF's aggregator refuses a factorization of another class.
            for fault, broken in _FAULTS.items()
            if not (broken.patch or broken.is_transposed)
        ),
    ],
)
def test_a_broken_mechanism_is_caught(
    fault: str, place: str, banded: Factorization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault is missed with a probability far below 1e-3: by more than five standard deviations.

    The intact mechanism, which is audited above as "banded", is called broken with probability
    FALSE_ALARM at most.
    """
    broken = _FAULTS[fault]
    if broken.patch:
        broken.patch(monkeypatch)
    result = audit(
        lambda: broken.aggregator(banded) if place == "tff" else broken.numpy_aggregator(banded),
        _claim(SingleParticipation()),
        canaries=broken.canaries,
        false_alarm_rate=FALSE_ALARM,
    )
    assert result.exceeded
    assert result.epsilon_lower_bound > result.epsilon
    if fault == "a row of Z used twice":
        assert result.contribution.rounds[0] in (_REPEATED, _REPLACED)


class _Recorder:
    """Stands in for an aggregator: keeps what it is sent, and releases what it is told to."""

    def __init__(self, release: Callable[[int, int], np.ndarray]) -> None:
        self._release = release
        # For each run and round, the clients' updates and the released sum.
        self.runs: list[list[tuple[list[np.ndarray], np.ndarray]]] = []
        self.dimension = 0

    def create(self, value_type: Any) -> "_Recorder":
        (self.dimension,) = value_type.shape
        return self

    def initialize(self) -> int:
        self.runs.append([])
        return 0

    def next(self, state: int, clients: list[np.ndarray]) -> Any:
        total = np.sum(clients, axis=0) + self._release(state, self.dimension)
        self.runs[-1].append((clients, total))
        return types.SimpleNamespace(state=state + 1, result=total / _CLIENTS_PER_ROUND)


def _independent_noise(seed: int) -> Callable[[int, int], np.ndarray]:
    generator = np.random.default_rng(seed)
    deviation = _NOISE_MULTIPLIER * _CLIP_NORM * math.sqrt(3.0)
    return lambda state, dimension: deviation * generator.normal(size=dimension)


@pytest.fixture(scope="module")
def recorded() -> tuple[_Recorder, AuditResult]:
    """An audit of independent noise without clipping, for clients that return."""
    recorder = _Recorder(_independent_noise(0))
    result = audit(lambda: recorder, _claim(MinSeparation(3)), canaries=600)
    return recorder, result


def test_audited_clients_exceed_the_clip_norm_in_their_rounds_alone(
    recorded: tuple[_Recorder, AuditResult],
) -> None:
    recorder, result = recorded
    rounds = result.contribution.rounds
    tuning_runs = [run for run in recorder.runs if len(run[rounds[0]][0]) == 1]
    runs = recorder.runs[len(tuning_runs) :]
    assert recorder.runs[: len(tuning_runs)] == tuning_runs
    assert all(len(clients) == 1 for run in tuning_runs for clients, _ in run)
    assert sum(len(run[rounds[0]][0]) - 1 for run in runs) == 600
    for run in runs:
        owners = []
        for i, ((_, *audited), _) in enumerate(run):
            assert bool(audited) == (i in rounds)
            coordinates = []
            for update in audited:
                (coordinate,) = np.flatnonzero(update)
                assert abs(update[coordinate]) == 10.0 * _CLIP_NORM
                coordinates.append(int(coordinate))
            if audited:
                owners.append(coordinates)
        assert len(set(owners[0])) == len(owners[0])
        assert owners == [owners[0]] * len(rounds)


def test_inputs_are_chosen_from_what_was_released_before(
    recorded: tuple[_Recorder, AuditResult],
) -> None:
    """The other client undoes the model's steps, and the audited ones oppose it, each time."""
    recorder, result = recorded
    assert result.contribution.groups == (0, 1, 2)
    for run in recorder.runs:
        model = np.zeros(recorder.dimension)
        for i, ((base, *audited), released) in enumerate(run):
            assert np.linalg.norm(base) < _CLIP_NORM
            if i > 0:
                cosine = base @ model / np.linalg.norm(base) / np.linalg.norm(model)
                assert cosine == pytest.approx(-1.0, abs=1e-3)
            for update in audited:
                (coordinate,) = np.flatnonzero(update)
                assert np.sign(update[coordinate]) == (-1.0 if model[coordinate] > 0.0 else 1.0)
            model += released


def test_missing_clipping_is_far_above_the_claim(recorded: tuple[_Recorder, AuditResult]) -> None:
    _, result = recorded
    assert result.exceeded


def test_what_is_not_finite_is_refused() -> None:
    broken = _Recorder(lambda state, dimension: np.full(dimension, math.nan))
    with refuses("finite"):
        audit(lambda: broken, _claim(SingleParticipation()), canaries=600)


@pytest.mark.parametrize(
    ("matrix", "participation", "changes", "error"),
    [
        (mfa.factorizations.identity(5000), SingleParticipation(), {}, ValueError),
        (mfa.factorizations.identity(8), PoissonSampling(8, 1, 80, 10), {}, TypeError),
        (mfa.factorizations.identity(8), SingleParticipation(), {"clip_norm": -1.0}, ValueError),
        (
            mfa.factorizations.identity(8),
            SingleParticipation(),
            {"clients_per_round": math.inf},
            ValueError,
        ),
    ],
)
def test_bad_claims_are_refused(
    matrix: Factorization,
    participation: Participation,
    changes: dict[str, float],
    error: type[Exception],
) -> None:
    mechanism = mfa.Mechanism(matrix, participation, _NOISE_MULTIPLIER)
    numbers = {"clip_norm": _CLIP_NORM, "clients_per_round": _CLIENTS_PER_ROUND}
    with pytest.raises(error):
        Claim(mechanism, **{**numbers, **changes})


def test_a_claim_without_noise_is_refused() -> None:
    with refuses("noise_multiplier"):
        _claim(SingleParticipation(), 0.0)


@pytest.mark.parametrize(
    ("noise_multiplier", "options", "names"),
    [
        (_NOISE_MULTIPLIER, {"canaries": 0}, ["canaries"]),
        (_NOISE_MULTIPLIER, {"false_alarm_rate": 0.0}, ["false_alarm_rate"]),
        (_NOISE_MULTIPLIER, {"false_alarm_rate": 1.0}, ["false_alarm_rate"]),
        (_NOISE_MULTIPLIER, {"delta": 0.0}, ["delta"]),
        (0.05, {}, ["canaries", "noise multiplier"]),
        (10.0, {"delta": 0.5}, ["epsilon 0"]),
    ],
)
def test_bad_options_and_audits_that_can_show_nothing_are_refused(
    noise_multiplier: float, options: dict[str, Any], names: list[str]
) -> None:
    def never() -> Any:
        pytest.fail("no aggregator is needed to see that")

    claim = _claim(SingleParticipation(), noise_multiplier)
    with refuses(*names):
        audit(never, claim, **options)


# Audits of clients that a scheme draws, against an aggregator in NumPy.


# Two tests of intact mechanisms fail with a probability of at most 2e-6.
_ROUNDS, _DELTA, _FALSE_ALARM = 8, 0.02, 1e-6
_BANDED = mfa.factorizations.banded(_ROUNDS, num_bands=2)
_SCHEMES = {
    "balls_in_bins": BallsInBins(_ROUNDS, 2, 496, 62, 8),
    "poisson": PoissonSampling(_ROUNDS, 2, 500, 125),
}


def _audited(name: str, noise_factor: float = 1.0) -> Any:
    mechanism = mfa.Mechanism(_BANDED, _SCHEMES[name], 0.5)
    stddev = noise_factor * mechanism.sigma
    return audit_drawn(
        lambda: FloatAggregator(_BANDED, stddev, 1.0, 10.0),
        mechanism,
        clip_norm=1.0,
        clients_per_round=10.0,
        delta=_DELTA,
        canaries=3000,
        false_alarm_rate=_FALSE_ALARM,
    )


@pytest.mark.parametrize("name", _SCHEMES)
def test_who_does_not_know_the_draws_learns_nearly_what_is_claimed_and_no_more(name: str) -> None:
    result = _audited(name)
    bound, rates = result.bounds[0], result.rates[0]
    assert not result.exceeded
    assert 0.55 * bound.epsilon <= bound.epsilon_lower_bound <= bound.epsilon
    assert bound.epsilon == result.mechanism.guarantee(_DELTA).epsilon
    # Less than who knows the draws.
    most = _SCHEMES[name].most_participations()
    alone = mfa.accounting.exact_epsilon(0.5 / np.sqrt(most), _DELTA)
    assert bound.epsilon < 0.8 * alone
    assert (rates.presences, rates.absences) == (3000, 150_000)


def test_too_little_noise_is_caught() -> None:
    assert _audited("balls_in_bins", 0.6).exceeded


def test_draws_of_another_scheme_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that take part in half of the rounds, and not in one of eight."""
    draws = audits._draws

    def doubled(scheme: Any) -> np.ndarray:
        found = draws(scheme)
        return np.asarray(sum(np.roll(found, shift, axis=1) for shift in (0, 2, 4, 6)))

    monkeypatch.setattr(audits, "_draws", doubled)
    assert _audited("balls_in_bins").exceeded


def test_scores_are_logarithms_of_ratios_of_densities() -> None:
    rng = np.random.default_rng(3)
    root = rng.normal(size=(3, 3)) + 2.0 * np.eye(3)
    covariance, mean = root @ root.T, rng.normal(size=3)
    model = NoiseModel(mean, np.linalg.inv(covariance), 100)
    shifts, weights = rng.normal(size=(4, 3)), np.array([0.1, 0.2, 0.3, 0.4])
    outputs = rng.normal(size=(3, 5))
    found = audits._mixture_scores(model, shifts, weights, outputs)
    for score, output in zip(found, outputs.T, strict=True):
        densities = [
            weight * scipy.stats.multivariate_normal(mean + shift, covariance).pdf(output)
            for weight, shift in zip(weights, shifts, strict=True)
        ]
        without = scipy.stats.multivariate_normal(mean, covariance).pdf(output)
        assert score == pytest.approx(np.log(sum(densities) / without), rel=1e-9)


def test_the_mixture_has_the_probabilities_of_the_scheme() -> None:
    patterns, weights = audits._mixture(_SCHEMES["balls_in_bins"])
    assert np.array_equal(patterns, np.eye(8)[::-1])
    # Of 4,000 draws, beyond five standard deviations with a probability of 6e-7.
    assert np.all(np.abs(weights - 0.125) <= 5.0 * np.sqrt(0.125 * 0.875 / 3900))
    # Of one group alone, whose rounds are every second one.
    patterns, weights = audits._mixture(_SCHEMES["poisson"])
    assert not np.any(patterns[:, 1::2])
    assert weights @ np.sum(patterns, axis=1) == pytest.approx(4 * 0.5, abs=0.08)


def test_schemes_whose_clients_depend_on_each_other_are_refused() -> None:
    for name in ("fixed_size", "truncated_poisson", "random_allocation", "shuffling"):
        scheme = mfa.participation.sampling_scheme(
            name, num_rounds=_ROUNDS, num_bands=2, population=500, clients_per_round=50
        )
        mechanism = mfa.Mechanism(_BANDED, scheme, 0.5)
        with refuses(name, "--participation"):
            audit_drawn(dict, mechanism, clip_norm=1.0, clients_per_round=50)
