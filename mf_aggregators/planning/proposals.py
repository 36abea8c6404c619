"""Which mechanisms a plan weighs, how each is computed, and how long that takes.

Everything that can be the best is proposed once, in the order in which it is computed: what
takes no time first. What would take too long is named with the reason.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from mf_aggregators import factorizations, workloads
from mf_aggregators import participation as participations
from mf_aggregators.accounting import sampling_schemes
from mf_aggregators.accounting.sampling_schemes import SamplingScheme
from mf_aggregators.checkpoints import factorization_cache
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import FixedEpochOrder, Participation, SingleParticipation
from mf_aggregators.planning import band_choice

# Dense optimisation takes minutes above these.
_MOST_ROUNDS_OF_BANDED = 4096
_MOST_ROUNDS_OF_OPTIMAL = 4096
# Searches over Toeplitz coefficients take minutes above this.
_MOST_ROUNDS_OF_BANDED_INVERSE = 20_000
_BUFFERS = (2, 4)
_BANDS_OF_INVERSE = (16, 64)
# Fewer bands than the most, for those who look for less memory.
_FEWER_BANDS = (4, 16, 64)
# The diagonals and the ranks of structured: docs/planning.md has the errors of others.
_DIAGONALS, _RANKS = 4, (8, 16)

# Seconds for 2,052 rounds on two cores, and the power of the rounds that they grow with.
_ROUNDS_OF_SECONDS = 2052
_POWER_OF_SECONDS = 2.5
_SECONDS = {"banded": 30.0, "optimal": 30.0, "structured": 5.0, "optimal for epochs": 120.0}
# What takes less is not worth a word.
_SHORT_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A mechanism to weigh.

    Attributes:
      mechanism: As ``mf-factorize --mechanism`` spells it.
      options: The flags of ``mf-factorize`` that make it, without the common ones.
      participation: The schema that it is made for.
      compute: Computes it, or takes it from the cache; None for what is left out.
      scheme: The sampling scheme that amplifies it, if any.
      base_bands: The bands of the banded matrix that ``structured`` approximates; None where
        it approximates the optimum, and for other mechanisms.
      reason: Why it is left out.
      is_kept: Whether it is in the cache.
      expected_seconds: How long computing it takes on two cores; None if it is not known or
        too short to matter.
    """

    mechanism: str
    options: tuple[tuple[str, Any], ...]
    participation: Participation
    compute: Callable[[], Factorization] | None = None
    scheme: SamplingScheme | None = None
    base_bands: int | None = None
    reason: str = ""
    is_kept: bool = False
    expected_seconds: float | None = None

    @property
    def name(self) -> str:
        """The mechanism with its options, for a reader."""
        return " ".join([self.mechanism, *(str(value) for _, value in self.options)])


def for_timers(
    num_rounds: int,
    participation: Participation,
    affordable_bands: Callable[[int], tuple[int, str]],
    cache_directory: pathlib.Path | None,
) -> list[Proposal]:
    """Returns what is weighed for devices with participation timers.

    Args:
      num_rounds: n.
      participation: The schema that the timers enforce.
      affordable_bands: Takes the most bands that a schema allows; returns the most whose
        noise fits a budget, and, where those are fewer, what the budget is for.
      cache_directory: Where factorizations are kept; None for nowhere.

    Returns:
      The proposals.
    """
    return list(_for_timers(num_rounds, participation, affordable_bands, cache_directory))


def for_sampling(
    num_rounds: int,
    population: int,
    clients_per_round: int,
    sampling: str,
    cache_directory: pathlib.Path | None,
) -> list[Proposal]:
    """Returns what is weighed for a data centre that draws every batch.

    Args:
      num_rounds: n.
      population: The clients m.
      clients_per_round: The batch size B.
      sampling: ``poisson``, ``fixed_size`` or ``shuffling``.
      cache_directory: Where factorizations are kept; None for nowhere.

    Returns:
      Amplified mechanisms of 1, 2, 4, ... bands and the most possible, and the optimum for a
      fixed order of batches, which nothing amplifies, with its approximation.

    Raises:
      ValueError: If the population is smaller than one batch.
    """
    most = band_choice.most_bands(num_rounds, population, clients_per_round)
    proposals = []
    for num_bands in band_choice.powers_of_two(most):
        proposal = _banded(num_rounds, num_bands, SingleParticipation(), cache_directory)
        if proposal.compute is not None:
            scheme = sampling_schemes.create(
                sampling,
                num_rounds=num_rounds,
                num_bands=num_bands,
                population=population,
                clients_per_round=clients_per_round,
            )
            proposal = dataclasses.replace(proposal, scheme=scheme)
        proposals.append(proposal)
    # A fixed order of all batches: everybody returns after an epoch, and nothing is amplified.
    schema = FixedEpochOrder(math.ceil(num_rounds / most), most)
    return [*proposals, *_optimal(num_rounds, schema, cache_directory)]


def _for_timers(
    num_rounds: int,
    schema: Participation,
    affordable_bands: Callable[[int], tuple[int, str]],
    cache: pathlib.Path | None,
) -> Iterator[Proposal]:
    yield Proposal("identity", (), schema, lambda: factorizations.identity(num_rounds))
    for decoder in ("online", "full"):
        yield Proposal(
            "tree",
            (("decoder", decoder),),
            schema,
            lambda decoder=decoder: factorizations.tree_aggregation(num_rounds, decoder),  # type: ignore[misc]
        )
    for num_buffers in _BUFFERS:
        yield _kept(
            "blt",
            {"num_buffers": num_buffers},
            num_rounds,
            schema,
            cache,
            lambda buffers=num_buffers: factorizations.blt(num_rounds, buffers, schema),  # type: ignore[misc]
        )
    for num_bands in sorted({min(bands, num_rounds) for bands in _BANDS_OF_INVERSE}):
        if num_rounds > _MOST_ROUNDS_OF_BANDED_INVERSE:
            yield _too_long("banded_inverse", num_bands, schema, _MOST_ROUNDS_OF_BANDED_INVERSE)
            continue
        yield _kept(
            "banded_inverse",
            {"num_bands": num_bands},
            num_rounds,
            schema,
            cache,
            lambda bands=num_bands: factorizations.banded_inverse(num_rounds, bands, schema),  # type: ignore[misc]
        )
    separation = _separation(schema, num_rounds)
    affordable, budget = affordable_bands(separation)
    if affordable < separation:
        yield Proposal(
            "banded",
            (("num_bands", separation),),
            schema,
            reason=f"keeps more {budget} than allowed; bands that fit: {affordable}",
        )
    yield _kept(
        "toeplitz",
        {"num_bands": affordable},
        num_rounds,
        schema,
        cache,
        lambda: factorizations.toeplitz(num_rounds, affordable, schema),
    )
    for num_bands in sorted({bands for bands in _FEWER_BANDS if bands < affordable} | {affordable}):
        if num_bands > 1:
            yield _banded(num_rounds, num_bands, schema, cache)
    if schema.most_participations(num_rounds) == 1:
        if num_rounds <= _MOST_ROUNDS_OF_OPTIMAL:
            yield from _optimal(num_rounds, schema, cache)
    elif separation > 1 and num_rounds <= _MOST_ROUNDS_OF_BANDED:
        yield from _structured(
            num_rounds,
            schema,
            cache,
            lambda: band_choice.banded_matrix(num_rounds, separation, cache),
            base_bands=separation,
        )


def _banded(
    num_rounds: int, num_bands: int, schema: Participation, cache: pathlib.Path | None
) -> Proposal:
    """The optimum for every schema that allows as many bands, which is kept for all of them."""
    if num_bands == 1:
        return Proposal("identity", (), schema, lambda: factorizations.identity(num_rounds))
    if num_rounds > _MOST_ROUNDS_OF_BANDED:
        return _too_long("banded", num_bands, schema, _MOST_ROUNDS_OF_BANDED)
    is_kept = band_choice.is_kept(num_rounds, num_bands, cache)
    return Proposal(
        "banded",
        (("num_bands", num_bands),),
        schema,
        lambda: band_choice.banded_matrix(num_rounds, num_bands, cache),
        is_kept=is_kept,
        expected_seconds=_expected_seconds("banded", num_rounds, is_kept),
    )


def _optimal(
    num_rounds: int, schema: Participation, cache: pathlib.Path | None
) -> Iterator[Proposal]:
    """The dense optimum, and its approximation."""
    if num_rounds > _MOST_ROUNDS_OF_OPTIMAL:
        yield Proposal(
            "optimal",
            (),
            schema,
            reason=f"is optimised for at most {_MOST_ROUNDS_OF_OPTIMAL} rounds",
        )
        return
    returns = schema.most_participations(num_rounds) > 1
    optimum = _kept(
        "optimal",
        {},
        num_rounds,
        schema,
        cache,
        lambda: factorizations.optimal(
            workloads.prefix_sum(num_rounds),
            schema if returns else None,
            relative_gap=band_choice.RELATIVE_GAP,
        ),
        kind="optimal for epochs" if returns else "optimal",
        relative_gap=band_choice.RELATIVE_GAP,
    )
    yield optimum
    assert optimum.compute is not None
    yield from _structured(num_rounds, schema, cache, optimum.compute, base_bands=None)


def _structured(
    num_rounds: int,
    schema: Participation,
    cache: pathlib.Path | None,
    base: Callable[[], Factorization],
    base_bands: int | None,
) -> Iterator[Proposal]:
    """Approximations of a base: of fewer rounds, the rank would be that of the base itself."""
    for rank in _RANKS:
        if num_rounds <= _DIAGONALS + rank:
            return
        proposal = _kept(
            "structured",
            {"num_diagonals": _DIAGONALS, "rank": rank},
            num_rounds,
            schema,
            cache,
            lambda rank=rank: factorizations.structured(base(), _DIAGONALS, rank),  # type: ignore[misc]
            kind="structured",
            # Of what it approximates.
            **(
                {} if base_bands is None else {"base_mechanism": "banded", "base_bands": base_bands}
            ),
        )
        yield dataclasses.replace(proposal, base_bands=base_bands)


def _kept(
    mechanism: str,
    options: dict[str, Any],
    num_rounds: int,
    schema: Participation,
    cache: pathlib.Path | None,
    compute: Callable[[], Factorization],
    *,
    kind: str | None = None,
    **further: Any,
) -> Proposal:
    """A proposal that is kept in the cache; ``further`` is what else it follows from."""
    description = {
        "mechanism": mechanism,
        "num_rounds": num_rounds,
        "participation": participations.to_dict(schema),
        **options,
        **further,
    }
    is_kept = factorization_cache.holds(cache, description)
    return Proposal(
        mechanism,
        tuple(options.items()),
        schema,
        lambda: factorization_cache.fetch(cache, description, compute),
        is_kept=is_kept,
        expected_seconds=_expected_seconds(kind, num_rounds, is_kept),
    )


def _too_long(mechanism: str, num_bands: int, schema: Participation, most_rounds: int) -> Proposal:
    return Proposal(
        mechanism,
        (("num_bands", num_bands),),
        schema,
        reason=f"is optimised for at most {most_rounds} rounds",
    )


def _expected_seconds(kind: str | None, num_rounds: int, is_kept: bool) -> float | None:
    if kind is None or is_kept:
        return None
    seconds = _SECONDS[kind] * (num_rounds / _ROUNDS_OF_SECONDS) ** _POWER_OF_SECONDS
    return seconds if seconds >= _SHORT_SECONDS else None


def _separation(schema: Participation, num_rounds: int) -> int:
    if isinstance(schema, SingleParticipation) or schema.most_participations(num_rounds) == 1:
        return num_rounds
    return min(schema.separation, num_rounds)
