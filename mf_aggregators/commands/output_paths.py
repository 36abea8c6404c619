"""Where a command's results go, checked before anything is computed for them."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import flags

from mf_aggregators.commands.command_line import CommandError, FlagGroup, check_choice, check_extra

_PACKAGES_OF_PAGES = ("matplotlib",)


def define_overwrite(values: flags.FlagValues, outputs: str = "--output") -> None:
    """Defines --overwrite.

    Args:
      values: Where it is defined.
      outputs: The flags of what it may replace.
    """
    FlagGroup(values, "Output").boolean(
        "overwrite", f"Whether {outputs} may replace what is there already.", False
    )


def define_report(values: flags.FlagValues, meaning: str) -> None:
    """Defines --report.

    Args:
      values: Where it is defined.
      meaning: What the page has: the end of a sentence that begins with "An .html file to write".
    """
    FlagGroup(values, "Output").path(
        "report", f"An .html file to write: one page that needs no other file, with {meaning}"
    )


def check_report(values: flags.FlagValues, checkpoint: str | None) -> None:
    """Checks --report before anything is computed for it.

    Args:
      values: The parsed flags, with ``overwrite``.
      checkpoint: The directory of a checkpoint that the command reads or writes, if any.

    Raises:
      CommandError: If it names no .html file, or one that cannot be written, that is there
        already and may not be replaced, or that is in the checkpoint, or if a package is missing.
    """
    path = values.report
    if path is None:
        return
    check_extra("--report", _PACKAGES_OF_PAGES)
    check_choice(path.endswith(".html"), f"--report must name an .html file, found {path}.")
    if checkpoint is not None:
        check_apart(path, "report", checkpoint)
    check_file(path, "report", values.overwrite)


def check_file(
    path: str | os.PathLike[str],
    flag: str,
    overwrite: bool = True,
    *,
    is_directory: bool = False,
) -> None:
    """Checks that a file or directory of a name can be written, and leaves nothing behind.

    Args:
      path: The file or directory; missing parents are no fault if they can be made.
      flag: The flag that named it, for the message.
      overwrite: Whether something of that name may be there already.
      is_directory: Whether it is to be a directory: else one that is there is never replaced.

    Raises:
      CommandError: If it cannot be written, or is there and may not be.
    """
    target = pathlib.Path(path)
    with _refusing(path, flag):
        check_choice(
            is_directory or not target.is_dir(),
            f"--{flag}={path} is a directory: choose another name.",
        )
        check_choice(
            overwrite or not os.path.lexists(target),
            f"--{flag}={path} is there already: replace it by --overwrite, or choose another name.",
        )
        _try(target.absolute().parent, target.name)


def check_parent(path: str | os.PathLike[str], flag: str) -> None:
    """Checks that the directory of a file exists, for commands that make none for it.

    Args:
      path: The file.
      flag: The flag that named it, for the message.

    Raises:
      CommandError: If its directory is not there.
    """
    with _refusing(path, flag):
        check_choice(
            pathlib.Path(path).absolute().parent.is_dir(),
            f"--{flag}={path} is in no directory that exists: make it, or choose another.",
        )


def check_name(path: str | os.PathLike[str], flag: str) -> None:
    """Checks that TensorFlow can write below a directory: it needs names in UTF-8.

    Args:
      path: The directory.
      flag: The flag that named it, for the message.

    Raises:
      CommandError: If its name, or that of a directory above it, is not UTF-8.
    """
    try:
        os.path.abspath(path).encode("utf-8")
    except UnicodeEncodeError:
        raise CommandError(
            f"--{flag}={path} has a name that is not UTF-8, in which TensorFlow writes no file: "
            "choose another place."
        ) from None


def check_apart(path: str | os.PathLike[str], flag: str, checkpoint: str) -> None:
    """Checks that a file is not in a checkpoint: one with other files in it is never replaced.

    Args:
      path: The file.
      flag: The flag that named it, for the message.
      checkpoint: The directory of the checkpoint.

    Raises:
      CommandError: If one of both is in the other.
    """
    with _refusing(path, flag):
        # Unlike Path.resolve, it takes links that lead to themselves.
        file, directory = (pathlib.Path(os.path.realpath(each)) for each in (path, checkpoint))
    check_choice(
        not file.is_relative_to(directory) and not directory.is_relative_to(file),
        f"--{flag}={path} is not apart from the checkpoint {checkpoint}: choose another place.",
    )


def check_distinct(
    written: Mapping[str, Sequence[str | os.PathLike[str]]],
    read: Mapping[str, Sequence[str | os.PathLike[str]]],
) -> None:
    """Checks that no file is written twice, and none that is read.

    Args:
      written: The files that each flag writes.
      read: Those that each flag reads.

    Raises:
      CommandError: If there is such a file; the message has both flags.
    """
    flag_of: dict[str, str] = {}
    for flag, path in [(flag, path) for flag, paths in written.items() for path in paths]:
        file = os.path.realpath(path)
        check_choice(
            file not in flag_of,
            f"--{flag} and --{flag_of.get(file)} would both write {path}: choose another name.",
        )
        flag_of[file] = flag
    for flag, path in [(flag, path) for flag, paths in read.items() for path in paths]:
        file = os.path.realpath(path)
        check_choice(
            file not in flag_of,
            f"--{flag_of.get(file)} would replace {path}, which --{flag} reads: choose another "
            "name.",
        )


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


def cache_directory(
    named: str | None, default: pathlib.Path | None, say: Callable[[str], None]
) -> pathlib.Path | None:
    """Returns the directory of a command's cache.

    Args:
      named: What --cache_dir names; None without it.
      default: Where it is otherwise; None if there is no home directory.
      say: Called with one line that says why nothing more can be cached, if so.

    Returns:
      The directory, also one that can be read but not written; None if it cannot be made, which is
      no reason to end.
    """
    directory = default if named is None else pathlib.Path(named)
    reason = "there is no home directory"
    if directory is not None:
        try:
            _try(directory, "output")
            return directory
        except OSError as error:
            reason = f"{directory} cannot be written: {error.strerror}"
    say(f"warning: results are used without being cached ({reason}): name a place by --cache_dir.")
    return directory if directory is not None and directory.is_dir() else None


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
