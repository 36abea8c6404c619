"""Finds the distribution that defines a class, which statements then name."""

import dataclasses
import functools
import importlib.metadata


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that is not this library.

    Attributes:
      name: Of the distribution, as it is installed; of the outermost module where none is known.
      version: Of the distribution; None where none is known.
    """

    name: str
    version: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.version or 'of unknown version'}"


@functools.cache
def package_of(kind: type) -> Package:
    """Returns the package that a class is of.

    Args:
      kind: The class.
    """
    module = kind.__module__.partition(".")[0]
    # A namespace may be of several: the first one in the order of names.
    distributions = sorted(importlib.metadata.packages_distributions().get(module, ()))
    if not distributions:
        return Package(module, None)
    return Package(distributions[0], importlib.metadata.version(distributions[0]))
