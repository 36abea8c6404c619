"""A package with a sampling scheme, as docs/other-packages.md prints it.

It is built and installed elsewhere, and goes through plan, run and report.
"""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import venv
import zipfile

import numpy as np
import pytest

import mf_aggregators as mfa
from tests import console_commands

_SETUP = """
import setuptools
setuptools.setup(
    name="random-order",
    version="1.0",
    py_modules=["random_order"],
    entry_points={"mf_aggregators.sampling_schemes": ["random_order = random_order:RandomOrder"]},
)
"""
_TARGET = ("--target_epsilon=8", "--delta=1e-4", "--model_size=1000")
# A small model, and 33 clients.
_TRAINING = ("simulations.examples.digit_classification.run_digits", "--examples_per_client=60")


def _printed_code() -> str:
    text = (console_commands.ROOT / "docs" / "other-packages.md").read_text(encoding="utf-8")
    start = text.index("```python\n", text.index("## A sampling scheme of another package"))
    return text[start:].split("```")[1].removeprefix("python\n")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the Python of an environment with the package, which sees this one's."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "random_order.py").write_text(_printed_code())
    (folder / "setup.py").write_text(_SETUP)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    ours = sysconfig.get_path("purelib")
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return environment / "bin"


def _run(programs: pathlib.Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(programs / "python"), "-m", module, *arguments],
        cwd=console_commands.ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )


def _result(programs: pathlib.Path, module: str, *arguments: str) -> dict[str, object]:
    finished = _run(programs, module, *arguments, "--format=json")
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert isinstance(found, dict)
    return found


def test_a_scheme_is_planned(programs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """By what its draws keep: each client every fourth round, three times."""
    plan = _result(
        programs,
        "mf_aggregators.commands.plan",
        "--num_rounds=12",
        "--population=40",
        "--clients_per_round=10",
        "--sampling=random_order",
        *_TARGET,
        f"--cache_dir={tmp_path / 'cache'}",
    )
    candidates = plan["candidates"]
    assert isinstance(candidates, list)
    assert candidates
    # Draws are no secret that the guarantee rests on, and the class is the package's.
    condition = json.dumps(plan)
    assert "random_order.RandomOrder(" in condition
    assert "secret for ever" not in condition
    for candidate in candidates:
        assert candidate["sampling"]["name"] == "random_order"
        expected = np.sqrt(3) * mfa.accounting.noise_multiplier(8.0, 1e-4)
        assert candidate["noise_multiplier"] >= expected * (1.0 - 1e-6)


@pytest.mark.long
def test_a_scheme_draws_a_run_whose_ledger_is_reported_on(
    programs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    run = tmp_path / "run"
    _result(
        programs,
        *_TRAINING,
        f"--output_dir={run}",
        "--mechanism=banded",
        "--num_bands=2",
        "--sampling=random_order",
        "--num_rounds=6",
        "--clients_per_round=8",
        "--target_epsilon=8",
        "--delta=0.01",
    )
    statement = json.loads((run / "privacy.json").read_text())
    assert statement["status"] == "finished"
    # Four batches of eight clients, twice at most: as if all draws were known.
    assert statement["amplification"]["name"] == "random_order"
    earned = statement["earned"]
    assert 7.5 < earned["epsilon"] <= 8.0
    text = (run / "PRIVACY.md").read_text()
    assert "amplifies nothing" in text
    assert "with amplification" not in text.lower()
    assert "secret here" not in text
    single = earned["noise_multiplier"] / np.sqrt(2.0)
    assert earned["epsilon"] == pytest.approx(mfa.accounting.epsilon(single, 0.01), rel=1e-6)
    report = _result(
        programs,
        "mf_aggregators.commands.report",
        f"--checkpoint={run / 'factorization'}",
        f"--ledger={run / 'participation.npz'}",
        f"--noise_multiplier={earned['noise_multiplier']}",
        "--delta=0.01",
    )
    assert report["sampling_deviation"] is None
