"""Groups of flags and their help, exit statuses, output and output files of all commands.

A command exits with 0 when it is done, and with 2, after one line on standard error, for flags or
input that it cannot work with or has too little memory for. A fault of the program itself is one
line as well, and exit status 70. A warning is one line. With ``--format=json`` it prints one JSON
object on standard output and nothing else there.
"""

import contextlib
import errno
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from mf_aggregators import atomic_files, inputs, version
from mf_aggregators.kernel.numbers import Error, rounded_down, rounded_up
from mf_aggregators.tff import installation

# Exit statuses.
DONE = 0
# An attack, or the ledger of a run, refutes a claim.
REFUTED = 1
# Flags or input cannot be worked with.
BAD_INPUT = 2
# EX_SOFTWARE of sysexits.h: Python's own status 1 would mean a refuted claim.
_INTERNAL_ERROR = 70
# The status of shells after Ctrl-C.
INTERRUPTED = 130

# The end of a message about too little memory.
_OUT_OF_MEMORY = "Use smaller numbers, fewer rounds for instance, or a larger machine."

_VERSION = {"--version", "-version"}
_HELP = {"--help", "-help", "-h", "-?", "--helpfull", "-helpfull", "--helpshort", "-helpshort"}

# A flag in a message.
_FLAG = re.compile(r"(?<!\w)--[a-z]")
# How a message of the library speaks of a parameter.
_PARAMETER = re.compile(r"([a-z]\w*)(?= must |=)")
# A character that ends a path in a message.
_AFTER_PATH = re.compile(r"[\s,:/]")

# Assumptions of a guarantee are printed in full.
_ASSUMED = frozenset({"timer_hours", "clock_drift", "clock_margin_minutes"})
# A number with one of these words in its name is a part of a guarantee, or one rests on it.
_NEVER_ROUNDED_DOWN = {"epsilon", "delta", "rho", "mu", "sensitivity", "gap", "alarm", "positive"}
# The attribute of a flag that lists the flags of which one is required.
_ALTERNATIVES = "required_alternatives"


class CommandError(Error, ValueError):
    """Flags or input that a command cannot work with; the message names a remedy."""


def run(
    description: str,
    define_flags: Callable[[flags.FlagValues], None],
    main: Callable[[flags.FlagValues], int | None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the command line, runs a command and turns errors into one line and a status.

    Args:
      description: The text of the command for ``--help``: the module's docstring.
      define_flags: Defines the command's flags.
      main: The command; may return an exit status.
      argv: The command line with the program's name first; that of the process by
        default.

    Returns:
      The exit status.
    """
    argv = list(sys.argv if argv is None else argv)
    program = argv[0].rsplit("/", 1)[-1] if argv else "command"
    if os.path.expanduser("~") == "~":
        # If there is no home directory, Keras would make a folder named "~" here.
        os.environ.setdefault("KERAS_HOME", os.devnull)
    _open_closed_streams()
    values = flags.FlagValues()
    try:
        values = flags_of(define_flags)
        if _HELP.intersection(argv[1:]):
            _print_text(_help_text(program, description, values))
            return DONE
        if _VERSION.intersection(argv[1:]):
            _print_text(f"{program} {version.__version__}")
            return DONE
        rest = values(argv, known_only=False)
        if len(rest) > 1:
            raise CommandError(f"unexpected argument {rest[1]!r}; flags start with --.")
        _check_required(program, values)
        with warnings.catch_warnings():
            # With next to no noise, privacy losses overflow: a user need not know.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="dp_accounting")
            warnings.showwarning = functools.partial(_show_warning, program)
            return main(values) or DONE
    except BrokenPipeError:
        # The reader closed the pipe.
        return DONE
    except KeyboardInterrupt:
        print(f"{program}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        message = _message(error, values)
        status = BAD_INPUT
        if message is None:
            if sys.flags.dev_mode:
                traceback.print_exception(error)
            status, frame = _INTERNAL_ERROR, traceback.extract_tb(error.__traceback__)[-1]
            message = (
                f"internal error: {type(error).__name__}: {error} "
                f"({pathlib.Path(frame.filename).name}, line {frame.lineno}). This is a fault of "
                "the program and not of its flags: please report it, with what `python -X dev -m "
                "...` prints."
            )
        # Line breaks of the message become spaces.
        print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
        return status


def _show_warning(program: str, message: Warning | str, *unused: Any, **also_unused: Any) -> None:
    """Prints a warning in one line, in place of ``warnings.showwarning``."""
    print(f"{program}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _message(error: Exception, values: flags.FlagValues) -> str | None:
    """The message about flags or input that a command cannot work with; None for a fault of it."""
    if isinstance(error, flags.Error):
        return f"{error} (--help lists the flags)"
    if isinstance(error, UnicodeError):
        return f"a name or a text is not UTF-8 ({error}): give files and clients names in UTF-8."
    if isinstance(error, ImportError):
        advice = installation.advice((error.name or "").partition(".")[0])
        return str(error) if advice in str(error) else f"{error}. {advice}"
    if isinstance(error, MemoryError):
        # NumPy's message has the size of the allocation, and Python's own is empty.
        return f"there is too little memory. {str(error) or _OUT_OF_MEMORY}"
    # Messages of the library name the value that was found.
    is_ours = isinstance(error, TypeError) and "found" in str(error)
    is_input = isinstance(error, OSError | ValueError) or is_ours
    return _with_flag(_in_words(error), values) if is_input else None


def flags_of(define_flags: Callable[[flags.FlagValues], None]) -> flags.FlagValues:
    """Returns the flags of a command, not parsed yet: its own, and ``--format``.

    Args:
      define_flags: Defines the command's own flags.
    """
    values = flags.FlagValues()
    define_flags(values)
    FlagGroup(values, "Output").choice(
        "format", ["text", "json"], "How the result is printed.", "text"
    )
    return values


def print_result(values: flags.FlagValues, fields: Mapping[str, Any], text: str) -> None:
    """Prints a command's result on standard output: JSON or text, as ``--format`` says.

    Args:
      values: The parsed flags.
      fields: The fields of the JSON object; what is not finite becomes null.
      text: What a person reads.
    """
    if values.format == "json":
        text = json.dumps(
            {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in fields.items()
            }
        )
    _print_text(text)


@contextlib.contextmanager
def naming(flag: str) -> Iterator[None]:
    """Puts a flag before the message of an error that is about its value and names no flag.

    Messages that name a parameter or the file of a flag get their flag without this.

    Args:
      flag: The name of the flag.

    Raises:
      CommandError: In the place of a ValueError, an OSError or an error of absl's flags.
    """
    try:
        yield
    except (ValueError, OSError, flags.Error) as error:
        said = _in_words(error)
        # A delta that is too small is the fault of no other flag.
        if said.startswith((f"--{flag}", "delta ")):
            raise
        raise CommandError(f"--{flag}: {said}") from error


def check_choice(condition: bool, message: str) -> None:
    """Raises CommandError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise CommandError(message)


def check_extra(what: str, packages: Sequence[str] = installation.PACKAGES) -> None:
    """Checks that packages of an extra are installed, without importing them.

    Args:
      what: What needs them, for the message: the beginning of a sentence.
      packages: Their names; by default those that every federated run needs.

    Raises:
      CommandError: If one is missing.
    """
    for package in packages:
        if not _is_installed(package):
            advice = installation.advice(package)
            raise CommandError(f"{what} needs {package}, which is not installed. {advice}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def table(rows: Sequence[tuple[str, Any]]) -> str:
    """Returns aligned lines of names and values, floats to six digits.

    No number of a guarantee, told by its name, is printed better than it is: lower bounds are
    rounded down, the others up, and what they follow from, a noise multiplier and what is assumed
    of timers and clocks, is in full.
    """
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {_readable(name, value)}" for name, value in rows)


def _readable(name: str, value: Any) -> str:
    """The value of a field as :func:`table` writes it."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    words = set(name.split("_"))
    if name.endswith("noise_multiplier"):
        return repr(float(value))
    if name in _ASSUMED:
        return inputs.in_full(value)
    if name == "ratio" or ("_lower_bound" in name and "over" not in words):
        return rounded_down(value, ".6g")
    if words & _NEVER_ROUNDED_DOWN:
        return rounded_up(value, ".6g")
    return f"{value:.6g}"


def _check_required(program: str, values: flags.FlagValues) -> None:
    """Raises CommandError with all required flags that are missing, and the usage."""
    missing = [
        " or ".join(f"--{name}" for name in alternatives)
        for alternatives in _required(values)
        if all(values[name].value in (None, []) for name in alternatives)
    ]
    if missing:
        *others, last = missing
        named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise CommandError(f"{named} required. {_usage(program, values)} (--help lists the flags)")


def _with_flag(message: str, values: flags.FlagValues) -> str:
    """A message of the library, with the flag that it is about.

    The library speaks of parameters, whose names are those of flags, and of files. A message that
    names a flag stays as it is.
    """
    if _FLAG.search(message):
        return message
    parameter = _PARAMETER.match(message)
    if parameter and parameter[1] in values and values[parameter[1]].present:
        return f"--{message}"
    named: dict[str, str] = {}
    for name in values:
        flag = values[name]
        if flag.present and flag.parser.flag_type() == "path":
            paths = [flag.value] if isinstance(flag.value, str) else flag.value or []
            named |= {str(pathlib.Path(path)): name for path in paths}
    for path in sorted(named, key=len, reverse=True):
        if message.startswith(path) and _AFTER_PATH.match(message, len(path)):
            return f"--{named[path]}: {message}"
    return message


def _in_words(error: Exception) -> str:
    """The message of an error; that of an error of the system has its number, and no advice."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place}{error.strerror}. Free space, and run the same command again."
    return f"{place}{error.strerror}."


def _open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that were closed (``2>&-``).

    Otherwise a file that is opened later would take the number of the stream and be written to.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the least free number: this one, because those below are open.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


def _print_text(text: str) -> None:
    """Prints on standard output, and waits until it is written.

    Characters that its encoding lacks, as of a file's name that is not UTF-8, become backslashes.

    Args:
      text: What is printed, with a newline after it.

    Raises:
      BrokenPipeError: If its reader has read enough.
      OSError: If it cannot be written. Nothing more is written then.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # Nothing is left to be flushed at exit then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        reason = f"standard output cannot be written: {error.strerror}"
        raise OSError(f"{reason}. What was to be printed is lost.") from error


def _required(values: flags.FlagValues) -> list[tuple[str, ...]]:
    """Returns the flags of each ``FlagGroup.require``, in the order of their definition.

    Args:
      values: The flags of a command.
    """
    defined = [flag for group in values.flags_by_module_dict().values() for flag in group]
    return [getattr(flag, _ALTERNATIVES) for flag in defined if hasattr(flag, _ALTERNATIVES)]


def resolved_path(text: str) -> str:
    """Returns a path that a user typed, with a leading ``~`` or ``~name`` replaced.

    Shells leave ``--flag=~/file`` as it is. A file whose name begins with a tilde is ``./~file``.

    Args:
      text: The path.

    Raises:
      ValueError: If it is empty, or there is no such home directory.
    """
    if not text:
        raise ValueError("it names no path. Leave the flag out, or say where.")
    if not text.startswith("~"):
        return text
    found = os.path.expanduser(text)
    if found == text:
        user = text[1:].partition(os.sep)[0]
        raise ValueError(
            f"there is no home directory {f'of {user!r}' if user else 'of this user'} for ~. Write "
            "the path in full, or ./~ for a name that begins with a tilde."
        )
    return found


class _PathParser(flags.ArgumentParser):  # type: ignore[misc, unused-ignore]
    """Resolves paths when they are parsed, so that checks and writes use one path."""

    def parse(self, argument: str) -> str:
        return resolved_path(argument)

    def flag_type(self) -> str:
        return "path"


class _OnceFlag(flags.Flag):  # type: ignore[misc, unused-ignore]
    """A flag of words, of text or of a path, of which a second one would drop the first.

    A ledger or a run that is left out makes an epsilon too small without a word. Numbers, choices
    and switches are in what is printed: of them the last one counts, so that they may be given
    after a ``--flagfile``. The same value again drops nothing.
    """

    def parse(self, argument: Any) -> None:
        first, was_given = self.value, self.present
        super().parse(argument)
        if was_given and self.value != first:
            advice = "give one"
            if isinstance(self.parser, flags.ListParser):
                advice = f"write --{self.name}={','.join([*first, *self.value])}"
            raise flags.IllegalFlagValueError(
                f"--{self.name} is given twice, and the first one would be lost: {advice}."
            )


class FlagGroup:
    """Defines the flags of one subject.

    ``--help`` lists groups, and the flags of a group, in the order in which they were first
    defined. A group may be continued elsewhere, under the same title.
    """

    def __init__(
        self,
        values: flags.FlagValues,
        title: str,
        default_texts: Mapping[str, str] | None = None,
    ) -> None:
        """Initialises the group.

        Args:
          values: Where flags are defined.
          title: The subject, such as ``Privacy``.
          default_texts: Sentences on the defaults of flags that have None here because their
            default depends on other flags, by name; each follows the meaning of its flag.
        """
        self._values = values
        self._title = title
        self._default_texts = default_texts or {}

    def string(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes any text, once."""
        self._define(_define_once, name, meaning, default, parser=flags.ArgumentParser())

    def path(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes the path of a file or directory, once (``resolved_path``)."""
        self._define(_define_once, name, meaning, default, parser=_PathParser())

    def integer(
        self, name: str, meaning: str, default: int | None = None, lower_bound: int | None = None
    ) -> None:
        """Defines a flag that takes an integer."""
        self._define(flags.DEFINE_integer, name, meaning, default, lower_bound=lower_bound)

    def number(self, name: str, meaning: str, default: float | None = None) -> None:
        """Defines a flag that takes a real number."""
        self._define(flags.DEFINE_float, name, meaning, default)

    def number_or_word(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes a number, or a word in its place; the last one given counts."""
        self._define(flags.DEFINE_string, name, meaning, default)

    def boolean(self, name: str, meaning: str, default: bool | None = None) -> None:
        """Defines a flag that is set by ``--name`` and unset by ``--noname``."""
        self._define(flags.DEFINE_bool, name, meaning, default)

    def choice(
        self, name: str, choices: Sequence[str], meaning: str, default: str | None = None
    ) -> None:
        """Defines a flag that takes one of several words."""
        self._define(flags.DEFINE_enum, name, meaning, default, enum_values=list(choices))

    def words(self, name: str, meaning: str, default: Sequence[str] | None = None) -> None:
        """Defines a flag that takes words with commas between them, once."""
        words = None if default is None else list(default)
        self._define(_define_once, name, meaning, words, parser=flags.ListParser())

    def repeated_paths(self, name: str, meaning: str) -> None:
        """Defines a flag for a path that may be given several times; its value is a list."""
        self._define(_define_paths, name, meaning, [])

    def overwrite(self, outputs: str = "--output") -> None:
        """Defines --overwrite, which lets a command replace the files at ``outputs``."""
        self.boolean("overwrite", f"Whether {outputs} may replace what is there already.", False)

    def require(self, *names: str) -> None:
        """Requires one of some flags of any group, which ``command_line.run`` checks.

        Args:
          *names: Flags that are defined already; a single one if it cannot be left out.
        """
        setattr(self._values[names[0]], _ALTERNATIVES, names)

    def _define(
        self, define: Callable[..., Any], name: str, meaning: str, default: Any, **options: Any
    ) -> None:
        define(
            name,
            default,
            help=" ".join(filter(None, [meaning, self._default_texts.get(name)])),
            flag_values=self._values,
            module_name=self._title,
            **options,
        )


def _define_once(
    name: str,
    default: Any,
    help: str,
    parser: flags.ArgumentParser,  # type: ignore[type-arg, unused-ignore]
    **others: Any,
) -> None:
    is_list = isinstance(parser, flags.ListParser)
    serializer = flags.CsvListSerializer(",") if is_list else flags.ArgumentSerializer()
    flags.DEFINE_flag(_OnceFlag(parser, serializer, name, default, help), **others)


def _define_paths(name: str, default: Sequence[str], help: str, **others: Any) -> None:
    flags.DEFINE_multi(
        _PathParser(), flags.ArgumentSerializer(), name, list(default), help, **others
    )


def _usage(program: str, values: flags.FlagValues) -> str:
    """The line that says how a command is called, with the flags that it requires."""
    words = ["Usage:", program]
    for names in _required(values):
        given = "|".join(f"--{name}=..." for name in names)
        words.append(given if len(names) == 1 else f"({given})")
    return " ".join([*words, "[--name=value ...]"])


def _help_text(program: str, description: str, values: flags.FlagValues) -> str:
    """The description of a command, its usage, and absl's help of its flags, by group."""
    groups = [values.module_help(title).strip() for title in values.flags_by_module_dict()]
    flagfile = "--flagfile=FILE reads flags from a file, one a line."
    return "\n\n".join([description.strip(), _usage(program, values), *groups, flagfile])


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


def check_output(
    path: str | os.PathLike[str],
    flag: str,
    overwrite: bool,
    checkpoint: str | None = None,
    ending: str = "",
) -> None:
    """Checks a file to write for commands that make no directory for it.

    A checkpoint with other files in it is never replaced, so that no file may be in one.

    Args:
      path: The file.
      flag: The flag that named it, for the message.
      overwrite: Whether something of that name may be there already.
      checkpoint: The directory of a checkpoint that the file has to be apart from, if any.
      ending: The ending that it has to have, if any.

    Raises:
      CommandError: If it has another ending, its directory is not there, one of file and checkpoint
        is in the other, or it cannot be written, or is there and may not be.
    """
    is_fit = not ending or pathlib.Path(path).suffix == ending
    check_choice(is_fit, f"--{flag} must name a {ending} file, found {path}.")
    with _refusing(path, flag):
        check_choice(
            pathlib.Path(path).absolute().parent.is_dir(),
            f"--{flag}={path} is in no directory that exists: make it, or choose another.",
        )
        if checkpoint is not None:
            # Unlike Path.resolve, it takes links that lead to themselves.
            file, directory = (pathlib.Path(os.path.realpath(each)) for each in (path, checkpoint))
            check_choice(
                not file.is_relative_to(directory) and not directory.is_relative_to(file),
                f"--{flag}={path} is not apart from the checkpoint {checkpoint}: choose another "
                "place.",
            )
    check_file(path, flag, overwrite)


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
    """Checks that a training run can write files into a directory, and leaves nothing behind.

    Args:
      path: The directory; it may be missing if it can be made.
      flag: The flag that named it, for the message.

    Raises:
      CommandError: If it is no directory, cannot be made, no file can be written there, or the name
        of one above it or of itself is not UTF-8, which TensorFlow needs.
    """
    try:
        os.path.abspath(path).encode("utf-8")
    except UnicodeEncodeError:
        raise CommandError(
            f"--{flag}={path} has a name that is not UTF-8, in which TensorFlow writes no file: "
            "choose another place."
        ) from None
    with _refusing(path, flag):
        _try(pathlib.Path(path).absolute(), "output")


def cache_directory(
    named: str | None, folder: str, say: Callable[[str], None]
) -> pathlib.Path | None:
    """Returns the directory of a command's cache.

    Args:
      named: What --cache_dir names; None without it.
      folder: The folder of the user's cache that it is otherwise.
      say: Called with one line that says why nothing more can be cached, if so.

    Returns:
      The directory, also one that can be read but not written; None if it cannot be made, which is
      no reason to end.
    """
    directory = atomic_files.find_cache(folder) if named is None else pathlib.Path(named)
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
