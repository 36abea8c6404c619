"""Cohorts: which of the eligible clients take part in a round.

The cohort of a round is a function of (seed, round, who is eligible) alone. A run that
is resumed therefore draws the cohorts that the uninterrupted run would have drawn,
which keeps both its participation schema and its use of noise rows intact.
"""

import numpy as np


class TooFewEligibleClientsError(ValueError):
    """Fewer clients may join a round than its cohort needs."""


def draw(eligible: np.ndarray, cohort_size: int, seed: int, round_index: int) -> np.ndarray:
    """Draws a cohort uniformly among the eligible clients, without replacement.

    Args:
      eligible: (num_clients,) bool.
      cohort_size: How many clients take part.
      seed: Any non-negative integer; the same for all rounds of a run.
      round_index: The round, from 0.

    Returns:
      (cohort_size,) int64: increasing indices of clients.

    Raises:
      TooFewEligibleClientsError: If fewer clients are eligible. The timers are never
        bent to fill a cohort: the sensitivity, and with it the guarantee, rests on them.
    """
    candidates = np.flatnonzero(eligible)
    if len(candidates) < cohort_size:
        raise TooFewEligibleClientsError(
            f"round {round_index + 1} needs {cohort_size} clients, and the participation timers "
            f"allow {len(candidates)} of {len(eligible)}: use fewer clients per round, a smaller "
            "separation, more participations per client, or fewer rounds."
        )
    generator = generator_of(seed, round_index)
    return np.sort(generator.choice(candidates, size=cohort_size, replace=False))


def generator_of(seed: int, *coordinates: int) -> np.random.Generator:
    """Returns a random generator that is a function of a seed and coordinates alone.

    Args:
      seed: Any non-negative integer.
      *coordinates: Non-negative integers, for example a round and a client.

    Returns:
      The generator; other coordinates give independent ones.
    """
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=coordinates)
    return np.random.Generator(np.random.Philox(sequence))


def check_feasible(
    num_clients: int, cohort_size: int, separation: int, max_participations: int, num_rounds: int
) -> None:
    """Checks before a run what every round needs to find enough eligible clients.

    A client that took part in one of the last ``separation - 1`` rounds, or as often as it
    may, cannot join. In the worst case all places of those rounds went to different
    clients, so a round is certain to be filled if the clients outnumber ``separation``
    cohorts; and ``num_rounds`` cohorts need as many places as clients have participations.
    With as many participations as fit, this is sufficient; with fewer, a late round may
    still find too few clients, and the run stops there.

    Args:
      num_clients: The population.
      cohort_size: Clients per round.
      separation: b, 1 for no limit.
      max_participations: k, the most participations of one client in ``num_rounds``.
      num_rounds: n.

    Raises:
      TooFewEligibleClientsError: If some round cannot be filled whatever is drawn.
    """
    within_timer = min(separation, num_rounds) * cohort_size
    if within_timer > num_clients:
        raise TooFewEligibleClientsError(
            f"{num_clients} clients cannot fill rounds of {cohort_size} with "
            f"{separation} rounds between participations: {within_timer} would be needed. Use at "
            f"most {max(1, num_clients // max(1, min(separation, num_rounds)))} clients per round "
            f"or a separation of at most {max(1, num_clients // cohort_size)}."
        )
    if num_rounds * cohort_size > num_clients * max_participations:
        raise TooFewEligibleClientsError(
            f"{num_rounds} rounds of {cohort_size} clients need "
            f"{num_rounds * cohort_size} participations, and {num_clients} clients of at most "
            f"{max_participations} each have {num_clients * max_participations}. Use fewer "
            "rounds, fewer clients per round or more participations per client."
        )
