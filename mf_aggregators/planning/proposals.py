"""Which mechanisms a plan evaluates, and how each is computed.

Everything that can be the best is proposed once, in the order in which it is computed: what
takes no time first, and last what has fewer bands than others. What would take too long is named
with the reason.

A cache keeps checkpoints, and noise multipliers of schemes, under names made of what they follow
from.
"""

import dataclasses
import hashlib
import importlib.metadata
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import caches, catalogue, checkpoints, version
from mf_aggregators.catalogue import Clients, Variant
from mf_aggregators.factorizations import Factorization
from mf_aggregators.factorizations._round_errors import RoundError
from mf_aggregators.factorizations.toeplitz import recursion_of
from mf_aggregators.kernel.rows import independent_rows
from mf_aggregators.mechanism import Mechanism, calibrate
from mf_aggregators.noise import costs
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
from mf_aggregators.planning import plans
from mf_aggregators.planning.plans import ANY_SAMPLING, PlannedError, Setting
from mf_aggregators.workloads import Workload

# The folder of the user's cache directory that factorizations are cached in by default.
FOLDER = "factorizations"
_BYTES_OF_ROW = 4
# Noise is infeasible if it takes longer than this a round, and more than this many times the
# time of independent noise.
_MOST_SECONDS_PER_ROUND = 60.0
_MOST_TIMES_INDEPENDENT = 100.0


def proposed(setting: Setting, own: Mapping[str, Factorization]) -> list[Variant]:
    """Returns the variants that a plan evaluates, in the order in which they are computed.

    Args:
      setting: What the run is given.
      own: Further factorizations by the directories of their checkpoints.

    Returns:
      For timers, what is made for their schema. For drawn clients, mechanisms of 1, 2, 4, ... bands
      and the most possible, with the scheme that amplifies them; where batches are drawn, also
      what is made for a fixed order of them, which nothing amplifies.
    """
    if setting.sampling is None:
        assert setting.participation is not None
        return _for_timers(setting, own, setting.participation)
    if setting.sampling != ANY_SAMPLING:
        return _for_scheme(setting, own, setting.sampling)
    sizes = (setting.num_rounds, setting.population, setting.clients_per_round)
    found = _for_timers(setting, own, MinSeparation(plans.most_bands(*sizes)))
    has_fixed_order = False
    for name, scheme in sampling_schemes().items():
        # With batches of one size, a client takes the place of another one: others need less noise.
        if not scheme.has_random_sizes:
            continue
        # Mechanisms for batches in a fixed order are the same for all schemes with groups.
        repeats = scheme.has_groups and has_fixed_order
        of_scheme = _for_scheme(setting, own, name)
        found += [each for each in of_scheme if each.sampling is not None or not repeats]
        has_fixed_order |= scheme.has_groups
    return found


def _for_timers(
    setting: Setting, own: Mapping[str, Factorization], participation: Participation
) -> list[Variant]:
    rounds = setting.num_rounds
    separation = min(participation.separation_in(rounds), rounds)
    affordable, budget = _affordable_bands(setting, separation)
    clients = Clients(rounds, participation, separation, affordable, budget)
    found = _tried(setting, own, clients)
    most: dict[str, int] = {}
    for each in found:
        if not each.reason:
            most[each.kind] = max(_bands(each), most.get(each.kind, 0))
    # Matrices with fewer bands than another of their kind only save memory: in a limited time they
    # come last.
    return sorted(found, key=lambda each: _bands(each) < most.get(each.kind, 0))


def _for_scheme(setting: Setting, own: Mapping[str, Factorization], name: str) -> list[Variant]:
    rounds, has_groups = setting.num_rounds, sampling_schemes()[name].has_groups
    most = plans.most_bands(rounds, setting.population, setting.clients_per_round)
    # A fixed order of all batches: everybody returns after an epoch, and nothing is amplified.
    fixed_order = FixedEpochOrder(math.ceil(rounds / most), most)
    counts = tuple(plans.powers_of_two(most))
    found: list[Variant] = []
    clients = Clients(rounds, fixed_order, most, most, band_counts=counts)
    for variant in _tried(setting, own, clients):
        bands = variant.amplified_bands
        if bands is None:
            found += [variant] if has_groups else []
            continue
        variant = _made_for(variant, SingleParticipation())
        separations: Sequence[int | None] = (None,)
        if name == MinSeparationSampling.name:
            largest = setting.population // setting.clients_per_round
            wanted = sorted({bands, bands + bands // 2, 2 * bands})
            separations = [each for each in wanted if each <= largest]
        found += [_drawn(setting, variant, name, bands, each) for each in separations]
    if not sampling_schemes()[name].takes_any_matrix:
        return found
    scheme = _scheme(setting, name, rounds)
    # Mechanisms for timers of the scheme's separation, except approximations.
    separation = min(scheme.separation_in(rounds), rounds)
    timers = Clients(rounds, MinSeparation(separation), separation, separation)
    amplified = {each.kind for each in found}
    return found + [
        dataclasses.replace(each, sampling=scheme)
        for each in _tried(setting, {}, timers)
        if each.kind not in amplified and each.base is None
    ]


def _drawn(
    setting: Setting, variant: Variant, name: str, num_bands: int, separation: int | None = None
) -> Variant:
    """The variant for clients that a scheme draws, or why the scheme is none for its bands."""
    if variant.reason:
        return variant
    try:
        scheme = _scheme(setting, name, num_bands, separation)
    except ValueError as error:
        return dataclasses.replace(variant, reason=f"{name}: {str(error).rstrip('.')}")
    return dataclasses.replace(variant, sampling=scheme)


def _scheme(
    setting: Setting, name: str, num_bands: int, separation: int | None = None
) -> SamplingScheme:
    return sampling_scheme(
        name,
        num_rounds=setting.num_rounds,
        num_bands=num_bands,
        population=setting.population,
        clients_per_round=setting.clients_per_round,
        separation=separation,
    )


def _tried(setting: Setting, own: Mapping[str, Factorization], clients: Clients) -> list[Variant]:
    """The variants of all mechanisms for clients, made for the error of the plan if possible."""
    variants = [
        _with_error(variant, setting.error)
        for mechanism in catalogue.entries().values()
        for variant in mechanism.tried(clients)
    ]
    variants += [
        Variant(
            factorization.mechanism,
            {"checkpoint": directory},
            amplified_bands=factorization.strategy_bands() if clients.band_counts else None,
            is_search=False,
            factorization=factorization,
        )
        for directory, factorization in own.items()
    ]
    return [_made_for(variant, clients.participation) for variant in variants]


def _made_for(variant: Variant, schema: Participation) -> Variant:
    base = None if variant.base is None else _made_for(variant.base, schema)
    return dataclasses.replace(variant, participation=schema, base=base)


def _with_error(variant: Variant, error: PlannedError) -> Variant:
    base = None if variant.base is None else _with_error(variant.base, error)
    options = dict(variant.options)
    if error != "mean" and "error" in catalogue.entry(variant.kind).options:
        options["error"] = error
    return dataclasses.replace(variant, options=options, base=base)


def _bands(variant: Variant) -> int:
    """The bands that the options name, or 0."""
    return int(variant.options.get("num_bands", 0))


def _affordable_bands(setting: Setting, most: int) -> tuple[int, str]:
    """The most bands that fit into memory and disk, at least 1, and the name of the limit."""
    affordable, budget = most, "noise"
    if setting.noise_memory is not None:
        # b bands keep b - 1 rows.
        rows = int(setting.noise_memory // (_BYTES_OF_ROW * setting.model_size))
        affordable = min(most, rows + 1)
    if setting.noise_disk is None or _fits_on_disk(setting, affordable):
        return affordable, budget
    # Bisection finds the most bands that fit: one band keeps nothing.
    fitting, too_many = 1, affordable
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if _fits_on_disk(setting, middle):
            fitting = middle
        else:
            too_many = middle
    return fitting, "noise on disk"


def _fits_on_disk(setting: Setting, num_bands: int) -> bool:
    rounds = setting.num_rounds
    # The cost of a recursion follows from its sizes alone.
    recursion = recursion_of(rounds, np.ones(num_bands), lambda: np.ones(rounds))
    cost = costs.choose(recursion, setting.model_size, disk_limit=setting.noise_disk)
    if setting.noise_disk is not None and cost.disk_bytes > setting.noise_disk:
        return False
    return cost.seconds_per_round <= most_seconds(setting)


def most_seconds(setting: Setting) -> float:
    """Returns the most seconds a round that noise may take.

    Args:
      setting: Has the rounds and the size of the model.
    """
    independent = costs.choose(independent_rows(setting.num_rounds), setting.model_size)
    return max(_MOST_SECONDS_PER_ROUND, _MOST_TIMES_INDEPENDENT * independent.seconds_per_round)


def computed(variant: Variant, num_rounds: int, cache: pathlib.Path | None) -> Factorization:
    """Returns the factorization of a variant, from the cache if it is there; its base before it.

    Args:
      variant: A feasible one.
      num_rounds: The rounds n.
      cache: Where factorizations are cached between calls; None for nowhere.
    """

    def compute() -> Factorization:
        options = dict(variant.options)
        if variant.base is not None:
            options["base_checkpoint"] = computed(variant.base, num_rounds, cache)
        schema = variant.participation if variant.depends_on_schema else None
        workload = Workload("prefix_sum", num_rounds)
        return catalogue.entry(variant.kind).build(workload, schema, options)

    if variant.factorization is not None:
        return variant.factorization
    if not variant.is_search:
        return compute()
    return fetch(cache, description_of(variant, num_rounds), compute)


def description_of(variant: Variant, num_rounds: int) -> dict[str, Any]:
    """Returns all inputs that determine a factorization, the key of the cache; JSON-able.

    Args:
      variant: Its mechanism, options, schema and base.
      num_rounds: The rounds n.
    """
    found: dict[str, Any] = {"mechanism": variant.kind, "num_rounds": num_rounds, **variant.options}
    if variant.depends_on_schema and variant.participation is not None:
        found["participation"] = variant.participation.to_dict()
    if isinstance(found.get("error"), tuple):
        # The parameters of a factorization have weights in this form.
        found |= RoundError.of(found["error"], num_rounds).parameters()
    if variant.base is not None:
        found["base_checkpoint"] = description_of(variant.base, num_rounds)
    return found


def calibrated(
    factorization: Factorization,
    participation: Participation,
    epsilon: float,
    delta: float,
    cache_directory: pathlib.Path | None,
    *,
    is_estimate: bool = False,
    budget: MechanismBudget | None = None,
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

    Returns:
      The mechanism.

    Raises:
      ValueError: If an argument is out of its range, or the scheme is not for the factorization.
    """
    unknown = Mechanism(factorization, participation, 0.0)
    scheme = unknown.sampling
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
    is_rough = columns is not None and is_estimate
    if columns is not None:
        description |= {
            "columns": hashlib.sha256(columns.entries.tobytes()).hexdigest(),
            "rounding": columns.rounding,
            "norm": columns.norm,
            "is_estimate": is_estimate,
            "mechanisms": None if budget is None else budget.left,
        }

    def multiplier() -> float:
        if is_rough:
            run = scheme.run(1.0, columns)
            return certificate_search.estimated(run, epsilon, delta, certification, is_rough=True)
        return calibrate(
            factorization, scheme, epsilon=epsilon, delta=delta, certification=certification
        ).noise_multiplier

    def keeps_target(sigma: float) -> bool:
        # An estimate only decides which mechanism is certified first: no guarantee rests on it.
        # A number that is larger than need be keeps the target too: it wastes noise, not privacy.
        return is_rough or (
            scheme.amplified(sigma, delta, columns, certification).epsilon <= epsilon
        )

    found = fetch_number(cache_directory, description, multiplier, keeps_target)
    return dataclasses.replace(unknown, noise_multiplier=found)


def certification_in(cache_directory: pathlib.Path | None) -> Certification:
    """Returns how the noise multipliers of plans are proved.

    Args:
      cache_directory: Where certificates are cached between calls; None for nowhere.
    """
    if cache_directory == caches.find(FOLDER):
        # Guarantees look for the certificate in this folder as well.
        return Certification(directory=caches.find(certificate_search.FOLDER))
    return Certification(directory=cache_directory)


def holds(directory: pathlib.Path | None, description: Mapping[str, Any]) -> bool:
    """Returns whether the cache has an entry, which may be damaged.

    Args:
      directory: The cache; None for none.
      description: As :func:`fetch` takes it.
    """
    return directory is not None and os.path.exists(directory / _name(description))


def fetch(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], Factorization],
) -> Factorization:
    """Returns a cached factorization, or computes and caches it.

    Args:
      directory: The cache; None for none.
      description: Everything that the factorization follows from, JSON-able: the mechanism,
        ``num_rounds`` and its options. The library's version is added, since another one may
        compute better.
      compute: Computes it.

    Returns:
      The factorization. With a ``caches.CacheWarning``, it was computed because its entry is
      damaged, or it could not be cached.
    """
    if directory is None:
        return compute()
    entry = directory / _name(description)
    # Unlike Path.exists, this does not raise where the cache may not be read.
    if os.path.exists(entry):
        try:
            found = checkpoints.load(entry)
            if _is_described(found, description):
                return found
            problem = f"{entry} holds another factorization."
        except checkpoints.CheckpointError as error:
            problem = str(error)
        caches.warn(f"{problem} It is computed again.")
    factorization = compute()
    try:
        checkpoints.save(factorization, entry, participation=factorization.participation)
    except (checkpoints.CheckpointError, OSError) as error:
        caches.warn(f"{error} The factorization is used without being cached.")
    return factorization


def fetch_number(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], float],
    is_believed: Callable[[float], bool] = lambda number: True,
) -> float:
    """Returns a cached number above zero, or computes and caches it.

    Args:
      directory: The cache; None for none.
      description: Everything that the number follows from, JSON-able. The versions of the
        library and of dp-accounting are added.
      compute: Computes it.
      is_believed: Returns whether a number of the cache, which anybody may have written, may be
        used. A guarantee must not rest on one without a check.

    Returns:
      The number, the same to the last bit from the cache. With a ``caches.CacheWarning``, as
      :func:`fetch`.
    """
    if directory is None:
        return compute()

    def believed(value: Any) -> float:
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0.0:
            raise ValueError(f"{value!r} is no finite number above zero")
        if not is_believed(value):
            raise ValueError(f"{value!r} does not keep the target")
        return value

    described = {
        **description,
        "dp_accounting_version": importlib.metadata.version("dp-accounting"),
    }
    return caches.fetch(
        directory / f"{_name(described)}.json",
        described,
        compute,
        field="number",
        to_json=float,
        from_json=believed,
    )


def _is_described(factorization: Factorization, description: Mapping[str, Any]) -> bool:
    stated = {
        # A factorization or description without an error is for the mean.
        "error": "mean",
        **factorization.parameters,
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
    }
    wanted = {"error": "mean", **description}
    return all(stated.get(name, value) == value for name, value in wanted.items())


def _name(description: Mapping[str, Any]) -> str:
    digest = caches.digest({**description, "library_version": version.__version__})[:20]
    return f"{description.get('mechanism', 'factorization')}-{digest}"
