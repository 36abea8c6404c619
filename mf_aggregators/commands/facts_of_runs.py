"""Facts of a training run that follow from its configuration, for its statement.

Runs state these facts, and whoever verifies a statement makes them again from ``config.json``.
Flags are a mapping by name, of all that every run has.
"""

import types
from collections.abc import Mapping
from typing import Any

from mf_aggregators import private_metrics as metrics_of_training
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.kernel.numbers import in_full
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.privacy import statements
from mf_aggregators.private_metrics import PrivateMetrics

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
# Default of --largest_loss: the logarithm of some 22,000 words.
LARGEST_LOSS = 10.0
# Default of --largest_examples: no more than most devices have.
LARGEST_EXAMPLES = 1000

# The entry of a configuration with the SHA-256 of the weights that training began with.
INITIAL_WEIGHTS = "initial_weights_sha256"
_SIMULATION = (
    "One program simulates the clients, their timers and the server: clients are parts of a data "
    "set. No device has enforced anything, and no person took part."
)
_SECURE_SIMULATION = (
    "The secure sum is simulated as well: that program has seen the update of every client."
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
    multipliers = [each.noise_multiplier for each in mechanism.horizons]
    return metrics_of_training.noise_split(
        _clip(flags), private_metrics(flags), cohort(flags), multipliers
    )


def of_configuration(config: Mapping[str, Any], mechanism: Mechanism) -> dict[str, Any]:
    """Returns the attributes of ``RunFacts`` that follow from a configuration and its mechanism.

    Args:
      config: What ``config.json`` holds: ``flags``, ``versions`` and what the run began with.
      mechanism: The mechanism of the run, with the noise that its clients really get.

    Raises:
      KeyError: If a flag is missing.
      ValueError: If one is out of its range.
    """
    flags = config["flags"]
    is_secure = bool(flags["secure_aggregation"])
    return {
        "mechanism": statements.name_of(mechanism),
        "clients_per_round": cohort(flags),
        "clip": _clip(flags),
        "split": noise_split(flags, mechanism),
        "metrics": private_metrics(flags),
        "seed_is_fixed": flags["seed"] is not None,
        "aggregator": f"mf_aggregators {config['versions']['mf-aggregators']}",
        "secure_sums": is_secure,
        "public_data": _public_data(config),
        "enforcement": enforcement(
            mechanism.sampling, flags["timer_hours"], forgets=forgets(flags)
        ),
        "simulation": (_SIMULATION, _SECURE_SIMULATION)[: 1 + is_secure],
        "has_run_directory": True,
    }


def _clip(flags: Mapping[str, Any]) -> float | AdaptiveClip:
    return adaptive_clip(flags) or float(flags["clip_norm"])


def _public_data(config: Mapping[str, Any]) -> str:
    """The public data that were used, in the words of the user."""
    words, sha256 = config["flags"]["public_data"], config.get(INITIAL_WEIGHTS)
    text = "not stated, which does not mean that there were none"
    if words is not None:
        text = words.strip().rstrip(".")
    if sha256 is not None:
        text += (
            f". Training began with the weights of a file (SHA-256 {sha256}); nobody checked what "
            "they were trained on"
        )
    return text


def forgets(flags: Mapping[str, Any]) -> bool:
    """Returns whether clients may join as if they had never taken part.

    Args:
      flags: Of a run, by name: those of earlier versions say nothing of broken timers.
    """
    loses = flags["history_loss_probability"] > 0.0 and flags["after_history_loss"] == REJOIN
    return loses or flags.get("broken_timers", 0.0) > 0.0


def enforcement(scheme: SamplingScheme | None, timer_hours: float | None, *, forgets: bool) -> str:
    """Returns how the simulated clients of a run are kept to its schema, as sentences.

    Args:
      scheme: What draws clients; None for timers.
      timer_hours: The hours of timers by the wall clock; None for timers by rounds.
      forgets: Whether clients that lose their history join again as new ones.
    """
    if scheme is not None and not scheme.has_groups:
        return "It draws for each client as its device would, and keeps secret who took part."
    if scheme is not None:
        return "The server draws every batch itself and keeps secret who was drawn."
    text = "A timer of each client counts rounds, and no client is selected before it ends."
    if timer_hours is not None:
        text = (
            f"A timer of each client runs for {in_full(timer_hours)} "
            f"{'hour' if timer_hours == 1.0 else 'hours'}. That as many rounds pass in that time "
            "is assumed, not enforced. What was observed is said below."
        )
    if forgets:
        text += (
            " Clients that lost the history of their participations joined again as new ones, "
            "which breaks the schema."
        )
    return text
