"""What needs too much memory is refused before any of it is allocated."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import checkpoints, factorizations, inputs, workloads
from mf_aggregators.kernel import rows
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.participation import MinSeparation
from tests.refusals import refuses

_AVAILABLE = 2e9
_MAKERS: dict[str, Callable[[int], Any]] = {
    "workload": workloads.prefix_sum,
    "momentum": workloads.momentum_sgd,
    "identity": factorizations.identity,
    "tree": factorizations.tree_aggregation,
    "toeplitz": lambda n: factorizations.toeplitz(n, 4, coefficients="square_root"),
    "banded_inverse": lambda n: factorizations.banded_inverse(n, 4, coefficients="square_root"),
    "blt": lambda n: factorizations.blt(n, 1),
}


@pytest.fixture
def _two_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_available_bytes", lambda: _AVAILABLE)


@pytest.mark.usefixtures("_two_gigabytes")
@pytest.mark.parametrize("make", _MAKERS.values(), ids=_MAKERS)
@pytest.mark.parametrize("num_rounds", [10**9, 2**63, 10**200])
def test_too_many_rounds_are_refused_before_they_are_allocated(
    make: Callable[[int], object], num_rounds: int
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MemoryError):
            make(num_rounds)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("_two_gigabytes")
def test_dense_matrices_are_refused() -> None:
    # Read-only views: of these workloads, nothing is allocated.
    ones = np.broadcast_to(1.0, (20_000, 20_000))
    with pytest.raises(MemoryError):
        factorizations.optimal(ones)
    with pytest.raises(MemoryError):
        factorizations.banded(ones, 4)
    with pytest.raises(MemoryError):
        factorizations.structured(factorizations.identity(20_000), 4, 2)


def _structured(num_rounds: int) -> factorizations.Factorization:
    """A structured matrix: its arrays are small, and its C is not."""
    arrays = np.ones((num_rounds, 1)), *2 * (np.zeros((num_rounds, 1)),)
    few = factorizations.structured(factorizations.identity(4), 1, 1)
    contents = dict(zip(few.arrays(), arrays, strict=True))
    return type(few).from_arrays(num_rounds, contents, participation=None, optimality_gap=None)


@pytest.mark.usefixtures("_two_gigabytes")
def test_mechanisms_are_refused_whose_matrix_the_kernel_has_no_memory_for() -> None:
    large = _structured(20_000)

    def make() -> None:
        with refuses("19.2 GB", "2 GB", "Toeplitz", error=MemoryError):
            mfa.Mechanism(large, MinSeparation(4), 1.0)

    assert _peak(make) < 1e6


def test_the_kernel_says_what_to_do_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_available_bytes", lambda: 256e6)
    recursion = _structured(4000).noise_recursion()
    with inputs.limited_memory(), refuses("4000 rounds", "fewer", "BLT", error=NotProved):
        rows.strategy_of(recursion, 4000)


def _peak(make: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_estimate_is_above_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An estimate that is too high would refuse what works: compared with measured peaks."""
    estimates: list[float] = []
    monkeypatch.setattr(
        inputs, "check_memory", lambda needed, what, advice: estimates.append(needed)
    )
    prefix_sum = workloads.prefix_sum
    few, many = 150, 20_000
    known = factorizations.from_matrix(prefix_sum(few))

    def saved(factorization: factorizations.Factorization) -> None:
        checkpoints.save(factorization, tmp_path_factory.mktemp("saved") / "checkpoint")

    cases: dict[str, Callable[[], object]] = {
        "workload": lambda: prefix_sum(1000),
        "momentum": lambda: workloads.momentum_sgd(1000),
        "identity": lambda: saved(factorizations.identity(many)),
        "tree": lambda: saved(factorizations.tree_aggregation(many)),
        "toeplitz": lambda: saved(_MAKERS["toeplitz"](many)),
        "banded_inverse": lambda: saved(_MAKERS["banded_inverse"](many)),
        "blt": lambda: saved(factorizations.blt(many, 1)),
        "optimal": lambda: factorizations.optimal(prefix_sum(few), relative_gap=0.1),
        "banded": lambda: factorizations.banded(
            prefix_sum(few), 4, participation=MinSeparation(4), relative_gap=0.1
        ),
        "structured": lambda: factorizations.structured(factorizations.identity(few), 4, 2),
        "guarantee": lambda: mfa.Mechanism(known, MinSeparation(4), 1.0).guarantee(1e-6),
    }
    for name, make in cases.items():
        estimates.clear()
        peak = _peak(make)
        assert estimates, name
        assert max(estimates) <= peak, name


def test_what_is_small_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_available_bytes", lambda: 0.0)
    factorizations.tree_aggregation(1000)
    with pytest.raises(MemoryError):
        factorizations.tree_aggregation(10**7)


def test_within_the_limit_an_allocation_fails_that_the_kernel_would_grant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "_available_bytes", lambda: 256e6)
    with inputs.limited_memory():
        np.empty(64 << 20, np.uint8)
        with pytest.raises(MemoryError):
            np.empty(1 << 30, np.uint8)
    np.empty(1 << 30, np.uint8)


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    with open("/proc/meminfo", encoding="ascii") as file:
        total = int(next(file).split()[1]) * 1024
        swap = sum(int(line.split()[1]) for line in file if line.startswith("SwapTotal")) * 1024
    assert 0 < inputs._available_bytes() <= total + swap
