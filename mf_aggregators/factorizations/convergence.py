"""How solvers say that they have, or have not, reached their target."""

import warnings


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
