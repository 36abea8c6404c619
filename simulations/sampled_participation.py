"""Checks of a ledger against the sampling scheme that is said to have made it.

An amplified guarantee is worth nothing if the batches came about in another way. What the
cohorts alone can show, anyone can check who may read the ledger (:func:`deviation`). That
they are the very batches of a secret seed, and not chosen to look like such, only the
holder of the seed can (:func:`deviation_from_draws`).
"""

import numpy as np

from mf_aggregators.sampling_schemes import PoissonSampling, SamplingScheme, Shuffling
from simulations import data_samplers
from simulations.data_samplers import DataSampler
from simulations.participation_ledger import ParticipationLedger


def deviation(scheme: SamplingScheme, ledger: ParticipationLedger) -> str | None:
    """Returns what of a ledger no data sampler of a scheme can have drawn.

    Checked are the scheme that the ledger records, its population and number of rounds;
    that each cohort has every client once, and as many as the scheme draws; that each
    client took part only in rounds that are congruent modulo the number of parts, and so
    in at most ceil(n / b) of them; that no part has too many clients; and, where parts are
    shuffled, that no client took part twice in one pass.

    Args:
      scheme: The scheme.
      ledger: Of a run, finished or not.

    Returns:
      The first deviation, as the end of a sentence; None if there is none.
    """
    if ledger.sampling != scheme:
        return "its ledger records another way of drawing clients"
    if len(ledger.client_ids) != scheme.population:
        return f"its ledger has {len(ledger.client_ids)} clients, not {scheme.population}"
    if ledger.num_rounds > scheme.num_rounds:
        return f"its ledger has {ledger.num_rounds} rounds, more than {scheme.num_rounds}"
    parts = np.full(scheme.population, -1)
    passes = np.full(scheme.population, -1)
    for index, cohort in enumerate(ledger.cohorts):
        if np.any((cohort < 0) | (cohort >= scheme.population)) or np.any(np.diff(cohort) <= 0):
            return f"the clients of round {index + 1} are not different ones of the population"
        size = scheme.clients_per_round
        if not isinstance(scheme, PoissonSampling) and len(cohort) != size:
            return f"round {index + 1} had {len(cohort)} clients, not {size}"
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
    sizes = np.bincount(parts[parts >= 0], minlength=scheme.num_bands)
    for part, size in enumerate(sizes):
        places = data_samplers.part_slice(scheme, part)
        if size > places.stop - places.start:
            return f"more clients took part in the rounds of part {part + 1} than it can have"
    return None


def deviation_from_draws(sampler: DataSampler, ledger: ParticipationLedger) -> str | None:
    """Returns how a ledger differs from the batches that a sampler draws.

    Args:
      sampler: The sampler of the run, with its secret seed.
      ledger: Of the run, finished or not.

    Returns:
      The first difference, as the end of a sentence; None if there is none.
    """
    found = deviation(sampler.scheme, ledger)
    if found is not None:
        return found
    for index, cohort in enumerate(ledger.cohorts):
        if not np.array_equal(cohort, sampler.draw(index)):
            return f"the clients of round {index + 1} are not those that the sampler draws"
    return None
