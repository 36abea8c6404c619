"""How solvers say that they have, or have not, reached their target."""


class NotConvergedWarning(UserWarning):
    """A solver stopped before its target; what it returns is its best, with its true gap."""


class Converged(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised by an objective to end a SciPy optimiser once the target is reached."""
