r"""Builds a release of the commit, and tries it in fresh environments.

  python3 -m tools.check_release
  python3 -m tools.check_release --output=dist
  python3 -m tools.check_release --pythons= --federated=
  python3 -m tools.check_release --tag=v2.0.0 --output=dist --notes=notes.md

The wheel and the source archive are compared with the repository. Each is then installed for each
of --pythons without TensorFlow, where the commands of the mathematics run and have to find the same
numbers, and once more with the oldest versions of what setup.py asks for. For each of --federated
the wheel is installed with the locked packages of TensorFlow Federated, and trains. The last line
says how many environments were tried. Packages come from the package index, or from uv's cache.

With --tag, the tag has to be that of the version. --notes writes what the changelog says of it.
--output has the bill of materials as well: the locked packages and their hashes, in CycloneDX.
"""

import argparse
import ast
import configparser
import glob
import importlib.util
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from typing import NamedTuple

import quickstart

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("mf_aggregators", "simulations", "stackoverflow_nwp")
# Files that build tools add to a source archive, and that the repository does not have.
_ADDED_TO_SOURCES = ("PKG-INFO", "setup.cfg", "mf_aggregators.egg-info/")
_OLDEST = "lowest-direct"
_BILL_OF_MATERIALS = "mf_aggregators-sbom.cdx.json"
_SECONDS = 1800

_MATHEMATICS = (
    "mf-factorize --mechanism=banded --num_rounds=60 --num_bands=8 --separation=20 --output=banded",
    "mf-factorize --mechanism=blt --num_rounds=60 --num_buffers=2 --separation=20 --output=blt",
    "mf-report --checkpoint=banded --target_epsilon=8 --delta=1e-5",
    "mf-plan --num_rounds=12 --population=80 --clients_per_round=10 --target_epsilon=8 "
    "--delta=1e-3 --model_size=1000",
    "mf-plan --num_rounds=12 --population=80 --clients_per_round=10 --target_epsilon=8 "
    "--delta=1e-3 --model_size=1000 --sampling=poisson",
    "simulate-participation --population=60 --clients_per_round=5 --num_rounds=8 --separation=3",
)
# Fields of the commands' output that must agree in all environments, to this many digits.
_COMPARED = ("rmse", "max_error", "sensitivity", "epsilon", "noise_multiplier", "recommended")
_DIGITS = ".6g"
_FEDERATED = (
    "mf-report --checkpoint=banded --target_epsilon=8 --delta=1e-5 --figure=a.png",
    "mf-plan --num_rounds=12 --population=80 --clients_per_round=10 --target_epsilon=8 "
    "--delta=1e-3 --model_size=1000",
    "make-text-dataset --input=notes.jsonl --client_column=author --text_column=text "
    "--output=notes.sqlite",
    "run-digits --num_rounds=2 --clients_per_round=4 --output_dir=digits",
    "run-stackoverflow --num_rounds=2 --clients_per_round=4 --vocab_size=8 --embedding_size=4 "
    "--lstm_size=4 --dataset=notes.sqlite --delta=1e-2 --output_dir=words",
    "mf-audit --mechanism=identity --num_rounds=4 --canaries=250",
)
# A command that needs packages which are not installed, and has to say which.
_REFUSED = "run-digits --num_rounds=2 --output_dir=refused"


class ReleaseError(Exception):
    """A release has a fault; the message says which."""


class Archives(NamedTuple):
    """The two files of a release: the wheel and the source archive."""

    wheel: pathlib.Path
    sources: pathlib.Path


def version() -> str:
    """Returns the version of the library, from its source."""
    path = ROOT / "mf_aggregators" / "version.py"
    spec = importlib.util.spec_from_file_location("version", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)


def changes() -> str:
    """Returns the section of the changelog about the version.

    Raises:
      ReleaseError: If the changelog has no such section.
    """
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    pattern = rf"^## \[{re.escape(version())}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
    found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    if found is None or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section and date for {version()}.")
    return found[1].strip() + "\n"


def commands() -> list[str]:
    """Returns the names of the console commands that a wheel has."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_COMMANDS":
            return sorted(script.partition("=")[0] for script in ast.literal_eval(node.value))
    raise ReleaseError("setup.py names no console commands.")


def tracked() -> list[str]:
    """Returns the files that git tracks."""
    listed = _output(["git", "ls-tree", "-r", "--name-only", "-z", "HEAD"], ROOT)
    return sorted(filter(None, listed.split("\0")))


def build(uv: str, output: pathlib.Path) -> Archives:
    """Builds the source archive from the commit, and the wheel from the source archive.

    Args:
      uv: A uv executable.
      output: Where the archives go.

    Returns:
      The archives.
    """
    with tempfile.TemporaryDirectory() as folder:
        exported = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(exported)) as archive:
            archive.extractall(folder)
        _output([uv, "build", "--no-config", f"--out-dir={output.absolute()}", folder], ROOT)
    stem = f"mf_aggregators-{version()}"
    return Archives(output / f"{stem}-py3-none-any.whl", output / f"{stem}.tar.gz")


def write_bill_of_materials(uv: str, output: pathlib.Path) -> pathlib.Path:
    """Writes the locked packages with their hashes as a bill of materials.

    Args:
      uv: A uv executable.
      output: The folder that the file goes to.

    Returns:
      The file, in the format of CycloneDX 1.5.
    """
    path = output.absolute() / _BILL_OF_MATERIALS
    command = [uv, "export", "--frozen", "--extra=tff", "--no-dev", "--format=cyclonedx1.5"]
    _output([*command, "--quiet", f"--output-file={path}"], ROOT)
    described = json.loads(path.read_text(encoding="utf-8"))
    # Set the version of this package, which uv.lock does not have.
    described["metadata"]["component"]["version"] = version()
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return path


def check_contents(archives: Archives) -> None:
    """Compares the files in the archives with those of the commit.

    Args:
      archives: The release.

    Raises:
      ReleaseError: If a file is missing or too many, or a command has no entry point.
    """
    files = tracked()
    with zipfile.ZipFile(archives.wheel) as wheel:
        names = wheel.namelist()
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        sections = configparser.ConfigParser()
        sections.read_string(wheel.read(entry_points).decode())
    installed = [name for name in names if ".dist-info/" not in name]
    of_packages = [name for name in files if name.startswith(tuple(f"{p}/" for p in PACKAGES))]
    _same(archives.wheel, installed, of_packages)
    _same(archives.wheel, list(sections["console_scripts"]), commands())
    with tarfile.open(archives.sources) as sources:
        members = [member.name.partition("/")[2] for member in sources if member.isfile()]
    packed = [name for name in members if not name.startswith(_ADDED_TO_SOURCES)]
    _same(archives.sources, packed, files)


def _same(archive: pathlib.Path, found: Sequence[str], expected: Sequence[str]) -> None:
    if sorted(found) != sorted(expected):
        lacks, extra = sorted({*expected} - {*found}), sorted({*found} - {*expected})
        raise ReleaseError(f"{archive.name} lacks {lacks}, and has the unexpected {extra}.")


class Environment:
    """A fresh Python environment, with a work folder that has nothing of this repository."""

    def __init__(self, uv: str, python: str, folder: pathlib.Path) -> None:
        self._uv = uv
        self._bin = folder / "environment" / "bin"
        self._folder = folder / "work"
        self._folder.mkdir()
        notes = [
            {"author": f"author {number % 80}", "text": f"this is the number {number} of all ."}
            for number in range(400)
        ]
        (self._folder / "notes.jsonl").write_text("".join(f"{json.dumps(n)}\n" for n in notes))
        keep = ("HOME", "PATH", "LANG", "SSL_CERT_FILE", "HTTPS_PROXY")
        self._variables = {name: os.environ[name] for name in keep if name in os.environ} | {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        _output([uv, "venv", "--python", python, str(self._bin.parent)], folder)

    def install(self, *arguments: str) -> None:
        """Installs packages, as ``uv pip install`` takes them."""
        python = str(self._bin / "python")
        _output([self._uv, "pip", "install", "--python", python, *arguments], self._folder)

    def run(self, line: str, expected: int = 0) -> tuple[str, str]:
        """Runs a command; returns its standard output and its standard error."""
        program, *arguments = line.split()
        # Output goes to files, because a worker process that outlives its command would keep pipes
        # open.
        printed, said = self._folder / "printed", self._folder / "said"
        with printed.open("w") as out, said.open("w") as err:
            ended = subprocess.run(
                [str(self._bin / program), *arguments],
                cwd=self._folder,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=_SECONDS,
                check=False,
            )
        if ended.returncode != expected:
            *_, last = ["nothing", *said.read_text().strip().splitlines()]
            raise ReleaseError(f"{line!r} ended with status {ended.returncode}: {last}")
        return printed.read_text(), said.read_text()

    def check_commands(self) -> dict[str, object]:
        """Runs commands without TensorFlow; returns numbers that must agree everywhere."""
        code = "import mf_aggregators, importlib.metadata as m; "
        code += "print(mf_aggregators.__version__, m.version('mf-aggregators'))"
        (self._folder / "version.py").write_text(code)
        printed, _ = self.run("python version.py")
        if printed.split() != [version(), version()]:
            raise ReleaseError(f"the version that is installed is {printed}, not {version()}.")
        for command in commands():
            self.run(f"{command} --help")
        found = {}
        for line in _MATHEMATICS:
            fields = json.loads(self.run(f"{line} --format=json")[0])
            for name in _COMPARED:
                value = fields.get(name)
                if value is not None:
                    text = format(value, _DIGITS) if isinstance(value, float) else value
                    found[f"{name} of {line}"] = text
        return found

    def check_refusal(self) -> None:
        """Checks that training without TensorFlow is refused with a message that says why."""
        _, said = self.run(_REFUSED, expected=2)
        if " --no-deps -r " not in said or "requirements-tff.txt" not in said:
            raise ReleaseError(f"{_REFUSED!r} does not say what to install: {said}")

    def check_training(self) -> None:
        """Runs the commands that train and attack models."""
        for line in _FEDERATED:
            self.run(f"{line} --format=json")


def find_python(uv: str, wanted: str) -> str:
    """Returns a Python of a version such as 3.12; uv may download it."""
    found = quickstart.output_of(
        [uv, "python", "find", "--no-project", "--no-python-downloads", wanted]
    )[1]
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    for python in (found, *sorted(glob.glob(f"{pyenv}/versions/{wanted}.*/bin/python{wanted}"))):
        if python and quickstart.python_version(python) == wanted:
            return python
    return wanted


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=pathlib.Path, help="directory of the archives")
    made.add_argument("--pythons", default="3.10,3.11,3.12,3.13", help="those without TensorFlow")
    made.add_argument("--federated", default="3.10,3.11", help="those with TensorFlow Federated")
    made.add_argument("--tag", help="the tag that names the release")
    made.add_argument("--notes", type=pathlib.Path, help="file for the notes of the release")
    return made


def main(arguments: Sequence[str]) -> int:
    """Builds a release and tries it; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.tag not in (None, f"v{version()}"):
            raise ReleaseError(f"the tag is {options.tag}, and the version is {version()}.")
        said = changes()
        _check(
            options.output,
            list(filter(None, options.pythons.split(","))),
            list(filter(None, options.federated.split(","))),
        )
        if options.notes is not None:
            options.notes.write_text(said, encoding="utf-8")
    except (ReleaseError, quickstart.SetupError, OSError, subprocess.SubprocessError) as error:
        print(f"check_release: {error}", file=sys.stderr)
        return 1
    return 0


def _check(output: pathlib.Path | None, pythons: list[str], federated: list[str]) -> None:
    if quickstart.output_of(["git", "status", "--porcelain"])[1]:
        _say("uncommitted changes are not in the release")
    uv = quickstart.find_uv()
    with tempfile.TemporaryDirectory() as temporary:
        folder = output or pathlib.Path(temporary)
        archives = build(uv, folder)
        check_contents(archives)
        write_bill_of_materials(uv, folder)
        _say(f"{archives.wheel.name} and {archives.sources.name} hold the committed files")
        wheel, sources = (str(each.absolute()) for each in archives)
        # The environments to try, with the packages to install in each, and whether these have
        # TensorFlow.
        trials = [
            trial
            for python in pythons
            for trial in (
                (python, "the wheel", [wheel], False),
                (python, "the source archive", [sources], False),
            )
        ]
        if pythons:
            oldest = [wheel, f"--resolution={_OLDEST}"]
            trials.append((pythons[0], "the wheel with the oldest packages", oldest, False))
        trials += [
            (python, "the wheel with TensorFlow Federated", [wheel], True) for python in federated
        ]
        first: dict[str, object] = {}
        for python, what, packages, is_federated in trials:
            _say(f"Python {python}: {what}")
            with tempfile.TemporaryDirectory() as fresh:
                environment = Environment(uv, find_python(uv, python), pathlib.Path(fresh))
                if is_federated:
                    environment.install("--no-deps", "-r", str(ROOT / "requirements-tff.txt"))
                    environment.install("--no-deps", *packages)
                else:
                    environment.install(*packages)
                found = environment.check_commands()
                if is_federated:
                    environment.check_training()
                else:
                    environment.check_refusal()
            first = first or found
            if found != first:
                differs = sorted(name for name in first if first[name] != found.get(name))
                raise ReleaseError(f"Python {python}, {what}: other numbers: {differs}")
        _say(f"{len(trials)} environments passed")


def _output(command: Sequence[str], folder: pathlib.Path) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        reason = quickstart.reason_in(ended.stderr)
        raise ReleaseError(f"{' '.join(command[:3])} failed: {reason}")
    return ended.stdout


def _say(line: str) -> None:
    print(f"check_release: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
