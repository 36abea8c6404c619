"""What a candidate of a plan guarantees."""

import pathlib

from mf_aggregators.planning import band_choice
from mf_aggregators.planning.planner import Candidate, Setting
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import Guarantee


def guarantee_of(
    candidate: Candidate, setting: Setting, *, cache_directory: pathlib.Path | None = None
) -> Guarantee:
    """Returns the guarantee of a run with a candidate.

    Args:
      candidate: One whose noise multiplier is no estimate, such as what is recommended.
      setting: That of the plan.
      cache_directory: Where the plan kept its certificates; without it, clients that draw for
        themselves are certified again.

    Returns:
      The guarantee, whose epsilon is at most that of the setting.

    Raises:
      ValueError: If the noise multiplier is a rough estimate.
    """
    if candidate.is_estimate:
        raise ValueError(
            f"the noise multiplier of {candidate.name_with_sampling} is a rough estimate, of which "
            "no guarantee may be stated."
        )
    multiplier, delta = candidate.noise_multiplier, setting.delta
    if candidate.sampling is None:
        return guarantees.planned(
            candidate.factorization, candidate.participation, multiplier, delta
        )
    return guarantees.sampled(
        candidate.factorization,
        candidate.sampling,
        multiplier,
        delta,
        certification=band_choice.certification_in(cache_directory),
    )
