"""Code that all commands share: flags and help, exit statuses, output, and output files.

A command exits with 0 when it is done. If flags or input are wrong, or memory is too small, it
prints one line on standard error and exits with 2; for a fault of the program itself, it prints one
line and exits with 70. A warning is one line. With ``--format=json``, a command prints one JSON
object, and nothing else, on standard output.
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

from absl import flags

from mf_aggregators import atomic_files, inputs, version
from mf_aggregators.kernel.numbers import Error, rounded_down, rounded_up
from mf_aggregators.tff import installation

# Exit statuses.
DONE = 0
# An attack or the ledger of a run refuted a claim.
REFUTED = 1
# Flags or input are wrong.
BAD_INPUT = 2
# A fault of the program: EX_SOFTWARE of sysexits.h. Python's status 1 would mean a refuted claim.
_INTERNAL_ERROR = 70
# The exit status that shells use after Ctrl-C.
INTERRUPTED = 130

# The end of a message about too little memory.
_OUT_OF_MEMORY = "Use smaller numbers, for instance fewer rounds, or a larger machine."

_VERSION = {"--version", "-version"}
_HELP = {"--help", "-help", "-h", "-?", "--helpfull", "-helpfull", "--helpshort", "-helpshort"}

# Finds a flag in a message.
_FLAG = re.compile(r"(?<!\w)--[a-z]")
# Finds the parameter that a message of the library is about.
_PARAMETER = re.compile(r"([a-z]\w*)(?= must |=)")
# Finds a character that ends a path in a message.
_AFTER_PATH = re.compile(r"[\s,:/]")

# Fields with assumptions of a guarantee, which are printed with all digits.
_ASSUMED = frozenset({"timer_hours", "clock_drift", "clock_margin_minutes"})
# A field with one of these words in its name is part of a guarantee, or a guarantee depends on it.
_NEVER_ROUNDED_DOWN = {"epsilon", "delta", "rho", "mu", "sensitivity", "gap", "alarm", "positive"}
# The attribute of a flag with the list of flags of which one is required.
_ALTERNATIVES = "required_alternatives"


class CommandError(Error, ValueError):
    """Flags or input of a command are wrong; the message has a remedy."""


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
      argv: The command line with the program's name first; by default, that of the process.

    Returns:
      The exit status.
    """
    argv = list(sys.argv if argv is None else argv)
    program = argv[0].rsplit("/", 1)[-1] if argv else "command"
    if os.path.expanduser("~") == "~":
        # If there is no home directory, Keras would create a folder named "~" in the working
        # directory.
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
            # With almost no noise, privacy losses overflow; users need no warning of it.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="dp_accounting")
            warnings.showwarning = functools.partial(_show_warning, program)
            return main(values) or DONE
    except BrokenPipeError:
        # The program that reads the output closed the pipe.
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
                "the program and not of its flags: please report it, with the output of `python -X "
                "dev -m ...`."
            )
        # The message is printed in one line.
        print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
        return status


def _show_warning(
    program: str, message: Warning | str, *unused: object, **also_unused: object
) -> None:
    """Prints a warning in one line, in place of ``warnings.showwarning``."""
    print(f"{program}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _message(error: Exception, values: flags.FlagValues) -> str | None:
    """The message if flags or input caused an error; None for a fault of the program."""
    if isinstance(error, flags.Error):
        return f"{error} (--help lists the flags)"
    if isinstance(error, UnicodeError):
        return f"a name or a text is not valid UTF-8 ({error}): rename files and clients in UTF-8."
    if isinstance(error, ImportError):
        advice = installation.advice((error.name or "").partition(".")[0])
        return str(error) if advice in str(error) else f"{error}. {advice}"
    if isinstance(error, MemoryError):
        # NumPy's message has the size of the allocation; Python's message is empty.
        return f"there is too little memory. {str(error) or _OUT_OF_MEMORY}"
    # A TypeError of this library has the word "found"; one without it is a fault of the program.
    is_ours = isinstance(error, TypeError) and "found" in str(error)
    is_input = isinstance(error, OSError | ValueError) or is_ours
    return _with_flag(_in_words(error), values) if is_input else None


def flags_of(define_flags: Callable[[flags.FlagValues], None]) -> flags.FlagValues:
    """Returns the unparsed flags of a command: its own flags, and ``--format``.

    Args:
      define_flags: Defines the command's own flags.
    """
    values = flags.FlagValues()
    define_flags(values)
    FlagGroup(values, "Output").choice(
        "format", ["text", "json"], "The format of the printed result.", "text"
    )
    return values


def print_result(values: flags.FlagValues, fields: Mapping[str, object], text: str) -> None:
    """Prints a command's result on standard output: JSON or text, as ``--format`` says.

    Args:
      values: The parsed flags.
      fields: The fields of the JSON object; numbers that are not finite become null.
      text: The text for people.
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
    """Adds a flag to the messages of errors about its value, if they do not name a flag.

    Messages that name a parameter, or the file of a flag, get the name of the flag elsewhere.

    Args:
      flag: The name of the flag.

    Raises:
      CommandError: Instead of a ValueError, an OSError or an error of absl's flags.
    """
    try:
        yield
    except (ValueError, OSError, flags.Error) as error:
        said = _in_words(error)
        # The message about a delta that is too small concerns --delta alone.
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
      what: The feature that needs them, for the message: the beginning of a sentence.
      packages: The packages; by default, those that every federated run needs.

    Raises:
      CommandError: If a package is missing.
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


def table(rows: Sequence[tuple[str, object]]) -> str:
    """Returns aligned lines of names and values, floats to six digits.

    Numbers of a guarantee, which are recognised by their names, are never printed better than they
    are: lower bounds are rounded down, and all others are rounded up. Noise multipliers and
    assumptions about timers and clocks have all digits.
    """
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {_readable(name, value)}" for name, value in rows)


def _readable(name: str, value: object) -> str:
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
    """Raises CommandError if required flags are missing, and names them and the usage."""
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
    """Returns a message of the library with the flag that the message is about.

    Messages of the library name parameters, which have the same names as flags, or files. A message
    that names a flag already is returned unchanged.
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
    """The text for an error; for errors of the operating system, file name and reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{place}{error.strerror}. Free space, and run the same command again."
    return f"{place}{error.strerror}."


def _open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that were closed (``2>&-``).

    Otherwise a file that is opened later would get the stream's number, and output would be written
    into it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # open uses the smallest free number, which is this one, because all below are open.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


def _print_text(text: str) -> None:
    """Prints on standard output, and waits until the text is written.

    Characters that the output's encoding does not have (in a file's name that is not UTF-8, for
    example) become backslash escapes.

    Args:
      text: The text; a newline is added.

    Raises:
      BrokenPipeError: If the program that reads the output has closed it.
      OSError: If standard output cannot be written; further output is then discarded.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # This prevents that text is flushed into the broken output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        reason = f"standard output cannot be written: {error.strerror}"
        raise OSError(f"{reason}. The result is lost.") from error


def _required(values: flags.FlagValues) -> list[tuple[str, ...]]:
    """Returns the flags of each call of ``FlagGroup.require``, in the order of their definition.

    Args:
      values: The flags of a command.
    """
    defined = [flag for group in values.flags_by_module_dict().values() for flag in group]
    return [getattr(flag, _ALTERNATIVES) for flag in defined if hasattr(flag, _ALTERNATIVES)]


def resolved_path(text: str) -> str:
    """Returns a path that a user typed, with a leading ``~`` or ``~name`` replaced.

    Shells do not expand ``--flag=~/file``. A file whose name begins with a tilde is ``./~file``.

    Args:
      text: The path.

    Raises:
      ValueError: If the path is empty, or there is no such home directory.
    """
    if not text:
        raise ValueError("the path is empty. Leave the flag out, or give a path.")
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
    """Resolves the paths of flags when they are parsed, so that all code uses the same path."""

    def parse(self, argument: str) -> str:
        return resolved_path(argument)

    def flag_type(self) -> str:
        return "path"


class _OnceFlag(flags.Flag):  # type: ignore[misc, unused-ignore]
    """A flag of words, text or a path, which must not be given twice with different values.

    If the second value silently replaced the first, a ledger or a run would be left out, and
    epsilon would be too small. For flags with numbers, choices and switches, the last value counts,
    because results print them; so they may be given after a ``--flagfile``. Giving the same value
    again is allowed.
    """

    def parse(self, argument: str | list[str]) -> None:
        first, was_given = self.value, self.present
        super().parse(argument)
        if was_given and self.value != first:
            advice = "give one"
            if isinstance(self.parser, flags.ListParser):
                advice = f"write --{self.name}={','.join([*first, *self.value])}"
            raise flags.IllegalFlagValueError(
                f"--{self.name} is given twice, and only the last one would count: {advice}."
            )


class FlagGroup:
    """Defines a group of flags, with a title, for one subject.

    ``--help`` lists groups, and the flags of a group, in the order in which they were first
    defined. Other code may add flags to a group by its title.
    """

    def __init__(
        self,
        values: flags.FlagValues,
        title: str,
        default_texts: Mapping[str, str] | None = None,
    ) -> None:
        """Initialises the group.

        Args:
          values: The flag values in which flags are defined.
          title: The subject, such as ``Privacy``.
          default_texts: For flags whose default is None because it depends on other flags: a
            sentence about the default, by name, which the help prints after the flag's meaning.
        """
        self._values = values
        self._title = title
        self._default_texts = default_texts or {}

    def string(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes any text, and that may be given once."""
        _define_once(name, default, flags.ArgumentParser(), **self._options(name, meaning))

    def path(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag for a path (``resolved_path``), which may be given once."""
        _define_once(name, default, _PathParser(), **self._options(name, meaning))

    def integer(
        self, name: str, meaning: str, default: int | None = None, lower_bound: int | None = None
    ) -> None:
        """Defines a flag that takes an integer."""
        options = self._options(name, meaning)
        flags.DEFINE_integer(name, default, lower_bound=lower_bound, **options)

    def number(self, name: str, meaning: str, default: float | None = None) -> None:
        """Defines a flag that takes a real number."""
        flags.DEFINE_float(name, default, **self._options(name, meaning))

    def number_or_word(self, name: str, meaning: str, default: str | None = None) -> None:
        """Defines a flag that takes a number or a word; the last value counts."""
        flags.DEFINE_string(name, default, **self._options(name, meaning))

    def boolean(self, name: str, meaning: str, default: bool | None = None) -> None:
        """Defines a flag that is set by ``--name`` and unset by ``--noname``."""
        flags.DEFINE_bool(name, default, **self._options(name, meaning))

    def choice(
        self, name: str, choices: Sequence[str], meaning: str, default: str | None = None
    ) -> None:
        """Defines a flag that takes one of several words."""
        flags.DEFINE_enum(name, default, list(choices), **self._options(name, meaning))

    def words(self, name: str, meaning: str, default: Sequence[str] | None = None) -> None:
        """Defines a flag that takes words separated by commas, and that may be given once."""
        words = None if default is None else list(default)
        _define_once(name, words, flags.ListParser(), **self._options(name, meaning))

    def repeated_paths(self, name: str, meaning: str) -> None:
        """Defines a flag for a path that may be given several times; its value is a list."""
        parser, serializer = _PathParser(), flags.ArgumentSerializer()
        flags.DEFINE_multi(parser, serializer, name, [], **self._options(name, meaning))

    def overwrite(self, outputs: str = "--output") -> None:
        """Defines --overwrite, which lets a command replace the files at ``outputs``."""
        self.boolean("overwrite", f"Whether {outputs} may replace existing files.", False)

    def require(self, *names: str) -> None:
        """Requires that one of some flags is given, which ``command_line.run`` checks.

        Args:
          *names: Flags that are defined already, of any group; a single flag is required itself.
        """
        setattr(self._values[names[0]], _ALTERNATIVES, names)

    def _options(self, name: str, meaning: str) -> dict[str, object]:
        """Options of absl's functions that define a flag: its help, and the group."""
        text = " ".join(filter(None, [meaning, self._default_texts.get(name)]))
        return {"help": text, "flag_values": self._values, "module_name": self._title}


def _define_once(
    name: str,
    default: object,
    parser: flags.ArgumentParser,  # type: ignore[type-arg, unused-ignore]
    *,
    help: object,
    **others: object,
) -> None:
    is_list = isinstance(parser, flags.ListParser)
    serializer = flags.CsvListSerializer(",") if is_list else flags.ArgumentSerializer()
    flags.DEFINE_flag(_OnceFlag(parser, serializer, name, default, help), **others)


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
    """Checks that a file or directory can be written, without leaving anything behind.

    Args:
      path: The file or directory; its parents may be missing if they can be created.
      flag: The flag that named it, for the message.
      overwrite: Whether something of that name may be there already.
      is_directory: Whether the path is for a directory; a file never replaces a directory.

    Raises:
      CommandError: If the path cannot be written, or exists and must not.
    """
    target = pathlib.Path(path)
    with _refusing(path, flag):
        check_choice(
            is_directory or not target.is_dir(),
            f"--{flag}={path} is a directory: choose another name.",
        )
        check_choice(
            overwrite or not os.path.lexists(target),
            f"--{flag}={path} exists already: replace it by --overwrite, or choose another name.",
        )
        _try(target.absolute().parent, target.name)


def check_output(
    path: str | os.PathLike[str],
    flag: str,
    overwrite: bool,
    checkpoint: str | None = None,
    ending: str = "",
) -> None:
    """Checks an output file; its directory has to exist.

    The file must not be inside a checkpoint, because a checkpoint with other files is never
    replaced.

    Args:
      path: The file.
      flag: The flag that named it, for the message.
      overwrite: Whether something of that name may be there already.
      checkpoint: A checkpoint that must not contain the file, or be inside it; None for none.
      ending: The required ending of the file's name; None for any.

    Raises:
      CommandError: If the file has another ending, its directory does not exist, one of file and
        checkpoint contains the other, or the file cannot be written, or exists and must not.
    """
    is_fit = not ending or pathlib.Path(path).suffix == ending
    check_choice(is_fit, f"--{flag} must name a {ending} file, found {path}.")
    with _refusing(path, flag):
        check_choice(
            pathlib.Path(path).absolute().parent.is_dir(),
            f"the directory of --{flag}={path} does not exist: make it, or choose another one.",
        )
        if checkpoint is not None:
            # Unlike Path.resolve, realpath accepts links that lead to themselves.
            file, directory = (pathlib.Path(os.path.realpath(each)) for each in (path, checkpoint))
            check_choice(
                not file.is_relative_to(directory) and not directory.is_relative_to(file),
                f"--{flag}={path} overlaps with the checkpoint {checkpoint}: choose another place.",
            )
    check_file(path, flag, overwrite)


def check_distinct(
    written: Mapping[str, Sequence[str | os.PathLike[str]]],
    read: Mapping[str, Sequence[str | os.PathLike[str]]],
) -> None:
    """Checks that no file is written twice, and that no input file is overwritten.

    Args:
      written: The files that each flag writes.
      read: Those that each flag reads.

    Raises:
      CommandError: If there is such a file; the message names both flags.
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
    """Checks that a training run can write files into a directory, and removes its traces.

    Args:
      path: The directory; it may be missing if it can be created.
      flag: The flag that named it, for the message.

    Raises:
      CommandError: If the path is not a directory, cannot be created, no file can be written there,
        or a name in the path is not UTF-8, which TensorFlow needs.
    """
    try:
        os.path.abspath(path).encode("utf-8")
    except UnicodeEncodeError:
        raise CommandError(
            f"--{flag}={path} is not valid UTF-8, and TensorFlow cannot write there: choose "
            "another place."
        ) from None
    with _refusing(path, flag):
        _try(pathlib.Path(path).absolute(), "output")


def cache_directory(
    named: str | None, folder: str, say: Callable[[str], None]
) -> pathlib.Path | None:
    """Returns the directory of a command's cache.

    Args:
      named: The value of --cache_dir; None if it was not given.
      folder: The folder of the user's cache that is used without --cache_dir.
      say: Called with one line that explains why nothing more can be cached, if this is so.

    Returns:
      The directory, which may be readable but not writable; None if it cannot be created (the
      command goes on without a cache).
    """
    directory = atomic_files.find_cache(folder) if named is None else pathlib.Path(named)
    reason = "there is no home directory"
    if directory is not None:
        try:
            _try(directory, "output")
            return directory
        except OSError as error:
            reason = f"{directory} cannot be written: {error.strerror}"
    say(f"warning: results are not cached ({reason}): name a directory by --cache_dir.")
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
    """Tries to create a directory, and a temporary file's directory in it, and removes both."""
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
