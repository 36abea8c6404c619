"""The base class of all factorizations A = BC, and the class of banded factorizations.

A matrix without another structure is stored as its bands, with any number of bands.
"""

import abc
import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import numpy as np
import scipy.linalg
from scipy.linalg.lapack import dtrtri

from mf_aggregators import inputs, linear_algebra, workloads
from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.kernel import integers, numbers, rows
from mf_aggregators.kernel import sensitivity as kernel
from mf_aggregators.kernel.losses import StrategyColumns
from mf_aggregators.kernel.numbers import Error, FloatArray
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.participation import Participation, SamplingScheme, SingleParticipation, check
from mf_aggregators.sensitivity import Sensitivity
from mf_aggregators.workloads import AnyWorkload, Workload

# The name of the parameter with the numbers of rounds before each extension (the horizons).
_EXTENDS = "extends"
_Made = TypeVar("_Made", bound="Factorization")
# If there are fewer rounds for each band than the first number, and at most the second number of
# rounds, inverting the dense matrix is faster than blocks.
_ROUNDS_PER_BAND, _MOST_ROUNDS_OF_AN_INVERSE = 4, 8192
# The number of (n, n) arrays in memory while columns of a full matrix are computed, and while the
# kernel computes C from dense rows of noise.
_ARRAYS_OF_COLUMNS = 6
# The most steps of Z by which roundings may move a number. Accounting charges for them; more would
# take half of the noise.
_MOST_ROUNDING = 1024.0


class ExtensionError(Error, ValueError):
    """A factorization cannot be extended to more rounds; the message says why.

    Use it when a program extends runs whose matrix may not allow it.

    Example:
      >>> import mf_aggregators as mfa
      >>> try:
      ...     mfa.factorizations.optimal(8).extended(16)
      ... except mfa.factorizations.ExtensionError as error:
      ...     print(error)
      this optimal factorization for 8 rounds cannot be extended to 16: all rows are optimised
      together: more rounds change the first rows.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Errors:
    """The errors of a factorization at sensitivity 1 and noise multiplier 1.

    Attributes:
      sensitivity: sens(C) under the schema for which the errors are stated.
      per_round_variance: (n,) float64: sens(C)^2 ||row i of B||^2 for each round i.
    """

    sensitivity: Sensitivity
    per_round_variance: FloatArray

    @property
    def total_error(self) -> float:
        """The root of the sum of the variances: sens(C) ||B||_F, sqrt(L) in the papers."""
        return float(np.sqrt(np.sum(self.per_round_variance)))

    @property
    def rmse(self) -> float:
        """The root of the mean of the variances over rounds."""
        return float(np.sqrt(np.mean(self.per_round_variance)))

    @property
    def max_error(self) -> float:
        """The root of the largest variance of any round."""
        return float(np.sqrt(np.max(self.per_round_variance)))

    def to_dict(self) -> dict[str, float]:
        """Returns ``total_error``, ``rmse`` and ``max_error``, for reports and checkpoints."""
        return {name: getattr(self, name) for name in ("total_error", "rmse", "max_error")}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Factorization(abc.ABC):
    """A strategy matrix C with its structure; the decoder of a workload A is B = A C^-1.

    Use it when a function takes any factorization: all factorizations are subclasses.

    A factorization is immutable. Its errors are stated at sensitivity 1 and noise
    multiplier 1: the variance of output i is sens(C)^2 ||row i of B||^2, which does not change if C
    is multiplied by a number.

    Each subclass is a frozen dataclass. A checkpoint stores its fields: arrays in a file for
    arrays, and other fields among the parameters.

    Attributes:
      mechanism: The mechanism's name, as ``mf-factorize --mechanism`` spells it.
      num_rounds: The number of rounds n.
      participation: The schema for which the factorization was optimised; None if it was not
        optimised.
      optimality_gap: A certified upper bound on the relative difference between the squared error
        and the smallest possible one in the mechanism's class; None if nothing is certified. The
        error is the total error, unless the parameter ``error`` names another.
      parameters: The arguments with which the factorization was made, for reports and checkpoints.
      can_extend: Whether the factorization can be extended to more rounds.
      has_dense_rows: Whether the kernel computes C from the rows of noise as an (n, n) array.
      reason: The reason why it cannot be extended, as the end of a sentence.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> matrix = mfa.factorizations.banded(16, num_bands=4, participation=timers)
      >>> isinstance(matrix, mfa.factorizations.Factorization), matrix.strategy_matrix().shape
      (True, (16, 16))
      >>> round(matrix.sensitivity(timers).value, 3), round(matrix.rmse(16, timers), 3)
      (2.0, 3.806)
    """

    mechanism = ""
    can_extend: ClassVar[bool] = False
    has_dense_rows: ClassVar[bool] = False
    reason: ClassVar[str] = "this kind of factorization has no rule for further rounds"

    num_rounds: int = dataclasses.field(init=False)
    participation: Participation | None = dataclasses.field(default=None, kw_only=True)
    optimality_gap: float | None = dataclasses.field(default=None, kw_only=True)
    parameters: Mapping[str, object] = dataclasses.field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if self.participation is not None:
            self._set(participation=check(self.participation))
        if not isinstance(self.parameters, Mapping | None):
            raise ValueError(f"parameters must be a dict, found {numbers.shown(self.parameters)}.")
        if self.optimality_gap is not None:
            numbers.finite_number(self.optimality_gap, "optimality_gap")
        self._set(parameters=dict(self.parameters or {}))

    def _set(self, **values: object) -> None:
        """Sets fields during construction, and makes arrays read-only."""
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, name, value)

    @property
    def horizons(self) -> tuple[int, ...]:
        """The numbers of rounds before each extension, increasing; empty without an extension."""
        extends = self.parameters.get(_EXTENDS, ())
        if not isinstance(extends, list | tuple):
            raise TypeError(f"{_EXTENDS} must be a list, found {numbers.shown(extends)}.")
        return tuple(map(int, extends))

    def extended(
        self,
        num_rounds: int,
        *,
        participation: Participation | None = None,
        workload: Workload | int | None = None,
    ) -> "Factorization":
        """Returns a factorization for more rounds with a C that begins with this C.

        The first n rows of C^-1 Z stay the same, bit for bit, if the standard deviation of Z stays
        the same (``Mechanism.extended``), so a run can continue with the result.

        Args:
          num_rounds: The number of rounds of the extended run, above n.
          participation: The schema of the extended run, for which further rows are optimised (if
            the class optimises them); by default, the schema for which this factorization was
            optimised.
          workload: The workload of the extended run, for which further rows are optimised; by
            default, or for an int, the prefix sum.

        Returns:
          The extended factorization, with :attr:`horizons` and without an optimality gap.

        Raises:
          ExtensionError: If the factorization cannot be extended; the message says why.
          ValueError: If the workload is for another number of rounds, or the schema's
            participations do not fit into the rounds.

        Example:
          >>> import mf_aggregators as mfa
          >>> matrix = mfa.factorizations.blt(8, 2).extended(12)
          >>> matrix.num_rounds, matrix.horizons
          (12, (8,))
        """
        rounds = numbers.positive_integer(num_rounds, "num_rounds")
        if rounds <= self.num_rounds:
            raise ExtensionError(
                f"this {self.mechanism} factorization has {self.num_rounds} rounds already: an "
                f"extension needs more, found {rounds}."
            )
        schema = check(participation or self.participation or SingleParticipation(), rounds)
        whole = workloads.checked(rounds if workload is None else workload)
        if whole.num_rounds != rounds:
            raise ValueError(
                f"the workload is for {whole.num_rounds} rounds, and the extension for {rounds}."
            )
        parameters = {**self.parameters, _EXTENDS: [*self.horizons, self.num_rounds]}
        # Parameters for weights and for the workload's fingerprint are about the first rounds only.
        if parameters.pop("weights", None) is not None:
            parameters.pop("error", None)
        parameters.pop("workload", None)
        return self._extended(rounds, schema, whole, parameters)

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: AnyWorkload,
        parameters: dict[str, object],
    ) -> "Factorization":
        """Makes the result of :meth:`extended` from checked arguments.

        By default, the same fields are used for more rounds.
        """
        del workload
        if not self.can_extend:
            raise ExtensionError(
                f"this {self.mechanism} factorization for {self.num_rounds} rounds cannot be "
                f"extended to {num_rounds}: {self.reason}."
            )
        extended = self._for_rounds(num_rounds, parameters)
        if self.participation is not None:
            extended._set(participation=participation)
        return extended

    def at_horizon(self, num_rounds: int) -> "Factorization":
        """Returns the factorization before an extension, without an optimality gap.

        Args:
          num_rounds: One of :attr:`horizons`; or n, for this factorization.

        Returns:
          The factorization, with the same rows of noise.

        Raises:
          ValueError: If it was not extended from this number of rounds.

        Example:
          >>> import mf_aggregators as mfa
          >>> matrix = mfa.factorizations.banded(8, num_bands=4)
          >>> matrix.extended(12).at_horizon(8).has_same_matrix(matrix)
          True
        """
        if num_rounds == self.num_rounds:
            return self
        if num_rounds not in self.horizons:
            raise ValueError(
                f"num_rounds must be an earlier horizon, one of {list(self.horizons)}, found "
                f"{num_rounds}."
            )
        parameters = {name: each for name, each in self.parameters.items() if name != _EXTENDS}
        if earlier := [rounds for rounds in self.horizons if rounds < num_rounds]:
            parameters[_EXTENDS] = earlier
        if not self.can_extend:
            raise ExtensionError(
                f"this {self.mechanism} factorization is said to extend one for {num_rounds} "
                "rounds, and its class cannot be extended: the checkpoint is broken, or was "
                "written by another version."
            )
        return self._for_rounds(num_rounds, parameters)

    def leading(self, num_rounds: int) -> "Factorization":
        """Returns the leading part of an extension, an extension to fewer rounds.

        Args:
          num_rounds: At most n, and above the last of :attr:`horizons`.

        Raises:
          ValueError: If num_rounds is not above the last horizon, or above n.
        """
        if not max(self.horizons, default=self.num_rounds) < num_rounds <= self.num_rounds:
            raise ValueError(f"{num_rounds} is not between the last horizon and {self.num_rounds}.")
        return self._for_rounds(num_rounds, dict(self.parameters))

    def _for_rounds(self: _Made, num_rounds: int, parameters: dict[str, object]) -> _Made:
        """Makes the same kind of factorization for another number of rounds, without a gap."""
        return dataclasses.replace(
            self, num_rounds=num_rounds, optimality_gap=None, parameters=parameters
        )

    def has_same_matrix(self, other: "Factorization") -> bool:
        """Returns whether another factorization has the same matrix, bit for bit, by its fields.

        Args:
          other: The other factorization.
        """
        if type(self) is not type(other):
            return False
        names = ["num_rounds", *(field.name for field in self._own_fields())]
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    @classmethod
    def _own_fields(cls) -> list[dataclasses.Field[object]]:
        """The fields of this class that the base class does not have."""
        common = {field.name for field in dataclasses.fields(Factorization)} - {"num_rounds"}
        return [each for each in dataclasses.fields(cls) if each.init and each.name not in common]

    def gap_holds_for(self, participation: Participation) -> bool:
        """Returns whether ``optimality_gap`` is valid under a schema.

        Args:
          participation: The schema for which errors are stated.

        Returns:
          True for the schema for which the factorization was optimised, and equivalent schemas.
        """
        own = self.participation
        if own is None:
            return False
        return own == participation or (
            own.most_participations(self.num_rounds) == 1
            and participation.most_participations(self.num_rounds) == 1
        )

    @abc.abstractmethod
    def strategy_matrix(self) -> FloatArray:
        """Returns C as a dense float64 array, for inspection: (n, n).

        Example:
          >>> import mf_aggregators as mfa
          >>> mfa.factorizations.from_coefficients([1.0, 0.5, 0.25]).strategy_matrix()
          array([[1.  , 0.  , 0.  ],
                 [0.5 , 1.  , 0.  ],
                 [0.25, 0.5 , 1.  ]])
        """

    def strategy_bands(self) -> int:
        """Returns the number of bands of C: the smallest b with C[i, j] = 0 for i - j >= b.

        Structured mechanisms may return the larger number of bands for which they were made.
        """
        matrix = self.strategy_matrix()
        return rows.Strategy(matrix, len(matrix), is_dense=True).num_bands

    @abc.abstractmethod
    def noise_recursion(self) -> NoiseRecursion:
        """Returns the recursion that computes the noise rows C^-1 Z."""

    @functools.cached_property
    def _largest_rounding(self) -> float:
        """The largest number of steps of Z by which one client can change roundings.

        Raises:
          ValueError: If it is not much smaller than the noise.
        """
        moved = integers.IntegerRows.of(self.noise_recursion()).largest_rounding()
        # The comparison is negated so that NaN is refused, too.
        if not moved <= _MOST_ROUNDING:
            raise ValueError(
                f"the noise of {self.mechanism} may be rounded by {moved:.2g} steps, and the "
                "accounting of schemes in which clients draw for themselves allows at most "
                f"{_MOST_ROUNDING:g}: use a banded mechanism, or a better conditioned matrix."
            )
        return moved

    def columns_for(self, scheme: SamplingScheme) -> StrategyColumns | None:
        """Returns the columns of C on which an amplified guarantee depends, with their roundings.

        Args:
          scheme: The sampling scheme; C has at most as many bands as the scheme says.

        Returns:
          The columns, for schemes without groups; None for schemes with groups.

        Raises:
          ValueError: If roundings move a number by more than the accounting allows.
        """
        if scheme.has_groups:
            return None
        return StrategyColumns.of(self.noise_recursion(), self.num_rounds)

    def check_memory(self) -> None:
        """Checks that there is memory for a guarantee, before any of it is used.

        Raises:
          MemoryError: If there is too little for the C that the kernel computes.
        """
        if self.has_dense_rows:
            inputs.check_memory(
                _ARRAYS_OF_COLUMNS * 8 * self.num_rounds**2,
                f"the strategy matrix of {self.num_rounds} rounds",
                "use fewer rounds, or a factorization that is banded, Toeplitz or a BLT",
            )

    def check_scheme(self, scheme: SamplingScheme) -> None:
        """Checks that C has a scheme's number of rounds, and at most its number of bands.

        Also, each row of noise must follow from the b - 1 rows of noise before it, unless b is the
        number of rounds. If rows follow from earlier rows of Z or from a state, the roundings of a
        participation affect all later rows (``kernel.integers``), and not only b rows.

        Args:
          scheme: How clients take part.

        Raises:
          ValueError: If C or its noise does not fit the scheme.
        """
        if scheme.num_rounds != self.num_rounds:
            raise ValueError(
                f"the sampling scheme is for {scheme.num_rounds} rounds, and the factorization for "
                f"{self.num_rounds}."
            )
        if scheme.shares_rows:
            size = _ARRAYS_OF_COLUMNS * 8 * self.num_rounds
            inputs.check_rounds(self.num_rounds, size, "the columns of C")
        bands = self.strategy_bands()
        if bands > scheme.num_bands:
            raise ValueError(
                f"the strategy matrix of {self.mechanism} has {bands} bands: amplification by "
                f"sampling needs at most {scheme.num_bands} (BandMF Thm 4)."
            )
        recursion = self.noise_recursion()
        reaches_far = (
            recursion.draws_earlier_rows_of_z
            or recursion.num_state_vectors > 0
            or recursion.num_earlier_rows >= bands
        )
        if reaches_far and bands < self.num_rounds:
            raise ValueError(
                f"the noise of {self.mechanism} uses earlier rows of Z or of noise than its "
                f"{bands} bands reach, and so do its roundings: for amplification by sampling, use "
                "a banded mechanism with bands for at most half of the rounds."
            )
        if not scheme.has_groups:
            _ = self._largest_rounding  # Refuses roundings that are too large.

    def arrays(self) -> dict[str, FloatArray]:
        """Returns the float64 arrays that a checkpoint stores.

        These are the fields that are arrays, by name. :meth:`from_arrays` takes them.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    @classmethod
    def from_arrays(
        cls: type[_Made], num_rounds: int, arrays: Mapping[str, FloatArray], **attributes: object
    ) -> _Made:
        """Makes a factorization for ``num_rounds`` rounds from the result of :meth:`arrays`.

        Args:
          num_rounds: n.
          arrays: The arrays by name.
          **attributes: ``participation``, ``optimality_gap`` and ``parameters``. Fields that are
            not arrays are read from the parameters.

        Returns:
          The factorization.

        Raises:
          ValueError: If an array is missing, or does not have the structure of the mechanism.
        """
        parameters = attributes.get("parameters")
        own = parameters if isinstance(parameters, Mapping) else {}
        known = {**own, **arrays, "num_rounds": num_rounds}
        values = {}
        for field in cls._own_fields():
            if field.name in known:
                values[field.name] = known[field.name]
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"{field.name} is missing")
        # The constructor checks its arguments.
        made = cls(**values, **attributes)  # type: ignore[arg-type]
        if made.num_rounds != num_rounds:
            raise ValueError(
                f"its arrays are those of a matrix for {made.num_rounds} rounds, and its "
                f"num_rounds is {num_rounds}"
            )
        return made

    def noising_matrix(self) -> FloatArray:
        """Returns C^-1 as a dense float64 array, for inspection.

        Example:
          >>> import mf_aggregators as mfa
          >>> matrix = mfa.factorizations.from_coefficients([1.0, 0.5, 0.25])
          >>> matrix.noising_matrix()
          array([[ 1. ,  0. ,  0. ],
                 [-0.5,  1. ,  0. ],
                 [ 0. , -0.5,  1. ]])
        """
        return noise_rows.dense(self.noise_recursion())

    def encode(self, x: object) -> FloatArray:
        """Returns C x, the encoded stream.

        Args:
          x: (n, ...) floats, a row for each round.

        Returns:
          A float64 array with a row for each row of C.

        Raises:
          ValueError: If the number of rows is not n.

        Example:
          >>> import numpy as np
          >>> import mf_aggregators as mfa
          >>> mfa.factorizations.from_coefficients([1.0, 0.5, 0.25]).encode(np.ones(3))
          array([1.  , 1.5 , 1.75])
        """
        return self._encode(self._of_all_rounds(numbers.real_array(x, "x"), "x"))

    def _of_all_rounds(self, array: FloatArray, name: str) -> FloatArray:
        if array.shape[:1] != (self.num_rounds,):
            raise ValueError(f"{name} must have {self.num_rounds} rows, found {array.shape}.")
        return array

    def _encode(self, x: FloatArray) -> FloatArray:
        return np.tensordot(self.strategy_matrix(), x, axes=1)

    def noise_rows(self, z: object) -> FloatArray:
        """Returns all n noise rows, by the same recursion as the aggregator.

        Args:
          z: (n, ...) floats: the rows of Z, one for each round.

        Returns:
          An array like ``z``: C^-1 Z.

        Raises:
          ValueError: If the number of rows is not n.

        Example:
          >>> import numpy as np
          >>> import mf_aggregators as mfa
          >>> mfa.factorizations.from_coefficients([1.0, 0.5, 0.25]).noise_rows(np.ones(3))
          array([1. , 0.5, 0.5])
        """
        z = self._of_all_rounds(np.asarray(z), "z")
        return noise_rows.apply(self.noise_recursion(), z)

    def decoder_matrix(self, workload: object) -> FloatArray:
        """Returns the decoder B, with A = BC.

        Args:
          workload: A, an (n, n) lower-triangular array, a ``workloads.Workload``, or an int n
            for the prefix sum of n rounds.

        Returns:
          B = A C^-1, an (n, n) float64 lower-triangular array.

        Raises:
          ValueError: If the workload is not square, finite and lower triangular,
            or not for n rounds.

        Example:
          >>> import mf_aggregators as mfa
          >>> mfa.factorizations.from_coefficients([1.0, 0.5, 0.25]).decoder_matrix(3)
          array([[1. , 0. , 0. ],
                 [0.5, 1. , 0. ],
                 [0.5, 0.5, 1. ]])
        """
        return self._decoder_matrix(self._checked(workload).matrix())

    def _decoder_matrix(self, workload: FloatArray) -> FloatArray:
        # C^T B^T = A^T: a triangular solve is more accurate than a product with C^-1.
        transposed = scipy.linalg.solve_triangular(
            self.strategy_matrix(), workload.T, lower=True, trans="T", check_finite=False
        )
        return np.tril(transposed.T)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Returns the sensitivity of C under a schema: see ``mf_aggregators.sensitivity``.

        The result is cached for each schema, because some bounds take seconds to compute.

        Args:
          participation: The schema that clients keep to.

        Returns:
          The value under unit clipping, and whether it is exact or an upper bound.

        Raises:
          TypeError: If it is no schema.
          ValueError: If its participations do not fit into the rounds.
        """
        known: dict[Participation, Sensitivity] = self.__dict__.setdefault("_sensitivities", {})
        if check(participation) not in known:
            known[participation] = self._sensitivity(participation)
        return known[participation]

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        return sensitivities.compute(self.strategy_matrix(), participation)

    def errors(self, workload: object, participation: Participation) -> Errors:
        """Returns all errors of the outputs A x for a workload A.

        Args:
          workload: A, an (n, n) lower-triangular array, or a ``workloads.Workload`` or an int n
            for the prefix sum of n rounds, with which structured mechanisms need no (n, n) matrix.
          participation: The schema under which C has sensitivity sens(C).

        Returns:
          The errors at sensitivity 1 and noise multiplier 1.

        Raises:
          ValueError: As :meth:`decoder_matrix` does.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> errors = mfa.factorizations.identity(16).errors(16, once)
          >>> round(errors.total_error, 3), round(errors.rmse, 3), errors.max_error
          (11.662, 2.915, 4.0)
        """
        squared_rows = self.squared_decoder_rows(workload)
        sensitivity = self.sensitivity(participation)
        return Errors(sensitivity, sensitivity.value**2 * squared_rows)

    def per_round_variance(self, workload: object, participation: Participation) -> FloatArray:
        """Returns sens(C)^2 ||row i of B||^2 for each round i, (n,) float64: see :meth:`errors`.

        Args:
          workload: A, as in :meth:`errors`.
          participation: The schema under which C has sensitivity sens(C).

        Returns:
          Variances in squared clip norms, at sensitivity 1 and noise multiplier 1.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> mfa.factorizations.identity(4).per_round_variance(4, once)
          array([1., 2., 3., 4.])
        """
        return self.errors(workload, participation).per_round_variance

    def squared_decoder_rows(self, workload: object) -> FloatArray:
        """Returns ||row i of B||^2 for each round i: shape (n,), float64.

        Args:
          workload: A, as in :meth:`errors`.

        Returns:
          The squared norms.

        Raises:
          ValueError: As :meth:`decoder_matrix` does.
        """
        workload = self._checked(workload)
        found = self._squared_rows(workload)
        if found is None:
            decoder = self._decoder_matrix(workload.matrix())
            found = np.asarray(np.einsum("ij,ij->i", decoder, decoder))
        return found

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        """||row i of B||^2, (n,), if the structure of C gives it without B; otherwise None."""
        del workload
        return None

    def total_error(self, workload: object, participation: Participation) -> float:
        """Returns the root of the sum of the variances: see :meth:`errors`.

        Args:
          workload: A, as in :meth:`errors`.
          participation: The schema under which C has sensitivity sens(C).

        Returns:
          The error in clip norms (sqrt(L) in the papers), at sensitivity 1 and noise multiplier 1.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> round(mfa.factorizations.identity(16).total_error(16, once), 3)
          11.662
        """
        return self.errors(workload, participation).total_error

    def rmse(self, workload: object, participation: Participation) -> float:
        """Returns the root of the mean of the variances over rounds: see :meth:`errors`.

        Args:
          workload: A, as in :meth:`errors`.
          participation: The schema under which C has sensitivity sens(C).

        Returns:
          The error in clip norms, at sensitivity 1 and noise multiplier 1.
        """
        return self.errors(workload, participation).rmse

    def max_error(self, workload: object, participation: Participation) -> float:
        """Returns the root of the largest variance of any round: see :meth:`errors`.

        Args:
          workload: A, as in :meth:`errors`.
          participation: The schema under which C has sensitivity sens(C).

        Returns:
          The error in clip norms, at sensitivity 1 and noise multiplier 1.

        Example:
          >>> import mf_aggregators as mfa
          >>> once = mfa.participation.SingleParticipation()
          >>> mfa.factorizations.identity(16).max_error(16, once)
          4.0
        """
        return self.errors(workload, participation).max_error

    def _checked(self, workload: object) -> AnyWorkload:
        """The workload for an argument, after a check that it is for n rounds."""
        found: AnyWorkload = workloads.checked(workload)
        rounds = found.num_rounds
        if rounds != self.num_rounds:
            raise ValueError(
                f"the workload is for {rounds} rounds, and the factorization for {self.num_rounds}."
            )
        return found

    @staticmethod
    def _checked_bands(bands: object, name: str) -> FloatArray:
        """Returns a float64 copy of the bands of an invertible lower-triangular matrix.

        Args:
          bands: (n, b), 1 <= b <= n, of magnitudes up to 1e150, with ``bands[i, t] = M[i, i - t]``,
            zero where i < t, and no zero on the diagonal ``bands[:, 0]``.
          name: The name of the bands in messages.

        Raises:
          ValueError: If the bands do not have this form.
        """
        array = numbers.real_array(bands, name).copy()
        if array.ndim != 2 or not 1 <= array.shape[1] <= array.shape[0]:
            raise ValueError(
                f"{name} must have a row for each round and 1 to num_rounds columns, found an "
                f"array of shape {array.shape}."
            )
        # The bound makes squares finite as well.
        if not np.all(np.abs(array) <= 1e150):
            raise ValueError(f"{name} must be finite, found NaN, infinity or an entry above 1e150.")
        if not np.all(array[:, 0]):
            raise ValueError(
                f"{name} must be those of a non-singular matrix, found a zero on the diagonal."
            )
        if np.any(array[~np.tri(array.shape[0], array.shape[1], dtype=bool)]):
            raise ValueError(f"{name} must be zero before the first column of the matrix.")
        return array

    @staticmethod
    def check_own(factorization: object) -> "Factorization":
        """Returns a factorization, after a check that its class is one of the library's own.

        Args:
          factorization: The value that was given as a factorization.

        Raises:
          TypeError: If it has another class, or methods of it were replaced.
        """
        kind = type(factorization)
        own = vars(sys.modules["mf_aggregators.factorizations"])
        if not isinstance(factorization, Factorization) or own.get(kind.__name__) is not kind:
            raise TypeError(
                "factorization must be of a class of mf_aggregators.factorizations, not of a "
                f"subclass, found {numbers.shown(factorization)} "
                f"({kind.__module__}.{kind.__qualname__}). Give a matrix of your own as data, "
                "factorizations.from_matrix(C); read a checkpoint with "
                "mf_aggregators.checkpoints.load."
            )
        replaced = [
            name
            for name in vars(factorization)
            if callable(getattr(kind, name, None))
            or isinstance(getattr(kind, name, None), property)
        ]
        if replaced:
            raise TypeError(
                f"{replaced[0]} of the factorization was replaced: its guarantee would be stated "
                "for another matrix. Make the factorization anew."
            )
        return factorization

    def __repr__(self) -> str:
        return f"<{self.mechanism} factorization for {self.num_rounds} rounds>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BandedFactorization(Factorization):
    """A lower-triangular C with ``num_bands`` bands: C[i, j] = 0 for i - j >= num_bands.

    Use it when you read the bands of the result of ``banded`` or ``from_bands``.

    Attributes:
      bands: (n, b), read-only, with ``bands[i, t] = C[i, i - t]``, zero where i < t; the diagonal
        ``bands[:, 0]`` has no zero.

    Raises:
      ValueError: If the array does not have this form.

    Example:
      >>> import mf_aggregators as mfa
      >>> matrix = mfa.factorizations.banded(16, num_bands=4)
      >>> isinstance(matrix, mfa.factorizations.BandedFactorization)
      True
      >>> matrix.num_bands, matrix.bands.shape
      (4, (16, 4))
    """

    mechanism = "banded"
    can_extend = True

    bands: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        bands = self._checked_bands(self.bands, "bands")
        self._set(bands=bands, num_rounds=len(bands))

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return int(self.bands.shape[1])

    def strategy_bands(self) -> int:
        """Returns the number of bands of C."""
        return self.num_bands

    def strategy_matrix(self) -> FloatArray:
        """Returns C as a dense (n, n) array."""
        dense = np.zeros((self.num_rounds, self.num_rounds))
        for t in range(self.num_bands):
            rounds = np.arange(t, self.num_rounds)
            dense[rounds, rounds - t] = self.bands[t:, t]
        return dense

    def noise_recursion(self) -> rows.BandedNoise:
        """Returns the recursion over the last ``num_bands - 1`` noise rows."""
        return rows.BandedNoise(self.num_rounds, self.bands)

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        """Computed from the bands alone; by column norms if BandMF Thm 2 applies."""
        return kernel.of_strategy(
            rows.Strategy(self.bands, self.num_rounds), check(participation).as_schema()
        )

    def gap_holds_for(self, participation: Participation) -> bool:
        """With equal column norms, the gap holds for every schema with enough separation."""
        if not self.parameters.get("equal_column_norms", False):
            return super().gap_holds_for(participation)
        return (
            check(participation).most_participations(self.num_rounds) == 1
            or participation.separation_in(self.num_rounds) >= self.num_bands
        )

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        """Needs O(n b) memory if the inverse of A is banded."""
        is_wide = _ROUNDS_PER_BAND * self.num_bands > self.num_rounds
        is_short = self.num_rounds <= _MOST_ROUNDS_OF_AN_INVERSE
        inverse = workload.inverse_bands()
        if inverse is None:
            return None
        if is_wide and is_short and workload.is_prefix_sum:
            return squared_rows_by_inverse(self.strategy_matrix(), inverse)
        blocks = linear_algebra.WorkloadBlocks.of_inverse(inverse, self.num_bands)
        return linear_algebra.BandedCovariances(self.bands, blocks).squared_rows()

    def _encode(self, x: FloatArray) -> FloatArray:
        product = np.zeros(x.shape)
        for lag in range(self.num_bands):
            weights = self.bands[lag:, lag].reshape(-1, *[1] * (x.ndim - 1))
            product[lag:] += weights * x[: self.num_rounds - lag]
        return product

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: AnyWorkload,
        parameters: dict[str, object],
    ) -> "BandedFactorization":
        # Imported here, because that module imports this one.
        from mf_aggregators.factorizations.banded import extended_bands

        # Further rows are always optimised for the total error.
        for name in ("error", "weights"):
            parameters.pop(name, None)
        return BandedFactorization(
            extended_bands(
                self.bands, workload, participation, (*self.horizons, self.num_rounds)[0]
            ),
            participation=participation,
            parameters={**parameters, "workload": workload.fingerprint()},
        )

    def _for_rounds(self, num_rounds: int, parameters: dict[str, object]) -> "BandedFactorization":
        return BandedFactorization(
            self.bands[:num_rounds], participation=self.participation, parameters=parameters
        )


def bands_of_matrix(matrix: FloatArray, num_bands: int) -> FloatArray:
    """Returns (n, b) ``bands[i, t] = matrix[i, i - t]``, zero where i < t."""
    num_rounds = matrix.shape[0]
    bands = np.zeros((num_rounds, num_bands))
    for t in range(num_bands):
        bands[t:, t] = np.diagonal(matrix, -t)
    return bands


def squared_rows_by_inverse(strategy_matrix: FloatArray, bands: FloatArray) -> FloatArray | None:
    """Returns ||row i of B||^2, (n,), from C^-1 if A^-1 has at most two bands; else None.

    Row i of B = A C^-1 is a combination of row i - 1 of B and row i of C^-1. Inverting a triangular
    matrix takes a third of the operations of a solve for B.

    Args:
      strategy_matrix: C, (n, n), lower triangular and invertible.
      bands: (n, w) of A^-1.
    """
    if bands.shape[1] > 2:
        return None
    kept = bands[:, 1] if bands.shape[1] > 1 else np.zeros(len(bands))
    # LAPACK stores columns contiguously, so the transpose has rows of C^-1 in memory order.
    inverse, _ = dtrtri(strategy_matrix.T, lower=0)
    row, squared = np.zeros(len(bands)), np.empty(len(bands))
    for i, entry in enumerate(bands[:, 0]):
        row[:i] *= -kept[i]
        row[: i + 1] += inverse[: i + 1, i]
        row[: i + 1] /= entry
        squared[i] = np.dot(row[: i + 1], row[: i + 1])
    return squared
