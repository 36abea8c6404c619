"""Runs whose clients a data sampler draws: flags, noise, seed and statement.

With parts, they simulate the papers' centralised setting, in which a data centre holds all data
and draws every batch itself. A banded mechanism then needs less noise for the same guarantee
(BandMF Thm 4). Without parts, they simulate devices that take part by secret coins under their
timers, or in one secret round of each cycle. Clients that take part whenever their timers allow it
are never amplified.
"""

import dataclasses
import logging
from typing import TYPE_CHECKING

from mf_aggregators import catalogue, random_streams
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    Sampler,
    SamplingScheme,
    sampling_scheme,
    sampling_schemes,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import RealisedParticipation
from mf_aggregators.random_streams import SeedError
from simulations.runs import sampled_participation
from simulations.runs.participation_ledger import ParticipationLedger
from simulations.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from simulations.runs.run_config import RunConfig

_LOGGER = logging.getLogger(__name__)

# A value of --sampling: clients take part whenever their participation timers allow it.
TIMERS = "timers"

HELP = (
    "How the clients of a round are found. timers: any that their participation timers allow, as "
    "in cross-device training. poisson, fixed_size, shuffling: a data sampler splits the "
    "population into as many groups as C has bands, goes through them in turn, and draws within "
    "one, which amplifies the guarantee (BandMF Thm 4). They simulate the papers' centralised "
    "setting, a data centre that draws every batch itself and keeps secret who was drawn; no "
    "population of devices that decide themselves when to take part may use them. "
    "min_separation: each device whose timer allows it joins with a secret coin, the timers being "
    "in their stationary state before the first round. balls_in_bins: each device is put into one "
    "of --separation rounds of each cycle, secretly and at random. Devices can do both by "
    "themselves, batches vary in size, and the guarantee is amplified while nobody learns who took "
    "part. All but timers need a mechanism whose C has bands, with --num_bands (the fewer bands, "
    "the more amplification)."
)


def names() -> tuple[str, ...]:
    """Returns the values of --sampling."""
    return (TIMERS, *sampling_schemes())


def check_flags(options: "RunConfig") -> None:
    """Checks the flags that a data sampler excludes or needs.

    Args:
      options: Every flag by name.

    Raises:
      CommandError: If they do not fit together.
    """
    sampling, mechanism = options.sampling, options.mechanism
    if sampling == TIMERS:
        return
    check_choice(
        options.separation is None or not sampling_schemes()[sampling].has_groups,
        f"--separation does not belong to --sampling={sampling}: the number of bands decides "
        "there when a client may take part.",
    )
    check_choice(
        options.max_participations is None,
        f"--max_participations belongs to --sampling={TIMERS}: with --sampling={sampling} chance "
        "decides how often a client takes part.",
    )
    if options.checkpoint is not None:
        return
    banded = _banded_mechanisms()
    check_choice(
        mechanism in banded,
        f"--sampling={sampling} needs a banded mechanism ({', '.join(banded)}): "
        f"nothing is amplified with --mechanism={mechanism}. Use --sampling={TIMERS} with it.",
    )
    check_choice(
        _num_bands(options) is not None,
        f"--sampling={sampling} needs --num_bands: fewer bands amplify the guarantee more, and "
        "more bands cancel more noise. The papers use 9 to 64 for 2052 rounds.",
    )


def _num_bands(options: "RunConfig") -> int | None:
    """The bands of the mechanism that is asked for, if the options say them."""
    name = options.mechanism
    return catalogue.entry(name).num_bands({"num_bands": options["num_bands"]})


def _banded_mechanisms() -> list[str]:
    """The mechanisms whose matrices C have bands that are known beforehand."""
    return [name for name, each in catalogue.entries().items() if each.has_known_bands]


def scheme_of(
    options: "RunConfig", num_clients: int, checkpoint: Factorization | None
) -> SamplingScheme:
    """Returns the scheme of a run.

    Args:
      options: Every flag by name, checked.
      num_clients: The population.
      checkpoint: The factorization, where it is there already.

    Returns:
      The scheme.

    Raises:
      CommandError: If the factorization is not banded.
      ValueError: If the sizes do not fit one another.
    """
    if checkpoint is None:
        num_bands = _num_bands(options)
    else:
        num_bands = checkpoint.strategy_bands()
        is_banded = num_bands is not None and num_bands < max(2, checkpoint.num_rounds)
        check_choice(
            is_banded or checkpoint.mechanism in _banded_mechanisms(),
            f"--sampling={options.sampling} needs a banded matrix, and that of the checkpoint, "
            f"of the mechanism {checkpoint.mechanism}, has no zeros below a band. Use "
            f"--sampling={TIMERS} with it.",
        )
    assert num_bands is not None
    return sampling_scheme(
        options.sampling,
        num_rounds=options.num_rounds,
        num_bands=num_bands,
        population=num_clients,
        clients_per_round=options.clients_per_round,
        separation=options.separation,
    )


def needs_matrix(scheme: SamplingScheme) -> bool:
    """Returns whether the noise for a target depends on more of C than its number of bands."""
    return scheme.depends_on_matrix


def noise_multiplier(
    options: "RunConfig", scheme: SamplingScheme, factorization: Factorization | None = None
) -> float:
    """Returns the noise multiplier of a run, relative to the largest column norm of C.

    Args:
      options: Every flag by name: a noise multiplier, or a target epsilon.
      scheme: How clients are drawn.
      factorization: What has C, for a scheme that needs it.

    Returns:
      The noise multiplier that was given, or the least that gives the target.

    Raises:
      ValueError: If no noise multiplier gives the target.
    """
    if options.noise_multiplier is not None:
        return options.noise_multiplier
    assert options.target_epsilon is not None
    matrix = None
    if scheme.depends_on_matrix:
        assert factorization is not None
        matrix = factorization.strategy_matrix()
    return scheme.noise_multiplier(options.target_epsilon, options.delta, matrix)


def sampler_of(scheme: SamplingScheme, directory: RunDirectory, fixed_seed: int | None) -> Sampler:
    """Returns the sampler of a run, with the secret seed in its directory.

    The seed is not that of data order and initial weights: whoever gets the initial model
    could find 32 bits of that one by trial. It is with the states, which are as secret.

    Args:
      scheme: How clients are drawn.
      directory: The run's directory; the seed of a new run is made and saved there.
      fixed_seed: A seed in place of a secret one, for tests.

    Returns:
      The sampler.

    Raises:
      CommandError: If the seed of rounds that were released is lost or damaged: other draws
        would not be of the same partition.
      OSError: If it cannot be saved.
    """
    if fixed_seed is not None:
        return scheme.sampler(fixed_seed)
    path = directory.sampling_seed
    if path.exists():
        try:
            return scheme.sampler(random_streams.load_seed(path))
        except SeedError as error:
            raise CommandError(
                f"{path} cannot be read: restore it, or start a new run and account for both."
            ) from error
    if directory.ledger.exists():
        raise CommandError(
            f"{path} is missing: without it nobody knows whom the next round would have drawn. "
            "Restore it, or start a new run and account for both."
        )
    seed = random_streams.secret_seed()
    directory.states.mkdir(parents=True, exist_ok=True, mode=0o700)
    random_streams.save_seed(seed, path)
    return scheme.sampler(seed)


def took_place(sampler: Sampler, ledger: ParticipationLedger) -> RealisedParticipation:
    """Returns what happened in a run whose clients a sampler was to draw.

    Args:
      sampler: The sampler of the run.
      ledger: The ledger of its released rounds.

    Returns:
      The participations, and whether they are those that the sampler draws; if not, the
      reason goes to the log.
    """
    found = sampled_participation.deviation_from_draws(sampler, ledger)
    if found is not None:
        _LOGGER.warning("the run has no amplified guarantee: %s.", found)
    return dataclasses.replace(
        guarantees.realised_participation(ledger.rounds_of_clients(), ledger.num_rounds),
        keeps_sampling=found is None,
    )
