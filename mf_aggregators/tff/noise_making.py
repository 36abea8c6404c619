"""From the options of a run's noise to the streams that its graphs make."""

import dataclasses
import enum
import os
from typing import TypeVar

import tensorflow as tf

from mf_aggregators.noise import costs, row_layout
from mf_aggregators.noise.blocks import Blocks
from mf_aggregators.noise.costs import NoiseCost, NoiseStorage
from mf_aggregators.noise.integer_rows import IntegerRows
from mf_aggregators.noise.random_bits import DEFAULT_SOURCE, NoiseSource
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.noise.row_layout import Segment
from mf_aggregators.tff import noise_directory, rows_on_disk, tensor_noise
from mf_aggregators.tff.release_record import ReleaseRecord
from mf_aggregators.tff.rows_in_state import RowsInState
from mf_aggregators.tff.tensor_noise import TensorNoise

_Enum = TypeVar("_Enum", bound=enum.Enum)


@dataclasses.dataclass(frozen=True)
class NoiseOptions:
    """What a user may choose about a run's noise.

    Attributes:
      storage: Where the noise of earlier rounds is kept.
      directory: Where noise files go; None for a temporary directory.
      source: What random bits come from.
    """

    storage: NoiseStorage = NoiseStorage.AUTO
    directory: str | os.PathLike[str] | None = None
    source: NoiseSource = DEFAULT_SOURCE

    @classmethod
    def of(
        cls, storage: str, directory: str | os.PathLike[str] | None, source: str
    ) -> "NoiseOptions":
        """Returns the options by their names.

        Raises:
          ValueError: If a name is not known.
        """
        return cls(
            _by_name(NoiseStorage, storage, "noise_storage"),
            directory,
            _by_name(NoiseSource, source, "noise_source"),
        )


@dataclasses.dataclass(frozen=True)
class NoiseParts:
    """What the graphs of a run need for its noise.

    Attributes:
      noise: The definition of its stream.
      record: The record of what noise was added to; None without a directory to keep it in.
    """

    noise: TensorNoise
    record: ReleaseRecord | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Continued:
    """What the noise of an extended run continues.

    Attributes:
      first: The recursion that the run began with.
      plans: The rounds of all plans that were extended, that of ``first`` being the first.
    """

    first: NoiseRecursion
    plans: tuple[int, ...]


def make(
    recursion: NoiseRecursion,
    specs: tuple[tf.TensorSpec, ...],
    options: NoiseOptions,
    continued: Continued | None = None,
) -> NoiseParts:
    """Returns what a run's graphs need for its noise, with all files in place.

    Args:
      recursion: The mechanism's recursion.
      specs: The tensors of a row: floating point, of known shapes.
      options: The choices.
      continued: What the rows continue, bit for bit; None for those of a run that was not extended.

    Returns:
      The parts.

    Raises:
      ValueError: If the state would be too large to be passed between TFF's processes, or
        the directory cannot be used or is too small.
    """
    segments = tensor_noise.segments_of(specs)
    rows = (
        IntegerRows.of(recursion)
        if continued is None
        else IntegerRows.continuing(continued.first, recursion)
    )
    if not segments:
        # Tensors without entries have no noise.
        return NoiseParts(TensorNoise(RowsInState(rows), specs))
    cost = _cost(recursion, segments, _storage(segments, options.storage, continued))
    is_on_disk = cost.storage is NoiseStorage.DISK
    if options.directory is None and not is_on_disk:
        return NoiseParts(TensorNoise(RowsInState(rows, options.source), specs))
    directory = noise_directory.open_directory(options.directory)
    record = ReleaseRecord.in_directory(directory)
    if not is_on_disk:
        return NoiseParts(TensorNoise(RowsInState(rows, options.source), specs), record)
    noise_directory.check_room(directory, cost.disk_bytes)
    blocks = Blocks.of(recursion, () if continued is None else continued.plans)
    files = rows_on_disk.prepare(rows, blocks, segments, options.source, directory)
    return NoiseParts(TensorNoise(files, specs), record)


def _storage(
    segments: tuple[Segment, ...],
    asked: NoiseStorage,
    continued: Continued | None,
) -> NoiseStorage:
    """Where noise is kept: of an extended run, where it was before."""
    if continued is None or asked is not NoiseStorage.AUTO:
        return asked
    return costs.choose(continued.first, row_layout.total_size(segments)).storage


def _cost(
    recursion: NoiseRecursion, segments: tuple[Segment, ...], storage: NoiseStorage
) -> NoiseCost:
    """The cost of the storage that is used, if it can be."""
    size = row_layout.total_size(segments)
    if storage is NoiseStorage.AUTO:
        return costs.choose(recursion, size)
    cost = costs.cost(recursion, size, storage)
    if cost.state_bytes > costs.LARGEST_STATE_IN_BYTES:
        raise ValueError(
            f"the noise of earlier rounds would need {cost.state_bytes / 2**30:.1f} GiB of server "
            f"state, and at most {costs.LARGEST_STATE_IN_BYTES / 2**30:.1f} GiB can be "
            "passed between TFF's processes: use noise_storage='disk', fewer bands or a smaller "
            "model."
        )
    if storage is NoiseStorage.STATE and not recursion.fits_in_graph:
        raise ValueError(
            "this factorization's matrix is too large to be put into a graph: use "
            "noise_storage='disk'."
        )
    return cost


def _by_name(kind: type[_Enum], name: str, argument: str) -> _Enum:
    try:
        return kind(name)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{argument} must be one of {names}, found {name!r}.") from None
