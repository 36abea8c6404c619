"""Workloads: the lower-triangular linear maps whose outputs a training run uses.

A workload A maps the rounds' sums of client updates x_1, ..., x_n to the models: row i of ``A @ x``
is the model after round i (up to sign and learning rate).
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TypeAlias

import numpy as np
import scipy.linalg
import scipy.signal

from mf_aggregators import inputs
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray


def prefix_sum(num_rounds: int) -> FloatArray:
    """Returns the prefix-sum workload: plain SGD with a constant learning rate.

    Use it when the server's optimizer is SGD with a constant learning rate. Functions that take a
    workload also accept the int n for it.

    Args:
      num_rounds: The number of rounds n, at least 1.

    Returns:
      An (n, n) float64 array with ones on and below the diagonal.

    Raises:
      ValueError: If ``num_rounds`` is not a positive integer.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.workloads.prefix_sum(3)
      array([[1., 0., 0.],
             [1., 1., 0.],
             [1., 1., 1.]])
    """
    num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
    inputs.check_rounds(num_rounds, 8 * num_rounds, "the matrix of the workload")
    return np.tri(num_rounds, dtype=np.float64)


def momentum_sgd(
    num_rounds: int,
    momentum: float = 0.9,
    learning_rates: Sequence[float] | FloatArray | None = None,
) -> FloatArray:
    """Returns the workload of heavy-ball momentum SGD (Denisov et al., Prop. 4.2).

    Use it when the server uses momentum or a schedule of learning rates.

    The workload is M = M_eta M_beta with M_eta[i, j] = eta_j and
    M_beta[i, j] = beta^(i - j) for i >= j, so that the i-th iterate of momentum
    SGD started at zero is the negative of row i of M applied to the gradients.

    Args:
      num_rounds: The number of rounds n, at least 1.
      momentum: The momentum beta in [0, 1). Zero, with constant learning rates of
        one, gives the prefix sum.
      learning_rates: n positive learning rates, fixed before training; None for
        all ones.

    Returns:
      An (n, n) float64 lower-triangular array.

    Raises:
      ValueError: If an argument is out of its range, or the number of learning
        rates is not n.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.workloads.momentum_sgd(3, momentum=0.5)
      array([[1.  , 0.  , 0.  ],
             [1.5 , 1.  , 0.  ],
             [1.75, 1.5 , 1.  ]])
    """
    num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
    inputs.check_rounds(num_rounds, 2 * 8 * num_rounds, "the matrix of the workload")
    rates = None
    if learning_rates is not None:
        rates = tuple(_checked_rates(learning_rates, num_rounds).tolist())
    return Workload("momentum_sgd", num_rounds, momentum, rates).matrix()


@dataclasses.dataclass(frozen=True, eq=False)
class Recursion:
    """One linear recursion of an optimizer, y_i = kept_i y_(i-1) + added_i x_i.

    Velocity and model follow from such recursions, each of which is an (n, n) matrix F.

    Attributes:
      kept: (n,); the first has no effect.
      added: (n,), none of them zero.
    """

    kept: FloatArray
    added: FloatArray

    @property
    def is_constant(self) -> bool:
        """Whether the recursion is the same in every round, so that F is a Toeplitz matrix."""
        return not (np.ptp(self.kept[1:]) if len(self.kept) > 1 else 0.0) and not np.ptp(self.added)


_NAMES = ("prefix_sum", "momentum_sgd")
_DEFAULT_MOMENTUM = 0.9
# The smallest allowed ratio of the smallest to the largest learning rate.
_LEAST_RATIO_OF_RATES = 1e-100


@dataclasses.dataclass(frozen=True)
class Workload:
    """A named workload (prefix sum or momentum SGD) with its parameters.

    Use it when an (n, n) array would hold prefix sums or momentum, also for many rounds. (For
    another linear optimizer, pass its matrix.)

    Structured mechanisms compute their errors from it without an (n, n) matrix, because its methods
    return its structure: the coefficients if it is Toeplitz, the bands of its inverse, and the
    recursions of the optimizer.

    Attributes:
      name: ``prefix_sum`` or ``momentum_sgd``.
      num_rounds: The number of rounds n.
      momentum: The momentum of ``momentum_sgd``.
      learning_rates: The n learning rates of ``momentum_sgd``; None for all ones.

    Raises:
      ValueError: If the name is not known or a parameter is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.workloads.Workload("momentum_sgd", 3, 0.5).matrix()
      array([[1.  , 0.  , 0.  ],
             [1.5 , 1.  , 0.  ],
             [1.75, 1.5 , 1.  ]])
    """

    name: str
    num_rounds: int
    momentum: float = _DEFAULT_MOMENTUM
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "num_rounds")
        if self.name not in _NAMES:
            raise ValueError(
                f"a workload must be one of {', '.join(_NAMES)}, found {numbers.shown(self.name)}."
            )
        if self.name == "prefix_sum":
            if (self.momentum, self.learning_rates) != (_DEFAULT_MOMENTUM, None):
                raise ValueError("the prefix_sum workload takes no momentum and no learning_rates.")
            return
        momentum = numbers.finite_number(self.momentum, "momentum")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be at least 0 and below 1, found {momentum}.")
        object.__setattr__(self, "momentum", momentum)
        if self.learning_rates is not None:
            _checked_rates(self.learning_rates, self.num_rounds)

    @property
    def is_prefix_sum(self) -> bool:
        """Whether the workload is the named prefix sum."""
        return self.name == "prefix_sum"

    def matrix(self) -> FloatArray:
        """Returns the workload as a dense (n, n) float64 array.

        Raises:
          ValueError: If it would have more than 2^15 rounds (8 GiB).
        """
        if self.num_rounds > _MOST_ROUNDS_OF_A_MATRIX:
            size = 8 * self.num_rounds**2 / 2**30
            raise ValueError(
                f"a dense matrix for {self.num_rounds} rounds would take {size:.0f} GiB; above "
                f"{_MOST_ROUNDS_OF_A_MATRIX} rounds use banded or blt, or another mechanism with a "
                "workload of constant learning rates."
            )
        if self.name == "prefix_sum":
            return prefix_sum(self.num_rounds)
        momentum, rates = self._momentum_and_rates()
        decay = momentum ** np.arange(self.num_rounds)
        product = scipy.linalg.toeplitz(decay, np.zeros(self.num_rounds)) * rates[:, np.newaxis]
        return np.asarray(np.tril(np.cumsum(product, axis=0, out=product)))

    def coefficients(self) -> FloatArray | None:
        """Returns the (n,) first column of a Toeplitz workload, or None if it is not Toeplitz.

        Example:
          >>> import mf_aggregators as mfa
          >>> mfa.workloads.Workload("momentum_sgd", 3, 0.5).coefficients()
          array([1.  , 1.5 , 1.75])
        """
        momentum, rates = self._momentum_and_rates()
        if self.constant_momentum() is None:
            return None
        return np.asarray(rates[0] * np.cumsum(momentum ** np.arange(self.num_rounds)))

    def constant_momentum(self) -> float | None:
        """Returns the momentum beta of a workload with constant learning rates.

        Its first column is a multiple of the coefficients of 1 / ((1 - x) (1 - beta x)).

        Returns:
          0 for the prefix sum; None if learning rates change.
        """
        if self.name == "prefix_sum":
            return 0.0
        return None if len(set(self.learning_rates or (1.0,))) > 1 else self.momentum

    def recursions(self) -> tuple[Recursion, ...]:
        """Returns the steps F_1, F_2, ... of the algorithm: A = ... F_2 F_1.

        They are the velocity, if there is momentum, and the model.
        """
        momentum, rates = self._momentum_and_rates()
        model = Recursion(np.ones(self.num_rounds), rates)
        if not momentum:
            return (model,)
        return Recursion(np.full(self.num_rounds, momentum), np.ones(self.num_rounds)), model

    def inverse_bands(self) -> FloatArray:
        """Returns the (n, w) bands of A^-1, ``bands[i, t] = A^-1[i, i - t]``, w at most 3.

        With eta_i the learning rates, A^-1 is (I - beta S) diag(1 / eta) (I - S) for the S that
        moves rows down by one, as A = M_eta M_beta.
        """
        momentum, rates = self._momentum_and_rates()
        bands = np.zeros((self.num_rounds, 3))
        bands[:, 0] = 1.0 / rates
        bands[1:, 1] = -momentum / rates[:-1] - 1.0 / rates[1:]
        bands[2:, 2] = momentum / rates[1:-1]
        return bands[:, : min(self.num_rounds, 3 if momentum else 2)]

    def largest_entry(self) -> float:
        """Returns the largest magnitude of the entries of A, which is in the last row.

        Example:
          >>> import mf_aggregators as mfa
          >>> mfa.workloads.Workload("momentum_sgd", 3, 0.5).largest_entry()
          1.75
        """
        momentum, rates = self._momentum_and_rates()
        return float(np.max(scipy.signal.lfilter([1.0], [1.0, -momentum], rates[::-1])))

    def _momentum_and_rates(self) -> tuple[float, FloatArray]:
        """The momentum, 0 for the prefix sum, and the (n,) learning rates."""
        rates = np.ones(self.num_rounds) if self.learning_rates is None else self.learning_rates
        return 0.0 if self.name == "prefix_sum" else self.momentum, np.asarray(rates)

    def to_dict(self) -> dict[str, object]:
        """Returns the workload as a JSON object: its name and parameters.

        Example:
          >>> import mf_aggregators as mfa
          >>> mfa.workloads.Workload("momentum_sgd", 3, 0.5).to_dict()
          {'name': 'momentum_sgd', 'momentum': 0.5, 'learning_rates': None}
        """
        if self.name == "prefix_sum":
            return {"name": self.name}
        rates = None if self.learning_rates is None else list(self.learning_rates)
        return {"name": self.name, "momentum": self.momentum, "learning_rates": rates}

    @classmethod
    def described(cls, description: Mapping[str, object], num_rounds: int) -> "Workload":
        """Returns the workload for a description in a checkpoint or from a command's flags.

        Args:
          description: ``{"name": "prefix_sum"}``, or ``{"name": "momentum_sgd"}`` with any of
            ``momentum`` and ``learning_rates`` (a list or None).
          num_rounds: The number of rounds n.

        Returns:
          The workload.

        Raises:
          ValueError: If the description names no workload, or has unknown parameters.
        """
        parameters = dict(description)
        name, rates = parameters.pop("name", None), parameters.get("learning_rates")
        unknown = parameters.keys() - {"momentum", "learning_rates"}
        if unknown:
            raise ValueError(
                f"the workload {name} with {', '.join(sorted(unknown))} is unknown here: give "
                f"another one ({' or '.join(f'--workload={each}' for each in _NAMES)})."
            )
        try:
            if rates is not None:
                if not isinstance(rates, Iterable):
                    raise TypeError("its learning rates are no list")
                parameters["learning_rates"] = tuple(map(float, rates))
            # The constructor checks its arguments.
            return cls(name, num_rounds, **parameters)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"workload {name}: {error}.") from None

    def fingerprint(self) -> str:
        """Returns a fingerprint of the workload, which does not depend on its scale.

        Returns:
          Sixteen hexadecimal digits of a hash, in single precision, of A / max |A| for up to 4,096
          rounds, and otherwise of the bands of its inverse, if it has few.
        """
        return _fingerprint(self)

    def has_fingerprint(self, known: object) -> bool:
        """Returns whether a fingerprint is that of the workload, by this or an earlier version.

        Args:
          known: The fingerprint, or any value that a file has instead.
        """
        if known == self.fingerprint():
            return True
        # Version 0.5.0 hashed matrices of any size.
        is_earlier = (
            isinstance(known, str)
            and _MOST_ROUNDS_OF_A_HASHED_MATRIX < self.num_rounds <= _MOST_ROUNDS_OF_A_MATRIX
        )
        return is_earlier and known == _digest(self.matrix())


_MOST_ROUNDS_OF_A_MATRIX = 1 << 15
_MOST_ROUNDS_OF_A_HASHED_MATRIX = 4096
# An inverse with more bands than this counts as dense.
_MOST_INVERSE_BANDS = 8
_NEGLIGIBLE = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class _MatrixWorkload:
    """A workload that is an array, with some methods of :class:`Workload`.

    Attributes:
      entries: A, (n, n) float64, lower triangular and of full rank.
    """

    entries: FloatArray

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return len(self.entries)

    @property
    def is_prefix_sum(self) -> bool:
        """False, because an array is not a named workload."""
        return False

    def matrix(self) -> FloatArray:
        """Returns the array itself."""
        return self.entries

    def largest_entry(self) -> float:
        """Returns the largest magnitude of the entries of A."""
        return float(np.max(np.abs(self.entries)))

    def fingerprint(self) -> str:
        """Returns a fingerprint of the workload up to a factor: see ``Workload.fingerprint``."""
        return _fingerprint(self)

    def inverse_bands(self) -> FloatArray | None:
        """Returns the bands of A^-1, if it has few.

        Returns:
          (n, w) with ``bands[i, t] = A^-1[i, i - t]``, w at most 8; None if there are more. A times
          the matrix of these bands is the identity to within 1e-12 of the sums of magnitudes that
          its entries come from.
        """
        workload = self.entries
        num_rounds = len(workload)
        width = min(_MOST_INVERSE_BANDS + 1, num_rounds)
        # Column j of A^-1 by substitution: by_column[t, j] = A^-1[j + t, j].
        by_column = np.zeros((width, num_rounds))
        with np.errstate(all="ignore"):
            diagonal = np.diagonal(workload)
            by_column[0] = 1.0 / diagonal
            for t in range(1, width):
                known = sum(
                    np.diagonal(workload, s - t)[s:] * by_column[s, : num_rounds - t]
                    for s in range(t)
                )
                by_column[t, : num_rounds - t] = -known / diagonal[t:]
            magnitudes = np.max(np.abs(by_column), axis=1)
            needed = np.flatnonzero(magnitudes > _NEGLIGIBLE * np.max(magnitudes))
            if not len(needed) or needed[-1] >= _MOST_INVERSE_BANDS:
                return None
            width = int(needed[-1]) + 1
            if not _are_inverse(by_column[:width], workload):
                # The last bands may be below the threshold and still be needed.
                width = min(_MOST_INVERSE_BANDS, num_rounds)
                if not _are_inverse(by_column[:width], workload):
                    return None
        bands = np.zeros((num_rounds, width))
        for t in range(width):
            bands[t:, t] = by_column[t, : num_rounds - t]
        return bands


# The type of a checked workload: it has ``num_rounds``, ``is_prefix_sum``, ``matrix``,
# ``inverse_bands``, ``largest_entry`` and ``fingerprint``.
AnyWorkload: TypeAlias = Workload | _MatrixWorkload


def checked(workload: object) -> AnyWorkload:
    """Checks an argument, and returns the workload that it means.

    Args:
      workload: An int n for the prefix sum of n rounds, a :class:`Workload`, or an (n, n) array.

    Returns:
      The workload; for an array, one without a name.

    Raises:
      ValueError: If an int is not above zero, or an array is not square, finite, lower triangular
        and of full rank.
      MemoryError: If there is too little memory for it.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.workloads.checked(3) == mfa.workloads.Workload("prefix_sum", 3)
      True
    """
    if isinstance(workload, Workload | _MatrixWorkload):
        return workload
    if isinstance(workload, (int, np.integer)):
        return Workload("prefix_sum", numbers.positive_integer(workload, "num_rounds"))
    try:
        if not isinstance(workload, Sized):
            raise TypeError
        num_rounds = len(workload)
    except TypeError:
        raise ValueError(
            "the workload must be an int, a workloads.Workload or a square matrix, found "
            f"{numbers.shown(workload)}."
        ) from None
    inputs.check_rounds(num_rounds, 8 * num_rounds, "the dense workload")
    return _MatrixWorkload(inputs.lower_triangular(workload, "the workload"))


def _are_inverse(by_column: FloatArray, workload: FloatArray) -> bool:
    """Whether A times the matrix of these bands, column by column, is the identity."""
    num_rounds = len(workload)
    product, scale = np.zeros_like(workload), np.zeros_like(workload)
    for t, column in enumerate(by_column):
        term = workload[:, t:] * column[: num_rounds - t]
        product[:, : num_rounds - t] += term
        scale[:, : num_rounds - t] += np.abs(term)
    product[np.diag_indices(num_rounds)] -= 1.0
    return bool(np.all(np.abs(product) <= _NEGLIGIBLE * scale))


def _fingerprint(workload: AnyWorkload) -> str:
    if workload.num_rounds > _MOST_ROUNDS_OF_A_HASHED_MATRIX:
        bands = workload.inverse_bands()
        if bands is not None:
            return _digest(bands)
    return _digest(workload.matrix())


def _digest(entries: FloatArray) -> str:
    scaled = np.ascontiguousarray(entries / np.max(np.abs(entries)), dtype=np.float32)
    return hashlib.sha256(scaled.tobytes()).hexdigest()[:16]


def _checked_rates(learning_rates: object, num_rounds: int) -> FloatArray:
    rates = numbers.real_array(learning_rates, "learning_rates")
    if rates.shape != (num_rounds,):
        raise ValueError(
            f"learning_rates must hold one rate for each of the {num_rounds} rounds, "
            f"found an array of shape {rates.shape}."
        )
    if not np.all(np.isfinite(rates)) or np.any(rates <= 0.0):
        raise ValueError("learning_rates must be finite and above zero.")
    # Squares of their ratios are the errors of rounds.
    if np.max(rates) * _LEAST_RATIO_OF_RATES > np.min(rates):
        raise ValueError(
            "learning_rates must be within a factor of 1e100 of one another, found "
            f"{np.min(rates):g} and {np.max(rates):g}."
        )
    return rates
