"""Cohorts: which of the eligible clients take part in a round.

The cohort of a round is a function of (seed, round, who is eligible) alone. A run that
is resumed therefore draws the cohorts that the uninterrupted run would have drawn,
which keeps both its participation schema and its use of noise rows intact.
"""

import enum

import numpy as np

_BLOCK = 2**14


@enum.unique
class Stream(enum.IntEnum):
    """The first coordinate of every random stream of a run's seed, see :func:`generator_of`.

    Cohorts alone have none of these: theirs is the round, and nothing follows it. All other
    streams have at least one more coordinate, so that no two are the same.

    Attributes:
      EXAMPLES: The order of a client's examples: round, name of the client.
      EVALUATION: The sentences of a split that models are evaluated on: the split's number.
      BATCHES: What a data sampler draws: the kind of draw and its coordinates.
      DEVICES: What a population of devices draws: the kind of draw and its coordinates.
    """

    EXAMPLES = 1
    EVALUATION = 2
    BATCHES = 3
    DEVICES = 4


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
    generator = generator_of(seed, round_index)
    ranks = np.sort(generator.choice(num_eligible, size=clients_per_round, replace=False))
    chosen = np.empty(clients_per_round, dtype=np.int64)
    block_of = np.searchsorted(ends, ranks, side="right")
    for number in np.unique(block_of):
        here = block_of == number
        before = int(ends[number - 1]) if number else 0
        chosen[here] = number * _BLOCK + np.flatnonzero(blocks[number])[ranks[here] - before]
    return chosen


def generator_of(seed: int, *coordinates: int) -> np.random.Generator:
    """Returns a random generator that is a function of a seed and coordinates alone.

    Args:
      seed: Any non-negative integer.
      *coordinates: Non-negative integers: a :class:`Stream` and at least one more, or, for a
        cohort, the round alone.

    Returns:
      The generator; other coordinates give independent ones.
    """
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=coordinates)
    return np.random.Generator(np.random.Philox(sequence))
