"""A package with a mechanism and a sampling scheme, as docs/other-packages.md prints them.

It is built and installed elsewhere, and goes through plan, run, report and audit.
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
    name="discounted-noise",
    version="1.0",
    py_modules=["discounted_noise", "random_order"],
    entry_points={
        "mf_aggregators.mechanisms": ["discounted = discounted_noise:Discounted"],
        "mf_aggregators.sampling_schemes": ["random_order = random_order:RandomOrder"],
    },
)
"""
_TARGET = ("--target_epsilon=8", "--delta=1e-4", "--model_size=1000")
# A small model, and 33 clients.
_TRAINING = ("simulations.examples.digit_classification.run_digits", "--examples_per_client=60")


def _printed_code(heading: str) -> str:
    text = (console_commands.ROOT / "docs" / "other-packages.md").read_text(encoding="utf-8")
    start = text.index("```python\n", text.index(f"## {heading} of another package"))
    return text[start:].split("```")[1].removeprefix("python\n")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the Python of an environment with the package, which sees this one's."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "discounted_noise.py").write_text(_printed_code("A mechanism"))
    (folder / "random_order.py").write_text(_printed_code("A sampling scheme"))
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


def test_it_is_factorized_reported_and_planned(
    programs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    made = _result(
        programs,
        "mf_aggregators.commands.factorize",
        "--mechanism=discounted",
        "--discount=0.6",
        "--num_rounds=12",
        "--separation=3",
        f"--output={checkpoint}",
    )
    assert made["mechanism"] == "discounted"
    # All that one client may do: rounds 0, 3, 6, 9, whose columns do not meet.
    assert made["sensitivity"] == pytest.approx(np.sqrt(4 * (1 + 0.6**2)))
    report = _result(
        programs,
        "mf_aggregators.commands.report",
        f"--checkpoint={checkpoint}",
    )
    assert report["sensitivity"] == made["sensitivity"]
    decoder = np.tri(12) @ np.linalg.inv(np.eye(12) + 0.6 * np.eye(12, k=-1))
    assert report["total_error"] == pytest.approx(
        float(made["sensitivity"]) * np.linalg.norm(decoder)  # type: ignore[arg-type]
    )
    plan = _result(
        programs,
        "mf_aggregators.commands.plan",
        "--num_rounds=12",
        "--population=300",
        "--clients_per_round=10",
        "--separation=3",
        *_TARGET,
        f"--cache_dir={tmp_path / 'cache'}",
    )
    candidates = plan["candidates"]
    assert isinstance(candidates, list)
    assert "discounted" in [candidate["mechanism"] for candidate in candidates]


def test_its_option_belongs_to_it_alone(programs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    finished = _run(
        programs,
        "mf_aggregators.commands.factorize",
        "--mechanism=identity",
        "--discount=0.6",
        "--num_rounds=4",
        f"--output={tmp_path / 'checkpoint'}",
    )
    assert finished.returncode == 2
    assert "--discount belongs to --mechanism=discounted" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.long_cases(0)
@pytest.mark.long
def test_it_is_audited(programs: pathlib.Path) -> None:
    audit = _result(
        programs,
        "mf_aggregators.commands.audit",
        "--mechanism=discounted",
        "--num_rounds=4",
        "--separation=2",
        "--canaries=300",
    )
    assert audit["mechanism"] == "discounted"
    assert audit["exceeded"] is False


@pytest.mark.long_cases(0)
@pytest.mark.long
def test_it_trains(programs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    result = _result(
        programs,
        *_TRAINING,
        f"--output_dir={tmp_path / 'run'}",
        "--mechanism=discounted",
        "--discount=0.7",
        "--num_rounds=3",
        "--clients_per_round=8",
        "--delta=0.01",
    )
    assert result["rounds"] == 3
    configuration = json.loads((tmp_path / "run" / "config.json").read_text())
    assert configuration["flags"]["discount"] == 0.7
    statement = (tmp_path / "run" / "PRIVACY.md").read_text()
    assert "Discounted matrix factorization" in statement


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
