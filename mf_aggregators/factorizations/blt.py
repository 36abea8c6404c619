"""Buffered linear Toeplitz (BLT) factorizations: correlated noise from a few vectors of state.

The coefficients of C are c_0 = 1 and c_t = sum_m w_m d_m^(t-1), so that its generating
function is rational, c(x) = prod_m (1 - e_m x) / (1 - d_m x), and so is that of C^-1, with
the decays d and e exchanged (McMahan, Xu and Zhang, "A hassle-free algorithm for private
learning in practice"; Dvijotham, McMahan, Pillutla, Steinke and Thakurta, "Efficient and
near-optimal noise generation for streaming differential privacy").

All matrices here interlace, 1 > d_1 > e_1 > d_2 > e_2 > ... > e_m > -1, which makes all
weights of C positive and all weights of C^-1 negative: no sum below cancels, and the
coefficients of C are non-negative and non-increasing, so that its sensitivity is exact.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from mf_aggregators.factorizations import _decoder_rows
from mf_aggregators.factorizations._blt_search import (
    BltSearch,
    coefficients_of,
    interlace,
    partial_fractions,
)
from mf_aggregators.factorizations._decoder_rows import StateRows, States
from mf_aggregators.factorizations._round_errors import RoundError, RoundWeights
from mf_aggregators.factorizations._toeplitz_search import (
    PatternOfRounds,
    check_training,
    is_plain,
    measure_of,
    parameters_for,
)
from mf_aggregators.factorizations.convergence import warn_unless_stationary
from mf_aggregators.factorizations.toeplitz import ToeplitzStructure
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.gaussian import underflow_is_zero
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import StateSpaceNoise
from mf_aggregators.participation import Participation, SingleParticipation, check_fits
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

MOST_BUFFERS = 8
_ROUNDING = 1e-14


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BltFactorization(ToeplitzStructure):
    """C is Toeplitz with coefficients that are a sum of ``num_buffers`` decaying powers.

    Its generating function is c(x) = prod_m (1 - e_m x) / (1 - d_m x).

    Attributes:
      num_rounds: n.
      buffer_decays: (m,) decays d of C, decreasing, read-only.
      inverse_decays: (m,) decays e of C^-1, read-only, with
        1 > d_1 >= e_1 > d_2 >= ... >= e_m > -1; a pair of equal decays has no effect.

    Raises:
      ValueError: If the decays do not interlace, or the coefficients of C are not
        non-increasing: its sensitivity would not be known.
    """

    mechanism = "blt"
    _described_as = "the BLT matrix"
    goes_on = "with the same decays"

    buffer_decays: FloatArray
    inverse_decays: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        decays = numbers.real_array(self.buffer_decays, "buffer_decays").copy()
        inverse = numbers.real_array(self.inverse_decays, "inverse_decays").copy()
        if decays.ndim != 1 or decays.shape != inverse.shape or not len(decays):
            raise ValueError(
                "buffer_decays and inverse_decays must be vectors of one length, found shapes "
                f"{decays.shape} and {inverse.shape}."
            )
        # Written so that NaN does not pass.
        if not (interlace(decays, inverse) and decays[0] < 1.0 and inverse[-1] > -1.0):
            raise ValueError(
                "the decays must interlace, 1 > buffer_decays[0] >= inverse_decays[0] > "
                "buffer_decays[1] >= ... > -1: the sensitivity is known only then."
            )
        # Rounding may add to a sum of one; the sensitivity counts for more than that.
        if np.sum(partial_fractions(decays, inverse)) > 1.0 + _ROUNDING or decays[-1] < 0.0:
            raise ValueError(
                "the coefficients of the strategy matrix must be non-negative and "
                "non-increasing: the sensitivity is known only then."
            )
        self._set(buffer_decays=decays, inverse_decays=inverse)

    @property
    def num_buffers(self) -> int:
        """The number of buffers m: vectors of state in C and in C^-1."""
        return len(self.buffer_decays)

    @property
    def output_scales(self) -> FloatArray:
        """The (m,) positive weights of C's decays."""
        return partial_fractions(self.buffer_decays, self.inverse_decays)

    @property
    def inverse_output_scales(self) -> FloatArray:
        """The (m,) negative weights of C^-1's decays."""
        return partial_fractions(self.inverse_decays, self.buffer_decays)

    @underflow_is_zero
    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of C, (n,) float64."""
        return coefficients_of(self.buffer_decays, self.output_scales, self.num_rounds)

    @underflow_is_zero
    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of C^-1, (n,) float64."""
        return coefficients_of(self.inverse_decays, self.inverse_output_scales, self.num_rounds)

    @underflow_is_zero
    def _squared_rows(self, workload: Workload) -> FloatArray:
        recursions = workload.recursions()
        if recursions is None or workload.coefficients() is not None:
            return super()._squared_rows(workload)
        noising, weights = self.noising_coefficients(), self.inverse_output_scales
        return StateRows(recursions).squared(States(noising, weights, self.inverse_decays))

    def noise_recursion(self) -> StateSpaceNoise:
        """Returns the recursion over ``num_buffers`` vectors, the buffers of C: C Y = Z."""
        count = self.num_buffers
        return StateSpaceNoise(
            phases=np.zeros(self.num_rounds, np.int64),
            gains=np.ones(1),
            outputs=-self.output_scales[np.newaxis],
            sources=np.arange(count)[np.newaxis],
            decays=self.buffer_decays[np.newaxis].copy(),
            feedbacks=np.ones((1, count)),
        )

    @underflow_is_zero
    def _encode(self, x: FloatArray) -> FloatArray:
        """Streams C x with the buffers of C."""
        product = np.empty_like(x)
        buffers = np.zeros((self.num_buffers, *x.shape[1:]))
        decays = self.buffer_decays.reshape((-1,) + (1,) * (x.ndim - 1))
        weights = self.output_scales
        for i, row in enumerate(x):
            product[i] = row + np.tensordot(weights, buffers, axes=1)
            buffers *= decays
            buffers += row
        return product

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: Workload,
        parameters: dict[str, Any],
    ) -> "BltFactorization":
        del workload
        return BltFactorization(
            num_rounds,
            self.buffer_decays,
            self.inverse_decays,
            participation=participation,
            parameters=parameters,
        )

    def _of_first_rounds(self, num_rounds: int, parameters: dict[str, Any]) -> "BltFactorization":
        return BltFactorization(
            num_rounds,
            self.buffer_decays,
            self.inverse_decays,
            participation=self.participation,
            parameters=parameters,
        )


@underflow_is_zero
def blt(
    num_rounds: Any = None,
    num_buffers: int | None = None,
    participation: Participation | None = None,
    *,
    accuracy: float = 0.01,
    error: RoundWeights = "mean",
    workload: Any = None,
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> BltFactorization:
    """Computes a BLT factorization of a workload, in O(n) memory.

    The 2 m decays are searched over their logarithmic distances from one, for which
    interlacing is no constraint. The search for m buffers starts from the best m - 1,
    with one more pair of decays between any two, so that more buffers are not worse.

    Args:
      num_rounds: n, for the prefix sum of n rounds; or the workload itself, as ``workload``.
      num_buffers: The number of buffers m, 1 to 8. None: the fewest whose error, the root of the
        mean or the maximum, is at most ``accuracy`` above that of 8 buffers.
      participation: The schema to optimise for; SingleParticipation by default.
      accuracy: How far the error may be above that of 8 buffers, relative to it, at least 0. It
        holds where ``num_buffers`` is None.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the sum with
        (n,) weights of the rounds, none below zero. A maximum that may be of any round is
        approached by norms, to a fraction of a percent.
      workload: What to optimise for: the prefix sum, which is the default, or another, a
        ``workloads.Workload`` or an (n, n) array that is Toeplitz or has learning rates. Each
        evaluation then takes O(n) time, but for means of several of the last iterates O(n^2).
      max_evaluations: Give up a search after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization. If the last search stopped before its gradient vanished, the
      best decays found, with a NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload is another or given twice, or
        the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=16)
      >>> buffered = mfa.factorizations.blt(64, num_buffers=2, participation=timers)
      >>> round(buffered.rmse(mfa.workloads.prefix_sum(64), timers), 2)
      4.92
    """
    num_rounds, workload = check_training(num_rounds, workload, "the BLT matrix")
    accuracy = numbers.non_negative_number(accuracy, "accuracy")
    if num_buffers is not None:
        num_buffers = numbers.positive_integer(num_buffers, "num_buffers")
        if num_buffers > MOST_BUFFERS:
            raise ValueError(f"num_buffers must be at most {MOST_BUFFERS}, found {num_buffers}.")
    participation = check_fits(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    measure = RoundError.of(error, num_rounds)
    max_evaluations = numbers.positive_integer(max_evaluations, "max_evaluations")
    pattern = PatternOfRounds.of(participation, num_rounds)
    with ProgressBar(
        desc=f"{num_buffers or MOST_BUFFERS} buffers",
        unit=" evaluations",
        disable=not show_progress,
    ) as progress:
        momentum = workload.momentum if workload.name == "momentum_sgd" else 0.0
        search = BltSearch(pattern, measure_of(measure), max_evaluations, progress, momentum)
        found = search.levels()
        if not is_plain(workload, measure):
            objectives = _decoder_rows.state_objectives(workload, measure)
            other = BltSearch(
                pattern, measure_of(measure), max_evaluations, progress, momentum, objectives
            )
            found = other.levels(found)
        levels = list(itertools.islice(found, num_buffers or MOST_BUFFERS))
    parameters: dict[str, Any] = {
        "error": measure.parameters().get("error", "mean"),
        **parameters_for(workload, measure),
    }
    level = levels[-1]
    if num_buffers is None:
        parameters["accuracy"] = accuracy
        # Logarithms of squared errors.
        highest = level.log_error + 2.0 * np.log1p(accuracy)
        level = next(each for each in levels if each.log_error <= highest)
    warn_unless_stationary(level.result)
    decays = 1.0 - level.distances
    return BltFactorization(
        num_rounds,
        decays[0::2],
        decays[1::2],
        participation=participation,
        parameters={"num_buffers": len(decays) // 2, **parameters},
    )
