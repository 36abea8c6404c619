"""How solvers say that they have, or have not, reached their target."""

import warnings
from typing import Any

import numpy as np

# Relative change of the squared error that the remaining slope may stand for.
_FLAT = 1e-2


class NotConvergedWarning(UserWarning):
    """A solver stopped before its target; what it returns is its best, with its true gap."""


class Converged(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised by an objective to end a SciPy optimiser once the target is reached."""


def warn_unless_reached(gap: float, target: float, evaluations: int) -> None:
    """Warns the caller of a solver whose certified relative gap is above its target.

    Args:
      gap: The certified relative gap of what is returned.
      target: The gap that was asked for.
      evaluations: How many evaluations the solver made.
    """
    # Written so that NaN is no success.
    if not gap <= target:
        warnings.warn(
            f"the optimiser stopped at a certified relative gap of {gap:.1e}, not the "
            f"{target:.1e} asked for, after {evaluations} evaluations; the factorization states "
            "its gap.",
            NotConvergedWarning,
            stacklevel=3,
        )


def warn_unless_stationary(result: Any, scale: Any = 1.0) -> None:
    """Warns the caller of a solver whose SciPy optimiser stopped before its gradient vanished.

    Args:
      result: What ``scipy.optimize.minimize`` returned for an objective in logarithms.
      scale: How much the variables, one or all, may matter: their magnitudes; zero for
        those that a bound holds; one for logarithms.
    """
    # The objective is a logarithm: how much of it the remaining slope may stand for.
    remaining = float(np.linalg.norm(result.jac * scale))
    # SciPy's L-BFGS-B: 1 for its limits on iterations and evaluations.
    if result.status == 1 or not remaining < _FLAT:
        warnings.warn(
            f"the optimiser stopped before it converged, after {result.nfev} evaluations "
            f"({result.message}); the factorization is the best that it found.",
            NotConvergedWarning,
            stacklevel=3,
        )
