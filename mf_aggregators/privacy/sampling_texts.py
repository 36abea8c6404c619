"""What a statement says of sampling: how clients come into batches, and what is secret."""

from collections.abc import Mapping

from mf_aggregators.accounting.certificates import Claim
from mf_aggregators.accounting.sampling_schemes import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparationSampling,
    PartScheme,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
)
from mf_aggregators.privacy.printed_guarantees import rounded_up

_ACCOUNTING: Mapping[type, str] = {
    PoissonSampling: (
        "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): the privacy "
        "loss distribution of composed Poisson-sampled Gaussian mechanisms, by dp-accounting."
    ),
    FixedSizeSampling: (
        "Amplification by sampling for banded matrices (BandMF Thm 4): the privacy loss "
        "distribution of composed Gaussian mechanisms on batches sampled without replacement, by "
        "dp-accounting."
    ),
    Shuffling: (
        "Amplification by shuffling for banded matrices (BandMF Thm 4, Cor. F.2), by "
        "Feldman, McMillan and Talwar (2021), Thm 3.8, or no amplification where that is better."
    ),
    MinSeparationSampling: (
        "Amplification by secret coins under timers (b-min-sep sampling, arXiv 2602.09338): an "
        "upper bound on delta that is certified by Monte Carlo, whose failure probability is part "
        "of delta."
    ),
    BallsInBins: (
        "Amplification by secret rounds of each cycle (balls in bins, arXiv 2410.06266): an "
        "upper bound on delta that is certified by Monte Carlo, whose failure probability is part "
        "of delta."
    ),
}

_TOGETHER_IN_PARTS = """\
Each participation of a client is one Gaussian mechanism on the rounds that it changes,
     which are those of no other participation of that client."""

_TOGETHER_IN_SECRET_ROUNDS = """\
All rounds together are one mechanism, whose noise is that of a Gaussian one and whose
     mean depends on the secret rounds of each client, also with updates that depend on earlier
     rounds."""

UNIT = """\
One client of the population with all its data, whatever they are; where every example
     is a client of its own, one example."""

_VERIFIED_BY_FILES = """\
`participation.npz` holds every client's rounds and the sampling scheme, `config.json` all settings.
   Both are secret here, and so are `checkpoints/sampling_seed.json` and the sizes of batches, which
   the fractions in `metrics.csv` and TensorBoard give away: towards whoever knows who took part
   nothing is amplified. Whoever has these files checks every draw, with
   `mf-report --ledger=participation.npz --sampling_seed=checkpoints/sampling_seed.json`."""

_VERIFIED_BY_ROUNDS = """\
Every client's rounds are secret here, and so are the sampler's seed and the sizes of batches:
   towards whoever knows who took part nothing is amplified. Whoever has the rounds, the sampling
   scheme and the seed can repeat every draw and compare."""


def verification(has_run_directory: bool) -> str:
    """Returns who can check a sampled run.

    Args:
      has_run_directory: Whether the run wrote the files of a run directory.
    """
    return _VERIFIED_BY_FILES if has_run_directory else _VERIFIED_BY_ROUNDS


def together(scheme: SamplingScheme) -> str:
    """Returns what all rounds are together, as a mechanism."""
    if isinstance(scheme, (MinSeparationSampling, BallsInBins)):
        return _TOGETHER_IN_SECRET_ROUNDS
    return _TOGETHER_IN_PARTS


def accounting(scheme: SamplingScheme) -> str:
    """Returns how amplification is computed, in whole sentences."""
    return _ACCOUNTING[type(scheme)]


def certificate(claim: Claim) -> str:
    """Returns how an epsilon was proved, as a sentence."""
    samples = claim.num_samples + claim.num_untilted
    return (
        f"Its certificate is a test with seed {claim.seed} and {samples} random samples, which "
        f"anybody can repeat. It would be passed by a false claim with a probability of at most "
        f"{rounded_up(claim.failure_probability, '.2g')}, which delta covers."
    )


def has_random_sizes(scheme: SamplingScheme | None) -> bool:
    """Returns whether batches of a scheme vary in size around the stated one."""
    return isinstance(scheme, PoissonSampling | MinSeparationSampling | BallsInBins)


def assumption(scheme: SamplingScheme) -> str:
    """Returns what a guarantee assumes of how clients come into batches, in whole sentences."""
    if isinstance(scheme, MinSeparationSampling):
        return (
            f"Secret coins under timers: a client that took part is not free for the next "
            f"{_count(scheme.separation - 1, 'round')}. In every round in which it is free, it "
            f"takes part with probability {rounded_up(scheme.joining_probability, '.6g')}, by a "
            f"secret coin of its own. In round 0 it is free with probability "
            f"{rounded_up(scheme.probability_free_at_first, '.6g')}, or else first in one of the "
            f"rounds 1 to {scheme.separation - 1}, each of which is as likely. {_SECRET_OF_CLIENTS}"
        )
    if isinstance(scheme, BallsInBins):
        return (
            f"One secret round of each cycle: every client is put into one of "
            f"{_count(scheme.separation, 'bin')}, each as likely as the others, independently of "
            f"all others, and takes part in all rounds i with i modulo {scheme.separation} equal "
            f"to its bin. {_SECRET_OF_CLIENTS}"
        )
    return (
        f"Sampling: the population is split into {_count(scheme.num_bands, 'part')}, as many as C "
        f"has bands, and round i draws from part i modulo {scheme.num_bands} alone, "
        f"{_draws(scheme)} The server draws every batch itself, keeps who was drawn secret, "
        "and every client that was drawn takes part."
    )


_SECRET_OF_CLIENTS = (
    "Neither the data nor what was released has a part in that, and nobody who sees what was "
    "released learns who took part. A client that cannot be asked in such a round contributes "
    "nothing to it; for its later rounds that makes no difference, and none of them has a part in "
    "whether it can be asked. Rounds of too many or too few clients are released as all others, "
    "and their sums are divided by the same number."
)


def _draws(scheme: PartScheme) -> str:
    if isinstance(scheme, PoissonSampling):
        return f"each client with probability {rounded_up(scheme.sampling_probability, '.6g')}."
    if isinstance(scheme, FixedSizeSampling):
        return f"a uniformly random subset of {scheme.clients_per_round} of its {scheme.part_size}."
    return (
        f"the next batch of {scheme.clients_per_round} of a shuffled list of all its "
        f"{scheme.part_size}, shuffled afresh for each pass."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
