"""Plans: finds the best mechanism for a population, timers, memory and a privacy target."""

from mf_aggregators.planning import fleets, planner
from mf_aggregators.planning.fleets import Fleet
from mf_aggregators.planning.planner import calibrated, make
from mf_aggregators.planning.plans import ANY_SAMPLING, Candidate, Plan, Setting, powers_of_two

__all__ = [
    "ANY_SAMPLING",
    "Candidate",
    "Fleet",
    "Plan",
    "Setting",
    "calibrated",
    "fleets",
    "make",
    "planner",
    "powers_of_two",
]
