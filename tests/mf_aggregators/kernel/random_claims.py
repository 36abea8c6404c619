"""Random claims against an arithmetic of its own: fractions, enumeration and mpmath.

    python -m tests.mf_aggregators.kernel.random_claims --count=2000

C is the exact inverse of the rows in fractions. The sensitivity is the largest change over all
patterns and signs, and over vectors that are moved until nothing gets larger. The epsilon of draws
follows from mixtures of normal numbers. A claim of an epsilon that is 1e-6 below the truth has to
be refused. One that is 1e-3 above it has to be accepted wherever the kernel says that its
sensitivity is exact.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import scipy.optimize
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy import special

from mf_aggregators.audit.statistics import _maximal_patterns
from mf_aggregators.kernel import claim
from mf_aggregators.kernel.claim import Claim, Pattern
from mf_aggregators.kernel.losses import FixedSize, Poisson
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.kernel.sensitivity import Schema
from tests.mf_aggregators import brute_force, random_recursions
from tests.mf_aggregators.kernel.test_rows import exact_strategy
from tests.mf_aggregators.random_recursions import banded_rows

DELTA = 1e-5
# Weights and means, in units of the shift, of a mixture of normal numbers.
_Mixture = tuple[tuple[float, float], ...]
_SCHEMAS = st.builds(
    Schema, st.one_of(st.none(), st.integers(1, 4)), st.integers(1, 3), st.booleans()
)
_PATTERNS = st.sets(st.integers(0, 5)).map(lambda rounds: Pattern(tuple(sorted(rounds))))


def largest_change(matrix: np.ndarray, taking_part: Schema | Pattern) -> float:
    """Returns the most that one client moves C x by, of all patterns, all signs and some vectors.

    Args:
      matrix: C.
      taking_part: The schema, or the rounds of the client.
    """
    largest, generator = 0.0, np.random.default_rng(0)
    for pattern in (
        [taking_part.rounds]
        if isinstance(taking_part, Pattern)
        else _maximal_patterns(taking_part, len(matrix))
    ):
        moved_by_vectors = brute_force.vector_change(matrix, pattern, len(pattern), generator)
        largest = max(largest, moved_by_vectors)
        for signs in itertools.product((-1.0, 1.0), repeat=len(pattern)):
            moved = matrix[:, list(pattern)] @ np.array(signs)
            largest = max(largest, float(np.linalg.norm(moved)))
    return largest


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


def sampled_epsilon(draws: Poisson | FixedSize, shift: float, delta: float) -> float:
    """Returns the epsilon of one round in which a client is drawn.

    Zeroing a client moves the mean of the rounds that draw the client. Where others are drawn in
    the client's place, they move it the other way.

    Args:
      draws: The draws, of clients who are in at most one round.
      shift: The largest column norm of C over sigma.
      delta: The delta.
    """
    clients, groups = draws.population, draws.num_bands
    if isinstance(draws, FixedSize):
        # Groups of one size leave clients out.
        clients = clients // groups * groups
    q = draws.clients_per_round * groups / clients
    rest = 0.0 if isinstance(draws, Poisson) else -1.0
    with_client, without = ((1.0 - q, rest), (q, 1.0)), ((1.0 - q, rest), (q, 0.0))

    def excess(epsilon: float) -> float:
        pairs = (with_client, without), (without, with_client)
        return max(_divergence(*pair, shift, epsilon) for pair in pairs) - delta

    return float(_root(excess, 0.0, 1.0))


def _root(excess: Callable[[Any], Any], low: Any, high: Any) -> Any:
    """The root of a function that falls, by bisection; ``low`` if it is not positive there."""
    if excess(low) <= 0:
        return low
    while excess(high) > 0:
        high *= 2
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


def check_schema(rows: NoiseRecursion, taking_part: Schema | Pattern, noise: float) -> None:
    """Checks what is proved of random rows under a schema, or of one client.

    Args:
      rows: The rows.
      taking_part: The schema, or the rounds of the client; those after the last one are left out.
      noise: The noise, in units of the norm of C.
    """
    if isinstance(taking_part, Pattern):
        taking_part = Pattern(tuple(i for i in taking_part.rounds if i < rows.num_rounds))
    matrix = exact_strategy(rows).astype(np.float64)
    norm = float(np.linalg.norm(matrix))
    if not 1e-3 < norm < 1e3 or taking_part == Pattern(()):
        # Errors of nearly singular rows cost noise.
        return
    truth = gaussian_epsilon(largest_change(matrix, taking_part) / (noise * norm), DELTA)
    found = _checked(truth, rows, taking_part, noise * norm)
    if found.sensitivity.is_exact:
        assert found.epsilon <= truth * (1.0 + 1e-3) + 1e-9, (found, truth)


def check_draws(draws: Poisson | FixedSize, noise: float, seed: int) -> None:
    """Checks what is proved of drawn clients and a random banded C, all rounds one cycle.

    Args:
      draws: The draws.
      noise: The noise, in units of the largest column norm of C.
      seed: For the entries of C.
    """
    rounds = draws.num_rounds
    bands = np.random.default_rng(seed).uniform(-1.0, 1.0, (rounds, draws.num_bands))
    bands[:, 0] = 1.5
    rows = banded_rows(np.where(np.subtract.outer(range(rounds), range(rounds)) >= 0, bands, 0.0))
    norm = float(np.max(np.linalg.norm(exact_strategy(rows).astype(np.float64), axis=0)))
    truth = sampled_epsilon(draws, 1.0 / noise, DELTA)
    found = _checked(truth, rows, draws, noise * norm)
    assert found.epsilon <= truth * (1.0 + 1e-3) + 1e-5, (found, truth)


def _checked(truth: float, rows: NoiseRecursion, taking_part: Any, sigma: float) -> Any:
    """The guarantee of a claim, after a better claim was refused and a worse one accepted."""
    found = claim.check(Claim(rows, taking_part, sigma, DELTA))
    assert found.epsilon >= truth * (1.0 - 1e-9), (found, truth)
    better = truth * (1.0 - 1e-6) - 1e-9
    if better > 0.0:
        try:
            claim.check(Claim(rows, taking_part, sigma, DELTA, epsilon=better))
        except NotProved:
            pass
        else:
            raise AssertionError(f"{better} was accepted of {truth} for {rows}, {taking_part}")
    worse = found.epsilon * (1.0 + 1e-3)
    assert claim.check(Claim(rows, taking_part, sigma, DELTA, epsilon=worse)) == found
    return found


def check_many(count: int) -> None:
    """Checks random claims: nine of ten of schemas and single clients, the others of draws.

    Args:
      count: Their number.
    """
    options: dict[str, Any] = {
        "deadline": None,
        "database": None,
        "phases": [Phase.generate],
        "suppress_health_check": list(HealthCheck),
    }
    drawn = max(1, count // 10)
    of_draws = st.builds(
        lambda kind, rounds, each, others: kind(rounds, rounds, rounds * each + others, each),
        st.sampled_from([Poisson, FixedSize]),
        st.integers(1, 4),
        st.integers(1, 5),
        st.integers(0, 200),
    )
    noises = st.floats(0.5, 4.0)
    with_schema = given(random_recursions.recursions(6), st.one_of(_SCHEMAS, _PATTERNS), noises)(
        check_schema
    )
    with_draws = given(of_draws, noises, st.integers(0, 2**32 - 1))(check_draws)
    settings(max_examples=count - drawn, **options)(with_schema)()
    settings(max_examples=drawn, **options)(with_draws)()


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=2000, help="random claims")
    count, start = parser.parse_args().count, time.monotonic()
    check_many(count)
    print(f"{count} claims in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
