"""Whether the cohorts of a run can have been drawn by the sampling scheme that is named for it.

An amplified guarantee is worth nothing if the batches came about in another way. What the
cohorts alone can show, anyone can check who may read them (:func:`deviation`). That they are the
very batches of a secret seed, and not chosen to look like such, only the holder of the seed can
tell (:func:`deviation_from_draws`).
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from mf_aggregators.accounting import sampling_schemes
from mf_aggregators.accounting.sampling_schemes import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparationSampling,
    PartScheme,
    PoissonSampling,
    SamplingScheme,
    SeparatedScheme,
    Shuffling,
)
from mf_aggregators.sampling.data_samplers import DataSampler

# What a scheme draws with a smaller probability is taken for drawn in another way. Each of three
# questions is asked so that a run by the scheme fails it with no larger one.
_LEAST_PROBABILITY = 1e-12


def deviation(
    scheme: SamplingScheme, num_clients: int, cohorts: Sequence[np.ndarray]
) -> str | None:
    """Returns what of the first rounds of a run no draws by a scheme can have given.

    Checked are the population and the number of rounds; that each cohort has every client
    once, and as many as the scheme draws; for schemes with parts that each client took part only
    in rounds that are congruent modulo the number of parts, and so in at most ceil(n / b) of them,
    that no part has too many clients, and, where parts are shuffled, that no client took part
    twice in one pass; under timers that the participations of each client are far enough apart;
    of balls in bins that each client took part in rounds of one bin alone. A client of these may
    be absent from a round in which it was to take part. Random draws can give almost anything,
    some of it with next to no probability: a client, a round or a whole run with more
    participations than independent draws give, but for a probability of 1e-12, is a deviation as
    well.

    Args:
      scheme: The scheme.
      num_clients: The clients of the population, drawn or not.
      cohorts: For each round that was released the increasing indices of its clients, from 0;
        fewer rounds than those of the scheme for a run that is not finished.

    Returns:
      The first deviation, as the end of a sentence that names no client; None if there is
      none. Draws by the scheme deviate with a probability of at most 3e-12.
    """
    if num_clients != scheme.population:
        return f"the ledger has {num_clients} clients, not {scheme.population}"
    if len(cohorts) > scheme.num_rounds:
        return f"the ledger has {len(cohorts)} rounds, more than {scheme.num_rounds}"
    for index, cohort in enumerate(cohorts):
        found = _deviation_of_cohort(scheme, index, cohort)
        if found is not None:
            return found
    if isinstance(scheme, MinSeparationSampling) and scheme.joining_probability < 1.0:
        return _deviation_of_timers(scheme, cohorts)
    if isinstance(scheme, MinSeparationSampling | BallsInBins):
        # With a coin that always comes up heads, the round of the first participation is a bin.
        return _deviation_of_bins(scheme, cohorts)
    return _deviation_of_parts(scheme, cohorts)


def deviation_from_draws(
    sampler: DataSampler,
    num_clients: int,
    cohorts: Sequence[np.ndarray],
    *,
    may_be_absent: bool = False,
) -> str | None:
    """Returns how the first rounds of a run differ from what a sampler draws.

    Args:
      sampler: The sampler of the run, with its secret seed.
      num_clients: As in :func:`deviation`.
      cohorts: As there.
      may_be_absent: Whether clients that were drawn may be missing, as those that could not be
        asked are. Of schemes without parts, no guarantee is weaker for that.

    Returns:
      The first difference, as the end of a sentence that names no client; None if there is none.
    """
    found = deviation(sampler.scheme, num_clients, cohorts)
    if found is not None:
        return found
    for index, cohort in enumerate(cohorts):
        drawn = sampler.draw(index)
        if may_be_absent:
            if not np.all(np.isin(cohort, drawn)):
                return f"a client of round {index + 1} is not one of those that the sampler draws"
        elif not np.array_equal(cohort, drawn):
            return f"the clients of round {index + 1} are not those that the sampler draws"
    return None


def num_absent(sampler: DataSampler, cohorts: Sequence[np.ndarray]) -> int:
    """Returns how many participations that a sampler draws the first rounds of a run lack.

    Args:
      sampler: The sampler of the run.
      cohorts: As in :func:`deviation`.
    """
    return sum(
        len(np.setdiff1d(sampler.draw(index), cohort)) for index, cohort in enumerate(cohorts)
    )


def _deviation_of_cohort(scheme: SamplingScheme, index: int, cohort: np.ndarray) -> str | None:
    """What of a round alone no draw can have given."""
    if np.any((cohort < 0) | (cohort >= scheme.population)) or np.any(np.diff(cohort) <= 0):
        return f"the clients of round {index + 1} are not different ones of the population"
    size = _size_of_batches(scheme)
    if size is not None and len(cohort) != size:
        return f"round {index + 1} had {len(cohort)} clients, not {size}"
    return None


def _deviation_of_timers(
    scheme: MinSeparationSampling, cohorts: Sequence[np.ndarray]
) -> str | None:
    last = np.full(scheme.population, -scheme.separation)
    counts = np.zeros(scheme.population, np.int64)
    for index, cohort in enumerate(cohorts):
        if np.any(index - last[cohort] < scheme.separation):
            return (
                f"a client of round {index + 1} took part less than {scheme.separation} rounds "
                "before"
            )
        last[cohort] = index
        counts[cohort] += 1
    if not cohorts:
        return None
    # In any one round, clients take part independently of each other.
    rate = scheme.clients_per_round / scheme.population
    sizes = np.array([len(cohort) for cohort in cohorts])
    found = _too_large(scheme, sizes, np.full(len(sizes), scheme.population), rate)
    return found or _too_often_under_timers(scheme, counts, len(cohorts))


def _too_often_under_timers(
    scheme: MinSeparationSampling, counts: np.ndarray, num_rounds: int
) -> str | None:
    """A client's participations, or all together, where there are more than coins give.

    The k-th participation of a client has had k coins that came up heads, and k - 1 waits of
    b - 1 rounds without a coin, so that n - (k - 1) (b - 1) coins are the most that there were.
    Put one client's coins after the other's: how many coins there were is random, and one of the
    numbers up to m n, for each of which so many heads have a binomial law.
    """
    coins = num_rounds - np.maximum(counts - 1, 0) * (scheme.separation - 1)
    probability = scheme.joining_probability
    too_often = _probability_of(counts, coins, probability) * scheme.population
    if np.any(too_often < _LEAST_PROBABILITY):
        worst = int(np.argmin(too_often))
        return (
            f"a client took part in {counts[worst]} of {num_rounds} rounds, more than chance gives"
        )
    every = _probability_of(counts.sum(), coins.sum(), probability)
    if every * num_rounds * scheme.population < _LEAST_PROBABILITY:
        return (
            f"its rounds had {counts.sum() / num_rounds:.4g} clients on average, more than chance "
            f"gives where {scheme.clients_per_round} are expected"
        )
    return None


def _deviation_of_bins(scheme: SeparatedScheme, cohorts: Sequence[np.ndarray]) -> str | None:
    bins = np.full(scheme.population, -1)
    for index, cohort in enumerate(cohorts):
        number = index % scheme.separation
        if np.any((bins[cohort] != -1) & (bins[cohort] != number)):
            return f"a client of round {index + 1} also took part in a round of another bin"
        bins[cohort] = number
    if not cohorts:
        return None
    sizes = np.bincount(bins[bins >= 0], minlength=scheme.separation)
    trials = np.full(scheme.separation, scheme.population)
    return _too_large(scheme, sizes, trials, 1.0 / scheme.separation)


def _deviation_of_parts(scheme: PartScheme, cohorts: Sequence[np.ndarray]) -> str | None:
    parts = np.full(scheme.population, -1)
    passes = np.full(scheme.population, -1)
    for index, cohort in enumerate(cohorts):
        found = _deviation_of_round(scheme, index, cohort, parts, passes)
        if found is not None:
            return found
    sizes = np.bincount(parts[parts >= 0], minlength=scheme.num_bands)
    for part, size in enumerate(sizes):
        if size > sampling_schemes.size_of_part(scheme, part):
            return f"more clients took part in the rounds of part {part + 1} than it can have"
    return _improbable(scheme, parts, cohorts)


def _deviation_of_round(
    scheme: PartScheme, index: int, cohort: np.ndarray, parts: np.ndarray, passes: np.ndarray
) -> str | None:
    """What of a round no draw can have given, after the rounds before it.

    Args:
      scheme: The scheme.
      index: The round, from 0.
      cohort: The increasing indices of its clients.
      parts: (m,) the part of each client by the rounds before, -1 for none; the round is added.
      passes: (m,) likewise the last pass over its part in which each client took part.
    """
    part = index % scheme.num_bands
    if np.any((parts[cohort] != -1) & (parts[cohort] != part)):
        return (
            f"a client of round {index + 1} also took part in a round of another part of the "
            "population"
        )
    parts[cohort] = part
    if isinstance(scheme, Shuffling):
        number = index // scheme.num_bands // scheme.batches_per_pass
        if np.any(passes[cohort] == number):
            return f"a client of round {index + 1} took part twice in one pass over its part"
        passes[cohort] = number
    return None


def _size_of_batches(scheme: SamplingScheme) -> int | None:
    """The clients of every batch; None where it varies."""
    if isinstance(scheme, MinSeparationSampling | BallsInBins):
        return None
    if isinstance(scheme, PoissonSampling) and scheme.sampling_probability < 1.0:
        return None
    return scheme.clients_per_round


def _improbable(scheme: PartScheme, parts: np.ndarray, cohorts: Sequence[np.ndarray]) -> str | None:
    """What has more participations than draws give, of schemes whose rounds are independent."""
    if isinstance(scheme, Shuffling) or not cohorts:
        return None
    if isinstance(scheme, FixedSizeSampling):
        return _too_often(scheme, parts, cohorts, scheme.clients_per_round / scheme.part_size)
    return _too_many(scheme, cohorts) or _too_often(
        scheme, parts, cohorts, scheme.sampling_probability
    )


def _too_many(scheme: PoissonSampling, cohorts: Sequence[np.ndarray]) -> str | None:
    """Of a round, or of all rounds together: more clients than Poisson sampling gives."""
    drawn_from = np.array(
        [sampling_schemes.size_of_part(scheme, i % scheme.num_bands) for i in range(len(cohorts))]
    )
    sizes = np.array([len(cohort) for cohort in cohorts])
    probability = scheme.sampling_probability
    found = _too_large(scheme, sizes, drawn_from, probability)
    if found is not None:
        return found
    if _probability_of(sizes.sum(), drawn_from.sum(), probability) < _LEAST_PROBABILITY:
        return (
            f"its rounds had {sizes.mean():.4g} clients on average, more than chance gives "
            f"where {scheme.clients_per_round} are expected"
        )
    return None


def _too_large(
    scheme: SamplingScheme, sizes: np.ndarray, drawn_from: np.ndarray, probability: float
) -> str | None:
    """Of a round: more clients than independent draws give.

    Args:
      scheme: The scheme.
      sizes: (rounds,) the clients of each round.
      drawn_from: (rounds,) how many could have been drawn.
      probability: That each of them is drawn.
    """
    too_many = _probability_of(sizes, drawn_from, probability) * len(sizes)
    if not np.any(too_many < _LEAST_PROBABILITY):
        return None
    worst = int(np.argmin(too_many))
    return (
        f"round {worst + 1} had {sizes[worst]} clients, more than chance gives where "
        f"{scheme.clients_per_round} are expected"
    )


def _too_often(
    scheme: PartScheme, parts: np.ndarray, cohorts: Sequence[np.ndarray], probability: float
) -> str | None:
    """A client's participations where there are more than independent draws give."""
    counts = np.bincount(np.concatenate(cohorts), minlength=scheme.population)
    # Rounds that draw from each client's part; clients that were never drawn have no known one.
    bands = scheme.num_bands
    rounds = (len(cohorts) - np.maximum(parts, 0) + bands - 1) // bands
    too_often = _probability_of(counts, rounds, probability) * scheme.population
    if not np.any(too_often < _LEAST_PROBABILITY):
        return None
    worst = int(np.argmin(too_often))
    return (
        f"a client took part in {counts[worst]} of {rounds[worst]} rounds that draw from its "
        "part, more than chance gives"
    )


def _probability_of(count: np.ndarray, trials: np.ndarray, probability: float) -> np.ndarray:
    """That so many or more of independent trials succeed: an incomplete beta function."""
    at_least_one = np.maximum(count, 1)
    tail = special.betainc(at_least_one, np.maximum(trials - at_least_one, 0) + 1, probability)
    return np.where(count > 0, tail, 1.0)
