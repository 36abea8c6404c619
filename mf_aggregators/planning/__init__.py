"""Which mechanism suits a population, its timers, a memory budget and a privacy target."""

from mf_aggregators.planning.candidate_guarantees import guarantee_of
from mf_aggregators.planning.planner import (
    ANY_SAMPLING,
    Candidate,
    Computation,
    LeftOut,
    Plan,
    Setting,
    computations,
    make,
    server_learning_rate,
)

__all__ = [
    "ANY_SAMPLING",
    "Candidate",
    "Computation",
    "LeftOut",
    "Plan",
    "Setting",
    "band_choice",
    "computations",
    "guarantee_of",
    "make",
    "server_learning_rate",
]
