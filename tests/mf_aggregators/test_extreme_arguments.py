"""Accounting at the ends of what its arguments may be: an answer in few steps, or a refusal.

What takes the time of a search is counted, and more of it than a search may take fails.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import accounting, factorizations, private_metrics
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import losses, sensitivity
from mf_aggregators.kernel.certificate import ImportanceSampler, dominating_pair
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.participation import (
    SCHEMES,
    BallsInBins,
    FixedEpochOrder,
    MinSeparation,
    MinSeparationSampling,
    SamplingScheme,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy.guarantees import LeastProtected, StoppingRule
from mf_aggregators.privacy.ledgers import Ledger, RoundTimes
from mf_aggregators.privacy.statements import Evidence, RunFacts
from mf_aggregators.workloads import Workload
from tests.examples import examples, of_many
from tests.mf_aggregators.scheme_rates import true_positive_rate as _true_positive_rate
from tests.refusals import refuses

# Of one search: losses that are composed, samples that are asked for, tails.
_MOST = (
    (losses, "_losses_of_rounds", 150),
    (ImportanceSampler, "batches", 300),
    (certificates, "divergence_of_counts", 10_000),
    (sensitivity, "exact_epsilon", 2_000),
)
_FEW_SAMPLES = Certification(max_samples=2**10)
# Rounds, separation or bands, clients of a round, and the population over the least possible.
_SIZES = (
    (1, 1, 1, 1),
    (1, 1, 1, 10**12),
    (8, 1, 100, 10**7),
    (8, 8, 1, 1),
    (8, 8, 1, 10**12),
    (7, 3, 10, 2),
)


@contextlib.contextmanager
def _few_steps() -> Iterator[None]:
    """Lets costly functions fail that are called too often."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, most in _MOST:
            patch.setattr(module, name, _counted(getattr(module, name), most))
        yield


def _counted(function: Callable[..., Any], most: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        assert next(calls) <= most, f"{function.__name__} is called without an end."
        return function(*arguments, **options)

    return call


def _scheme(name: str, size: tuple[int, int, int, int]) -> SamplingScheme:
    rounds, apart, clients, more = size
    has_parts = name not in (BallsInBins.name, MinSeparationSampling.name)
    return sampling_scheme(
        name,
        num_rounds=rounds,
        num_bands=apart if has_parts else 1,
        population=apart * clients * (1 if name == BallsInBins.name else more),
        clients_per_round=clients,
        separation=None if has_parts else apart,
    )


def _or_refused(function: Callable[[], Any]) -> Any:
    """What a function returns; None where it says in one line what is wrong."""
    try:
        return function()
    except ValueError as error:
        if not re.search(
            "there is too little noise|delta must be at least|no noise mult", str(error)
        ):
            raise
        return None


_NAMES = tuple(SCHEMES)


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "min_separation"])
def test_the_amplified_epsilon_may_be_zero(name: str) -> None:
    """Each device is in a run of 8 rounds with a probability below one in a million."""
    scheme = _scheme(name, (8, 1, 100, 10**7))
    with _few_steps():
        found = scheme.amplified(3.0, 1e-3, None, Certification(max_samples=2**13))
    assert found.epsilon == 0.0
    if isinstance(scheme, MinSeparationSampling):
        assert found.certificate is not None
        pair = dominating_pair(scheme.run(3.0, None))
        assert certificates.is_proved(pair, found.certificate)
        # Nor is everything proved of epsilon 0.
        often = dominating_pair(_half_of_the_rounds().run(3.0, None))
        assert not certificates.is_proved(often, found.certificate)


def _half_of_the_rounds() -> MinSeparationSampling:
    return MinSeparationSampling(8, 1, 200, 100, 1)


# Smaller examples of a search without an end would take as long.
_ENDS = settings(
    max_examples=examples(of_many(32, 16), one_in=2),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
)
_cases = st.tuples(st.sampled_from(_NAMES), st.sampled_from(_SIZES)).map(
    lambda drawn: _scheme(*drawn)
)
_sigmas = st.sampled_from([0.2, 0.3, 1.0, 30.0, 1e3, 1e6]) | st.floats(0.2, 1e6)
_deltas = st.sampled_from([1e-300, 1e-15, 1e-12, 1.1e-12, 1e-9, 1e-5, 0.5, 0.999]) | st.floats(
    1e-300, 0.999
)
_targets = st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e4])


@given(_cases, _sigmas, _deltas)
@_ENDS
def test_epsilons_end(scheme: SamplingScheme, sigma: float, delta: float) -> None:
    with _few_steps():
        found = _or_refused(lambda: scheme.amplified(sigma, delta, None, _FEW_SAMPLES).epsilon)
    if found is None:
        return
    most = scheme.most_participations()
    unamplified = _or_refused(
        lambda: accounting.epsilon(sigma / math.sqrt(most), delta, disjoint_participations=most)
    )
    assert 0.0 <= found <= (math.inf if unamplified is None else unamplified * (1.0 + 1e-9))


@given(_cases, _targets, _deltas)
@settings(_ENDS, max_examples=examples(16))
def test_searches_for_noise_multipliers_end(
    scheme: SamplingScheme, target: float, delta: float
) -> None:
    def search() -> float:
        with _few_steps():
            return scheme.calibrated(target, delta, None, _FEW_SAMPLES)

    found = _or_refused(search)
    if found is None:
        return
    stated = _or_refused(lambda: scheme.amplified(found, delta, None, _FEW_SAMPLES).epsilon)
    assert stated <= target


@given(_cases, _sigmas)
@settings(_ENDS, max_examples=examples(16))
def test_rates_of_attackers_end(scheme: SamplingScheme, sigma: float) -> None:
    rates = np.array([0.0, 1e-300, 1e-9, 0.01, 0.5, 0.999, 1.0])

    def bound() -> Any:
        with _few_steps():
            return _true_positive_rate(scheme, sigma, rates)

    found = _or_refused(bound)
    if found is None:
        return
    assert np.all((rates <= found) & (found <= 1.0))
    assert np.all(np.diff(found) >= -1e-12)


# Constructors of public value types refuse values that are none of an attribute's.


# The test replaces each attribute by each of these.
_OTHERS = ("x", math.nan, math.inf, -1, True, ())
# Attributes that may be one of them: texts, lists, truth values, and where there is no bound.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bool": (True,),
    "str": ("x",),
    "tuple": ((),),
    "smallest": (-1,),
    # Rounding may put it below zero.
    "optimality_gap": (-1,),
}
# The names of attributes in messages, where they differ.
_CALLED = {"name of Workload": "workload"}


def _values() -> Iterator[Any]:
    timers = MinSeparation(2, 3)
    mechanism = mfa.Mechanism(factorizations.identity(8), timers, 1.0)
    guarantee = mechanism.guarantee(1e-6)
    clip = mfa.AdaptiveClip(0.5, smallest_norm=0.1, largest_norm=1.0, clipped_count_stddev=1.0)
    metrics = private_metrics.PrivateMetrics((private_metrics.BoundedMetric("loss", 0.0, 1.0),))
    schemes = [
        sampling_scheme(name, num_rounds=8, num_bands=2, population=400, clients_per_round=10)
        for name in SCHEMES
    ]
    yield from (mechanism, clip, timers, FixedEpochOrder(2, 3), *schemes)
    yield Workload("momentum_sgd", 8, momentum=0.9, learning_rates=(0.5,) * 8)
    yield from (
        dataclasses.replace(made, participation=timers, optimality_gap=0.5)
        for made in (
            factorizations.identity(8),
            factorizations.tree_aggregation(8),
            factorizations.from_matrix(np.tri(8)),
            factorizations.from_bands(np.where(np.tri(8, 2), 1.0, 0.0)),
            factorizations.toeplitz(8),
            factorizations.blt(8),
            factorizations.banded_inverse(8, num_bands=2),
            factorizations.structured(factorizations.optimal(8), 2, 1),
        )
    )
    yield mfa.planning.Setting(8, 100, 2, timers, None, 4.0, 1e-6, 1000, noise_memory=1e9)
    yield Ledger(("a",), (np.array([0]),), 1)
    yield RoundTimes(np.array([0.0, 1.0]), np.array([1.0, 2.0]), 48.0, max_participations=3)
    yield ObservedParticipation(8, 2, 2, 2, True, 3, "a", "b")
    yield Evidence({"a": "b"}, {"a": "c"}, {"d": "e"})
    yield RunFacts(
        mechanism="a",
        population=10,
        clients_per_round=2,
        clip=clip,
        public_data="b",
        enforcement="c",
        metrics=metrics,
    )
    yield LeastProtected("a", (0,), guarantee)
    yield from (metrics, *metrics.metrics)
    yield mfa.audit.Claim(mechanism, 1.0, 2.0)
    yield Certification(0, 100)
    yield StoppingRule(guarantee, 100.0)


_EACH_VALUE = pytest.mark.parametrize("value", [*_values()], ids=lambda value: type(value).__name__)


@_EACH_VALUE
def test_an_attribute_refuses_values_of_other_types(value: Any) -> None:
    for field in dataclasses.fields(value):
        kept = getattr(value, field.name)
        if not field.init or kept is None:
            continue
        attribute = f"{field.name} of {type(value).__name__}"
        for other in _OTHERS:
            allowed = (
                *_ALLOWED.get(type(kept).__name__, ()),
                *_ALLOWED.get(field.name, ()),
                *_ALLOWED.get(attribute, ()),
            )
            if any(other is each for each in allowed):
                continue
            # Objects of the library are checked by type as well.
            with refuses(_CALLED.get(attribute, field.name), error=(ValueError, TypeError)):
                dataclasses.replace(value, **{field.name: other})


@_EACH_VALUE
def test_an_entry_that_is_no_number_is_refused(value: Any) -> None:
    for field in dataclasses.fields(value):
        kept = getattr(value, field.name)
        if field.init and np.size(kept) and np.asarray(kept).dtype.kind == "f" and np.ndim(kept):
            for other in ("x", math.nan, math.inf, True):
                entries = np.array(kept, dtype=object)
                entries.flat[-1] = other
                with refuses(field.name):
                    dataclasses.replace(value, **{field.name: entries.tolist()})
