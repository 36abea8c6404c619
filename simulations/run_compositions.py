"""What repeated runs on the same clients reveal together: the guarantee of their composition."""

import dataclasses
import math
from collections.abc import Iterable

from dp_accounting import dp_event

from mf_aggregators import accounting, amplification, printed_guarantees
from mf_aggregators.sampling_schemes import PoissonSampling
from simulations.repeated_runs import FinishedRun

# What the search for a noise multiplier may add to it.
_SEARCHED = 1e-9


@dataclasses.dataclass(frozen=True)
class Composition:
    """All private runs of a comparison, which train on the same clients.

    Attributes:
      private_runs: How many they are.
      other_runs: The other runs, which guarantee nothing.
      epsilon: Of the private runs together, for a client that may be in all; None without any.
      delta: That this epsilon is at, the largest of a run; None without any.
    """

    private_runs: int
    other_runs: int
    epsilon: float | None
    delta: float | None


def composition(runs: Iterable[FinishedRun]) -> Composition:
    """Returns the guarantee of all private runs together.

    Unamplified runs are Gaussian mechanisms, whose composition is one of noise multiplier
    1 / sqrt(sum of 1 / sigma^2) exactly (Dong, Roth and Su, 2022, Cor. 3.3). Poisson-sampled
    ones are composed with it by privacy loss distributions; those of other samplers, which
    these do not know, enter without amplification. A run that broke its plan enters with what it
    earned.

    Args:
      runs: The runs.
    """
    every = list(runs)
    private = [run for run in every if run.epsilon is not None]
    if not private:
        return Composition(0, len(every), None, None)
    delta = max(run.delta for run in private if run.delta is not None)
    if len(private) == 1:
        return Composition(1, len(every) - 1, private[0].epsilon, delta)
    gaussian = 1.0 / math.sqrt(math.fsum(1.0 / _unamplified(run) ** 2 for run in private))
    epsilon = accounting.epsilon(gaussian, delta)
    sampled = [run for run in private if isinstance(run.sampling, PoissonSampling)]
    if sampled:
        events: list[dp_event.DpEvent] = [
            amplification.event(run.sampling, run.noise_multiplier)
            for run in sampled
            if run.sampling is not None and run.noise_multiplier is not None
        ]
        others = [run for run in private if run not in sampled]
        if others:
            together = math.fsum(1.0 / _unamplified(run) ** 2 for run in others)
            events.append(accounting.event(1.0 / math.sqrt(together)))
        epsilon = min(epsilon, accounting.composed_epsilon(events, delta))
    return Composition(len(private), len(every) - len(private), epsilon, delta)


def sentences(found: Composition) -> str:
    """Returns what holds for a client of all runs, epsilon and delta rounded up.

    Args:
      found: What :func:`composition` returned.
    """
    if found.epsilon is None or found.delta is None:
        return "No run is private."
    pair = printed_guarantees.pair(found.epsilon, found.delta)
    if found.private_runs == 1:
        text = f"The one private run: {pair}-DP for each client."
    else:
        text = (
            f"All {found.private_runs} private runs together, on the same clients: {pair}-DP for "
            "each client."
        )
    if found.other_runs:
        text += " Whoever sees the runs that are not private, too, is promised nothing."
    return text


def _unamplified(run: FinishedRun) -> float:
    """The noise multiplier of all participations of a client together, without amplification."""
    if run.noise_multiplier is None:
        # An older result, of a Gaussian mechanism that its epsilon tells.
        assert run.epsilon is not None
        assert run.delta is not None
        return accounting.noise_multiplier(run.epsilon, run.delta) * (1.0 - _SEARCHED)
    if run.sampling is None:
        return run.noise_multiplier
    return amplification.unamplified_noise_multiplier(run.sampling, run.noise_multiplier)
