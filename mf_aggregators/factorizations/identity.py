"""The identity factorization: independent noise in every round, as DP-SGD adds it."""

import dataclasses
from typing import Any

import numpy as np

from mf_aggregators import memory, workloads
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import BandedNoise, independent_rows
from mf_aggregators.kernel.sensitivity import Sensitivity, of_coefficients
from mf_aggregators.participation import Participation, check
from mf_aggregators.workloads import Workload

# A lower estimate, for its errors and its sensitivity as well.
_BYTES_PER_ROUND = 24


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IdentityFactorization(Factorization):
    """C = I and B = A: the noise of different rounds is independent.

    Attributes:
      num_rounds: The number of rounds n.
    """

    mechanism = "identity"
    goes_on = "as before: rows of noise are independent"

    num_rounds: int

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers.set_positive_integers(self, "num_rounds")
        memory.check_rounds(self.num_rounds, _BYTES_PER_ROUND, "the identity")

    def strategy_bands(self) -> int:
        """Returns the number of bands of C."""
        return 1

    def strategy_matrix(self) -> FloatArray:
        """Returns the (n, n) identity."""
        return np.eye(self.num_rounds)

    def noise_recursion(self) -> BandedNoise:
        """Returns the recursion without memory."""
        return independent_rows(self.num_rounds)

    def _encode(self, x: FloatArray) -> FloatArray:
        return x.copy()

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        return of_coefficients([1.0], self.num_rounds, check(participation).as_schema())

    def squared_decoder_rows(self, workload: Any) -> FloatArray:
        """Returns the squared row norms of the workload: see the base class."""
        workload = workloads.resolve(workload)
        if isinstance(workload, Workload):
            self._check_rounds(workload.num_rounds)
            coefficients = workload.coefficients()
            if coefficients is not None:
                return np.cumsum(np.square(coefficients))
        return super().squared_decoder_rows(workload)

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: Workload,
        parameters: dict[str, Any],
    ) -> "IdentityFactorization":
        del participation, workload
        return IdentityFactorization(num_rounds, parameters=parameters)

    def _of_first_rounds(
        self, num_rounds: int, parameters: dict[str, Any]
    ) -> "IdentityFactorization":
        return IdentityFactorization(num_rounds, parameters=parameters)


def identity(num_rounds: int) -> IdentityFactorization:
    """Returns the identity factorization, the noise of DP-SGD and DP-FedAvg.

    Args:
      num_rounds: The number of rounds n, at least 1.

    Returns:
      The factorization C = I.

    Raises:
      ValueError: If ``num_rounds`` is not a positive integer.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> independent = mfa.factorizations.identity(64)
      >>> round(independent.rmse(mfa.workloads.prefix_sum(64), once), 3)
      5.701
    """
    return IdentityFactorization(num_rounds)
