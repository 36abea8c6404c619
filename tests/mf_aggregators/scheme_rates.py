"""Rates of attackers on sampling schemes, and rounds of their cycles."""

from collections.abc import Sequence
from typing import Any

from mf_aggregators import accounting
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.sensitivity import DEFAULT_NUM_COORDINATES
from mf_aggregators.participation import SamplingScheme


def true_positive_rate(
    scheme: SamplingScheme,
    sigma: float,
    false_positive_rate: float | FloatArray,
    strategy_matrix: Any = None,
    *,
    guarantees: Sequence[tuple[float, float]] = (),
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float | FloatArray:
    """Returns the highest true positive rate that the kernel proves for a scheme.

    Args:
      scheme: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C.
      false_positive_rate: From 0 to 1, or an array of them.
      strategy_matrix: C, if the scheme depends on it.
      guarantees: Pairs (epsilon, delta) that are known to hold.
      num_coordinates: Parameters times rounds.
    """
    run = scheme.run(sigma, scheme._columns(strategy_matrix))
    return accounting.true_positive_rate(
        run, false_positive_rate, guarantees=guarantees, num_coordinates=num_coordinates
    )


def rounds_of_cycle(scheme: Any) -> int:
    """Returns how many batches a group has, if each of its clients is in one of them."""
    return scheme.as_draws().group_size // scheme.clients_per_round
