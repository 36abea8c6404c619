"""What clip norms that adapt do under noise of several mechanisms: their error, and its cost.

Prints, for each mechanism, standard deviations that follow from the linear recursion of the
logarithm of the norm, and the cost of a norm that moved in one simulated run.

Example:
  .venv/bin/python benchmarks/clip_norms.py --num_rounds=500 --separation=100
"""

import argparse
import math

import numpy as np
import scipy.signal
import scipy.stats

import mf_aggregators as mfa
from mf_aggregators.factorizations import Factorization, clip_drift

_CLIENTS = 100
# Of log-normal norms of unit variance: what the fraction below the median moves by with the
# logarithm of that.
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
# How the norm changes: the rounds between changes, and the rate.
_SETTINGS = ((1, 0.2), (10, 1.0), (10, 0.5))


def fraction_noise(factorization: Factorization, schema: mfa.participation.Participation) -> float:
    """Returns sigma_b sens(C) / clients: what a row of C^-1 Z is times in the fraction."""
    clip = mfa.AdaptiveClip()
    stddev = clip.count_stddev_for(1.0, _CLIENTS)
    return stddev * factorization.sensitivity(schema).value / _CLIENTS


def deviations(rows: np.ndarray) -> tuple[float, float, float, float]:
    """Returns the largest standard deviations of a fraction and of three logarithms of norms.

    Args:
      rows: (n, n) C^-1, in units of the fraction.

    Returns:
      That of a round's fraction; of the logarithm of a norm that changes in every round, at rate
      0.2; of one that changes after ten rounds, by their mean, at rate 1; and by the tenth alone.
    """
    tens = len(rows) // 10 * 10
    means = np.mean(rows[:tens].reshape(-1, 10, rows.shape[1]), axis=1)
    return (
        _largest(rows),
        _largest(_logarithms(rows, 0.2)),
        _largest(_logarithms(means, 1.0)),
        _largest(_logarithms(rows[9:tens:10], 1.0)),
    )


def _logarithms(rows: np.ndarray, rate: float) -> np.ndarray:
    filtered = scipy.signal.lfilter([rate], [1.0, rate * _DENSITY - 1.0], rows, axis=0)
    return np.asarray(filtered)


def _largest(rows: np.ndarray) -> float:
    return math.sqrt(float(np.max(np.einsum("ij,ij->i", rows, rows))))


def simulated_cost(factorization: Factorization, noise: float, period: int, rate: float) -> float:
    """Returns what the moving norm of a simulated run added to the noise of running sums."""
    generator = np.random.default_rng(0)
    num_rounds = factorization.num_rounds
    errors = noise * factorization.noise_rows(generator.normal(size=(num_rounds, 1)))[:, 0]
    clip = mfa.AdaptiveClip(1.0, learning_rate=rate, update_period=period)
    norm, norms, fractions = 1.0, [], []
    for error in errors:
        norms.append(norm)
        within = generator.binomial(_CLIENTS, scipy.stats.norm.cdf(math.log(norm)))
        fractions.append(within / _CLIENTS + error)
        if len(fractions) == period:
            norm, fractions = clip.next_norm(norm, float(np.mean(fractions))), []
    return clip_drift.measure(factorization, norms).cost


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_rounds", type=int, default=2052, help="The rounds of a run.")
    parser.add_argument("--separation", type=int, default=342, help="The separation of clients.")
    arguments = parser.parse_args()
    num_rounds = arguments.num_rounds
    schema = mfa.participation.MinSeparation(arguments.separation)
    bands = min(64, arguments.separation)
    factorizations: dict[str, Factorization] = {
        "identity": mfa.factorizations.identity(num_rounds),
        "blt, 4 buffers": mfa.factorizations.blt(num_rounds, 4, participation=schema),
        f"toeplitz, {bands} bands": mfa.factorizations.toeplitz(
            num_rounds, bands, participation=schema
        ),
    }
    for name, factorization in factorizations.items():
        noise = fraction_noise(factorization, schema)
        found = deviations(noise * factorization.noise_rows(np.eye(num_rounds)))
        print(f"{name}: standard deviations {', '.join(f'{each:.3f}' for each in found)}")
        for period, rate in _SETTINGS:
            cost = simulated_cost(factorization, noise, period, rate)
            print(
                f"{name}: every {period} rounds at rate {rate:g}, {100.0 * cost:.1f} % more noise"
            )


if __name__ == "__main__":
    main()
