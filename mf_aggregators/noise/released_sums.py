"""Reads the record of released sums in a noise directory, of either aggregator.

Below ``released`` there is a folder for each stream of noise. For each round it has a file
(``kernel.release``) or a folder with an empty file (``tff.release_record``). Both tell a keyed
digest of the sum, and the digest of the claim that the noise is of.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable

from mf_aggregators.kernel.numbers import Error

_SPENT = "spent"
# Keyed digests of NumPy's aggregator are of 32 bytes, and those of graphs are two integers.
_LINE = re.compile(
    r"(0|[1-9][0-9]{0,17}) (?:spent|(?:[0-9a-f]{64}|-?[0-9]+\.-?[0-9]+\.)([0-9a-f]{64}))\n"
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
      RecordError: If the text is none that :func:`read` returns.
    """

    text: str
    of_rounds: dict[int, str] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        found: dict[int, str] = {}
        for line in self.text.splitlines(keepends=True):
            match = _LINE.fullmatch(line)
            if match is None or int(match[1]) <= max(found, default=-1):
                raise RecordError(f"the record of sums is broken at {line[:80]!r}.")
            found[int(match[1])] = match[2] or ""
        object.__setattr__(self, "of_rounds", found)

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


def name_of_stream(stream: Iterable[int]) -> str:
    """Returns the name of a stream's folder.

    Args:
      stream: The two integers that name it.
    """
    return "stream-" + "-".join(str(int(number)) for number in stream)


def streams(directory: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the streams of noise in a directory: one for each run.

    Args:
      directory: The noise directory.
    """
    return sorted(path.name for path in (pathlib.Path(directory) / "released").glob("stream-*"))


def read(directory: str | os.PathLike[str], stream: str) -> ReleasedSums:
    """Reads the record of a stream.

    Args:
      directory: The noise directory.
      stream: The name of the stream, as :func:`streams` and ``ReleaseState.stream_name`` have it.

    Raises:
      RecordError: If a round has two digests, or one that no aggregator of this version writes.
      OSError: If a file cannot be read.
    """
    lines: dict[int, str] = {}
    for path in (pathlib.Path(directory) / "released" / stream).glob("round-*"):
        names = os.listdir(path) if path.is_dir() else [_text(path.read_bytes())]
        # A spent round may have had a sum.
        name = _SPENT if _SPENT in names else " ".join(sorted(names))
        number = path.name.removeprefix("round-")
        if number.isdecimal():
            lines[int(number)] = f"{number} {name}\n"
    return ReleasedSums("".join(lines[i] for i in sorted(lines)))


def _text(content: bytes) -> str:
    return _SPENT if content == _SPENT.encode() else content.hex()
