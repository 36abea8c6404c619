"""Which mechanisms a plan evaluates, and how each is computed.

Everything that can be the best is proposed once, in the order in which it is computed: what
takes no time first, and last what has fewer bands than others. What would take too long is named
with the reason.
"""

import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mf_aggregators import caches, catalogue, workloads
from mf_aggregators.catalogue import (
    ErrorName,
    Request,
    SamplingSetting,
    TimerSetting,
    Variant,
)
from mf_aggregators.checkpoints import factorization_cache
from mf_aggregators.factorizations import Errors, Factorization
from mf_aggregators.factorizations._round_errors import RoundError
from mf_aggregators.mechanism import Mechanism, calibrate
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    SamplingScheme,
    SingleParticipation,
    certificate_search,
    sampling_scheme,
    sampling_schemes,
)
from mf_aggregators.participation.certificate_search import Certification, MechanismBudget

# The option of a mechanism that approximates another factorization.
_BASE = "base_checkpoint"
# An option that names say nothing of.
_RELATIVE_GAP = "relative_gap"

# What a plan compares mechanisms by: ``mean``, ``max``, or a weight for each round.
PlannedError: TypeAlias = str | tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A mechanism to evaluate.

    Attributes:
      kind: As ``mf-factorize --mechanism`` spells it.
      options: The flags of ``mf-factorize`` that make it, without the common ones.
      participation: The schema that it is made for.
      compute: Computes it, or takes it from the cache; None for what is infeasible.
      sampling: The sampling scheme that amplifies it, if any.
      base: The mechanism and the options of what it approximates, if it approximates another
        factorization.
      reason: Why it is infeasible.
      is_cached: Whether it is in the cache.
      is_search: Whether computing it is a search, whose result is cached.
    """

    kind: str
    options: tuple[tuple[str, Any], ...]
    participation: Participation
    compute: Callable[[], Factorization] | None = None
    sampling: SamplingScheme | None = None
    base: tuple[str, tuple[tuple[str, Any], ...]] | None = None
    reason: str = ""
    is_cached: bool = False
    is_search: bool = False

    @property
    def name(self) -> str:
        """The mechanism with its options, for a reader."""
        words = " ".join([self.kind, *words_of(self.options)])
        return words if self.sampling is None else f"{words}, {self.sampling.words.label}"


def words_of(options: Sequence[tuple[str, Any]]) -> list[str]:
    """Returns what the name of a mechanism says of its options: their values.

    Args:
      options: The options, in order.
    """
    return [
        str(value)
        for name, value in options
        if not isinstance(value, bool) and name != _RELATIVE_GAP
    ]


def checked_error(error: Any, num_rounds: int) -> PlannedError:
    """Returns the error that an argument stands for.

    Args:
      error: ``mean``, ``max``, or (n,) weights, none below zero and one above.
      num_rounds: n.

    Returns:
      A word, or the weights; equal weights are the mean.

    Raises:
      ValueError: If it is none of these.
    """
    found = RoundError.of(error, num_rounds)
    if found.weights is None:
        return "max" if found.is_maximum else "mean"
    return tuple(float(weight) for weight in error)


def error_name(error: PlannedError) -> ErrorName:
    """Returns ``mean``, ``max`` or ``weights``."""
    if not isinstance(error, str):
        return "weights"
    return "max" if error == "max" else "mean"


def error_of(errors: Errors, error: PlannedError) -> float:
    """Returns the root of a squared error of the rounds, at noise multiplier 1.

    Args:
      errors: Those of all rounds.
      error: Which error.
    """
    if isinstance(error, str):
        return errors.max_error if error == "max" else errors.rmse
    weights = np.divide(error, np.max(error))
    return float(np.sqrt(weights @ errors.per_round_variance / np.sum(weights)))


def powers_of_two(largest: int) -> list[int]:
    """Returns 1, 2, 4, ... up to ``largest``, and ``largest`` itself.

    Args:
      largest: At least 1.
    """
    return sorted({2**i for i in range(largest.bit_length())} | {largest})


def most_bands(num_rounds: int, population: int, clients_per_round: int) -> int:
    """Returns the most bands that sampling allows: n, or m / B, where nothing is amplified.

    Args:
      num_rounds: n.
      population: m.
      clients_per_round: B.

    Returns:
      The number of bands.

    Raises:
      ValueError: If the population is smaller than one batch.
    """
    # Refuses a population that is smaller than a batch, in the words of all schemes.
    sampling_scheme(
        "poisson",
        num_rounds=num_rounds,
        num_bands=1,
        population=population,
        clients_per_round=clients_per_round,
    )
    return min(num_rounds, population // clients_per_round)


def for_timers(
    num_rounds: int,
    participation: Participation,
    affordable_bands: Callable[[int], tuple[int, str]],
    cache_directory: pathlib.Path | None,
    error: PlannedError = "mean",
) -> list[Proposal]:
    """Returns what is evaluated for devices with participation timers.

    Args:
      num_rounds: n.
      participation: The schema that the timers enforce.
      affordable_bands: Takes the most bands that a schema allows; returns the most whose
        noise fits a budget, and, where those are fewer, what the budget is for.
      cache_directory: Where factorizations are cached; None for nowhere.
      error: What mechanisms are made for, where they can be.

    Returns:
      The proposals.
    """
    separation = _separation(participation, num_rounds)
    affordable, budget = affordable_bands(separation)
    setting = TimerSetting(num_rounds, participation, separation, affordable, budget)
    found = [
        _proposal(name, variant, num_rounds, participation, cache_directory, error)
        for name, mechanism in catalogue.entries().items()
        for variant in mechanism.for_timers(setting)
    ]
    most: dict[str, int] = {}
    for proposal in found:
        if proposal.compute is not None:
            most[proposal.kind] = max(_bands(proposal), most.get(proposal.kind, 0))
    # Matrices with fewer bands than another of their kind only save memory: in a limited time they
    # come last.
    return sorted(found, key=lambda each: _bands(each) < most.get(each.kind, 0))


def for_sampling(
    num_rounds: int,
    population: int,
    clients_per_round: int,
    sampling: str,
    cache_directory: pathlib.Path | None,
    error: PlannedError = "mean",
) -> list[Proposal]:
    """Returns what is evaluated for a data centre that draws every batch.

    Args:
      num_rounds: n.
      population: The clients m.
      clients_per_round: The batch size B.
      sampling: The name of a scheme with groups, such as ``poisson``.
      cache_directory: Where factorizations are cached; None for nowhere.
      error: What mechanisms are made for, where they can be.

    Returns:
      Amplified mechanisms of 1, 2, 4, ... bands and the most possible, and the optimum for a
      fixed order of batches, which nothing amplifies, with its approximation.

    Raises:
      ValueError: If the population is smaller than one batch.
    """
    most = most_bands(num_rounds, population, clients_per_round)
    # A fixed order of all batches: everybody returns after an epoch, and nothing is amplified.
    fixed_order = FixedEpochOrder(math.ceil(num_rounds / most), most)
    setting = SamplingSetting(num_rounds, tuple(powers_of_two(most)), fixed_order)
    proposals = []
    for name, mechanism in catalogue.entries().items():
        for variant in mechanism.for_sampling(setting):
            bands = variant.amplified_bands
            schema: Participation = fixed_order if bands is None else SingleParticipation()
            proposal = _proposal(name, variant, num_rounds, schema, cache_directory, error)
            if bands is not None and proposal.compute is not None:
                proposal = _drawn(
                    proposal,
                    sampling,
                    num_rounds=num_rounds,
                    num_bands=bands,
                    population=population,
                    clients_per_round=clients_per_round,
                )
            proposals.append(proposal)
    return proposals


def _drawn(proposal: Proposal, sampling: str, **sizes: Any) -> Proposal:
    """The proposal for clients that a scheme draws, or why the scheme is none for its bands."""
    try:
        scheme = sampling_scheme(sampling, **sizes)
    except ValueError as error:
        reason = f"{sampling}: {str(error).rstrip('.')}"
        return dataclasses.replace(proposal, compute=None, reason=reason)
    return dataclasses.replace(proposal, sampling=scheme)


def for_random_participation(
    num_rounds: int,
    population: int,
    clients_per_round: int,
    sampling: str,
    cache_directory: pathlib.Path | None,
    error: PlannedError = "mean",
) -> list[Proposal]:
    """Returns what is evaluated for clients that draw for themselves when to take part.

    Args:
      num_rounds: n.
      population: The clients m.
      clients_per_round: The expected number of clients in a round B.
      sampling: The name of a scheme without groups, such as ``min_separation``.
      cache_directory: Where factorizations are cached; None for nowhere.
      error: What mechanisms are made for, where they can be.

    Returns:
      Amplified mechanisms of 1, 2, 4, ... bands and the most possible; for ``min_separation``
      with separations of once, one and a half times and twice the number of bands. For a scheme
      that takes any matrix also what is made for timers of its separation, approximations apart.

    Raises:
      ValueError: If the population is smaller than one round's clients.
    """
    most = most_bands(num_rounds, population, clients_per_round)
    largest = population // clients_per_round
    setting = SamplingSetting(num_rounds, tuple(powers_of_two(most)), SingleParticipation())
    proposals = []
    for name, mechanism in catalogue.entries().items():
        for variant in mechanism.for_sampling(setting):
            bands = variant.amplified_bands
            if bands is None:
                continue
            proposal = _proposal(
                name, variant, num_rounds, SingleParticipation(), cache_directory, error
            )
            if proposal.compute is not None:
                proposal = dataclasses.replace(
                    proposal, compute=functools.lru_cache(maxsize=1)(proposal.compute)
                )
            separations: Sequence[int | None] = (None,)
            if sampling == MinSeparationSampling.name:
                separations = sorted({bands, bands + bands // 2, 2 * bands})
            for separation in separations:
                if separation is not None and separation > largest:
                    continue
                drawn = _drawn(
                    proposal,
                    sampling,
                    num_rounds=num_rounds,
                    num_bands=bands,
                    population=population,
                    clients_per_round=clients_per_round,
                    separation=separation,
                )
                proposals.append(drawn)
    if not sampling_schemes()[sampling].takes_any_matrix:
        return proposals
    scheme = sampling_scheme(
        sampling,
        num_rounds=num_rounds,
        num_bands=num_rounds,
        population=population,
        clients_per_round=clients_per_round,
    )
    separation = min(scheme.separation_in(num_rounds), num_rounds)
    schema = MinSeparation(separation)
    timers = TimerSetting(num_rounds, schema, separation, separation, "")
    amplified = {each.kind for each in proposals}
    for name, mechanism in catalogue.entries().items():
        if name in amplified:
            continue
        for variant in mechanism.for_timers(timers):
            if variant.base is None:
                proposal = _proposal(name, variant, num_rounds, schema, cache_directory, error)
                proposals.append(dataclasses.replace(proposal, sampling=scheme))
    return proposals


def calibrated(
    factorization: Factorization,
    participation: Participation,
    epsilon: float,
    delta: float,
    cache_directory: pathlib.Path | None,
    *,
    is_estimate: bool = False,
    budget: MechanismBudget | None = None,
    rho: float | None = None,
    noise_multiplier: float | None = None,
) -> Mechanism:
    """Returns the mechanism of least noise for a target, as ``mechanism.calibrate`` does.

    Args:
      factorization: What makes the noise.
      participation: How clients take part: a schema, or a sampling scheme.
      epsilon: Above 0.
      delta: At least 1e-12 and below 1.
      cache_directory: Where noise multipliers of sampling schemes are cached between calls; None
        for nowhere.
      is_estimate: For schemes without groups, whether a rough estimate is enough, in the place of
        a certified noise multiplier: the target may be exceeded.
      budget: For schemes without groups, the mechanisms that may be tested, a part of those that
        the delta of one result pays for; all of them count as tested. None if this is the result.
      rho: In the place of epsilon and delta, for schemas: the target of approximate zCDP.
      noise_multiplier: In the place of all of them, for schemas: the noise as it is.

    Returns:
      The mechanism.

    Raises:
      ValueError: If an argument is out of its range, or the scheme is not for the factorization.
    """
    unknown = Mechanism(factorization, participation, 0.0)
    scheme = unknown.sampling
    if noise_multiplier is not None:
        return dataclasses.replace(unknown, noise_multiplier=noise_multiplier)
    if rho is not None:
        return calibrate(factorization, participation, rho=rho)
    if scheme is None:
        return calibrate(factorization, participation, epsilon=epsilon, delta=delta)
    description: dict[str, Any] = {
        "mechanism": "noise-multiplier",
        **scheme.to_dict(),
        "epsilon": epsilon,
        "delta": delta,
        "accounting": certificate_search.ACCOUNTING_VERSION,
    }
    columns = factorization.columns_for(scheme)
    certification = dataclasses.replace(certification_in(cache_directory), budget=budget)
    if columns is not None:
        description["columns"] = hashlib.sha256(columns.entries.tobytes()).hexdigest()
        description["rounding"] = columns.rounding
        if columns.norm is not None:
            description["norm"] = columns.norm
        description["is_estimate"] = is_estimate
        if budget is not None:
            description["mechanisms"] = budget.left

    is_rough = columns is not None and is_estimate

    def multiplier() -> float:
        if is_rough:
            return scheme.estimated(epsilon, delta, columns, certification)
        return calibrate(
            factorization, scheme, epsilon=epsilon, delta=delta, certification=certification
        ).noise_multiplier

    def keeps_target(sigma: float) -> bool:
        # An estimate only decides which mechanism is certified first: no guarantee rests on it.
        # A number that is larger than need be keeps the target too: it wastes noise, not privacy.
        return is_rough or (
            scheme.amplified(sigma, delta, columns, certification).epsilon <= epsilon
        )

    return dataclasses.replace(
        unknown,
        noise_multiplier=factorization_cache.fetch_number(
            cache_directory, description, multiplier, keeps_target
        ),
    )


def certification_in(cache_directory: pathlib.Path | None) -> Certification:
    """Returns how the noise multipliers of plans are proved.

    Args:
      cache_directory: Where certificates are cached between calls; None for nowhere.
    """
    if cache_directory == caches.find(factorization_cache.FOLDER):
        # Where guarantees look for the certificate as well.
        return Certification(directory=caches.find(certificate_search.FOLDER))
    return Certification(directory=cache_directory)


def _proposal(
    mechanism: str,
    variant: Variant,
    num_rounds: int,
    schema: Participation,
    cache: pathlib.Path | None,
    error: PlannedError,
) -> Proposal:
    variant = _made_for(error, mechanism, variant)
    base = (
        None if variant.base is None else (variant.base[0], tuple(variant.base[1].options.items()))
    )
    options = tuple(variant.options.items())
    if variant.reason:
        return Proposal(mechanism, options, schema, base=base, reason=variant.reason)
    is_cached = variant.is_cached and factorization_cache.holds(
        cache, _description(mechanism, variant, num_rounds, schema)
    )
    return Proposal(
        mechanism,
        options,
        schema,
        functools.partial(_computed, mechanism, variant, num_rounds, schema, cache),
        base=base,
        is_cached=is_cached,
        is_search=variant.is_cached and not is_cached,
    )


def _made_for(error: PlannedError, mechanism: str, variant: Variant) -> Variant:
    """The variant that is made for an error, as far as the mechanism is made for it.

    Whoever gives the options of such a variant to ``mf-factorize`` gets the same matrix: its gap is
    an option, too, while a matrix for the mean may be made to a smaller gap.
    """
    if variant.base is not None:
        base = variant.base[0], _made_for(error, *variant.base)
        variant = dataclasses.replace(variant, base=base)
    name = error_name(error)
    option = catalogue.entry(mechanism).error_option
    if name == "mean" or option is None or option.name in variant.options:
        return variant
    options, arguments = {**variant.options, option.name: name}, dict(variant.arguments)
    if _RELATIVE_GAP in arguments:
        options[_RELATIVE_GAP] = arguments.pop(_RELATIVE_GAP)
    if name == "weights":
        arguments[option.name] = error
    return dataclasses.replace(variant, options=options, arguments=arguments)


def _computed(
    mechanism: str,
    variant: Variant,
    num_rounds: int,
    schema: Participation,
    cache: pathlib.Path | None,
) -> Factorization:
    """The factorization of a variant, out of the cache if it is there; its base before it."""

    def compute() -> Factorization:
        options = {**variant.options, **variant.arguments}
        if variant.base is not None:
            options[_BASE] = _computed(*variant.base, num_rounds, schema, cache)
        request = Request(
            num_rounds,
            workloads.describe({"name": "prefix_sum"}, num_rounds),
            schema if variant.depends_on_schema else None,
            options,
        )
        return catalogue.entry(mechanism).build(request)

    if not variant.is_cached:
        return compute()
    return factorization_cache.fetch(
        cache, _description(mechanism, variant, num_rounds, schema), compute
    )


def _description(
    mechanism: str, variant: Variant, num_rounds: int, schema: Participation
) -> dict[str, Any]:
    """What a factorization follows from, by which the cache knows it."""
    description: dict[str, Any] = {"mechanism": mechanism, "num_rounds": num_rounds}
    if variant.depends_on_schema:
        description["participation"] = schema.to_dict()
    description |= {**variant.options, **variant.arguments}
    if isinstance(description.get("error"), tuple):
        # As the parameters of a factorization have them.
        description |= RoundError.of(description["error"], num_rounds).parameters()
    if variant.base is not None:
        name, base = variant.base
        description[_BASE] = _description(name, base, num_rounds, schema)
    return description


def _bands(proposal: Proposal) -> int:
    """The bands that the options name, or 0."""
    return int(dict(proposal.options).get("num_bands", 0))


def _separation(schema: Participation, num_rounds: int) -> int:
    return min(schema.separation_in(num_rounds), num_rounds)
