"""Random generators that depend only on a seed and coordinates, and files with seeds."""

import enum
import json
import os
import pathlib
import secrets

from mf_aggregators import atomic_files, inputs
from mf_aggregators.kernel.cohorts import BATCHES
from mf_aggregators.kernel.draws import generator_of as generator_of
from mf_aggregators.kernel.numbers import Error

# The number of bits of a seed: NumPy's seed sequences mix, and Philox's key has, as many.
_SEED_BITS = 128


@enum.unique
class Stream(enum.IntEnum):
    """The first coordinate of every random stream of a run's seed, see :func:`generator_of`.

    Only streams of cohorts do not begin with one of these: they have the round as their only
    coordinate. All other streams have at least two coordinates, so no two streams are the same.

    Attributes:
      EXAMPLES: The order of a client's examples: round, name of the client.
      EVALUATION: The sentences of a split on which models are evaluated: the split's number.
      BATCHES: The draws of a data sampler: the kind of draw and its coordinates.
      DEVICES: The draws of a population of devices: the kind of draw and its coordinates.
      CANARIES: The coins of canary clients (0), and the coordinates that they move (1).
    """

    EXAMPLES = 1
    EVALUATION = 2
    BATCHES = BATCHES
    DEVICES = 4
    CANARIES = 5


class _SeedError(Error, ValueError):
    """A seed cannot be read; the message names the file and the reason."""


def secret_seed() -> int:
    """Returns 128 fresh secret bits from the operating system.

    Use it when a sampler needs a seed: one for each run.

    Example:
      >>> import mf_aggregators as mfa
      >>> 0 <= mfa.participation.secret_seed() < 2**128
      True
    """
    return secrets.randbits(_SEED_BITS)


def save_seed(seed: int, path: str | os.PathLike[str]) -> None:
    """Writes a seed atomically; the file's directory must be as secret as the seed.

    Args:
      seed: A non-negative integer.
      path: The file: JSON, with the seed in hexadecimal digits.

    Raises:
      OSError: If it cannot be written.
    """
    atomic_files.write(pathlib.Path(path), json.dumps({"seed": f"{seed:#x}"}) + "\n")


def load_seed(path: str | os.PathLike[str]) -> int:
    """Reads a seed that :func:`save_seed` wrote.

    Args:
      path: The file.

    Returns:
      The seed.

    Raises:
      ValueError: If the file is missing, or has no seed.
    """
    try:
        found = inputs.parsed_json(pathlib.Path(path).read_text(encoding="utf-8"))
        seed = int(inputs.part(found, str, "seed"), 16)
    except OSError as error:
        raise _SeedError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _SeedError(
            f"{path} has no seed of a data sampler: give the checkpoints/sampling_seed.json of a "
            "run."
        ) from error
    if seed < 0:
        raise _SeedError(f"{path} has a negative seed.")
    return seed
