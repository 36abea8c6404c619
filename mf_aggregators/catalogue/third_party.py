"""Factorizations of other packages, of which nothing is believed but what was computed here."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from mf_aggregators import memory, validation
from mf_aggregators.arrays import FloatArray
from mf_aggregators.catalogue.entry import (
    Entry,
    MechanismError,
    Request,
    SamplingSetting,
    TimerSetting,
    Variant,
)
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.factorizations.optimal import DenseFactorization
from mf_aggregators.noise import recursions
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.participation import SingleParticipation
from mf_aggregators.workloads import Workload

# How much of the noise multiplier a recursion may take: rounding takes far less.
_TOLERANCE = 1e-8
# C, the identity, the rows and what they keep of earlier ones, and a product.
_BYTES_PER_ENTRY = 5 * 8


class CheckedFactorization(Factorization):
    """A factorization of another package's class, with the errors that its matrix has.

    The strategy matrix is copied. The recursion is made anew from copies of its arrays, and is run:
    its rows must be those of C^-1. (The aggregator of TFF draws rows by its graphs as well, and
    compares them with C: ``tff.tensor_streams``.) Sensitivity and errors are computed by the base
    class from the copy. A certified gap is dropped.
    """

    def __init__(self, factorization: Factorization) -> None:
        """Checks a factorization.

        Args:
          factorization: What another package made.

        Raises:
          ValueError: If its matrix is not square, finite, lower triangular and invertible, or
            its recursion does not make the rows of C^-1.
        """
        super().__init__(parameters=factorization.parameters)
        num_rounds = validation.positive_integer(factorization.num_rounds, "num_rounds")
        memory.check(
            float(_BYTES_PER_ENTRY) * num_rounds**2,
            f"checking the matrix of {factorization.mechanism} for {num_rounds} rounds",
            "use fewer rounds",
        )
        name = f"the strategy matrix of {factorization.mechanism}"
        matrix = validation.lower_triangular(factorization.strategy_matrix(), name)
        if matrix.shape != (num_rounds, num_rounds):
            raise ValueError(f"{name} has shape {matrix.shape}, and num_rounds is {num_rounds}.")
        self.mechanism = factorization.mechanism
        self._matrix = DenseFactorization(matrix).strategy_matrix()
        self._recursion = _rebuilt(factorization.noise_recursion())
        difference = _difference(self._matrix, self._recursion)
        # Written so that NaN does not pass.
        if not difference <= _TOLERANCE:
            raise ValueError(
                f"the noise rows of {factorization.mechanism} are not those of its matrix: C times "
                f"them differs from the identity by {difference:.2g} (Frobenius norm)."
            )
        self._arrays = {
            key: np.array(value, np.float64) for key, value in factorization.arrays().items()
        }

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self._matrix.shape[0])

    def strategy_matrix(self) -> FloatArray:
        """Returns C, read-only."""
        return self._matrix

    def noise_recursion(self) -> NoiseRecursion:
        """Returns the recursion that was checked."""
        return self._recursion

    def arrays(self) -> dict[str, FloatArray]:
        """Returns copies of the arrays of the other package's class."""
        return {key: value.copy() for key, value in self._arrays.items()}

    @classmethod
    def from_arrays(
        cls, num_rounds: int, arrays: Mapping[str, FloatArray], **attributes: Any
    ) -> "CheckedFactorization":
        """Is not for this class: the other package's class reads what it has written."""
        raise TypeError("the class of the other package reads its own arrays.")


class CheckedEntry(Entry):
    """A mechanism of another package, whose factorizations are checked."""

    def __init__(self, made: Entry, own: Collection[type[Factorization] | None]) -> None:
        """Wraps a mechanism.

        Args:
          made: The mechanism of another package.
          own: The library's classes, whose constructors check what they are given.
        """
        self.name = made.name
        self.summary = made.summary
        self.factorization = made.factorization
        self.options = tuple(made.options)
        self.has_any_workload = made.has_any_workload
        self.is_for_runs = made.is_for_runs
        self._made = made
        self._own = frozenset(own)

    def build(self, request: Request) -> Factorization:
        """Makes a factorization and checks it: see the base class.

        Raises:
          MechanismError: If it fails, or what it makes is not for the rounds that were asked for,
            is refused by the classes that check it, or has no finite error.
        """
        try:
            filled = dataclasses.replace(request, options=self._made.arguments(request))
            factorization = self.checked(self._made.build(filled), filled.options)
        except (MemoryError, OSError):
            raise
        except ValueError as error:
            raise MechanismError(str(error)) from error
        except Exception as error:
            raise MechanismError(
                f"the mechanism {self.name} failed: {type(error).__name__}: {error}"
            ) from error
        if factorization.num_rounds != request.num_rounds:
            raise MechanismError(
                f"{self.name} made a factorization for {factorization.num_rounds} rounds, and "
                f"{request.num_rounds} were asked for."
            )
        with np.errstate(all="ignore"):
            rmse = factorization.rmse(request.workload, SingleParticipation())
        if not math.isfinite(rmse):
            raise MechanismError(
                f"the matrix of {self.name} has no inverse in floating-point numbers: its RMSE is "
                f"{rmse:g}."
            )
        return factorization

    def checked(
        self, made: Factorization | FloatArray, options: Mapping[str, Any] | None = None
    ) -> Factorization:
        """Returns a factorization of which only its structure is believed.

        Args:
          made: What the mechanism has made: a factorization, or a strategy matrix.
          options: The options that it was made with, for the record.

        Returns:
          The factorization, under the mechanism's name and without a certified gap.

        Raises:
          ValueError: If its matrix or its recursion is not what it should be.
        """
        parameters = {key: _plain(value) for key, value in (options or {}).items()}
        if isinstance(made, np.ndarray):
            made = DenseFactorization(made)
        elif not isinstance(made, Factorization):
            raise ValueError(f"{self.name} made {type(made).__name__}, which is no factorization.")
        if type(made) not in self._own:
            return CheckedFactorization(made)
        # Rebuilt from its arrays, by the class that checks and copies them.
        rebuilt = type(made).from_arrays(
            made.num_rounds,
            made.arrays(),
            parameters={**made.parameters, **parameters, "structure": made.mechanism},
        )
        return rebuilt.relabelled(self.name)

    def for_audit(self, request: Request) -> Request:
        """Returns what the mechanism asks for in an audit."""
        return self._made.for_audit(request)

    def for_run(self, request: Request, most_bands: int) -> Request:
        """Returns what the mechanism asks for in a training run."""
        return self._made.for_run(request, most_bands)

    def nearest_workload(self, workload: Workload) -> Workload | None:
        """Returns the workload that the mechanism says it is optimised for."""
        return self._made.nearest_workload(workload)

    def for_timers(self, setting: TimerSetting) -> Iterable[Variant]:
        """Returns what the mechanism wants to be evaluated."""
        return self._believed(lambda: self._made.for_timers(setting))

    def for_sampling(self, setting: SamplingSetting) -> Iterable[Variant]:
        """Returns what the mechanism wants to be evaluated, without amplification."""
        return self._believed(lambda: self._made.for_sampling(setting))

    def _believed(self, variants: Callable[[], Iterable[Variant]]) -> list[Variant]:
        """Variants as a plan takes them from another package.

        Its number of bands would have to be believed, so that nothing is amplified by it. Balls in
        bins, which take any matrix, amplify what is made for timers. What it makes
        is made anew in each plan: nobody says when another version makes something else.
        """
        try:
            found = [
                dataclasses.replace(each, amplified_bands=None, is_cached=False)
                for each in variants()
            ]
        except Exception as error:
            return [Variant(reason=f"cannot be planned: {type(error).__name__}: {error}")]
        known = {option.name for option in self.options}
        return [
            Variant(reason=f"cannot be planned: it has no option {sorted(unknown)[0]}")
            if (unknown := {*each.options, *each.arguments} - known)
            else each
            for each in found
        ]


def _rebuilt(recursion: NoiseRecursion) -> NoiseRecursion:
    """The recursion that the library's class makes of copies of a recursion's fields.

    A subclass could show the check one matrix and the run another, and so could what an object has
    beside its fields: a cached ``unit``, for one.
    """
    kind = type(recursion)
    if not any(kind is known for known in recursions.KINDS):
        raise ValueError(f"{kind.__name__} is no recursion of the library.")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    values = {field.name: getattr(recursion, field.name) for field in fields}
    return kind(
        **{
            name: np.array(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
    )


def _difference(matrix: FloatArray, recursion: NoiseRecursion) -> float:
    """The Frobenius norm of E = C N - I for the rows N that a recursion makes of the identity.

    The encoded stream is hidden by C N Z = (I + E) Z, which is at least as much noise as
    (1 - ||E||) Z: so E takes no more than its norm of the noise multiplier.
    """
    if recursion.num_rounds != len(matrix):
        return math.inf
    with np.errstate(all="ignore"):
        # The recursion is run; its noising matrix may come from a solution of its own.
        product = matrix @ recursion.apply(np.eye(len(matrix)))
    product[np.diag_indices(len(matrix))] -= 1.0
    return float(np.linalg.norm(product))


def _plain(value: Any) -> Any:
    """A value as a checkpoint describes it."""
    return value if isinstance(value, bool | int | float | str) else str(value)
