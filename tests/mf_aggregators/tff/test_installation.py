"""What is said where TensorFlow Federated is missing, to users of a clone and of a wheel."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import mf_aggregators
from mf_aggregators.tff import installation

_ROOT = pathlib.Path(__file__).parents[3]
# Ends as where the package is not installed.
_ASK = "import sys; sys.modules['tensorflow'] = None; import mf_aggregators as mfa; "
_ASK += "mfa.accounting.epsilon(1.0, 1e-6); mfa.mf_dp_aggregator"


def _wheel(folder: pathlib.Path) -> pathlib.Path:
    """The library alone, as a wheel lays it out."""
    source = pathlib.Path(mf_aggregators.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, folder / "mf_aggregators", ignore=ignored)
    return folder


def _said(folder: pathlib.Path) -> str:
    """The last line of a program that asks for the aggregator, with the library of a folder."""
    ended = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]


def test_a_clone_has_a_command_of_its_own() -> None:
    said = _said(_ROOT)
    assert said.startswith("ModuleNotFoundError: mf_aggregators.mf_dp_aggregator needs tensorflow")
    assert "needs Python 3.10 or 3.11 on Linux (x86-64)" in said
    assert f"cd {shlex.quote(str(_ROOT))} && python3 quickstart.py setup" in said


def test_a_wheel_brings_the_list_that_its_line_installs(tmp_path: pathlib.Path) -> None:
    said = _said(_wheel(tmp_path))
    assert "quickstart" not in said
    words = shlex.split(said.partition("Type: ")[2])
    listed = pathlib.Path(words[words.index("-r") + 1])
    assert listed.is_relative_to(tmp_path)
    assert listed.read_bytes() == (_ROOT / "requirements-tff.txt").read_bytes()
    assert words[words.index("--no-deps") + 1] == "-r"
    assert words[0] == sys.executable


def test_other_missing_modules_are_not_explained() -> None:
    assert installation.explained("x", ModuleNotFoundError("no", name="mf_aggregators.y")) is None
    assert installation.explained("x", ModuleNotFoundError("no")) is None
    found = installation.explained("x", ModuleNotFoundError("no", name="tensorflow_privacy.y"))
    assert "x needs tensorflow_privacy, which is not installed." in str(found)


def test_setup_puts_the_list_into_wheels() -> None:
    assert '"mf_aggregators.tff": ["requirements-tff.txt"]' in (_ROOT / "setup.py").read_text()
