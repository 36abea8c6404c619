"""What cannot be installed beside TensorFlow Federated, each in an environment that it makes.

``MF_AGGREGATORS_FLOWER`` and ``MF_AGGREGATORS_PYTORCH`` may name a Python that has what is listed
here, and finds this library. Without them, uv installs it.
"""

import os
import pathlib
import re
import subprocess
import tempfile

import pytest

import quickstart

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SECONDS = 1500
_FLOWER = ("-e", f"{_ROOT}[flower]", "scikit-learn", "pytest", "pytest-timeout", "hypothesis")
# Later ones work as well; PyTorch for x86-64 brings gigabytes for graphics cards in any case.
_PYTORCH = ("-e", str(_ROOT), "scikit-learn", "torch==2.2.2", "numpy<2")

pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * _SECONDS)]


def _python(variable: str, packages: tuple[str, ...]) -> str:
    """A Python with packages. Whatever is missing for it fails the tests, and skips none."""
    if variable in os.environ:
        return os.environ[variable]
    uv = quickstart.find_uv()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="environment-"))
    _run([uv, "venv", "--python", "3.11", str(folder)])
    python = str(folder / "bin" / "python")
    _run([uv, "pip", "install", "--python", python, *packages])
    return python


def _run(command: list[str]) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    ended = subprocess.run(
        command, cwd=_ROOT, env=kept, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_the_strategy_keeps_its_short_tests_in_flower_itself() -> None:
    """The stand-in for Flower says nothing that Flower does not."""
    python = _python("MF_AGGREGATORS_FLOWER", _FLOWER)
    tests = "tests/mf_aggregators/test_flower.py"
    found = _run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests])
    assert re.search(r"^\d+ passed", found, re.MULTILINE)


def test_the_page_of_pytorch_runs_as_printed() -> None:
    """It learns (0.86 once, where guesses give 0.1), and states its epsilon."""
    page = (_ROOT / "docs" / "tutorials" / "with-pytorch.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    printed = _run([_python("MF_AGGREGATORS_PYTORCH", _PYTORCH), "-c", program])
    found = re.search(r"test accuracy (0\.\d\d), epsilon 8\.0", printed)
    assert found is not None, printed
    assert float(found[1]) > 0.7
