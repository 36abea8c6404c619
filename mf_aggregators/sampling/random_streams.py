"""Random generators that are functions of a seed and coordinates alone."""

import enum

import numpy as np


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


@enum.unique
class Draw(enum.IntEnum):
    """The second coordinate of the streams of a sampler, below ``Stream.BATCHES``.

    Attributes:
      PARTITION: The order of all clients that groups are slices of.
      ROUND: The batch of a round: the round.
      PASS: The shuffle of a pass over a group: the group, the pass.
      FIRST_WAITS: When timers first run out.
      COINS: Who joins in a round: the round.
      BINS: The bin of each client.
    """

    PARTITION = 0
    ROUND = 1
    PASS = 2
    FIRST_WAITS = 3
    COINS = 4
    BINS = 5


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
