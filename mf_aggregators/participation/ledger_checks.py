"""Checks whether a scheme can have drawn the cohorts of a ledger.

The cohorts alone are compared with the scheme, as anybody can who may read them. That they are the
very batches of a secret seed, and not chosen to look like such, only the holder of the seed can
tell (``Sampler.deviation``).
"""

from collections.abc import Sequence

import numpy as np

from mf_aggregators.kernel.losses import (
    Draws,
    FixedSize,
    InGroups,
    MinSeparation,
    Poisson,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.numbers import IntArray


def deviation(draws: Draws, cohorts: Sequence[IntArray]) -> str | None:
    """Returns why the cohorts of the first rounds cannot come from a scheme, or None.

    The number of rounds is checked, that each cohort has every client once and as many as the
    scheme draws, and the rounds of each client. What a scheme draws with next to no probability is
    no deviation.

    Args:
      draws: How clients are drawn.
      cohorts: For each round that was released the increasing indices of its clients, from 0;
        fewer rounds than those of the scheme for a run that is not finished.

    Returns:
      The first deviation, as the end of a sentence that names no client.
    """
    if len(cohorts) > draws.num_rounds:
        return f"the ledger has {len(cohorts)} rounds, more than {draws.num_rounds}"
    size = _batch_size(draws)
    for index, cohort in enumerate(cohorts):
        if np.any((cohort < 0) | (cohort >= draws.population)) or np.any(np.diff(cohort) <= 0):
            return f"the clients of {nth_round(index)} are not different ones of the population"
        if size is not None and len(cohort) != size:
            return f"{nth_round(index)} had {len(cohort)} clients, not {size}"
        if isinstance(draws, TruncatedPoisson) and len(cohort) > draws.largest_batch:
            return (
                f"{nth_round(index)} had {len(cohort)} clients, more than the largest batch of "
                f"{draws.largest_batch}"
            )
    if not cohorts:
        return None
    if isinstance(draws, MinSeparation) and draws.joining_probability < 1.0:
        return _of_timers(draws, cohorts)
    return _of_classes(draws, cohorts)


def nth_round(index: int) -> str:
    """Returns a round as messages about a ledger name it.

    Args:
      index: The round, from 0, as in the ledger.
    """
    return f"round {index + 1} (counted from 1)"


def _batch_size(draws: Draws) -> int | None:
    """The clients of every batch; None where it varies."""
    if isinstance(draws, FixedSize | Shuffling):
        return draws.clients_per_round
    if isinstance(draws, Poisson | TruncatedPoisson) and draws.sampling_probability >= 1.0:
        return draws.clients_per_round
    return None


def _of_classes(draws: Draws, cohorts: Sequence[IntArray]) -> str | None:
    """Says if a client took part in rounds of two groups or bins, or too often in one cycle."""
    # With a coin that always comes up heads, the round of the first participation is a bin.
    classes = draws.distance
    cycle = draws.rounds_of_cycle if isinstance(draws, Shuffling | RandomAllocation) else None
    class_of, last = np.full(draws.population, -1), np.full(draws.population, -1)
    for index, cohort in enumerate(cohorts):
        number = index % classes
        if np.any((class_of[cohort] != -1) & (class_of[cohort] != number)):
            other = "group of the population" if isinstance(draws, InGroups) else "bin"
            return f"a client of {nth_round(index)} also took part in a round of another {other}"
        before = last[cohort][last[cohort] >= 0] // classes
        if cycle is not None and np.any(before // cycle == index // classes // cycle):
            return f"a client of {nth_round(index)} took part twice in one cycle of its group"
        class_of[cohort], last[cohort] = number, index
    if not isinstance(draws, InGroups):
        return None
    found = np.bincount(class_of[class_of >= 0], minlength=classes)
    for group in range(classes):
        places = draws.group_slice(group)
        if found[group] > places.stop - places.start:
            return f"more clients took part in the rounds of group {group + 1} than it can have"
        if isinstance(draws, RandomAllocation):
            sizes = [len(cohort) for cohort in cohorts[group::classes]]
            whole = len(sizes) // draws.rounds_of_cycle * draws.rounds_of_cycle
            of_cycles = np.reshape(sizes[:whole], (-1, draws.rounds_of_cycle))
            if np.any(of_cycles.sum(axis=1) != draws.group_size):
                return "a client is in no round of a whole cycle of its group"
    return None


def _of_timers(draws: MinSeparation, cohorts: Sequence[IntArray]) -> str | None:
    """Why clients cannot have joined only when their timers allowed it."""
    last = np.full(draws.population, -draws.separation)
    for index, cohort in enumerate(cohorts):
        if np.any(index - last[cohort] < draws.separation):
            return (
                f"a client of {nth_round(index)} took part less than {draws.separation} rounds "
                "before"
            )
        last[cohort] = index
    return None
