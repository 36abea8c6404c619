"""The version of the accounting, held against golden values of all of its modules."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators import accounting
from mf_aggregators.kernel import (
    certificate,
    dominating_pairs,
    draws_of_clients,
    gaussian,
    losses,
)
from mf_aggregators.kernel.dominating_pairs import DominatingPair, ImportanceSampler
from mf_aggregators.kernel.draws_of_clients import (
    FixedSize,
    Poisson,
    RandomAllocation,
    StrategyColumns,
)
from mf_aggregators.participation import (
    MinSeparationSampling,
    certificate_search,
    sampling_scheme,
)
from tests.mf_aggregators.scheme_rates import true_positive_rate as _true_positive_rate

_SIZES: dict[str, Any] = {
    "num_rounds": 8,
    "num_bands": 2,
    "population": 400,
    "clients_per_round": 10,
}
_COLUMNS = draws_of_clients._normalised(
    certificate_search.columns_of_matrix(np.eye(8) + 0.5 * np.eye(8, k=-1), 2)
)
_MECHANISM = DominatingPair(_COLUMNS, 1.5, dominating_pairs._MinSeparationRounds(0.05, 3))
_MIN_SEPARATION = MinSeparationSampling(8, 2, 400, 10, 2)
_RUN = _MIN_SEPARATION.run(1.5, StrategyColumns(_COLUMNS))


def _deltas(draws: FixedSize | Poisson) -> tuple[float, ...]:
    return _at_two(losses._losses_of_round(draws, 1.5, 1e-2))


def _at_two(loss: PrivacyLossDistribution) -> tuple[float, ...]:
    return float(loss.get_delta_for_epsilon(0.1)), float(loss.get_delta_for_epsilon(0.5))


def _amplified(sampling: str) -> float:
    scheme = sampling_scheme(sampling, **_SIZES)
    return scheme.epsilon(1.5, 1e-5)


def _values() -> dict[str, Callable[[], Any]]:
    """What every module computes, by module; smooth, so that rounding does not matter."""
    tuning = certificate_search._TuningSamples(
        _MECHANISM, ImportanceSampler(_MECHANISM, 3), 1e-5, 0, 2**11
    )
    tail = certificate.lower_tail(3, 4000, 2**14, (-1.5, -0.5), 1e-6)
    profile = certificate.Profile(_MECHANISM, 1e-6, 1e-4, samples=2**11)
    return {
        "groups": lambda: (
            _amplified("poisson"),
            _amplified("fixed_size"),
            _amplified("shuffling"),
            *(losses._clones(0.5, 1e-9, 1000, 1e-6) or ()),
        ),
        "batches": lambda: (
            *_deltas(FixedSize(1, 1, 10, 1)),
            *_deltas(Poisson(1, 1, 10, 1)),
        ),
        "cycles": lambda: _at_two(losses._losses_of_cycle(1.5, 5, 5, 1e-3)),
        "draws_of_clients": lambda: RandomAllocation(9, 2, 400, 10).together.norm,
        "composition": lambda: accounting.composed_epsilon(
            [sampling_scheme("poisson", **_SIZES).event(1.5), accounting.event(3.0)], 1e-5
        ),
        "certificate": lambda: (
            certificate.failure_probability(1e-5),
            certificate.tested_delta(1e-5),
            certificate.largest_term(0.7, 4, 1.0),
            *certificate.terms(np.array([0.5, 1.5, 2.5]), 0.7, 3, 1.0),
            certificate._log_wealth(np.array([0.1, 0.4]), 0.3, 0.5),
            certificate._upper_probability(3, 100, 1e-3),
            certificate._lower_probability(3, 100, 1e-3),
            tail.divergence(2.0),
        ),
        "columns": lambda: (
            certificate_search.of_any_noise(
                certificate_search.columns_of_matrix(np.tri(8), 8)
            ).rounding,
        ),
        "profiles": lambda: (
            *profile.upper(np.array([0.25, 1.0]))[0],
            *profile.upper(np.array([0.1, 0.25]))[1],
        ),
        "search": lambda: (
            certificate_search._most_samples(100),
            certificate_search._most_samples(10**5),
            tuning.largest(3.0),
            *tuning.needed(3.0),
        ),
        "dominating_pairs": lambda: (
            *_COLUMNS.ravel()[[0, 1, -2]],
            *dominating_pairs._MinSeparationRounds(0.05, 3).first_free_probabilities(),
            ImportanceSampler(_MECHANISM, 2).log_mgf,
            ImportanceSampler(_MECHANISM, 5).log_mgf,
        ),
        "gaussian": lambda: (
            accounting.epsilon(1.0, 1e-6),
            accounting.epsilon(4.0, 1e-6),
            accounting.noise_multiplier(2.0, 1e-6),
            accounting.exact_epsilon(1.0, 1e-6),
            accounting.composed_gaussian_epsilon([1.0, 3.0], 1e-6),
            gaussian.delta_left(1e-12, 1.0, 2**40),
            1e20 * gaussian.failure_probability(1.0, 2**40),
        ),
        "separated": lambda: (
            float(
                dominating_pairs.dominating_pair(
                    dataclasses.replace(_RUN, sigma=1e6), 2**60
                ).columns[0, 1]
            ),
        ),
        "participation": lambda: (
            _MIN_SEPARATION.as_draws().joining_probability,
            _MIN_SEPARATION.most_participations(),
        ),
        "losses": lambda: (
            losses.epsilon_of(one := losses.gaussian_losses(1.5, 0.5), 0.15),
            losses.delta_of(one, 0.3),
            losses.safe_delta(1e-6, 100),
        ),
        "accounting": lambda: _true_positive_rate(sampling_scheme("poisson", **_SIZES), 1.5, 0.01),
    }


# Of the version 5. Where one of them changes for a reason, raise the version, and put the new ones
# here: otherwise users' caches go on to serve what the accounting would no longer say.
_GOLDEN: dict[str, tuple[float, ...]] = {
    "groups": (
        0.4937729140694945,
        2.008900862579273,
        2.7533813795825006,
        0.2726376092004103,
        4.015005534512161e-06,
    ),
    "batches": (
        0.014927152292316708,
        0.0031581718640282105,
        0.0066001468175726705,
        6.193836357445205e-05,
    ),
    "cycles": (0.08909355117186071, 0.01201349808896056),
    "draws_of_clients": (1.0,),
    "composition": (1.321908169009595,),
    "certificate": (
        1.5625e-09,
        9.9e-06,
        0.010574185498064383,
        0.0,
        0.03944878123729341,
        0.010541004290934684,
        0.0440168854167743,
        0.12422182878533783,
        0.0019227972016529927,
        1.639555981816558e-06,
    ),
    "columns": (12.0,),
    "profiles": (
        0.003624459790402161,
        8.93652005275129e-07,
        0.018244989021055757,
        0.0003897822344945229,
    ),
    "search": (2097152, 60000, 0.0003842165423456729, 2620.9363956, 1843.4280965),
    "dominating_pairs": (
        0.8944271909999159,
        0.4472135954999579,
        0.8944271909999159,
        0.9090909090909091,
        0.045454545454545456,
        0.045454545454545456,
        0.014542226618426331,
        0.16332865574499053,
    ),
    "gaussian": (
        4.886554117731164,
        1.060701862404126,
        2.230476271530305,
        4.886554117521078,
        5.189036641326016,
        9.990004079004076e-13,
        99955.16955922845,
    ),
    "separated": (707106.8912252748,),
    "participation": (0.02564102564102564, 4),
    "losses": (3, 0.28092980362016673, 0.14606947183982202, 9.999998e-07),
    "accounting": (0.013213283366249428,),
}
# More than what processors and versions of NumPy round differently, and less than a change.
_RELATIVE = 1e-6
# The search for a bet ends within a thousandth.
_OF_SEARCHES = 1e-3


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("module", _GOLDEN)
def test_a_version_has_its_numbers(module: str) -> None:
    assert certificate_search.ACCOUNTING_VERSION == 5
    found = np.atleast_1d(_values()[module]())
    relative = _OF_SEARCHES if module == "search" else _RELATIVE
    np.testing.assert_allclose(found, _GOLDEN[module], rtol=relative, atol=0.0)
