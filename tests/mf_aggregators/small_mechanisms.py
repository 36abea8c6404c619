"""Every mechanism at a number of rounds that a dense matrix can check."""

import dataclasses
import functools
from typing import Any

import numpy as np

from mf_aggregators import Mechanism, workloads
from mf_aggregators.factorizations import (
    BltFactorization,
    Factorization,
    banded,
    banded_inverse,
    identity,
    optimal,
    structured,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.participation import Certification, Participation, SamplingScheme
from mf_aggregators.privacy.statements import RunFacts


def plan_of(
    factorization: Factorization, schema: Participation, noise_multiplier: float, delta: float
) -> Guarantee:
    """The guarantee of a run that keeps its participation schema."""
    return Mechanism(factorization, schema, noise_multiplier).guarantee(delta)


def blt(num_rounds: int, num_buffers: int) -> BltFactorization:
    """Returns one of up to three buffers whose decays no search of a quarter second has found."""
    decays, inverse = np.array([[0.97, 0.8, 0.5], [0.9, 0.6, 0.2]])[:, :num_buffers]
    return BltFactorization(
        num_rounds, decays, inverse, parameters={"num_buffers": num_buffers, "error": "mean"}
    )


def scaled_blt(num_rounds: int) -> BltFactorization:
    """Returns one of two buffers with scaled rows and columns of norm one."""
    plain, rows = blt(num_rounds, 2), np.linspace(0.5, 1.0, num_rounds)
    norms = np.linalg.norm(rows[:, np.newaxis] * plain.strategy_matrix(), axis=0)
    return dataclasses.replace(plain, row_scales=rows, column_norms=norms)


@functools.cache
def factorizations(num_rounds: int) -> tuple[Factorization, ...]:
    """Returns factorizations of each mechanism, at least 4 rounds long, in a fixed order."""
    workload = workloads.prefix_sum(num_rounds)
    return (
        identity(num_rounds),
        banded(workload, 1),
        banded(workload, 2),
        banded(workload, 4),
        banded(workload, num_rounds),
        optimal(workload),
        tree_aggregation(num_rounds),
        tree_aggregation(num_rounds, "full"),
        toeplitz(num_rounds, 3),
        toeplitz(num_rounds, 3, equal_column_norms=True),
        toeplitz(num_rounds, equal_column_norms=True),
        blt(num_rounds, 2),
        banded_inverse(num_rounds, 4),
        structured(optimal(workload), 2, 2),
        structured(optimal(workload), num_rounds, 0),
        # One state vector, one accumulator.
        blt(num_rounds, 1),
        structured(optimal(workload), 2, 1),
        scaled_blt(num_rounds),
        banded_inverse(num_rounds, 3, equal_column_norms=True),
    )


def sampled(
    factorization: Factorization,
    scheme: SamplingScheme,
    noise_multiplier: float,
    delta: float,
    *,
    certification: Certification | None = None,
) -> Guarantee:
    """Returns the guarantee of a mechanism whose clients are drawn."""
    mechanism = Mechanism(factorization, scheme, noise_multiplier)
    return mechanism.guarantee(delta, certification=certification)


def facts(**changed: Any) -> RunFacts:
    """Returns facts of a small run, for tests of other parts of its statement."""
    values: dict[str, Any] = {
        "mechanism": "Identity",
        "population": 50,
        "clients_per_round": 2,
        "clip": 0.5,
        "public_data": "none",
        "enforcement": "Timers.",
    }
    return RunFacts(**(values | changed))
