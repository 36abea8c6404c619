"""What a run does: its data, mechanism, participation and noise, before TensorFlow is loaded."""

import dataclasses
import pathlib
from typing import Any

from mf_aggregators import checkpoints, factorizations, workloads
from mf_aggregators.commands.command_line import check_choice
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import MinSeparation, Participation, SingleParticipation
from mf_aggregators.sampling_schemes import SamplingScheme
from simulations import cohorts
from stackoverflow_nwp import datasets, sampled_runs, settings

# Without --num_buffers and --num_bands.
_BUFFERS, _BANDS_OF_INVERSE = 4, 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does, all defaults filled in and checked, before TensorFlow is loaded.

    Attributes:
      options: Every flag by name, with its default for the data set.
      text: The data set.
      participation: The schema that the timers enforce; single participation, whose
        sensitivity is the largest column norm of C, if a data sampler draws the clients.
      factorization: What makes the noise.
      noise_multiplier: Relative to the sensitivity under the schema; 0 for none.
      scheme: By which a data sampler draws the clients of each round; None for timers.
    """

    options: dict[str, Any]
    text: datasets.FederatedText
    participation: Participation
    factorization: Factorization
    noise_multiplier: float
    scheme: SamplingScheme | None = None


def make(
    options: dict[str, Any],
    cache_dir: str | None,
    own: pathlib.Path | None,
    own_noise_multiplier: float | None,
) -> Plan:
    """Plans a run: loads its data, and computes or loads its factorization.

    Args:
      options: Every flag by name, checked one by one.
      cache_dir: Where data sets are kept.
      own: The checkpoint of the run, if it has one already.
      own_noise_multiplier: The one that the run was found to need when it began, if it did.

    Returns:
      The plan.

    Raises:
      CommandError: If flags do not fit the data or one another.
      ValueError: As the library says it.
    """
    text = datasets.load(
        options["dataset"], cache_dir, min_train_clients=options["clients_per_round"]
    )
    # Refuses a vocabulary that the text cannot fill before anything is written.
    text.vocabulary(options["vocab_size"])
    num_clients = text.splits["train"].clients
    check_choice(
        options["delta"] < 1.0 / num_clients,
        f"--delta={options['delta']:g} is not below 1 / {num_clients} clients: a mechanism that "
        "publishes one client's data outright would satisfy it.",
    )
    if options["sampling"] == sampled_runs.TIMERS:
        return _under_timers(options, text, own)
    return _sampled(options, text, own, own_noise_multiplier)


def _under_timers(
    options: dict[str, Any], text: datasets.FederatedText, own: pathlib.Path | None
) -> Plan:
    cohort, num_rounds = options["clients_per_round"], options["num_rounds"]
    num_clients = text.splits["train"].clients
    separation = options["separation"] or min(num_rounds, num_clients // cohort)
    participation = MinSeparation(separation, options["max_participations"])
    cohorts.check_feasible(
        num_clients,
        cohort,
        separation,
        participation.most_participations(num_rounds),
        num_rounds,
    )
    most_bands = min(separation, num_rounds, settings.for_dataset(options["dataset"]).max_bands)
    factorization = (
        _factorization(options, participation, most_bands) if own is None else checkpoints.load(own)
    )
    return Plan(options, text, participation, factorization, options["noise_multiplier"])


def _sampled(
    options: dict[str, Any],
    text: datasets.FederatedText,
    own: pathlib.Path | None,
    own_noise_multiplier: float | None,
) -> Plan:
    participation = SingleParticipation()
    factorization = None
    if own is not None:
        factorization = checkpoints.load(own)
    elif options["checkpoint"] is not None:
        factorization = _loaded(options)
    # The scheme and the noise are found, or found impossible, before a matrix is computed.
    scheme = sampled_runs.scheme_of(options, text.splits["train"].clients, factorization)
    noise_multiplier = own_noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = sampled_runs.noise_multiplier(options, scheme)
    if factorization is None:
        factorization = _factorization(options, participation, scheme.num_bands)
    return Plan(options, text, participation, factorization, noise_multiplier, scheme)


def _loaded(options: dict[str, Any]) -> Factorization:
    factorization = checkpoints.load(options["checkpoint"])
    check_choice(
        factorization.num_rounds == options["num_rounds"],
        f"--checkpoint={options['checkpoint']} is for {factorization.num_rounds} rounds, and "
        f"--num_rounds is {options['num_rounds']}: noise for other rounds than those of the run "
        "would be too much or too little. Make the two equal.",
    )
    return factorization


def _factorization(
    options: dict[str, Any], participation: Participation, default_bands: int
) -> Factorization:
    num_rounds, mechanism = options["num_rounds"], options["mechanism"]
    if options["checkpoint"] is not None:
        return _loaded(options)
    if mechanism in ("identity", "none"):
        return factorizations.identity(num_rounds)
    workload = workloads.prefix_sum(num_rounds)
    if mechanism == "optimal":
        return factorizations.optimal(workload, show_progress=True)
    if mechanism == "tree":
        return factorizations.tree_aggregation(num_rounds)
    if mechanism == "blt":
        return factorizations.blt(
            num_rounds, options["num_buffers"] or _BUFFERS, participation, show_progress=True
        )
    if mechanism == "banded_inverse":
        num_bands = options["num_bands"] or min(_BANDS_OF_INVERSE, num_rounds)
        return factorizations.banded_inverse(
            num_rounds, num_bands, participation, show_progress=True
        )
    num_bands = options["num_bands"] or default_bands
    if mechanism == "toeplitz":
        return factorizations.toeplitz(num_rounds, num_bands, participation, show_progress=True)
    return factorizations.banded(
        workload, num_bands, participation=participation, show_progress=True
    )
