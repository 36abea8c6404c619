"""An attack on certificates: a search for matrices that no certificate may allow.

Nothing of the library's searches enters. Variables are the entries of C itself. Sensitivities go
through all patterns, and all signs of contributions or all magnitudes of X = C^T C. Largest errors
and sensitivities are p-norms with growing p, which L-BFGS minimises; what counts is computed anew,
without any of that.
"""

import dataclasses
import itertools

import numpy as np
import scipy.optimize
import scipy.special

from mf_aggregators.audit.statistics import _maximal_patterns
from mf_aggregators.participation import Participation
from tests.mf_aggregators import brute_force

_POWERS = (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
_STEPS = 120


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Which matrices compete, and what they are judged by.

    Attributes:
      workload: A, (n, n).
      participation: The schema.
      error: ``mean``, ``max`` or (n,) weights.
      num_bands: Of C; n for all matrices.
      equal_column_norms: Whether columns of C have equal norms.
      by_magnitudes: Whether the squared sensitivity is the sum of |X[i, j]| over a pattern, which
        the library states where it cannot do better, and not that of contributions +-1.
    """

    workload: np.ndarray
    participation: Participation
    error: str | np.ndarray
    num_bands: int
    equal_column_norms: bool = False
    by_magnitudes: bool = False
    contributions: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        num_rounds = len(self.workload)
        maximal = _maximal_patterns(self.participation.as_schema(), num_rounds)
        enumerated = (
            set(brute_force.patterns(self.participation, num_rounds))
            if (num_rounds <= 10)
            else None
        )
        holds = []
        for pattern in maximal:
            assert enumerated is None or pattern in enumerated
            others = len(pattern) - 1
            signs = [(1.0,) * others]
            # Columns of one pattern are orthogonal where C has few enough bands.
            if self.num_bands > self.participation.separation_in(num_rounds) and (
                not self.by_magnitudes
            ):
                signs = list(itertools.product((1.0, -1.0), repeat=others))
            for of_others in signs:
                column = np.zeros(num_rounds)
                column[list(pattern)] = (1.0, *of_others)
                holds.append(column)
        object.__setattr__(self, "contributions", np.array(holds).T)

    def squared_errors(self, strategy: np.ndarray) -> np.ndarray:
        """(n,) variances of the rounds."""
        decoder = np.linalg.solve(strategy.T, self.workload.T).T
        return np.asarray(np.sum(decoder**2, axis=1))

    def squared_changes(self, strategy: np.ndarray) -> np.ndarray:
        """What contributions change, or all magnitudes of X in each pattern."""
        if self.by_magnitudes:
            magnitudes = np.abs(strategy.T @ strategy)
            return np.sum(self.contributions * (magnitudes @ self.contributions), axis=0)
        return np.asarray(np.sum((strategy @ self.contributions) ** 2, axis=0))

    def attained(self, strategy: np.ndarray) -> float:
        """The squared error of C: the mean over rounds (or weights), or the maximum."""
        errors = self.squared_errors(strategy)
        if isinstance(self.error, str):
            of_rounds = float(np.max(errors) if self.error == "max" else np.mean(errors))
        else:
            of_rounds = float(self.error @ errors / np.sum(self.error))
        return of_rounds * float(np.max(self.squared_changes(strategy)))

    def _strategy(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        num_rounds = len(self.workload)
        strategy = np.zeros((num_rounds, num_rounds))
        strategy[self._entries()] = free
        norms = np.ones(num_rounds)
        if self.equal_column_norms:
            norms = np.linalg.norm(strategy, axis=0)
        return strategy / norms, norms

    def _entries(self) -> tuple[np.ndarray, ...]:
        num_rounds = len(self.workload)
        lags = np.arange(num_rounds)[:, np.newaxis] - np.arange(num_rounds)
        return np.nonzero((lags >= 0) & (lags < self.num_bands))

    def _smooth(self, free: np.ndarray, power: float) -> tuple[float, np.ndarray]:
        """The logarithm of the squared error, smoothed, and its slopes."""
        strategy, norms = self._strategy(free)
        inverse = np.linalg.inv(strategy)
        decoder = self.workload @ inverse
        errors = np.sum(decoder**2, axis=1)
        if isinstance(self.error, str) and self.error == "max":
            logs = power * np.log(errors)
            value = float(scipy.special.logsumexp(logs)) / power
            by_errors = np.exp(logs - power * value) / errors
        else:
            weights = np.ones(len(errors)) if isinstance(self.error, str) else self.error
            mean = float(weights @ errors)
            value, by_errors = float(np.log(mean / np.sum(weights))), weights / mean
        slope = -2.0 * (decoder.T * by_errors) @ decoder @ inverse.T
        held = self.contributions
        if self.by_magnitudes:
            gram = strategy.T @ strategy
            corner = np.mean(np.diagonal(gram)) / power**1.5
            soft = np.sqrt(gram**2 + corner**2)
            changes = np.sum(held * (soft @ held), axis=0)
        else:
            changes = np.sum((strategy @ held) ** 2, axis=0)
        logs = power * np.log(changes)
        change = float(scipy.special.logsumexp(logs)) / power
        shares = np.exp(logs - power * change) / changes
        pairs = (held * shares) @ held.T
        if self.by_magnitudes:
            pairs = pairs * gram / soft
        slope += 2.0 * strategy @ pairs
        if self.equal_column_norms:
            slope = (slope - strategy * np.sum(slope * strategy, axis=0)) / norms
        return value + change, slope[self._entries()]

    def attack(self, generator: np.random.Generator) -> float:
        """The least squared error that was found."""
        best = np.inf
        num_rounds = len(self.workload)
        start = np.eye(num_rounds) + 0.3 * np.tril(
            generator.normal(size=(num_rounds, num_rounds)) / np.sqrt(num_rounds), -1
        )
        start *= np.sqrt(np.linalg.norm(self.workload, axis=0))
        free = start[self._entries()]
        for power in _POWERS:
            found = scipy.optimize.minimize(
                self._smooth,
                free,
                (power,),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": _STEPS, "maxcor": 30, "ftol": 1e-13, "gtol": 1e-9},
            )
            free = found.x
            best = min(best, self.attained(self._strategy(free)[0]))
        return best
