"""A setting that tests of plans share, and change in what they are about."""

from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import Setting

TIMERS = Setting(
    num_rounds=24,
    population=60,
    clients_per_round=10,
    participation=MinSeparation(6),
    sampling=None,
    epsilon=8.0,
    delta=1e-6,
    model_size=1000,
)
