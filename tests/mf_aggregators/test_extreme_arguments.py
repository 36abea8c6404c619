"""Accounting at the ends of what its arguments may be: an answer in few steps, or a refusal.

What takes the time of a search is counted, and more of it than a search may take fails.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import gaussian
from mf_aggregators.kernel import losses as groups
from mf_aggregators.kernel.certificate import ImportanceSampler, dominating_pair
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparationSampling,
    SamplingScheme,
    sampling_scheme,
    sampling_schemes,
)
from mf_aggregators.participation.certificate_search import Certification
from tests.examples import examples, of_many
from tests.mf_aggregators.scheme_rates import true_positive_rate as _true_positive_rate

# Of one search: losses that are composed, samples that are asked for, tails.
_MOST = (
    (groups, "composed_losses", 150),
    (ImportanceSampler, "batches", 300),
    (certificates, "lower_tail", 10_000),
    (gaussian, "_exact_epsilon", 2_000),
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
            "cannot be accounted for|delta must be at least|no noise mult", str(error)
        ):
            raise
        return None


_NAMES = tuple(sampling_schemes())


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
    assert stated is not None
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
