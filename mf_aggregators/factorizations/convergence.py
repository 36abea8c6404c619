"""How solvers say that they have, or have not, reached their target."""

import warnings
from typing import Any

import numpy as np


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
    if gap > target:
        warnings.warn(
            f"the optimiser stopped at a certified relative gap of {gap:.1e}, not the "
            f"{target:.1e} asked for, after {evaluations} evaluations; the factorization states "
            "its gap.",
            NotConvergedWarning,
            stacklevel=3,
        )


def warn_unless_stationary(result: Any) -> None:
    """Warns the caller of a solver whose SciPy optimiser ran out of evaluations.

    Args:
      result: What ``scipy.optimize.minimize`` returned for an objective in logarithms.
    """
    # SciPy's L-BFGS-B: 0 for convergence, 1 for its limits, 2 for a line search that finds
    # nothing better, which near the optimum is rounding.
    if result.status == 1 or (result.status == 2 and not _is_flat(result)):
        warnings.warn(
            f"the optimiser stopped before it converged, after {result.nfev} evaluations "
            f"({result.message}); the factorization is the best that it found.",
            NotConvergedWarning,
            stacklevel=3,
        )


def _is_flat(result: Any) -> bool:
    # The objective is a logarithm: a step that matters would change it by more than this.
    return float(np.linalg.norm(result.jac) * np.linalg.norm(result.x)) < _FLAT


# Relative change of the squared error that the remaining gradient may stand for.
_FLAT = 1e-4
