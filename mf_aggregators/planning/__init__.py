"""Which mechanism suits a population, its timers, a memory budget and a privacy target."""

from mf_aggregators.planning import planner
from mf_aggregators.planning.planner import calibrated, make
from mf_aggregators.planning.plans import (
    ANY_SAMPLING,
    Candidate,
    Extension,
    Plan,
    Setting,
    powers_of_two,
    server_learning_rate,
)

__all__ = [
    "ANY_SAMPLING",
    "Candidate",
    "Extension",
    "Plan",
    "Setting",
    "calibrated",
    "make",
    "planner",
    "powers_of_two",
    "server_learning_rate",
]
