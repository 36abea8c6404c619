"""The secret seed of a run's data sampler, as a file."""

import json
import os
import pathlib
import secrets

from mf_aggregators import atomic_files, validation

# NumPy's seed sequences mix as many bits, and Philox has a key of as many.
_SEED_BITS = 128


class SeedError(ValueError):
    """A seed that cannot be read; the message names the file and the reason."""


def secret_seed() -> int:
    """Returns 128 fresh secret bits from the operating system."""
    return secrets.randbits(_SEED_BITS)


def save(seed: int, path: str | os.PathLike[str]) -> None:
    """Writes a seed, whole or not at all; its directory must be as secret as the seed.

    Args:
      seed: A non-negative integer.
      path: The file: JSON, with the seed in hexadecimal digits.

    Raises:
      OSError: If it cannot be written.
    """
    atomic_files.write_text(pathlib.Path(path), json.dumps({"seed": f"{seed:#x}"}) + "\n")


def load(path: str | os.PathLike[str]) -> int:
    """Reads what :func:`save` wrote.

    Args:
      path: The file.

    Returns:
      The seed.

    Raises:
      SeedError: If the file is missing, or holds no seed.
    """
    try:
        seed = int(
            validation.parsed_json(pathlib.Path(path).read_text(encoding="utf-8"))["seed"], 16
        )
    except OSError as error:
        raise SeedError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise SeedError(
            f"{path} holds no seed of a data sampler: a run keeps its own in "
            "checkpoints/sampling_seed.json."
        ) from error
    if seed < 0:
        raise SeedError(f"{path} holds a negative seed.")
    return seed
