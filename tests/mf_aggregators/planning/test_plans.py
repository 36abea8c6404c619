"""Settings of plans that are refused, and learning rates against the papers' printed numbers."""

import dataclasses
import math
import types
from typing import Any

import pytest

from mf_aggregators import (
    factorizations,
    participation,
    planning,
    workloads,
)
from mf_aggregators.participation import (
    MinSeparation,
)
from mf_aggregators.workloads import Workload
from tests.mf_aggregators.planning.small_settings import TIMERS
from tests.refusals import refuses

# BandMF Table 4: noise multipliers, and tuned rates by epsilon, on a grid of powers of 1.7.
_NOISE = {1: 4.22468, 2: 2.23048, 4: 1.19352, 8: 0.65294, 16: 0.36861}
_TUNED = {
    "dp_sgd": {1: 0.0244, 2: 0.0414, 4: 0.0704, 8: 0.1197, 16: 0.3460},
    "tree": {1: 0.2035, 2: 0.3460, 4: 0.5882, 8: 1.0, 16: 1.7},
    "banded": {1: 0.2035, 2: 0.5882, 4: 1.0, 8: 1.0, 16: 1.7},
}


def _server_learning_rate(effective_rmse: float) -> Any:
    """The rate of a candidate with this effective RMSE."""
    mechanism = types.SimpleNamespace(noise_multiplier=effective_rmse)
    found = types.SimpleNamespace(rmse_of_sums=1.0, mechanism=mechanism, clients_per_round=1)
    return vars(planning.Candidate)["server_learning_rate"].fget(found)


@pytest.mark.parametrize("mechanism", sorted(_TUNED))
@pytest.mark.parametrize("epsilon", sorted(_NOISE))
def test_learning_rates_of_the_paper(mechanism: str, epsilon: int) -> None:
    """BandMF Table 4: the rule is a fit to these, and never more than a step of 1.7 away.

    Errors for n = 2052 and six participations: 342 bands of equal norms 8.5952 (Table 2: 1.05
    of the optimum), the full tree and independent noise by our matrices (1.53 and 9.63).
    """
    workload, schema = workloads.Workload("prefix_sum", 2052), MinSeparation(342)
    rmse = {
        "dp_sgd": lambda: factorizations.identity(2052).rmse(workload, schema),
        "tree": lambda: factorizations.tree_aggregation(2052, "full").rmse(workload, schema),
        "banded": lambda: 8.5952,
    }[mechanism]()
    rate = _server_learning_rate(rmse * _NOISE[epsilon] / 1000)
    steps = math.log(rate / _TUNED[mechanism][epsilon]) / math.log(1.7)
    assert abs(steps) < 1.01
    reproduced = {
        ("dp_sgd", 8): 1,
        ("banded", 2): -1,
        ("banded", 4): -1,
        ("banded", 8): 1,
        ("banded", 16): 1,
    }
    assert round(steps) == reproduced.get((mechanism, epsilon), 0)


@pytest.mark.parametrize(
    ("noise", "printed"),
    [(0.37313, 0.346), (0.30481, 0.346), (0.25136, 0.346), (0.20567, 0.5882), (0.16876, 0.5882)],
)
def test_learning_rates_that_the_rule_was_used_for(noise: float, printed: float) -> None:
    """BandMF Table 5, DP-SGD with amplification, epsilon 1, 2, 4, 8, 16: chosen by the rule."""
    effective = math.sqrt(6 * 2053 / 2) * noise / 1000
    assert _server_learning_rate(effective) == pytest.approx(printed, rel=1e-3)


@pytest.mark.parametrize("error", [0.0, -1.0, math.nan, math.inf])
def test_no_learning_rate_without_an_error(error: float) -> None:
    with refuses("effective_rmse"):
        _server_learning_rate(error)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"epsilon": 0.0}, ["epsilon"]),
        ({"delta": 1.0}, ["delta", "1"]),
        ({"delta": 0.1}, ["delta", "60"]),
        ({"population": 59}, ["60"]),
        ({"num_rounds": 0}, ["num_rounds"]),
        ({"model_size": 0}, ["model_size"]),
        ({"model_size": 2**40}, ["2^40"]),
        ({"noise_memory": -1.0}, ["noise_memory"]),
        ({"sampling": "poisson"}, ["schema", "sampling scheme"]),
        ({"participation": None}, ["schema", "sampling scheme"]),
        ({"participation": None, "sampling": "poisson", "population": 9}, ["population", "9"]),
        ({"participation": MinSeparation(6, 5)}, ["4"]),
        ({"participation": MinSeparation(6, 1)}, ["240"]),
        ({"participation": participation.MinSeparation}, ["participation"]),
        # Epsilon 8 is that of neither.
        ({"rho": 0.02}, ["epsilon", "rho"]),
        ({"noise_multiplier": 1.0}, ["epsilon", "noise multiplier"]),
        ({"workload": Workload("prefix_sum", 23)}, ["23 rounds", "24"]),
        ({"workload": 24}, ["workload"]),
        ({"may_extend_to": 24}, ["may_extend_to", "24"]),
        ({"may_extend_to": 30.5}, ["may_extend_to"]),
        ({"may_extend_to": 2**31}, ["2^40"]),
        ({"may_extend_to": 30, "error": [2.0] + [1.0] * 23}, ["weights", "24 rounds"]),
        (
            {"may_extend_to": 30, "workload": Workload("momentum_sgd", 24, 0.9, (1.0,) * 24)},
            ["learning rates", "24 rounds"],
        ),
        (
            {"may_extend_to": 30, "participation": None, "sampling": "poisson"},
            ["poisson", "cannot be extended"],
        ),
        ({"may_extend_to": 100, "participation": MinSeparation(6, 4)}, ["100", "250"]),
        ({"participation": None, "sampling": "poisson", "rho": 0.02}, ["sampling", "rho"]),
        (
            {"participation": None, "sampling": "poisson", "noise_multiplier": 1.0},
            ["timers", "noise multiplier"],
        ),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], names: list[str]) -> None:
    with refuses(*names, error=(ValueError, TypeError)):
        dataclasses.replace(TIMERS, **changes)
