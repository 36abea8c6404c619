"""What cannot be installed beside TensorFlow Federated, each in an environment that it makes.

``MF_AGGREGATORS_FLOWER`` and ``MF_AGGREGATORS_PYTORCH`` may name a Python that has what is listed
here, and finds this library. Without them, uv installs it.
"""

import os
import pathlib
import re
import subprocess
import tempfile
import time

import numpy as np
import pytest

import mf_aggregators as mfa
import quickstart

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SECONDS = 1500
_FLOWER = ("-e", f"{_ROOT}[flower]", "scikit-learn", "pytest", "pytest-timeout", "hypothesis")
# Later ones work as well; PyTorch for x86-64 brings gigabytes for graphics cards in any case.
_PYTORCH = ("-e", str(_ROOT), "scikit-learn", "torch==2.2.2", "numpy<2")

pytestmark = [pytest.mark.begun_first, pytest.mark.long, pytest.mark.timeout(3 * _SECONDS)]


def _python(variable: str, packages: tuple[str, ...]) -> str:
    """A Python with packages. Whatever is missing for it fails the tests, and skips none."""
    if variable in os.environ:
        return os.environ[variable]
    uv = quickstart.find_uv()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="environment-"))
    _run([uv, "venv", "--python", "3.11", str(folder)])
    python = str(folder / "bin" / "python")
    # The lock of this project leaves out what Flower needs.
    _run([uv, "pip", "install", "--no-config", "--python", python, *packages])
    return python


def _run(command: list[str], cwd: pathlib.Path = _ROOT) -> str:
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=_variables(),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def _variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    # Ray gives up on a busy machine after a minute.
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "600"}


def _block(page: str, language: str, beginning: str) -> str:
    """A block of a tutorial, as it is printed."""
    text = (_ROOT / "docs" / "tutorials" / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (found,) = (each for each in blocks if each.startswith(beginning))
    return str(found)


def test_the_strategy_keeps_its_short_tests_in_flower_itself() -> None:
    """The stand-in for Flower says nothing that Flower does not."""
    python = _python("MF_AGGREGATORS_FLOWER", _FLOWER)
    # Where it cannot be imported, the tests take the stand-in.
    _run([python, "-c", "import flwr.app, flwr.serverapp.strategy, flwr.simulation"])
    tests = "tests/mf_aggregators/test_flower.py"
    found = _run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests])
    assert re.search(r"^\d+ passed", found, re.MULTILINE)


def _program(folder: pathlib.Path) -> pathlib.Path:
    """The page's program, with a seed that a test may give, and its model in a file."""
    text = _block("with-flower.md", "python", "import sys")
    seeded = "0.3, cohort, directory, **({'seed': int(sys.argv[3])} if sys.argv[3:] else {})"
    assert text.count("0.3, cohort, directory") == 1
    text = text.replace("0.3, cohort, directory", seeded)
    last = "    print(result.evaluate_metrics_serverapp[num_rounds])\n"
    assert text.count(last) == 1
    saved = '    np.savez(directory + ".npz", **{k: a.numpy() for k, a in result.arrays.items()})\n'
    path = folder / "flower_digits.py"
    path.write_text(text.replace(last, last + saved), encoding="utf-8")
    return path


def test_a_killed_simulation_ends_in_the_same_model(tmp_path: pathlib.Path) -> None:
    """20 rounds: once without a stop, and once killed in the middle and started again."""
    python = _python("MF_AGGREGATORS_FLOWER", _FLOWER)
    program = _program(tmp_path)
    _run([python, str(program), "whole", "20", "7"], tmp_path)
    command = [python, str(program), "killed", "20", "7"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=_variables(),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + _SECONDS
            while not list((tmp_path / "killed").glob("model-00000[5-9].npz")):
                assert process.poll() is None, (tmp_path / "said").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            # With the processes of its clients.
            os.killpg(process.pid, 9)
            process.wait()
    assert not (tmp_path / "killed.npz").exists()
    _run(command, tmp_path)
    whole, killed = (np.load(tmp_path / f"{name}.npz") for name in ("whole", "killed"))
    for name in ("kernel", "bias"):
        assert whole[name].tobytes() == killed[name].tobytes()
    observed = mfa.load(tmp_path / "killed" / "mechanism").observed(tmp_path / "killed/ledger.npz")
    assert observed.keeps_participation
    assert observed.participation.num_rounds == 20
    report = [python, "-m", "mf_aggregators.commands.report", "--delta=1e-4", "--clip_norm=0.3"]
    report += ["--checkpoint=killed/mechanism", "--ledger=killed/ledger.npz", "--public_data=none"]
    report += ["--statement=PRIVACY.md", "--population=143", "--clients_per_round=10"]
    report += ["--enforcement=The server drew clients by the names that they said."]
    printed = _run(report, tmp_path)
    assert re.search(r"^keeps_plan +True$", printed, re.M)
    assert re.search(r"^realised_epsilon +8$", printed, re.M)
    assert "(8, 0.0001)-differential privacy" in (tmp_path / "PRIVACY.md").read_text("utf-8")


def test_the_page_of_pytorch_runs_as_printed() -> None:
    """It learns (0.83 to 0.88, where guesses give 0.1), and states its epsilon."""
    program = _block("with-pytorch.md", "python", "import torch")
    printed = _run([_python("MF_AGGREGATORS_PYTORCH", _PYTORCH), "-c", program])
    found = re.search(r"test accuracy (0\.\d\d), epsilon 8\.0", printed)
    assert found is not None, printed
    assert float(found[1]) > 0.7
