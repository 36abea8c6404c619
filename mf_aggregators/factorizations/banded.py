"""Banded factorizations, with equal column norms (BandMF Problem 2) and without (App. B)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mf_aggregators import memory, validation, workloads
from mf_aggregators.factorizations import banded_extension, banded_sensitivity
from mf_aggregators.factorizations.band_constraints import (
    ColumnConstraint,
    EqualNorms,
    PatternNorms,
)
from mf_aggregators.factorizations.banded_search import BandedSearch
from mf_aggregators.factorizations.banded_workloads import BandedWorkload
from mf_aggregators.factorizations.convergence import Converged, warn_unless_reached
from mf_aggregators.factorizations.dense import squared_rows_of_prefix_sums
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.pattern_layout import PatternLayout
from mf_aggregators.linear_algebra.banded_matrices import (
    BandedCovariances,
    WorkloadBlocks,
    square_root_bands,
)
from mf_aggregators.noise import recursions
from mf_aggregators.noise.recursions import BandedNoise
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    check,
    check_fits,
)
from mf_aggregators.sensitivity import Sensitivity

# Of bands, blocks and steps that a search keeps, at least, for each entry of C.
_BYTES_PER_ENTRY = 8 * 30
# With more bands than one in so many rounds, up to so many, the inverse of the dense matrix is
# quicker than blocks.
_MOST_SHARE_OF_BANDS, _MOST_ROUNDS_OF_AN_INVERSE = 4, 8192


class BandedFactorization(Factorization):
    """A lower-triangular C with ``num_bands`` bands: C[i, j] = 0 for i - j >= num_bands."""

    mechanism = "banded"
    goes_on = "with further rows of the bands, optimised while those of the first rounds stay"

    def __init__(self, bands: np.ndarray, **attributes: Any) -> None:
        """Creates the factorization.

        Args:
          bands: (n, b) with ``bands[i, t] = C[i, i - t]``, zero where i < t; the diagonal
            ``bands[:, 0]`` has no zero.
          **attributes: Those of the base class.

        Raises:
          ValueError: If the array is not as said.
        """
        super().__init__(**attributes)
        bands = validation.real_array(bands, "bands").copy()
        if bands.ndim != 2 or not 1 <= bands.shape[1] <= bands.shape[0]:
            raise ValueError(
                "bands must have a row for each round and 1 to num_rounds columns, found an "
                f"array of shape {bands.shape}."
            )
        if not np.all(np.isfinite(bands)):
            raise ValueError("bands must be finite, found NaN or infinite entries.")
        if not np.all(bands[:, 0]):
            raise ValueError("the strategy matrix must be non-singular, found a zero diagonal.")
        if np.any(bands[~np.tri(bands.shape[0], bands.shape[1], dtype=bool)]):
            raise ValueError("bands must be zero before the first column of the matrix.")
        bands.flags.writeable = False
        self._bands = bands

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self._bands.shape[0])

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return int(self._bands.shape[1])

    def strategy_bands(self) -> int:
        """Returns the number of bands of C."""
        return self.num_bands

    def strategy_matrix(self) -> np.ndarray:
        """Returns C as a dense (n, n) array."""
        return recursions.matrix_from_bands(self._bands)

    def strategy_matrix_of_first(self, num_rounds: int) -> np.ndarray:
        """Returns the leading part of C, in no more memory than that."""
        return recursions.matrix_from_bands(self._bands[:num_rounds, :num_rounds])

    def noise_recursion(self) -> BandedNoise:
        """Returns the recursion over the last ``num_bands - 1`` noise rows."""
        return BandedNoise(self._bands)

    def _sensitivity_of_first(self, rounds: int, participation: Participation) -> Sensitivity:
        """By column norms where BandMF Thm 2 applies; from bands alone in any case."""
        return banded_sensitivity.compute(
            self._bands[:rounds, : min(self.num_bands, rounds)], participation
        )

    def gap_holds_for(self, participation: Participation) -> bool:
        """Returns whether the gap holds: with equal norms, under any schema that separates."""
        if not self.parameters.get("equal_column_norms", False):
            return super().gap_holds_for(participation)
        return (
            not check(participation).returns_within(self.num_rounds)
            or participation.separation_in(self.num_rounds) >= self.num_bands
        )

    def squared_decoder_rows(self, workload: Any) -> np.ndarray:
        """Returns ||row i of B||^2, in O(n b) memory where A has a banded inverse."""
        workload = workloads.resolve(workload)
        if isinstance(workload, workloads.Workload):
            self._check_rounds(workload.num_rounds)
        else:
            workload = self._checked(workload)
        if (
            _MOST_SHARE_OF_BANDS * self.num_bands > self.num_rounds
            and self.num_rounds <= _MOST_ROUNDS_OF_AN_INVERSE
            and isinstance(workload, workloads.Workload)
            and workload.name == "prefix_sum"
        ):
            return squared_rows_of_prefix_sums(self.strategy_matrix())
        inverse = workloads.inverse_bands(workload)
        if inverse is None:
            return super().squared_decoder_rows(workload)
        blocks = WorkloadBlocks.of_inverse(inverse, self.num_bands)
        return BandedCovariances(self._bands, blocks).squared_rows()

    def _encode(self, x: np.ndarray) -> np.ndarray:
        product = np.zeros(x.shape)
        for lag in range(self.num_bands):
            weights = self._bands[lag:, lag].reshape(-1, *[1] * (x.ndim - 1))
            product[lag:] += weights * x[: self.num_rounds - lag]
        return product

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: workloads.Workload,
        parameters: dict[str, Any],
    ) -> "BandedFactorization":
        memory.check_rounds(
            num_rounds, _BYTES_PER_ENTRY * self.num_bands, "the extended banded factorization"
        )
        return BandedFactorization(
            banded_extension.extended(self._bands, workload, participation),
            participation=participation,
            parameters={**parameters, "workload": workloads.fingerprint(workload)},
        )

    def _of_first_rounds(
        self, num_rounds: int, parameters: dict[str, Any]
    ) -> "BandedFactorization":
        return BandedFactorization(
            self._bands[:num_rounds], participation=self.participation, parameters=parameters
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the (n, b) bands of C."""
        return {"bands": self._bands}

    @classmethod
    def from_arrays(
        cls, num_rounds: int, arrays: Mapping[str, np.ndarray], **attributes: Any
    ) -> "BandedFactorization":
        """Rebuilds the factorization; see the base class."""
        if arrays["bands"].shape[:1] != (num_rounds,):
            raise ValueError(
                f"bands has shape {arrays['bands'].shape}, which is not that of a matrix for "
                f"{num_rounds} rounds"
            )
        return cls(arrays["bands"], **attributes)


def banded(
    workload: Any,
    num_bands: int,
    equal_column_norms: bool = True,
    participation: Participation | None = None,
    *,
    relative_gap: float = 1e-5,
    max_evaluations: int = 1000,
    show_progress: bool = False,
) -> BandedFactorization:
    """Computes the banded factorization of least total squared error.

    Minimises tr(A^T A X^-1) over b-banded positive definite X with diagonal one (BandMF
    Problem 2). Every such X is C^T C for exactly one lower-triangular banded C with a
    positive diagonal and columns of norm one (BandMF Prop. 4.1), and L-BFGS runs over the
    entries of C before their columns are scaled: the same problem, never infeasible, and
    solved in a fraction of the steps that the entries of X take. Where A has a banded inverse, as
    the prefix sum and momentum have, a step takes O(n b^2) operations and O(n b) memory, so that
    100,000 rounds are no obstacle; for any other array it takes those of dense matrices.

    With equal column norms the squared sensitivity under any separation of at least
    ``num_bands`` is the number of participations times the squared norm, whatever the
    matrix, so one matrix is the optimum for all of them.

    Without, the diagonal of X may vary as long as it sums to at most one over every
    pattern of (k, b)-participation (BandMF App. B). Where the schema is MinSeparation, it
    is optimised for the (k, b)-participation of the same k and b, as in the paper, and
    the result says so; its sensitivity under MinSeparation is larger, and exact as well.

    Args:
      workload: A, an (n, n) lower-triangular array of full rank, a ``workloads.Workload``, or an
        int n for the prefix sum of n rounds.
      num_bands: The number of bands b, 1 (independent noise) to n (no limit).
      equal_column_norms: Whether the columns of C have equal norms.
      participation: The schema that the factorization is for; at least ``num_bands``
        rounds between participations, ``MinSeparation(num_bands)`` by default.
      relative_gap: Stop when the squared total error is certified to be within this
        fraction of the smallest possible one.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A factorization with its certified gap: with columns of norm one, or of sensitivity
      one where the norms differ. If the gap was not reached, the best matrix found, with
      its gap and a NotConvergedWarning.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full
        rank, the number of bands is out of range or above the schema's separation, or
        the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> workload = mfa.workloads.prefix_sum(64)
      >>> timers = mfa.participation.MinSeparation(separation=16)
      >>> factorization = mfa.factorizations.banded(workload, num_bands=16, participation=timers)
      >>> round(factorization.rmse(workload, timers), 2)
      4.59
      >>> factorization.sensitivity(timers).is_exact
      True
    """
    workload = workloads.resolve(workload)
    if isinstance(workload, workloads.Workload):
        num_rounds = workload.num_rounds
    else:
        num_rounds = validation.num_rows(workload, "the workload")
        memory.check_rounds(num_rounds, 8 * num_rounds, "the dense workload")
        workload = validation.lower_triangular(workload, "the workload")
    num_bands = validation.positive_integer(num_bands, "num_bands")
    memory.check_rounds(num_rounds, _BYTES_PER_ENTRY * num_bands, "the banded factorization")
    if num_bands > num_rounds:
        raise ValueError(f"num_bands must be at most num_rounds, {num_rounds}, found {num_bands}.")
    participation = check_fits(
        MinSeparation(num_bands) if participation is None else participation, num_rounds
    )
    separation = participation.separation_in(num_rounds)
    if participation.returns_within(num_rounds) and separation < num_bands:
        raise ValueError(
            f"num_bands must be at most the separation of the participation schema, "
            f"{separation}, found {num_bands}: with more bands, participations of "
            "one client overlap (BandMF Thm 2)."
        )
    relative_gap = validation.positive_number(relative_gap, "relative_gap")
    max_evaluations = validation.positive_integer(max_evaluations, "max_evaluations")

    constraint: ColumnConstraint = EqualNorms(num_bands)
    most = participation.most_participations(num_rounds)
    if num_bands == num_rounds and (equal_column_norms or most == 1):
        # No limit on the bands: the dense optimum, by eigenvalues in place of n^3 operations a
        # step. That module needs this one, for another search.
        from mf_aggregators.factorizations.optimal import optimal

        optimum = optimal(
            workload,
            relative_gap=relative_gap,
            max_evaluations=max_evaluations,
            show_progress=show_progress,
        )
        return BandedFactorization(
            recursions.bands_of_matrix(optimum.strategy_matrix(), num_bands),
            participation=participation,
            optimality_gap=optimum.optimality_gap,
            parameters={
                "num_bands": num_bands,
                "equal_column_norms": True,
                "relative_gap": relative_gap,
                "workload": workloads.fingerprint(workload),
            },
        )
    prepared = BandedWorkload.of(workload, num_bands)
    if not equal_column_norms and most > 1:
        participation = FixedEpochOrder(most, separation)
        layout = PatternLayout(num_rounds, separation, most)
        constraint = PatternNorms(num_bands, layout)
    start = square_root_bands(num_rounds, num_bands)
    if len(constraint.sharpness) > 1:
        # Where patterns share rounds the search is harder; equal norms are a good start.
        easier = BandedSearch(
            prepared, EqualNorms(num_bands), relative_gap, max_evaluations, show_progress
        )
        try:
            easier.run(start)
        except Converged:
            pass
        finally:
            easier.progress.close()
        start = easier.best_bands
    search = BandedSearch(prepared, constraint, relative_gap, max_evaluations, show_progress)
    search.consider(start)
    try:
        search.run(start)
    except Converged:
        pass
    finally:
        search.progress.close()
    gap = search.certified_gap()
    warn_unless_reached(gap, relative_gap, search.evaluations)
    return BandedFactorization(
        search.best_bands,
        participation=participation,
        optimality_gap=gap,
        parameters={
            "num_bands": num_bands,
            "equal_column_norms": isinstance(constraint, EqualNorms),
            "relative_gap": relative_gap,
            "workload": workloads.fingerprint(workload),
        },
    )
