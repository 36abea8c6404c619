"""The directory that noise rows are kept in: private, and with room enough.

:func:`check_private` also checks other files that hold a seed or tell who was drawn.
"""

import atexit
import contextlib
import functools
import os
import pathlib
import shutil
import stat
import tempfile

_SPARE_BYTES = 64 << 20
_PATTERN_CHARACTERS = "*?[]\\"


def open_directory(path: str | os.PathLike[str] | None) -> pathlib.Path:
    """Returns a directory that only its owner can use, made if it is missing.

    Args:
      path: The directory; None for the temporary one of this process, which is deleted when Python
        ends.

    Returns:
      Its absolute path.

    Raises:
      ValueError: If it is no directory, cannot be made, others may use it (whoever reads
        the noise can subtract it from what was released), or its path has characters that
        graphs take for a pattern.
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


def check_room(directory: pathlib.Path, needed_bytes: int) -> None:
    """Checks that noise rows will find room in a directory.

    Args:
      directory: Where they go; what is in it counts as room.
      needed_bytes: What they need at most.

    Raises:
      ValueError: If there is too little room.
    """
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
