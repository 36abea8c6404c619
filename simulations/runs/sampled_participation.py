"""Checks of a ledger against the sampling scheme that is said to have made it."""

from mf_aggregators.participation import Sampler, SamplingScheme
from simulations.runs.round_records import ParticipationLedger

_OTHER_SCHEME = "the ledger records another way of drawing clients"


def deviation(scheme: SamplingScheme, ledger: ParticipationLedger) -> str | None:
    """Returns what of a ledger no data sampler of a scheme can have drawn.

    Args:
      scheme: The scheme.
      ledger: The ledger of a run, finished or not.

    Returns:
      Another scheme in the ledger, or what ``SamplingScheme.deviation`` finds in its cohorts,
      as the end of a sentence; None if there is neither.
    """
    if ledger.sampling != scheme:
        return _OTHER_SCHEME
    return scheme.deviation(len(ledger.client_ids), ledger.cohorts)


def deviation_from_draws(sampler: Sampler, ledger: ParticipationLedger) -> str | None:
    """Returns how a ledger differs from the batches that a sampler draws.

    Args:
      sampler: The sampler of the run, with its secret seed.
      ledger: The ledger of the run, finished or not.

    Returns:
      The first difference, as the end of a sentence; None if there is none.
    """
    if ledger.sampling != sampler.scheme:
        return _OTHER_SCHEME
    return sampler.deviation(len(ledger.client_ids), ledger.cohorts)
