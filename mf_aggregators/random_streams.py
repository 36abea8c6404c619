"""Random generators that are functions of a seed and coordinates alone, and files of seeds."""

import enum
import json
import os
import pathlib
import secrets

from mf_aggregators import atomic_files, inputs
from mf_aggregators.kernel.cohorts import BATCHES
from mf_aggregators.kernel.draws import generator_of as generator_of
from mf_aggregators.kernel.numbers import Error

# NumPy's seed sequences mix as many bits, and Philox has a key of as many.
_SEED_BITS = 128


@enum.unique
class Stream(enum.IntEnum):
    """The first coordinate of every random stream of a run's seed, see :func:`generator_of`.

    Cohorts alone have none of these: theirs is the round, and nothing follows it. All other
    streams have at least one more coordinate, so that no two are the same.

    Attributes:
      EXAMPLES: The order of a client's examples: round, name of the client.
      EVALUATION: The sentences of a split that models are evaluated on: the split's number.
      BATCHES: What a data sampler draws: the kind of draw and its coordinates.
      DEVICES: What a population of devices draws: the kind of draw and its coordinates.
      CANARIES: The coins of canary clients, 0, and the coordinates that they move, 1.
    """

    EXAMPLES = 1
    EVALUATION = 2
    BATCHES = BATCHES
    DEVICES = 4
    CANARIES = 5


class _SeedError(Error, ValueError):
    """A seed that cannot be read; the message names the file and the reason."""


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
    """Writes a seed, whole or not at all; its directory must be as secret as the seed.

    Args:
      seed: A non-negative integer.
      path: The file: JSON, with the seed in hexadecimal digits.

    Raises:
      OSError: If it cannot be written.
    """
    atomic_files.write(pathlib.Path(path), json.dumps({"seed": f"{seed:#x}"}) + "\n")


def load_seed(path: str | os.PathLike[str]) -> int:
    """Reads a seed from a file of :func:`save_seed`.

    Args:
      path: The file.

    Returns:
      The seed.

    Raises:
      ValueError: If the file is missing, or holds no seed.
    """
    try:
        seed = int(inputs.parsed_json(pathlib.Path(path).read_text(encoding="utf-8"))["seed"], 16)
    except OSError as error:
        raise _SeedError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _SeedError(
            f"{path} holds no seed of a data sampler: a run keeps its own in "
            "checkpoints/sampling_seed.json."
        ) from error
    if seed < 0:
        raise _SeedError(f"{path} holds a negative seed.")
    return seed
