"""Which mechanism suits a population, its timers, a memory budget and a privacy target."""

from mf_aggregators.planning import band_choice, proposals
from mf_aggregators.planning.planner import make
from mf_aggregators.planning.plans import (
    ANY_SAMPLING,
    Candidate,
    Infeasible,
    Plan,
    Setting,
    Skipped,
    powers_of_two,
    server_learning_rate,
)
from mf_aggregators.planning.proposals import calibrated

__all__ = [
    "ANY_SAMPLING",
    "Candidate",
    "Infeasible",
    "Plan",
    "Setting",
    "Skipped",
    "band_choice",
    "calibrated",
    "make",
    "powers_of_two",
    "proposals",
    "server_learning_rate",
]
