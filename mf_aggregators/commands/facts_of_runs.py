"""What the configuration of a training run says of it, as its statement has it.

Runs state these facts, and whoever verifies a statement makes them again from ``config.json``.
Flags are a mapping by name, of all that every run has.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from mf_aggregators import adaptive_clip as adaptive_clips
from mf_aggregators import private_metrics as metrics_of_training
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.kernel.numbers import in_full
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.privacy.statement import TIMERS_BY_ROUNDS, AdaptiveClipping
from mf_aggregators.private_metrics import PrivateMetrics, ReleasedMetrics

# The clip norm that is no number.
ADAPTIVE = "adaptive"
# A value of --sampling: clients take part whenever their participation timers allow it.
TIMERS = "timers"
# A value of --after_history_loss: a client that forgot its participations joins as if it were new.
REJOIN = "rejoin"
# The flags of an adaptive clip norm, with the names of its parameters.
OF_ADAPTIVE: Mapping[str, str] = types.MappingProxyType(
    {
        "clip_initial_norm": "initial_norm",
        "clip_quantile": "target_unclipped_quantile",
        "clip_learning_rate": "learning_rate",
        "clip_smallest_norm": "smallest_norm",
        "clip_largest_norm": "largest_norm",
        "clip_count_stddev": "clipped_count_stddev",
        "clip_update_period": "update_period",
    }
)
# A name without any of these is an abbreviation.
_VOWELS = frozenset("aeiouy")
# Default of --largest_loss: the logarithm of some 22,000 words.
LARGEST_LOSS = 10.0
# Default of --largest_examples: no more than most devices have.
LARGEST_EXAMPLES = 1000

_DRAWN_BATCHES = (
    "The server draws every batch itself and keeps secret who was drawn; there are no timers."
)
_OWN_DRAWS = (
    "The simulation draws for each client as its device would, and keeps secret who took part."
)


def cohort(flags: Mapping[str, Any]) -> int:
    """Returns the clients that take part in a round: in an estimate, fewer than they stand for."""
    return int(flags["simulated_clients"] or flags["clients_per_round"])


def adaptive_clip(flags: Mapping[str, Any]) -> AdaptiveClip | None:
    """Returns how the clip norm adapts to the clients that take part; None for a constant one.

    Raises:
      ValueError: If a parameter is out of its range.
    """
    if flags["clip_norm"] != ADAPTIVE:
        return None
    given = {name: flags[flag] for flag, name in OF_ADAPTIVE.items() if flags[flag] is not None}
    if "clipped_count_stddev" in given:
        # With fewer clients, less noise in the count gives the fraction the same noise.
        given["clipped_count_stddev"] *= cohort(flags) / flags["clients_per_round"]
    return AdaptiveClip(**given)


def private_metrics(flags: Mapping[str, Any]) -> PrivateMetrics | None:
    """Returns the metrics of training that are released with noise; None for none."""
    if not flags["private_metrics"]:
        return None
    # The size of a batch is known where timers fill it, and a secret where a sampler draws it.
    return metrics_of_training.of_training(
        flags["largest_loss"] or LARGEST_LOSS,
        flags["largest_examples"] or LARGEST_EXAMPLES,
        counts_clients=flags["sampling"] != TIMERS,
    )


def noise_split(flags: Mapping[str, Any], mechanism: Mechanism) -> NoiseSplit | None:
    """Returns how updates, indicators and metrics split the noise; None where updates have it all.

    Raises:
      ValueError: If the clipped count has too little noise.
    """
    metrics, clip = private_metrics(flags), adaptive_clip(flags)
    multiplier, began_with = mechanism.noise_multiplier, mechanism.horizons[0].noise_multiplier
    if metrics is not None:
        norm: float | AdaptiveClip = float(flags["clip_norm"]) if clip is None else clip
        split = metrics.split_noise(began_with, norm, cohort(flags))
    elif clip is not None:
        stddev = clip.clipped_count_stddev_for(began_with, cohort(flags))
        split = adaptive_clips.split_noise(began_with, stddev)
    else:
        return None
    # The same noise, relative to the sensitivity of the whole.
    return split if multiplier == began_with else split.of_horizon(multiplier / began_with)


def in_words(mechanism: str, num_rounds: int) -> str:
    """Returns what a statement calls a mechanism, with its rounds.

    Args:
      mechanism: Its name in the catalogue.
      num_rounds: How many rounds.
    """
    words = mechanism.replace("_", " ")
    name = f"{words[0].upper()}{words[1:]}" if _VOWELS.intersection(words) else words.upper()
    return f"{name} matrix factorization for {num_rounds} rounds"


def of_configuration(flags: Mapping[str, Any], mechanism: Mechanism) -> dict[str, Any]:
    """Returns the attributes of ``RunFacts`` that follow from flags and the mechanism of a run.

    Args:
      flags: Those of the run.
      mechanism: Its mechanism, with the noise that its clients really get.

    Raises:
      KeyError: If a flag is missing.
      ValueError: If one is out of its range.
    """
    clip, metrics = adaptive_clip(flags), private_metrics(flags)
    split = noise_split(flags, mechanism)
    clipping, released = None, None
    if clip is not None and split is not None:
        smallest, largest = clip.bounds
        whole = dataclasses.replace(
            clip,
            smallest_norm=smallest,
            largest_norm=largest,
            clipped_count_stddev=split.clipped_count_stddev,
        )
        clipping = AdaptiveClipping(
            whole, split.update_noise_multiplier, split.clipped_count_stddev
        )
    if metrics is not None and split is not None:
        released = ReleasedMetrics(metrics, split.update_noise_multiplier, split.metric_stddev)
    return {
        "mechanism": (
            "None: clipping without noise"
            if mechanism.noise_multiplier == 0.0
            else in_words(mechanism.factorization.mechanism, mechanism.num_rounds)
        ),
        "clients_per_round": cohort(flags),
        "clip_norm": float(flags["clip_norm"]) if clip is None else clip.initial_norm,
        "noise_seed_is_fixed": flags["seed"] is not None,
        "adaptive_clip": clipping,
        "private_metrics": released,
        "has_run_directory": True,
    }


def public_data(flags: Mapping[str, Any]) -> str:
    """Returns what was used besides the clients' data, in the words of whoever ran it."""
    words: str | None = flags["public_data"]
    return "none" if words is None else words.strip().rstrip(".")


def forgets(flags: Mapping[str, Any]) -> bool:
    """Returns whether clients may join as if they had never taken part.

    Args:
      flags: Of a run, by name: those of earlier versions say nothing of broken timers.
    """
    loses = flags["history_loss_probability"] > 0.0 and flags["after_history_loss"] == REJOIN
    return loses or flags.get("broken_timers", 0.0) > 0.0


def enforcement(scheme: SamplingScheme | None, timer_hours: float | None, *, forgets: bool) -> str:
    """Returns what makes the clients of a run keep its schema, as sentences.

    Args:
      scheme: What draws clients; None for timers.
      timer_hours: The hours of timers by the wall clock; None for timers by rounds.
      forgets: Whether clients that lose their history join again as new ones.
    """
    if scheme is not None:
        return _DRAWN_BATCHES if scheme.has_groups else _OWN_DRAWS
    text = TIMERS_BY_ROUNDS
    if timer_hours is not None:
        unit = "hour" if timer_hours == 1.0 else "hours"
        text = (
            f"A timer on each client lets {in_full(timer_hours)} {unit} pass between two "
            "participations;\n"
            "     that these are as many rounds apart is assumed, not enforced. What was\n"
            "     observed is said below."
        )
    if forgets:
        text += (
            " Clients that lost the\n     history of their participations joined again as new ones,"
            " which breaks the schema."
        )
    return text
