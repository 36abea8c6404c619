"""Cohorts deviate from a scheme exactly if it cannot have drawn them."""

import itertools
from typing import Any

import numpy as np
import pytest

from mf_aggregators.participation import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparationSampling,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
    sampling_scheme,
)
from tests.mf_aggregators.scheme_rates import rounds_of_cycle


def _groups(*sizes: int) -> list[SamplingScheme]:
    return [PoissonSampling(*sizes), FixedSizeSampling(*sizes), Shuffling(*sizes)]


def _partitions(scheme: Any) -> list[list[frozenset[int]]]:
    """All ways to split the population into the scheme's parts."""
    clients = range(scheme.population)
    slices = [scheme.as_draws().group_slice(part) for part in range(scheme.num_bands)]
    found = {
        tuple(frozenset(order[places]) for places in slices)
        for order in itertools.permutations(clients)
    }
    return [list(parts) for parts in found]


def _batches(scheme: SamplingScheme, part: frozenset[int]) -> list[frozenset[int]]:
    """All batches that one round may draw from a part."""
    if not isinstance(scheme, PoissonSampling):
        sizes: range = range(scheme.clients_per_round, scheme.clients_per_round + 1)
    elif scheme.population == scheme.clients_per_round * scheme.num_bands:
        sizes = range(len(part), len(part) + 1)
    else:
        sizes = range(len(part) + 1)
    return [
        frozenset(batch) for size in sizes for batch in itertools.combinations(sorted(part), size)
    ]


def _possible(scheme: SamplingScheme, rounds: int) -> set[tuple[frozenset[int], ...]]:
    """Everything that the scheme may draw in its first rounds, by its definition alone."""
    if isinstance(scheme, MinSeparationSampling | BallsInBins):
        clients = range(scheme.population)
        patterns = _patterns(scheme, rounds)
        return {
            tuple(
                frozenset(client for client in clients if index in chosen[client])
                for index in range(rounds)
            )
            for chosen in itertools.product(patterns, repeat=scheme.population)
        }
    assert scheme.has_groups
    found = set()
    for parts in _partitions(scheme):
        for drawn in itertools.product(
            *(_batches(scheme, parts[index % scheme.num_bands]) for index in range(rounds))
        ):
            if not isinstance(scheme, Shuffling) or _keeps_passes(scheme, drawn):
                found.add(drawn)
    return found


def _patterns(scheme: MinSeparationSampling | BallsInBins, rounds: int) -> list[frozenset[int]]:
    """The rounds that one client may take part in; it may be absent from any."""
    draws: Any = scheme.as_draws()
    if not isinstance(scheme, MinSeparationSampling) or draws.joining_probability == 1.0:
        bins = [range(first, rounds, scheme.separation) for first in range(scheme.separation)]
        return list(
            {
                frozenset(chosen)
                for one in bins
                for size in range(len(one) + 1)
                for chosen in itertools.combinations(one, size)
            }
        )
    return [
        frozenset(chosen)
        for size in range(rounds + 1)
        for chosen in itertools.combinations(range(rounds), size)
        if all(b - a >= scheme.separation for a, b in itertools.pairwise(chosen))
    ]


def _keeps_passes(scheme: Shuffling, drawn: tuple[frozenset[int], ...]) -> bool:
    for part in range(scheme.num_bands):
        visits = drawn[part :: scheme.num_bands]
        for first in range(0, len(visits), rounds_of_cycle(scheme)):
            shown = list(itertools.chain(*visits[first : first + rounds_of_cycle(scheme)]))
            if len(shown) != len(set(shown)):
                return False
    return True


@pytest.mark.short_cases(9)
@pytest.mark.parametrize(
    "scheme",
    [
        # Parts of two clients, of two or three, as small as a batch, and one part of all.
        *_groups(3, 2, 4, 1),
        *_groups(3, 2, 5, 1),
        *_groups(3, 2, 4, 2),
        *_groups(3, 1, 4, 2),
        # Here a pass is over, and one client is left out of all batches.
        Shuffling(3, 1, 5, 2),
        # Min-separation sampling, once with a coin that always comes up heads, and bins.
        MinSeparationSampling(3, 2, 4, 1, 2),
        MinSeparationSampling(3, 1, 4, 1, 3),
        MinSeparationSampling(3, 2, 4, 2, 2),
        BallsInBins(3, 2, 4, 2, 2),
        BallsInBins(3, 1, 3, 1, 3),
    ],
    ids=str,
)
def test_cohorts_deviate_exactly_if_no_draw_gives_them(scheme: SamplingScheme) -> None:
    """Every sequence of cohorts there is, against all partitions and draws."""
    clients = range(scheme.population)
    subsets = [
        frozenset(each)
        for size in range(scheme.population + 1)
        for each in itertools.combinations(clients, size)
    ]
    # For the largest populations, fewer sequences: all of batches of up to two clients.
    if scheme.population == 5:
        subsets = [each for each in subsets if len(each) <= 2]
    for rounds in range(scheme.num_rounds + 1):
        possible = _possible(scheme, rounds)
        for drawn in itertools.product(subsets, repeat=rounds):
            cohorts = [np.array(sorted(cohort), np.int64) for cohort in drawn]
            found = scheme.deviation(scheme.population, cohorts)
            assert (found is None) == (drawn in possible), (drawn, found)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("rounds", [1, 7, 64])
@pytest.mark.parametrize("name", ["poisson", "fixed_size"])
def test_random_draws_do_not_deviate(name: str, rounds: int) -> None:
    scheme = sampling_scheme(name, num_rounds=64, num_bands=3, population=31, clients_per_round=4)
    generator = np.random.default_rng(8)
    for _ in range(200):
        order = generator.permutation(31)
        cohorts = []
        for index in range(rounds):
            draws: Any = scheme.as_draws()
            part = order[draws.group_slice(index % 3)]
            if isinstance(scheme, PoissonSampling):
                batch = part[generator.random(len(part)) < draws.sampling_probability]
            else:
                batch = generator.choice(part, 4, replace=False)
            cohorts.append(np.sort(batch))
        assert scheme.deviation(31, cohorts) is None


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("rounds", [1, 7, 64])
@pytest.mark.parametrize(
    "scheme",
    [
        MinSeparationSampling(64, 3, 31, 4, 5),
        MinSeparationSampling(64, 3, 400, 4, 3),
        BallsInBins(64, 3, 31, 4, 7),
    ],
)
def test_random_draws_of_clients_by_themselves_do_not_deviate(
    scheme: MinSeparationSampling | BallsInBins, rounds: int
) -> None:
    for seed in range(60):
        sampler = scheme.sampler(seed)
        cohorts = [sampler.draw(index) for index in range(rounds)]
        assert scheme.deviation(scheme.population, cohorts) is None
        assert sampler.deviation(scheme.population, cohorts) is None


def test_tampered_ledgers_are_found_by_the_holder_of_the_seed() -> None:
    """Of clients who draw for themselves: absent ones are found as such, added ones refused."""
    coins = MinSeparationSampling(8, 3, 400, 10, 4).sampler(1)
    drawn = [coins.draw(index) for index in range(8)]
    fewer = [*drawn[:5], drawn[5][1:], *drawn[6:]]
    assert coins.scheme.deviation(400, fewer) is None
    assert coins.deviation(400, fewer) is not None
    assert coins.deviation(400, fewer, may_be_absent=True) is None
    assert (coins.num_absent(drawn), coins.num_absent(fewer)) == (0, 1)
    free = np.setdiff1d(np.arange(400), np.concatenate(drawn[2:]))[:1]
    more = [*drawn[:5], np.union1d(drawn[5], free), *drawn[6:]]
    assert coins.scheme.deviation(400, more) is None
    assert coins.deviation(400, more, may_be_absent=True) == (
        "a client of round 6 (counted from 1) is not one of those that the sampler draws"
    )
    again = [*drawn[:5], np.union1d(drawn[5], drawn[2][:1]), *drawn[6:]]
    found = coins.scheme.deviation(400, again)
    assert found == "a client of round 6 (counted from 1) took part less than 4 rounds before"
    assert coins.deviation(401, drawn) == "the ledger has 401 clients, not 400"
