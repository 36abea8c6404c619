"""Costs of a row of noise, by the place where the noise of earlier rounds is kept.

The history of earlier rounds can be kept in the state that TFF passes between its processes in
each round, which is cheap for some megabytes and fails for some gigabytes. Or rows are made in
blocks (``kernel.rows``) and kept in files. Rows of Z are kept by neither: they are
drawn again from their seeds.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.rows import Blocks, NoiseRecursion, WindowNoise

# Tables of a noising matrix up to this size are put into a graph, and no dense matrix of more
# rounds.
_LARGEST_CONSTANT_IN_BYTES = 8 << 20
_MOST_DENSE_ROUNDS = 512
# A state up to this size crosses between TFF's processes in a fraction of a second.
_CHEAP_STATE_IN_BYTES = 20_000_000
# A larger one is refused: above 2^31 bytes TFF's worker fails without an error, and long
# before that a round takes minutes.
_LARGEST_STATE_IN_BYTES = 1 << 30

# Costs of the parts of a row, measured by benchmarks/noise.py on two cores of a server.
_SECONDS_PER_NORMAL = 70e-9
_SECONDS_PER_BYTE_WRITTEN = 1.4e-9
_SECONDS_PER_BYTE_READ = 0.4e-9
_SECONDS_PER_PRODUCT = 2e-11
_SECONDS_PER_STATE_BYTE = 1e-8
_SECONDS_PER_BYTE_OF_LARGE_STATE = 4e-8
_SECONDS_PER_FILE_OPERATION = 5e-5
# How much longer a round takes with files than without, however small the model.
_SECONDS_PER_ROUND_WITH_FILES = 4e-3

# State vectors are kept for the block in use, the next one and two before them.
STATES_KEPT = 4
# The bytes of a number of a kept row, and of a float of state vectors or of rows in the making.
_BYTES_OF_ROW = 4
_BYTES_OF_FLOAT = 8
# The bytes of a file of noise besides its numbers, at most.
_BYTES_OF_HEADERS = 128


def _mean_rows_of_z_per_round(recursion: NoiseRecursion) -> float:
    """Returns the rows of Z that a row of the noise draws on average, if made one by one.

    Args:
      recursion: The noising matrix.
    """
    most, rounds = recursion.rows_of_z_per_round, recursion.num_rounds
    drawn = most - most * (most - 1) / (2 * rounds) if most <= rounds else (rounds + 1) / 2
    # With accumulators, one that leaves the window too.
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
    """Where the noise of earlier rounds is kept.

    Use it when a program chooses where noise is kept; ``noise_storage`` takes its values.

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
      kept_bytes: Noise of earlier rounds that is kept between rounds, wherever, for all parameters
        in integers of four bytes and float64.
      state_bytes: What TFF passes between its processes in every round.
      disk_bytes: Files at most.
      memory_bytes: Temporary memory of a round, roughly.
      seconds_per_round: Averaged over all rounds, on two cores: an estimate.
    """

    storage: NoiseStorage
    kept_bytes: int
    state_bytes: int
    disk_bytes: int
    memory_bytes: int
    seconds_per_round: float

    @classmethod
    def of_run(
        cls,
        horizons: Sequence[NoiseRecursion],
        num_parameters: int,
        storage: NoiseStorage = NoiseStorage.AUTO,
    ) -> "NoiseCost":
        """Returns the cost of the noise of a run in TensorFlow Federated.

        Args:
          horizons: The noising matrix of each horizon of the run, the first one first.
          num_parameters: d, the entries of a row.
          storage: The storage that is asked for; AUTO for the one that takes less time, of those
            that fit, for the first horizon.

        Raises:
          ValueError: If the state would be too large to be passed between TFF's processes, or the
            matrix too large for a graph.
        """
        recursion = horizons[-1]
        if storage is NoiseStorage.AUTO:
            found = _choose(horizons[0], num_parameters)
            if len(horizons) == 1:
                return found
            # An extended run keeps its noise where it was.
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
                "this factorization's matrix is too large to be put into a graph: use "
                "noise_storage='disk'."
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
    raise ValueError("the cost of a storage needs one: state or disk.")


def _choose(recursion: NoiseRecursion, num_parameters: int) -> NoiseCost:
    """Returns the storage that takes less time, of those that fit, with its cost.

    Args:
      recursion: The mechanism's noising matrix.
      num_parameters: d, the entries of a row.

    Returns:
      The cost of the choice: that of files where the state is too large to be cheap.

    Raises:
      ValueError: If there is no parameter.
    """
    of_state = _cost(recursion, num_parameters, NoiseStorage.STATE)
    of_disk = _cost(recursion, num_parameters, NoiseStorage.DISK)
    if of_state.state_bytes > _CHEAP_STATE_IN_BYTES or not _fits_in_graph(recursion):
        return of_disk
    return min(of_state, of_disk, key=lambda each: each.seconds_per_round)


def rows_kept(blocks: Blocks) -> int:
    """Returns the rows that are needed at any time: for the block in use and for the next one."""
    largest = _largest_block(blocks)
    return max(largest, blocks.recursion.num_earlier_rows) + largest


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
    # Rows of a tile in memory: rows that are read, made and drawn at once.
    tile_rows = 2 * recursion.num_earlier_rows + 3 * _largest_block(blocks) + 4 * vectors
    width = min(num_parameters, TILE)
    filled_up = _filled_up(num_parameters)
    rows = rows_kept(blocks) * (filled_up * _BYTES_OF_ROW + tiles * _BYTES_OF_HEADERS)
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
    """The coordinates of all tiles, the last of several being filled up."""
    return math.ceil(num_parameters / TILE) * min(num_parameters, TILE)


def _transition_bytes(blocks: Blocks) -> int:
    vectors = blocks.recursion.num_state_vectors
    total = 0
    for block in np.unique(blocks.distinct_transitions()):
        start, end = blocks.rounds(block)
        inputs = blocks.num_earlier_rows(block) + vectors + end - blocks.first_row_of_z(block)
        total += 8 * (end - start + vectors) * inputs
    return total
