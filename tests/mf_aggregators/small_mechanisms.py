"""Every mechanism at a number of rounds that a dense matrix can check."""

import functools

from mf_aggregators import workloads
from mf_aggregators.factorizations import (
    Factorization,
    banded,
    banded_inverse,
    blt,
    identity,
    optimal,
    structured,
    toeplitz,
    tree_aggregation,
)


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
    )
