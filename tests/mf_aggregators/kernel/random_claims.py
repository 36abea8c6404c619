"""Random claims against an arithmetic of its own: fractions, enumeration and mpmath.

    python -m tests.mf_aggregators.kernel.random_claims --count=2000

C is the exact inverse of the rows in fractions. The sensitivity is the largest change over all
patterns and signs, and over vectors that are moved until nothing gets larger. The epsilon of draws
follows from mixtures of normal numbers: in one round from all roots of their difference, and in two
or three rounds from all sets of rounds that a client may draw. A claim of an epsilon that is 1e-6
below the truth has to be refused. One that is 1e-3 above it has to be accepted wherever the kernel
says that its sensitivity is exact, and of draws but for certificates, which are of samples.
"""

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.optimize
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy import special

from mf_aggregators.audit.statistics import _maximal_patterns
from mf_aggregators.kernel import claim
from mf_aggregators.kernel.certificate import _BallsInBinsRounds, _MinSeparationRounds
from mf_aggregators.kernel.claim import Claim, Limit, Pattern
from mf_aggregators.kernel.losses import (
    BallsInBins,
    FixedSize,
    Groups,
    MinSeparation,
    Poisson,
    RandomAllocation,
    TruncatedPoisson,
)
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.kernel.sensitivity import Schema, Unit
from mf_aggregators.participation.certificate_search import Certification
from tests.mf_aggregators import brute_force, participation_patterns, random_recursions
from tests.mf_aggregators.kernel.test_rows import exact_strategy
from tests.mf_aggregators.participation_patterns import Patterns
from tests.mf_aggregators.random_recursions import banded_rows

DELTA = 1e-5
# Weights and means, in units of the shift, of a mixture of normal numbers.
_Mixture = tuple[tuple[float, float], ...]
_SCHEMAS = st.builds(
    Schema, st.one_of(st.none(), st.integers(1, 4)), st.integers(1, 3), st.booleans()
)
_PATTERNS = st.sets(st.integers(0, 5)).map(lambda rounds: Pattern(tuple(sorted(rounds))))
_UNITS = st.builds(
    Unit, _SCHEMAS, num_clients=st.integers(1, 2), window=st.integers(2, 6)
) | st.builds(Unit, _SCHEMAS, window=st.integers(1, 6), num_windows=st.integers(1, 3))
_LIMITS = st.floats(0.1, 5.0).map(Limit)
# At this delta a certificate needs few samples.
_DELTA_OF_CERTIFICATES = 1e-2


def largest_change(matrix: np.ndarray, taking_part: Schema | Unit | Pattern) -> float:
    """Returns the most that one client moves C x by, of all patterns, all signs and some vectors.

    Args:
      matrix: C.
      taking_part: The schema, the unit whose clients it is for, or the rounds of the client.
    """
    largest, generator = 0.0, np.random.default_rng(0)
    for counts in set(_counts(taking_part, len(matrix))):
        columns = (matrix * counts)[:, np.flatnonzero(counts)]
        everything = tuple(range(columns.shape[1]))
        moved_by_vectors = brute_force.vector_change(
            columns, everything, len(everything), generator
        )
        largest = max(largest, moved_by_vectors)
        for signs in itertools.product((-1.0, 1.0), repeat=len(everything)):
            largest = max(largest, float(np.linalg.norm(columns @ np.array(signs))))
    return largest


def _counts(taking_part: Schema | Unit | Pattern, num_rounds: int) -> Iterator[tuple[int, ...]]:
    """Yields how many clients of a unit are in each round, of all maximal ways to take part."""
    if isinstance(taking_part, Pattern):
        yield tuple(taking_part.rounds.count(i) for i in range(num_rounds))
        return
    unit = taking_part if isinstance(taking_part, Unit) else Unit(taking_part)
    length = unit.window or num_rounds
    starts = range(0, num_rounds, length)
    clients = set()
    for windows in itertools.combinations(starts, min(unit.num_windows or 99, len(starts))):
        patterns = [_maximal_patterns(unit.schema, min(length, num_rounds - i)) for i in windows]
        for each in itertools.product(*patterns):
            rounds = {i + start for start, own in zip(windows, each, strict=True) for i in own}
            clients.add(tuple(int(i in rounds) for i in range(num_rounds)))
    for together in itertools.combinations_with_replacement(clients, unit.num_clients):
        yield tuple(map(sum, zip(*together, strict=True)))


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Returns the epsilon of normal noise of variance 1 (Balle and Wang, 2018, Thm 8).

    Args:
      shift: The distance of two means.
      delta: The delta.
    """
    with mpmath.workdps(30):
        mu = mpmath.mpf(shift)

        def excess(epsilon: Any) -> Any:
            return (
                mpmath.ncdf(mu / 2 - epsilon / mu)
                - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
                - delta
            )

        return float(_root(excess, mpmath.mpf(0), mpmath.mpf(1)))


def sampled_epsilon(draws: Groups, shift: float, delta: float) -> float:
    """Returns the epsilon of one round in which a client is drawn.

    Zeroing a client moves the mean of the rounds that draw the client. Where others are drawn in
    the client's place, they move it the other way. If a batch is truncated with probability c,
    the divergences are those of a Poisson sample and of a fixed size, weighted by 1 - c and c.

    Args:
      draws: The draws, of clients who are in at most one round.
      shift: The largest column norm of C over sigma.
      delta: The delta.
    """
    size, rest = divmod(draws.population, draws.num_bands)
    sizes = [size, size + 1] if rest and isinstance(draws, TruncatedPoisson) else [size]

    def excess(epsilon: float) -> float:
        found = [round_divergences(draws, each, shift, epsilon) for each in sizes]
        return float(np.max(found)) - delta

    return float(_root(excess, 0.0, 1.0))


def round_divergences(draws: Any, size: int, shift: float, epsilon: float) -> np.ndarray:
    """Returns both divergences of one round, with the client from without first.

    Args:
      draws: The draws.
      size: The number of clients of the group.
      shift: As in ``sampled_epsilon``.
      epsilon: Where the divergences are asked for.
    """

    def of_pairs(q: float, rest: float) -> np.ndarray:
        sides = [((1.0 - q, r), (q, mean)) for r in (rest, -rest) for mean in (1.0, 0.0)]
        pairs = (sides[0], sides[1]), (sides[3], sides[2])
        return np.array([_divergence(*pair, shift, epsilon) for pair in pairs])

    q = Fraction(draws.clients_per_round * draws.num_bands, draws.population)
    if isinstance(draws, FixedSize):
        return of_pairs(draws.clients_per_round / size, -1.0)
    if isinstance(draws, Poisson):
        return of_pairs(float(q), 0.0)

    def tail(least: int, trials: int) -> Fraction:
        masses = [math.comb(trials, k) * q**k * (1 - q) ** (trials - k) for k in range(trials + 1)]
        return sum(masses[least:], Fraction(0))

    cut = tail(draws.largest_batch, size - 1)
    stays = Fraction(draws.largest_batch, size) * tail(draws.largest_batch + 1, size)
    replaced = of_pairs(float(stays / cut), -1.0) if cut else np.zeros(2)
    return float(1 - cut) * of_pairs(float(q), 0.0) + float(cut) * replaced


def divergences(patterns: Patterns, epsilon: float, step: float = 4e-3) -> np.ndarray:
    """Returns both divergences of a client's random rounds, with the client from without first.

    The likelihood ratio grows with the last number of an output. So the set where it is above a
    number has closed-form masses, given all other numbers, which are summed over a grid.

    Args:
      patterns: Means of at least 0, in one to three rounds.
      epsilon: At least 0.
      step: The step of the grid, in standard deviations.
    """
    means, both = patterns.means / patterns.sigma, []
    axes = [np.arange(-9.0, 9.0 + each, step) for each in np.max(means[:, :-1], axis=0)]
    others = np.array(list(itertools.product(*axes)))
    density = np.prod(step * np.exp(-0.5 * others**2) / math.sqrt(2.0 * math.pi), axis=1)
    last = means[:, -1]
    logs = np.log(patterns.probabilities) + others @ means[:, :-1].T
    logs -= 0.5 * np.sum(means**2, axis=1)
    for sign in (1.0, -1.0):
        # The logarithm of the ratio is convex: from where one term is enough, Newton's method does
        # not get below the root. Of another edge, divergences are smaller.
        with np.errstate(divide="ignore"):
            edge = np.min(np.where(last > 0.0, (sign * epsilon - logs) / last, 60.0), axis=1)
        edge = np.minimum(edge, 60.0)
        for _ in range(12):
            terms = logs + np.outer(edge, last)
            found = special.logsumexp(terms, axis=1)
            slopes = np.exp(terms - found[:, np.newaxis]) @ last
            edge -= np.maximum(found - sign * epsilon, 0.0) / np.maximum(slopes, 1e-9)
            edge = np.maximum(edge, -60.0)
        shifted = special.ndtr(sign * (last - edge[:, np.newaxis]))
        with_client = np.sum(np.exp(logs + 0.5 * last**2) * shifted, axis=1) @ density
        without = special.ndtr(-sign * edge) @ density
        pair = (with_client, without) if sign > 0.0 else (without, with_client)
        both.append(pair[0] - math.exp(epsilon) * pair[1])
    return np.array(both)


def epsilon_of_sets(draws: Any, matrix: np.ndarray, sigma: float, delta: float) -> float:
    """Returns the epsilon of all rounds together, where a client draws a set of rounds.

    Args:
      draws: Poisson sampling or random allocation of one group, in at most one cycle, balls in
        bins, or min-separation sampling; at most three rounds.
      matrix: C of at least 0.
      sigma: The noise.
      delta: The delta.
    """
    clients_for_each = draws.population / draws.clients_per_round
    distribution: Any = _MinSeparationRounds(1.0 / clients_for_each, 1)
    if isinstance(draws, BallsInBins):
        distribution = _BallsInBinsRounds(draws.separation)
    elif isinstance(draws, RandomAllocation):
        distribution = _BallsInBinsRounds(int(clients_for_each))
    elif isinstance(draws, MinSeparation):
        # On average a client waits b - 1 rounds, and 1 / p more for its coin.
        chance = 1.0 / (clients_for_each - draws.separation + 1.0)
        distribution = _MinSeparationRounds(chance, draws.separation)
    patterns = participation_patterns.of(distribution, matrix, sigma)
    step = 4e-3 if len(matrix) < 3 else 0.15

    def excess(epsilon: float) -> float:
        return float(np.max(divergences(patterns, epsilon, step))) - delta

    return float(_root(excess, 0.0, 1.0))


def _root(excess: Callable[[Any], Any], low: Any, high: Any) -> Any:
    """The root of a function that falls, by bisection; ``low`` if it is not positive there."""
    if excess(low) <= 0:
        return low
    while excess(high) > 0:
        high *= 2
    if isinstance(low, float):
        return scipy.optimize.brentq(excess, low, high, xtol=1e-9, rtol=1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _divergence(first: _Mixture, second: _Mixture, shift: float, epsilon: float) -> float:
    """The integral of the positive part of p - e^epsilon r, between the roots of its integrand."""

    def log_density(mixture: _Mixture, x: Any) -> Any:
        return special.logsumexp(
            [
                np.log(weight) - 0.5 * np.square(x - mean * shift)
                for weight, mean in mixture
                if weight
            ],
            axis=0,
        )

    def excess(x: Any) -> Any:
        return log_density(first, x) - log_density(second, x) - epsilon

    def mass(mixture: _Mixture, low: float, high: float) -> float:
        # Of the tail that is nearer, so that nothing cancels.
        return sum(
            weight * abs(special.ndtr(s * (high - m)) - special.ndtr(s * (low - m)))
            for weight, mean in mixture
            for m in [mean * shift]
            for s in [-1.0 if low + high > 2.0 * m else 1.0]
        )

    grid = np.linspace(-shift - 40.0, shift + 40.0, 801)
    found = excess(grid)
    changes = np.flatnonzero(np.sign(found[:-1]) != np.sign(found[1:]))
    roots = [scipy.optimize.brentq(excess, *grid[[i, i + 1]], xtol=1e-14) for i in changes]
    total = 0.0
    for low, high in itertools.pairwise([grid[0], *roots, grid[-1]]):
        if excess((low + high) / 2.0) > 0.0:
            total += mass(first, low, high) - float(np.exp(epsilon)) * mass(second, low, high)
    return total


def check_schema(
    rows: NoiseRecursion, taking_part: Schema | Unit | Pattern | Limit, noise: float
) -> None:
    """Checks what is proved of random rows under a schema, of one client, or by a rule.

    Args:
      rows: The rows.
      taking_part: The schema or unit, the rounds of the client, of which those after the last one
        are left out, or a limit.
      noise: The noise, in units of the norm of C.
    """
    if isinstance(taking_part, Pattern):
        taking_part = Pattern(tuple(i for i in taking_part.rounds if i < rows.num_rounds))
    matrix = exact_strategy(rows).astype(np.float64)
    norm = float(np.linalg.norm(matrix))
    if not 1e-3 < norm < 1e3 or taking_part == Pattern(()):
        # Errors of nearly singular rows cost noise.
        return
    if isinstance(taking_part, Limit):
        moved = taking_part.sensitivity
    else:
        moved = largest_change(matrix, taking_part)
    truth = gaussian_epsilon(moved / (noise * norm), DELTA)
    found = _checked(truth, Claim(rows, taking_part, noise * norm, DELTA))
    # Of less noise, with an epsilon above 30, nothing may be proved.
    if truth < 30.0 and (found.sensitivity.is_exact or isinstance(taking_part, Limit)):
        assert found.epsilon <= truth * (1.0 + 1e-3) + 1e-9, (found, truth)


def check_draws(draws: Groups, noise: float, seed: int) -> None:
    """Checks what is proved of drawn clients and a random banded C, all rounds one cycle.

    Args:
      draws: The draws.
      noise: The noise, in units of the largest column norm of C.
      seed: For the entries of C.
    """
    rows, matrix = _random_rows(draws.num_rounds, draws.num_bands, -1.0, seed)
    norm = float(np.max(np.linalg.norm(matrix, axis=0)))
    truth = sampled_epsilon(draws, 1.0 / noise, DELTA)
    found = _checked(truth, Claim(rows, draws, noise * norm, DELTA))
    assert found.epsilon <= truth * (1.0 + 1e-3) + 1e-5, (found, truth)


def check_sets(draws: Any, noise: float, seed: int) -> None:
    """Checks what is proved of two or three rounds of clients who draw sets of rounds.

    Where a certificate is needed, one is searched for, and one of a better epsilon is refused.

    Args:
      draws: The draws.
      noise: The noise, in units of the largest column norm of C.
      seed: For the entries of C, none of which is negative.
    """
    rows, matrix = _random_rows(draws.num_rounds, draws.num_bands, 0.0, seed)
    sigma = noise * float(np.max(np.linalg.norm(matrix, axis=0)))
    if isinstance(draws, Poisson | RandomAllocation):
        truth = epsilon_of_sets(draws, matrix, sigma, DELTA)
        found = _checked(truth, Claim(rows, draws, sigma, DELTA))
        assert found.epsilon <= truth * (1.0 + 2e-3) + 1e-5, (found, truth)
        return
    # The grid of three rounds is coarse.
    known = 1.0 if draws.num_rounds < 3 else 1.0 - 5e-3
    truth = known * epsilon_of_sets(draws, matrix, sigma, _DELTA_OF_CERTIFICATES)
    made = Claim(rows, draws, sigma, _DELTA_OF_CERTIFICATES)
    plain = _checked(truth, made)
    certificate = Certification(max_samples=2**15).amplified(plain.run, made.delta).certificate
    if certificate is None:
        return
    proved = _checked(truth, dataclasses.replace(made, certificate=certificate))
    assert proved.epsilon <= plain.epsilon
    forged = dataclasses.replace(certificate, epsilon=truth * (1.0 - 1e-6))
    with pytest.raises(NotProved):
        claim.check(dataclasses.replace(made, certificate=forged))


def _random_rows(
    rounds: int, bands: int, least: float, seed: int
) -> tuple[NoiseRecursion, np.ndarray]:
    """Rows of a random banded C, and C."""
    entries = np.random.default_rng(seed).uniform(least, 1.0, (rounds, bands))
    entries[:, 0] = 1.5
    is_inside = np.subtract.outer(range(rounds), range(bands)) >= 0
    rows = banded_rows(np.where(is_inside, entries, 0.0))
    return rows, exact_strategy(rows).astype(np.float64)


def _checked(truth: float, made: Claim) -> Any:
    """The guarantee of a claim, after a better claim was refused and a worse one accepted."""
    found = claim.check(made)
    assert found.epsilon >= truth * (1.0 - 1e-9), (found, truth)
    better = truth * (1.0 - 1e-6) - 1e-9
    if better > 0.0:
        with pytest.raises(NotProved):
            claim.check(dataclasses.replace(made, epsilon=better))
    worse = found.epsilon * (1.0 + 1e-3)
    assert claim.check(dataclasses.replace(made, epsilon=worse)) == found
    return found


def check_many(count: int) -> None:
    """Checks random claims: three of four of schemas, units and single clients, others of draws.

    Args:
      count: Their number.
    """
    options: dict[str, Any] = {"deadline": None, "database": None, "phases": [Phase.generate]}
    options["suppress_health_check"] = list(HealthCheck)
    of_draws = st.builds(
        lambda kind, n, each, more: kind(n, n, n * each + more, each),
        st.sampled_from([Poisson, FixedSize]),
        *(st.integers(1, 4), st.integers(1, 5), st.integers(0, 200)),
    ) | st.builds(
        lambda n, each, more, larger: TruncatedPoisson(n, n, n * each + more, each, each + larger),
        *(st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), st.integers(0, 3)),
    )
    in_groups = st.builds(
        lambda kind, n, each, cycle: kind(n, 1, each * cycle, each),
        st.sampled_from([Poisson, RandomAllocation]),
        *(st.integers(1, 2), st.integers(1, 5), st.integers(1, 8)),
    )
    in_secret = st.builds(
        lambda n, bands, each, apart, more: [
            MinSeparation(n, min(bands, apart), apart * each + more, each, apart),
            BallsInBins(n, bands, apart * each + more, each, apart),
        ][more % 2],
        *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3)),
        st.integers(0, 30),
    )
    noises, seeds = st.floats(0.5, 4.0), st.integers(0, 2**32 - 1)
    rows = random_recursions.recursions(6)
    ways = st.one_of(_SCHEMAS, _PATTERNS, _UNITS, _LIMITS)
    for share, check, given_by in (
        (0.75, check_schema, (rows, ways, noises)),
        (0.1, check_draws, (of_draws, noises, seeds)),
        (0.1, check_sets, (in_groups, noises, seeds)),
        (0.05, check_sets, (in_secret, noises, seeds)),
    ):
        many = settings(max_examples=max(1, round(share * count)), **options)
        many(given(*given_by)(check))()


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=2000, help="random claims")
    count, start = parser.parse_args().count, time.monotonic()
    check_many(count)
    print(f"{count} claims in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
