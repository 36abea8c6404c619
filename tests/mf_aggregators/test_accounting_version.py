"""The version of the accounting, held against golden values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators import accounting
from mf_aggregators.kernel import certificate, draws_of_clients, gaussian, losses
from mf_aggregators.kernel.certificate import DominatingPair, ImportanceSampler
from mf_aggregators.participation import certificate_search, sampling_scheme

_SIZES: dict[str, Any] = {
    "num_rounds": 8,
    "num_bands": 2,
    "population": 400,
    "clients_per_round": 10,
}
_COLUMNS = draws_of_clients._normalised(
    certificate_search.columns_of_matrix(np.eye(8) + 0.5 * np.eye(8, k=-1), 2)
)
_MECHANISM = DominatingPair(_COLUMNS, 1.5, certificate._MinSeparationRounds(0.05, 3))


def _at_two(loss: PrivacyLossDistribution) -> tuple[float, ...]:
    return float(loss.get_delta_for_epsilon(0.1)), float(loss.get_delta_for_epsilon(0.5))


def _amplified(sampling: str) -> float:
    scheme = sampling_scheme(sampling, **_SIZES)
    return scheme.epsilon(1.5, 1e-5)


def _values() -> dict[str, Callable[[], Any]]:
    """What users' caches follow from, by subject; smooth, so that rounding does not matter."""
    tuning = certificate_search._TuningSamples(
        _MECHANISM, ImportanceSampler(_MECHANISM, 3), 1e-5, 0, 2**11
    )
    return {
        "groups": lambda: (
            _amplified("poisson"),
            _amplified("fixed_size"),
            _amplified("shuffling"),
            *(losses._clones(0.5, 1e-9, 1000, 1e-6) or ()),
        ),
        "cycles": lambda: _at_two(losses._losses_of_cycle(1.5, 5, 5, 1e-3)),
        "search": lambda: (
            certificate_search._most_samples(100),
            certificate_search._most_samples(10**5),
            tuning.largest(3.0),
            *tuning.needed(3.0),
        ),
        "pairs": lambda: (
            *_COLUMNS.ravel()[[0, 1, -2]],
            *certificate._MinSeparationRounds(0.05, 3).first_free_probabilities(),
            ImportanceSampler(_MECHANISM, 2).log_mgf,
            ImportanceSampler(_MECHANISM, 5).log_mgf,
        ),
        "gaussian": lambda: (
            accounting.epsilon(1.0, 1e-6),
            accounting.epsilon(4.0, 1e-6),
            accounting.noise_multiplier(2.0, 1e-6),
            accounting.exact_epsilon(1.0, 1e-6),
            gaussian.delta_left(1e-12, 1.0, 2**40),
            1e20 * gaussian.failure_probability(1.0, 2**40),
        ),
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
    "cycles": (0.08909355117186071, 0.01201349808896056),
    "search": (2097152, 60000, 0.0003842165423456729, 2620.9363956, 1843.4280965),
    "pairs": (
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
        9.990004079004076e-13,
        99955.16955922845,
    ),
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
