"""Lower bounds on the error of every factorization of a workload.

For any weights v >= 0 on the patterns of a schema, with V diagonal and V[i, i] the sum of
v over the patterns that hold round i, every C of sensitivity one has tr(V C^T C) <= sum v:
contributions of random signs change C x, on average, by the root of the sum of X[i, i]
over their pattern. With tr(A^T A X^-1) + tr(V X) >= 2 tr((A V A^T)^1/2), the squared total
error is at least tr((A V A^T)^1/2)^2 / sum v. Equal weights give a bound by the singular
values of A: for single participation that of Denisov et al. Prop. C.1,
||A||_* / sqrt(n), and for clients that take part every b rounds ||A||_* / sqrt(b).

Schemas that allow more patterns have larger sensitivities, so that a bound for
(k, b)-participation is one for b-min-separation as well. The mean over rounds is at most
the maximum, so that the bound on the root mean square bounds the maximal error.
"""

import dataclasses
from typing import Any

import numpy as np

from mf_aggregators import validation, workloads
from mf_aggregators.linear_algebra.matrix_roots import nuclear_norm_from_below
from mf_aggregators.participation import Participation, check
from mf_aggregators.workloads import Workload

# Singular values of a dense matrix take minutes above this.
_MOST_ROUNDS_OF_SINGULAR_VALUES = 5000
# Terms of the closed form that are summed at a time, which bounds memory.
_TERMS_AT_A_TIME = 1 << 20
_ROUNDING_OF_CLOSED_FORM = 1e-14


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """A lower bound on the error of every factorization, at sensitivity 1 and noise multiplier 1.

    Attributes:
      total_error: For the root of the summed variances.
      rmse: For the root mean square over rounds; also for the maximum over rounds.
    """

    total_error: float
    rmse: float


def compute(workload: Any, participation: Participation) -> LowerBound | None:
    """Computes the lower bound by singular values.

    Args:
      workload: A, an (n, n) lower-triangular array, a ``workloads.Workload``, or an int n for the
        prefix sum of n rounds, which uses its closed form.
      participation: The schema.

    Returns:
      The bound; None for a workload of more than 5,000 rounds without a closed form, whose
      singular values would take minutes.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full rank.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> workload = mfa.workloads.prefix_sum(64)
      >>> bound = mfa.lower_bounds.compute(workload, once)
      >>> round(bound.rmse, 3)
      2.04
    """
    check(participation)
    workload = workloads.resolve(workload)
    if isinstance(workload, Workload):
        num_rounds, is_prefix_sum = workload.num_rounds, workload.name == "prefix_sum"
    else:
        workload = validation.lower_triangular(workload, "the workload")
        num_rounds = len(workload)
        is_prefix_sum = np.array_equal(workload, np.tri(num_rounds))
    if is_prefix_sum:
        nuclear_norm = prefix_sum_nuclear_norm(num_rounds)
    elif num_rounds > _MOST_ROUNDS_OF_SINGULAR_VALUES:
        return None
    else:
        nuclear_norm = nuclear_norm_from_below(
            workload.matrix() if isinstance(workload, Workload) else workload
        )
    most = participation.most_participations(num_rounds)
    patterns = float(num_rounds)
    if most > 1:
        patterns = _fractional_patterns(num_rounds, participation.separation_in(num_rounds), most)
    total_error = nuclear_norm / np.sqrt(patterns)
    return LowerBound(float(total_error), float(total_error / np.sqrt(num_rounds)))


def prefix_sum_nuclear_norm(num_rounds: int) -> float:
    """Returns the sum of the prefix sum's singular values, by their closed form.

    The result is smaller by a factor of 1 - 1e-14, more than rounding may have added. The singular
    values are 1 / (2 sin((2 j - 1) pi / (4 n + 2))), j = 1, ..., n (Denisov
    et al. Prop. C.1).

    Args:
      num_rounds: n.

    Returns:
      The nuclear norm.

    Raises:
      ValueError: If ``num_rounds`` is not a positive integer.
    """
    num_rounds = validation.positive_integer(num_rounds, "num_rounds")
    total = 0.0
    for first in range(1, num_rounds + 1, _TERMS_AT_A_TIME):
        j = np.arange(first, min(first + _TERMS_AT_A_TIME, num_rounds + 1))
        total += float(np.sum(0.5 / np.sin((2.0 * j - 1.0) * np.pi / (4.0 * num_rounds + 2.0))))
    return total * (1.0 - _ROUNDING_OF_CLOSED_FORM)


def _fractional_patterns(num_rounds: int, separation: int, most: int) -> float:
    """The number of patterns that hold every round once.

    A class of s rounds (equal modulo b) is split into ceil(s / k) patterns: consecutive
    ones of k rounds, and one of the rest. For (k, b)-participation no weights of smaller
    sum hold every round with weight one.
    """
    shorter, longer_classes = divmod(num_rounds, separation)
    classes_of = {shorter + 1: longer_classes, shorter: separation - longer_classes}
    return float(sum(count * -(-size // most) for size, count in classes_of.items()))
