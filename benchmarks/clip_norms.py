"""Measures the error and cost of adaptive clip norms under the noise of several mechanisms.

Prints, for each mechanism, standard deviations that follow from the linear recursion of the
logarithm of the norm, and the cost of a norm that moved in one simulated run.

Example:
  .venv/bin/python benchmarks/clip_norms.py --num_rounds=500 --separation=100
"""

import math
import sys

import numpy as np
import scipy.signal
import scipy.stats
from absl import flags

import mf_aggregators as mfa
from mf_aggregators.commands import command_line
from mf_aggregators.factorizations import Factorization, clip_drift

_CLIENTS = 100
# Slope, at the median, of the fraction of clients within the clip norm over the logarithm of the
# clip norm, for log-normal update norms of unit variance.
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
# Settings of the adaptive clip norm, as (rounds between changes, learning rate).
_SETTINGS = ((1, 0.2), (10, 1.0), (10, 0.5))


def fraction_noise(factorization: Factorization, schema: mfa.participation.Participation) -> float:
    """Returns the factor of C^-1 Z in the released fraction: sigma_b sens(C) / clients."""
    clip = mfa.AdaptiveClip()
    stddev = clip.clipped_count_stddev_for(1.0, _CLIENTS)
    return stddev * factorization.sensitivity(schema).value / _CLIENTS


def deviations(rows: np.ndarray) -> tuple[float, float, float, float]:
    """Returns the largest standard deviations of a released fraction and of log clip norms.

    Args:
      rows: (n, n) C^-1, in units of the fraction.

    Returns:
      The standard deviation of a round's fraction, and of the logarithms of three clip norms: one
      that changes in every round, at rate 0.2; one that changes after ten rounds by the mean of
      their fractions, at rate 1; and one that changes by the tenth fraction alone.
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
    """Returns how much noise a changing clip norm adds to running sums in a simulated run."""
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
    return clip_drift.ClipDrift.of(factorization, norms).cost


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("num_rounds", 2052, "Rounds of a run.", flag_values=values)
    flags.DEFINE_integer("separation", 342, "Separation of clients.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Prints the deviations and the costs of each mechanism."""
    num_rounds = values.num_rounds
    schema = mfa.participation.MinSeparation(values.separation)
    bands = min(64, values.separation)
    factorizations: dict[str, Factorization] = {
        "identity": mfa.factorizations.identity(num_rounds),
        "blt, 4 buffers": mfa.factorizations.blt(num_rounds, 4, participation=schema),
        f"toeplitz, {bands} bands": mfa.factorizations.toeplitz(
            num_rounds, bands, participation=schema
        ),
    }
    rows, lines = [], []
    for name, factorization in factorizations.items():
        noise = fraction_noise(factorization, schema)
        found = deviations(noise * factorization.noise_rows(np.eye(num_rounds)))
        costs = [simulated_cost(factorization, noise, *setting) for setting in _SETTINGS]
        rows.append({"mechanism": name, "deviations": found, "costs": costs})
        lines.append((name, "standard deviations " + ", ".join(f"{each:.3f}" for each in found)))
        lines += [
            (name, f"every {period} rounds at rate {rate:g}, {100.0 * cost:.1f} % more noise")
            for (period, rate), cost in zip(_SETTINGS, costs, strict=True)
        ]
    command_line.print_result(values, {"rows": rows}, command_line.table(lines))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
