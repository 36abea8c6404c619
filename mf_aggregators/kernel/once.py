"""The record of released sums: a row of noise that was added to one sum is added to no other.

Two sums under one row of noise reveal their difference. So the first sum of a row is recorded, as a
digest that tells nothing without the seed, and any other sum of that row is refused.
"""

import contextlib
import os
import pathlib
import tempfile
from typing import Any, ClassVar, NoReturn, final

from mf_aggregators.kernel.errors import ReleaseError

# Stands for a row that is never released: no digest is as short.
_SPENT = b"spent"
_ANOTHER_PROCESS = (
    "give both a noise_directory, or make the aggregator of the mechanism in the process that "
    "releases, and move the state by save_state and load_state"
)


@final
class ReleaseRecord:
    """Digests of the sums that rows of noise were added to: in this process, or in a directory.

    All records of a process that have no directory are one. Other processes share a directory's
    digests. Copies share the record.
    """

    _of_process: ClassVar[dict[tuple[str, int], bytes]] = {}

    def __init__(self, directory: pathlib.Path | None = None) -> None:
        """Opens the record.

        Args:
          directory: A private directory, which is there; None to keep the record in memory, for
            this process alone.
        """
        self._directory, self._process = directory, os.getpid()
        # A state may go on with an aggregator that was made anew, as in a notebook.
        self._digests = self._of_process if directory is None else {}

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("ReleaseRecord has no subclasses.")

    def check(self, stream: str, i: int, found: bytes) -> None:
        """Records the digest of a round's sum.

        Args:
          stream: The name of the stream of noise.
          i: The round, from 0.
          found: The digest.

        Raises:
          OSError: If the directory cannot be written.
          ReleaseError: If the round has another digest or was spent, or the record is that of
            another process.
        """
        known = self._digests.get((stream, i), found)
        if known == found:
            known = self._written(stream, i, found, replaces=False)
        # The first of several threads releases.
        before = self._digests.setdefault((stream, i), known)
        before = known if before == found else before
        if before == _SPENT:
            raise ReleaseError(
                f"Round {i} was spent: its noise is never released. Go on from the state that "
                "spend returned."
            )
        if before != found:
            raise ReleaseError(
                "The noise of this round was added to other data before, so this aggregate is not "
                "released: the difference of the two would have no noise. Go on from this state "
                "with the clients and data of that time, release the sum that was kept, or give "
                "the round up by spend(state)."
            )

    def spend(self, stream: str, i: int) -> None:
        """Records that a round's row is never released from now on.

        Args:
          stream: The name of the stream of noise.
          i: The round, from 0.

        Raises:
          OSError: If the directory cannot be written.
          ReleaseError: If the record is that of another process.
        """
        self._written(stream, i, _SPENT, replaces=True)
        self._digests[stream, i] = _SPENT

    def _written(self, stream: str, i: int, content: bytes, *, replaces: bool) -> bytes:
        """The record of a round in the directory, if there is one: this content, or the first."""
        if self._directory is None:
            if os.getpid() != self._process:
                raise ReleaseError(
                    "The aggregator was made in another process, which may add this round's noise "
                    f"to other data: {_ANOTHER_PROCESS}."
                )
            return content
        path = self._directory / "released" / stream / f"round-{i}"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if replaces:
                os.replace(partial, path)
            else:
                # Unlike a renaming, it fails where the name is taken.
                with contextlib.suppress(FileExistsError):
                    os.link(partial, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return path.read_bytes()

    def __deepcopy__(self, _: Any) -> "ReleaseRecord":
        return self

    def __reduce__(self) -> Any:
        if self._directory is None:
            raise ReleaseError(
                "An aggregator without a noise directory is not pickled: the copy would not know "
                f"which rows of noise this one has used. {_ANOTHER_PROCESS.capitalize()}."
            )
        return ReleaseRecord, (self._directory,)
