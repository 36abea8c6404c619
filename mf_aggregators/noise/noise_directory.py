"""Private directories for rows of noise and the record of released sums, and a reader of records.

:func:`check_private` also checks other files that hold a seed or tell who was drawn.

Below ``released`` there is a folder for each stream of noise. For each round it has a file
(``kernel.release``) or a folder with an empty file (``tff.release_record``). Both tell a keyed
digest of the sum, and the digest of the claim that the noise is of.
"""

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shutil
import stat
import tempfile

from mf_aggregators.kernel.numbers import Error

_SPARE_BYTES = 64 << 20
_PATTERN_CHARACTERS = "*?[]\\"
_SPENT = "spent"
# Keyed digests of NumPy's aggregator are of 32 bytes, and those of graphs are two integers.
_LINE = re.compile(
    r"(0|[1-9][0-9]{0,17}) (?:spent|(?:[0-9a-f]{64}|-?[0-9]+\.-?[0-9]+\.)([0-9a-f]{64}))\n"
)


def open_directory(path: str | os.PathLike[str] | None, needed_bytes: int = 0) -> pathlib.Path:
    """Returns a directory that only its owner can use, made if it is missing.

    Args:
      path: The directory; None for the temporary one of this process, which is deleted when Python
        ends.
      needed_bytes: What the rows of noise in it need at most. What is in it counts as room.

    Returns:
      Its absolute path.

    Raises:
      ValueError: If it is no directory, cannot be made, has too little room, others may use it
        (whoever reads the noise can subtract it from what was released), or its path has
        characters that graphs take for a pattern.
    """
    if path is None:
        path = _temporary_directory(os.getpid())
    directory = pathlib.Path(os.path.abspath(path))
    if any(character in os.fspath(directory) for character in _PATTERN_CHARACTERS):
        raise ValueError(
            f"noise_directory {directory} has one of the characters {_PATTERN_CHARACTERS}, which "
            "paths of noise files must not have: choose another one."
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            # Some directories (such as /proc) never accept files.
            pass
    except OSError as error:
        raise ValueError(
            f"noise_directory {directory} cannot be used: {error.strerror}. Choose another one."
        ) from error
    check_private(directory, "noise_directory")
    if needed_bytes:
        _check_room(directory, needed_bytes)
    return directory


@functools.cache
def _temporary_directory(owner: int) -> str:
    """The temporary directory of a process: all of its aggregators share one record of releases."""
    path = tempfile.mkdtemp(prefix="mf_aggregators-noise-")
    atexit.register(_delete, path, owner)
    return path


def check_private(
    path: str | os.PathLike[str], name: str, harm: str = "could subtract the noise"
) -> None:
    """Checks that a file or directory is its owner's alone, and the owner is this user.

    Args:
      path: The file or directory, which is there.
      name: The name of the file or directory in messages.
      harm: The harm that others could do with it, for messages.

    Raises:
      ValueError: If others may use it.
      OSError: If its owner and mode cannot be read.
    """
    status = os.stat(path)
    is_foreign = status.st_uid != os.geteuid()
    if is_foreign or stat.S_IMODE(status.st_mode) & 0o077:
        owner = f"chown {os.geteuid()} {path} and " if is_foreign else ""
        mode = 700 if stat.S_ISDIR(status.st_mode) else 600
        raise ValueError(
            f"{name} {path} is open to others, who {harm}: {owner}chmod {mode} {path} first."
        )


def _delete(directory: str, owner: int) -> None:
    # A forked child that ends must not take its parent's files away.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def _check_room(directory: pathlib.Path, needed_bytes: int) -> None:
    """Raises ValueError if noise rows would not find room in a directory."""
    free = shutil.disk_usage(directory).free - _SPARE_BYTES
    if free >= needed_bytes:
        return
    present = 0
    for file in directory.rglob("*"):
        # Another process may delete its files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            present += file.stat().st_size if file.is_file() else 0
    if free + present < needed_bytes:
        raise ValueError(
            f"the noise rows need {needed_bytes / 1e9:.1f} GB in {directory}, which has "
            f"{max(0, free) / 1e9:.1f} GB left: pass a noise_directory on a larger disk, or use a "
            "mechanism with fewer bands."
        )


class RecordError(Error, ValueError):
    """A record that cannot be read, or is not that of the run; the message says why."""


@dataclasses.dataclass(frozen=True)
class ReleasedSums:
    """The record of one stream of noise, which tells nothing of sums without the seed.

    Attributes:
      text: For each round a line: the round from 0, a space, and the digests, or ``spent``.
      of_rounds: For each round, the digest of the claim of its noise in hexadecimal; empty for a
        round that was spent.

    Raises:
      RecordError: If the text is none that :meth:`read` returns.
    """

    text: str
    of_rounds: dict[int, str] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        found: dict[int, str] = {}
        for line in self.text.splitlines(keepends=True):
            match = _LINE.fullmatch(line)
            if match is None or int(match[1]) <= max(found, default=-1):
                found_in = f"is broken, or of mf_aggregators 2.0.0 or older, at {line[:80]!r}"
                raise RecordError(f"the record of sums {found_in}.")
            found[int(match[1])] = match[2] or ""
        object.__setattr__(self, "of_rounds", found)

    @staticmethod
    def streams(directory: str | os.PathLike[str]) -> list[str]:
        """Returns the names of the streams of noise in a directory: one for each run.

        Args:
          directory: The noise directory.
        """
        return sorted(path.name for path in (pathlib.Path(directory) / "released").glob("stream-*"))

    @classmethod
    def read(cls, directory: str | os.PathLike[str], stream: str) -> "ReleasedSums":
        """Reads the record of a stream.

        Args:
          directory: The noise directory.
          stream: The name of the stream, as :func:`streams` and ``ReleaseState.stream_name`` have
            it.

        Raises:
          RecordError: If a round has two digests, or one that no aggregator of this version writes.
          OSError: If a file cannot be read.
        """
        lines: dict[int, str] = {}
        for path in (pathlib.Path(directory) / "released" / stream).glob("round-*"):
            names = os.listdir(path) if path.is_dir() else [_text_of(path.read_bytes())]
            # A spent round may have had a sum.
            name = _SPENT if _SPENT in names else " ".join(sorted(names))
            number = path.name.removeprefix("round-")
            if number.isdecimal():
                lines[int(number)] = f"{number} {name}\n"
        return cls("".join(lines[i] for i in sorted(lines)))

    @property
    def num_sums(self) -> int:
        """The number of sums that noise was added to."""
        return sum(map(bool, self.of_rounds.values()))

    @property
    def num_rounds(self) -> int:
        """The number of rounds up to the last one of the record."""
        return max(self.of_rounds, default=-1) + 1

    @property
    def sha256(self) -> str:
        """The SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _text_of(content: bytes) -> str:
    return _SPENT if content == _SPENT.encode() else content.hex()
