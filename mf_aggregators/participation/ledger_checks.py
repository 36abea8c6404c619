"""Checks whether a scheme can have drawn the cohorts of a ledger.

The cohorts alone are compared with the scheme, as anybody can who may read them. That they are the
very batches of a secret seed, and not chosen to look like such, only the holder of the seed can
tell (``Sampler.deviation``).
"""

from collections.abc import Sequence

import numpy as np

from mf_aggregators.kernel.draws_of_clients import (
    Draws,
    FixedSize,
    Groups,
    InGroups,
    MinSeparation,
    Poisson,
    RandomAllocation,
    SecretRounds,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.losses import binomial_tail
from mf_aggregators.kernel.numbers import IntArray

# Cohorts that a scheme draws with a smaller probability count as drawn in another way. A run by the
# scheme fails each of three checks with at most this probability.
_LEAST_PROBABILITY = 1e-12


def deviation(draws: Draws, cohorts: Sequence[IntArray]) -> str | None:
    """Returns why the cohorts of the first rounds cannot come from a scheme, or None.

    The number of rounds is checked, that each cohort has every client once and as many as the
    scheme draws, and the rounds of each client. Random draws can give almost anything, some of it
    with next to no probability: a client, a round or a whole run with more participations than
    draws give, but for a probability of 1e-12, is a deviation as well. Draws by the scheme deviate
    with a probability of at most 3e-12.

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
    if not cohorts:
        return None
    if isinstance(draws, InGroups):
        return _of_groups(draws, cohorts)
    if isinstance(draws, MinSeparation) and draws.joining_probability < 1.0:
        return _of_timers(draws, cohorts)
    # With a coin that always comes up heads, the round of the first participation is a bin.
    return _of_bins(draws, cohorts)


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


def _of_groups(draws: Groups, cohorts: Sequence[IntArray]) -> str | None:
    group_of, last = np.full(draws.population, -1), np.full(draws.population, -1)
    bands = draws.num_bands
    for index, cohort in enumerate(cohorts):
        group = index % bands
        if np.any((group_of[cohort] != -1) & (group_of[cohort] != group)):
            return (
                f"a client of {nth_round(index)} also took part in a round of another group of "
                "the population"
            )
        if isinstance(draws, Shuffling | RandomAllocation):
            before = last[cohort][last[cohort] >= 0] // bands // draws.rounds_of_cycle
            if np.any(before == index // bands // draws.rounds_of_cycle):
                return f"a client of {nth_round(index)} took part twice in one cycle of its group"
        group_of[cohort], last[cohort] = group, index
    places = [draws.group_slice(group) for group in range(bands)]
    sizes_of_groups = np.array([each.stop - each.start for each in places])
    sizes = np.bincount(group_of[group_of >= 0], minlength=bands)
    for group in np.flatnonzero(sizes > sizes_of_groups):
        return f"more clients took part in the rounds of group {group + 1} than it can have"
    drawn_from = sizes_of_groups[np.arange(len(cohorts)) % bands]
    return _improbable(draws, group_of, drawn_from, cohorts)


def _improbable(
    draws: Groups, group_of: IntArray, drawn_from: IntArray, cohorts: Sequence[IntArray]
) -> str | None:
    """Participations that draws from groups do not give, or next to never.

    Args:
      draws: How clients are drawn.
      group_of: (m,) the group of each client; -1 where it is not known.
      drawn_from: For each round the clients of its group.
      cohorts: The clients of each round, at least one.
    """
    sizes = np.array([len(cohort) for cohort in cohorts])
    expected, bands = draws.clients_per_round, draws.num_bands
    if isinstance(draws, Shuffling):
        # A cycle has every client at most once.
        return None
    if isinstance(draws, RandomAllocation):
        cycle = draws.rounds_of_cycle
        for group in range(bands):
            of_group = sizes[group::bands]
            whole = of_group[: len(of_group) // cycle * cycle].reshape(-1, cycle)
            if np.any(whole.sum(axis=1) != draws.group_size):
                return "a client is in no round of a whole cycle of its group"
        return _too_large(sizes, drawn_from, 1.0 / cycle, expected)
    probability = draws.sampling_probability
    if isinstance(draws, TruncatedPoisson) and np.any(sizes > draws.largest_batch):
        index = int(np.argmax(sizes > draws.largest_batch))
        return (
            f"{nth_round(index)} had {sizes[index]} clients, more than the largest batch of "
            f"{draws.largest_batch}"
        )
    if not isinstance(draws, FixedSize):
        # The clients that stay in a cut batch are no more than those that came.
        found = _too_large(sizes, drawn_from, probability, expected)
        if found is not None:
            return found
        if binomial_tail(sizes.sum(), drawn_from.sum(), probability) < _LEAST_PROBABILITY:
            return _too_many(sizes.mean(), expected)
    counts = np.bincount(np.concatenate(cohorts), minlength=draws.population)
    # Rounds that draw from each client's group; clients that were never drawn have no known one.
    rounds = (len(cohorts) - np.maximum(group_of, 0) + bands - 1) // bands
    return _too_often(counts, rounds, probability, rounds, " that draw from its group")


def _of_bins(draws: SecretRounds, cohorts: Sequence[IntArray]) -> str | None:
    """Why clients cannot each have a bin of rounds, independent and as likely."""
    bins = np.full(draws.population, -1)
    for index, cohort in enumerate(cohorts):
        number = index % draws.separation
        if np.any((bins[cohort] != -1) & (bins[cohort] != number)):
            return f"a client of {nth_round(index)} also took part in a round of another bin"
        bins[cohort] = number
    sizes = np.bincount(bins[bins >= 0], minlength=draws.separation)
    clients = np.full(draws.separation, draws.population)
    return _too_large(sizes, clients, 1.0 / draws.separation, draws.clients_per_round)


def _of_timers(draws: MinSeparation, cohorts: Sequence[IntArray]) -> str | None:
    """Why clients cannot have joined by coins when their timers allowed it.

    A client with k participations had k coins that came up heads, and k - 1 waits of b - 1 rounds
    without a coin, so that it had at most n - (k - 1) (b - 1) coins. For all clients together, put
    their coins in a row: their number is random, but at most m n, and the heads among any fixed
    number of them are binomial. Hence the factor m n.
    """
    last, counts = np.full(draws.population, -draws.separation), np.zeros(draws.population, int)
    for index, cohort in enumerate(cohorts):
        if np.any(index - last[cohort] < draws.separation):
            return (
                f"a client of {nth_round(index)} took part less than {draws.separation} rounds "
                "before"
            )
        last[cohort] = index
        counts[cohort] += 1
    # In any one round, clients take part independently of each other.
    rounds, expected, clients = len(cohorts), draws.clients_per_round, draws.population
    sizes = np.array([len(cohort) for cohort in cohorts])
    found = _too_large(sizes, np.full(rounds, clients), expected / clients, expected)
    if found is not None:
        return found
    probability = draws.joining_probability
    coins = rounds - np.maximum(counts - 1, 0) * (draws.separation - 1)
    found = _too_often(counts, coins, probability, np.full(clients, rounds))
    if found is not None:
        return found
    every = binomial_tail(counts.sum(), coins.sum(), probability)
    if every * rounds * clients < _LEAST_PROBABILITY:
        return _too_many(counts.sum() / rounds, expected)
    return None


def _too_large(
    sizes: IntArray, drawn_from: IntArray, probability: float, expected: int
) -> str | None:
    """Says if a round has more clients than independent draws give.

    Args:
      sizes: (rounds,) the clients of each round.
      drawn_from: (rounds,) the clients that could have been drawn.
      probability: That each of them is drawn.
      expected: The clients that are expected in a round.
    """
    too_many = binomial_tail(sizes, drawn_from, probability) * len(sizes)
    if not np.any(too_many < _LEAST_PROBABILITY):
        return None
    worst = int(np.argmin(too_many))
    return (
        f"{nth_round(worst)} had {sizes[worst]} clients, more than chance gives where "
        f"{expected} are expected"
    )


def _too_many(mean: float, expected: int) -> str:
    return (
        f"its rounds had {mean:.4g} clients on average, more than chance gives where {expected} "
        "are expected"
    )


def _too_often(
    counts: IntArray, trials: IntArray, probability: float, rounds: IntArray, which: str = ""
) -> str | None:
    """Says if a client took part more often than independent draws give.

    Args:
      counts: (m,) the participations of each client.
      trials: (m,) its draws, at most.
      probability: That one of them makes it take part.
      rounds: (m,) its rounds, for the message.
      which: More about these, for the message.
    """
    too_often = binomial_tail(counts, trials, probability) * len(counts)
    if not np.any(too_often < _LEAST_PROBABILITY):
        return None
    worst = int(np.argmin(too_often))
    return (
        f"a client took part in {counts[worst]} of {rounds[worst]} rounds{which}, more than chance "
        "gives"
    )
