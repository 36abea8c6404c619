"""A program that knows the proof alone accepts what is certified, and nothing that is better."""

import ast
import dataclasses
import itertools
import json
import pathlib

import numpy as np
import pytest

from mf_aggregators import calibrate, checkpoints
from mf_aggregators.factorizations import (
    Factorization,
    banded,
    banded_inverse,
    blt,
    identity,
    optimal,
    structured,
    toeplitz,
)
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    SingleParticipation,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy import statements
from tests import console_commands
from tests.mf_aggregators import small_mechanisms

_PROGRAM = "tools/check_certificate.py"
_QUICK = Certification(max_samples=2**15)
_BINS = BallsInBins(24, 24, 200, 40, 5)
_CASES: list[tuple[Factorization, MinSeparationSampling | BallsInBins]] = [
    (blt(24, 2), _BINS),
    (toeplitz(24, 3), dataclasses.replace(_BINS, num_bands=3)),
    (banded(4, 2), MinSeparationSampling(4, 2, 300, 20, 3)),
]
_MORE_CASES: list[tuple[Factorization, MinSeparationSampling | BallsInBins]] = [
    (banded(8, 2), MinSeparationSampling(8, 2, 300, 20, 3)),
    (banded_inverse(24, 3), _BINS),
    (optimal(24), _BINS),
    (banded(24, 8), dataclasses.replace(_BINS, num_bands=8)),
    (identity(24), dataclasses.replace(_BINS, num_bands=1)),
    (banded(24, 3), MinSeparationSampling(24, 3, 300, 20, 4)),
]


def _guarantee(matrix: Factorization, scheme: MinSeparationSampling | BallsInBins) -> Guarantee:
    found = small_mechanisms.sampled(matrix, scheme, 1.4, 1e-3, certification=_QUICK)
    assert found.claim.certificate is not None
    return found


def _save(matrix: Factorization, found: Guarantee, directory: pathlib.Path) -> None:
    checkpoints.save(matrix, directory / "factorization")
    noise = {"noise_multipliers": [repr(found.noise_multiplier)]}
    document = {"planned": statements.described(found), "noise": noise}
    (directory / "privacy.json").write_text(json.dumps(document))


def _status(matrix: pathlib.Path, *flags: str) -> int:
    return int(console_commands.call(_PROGRAM, str(matrix), *flags).status)


def test_the_program_is_short_and_imports_numpy_alone() -> None:
    text = (console_commands.ROOT / _PROGRAM).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    allowed = {"argparse", "collections.abc", "itertools", "json", "math", "numpy", "pathlib"}
    assert imported == allowed


@pytest.mark.long_cases(3)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("matrix", "scheme"),
    [*_CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in _MORE_CASES)],
)
def test_what_is_certified_is_accepted_and_what_is_a_fifth_better_is_not(
    matrix: Factorization, scheme: MinSeparationSampling | BallsInBins, tmp_path: pathlib.Path
) -> None:
    """Of a run directory; fresh random bits err in 10^-6 of tests of a false claim."""
    found = _guarantee(matrix, scheme)
    _save(matrix, found, tmp_path)
    assert _status(tmp_path) == 0
    assert _status(tmp_path, f"--epsilon={0.8 * found.epsilon}") == 1


@pytest.mark.parametrize(
    ("matrix", "timers"),
    [
        (banded(24, 4), MinSeparation(6, 3)),
        (toeplitz(24), MinSeparation(6, 3)),
        (blt(24, 2), MinSeparation(5)),
        (banded_inverse(24, 3), SingleParticipation()),
        # The six digits of a statement are of less noise than the run had.
        (banded(24, 4), SingleParticipation()),
    ],
)
def test_plans_of_timers_are_shown_and_what_is_any_better_is_not(
    matrix: Factorization, timers: Participation, tmp_path: pathlib.Path
) -> None:
    found = calibrate(matrix, timers, epsilon=8.0, delta=1e-5).guarantee(1e-5)
    _save(matrix, found, tmp_path)
    assert _status(tmp_path) == 0
    assert _status(tmp_path, f"--epsilon={found.epsilon * (1.0 - 1e-9)}") == 1


def test_norms_are_bounded_for_all_signs_and_patterns(tmp_path: pathlib.Path) -> None:
    generator = np.random.default_rng(1)
    for _ in range(20):
        matrix = np.tril(generator.standard_normal((6, 6))) + 2.0 * np.eye(6)
        patterns = [p for p in itertools.combinations(range(6), 2) if p[1] - p[0] >= 2]
        signs = np.array([[1.0, 1.0], [1.0, -1.0]])
        truth = max(np.max(np.linalg.norm(matrix[:, p] @ signs, axis=0)) for p in patterns)
        np.save(tmp_path / "c.npy", matrix)
        flags = ["--timers=2", "--most=2", "--sigma=1", "--delta=1e-5", "--epsilon=1"]
        shown = console_commands.call(_PROGRAM, str(tmp_path / "c.npy"), *flags)
        assert float(shown.printed.split()[5].rstrip(":")) >= truth * (1.0 - 1e-9)


@pytest.mark.parametrize(
    ("matrix", "flags", "status"),
    [
        (np.tri(4), ["--timers=2", "--sigma=-9"], 1),
        # Drawn integers have no proof for a larger shift.
        (np.tri(4), ["--timers=4", "--sigma=0.39", "--epsilon=99"], 1),
        (np.tri(4), ["--timers=2", "--sigma=9", "--most=0"], 2),
        (np.tri(4), ["--timers=2", "--sigma=9", "--epsilon=1000"], 2),
        (np.tri(4), ["--timers=0", "--sigma=9"], 2),
        # What a client adds may follow from noise that is drawn for a later round.
        (np.tri(4).T, ["--timers=2", "--sigma=9"], 2),
        (np.tri(4, k=-1), ["--timers=2", "--sigma=9"], 2),
    ],
)
def test_no_epsilon_is_shown_of_what_is_no_plan(
    matrix: np.ndarray, flags: list[str], status: int, tmp_path: pathlib.Path
) -> None:
    np.save(tmp_path / "c.npy", matrix)
    assert _status(tmp_path / "c.npy", "--epsilon=8", "--delta=1e-5", *flags) == status


def test_a_file_of_a_matrix_is_charged_for_any_noise(tmp_path: pathlib.Path) -> None:
    """Entries of either sign count alike, and a bin more in the mixture makes another claim."""
    matrix = structured(optimal(24), 2, 2)
    found = _guarantee(matrix, _BINS)
    signs = np.where(np.arange(24) % 2, -1.0, 1.0)
    np.save(tmp_path / "c.npy", matrix.strategy_matrix() * signs)
    flags = [f"--noise_multiplier={found.noise_multiplier}", f"--delta={found.delta}"]
    held = f"--epsilon={1.01 * found.epsilon}"
    assert _status(tmp_path / "c.npy", *flags, "--bins=5", held) == 0
    assert _status(tmp_path / "c.npy", *flags, "--bins=4", held) == 1
    assert _status(tmp_path / "c.npy", *flags, "--bins=5", f"--epsilon={0.8 * found.epsilon}") == 1


def test_both_divergences_are_those_of_an_integral(tmp_path: pathlib.Path) -> None:
    """Of two bins that share a row, by the trapezoidal rule.

    Of fresh samples each time: the means have standard deviations of 0.5 % and, of 8,192 samples,
    4 %. Six of them leave a false alarm in less than 10^-8 of runs.
    """
    matrix, sigma, epsilon = np.array([[1.0, 0.0], [0.5, 0.7]]), 0.4, 6.0
    np.save(tmp_path / "c.npy", matrix)
    x = np.linspace(-9.0, 14.0, 1500)
    vectors = matrix / np.max(np.linalg.norm(matrix, axis=0)) / sigma
    exponents = [
        np.add.outer(v[0] * x, v[1] * x) - 0.5 * v @ v for v in (vectors[:, 0], vectors[:, 1])
    ]
    loss = np.logaddexp(*exponents) - np.log(2.0)
    density = np.exp(-0.5 * np.add.outer(x**2, x**2)) * (x[1] - x[0]) ** 2 / (2.0 * np.pi)
    forward = np.sum(density * np.maximum(np.exp(loss) - np.exp(epsilon), 0.0))
    backward = np.sum(density * np.maximum(1.0 - np.exp(epsilon + loss), 0.0))
    flags = [f"--noise_multiplier={sigma}", f"--epsilon={epsilon}", "--bins=2"]
    largest = max(forward, backward)
    shown = console_commands.call(
        _PROGRAM, str(tmp_path / "c.npy"), *flags, f"--delta={1.03 * largest}"
    )
    found = [float(line.split()[3].rstrip(",")) for line in shown.printed.splitlines()[:2]]
    assert shown.status == 0
    assert found == [pytest.approx(forward, rel=0.03), pytest.approx(backward, rel=0.24)]
    assert _status(tmp_path / "c.npy", *flags, f"--delta={0.97 * largest}") == 1


@pytest.mark.parametrize(
    "flags",
    [[], ["--bins=10", "--epsilon=1", "--delta=1e-3"], ["--bins=x"], ["--separation=2"]],
)
def test_what_is_no_claim_ends_in_one_line(tmp_path: pathlib.Path, flags: list[str]) -> None:
    np.save(tmp_path / "c.npy", np.tri(4))
    ended = console_commands.call(_PROGRAM, str(tmp_path / "c.npy"), *flags)
    assert ended.refused(has_begun=True).startswith("check_certificate")
    assert console_commands.call(_PROGRAM, str(tmp_path / "none"), *flags).status == 2


def test_a_run_under_timers_has_no_certificate_to_be_refuted(tmp_path: pathlib.Path) -> None:
    """Status 1 would say that its plan was not shown."""
    (tmp_path / "privacy.json").write_text('{"planned": {"sampling": null}}')
    console_commands.call(_PROGRAM, str(tmp_path)).refused()
