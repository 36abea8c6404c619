"""Words about sampling schemes: one table of sentences for plans and statements.

In the table, ``{d.name}`` stands for an integer of the draws, and other names in braces for the
values of :func:`of_draws`.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mf_aggregators.kernel.losses import Draws, InGroups, MinSeparation
from mf_aggregators.kernel.numbers import counted, rounded_up


@dataclasses.dataclass(frozen=True)
class Words:
    """Sentences about a scheme.

    Attributes:
      label: How clients take part, in a few words, for tables of mechanisms.
      accounting: How the amplified guarantee is computed, in whole sentences.
      assumption: What the guarantee assumes of how clients take part, in whole sentences.
      together: What all rounds together are, as a mechanism.
    """

    label: str
    accounting: str
    assumption: str
    together: str = ""


_SECRET_OF_CLIENTS = (
    "Neither the data nor what was released has a part in that, and nobody who sees what was "
    "released learns who took part. A client that cannot be asked in such a round contributes "
    "nothing to it; for its later rounds that makes no difference, and none of them has a part in "
    "whether it can be asked. Rounds of too many or too few clients are released as all others, "
    "and their sums are divided by the same number."
)
_EACH_PARTICIPATION = """\
Each participation of a client is one Gaussian mechanism on the rounds that it changes,
     which are those of no other participation of that client."""
_ALL_ROUNDS = """\
All rounds together are one mechanism, whose noise is that of a Gaussian one and whose
     mean depends on the secret rounds of each client, also with updates that depend on earlier
     rounds."""
_CERTIFIED = (
    ": an upper bound on delta that is certified by Monte Carlo, whose failure probability is part "
    "of delta."
)


def _drawn_by_a_data_centre(drawn: str, accounting: str, *, label: str = "amplified") -> Words:
    """Words about a scheme with groups.

    Args:
      drawn: The clients that a round draws, as the end of a sentence.
      accounting: How the guarantee is computed.
      label: For tables of mechanisms.
    """
    assumption = (
        "Sampling: the population is split into {groups}, as many as C has bands, and round i "
        f"draws from group i modulo {{d.num_bands}} alone, {drawn} The server draws every batch "
        "itself, keeps who was drawn secret, and every client that was drawn takes part."
    )
    return Words(label, accounting, assumption)


_WORDS: Mapping[str, Words] = MappingProxyType(
    {
        "poisson": _drawn_by_a_data_centre(
            "each client with probability {probability}.",
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): the privacy "
            "loss distribution of composed Poisson-sampled Gaussian mechanisms, by dp-accounting.",
        ),
        "fixed_size": _drawn_by_a_data_centre(
            "a uniformly random subset of {d.clients_per_round} of its {d.group_size}.",
            "Amplification by sampling for banded matrices (BandMF Thm 4): the privacy loss "
            "distribution of composed Gaussian mechanisms on batches sampled without replacement, "
            "by dp-accounting.",
        ),
        "shuffling": _drawn_by_a_data_centre(
            "the next batch of {d.clients_per_round} of a shuffled list of all its {d.group_size}, "
            "shuffled afresh for each pass.",
            "Amplification by shuffling for banded matrices (BandMF Thm 4, Cor. F.2), by Feldman, "
            "McMillan and Talwar (2021), Thm 3.8, or no amplification where that is better.",
        ),
        "min_separation": Words(
            "b-min-sep {d.separation}",
            "Amplification by min-separation sampling (b-min-sep, secret coins under timers, arXiv "
            f"2602.09338){_CERTIFIED}",
            "Min-separation sampling: a client that took part is not free for the next {waits}. In "
            "every round in which it is free, it takes part with probability {probability}, by a "
            "secret coin of its own. In round 0 it is free with probability {free_at_first}, or "
            "else first in one of the rounds 1 to {last_wait}, each of which is as likely. "
            f"{_SECRET_OF_CLIENTS}",
        ),
        "balls_in_bins": Words(
            "{d.separation} bins",
            "Amplification by balls in bins (one secret round of each cycle, arXiv 2410.06266)"
            f"{_CERTIFIED}",
            "Balls in bins: every client is put into one of {bins}, each as likely as the others, "
            "independently of all others, and takes part in all rounds i with i modulo "
            f"{{d.separation}} equal to its bin. {_SECRET_OF_CLIENTS}",
        ),
        "truncated_poisson": _drawn_by_a_data_centre(
            "each client with probability {probability}; of more than {d.largest_batch} that come "
            "so, a uniformly random subset of {d.largest_batch} stays.",
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): composed "
            "privacy loss distributions of Gaussian mechanisms on truncated Poisson samples (arXiv "
            "2508.15089, here for zeros in the place of a client).",
            label="amplified, at most {d.largest_batch}",
        ),
        "random_allocation": _drawn_by_a_data_centre(
            "whose clients are each in one of the {d.rounds_of_cycle} rounds of a cycle of the "
            "group, uniformly at random, independently of all others and of other cycles.",
            "Amplification by random allocation (one of t rounds, arXiv 2602.17284) for banded "
            "matrices: the distribution of the privacy loss of a cycle, on a grid whose rounding "
            "is on the side of privacy, composed by dp-accounting.",
            label="1 of {d.rounds_of_cycle} rounds",
        ),
    }
)


def of_draws(draws: Draws) -> Words:
    """Returns the words about draws.

    Args:
      draws: How clients are drawn.
    """
    values: dict[str, Any] = {
        "d": draws,
        "groups": counted(draws.num_bands, "group"),
        "bins": counted(draws.distance, "bin"),
        "waits": counted(draws.distance - 1, "round"),
        "last_wait": draws.distance - 1,
    }
    if isinstance(draws, InGroups):
        values["probability"] = rounded_up(draws.sampling_probability, ".6g")
    elif isinstance(draws, MinSeparation):
        p = draws.joining_probability
        values["probability"] = rounded_up(p, ".6g")
        values["free_at_first"] = rounded_up(1.0 / (1.0 + values["last_wait"] * p), ".6g")
    template = dataclasses.asdict(_WORDS[draws.name])
    template["together"] = _EACH_PARTICIPATION if isinstance(draws, InGroups) else _ALL_ROUNDS
    return Words(**{name: text.format(**values) for name, text in template.items()})
