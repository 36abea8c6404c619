r"""Simulates runs with broken timers, and counts how many of them canaries refute.

  python benchmarks/canary_power.py --canaries=120 --separation=20

The run is the quick start's: 200 rounds of 100 clients, bands and timers of 25 rounds, at most 8
participations, epsilon 8. Devices whose timers are broken take part every --separation rounds.
Other clients' updates agree as far as a fifth of their norms, in random directions. Prints how many
of --runs runs are refuted by right guesses and by their noise, and the bound of a perfect attack.
"""

import math
import sys

import numpy as np
from absl import flags

import mf_aggregators as mfa
from mf_aggregators.audit import run_audit
from mf_aggregators.audit.run_audit import Canaries, RunAudit
from mf_aggregators.commands import command_line
from mf_aggregators.participation import MinSeparation

DELTA, EPSILON = 1e-4, 8.0
ROUNDS, SEPARATION, PARTICIPATIONS = 200, 25, 8
_PARAMETERS, _COHORT, _CLIP = 40_000, 100, 0.5


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("canaries", 1000, "Canaries, in the run or not.", flag_values=values)
    flags.DEFINE_integer(
        "separation", SEPARATION, "How many rounds apart they take part.", flag_values=values
    )
    flags.DEFINE_float("noise", 1.0, "The noise over what is claimed.", flag_values=values)
    flags.DEFINE_integer("runs", 40, "Simulated runs.", flag_values=values)


def mechanism() -> mfa.Mechanism:
    """Returns the mechanism of the quick start."""
    return mfa.calibrate(
        mfa.factorizations.banded(ROUNDS, num_bands=SEPARATION),
        MinSeparation(SEPARATION, PARTICIPATIONS),
        epsilon=EPSILON,
        delta=DELTA,
    )


def simulated(
    mechanism: mfa.Mechanism,
    *,
    seed: int = 0,
    canaries: int = 1000,
    noise: float = 1.0,
    twice: tuple[int, int] | None = None,
    separation: int = SEPARATION,
) -> RunAudit:
    """Simulates and audits a run along its canaries' directions alone, with random updates.

    Args:
      mechanism: The mechanism that the run claims to use.
      seed: The seed of all random numbers.
      canaries: The number of canaries, those that are left out of the run included.
      noise: A factor of the noise; 1 for correct noise.
      twice: Two rounds, of which the second has the row of Z of the first; None for no such fault.
      separation: How many rounds apart the participations of a canary are.
    """
    drawn = Canaries.drawn(seed, canaries, _PARAMETERS, ROUNDS)
    takes_part = np.zeros((ROUNDS, canaries), bool)
    for canary in range(canaries):
        takes_part[canary % SEPARATION :: separation, canary] = True
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(ROUNDS, len(drawn.coordinates)))
    if twice is not None:
        rows[twice[1]] = rows[twice[0]]
    factorization = mechanism.factorization
    stddev = (
        mechanism.noise_multiplier
        * _CLIP
        * factorization.sensitivity(mechanism.noise_reference).value
    )
    sums = factorization.noising_matrix() @ rows * (noise * stddev)
    others = 0.2 * _COHORT * _CLIP / math.sqrt(_PARAMETERS)
    sums += others * generator.normal(size=rows.shape)
    sums[:, :canaries] += _CLIP * takes_part * drawn.is_included
    released = sums / _COHORT
    return RunAudit.of(
        released,
        takes_part,
        drawn.is_included,
        factorization.strategy_matrix() * _COHORT / stddev,
        contribution=_CLIP / _COHORT,
        noise_multiplier=mechanism.noise_multiplier,
        delta=DELTA,
        epsilon=EPSILON,
    )


def main(values: flags.FlagValues) -> None:
    """Simulates audited runs and prints how many of them are refuted."""
    claimed = mechanism()
    found = [
        simulated(
            claimed,
            seed=seed,
            canaries=values.canaries,
            noise=values.noise,
            separation=values.separation,
        )
        for seed in range(values.runs)
    ]
    half = 0.5 * run_audit.FALSE_ALARM_RATE
    by_noise = [each.noise.p_value < half for each in found]
    by_guesses = [
        run_audit.mu_of_right_guesses(each.right, each.canaries, half) > each.mu for each in found
    ]
    perfect = run_audit.mu_of_right_guesses(
        values.canaries, values.canaries, run_audit.MISS_PROBABILITY
    )
    fields = {
        "runs": values.runs,
        "refuted_by_right_guesses": sum(by_guesses),
        "refuted_by_noise": sum(by_noise),
        "right_guesses": sum(each.right for each in found) / (values.runs * values.canaries),
        "epsilon_lower_bound": float(np.median([each.epsilon_lower_bound for each in found])),
        "epsilon_of_a_perfect_attack": mfa.accounting.exact_epsilon(1.0 / perfect, DELTA),
    }
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
