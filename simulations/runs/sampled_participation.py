"""Checks of a ledger against the sampling scheme that is said to have made it.

What the cohorts alone can show is the library's to check
(``mf_aggregators.privacy.sampled_cohorts``). That they are the very batches of a secret seed, and
not chosen to look like such, only the holder of the seed can (:func:`deviation_from_draws`).
"""

from mf_aggregators.accounting.sampling_schemes import SamplingScheme
from mf_aggregators.privacy import sampled_cohorts
from mf_aggregators.sampling.data_samplers import DataSampler
from simulations.runs.participation_ledger import ParticipationLedger

_OTHER_SCHEME = "the ledger records another way of drawing clients"


def deviation(scheme: SamplingScheme, ledger: ParticipationLedger) -> str | None:
    """Returns what of a ledger no data sampler of a scheme can have drawn.

    Args:
      scheme: The scheme.
      ledger: The ledger of a run, finished or not.

    Returns:
      Another scheme in the ledger, or what ``sampled_cohorts.deviation`` finds in its cohorts,
      as the end of a sentence; None if there is neither.
    """
    if ledger.sampling != scheme:
        return _OTHER_SCHEME
    return sampled_cohorts.deviation(scheme, len(ledger.client_ids), ledger.cohorts)


def deviation_from_draws(sampler: DataSampler, ledger: ParticipationLedger) -> str | None:
    """Returns how a ledger differs from the batches that a sampler draws.

    Args:
      sampler: The sampler of the run, with its secret seed.
      ledger: The ledger of the run, finished or not.

    Returns:
      The first difference, as the end of a sentence; None if there is none.
    """
    if ledger.sampling != sampler.scheme:
        return _OTHER_SCHEME
    return sampled_cohorts.deviation_from_draws(sampler, len(ledger.client_ids), ledger.cohorts)
