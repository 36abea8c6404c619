"""Which package a class is of: this library, or another one, whose name statements then have."""

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


def other_package(kind: type) -> Package | None:
    """Returns the package that a class is of; None for a class of this library.

    Args:
      kind: The class.
    """
    module = kind.__module__.partition(".")[0]
    return None if module == __name__.partition(".")[0] else _package_of(module)


@functools.cache
def _package_of(module: str) -> Package:
    # A namespace may be of several: the first one in the order of names.
    distributions = sorted(importlib.metadata.packages_distributions().get(module, ()))
    if not distributions:
        return Package(module, None)
    return Package(distributions[0], importlib.metadata.version(distributions[0]))
