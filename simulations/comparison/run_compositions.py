"""What repeated runs on the same clients reveal together: the guarantee of their composition."""

import dataclasses
import math
from collections.abc import Iterable

from dp_accounting import dp_event

from mf_aggregators import accounting, printed_guarantees
from mf_aggregators.participation import SamplingScheme
from simulations.comparison.repeated_runs import FinishedRun

# Epsilons of privacy loss distributions, whose grids differ, may be so far apart.
_RELATIVE_TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Composition:
    """All private runs of a comparison, which train on the same clients.

    Attributes:
      private_runs: How many they are.
      other_runs: The other runs, which guarantee nothing.
      epsilon: The epsilon of the private runs together, for a client that may be in all of
        them; None without private runs, and where none can be stated.
      delta: The delta that this epsilon is for, the largest of a run; None without private runs.
      reason: Why no epsilon of private runs can be stated; None if one is, or there are none.
    """

    private_runs: int
    other_runs: int
    epsilon: float | None
    delta: float | None
    reason: str | None = None


def composition(runs: Iterable[FinishedRun]) -> Composition:
    """Returns the guarantee of all private runs together.

    Unamplified runs are Gaussian mechanisms, and together one of them
    (``accounting.composed_gaussian_epsilon``). Where some are amplified, all are composed by
    privacy loss distributions (``accounting.composed_epsilon``): Poisson-sampled ones as what they
    are, and those of other samplers, which such distributions do not know, without amplification. A
    run that broke its plan enters with what may be stated of it. Where the result of a run does not
    say its noise multiplier and its sampling, or these do not give what it states, no guarantee is
    stated, and the reason is.

    Args:
      runs: The runs.
    """
    every = list(runs)
    private = [run for run in every if run.epsilon is not None]
    others = len(every) - len(private)
    if not private:
        return Composition(0, others, None, None)
    delta = max(run.delta for run in private if run.delta is not None)
    if len(private) == 1:
        return Composition(1, others, private[0].epsilon, delta)
    try:
        multipliers = [_noise_multiplier(run) for run in private]
        _check_says_enough(private)
        if all(run.sampling is None for run in private):
            epsilon = accounting.composed_gaussian_epsilon(multipliers, delta)
        else:
            events = [
                _event(sigma, run.sampling) for sigma, run in zip(multipliers, private, strict=True)
            ]
            epsilon = accounting.composed_epsilon(events, delta)
    except ValueError as error:
        # What was trained for hours is tabulated all the same.
        return Composition(len(private), others, None, delta, str(error))
    return Composition(len(private), others, epsilon, delta)


def sentences(found: Composition) -> str:
    """Returns what holds for a client of all runs, epsilon and delta rounded up.

    Args:
      found: What :func:`composition` returned.
    """
    if found.private_runs == 0:
        return "No run is private."
    if found.epsilon is None or found.delta is None:
        return (
            f"No guarantee of all {found.private_runs} private runs together can be stated: "
            f"{found.reason}"
        )
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


def _noise_multiplier(run: FinishedRun) -> float:
    """That of a run; raises ValueError where its result does not say enough to be composed."""
    if run.noise_multiplier is None:
        # Its epsilon alone does not tell: that of a sampled run is one of other noise.
        raise ValueError(
            "the result of a run, perhaps of an older version, does not say its noise multiplier "
            "and how its clients were sampled: run it again to compose it."
        )
    return run.noise_multiplier


def _check_says_enough(runs: Iterable[FinishedRun]) -> None:
    """Raises ValueError unless what is composed of each run is at least what the run states."""
    # Repetitions state the same.
    for run in {(run.epsilon, run.delta, run.noise_multiplier, run.sampling): run for run in runs}:
        _check_run(*run)


def _check_run(
    epsilon: float | None,
    delta: float | None,
    noise_multiplier: float | None,
    sampling: SamplingScheme | None,
) -> None:
    if epsilon is None or delta is None or noise_multiplier is None:
        return
    if sampling is not None and sampling.composes_amplified:
        alone = sampling.epsilon(noise_multiplier, delta)
    else:
        count = 1 if sampling is None else _most_participations(sampling)
        alone = accounting.exact_epsilon(noise_multiplier / math.sqrt(count), delta)
    if alone < (1.0 - _RELATIVE_TOLERANCE) * epsilon:
        raise ValueError(
            f"the result of a run states epsilon {epsilon:.6g} at delta {delta:g}, and its noise "
            f"multiplier {noise_multiplier:.6g} alone would give {alone:.6g}: it is of another "
            "kind of guarantee, which cannot be composed."
        )


def _event(sigma: float, scheme: SamplingScheme | None) -> dp_event.DpEvent:
    if scheme is None:
        return accounting.event(sigma)
    if scheme.composes_amplified:
        return scheme.event(sigma)
    return dp_event.SelfComposedDpEvent(accounting.event(sigma), _most_participations(scheme))


def _most_participations(scheme: SamplingScheme) -> int:
    """The most participations of a client, each of which changes rows of its own."""
    return scheme.most_participations()
