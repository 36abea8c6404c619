"""Cohorts: which of the eligible clients take part in a round.

The cohort of a round is a function of (seed, round, who is eligible) alone. A run that
is resumed therefore draws the cohorts that the uninterrupted run would have drawn,
which keeps both its participation schema and its use of noise rows intact.
"""

import numpy as np

from mf_aggregators import random_streams

_BLOCK = 2**14


class TooFewEligibleClientsError(ValueError):
    """Fewer clients may join a round than its cohort needs."""


def draw(eligible: np.ndarray, clients_per_round: int, seed: int, round_index: int) -> np.ndarray:
    """Draws a cohort uniformly among the eligible clients, without replacement.

    Args:
      eligible: (num_clients,) bool.
      clients_per_round: How many clients take part.
      seed: Any non-negative integer; the same for all rounds of a run.
      round_index: The round, from 0.

    Returns:
      (clients_per_round,) int64: increasing indices of clients.

    Raises:
      TooFewEligibleClientsError: If fewer clients are eligible. The timers are never
        bent to fill a cohort: the sensitivity, and with it the guarantee, rests on them.
    """
    # By blocks that fit a processor's cache: of millions of clients, a list of those that are
    # eligible would take longer to write than to draw from.
    blocks = [eligible[i : i + _BLOCK] for i in range(0, len(eligible), _BLOCK)]
    ends = np.cumsum([np.count_nonzero(block) for block in blocks], dtype=np.int64)
    num_eligible = int(ends[-1]) if blocks else 0
    if num_eligible < clients_per_round:
        raise TooFewEligibleClientsError(
            f"round {round_index + 1} needs {clients_per_round} clients, and the participation "
            f"timers allow {num_eligible} of {len(eligible)}: use fewer clients per round, a "
            "smaller separation, more participations per client, or fewer rounds."
        )
    generator = random_streams.generator_of(seed, round_index)
    ranks = np.sort(generator.choice(num_eligible, size=clients_per_round, replace=False))
    chosen = np.empty(clients_per_round, dtype=np.int64)
    block_of = np.searchsorted(ends, ranks, side="right")
    for number in np.unique(block_of):
        here = block_of == number
        before = int(ends[number - 1]) if number else 0
        chosen[here] = number * _BLOCK + np.flatnonzero(blocks[number])[ranks[here] - before]
    return chosen
