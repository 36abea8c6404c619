"""Where the noise of earlier rounds is kept, its costs, and private directories for it.

The noise of earlier rounds can be kept in the state that TFF passes between its processes in each
round, which is cheap for some megabytes and fails for some gigabytes. Or rows of noise are computed
in blocks (``kernel.rows``) and kept in files. Rows of Z are not kept, but drawn again from the
seed.

Private directories contain rows of noise and the record of released sums. :func:`check_private`
also checks other files with a seed or with secret draws.

The folder ``released`` has a folder for each run (*stream* of noise). For each round, this folder
has a file (``kernel.release``) or a folder with an empty file (``tff.release_record``). Both
contain a keyed digest of the sum, and the digest of the claim of the noise.
"""

import atexit
import contextlib
import dataclasses
import enum
import functools
import hashlib
import math
import os
import pathlib
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.kernel.rows import Blocks, NoiseRecursion, WindowNoise

_SPARE_BYTES = 64 << 20
_PATTERN_CHARACTERS = "*?[]\\"
_SPENT = "spent"
# A line of a record. Keyed digests of the NumPy aggregator have 32 bytes; those of graphs are two
# integers.
_LINE = re.compile(
    r"(0|[1-9][0-9]{0,17}) (?:spent|(?:[0-9a-f]{64}|-?[0-9]+\.-?[0-9]+\.)([0-9a-f]{64}))\n"
)

# The largest size of a noising matrix's tables that are put into a graph as constants.
_LARGEST_CONSTANT_IN_BYTES = 8 << 20
_MOST_DENSE_ROUNDS = 512
# TFF passes a state up to this size between its processes in a fraction of a second.
_CHEAP_STATE_IN_BYTES = 20_000_000
# Larger states are refused: above 2^31 bytes TFF's worker fails without an error, and rounds take
# minutes long before that.
_LARGEST_STATE_IN_BYTES = 1 << 30

# Costs of the parts of a row, measured by benchmarks/noise.py on two cores of a server.
_SECONDS_PER_NORMAL = 70e-9
_SECONDS_PER_BYTE_WRITTEN = 1.4e-9
_SECONDS_PER_BYTE_READ = 0.4e-9
_SECONDS_PER_PRODUCT = 2e-11
_SECONDS_PER_STATE_BYTE = 1e-8
_SECONDS_PER_BYTE_OF_LARGE_STATE = 4e-8
_SECONDS_PER_FILE_OPERATION = 5e-5
# How much longer a round takes with files than without, for models of any size.
_SECONDS_PER_ROUND_WITH_FILES = 4e-3

# State vectors are kept for four blocks: the block in use, the next one and two earlier ones.
STATES_KEPT = 4
# The bytes of a number in a kept row; and of a float in state vectors and unfinished rows.
_BYTES_OF_ROW = 4
_BYTES_OF_FLOAT = 8
# The most bytes of a noise file's header.
_BYTES_OF_HEADERS = 128


def _mean_rows_of_z_per_round(recursion: NoiseRecursion) -> float:
    """Returns how many rows of Z a row of noise draws on average, if rows are made one by one.

    Args:
      recursion: The noising matrix.
    """
    most, rounds = recursion.rows_of_z_per_round, recursion.num_rounds
    drawn = most - most * (most - 1) / (2 * rounds) if most <= rounds else (rounds + 1) / 2
    # With accumulators, also the row that leaves the window.
    has_accumulators = isinstance(recursion, WindowNoise) and recursion.num_state_vectors > 0
    return drawn + int(has_accumulators)


def _kept_bytes(recursion: NoiseRecursion, num_parameters: int) -> int:
    """The bytes of noise that are needed between rounds."""
    rows, vectors = recursion.num_earlier_rows, recursion.num_state_vectors
    return (_BYTES_OF_ROW * rows + _BYTES_OF_FLOAT * vectors) * num_parameters


def _fits_in_graph(recursion: NoiseRecursion) -> bool:
    """Returns whether the noising matrix's tables are small enough to be constants of a graph.

    Args:
      recursion: The noising matrix.
    """
    is_wide = recursion.rows_of_z_per_round > _MOST_DENSE_ROUNDS
    if isinstance(recursion, WindowNoise) and is_wide and len(recursion.window) > 1:
        return False
    tables = [value for value in vars(recursion).values() if isinstance(value, np.ndarray)]
    return sum(table.nbytes for table in tables) <= _LARGEST_CONSTANT_IN_BYTES


class NoiseStorage(enum.Enum):
    """Where the noise of earlier rounds is kept: in the state, on disk, or chosen by cost.

    Use it when you set the argument ``noise_storage``, which takes its values.

    Example:
      >>> import mf_aggregators as mfa
      >>> [each.value for each in mfa.noise.NoiseStorage]
      ['auto', 'state', 'disk']
    """

    AUTO = "auto"
    STATE = "state"
    DISK = "disk"


@dataclasses.dataclass(frozen=True)
class NoiseCost:
    """The cost of the noise of a run.

    Attributes:
      storage: STATE or DISK.
      kept_bytes: The bytes of noise of earlier rounds that are kept between rounds, in either
        place, for all parameters.
      state_bytes: The bytes that TFF passes between its processes in every round.
      disk_bytes: The most bytes of files.
      memory_bytes: About the temporary memory of a round.
      seconds_per_round: An estimate of the seconds for a row of noise, on average over all rounds,
        on two cores.
    """

    storage: NoiseStorage
    kept_bytes: int
    state_bytes: int
    disk_bytes: int
    memory_bytes: int
    seconds_per_round: float

    @staticmethod
    def rows_kept(blocks: Blocks) -> int:
        """Returns the number of rows in files: those of the block in use and of the next one."""
        largest = _largest_block(blocks)
        return max(largest, blocks.recursion.num_earlier_rows) + largest

    @classmethod
    def of_run(
        cls,
        horizons: Sequence[NoiseRecursion],
        num_parameters: int,
        storage: NoiseStorage = NoiseStorage.AUTO,
    ) -> "NoiseCost":
        """Returns the cost of the noise of a run in TensorFlow Federated.

        Args:
          horizons: The noise recursions before each extension of the run and after it, in order.
          num_parameters: d, the entries of a row.
          storage: The requested storage; AUTO for the faster one of those that are possible, for
            the first horizon.

        Raises:
          ValueError: If the state would be too large to be passed between TFF's processes, or the
            matrix too large for a graph.
        """
        recursion = horizons[-1]
        if storage is NoiseStorage.AUTO:
            found = _choose(horizons[0], num_parameters)
            if len(horizons) == 1:
                return found
            # An extended run keeps its storage.
            storage = found.storage
        found = _cost(recursion, num_parameters, storage)
        if found.state_bytes > _LARGEST_STATE_IN_BYTES:
            raise ValueError(
                f"the noise of earlier rounds would need {found.state_bytes / 2**30:.1f} GiB of "
                f"server state, and at most {_LARGEST_STATE_IN_BYTES / 2**30:.1f} GiB can be "
                "passed between TFF's processes: use noise_storage='disk', fewer bands or a "
                "smaller model."
            )
        if storage is NoiseStorage.STATE and not _fits_in_graph(recursion):
            raise ValueError(
                "this factorization's matrix is too large for a graph: use noise_storage='disk'."
            )
        return found


def _cost(recursion: NoiseRecursion, num_parameters: int, storage: NoiseStorage) -> NoiseCost:
    """Returns the cost of the noise of a run with one storage.

    Args:
      recursion: The mechanism's noising matrix.
      num_parameters: d, the entries of a row.
      storage: STATE or DISK.

    Returns:
      The cost.

    Raises:
      ValueError: If the storage is AUTO or there is no parameter.
    """
    numbers.positive_integer(num_parameters, "num_parameters")
    row = num_parameters * _BYTES_OF_ROW
    kept = recursion.num_earlier_rows + recursion.num_state_vectors
    if storage is NoiseStorage.STATE:
        drawn = _mean_rows_of_z_per_round(recursion)
        state = _kept_bytes(recursion, _filled_up(num_parameters))
        seconds = drawn * num_parameters * _SECONDS_PER_NORMAL
        seconds += (kept + drawn) * num_parameters * _SECONDS_PER_PRODUCT
        is_cheap = state <= _CHEAP_STATE_IN_BYTES
        seconds += state * (
            _SECONDS_PER_STATE_BYTE if is_cheap else _SECONDS_PER_BYTE_OF_LARGE_STATE
        )
        of_all = _kept_bytes(recursion, num_parameters)
        return NoiseCost(storage, of_all, state, 0, 3 * (state + row), seconds)
    if storage is NoiseStorage.DISK:
        return _disk_cost(recursion, num_parameters)
    raise ValueError("the storage must be state or disk.")


def _choose(recursion: NoiseRecursion, num_parameters: int) -> NoiseCost:
    """Returns the cost of the faster storage, of those that are possible.

    Args:
      recursion: The mechanism's noising matrix.
      num_parameters: d, the entries of a row.

    Returns:
      The cost of the choice; files are chosen if the state would be too large to be cheap.

    Raises:
      ValueError: If there is no parameter.
    """
    of_state = _cost(recursion, num_parameters, NoiseStorage.STATE)
    of_disk = _cost(recursion, num_parameters, NoiseStorage.DISK)
    if of_state.state_bytes > _CHEAP_STATE_IN_BYTES or not _fits_in_graph(recursion):
        return of_disk
    return min(of_state, of_disk, key=lambda each: each.seconds_per_round)


def _largest_block(blocks: Blocks) -> int:
    """The rows of the largest block."""
    return int(np.max(np.diff(blocks.starts)))


def _disk_cost(recursion: NoiseRecursion, num_parameters: int) -> NoiseCost:
    blocks = Blocks.of(recursion)
    row = num_parameters * _BYTES_OF_ROW
    numbers = range(blocks.num_blocks)
    sizes = [end - start for start, end in map(blocks.rounds, numbers)]
    rows_of_z = [blocks.rounds(k)[1] - blocks.first_row_of_z(k) for k in numbers]
    earlier = [blocks.num_earlier_rows(k) for k in numbers]
    vectors = recursion.num_state_vectors
    rounds = recursion.num_rounds
    drawn = sum(rows_of_z) / rounds
    read = 1 + (sum(earlier) + 2 * vectors * blocks.num_blocks) / rounds
    written = 1 + 2 * vectors * blocks.num_blocks / rounds
    products = sum(
        size * (rows + before + vectors)
        for size, rows, before in zip(sizes, rows_of_z, earlier, strict=True)
    )
    tiles = math.ceil(num_parameters / TILE)
    seconds = (
        _SECONDS_PER_ROUND_WITH_FILES
        + drawn * num_parameters * _SECONDS_PER_NORMAL
        + read * row * _SECONDS_PER_BYTE_READ
        + written * row * _SECONDS_PER_BYTE_WRITTEN
        + products / rounds * num_parameters * _SECONDS_PER_PRODUCT
        + (read + written) * tiles * _SECONDS_PER_FILE_OPERATION
    )
    # The rows of a tile in memory: those that are read, computed and drawn together.
    tile_rows = 2 * recursion.num_earlier_rows + 3 * _largest_block(blocks) + 4 * vectors
    width = min(num_parameters, TILE)
    filled_up = _filled_up(num_parameters)
    rows = NoiseCost.rows_kept(blocks) * (filled_up * _BYTES_OF_ROW + tiles * _BYTES_OF_HEADERS)
    states = STATES_KEPT * (_BYTES_OF_FLOAT * vectors * filled_up + tiles * _BYTES_OF_HEADERS)
    return NoiseCost(
        NoiseStorage.DISK,
        kept_bytes=_kept_bytes(recursion, num_parameters),
        state_bytes=0,
        disk_bytes=rows + states + _transition_bytes(blocks),
        memory_bytes=8 * row + tile_rows * width * _BYTES_OF_FLOAT,
        seconds_per_round=seconds,
    )


def _filled_up(num_parameters: int) -> int:
    """The number of coordinates of all tiles, including the filling of the last one."""
    return math.ceil(num_parameters / TILE) * min(num_parameters, TILE)


def _transition_bytes(blocks: Blocks) -> int:
    vectors = blocks.recursion.num_state_vectors
    total = 0
    for block in np.unique(blocks.distinct_transitions()):
        start, end = blocks.rounds(block)
        inputs = blocks.num_earlier_rows(block) + vectors + end - blocks.first_row_of_z(block)
        total += 8 * (end - start + vectors) * inputs
    return total


def open_directory(path: str | os.PathLike[str] | None, needed_bytes: int = 0) -> pathlib.Path:
    """Returns a private directory, which is created if it is missing.

    Args:
      path: The directory; None for the temporary one of this process, which is deleted when Python
        ends.
      needed_bytes: The most bytes that rows of noise need; files that are in it already count as
        free.

    Returns:
      Its absolute path.

    Raises:
      ValueError: If it is not a directory, cannot be created, has too little free space, can be
        used by others (who could subtract the noise from releases), or its path has characters that
        graphs interpret as a pattern.
    """
    if path is None:
        path = _temporary_directory(os.getpid())
    directory = pathlib.Path(os.path.abspath(path))
    if any(character in os.fspath(directory) for character in _PATTERN_CHARACTERS):
        raise ValueError(
            f"noise_directory {directory} has one of the characters {_PATTERN_CHARACTERS}, which "
            "are not allowed in paths of noise files: choose another one."
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
    """The temporary directory of a process, with the record that its aggregators share."""
    path = tempfile.mkdtemp(prefix="mf_aggregators-noise-")
    atexit.register(_delete, path, owner)
    return path


def check_private(
    path: str | os.PathLike[str], name: str, harm: str = "could subtract the noise"
) -> None:
    """Checks that a file or directory is owned by this user and closed to others.

    Args:
      path: The file or directory, which has to exist.
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
            f"{name} {path} is accessible to other users, who {harm}: {owner}chmod {mode} {path} "
            "first."
        )


def _delete(directory: str, owner: int) -> None:
    # A forked child must not delete its parent's files when it ends.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def _check_room(directory: pathlib.Path, needed_bytes: int) -> None:
    """Raises ValueError if a directory has too little free space for the rows of noise."""
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
    """A record of sums cannot be read, or is not that of the run; the message says why."""


class SumsEvidence(TypedDict, total=False):
    """The attributes of a statement's ``Evidence`` that describe a record of sums."""

    num_sums: int
    record_sha256: str


@dataclasses.dataclass(frozen=True)
class ReleasedSums:
    """The record of one run's released sums, which reveals nothing about sums without the seed.

    Attributes:
      text: A line for each round: the round from 0, a space, and the digests, or ``spent``.
      of_rounds: For each round, the hexadecimal digest of the claim of its noise; empty for a round
        that was spent.

    Raises:
      RecordError: If the text does not have this form.
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
        """Returns the names of the streams of noise (one for each run) in a directory.

        Args:
          directory: The noise directory.
        """
        return sorted(path.name for path in (pathlib.Path(directory) / "released").glob("stream-*"))

    @classmethod
    def read(cls, directory: str | os.PathLike[str], stream: str) -> "ReleasedSums":
        """Reads the record of a stream.

        Args:
          directory: The noise directory.
          stream: The name of the stream, from :func:`streams` or ``ReleaseState.stream_name``.

        Raises:
          RecordError: If a round has two digests, or one that this version does not write.
          OSError: If a file cannot be read.
        """
        lines: dict[int, str] = {}
        for path in (pathlib.Path(directory) / "released" / stream).glob("round-*"):
            names = os.listdir(path) if path.is_dir() else [_text_of(path.read_bytes())]
            # A spent round may also have a sum; it counts as spent.
            name = _SPENT if _SPENT in names else " ".join(sorted(names))
            number = path.name.removeprefix("round-")
            if number.isdecimal():
                lines[int(number)] = f"{number} {name}\n"
        return cls("".join(lines[i] for i in sorted(lines)))

    @property
    def num_sums(self) -> int:
        """The number of sums to which noise was added."""
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
