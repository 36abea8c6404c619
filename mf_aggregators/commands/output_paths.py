"""Where a command's results go: checked before anything is computed for them."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

from absl import flags

from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.commands.flag_groups import FlagGroup


def define_overwrite(values: flags.FlagValues, outputs: str = "--output") -> None:
    """Defines --overwrite.

    Args:
      values: Where it is defined.
      outputs: The flags of what it may replace.
    """
    FlagGroup(values, "Output").boolean(
        "overwrite", f"Whether {outputs} may replace what is there already.", False
    )


def check_file(path: str | os.PathLike[str], flag: str, overwrite: bool = True) -> None:
    """Checks that a file or directory of a name can be written, and leaves nothing behind.

    Args:
      path: The file or directory; missing parents are no fault if they can be made.
      flag: The flag that named it, for the message.
      overwrite: Whether something of that name may be there already.

    Raises:
      CommandError: If it cannot be written, or is there and may not be.
    """
    target = pathlib.Path(path).expanduser()
    with _refusing(path, flag):
        check_choice(
            overwrite or not os.path.lexists(target),
            f"--{flag}={path} is there already: replace it by --overwrite, or choose another name.",
        )
        _try(target.absolute().parent, target.name)


def check_directory(path: str | os.PathLike[str], flag: str) -> None:
    """Checks that files can be written into a directory, and leaves nothing behind.

    Args:
      path: The directory; it may be missing if it can be made.
      flag: The flag that named it, for the message.

    Raises:
      CommandError: If it is no directory, cannot be made, or no file can be written there.
    """
    with _refusing(path, flag):
        _try(pathlib.Path(path).absolute(), "output")


@contextlib.contextmanager
def _refusing(path: str | os.PathLike[str], flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(
            f"--{flag}={path} cannot be written: {error.strerror}. Choose another place."
        ) from error


def _try(directory: pathlib.Path, name: str) -> None:
    """Makes a directory for a file of that name, as those that write files here do."""
    made: list[pathlib.Path] = []
    try:
        missing = [each for each in (directory, *directory.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir()
            made.append(each)
        os.rmdir(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=directory))
    finally:
        with contextlib.suppress(OSError):
            for each in reversed(made):
                each.rmdir()
