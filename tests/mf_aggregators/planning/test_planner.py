"""Plans against matrices and accountants."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import math
import multiprocessing
import os
import pathlib
import signal
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import psutil
import pytest

from mf_aggregators import (
    accounting,
    atomic_files,
    checkpoints,
    factorizations,
    lower_bounds,
    planning,
    version,
    workloads,
)
from mf_aggregators.atomic_files import CacheWarning
from mf_aggregators.catalogue import Variant
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel.certificate import Certificate
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    BallsInBins,
    FixedEpochOrder,
    MinSeparation,
    MinSeparationSampling,
    PoissonSampling,
    SamplingScheme,
    certificate_search,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.planning import Plan, planner
from tests.examples import covering
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.planning.small_settings import TIMERS
from tests.refusals import refuses

_ROW_IN_BYTES = 4000


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def with_timers(cache: pathlib.Path) -> Plan:
    return planning.make(TIMERS, cache_directory=cache)


@pytest.fixture(scope="module")
def with_sampling(cache: pathlib.Path) -> Plan:
    setting = dataclasses.replace(
        TIMERS, num_rounds=8, population=80, participation=None, sampling="poisson", epsilon=4.0
    )
    return planning.make(setting, cache_directory=cache)


def _check(plan: Plan) -> None:
    """What holds of every plan."""
    errors = [candidate.effective_rmse for candidate in plan.candidates]
    assert errors == sorted(errors)
    assert any(candidate is plan.recommended for candidate in plan.candidates)
    assert plan.recommended.effective_rmse <= 1.005 * errors[0]
    assert plan.recommended.name in plan.reason
    assert plan.reason.endswith(".")
    assert "\n" not in plan.reason
    limit = plan.setting.noise_memory
    for candidate in plan.candidates:
        assert limit is None or candidate.cost.kept_bytes <= limit
        assert candidate.mechanism.factorization.mechanism == candidate.kind or (
            (candidate.kind, candidate.mechanism.factorization.mechanism)
            in {("tree", "tree_aggregation"), ("optimal", "dense")}
        )
        assert math.isfinite(candidate.effective_rmse)


def _made(cache: pathlib.Path | None, **changes: Any) -> Plan:
    plan = planning.make(dataclasses.replace(TIMERS, **changes), cache_directory=cache)
    _check(plan)
    return plan


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("name", ["with_timers", "with_sampling"])
def test_effective_errors_from_dense_matrices_and_the_accountant(
    request: pytest.FixtureRequest, name: str
) -> None:
    """BandMF Eq. 11: root of L / n, times sigma, over B."""
    plan = request.getfixturevalue(name)
    _check(plan)
    rounds, batch = plan.setting.num_rounds, plan.setting.clients_per_round
    for candidate in plan.candidates:
        matrix = candidate.mechanism.factorization
        # B = A C^-1 for what the noise rows C^-1 Z add up to.
        decoder = np.tri(rounds) @ matrix.noising_matrix()
        sensitivity = matrix.sensitivity(candidate.mechanism.noise_reference).value
        if candidate.kind != "tree":
            rows = sensitivity**2 * np.sum(decoder**2, axis=1)
            assert candidate.errors.rmse == pytest.approx(math.sqrt(np.mean(rows)))
            assert candidate.errors.max_error == pytest.approx(math.sqrt(np.max(rows)))
        if candidate.mechanism.sampling is None:
            epsilon = accounting.epsilon(candidate.mechanism.noise_multiplier, plan.setting.delta)
        else:
            assert (
                matrix.strategy_bands()
                == candidate.mechanism.sampling.num_bands
                == candidate.num_bands
            )
            norms = np.linalg.norm(matrix.strategy_matrix(), axis=0)
            assert sensitivity == pytest.approx(np.max(norms))
            epsilon = sampling_scheme(
                candidate.mechanism.sampling.name,
                num_rounds=rounds,
                num_bands=candidate.mechanism.sampling.num_bands,
                population=plan.setting.population,
                clients_per_round=batch,
            ).epsilon(candidate.mechanism.noise_multiplier, plan.setting.delta)
        assert epsilon == pytest.approx(plan.setting.epsilon, rel=2e-3)
        scale = candidate.mechanism.noise_multiplier / batch
        assert candidate.effective_rmse == pytest.approx(candidate.errors.rmse * scale, rel=1e-12)
        assert candidate.max_effective_error == pytest.approx(candidate.errors.max_error * scale)
        recursion = matrix.noise_recursion()
        kept = 4 * recursion.num_earlier_rows + 8 * recursion.num_state_vectors
        assert candidate.cost.kept_bytes == 1000 * kept


def test_timers_compare_every_mechanism(with_timers: Plan) -> None:
    assert {candidate.kind for candidate in with_timers.candidates} == {
        "identity",
        "tree",
        "blt",
        "banded_inverse",
        "toeplitz",
        "banded",
        "structured",
    }
    assert not with_timers.infeasible
    # The most bands that the timers allow.
    best = with_timers.candidates[0]
    assert (best.kind, best.num_bands) == ("banded", 6)
    own = factorizations.banded(workloads.prefix_sum(24), 6)
    assert best.errors.rmse == pytest.approx(
        own.rmse(workloads.prefix_sum(24), MinSeparation(6)), 1e-3
    )
    bound = lower_bounds.compute(workloads.prefix_sum(24), MinSeparation(6))
    assert bound is not None
    for candidate in with_timers.candidates:
        assert candidate.over_lower_bound == pytest.approx(candidate.errors.rmse / bound.rmse)
        assert candidate.errors.rmse >= bound.rmse


def test_sampling_compares_bands_and_fixed_epochs(with_sampling: Plan) -> None:
    amplified = [each for each in with_sampling.candidates if each.mechanism.sampling is not None]
    assert sorted(each.num_bands or 0 for each in amplified) == [1, 2, 4, 8]
    (fixed,) = (each for each in with_sampling.candidates if each.mechanism.sampling is None)
    assert fixed.mechanism.noise_reference == FixedEpochOrder(1, 8)
    assert fixed.mechanism.noise_multiplier == accounting.noise_multiplier(4.0, 1e-6)
    assert {each.over_lower_bound for each in amplified} == {None}


@pytest.fixture(scope="module")
def with_any(cache: pathlib.Path) -> Plan:
    setting = dataclasses.replace(
        TIMERS,
        num_rounds=12,
        population=80,
        participation=None,
        sampling=planning.ANY_SAMPLING,
        delta=1e-3,
    )
    return planning.make(setting, cache_directory=cache)


@pytest.mark.long
def test_all_ways_of_taking_part_are_compared(with_any: Plan) -> None:
    _check(with_any)
    ways = {
        None if each.mechanism.sampling is None else each.mechanism.sampling.name
        for each in with_any.candidates
    }
    of_server = {"poisson", "truncated_poisson", "random_allocation"}
    assert ways == {None, "min_separation", "balls_in_bins", *of_server}
    timers = [
        each for each in with_any.candidates if each.mechanism.noise_reference == MinSeparation(8)
    ]
    assert {"banded", "blt", "tree"} <= {each.kind for each in timers}
    separated = {
        (each.num_bands, each.mechanism.sampling.separation)
        for each in with_any.candidates
        if isinstance(each.mechanism.sampling, MinSeparationSampling)
    }
    assert separated == {(1, 1), (1, 2), (2, 2), (2, 3), (2, 4), (4, 4), (4, 6), (4, 8), (8, 8)}
    bins = {
        each.kind: each.mechanism.sampling.separation
        for each in with_any.candidates
        if isinstance(each.mechanism.sampling, BallsInBins)
    }
    assert set(bins.values()) == {8}
    # Also those without bands, and trees, whose rows of noise a square matrix makes.
    assert {"identity", "banded", "blt", "banded_inverse", "tree"} <= set(bins)


@pytest.mark.long
def test_what_is_recommended_is_certified(with_any: Plan, cache: pathlib.Path) -> None:
    """Clients that draw for themselves win here, and their other rows are estimates."""
    chosen = with_any.recommended
    assert isinstance(chosen.mechanism.sampling, MinSeparationSampling | BallsInBins)
    assert not chosen.is_estimate
    assert chosen.name_with_sampling in with_any.reason
    estimates = [each for each in with_any.candidates if each.is_estimate]
    assert estimates
    assert all(
        isinstance(each.mechanism.sampling, MinSeparationSampling | BallsInBins)
        for each in estimates
    )
    stated = chosen.mechanism.guarantee(
        with_any.setting.delta, certification=Certification(directory=cache)
    )
    assert stated.claim.certificate is not None
    assert 0.9 * with_any.setting.epsilon <= stated.epsilon <= with_any.setting.epsilon


@pytest.mark.long
def test_a_plan_makes_no_more_tests_than_delta_pays_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none proves anything, each row that is certified makes way for another estimate."""
    tested: set[str] = set()

    def is_proved(mechanism: Any, claim: Certificate, *unused: Any, **options: Any) -> bool:
        del unused, options
        tested.add(f"{mechanism.columns.tobytes()!r} {mechanism.sigma} {claim}")
        return False

    monkeypatch.setattr(certificates, "is_proved", is_proved)
    setting = dataclasses.replace(
        TIMERS,
        num_rounds=8,
        population=64,
        participation=None,
        sampling="min_separation",
        delta=1e-2,
    )
    plan = planning.make(setting)
    chosen = plan.recommended
    assert not chosen.is_estimate
    stated = chosen.mechanism.guarantee(setting.delta, certification=Certification())
    assert stated.epsilon <= setting.epsilon
    assert 0 < len(tested) <= certificates.ATTEMPTS * certificates.MECHANISMS
    assert any(each.is_estimate for each in plan.candidates)
    assert "delta does not cover a test of" in plan.reason


def test_bands_that_a_scheme_refuses_are_infeasible(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_one_band(name: str, *, num_bands: int, **sizes: Any) -> SamplingScheme:
        if num_bands > 1:
            raise ValueError("only one band is proved.")
        return sampling_scheme(name, num_bands=num_bands, **sizes)

    monkeypatch.setattr(planner, "sampling_scheme", with_one_band)
    setting = dataclasses.replace(TIMERS, num_rounds=8, participation=None, sampling="poisson")
    plan = planning.make(setting, cache_directory=cache, mechanisms=["identity", "banded"])
    assert [each.name for each in plan.candidates] == ["identity"]
    assert set(plan.infeasible.values()) == {"poisson: only one band is proved"}


def test_a_guarantee_without_memory_is_infeasible(
    cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of 200,000 bins, whose products take 300 GB: the other mechanisms are compared."""
    guarantee = Mechanism.guarantee

    def limited(mechanism: Mechanism, *arguments: Any, **options: Any) -> Any:
        if mechanism.factorization.mechanism == "banded":
            raise MemoryError
        return guarantee(mechanism, *arguments, **options)

    monkeypatch.setattr(Mechanism, "guarantee", limited)
    plan = planning.make(TIMERS, cache_directory=cache, mechanisms=["identity", "banded"])
    assert {each.kind for each in plan.candidates} == {"identity"}
    assert {"more memory" in reason for reason in plan.infeasible.values()} == {True}


def test_returning_clients_of_a_fixed_order(cache: pathlib.Path) -> None:
    """Nobody returns within an epoch of m / B batches."""
    plan = _made(cache, num_rounds=8, population=35, participation=None, sampling="shuffling")
    (fixed,) = (each for each in plan.candidates if each.mechanism.sampling is None)
    assert fixed.mechanism.noise_reference == FixedEpochOrder(3, 3)
    assert max(each.num_bands or 0 for each in plan.candidates) == 3


@pytest.mark.parametrize(
    ("sampling", "rounds"), covering([None, "poisson", "fixed_size", "shuffling"], [1, 2, 3])
)
def test_few_rounds(cache: pathlib.Path, rounds: int, sampling: str | None) -> None:
    # As many groups as batches: nothing is amplified, and nothing takes long.
    plan = _made(
        cache,
        num_rounds=rounds,
        population=10 * rounds,
        participation=MinSeparation(rounds) if sampling is None else None,
        sampling=sampling,
    )
    if rounds == 1:
        assert all(each.errors.rmse == pytest.approx(1.0) for each in plan.candidates)
        # One round has one output: nothing beats what costs least.
        assert plan.recommended.kind == "identity"


@pytest.mark.parametrize("rows", [0, 1, 2, 2.99, 3, 5])
def test_the_memory_budget_is_kept(cache: pathlib.Path, rows: float) -> None:
    plan = _made(cache, noise_memory=rows * _ROW_IN_BYTES)
    bands = [each.num_bands or 0 for each in plan.candidates if each.kind == "banded"]
    # b bands keep b - 1 rows, and one band is identity.
    assert max(bands, default=1) == int(rows) + 1
    assert ("banded 6" in plan.infeasible) == (rows < 5)
    assert all("noise" in reason for reason in plan.infeasible.values())
    kept = {each.name for each in plan.candidates}
    assert not kept & plan.infeasible.keys()
    # A state vector is as large as two rows.
    assert ("blt 2" in kept) == (rows >= 4)


@pytest.mark.parametrize(("seconds", "expected"), [((0.08702, 0.08701), 0), ((0.087, 0.07), 1)])
def test_what_costs_the_same_as_printed_is_no_reason(
    with_any: Plan, seconds: tuple[float, float], expected: int
) -> None:
    best = with_any.candidates[0]
    alike = [
        dataclasses.replace(best, cost=dataclasses.replace(best.cost, seconds_per_round=each))
        for each in seconds
    ]
    assert planner._recommended(alike) is alike[expected]


@pytest.mark.long
def test_structured_of_bands_keeps_less_than_they_do(cache: pathlib.Path) -> None:
    """Clients that return: where memory is short, it is better than what else fits."""
    schema, memory = MinSeparation(40), 16.0 * _ROW_IN_BYTES
    plan = _made(cache, num_rounds=120, population=400, participation=schema, noise_memory=memory)
    best = plan.candidates[0]
    base = best.variant.base
    assert base is not None
    assert (best.kind, base.name) == ("structured", "banded 40")
    # Its sensitivity is an upper bound, and counts every participation that is allowed.
    strategy = best.mechanism.factorization.strategy_matrix()
    pattern = strategy[:, ::40].sum(axis=1)
    found = best.mechanism.factorization.sensitivity(MinSeparation(40)).value
    assert found >= np.linalg.norm(pattern) * (1 - 1e-12)


@pytest.mark.parametrize("epsilon", [1e-6, pytest.param(200.0, marks=pytest.mark.long)])
def test_far_targets(cache: pathlib.Path, epsilon: float) -> None:
    plan = _made(cache, epsilon=epsilon)
    assert (
        accounting.epsilon(plan.recommended.mechanism.noise_multiplier, 1e-6)
        <= epsilon * (1 + 1e-6) + 2e-11
    )
    assert plan.recommended.server_learning_rate > 0.0


def test_a_second_plan_is_the_same_and_searches_for_no_bound(
    cache: pathlib.Path, with_timers: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_bounds, "compute", None)
    assert planning.make(TIMERS, cache_directory=cache) == with_timers
    # As it is with a limit that suffices.
    assert planning.make(TIMERS, cache_directory=cache, time_limit=1e6) == with_timers


def test_what_is_not_done_in_time_is_skipped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def none_ends(searches: Mapping[str, Any], *_: object) -> Iterator[Callable[[str], bool]]:
        def wait(name: str) -> bool:
            if name in searches:
                raise planner._SkippedError(f"one of {len(searches)} does not end")
            return False

        yield wait

    monkeypatch.setattr(planner, "_computing", none_ends)
    names = ["identity", "tree", "banded", "structured"]

    def make(time_limit: float, directory: pathlib.Path | None) -> Plan:
        return planning.make(
            TIMERS,
            cache_directory=directory,
            mechanisms=names,
            time_limit=time_limit,
        )

    for time_limit, directory, reason in (
        (600.0, tmp_path, "one of 4 does not end"),
        (600.0, None, "one of 4 does not end"),
        (1e-9, None, "was not begun within the time limit"),
    ):
        fewest = 24 if "end" in reason else 25
        monkeypatch.setattr(planner, "_FEWEST_ROUNDS_OF_PROCESSES", fewest)
        plan = make(time_limit, directory)
        assert {each.kind for each in plan.candidates} == {"identity", "tree"}
        assert plan.recommended.name == "tree full"
        reasons = dict(plan.skipped)
        assert reasons.pop("banded 6") == reason
        assert set(reasons) == {"structured 4 8", "structured 4 16", "banded 4"}
        assert reasons["structured 4 8"] == "approximates banded 6, which is skipped"
    names[:] = ["banded"]
    with refuses("no mechanism that fits was computed within 1e-09 s"):
        make(1e-9, tmp_path)


@pytest.mark.parametrize("error", ["mean", "max"])
def test_mechanisms_that_may_go_on_are_compared_at_both_horizons(
    cache: pathlib.Path, error: str
) -> None:
    timers = MinSeparation(3)
    setting = dataclasses.replace(
        TIMERS, num_rounds=8, participation=timers, may_extend_to=12, error=error
    )
    plan = planning.make(setting, cache_directory=cache)
    found = []
    for each in plan.candidates:
        assert each.extended is not None
        assert each.extended_errors is not None
        whole, matrix = each.extended, each.mechanism.factorization.strategy_matrix()
        dense = whole.factorization.strategy_matrix()
        if each.kind != "tree":
            np.testing.assert_allclose(dense[:8, :8], matrix, rtol=0, atol=1e-14)
        # The noise stays: less of it is left relative to what a client of more rounds changes.
        sensitivity = brute_force.scalar_sensitivity(dense, timers)
        assert whole.noise_multiplier <= each.mechanism.sigma / sensitivity
        assert whole.noise_multiplier == pytest.approx(each.mechanism.sigma / sensitivity, rel=0.1)
        assert each.extended_epsilon == whole.guarantee(1e-6).epsilon > 8.0
        errors = [each.errors, each.extended_errors]
        compared = [each.max_error if error == "max" else each.rmse for each in errors]
        if each.kind != "tree":
            rows = np.sum(np.square(np.tri(12) @ np.linalg.inv(dense)), axis=1)
            of_rows = float(np.max(rows) if error == "max" else np.mean(rows))
            stated = whole.factorization.sensitivity(whole.noise_reference).value
            assert compared[1] == pytest.approx(math.sqrt(of_rows) * stated)
        both = math.sqrt(compared[0] * compared[1]) * each.mechanism.noise_multiplier / 10
        assert each.ranked_error == pytest.approx(both)
        assert each.effective_error_extended == pytest.approx(
            compared[1] * whole.noise_multiplier / 10
        )
        found.append(both)
    assert found == sorted(found)
    assert plan.recommended.ranked_error <= 1.005 * found[0]
    assert "of 8 and 12 rounds" in plan.reason
    for name in ("optimal", "structured", "banded_inverse", "tree full"):
        reasons = [reason for key, reason in plan.infeasible.items() if key.startswith(name)]
        assert all("cannot be extended" in reason for reason in reasons)
    again = planning.make(setting, cache_directory=cache)
    assert [each.mechanism for each in again.candidates] == [
        each.mechanism for each in plan.candidates
    ]


def test_what_cannot_go_on_so_far_is_infeasible_with_its_number() -> None:
    setting = dataclasses.replace(TIMERS, epsilon=0.5, may_extend_to=256)
    plan = planning.make(setting, mechanisms=["tree", "identity"])
    assert [each.kind for each in plan.candidates] == ["identity"]
    assert "at most 127 rounds" in plan.infeasible["tree online"]


def test_only_named_mechanisms_are_evaluated(cache: pathlib.Path) -> None:
    names = ["toeplitz", "blt"]
    plan = planning.make(TIMERS, cache_directory=cache, mechanisms=names)
    assert {each.kind for each in plan.candidates} == set(names)
    with refuses("bands", "identity", "tree"):
        planning.make(TIMERS, mechanisms=["blt", "bands"])
    with refuses("time_limit"):
        planning.make(TIMERS, time_limit=0.0)


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    setting = dataclasses.replace(
        TIMERS, num_rounds=3, population=30, participation=MinSeparation(3)
    )
    with pytest.warns(CacheWarning):
        _check(planning.make(setting, cache_directory=file / "cache"))


def _note(directory: pathlib.Path, variant: Variant) -> None:
    """Stands for a search, whose name is that of a file with the files that were there before.

    Args:
      directory: Where files are written.
      variant: ``fails`` and ``dies`` write no file, and ``hangs`` never ends while it writes one.
    """
    if variant.kind == "fails":
        raise ValueError("this one cannot be computed")
    if variant.kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if variant.kind == "hangs":
        with atomic_files.writing(directory / "hangs") as file:
            file.write(b"half of it")
            file.flush()
            time.sleep(600.0)
    there = sorted(path.name for path in directory.iterdir())
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    (directory / variant.kind).write_text(" ".join([threads, *there]))


def _searches(*names: str, based: str = "") -> dict[str, Variant]:
    found = {name: Variant(name) for name in names}
    return found | ({based: Variant(based, base=found[names[0]])} if based else {})


def test_searches_run_elsewhere_and_are_waited_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    searches = _searches("first", "fails", based="second")
    compute = functools.partial(_note, tmp_path)
    with planner._computing(searches, compute, processes=7) as wait:
        for name in (*searches, "another"):
            wait(name)
    # What approximates another factorization begins when that is there; seven cores are shared.
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"first": "2", "second": "2 first"}
    assert os.environ["OPENBLAS_NUM_THREADS"] == "5"


def test_a_process_that_dies_is_no_loss(tmp_path: pathlib.Path) -> None:
    compute = functools.partial(_note, tmp_path)
    searches = _searches("dies", based="second")
    with planner._computing(searches, compute, processes=1) as wait:
        for name in searches:
            wait(name)
    assert not list(tmp_path.iterdir())


def test_what_still_runs_ends_with_the_plan(tmp_path: pathlib.Path) -> None:
    compute = functools.partial(_note, tmp_path)
    before = set(multiprocessing.active_children())
    with planner._computing(_searches("hangs"), compute, 1, time.monotonic()) as wait:
        # A busy machine takes its time to start a process.
        while not any(path.stat().st_size for path in tmp_path.iterdir()):
            time.sleep(0.1)
        with pytest.raises(planner._SkippedError):
            wait("hangs")
        started = set(multiprocessing.active_children()) - before
    # A thread of the pool may have waited for it first, and not have noted yet that it has ended.
    assert started
    assert not any(psutil.pid_exists(each.pid) for each in started)
    # No half of a file is left.
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_plan_does_not_depend_on_who_computes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_FEWEST_ROUNDS_OF_PROCESSES", 1)
    setting = planning.Setting(64, 800, 100, MinSeparation(8), None, 8.0, 1e-4, 1000)
    plans = [
        planner.make(
            setting,
            cache_directory=tmp_path / str(processes),
            processes=processes,
            # One of which is based on another.
            mechanisms=["toeplitz", "banded", "structured"],
        )
        for processes in (1, 2)
    ]
    alone, together = (
        {each.name: (each.errors.rmse, each.mechanism.noise_multiplier) for each in plan.candidates}
        for plan in plans
    )
    assert list(alone) == list(together)
    for name, numbers in alone.items():
        assert together[name] == pytest.approx(numbers, rel=1e-6)
    kept = [{path.name for path in (tmp_path / name).iterdir()} for name in ("1", "2")]
    assert kept[0] == kept[1]


# The cache of matrices


def _fetched(
    cache: pathlib.Path, calls: list[int], num_bands: int = 2
) -> factorizations.Factorization:
    def compute() -> factorizations.Factorization:
        calls.append(num_bands)
        return factorizations.banded(6, num_bands)

    return planner.fetch(
        cache, {"mechanism": "banded", "num_rounds": 6, "num_bands": num_bands}, compute
    )


def test_a_matrix_is_searched_for_once_by_a_version_of_the_library(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    found = [_fetched(tmp_path, calls, num_bands) for num_bands in (2, 2, 3)]
    assert found[0].has_same_matrix(found[1])
    assert found[0].optimality_gap == found[1].optimality_gap
    monkeypatch.setattr("mf_aggregators.version.__version__", "0.0.0")
    _fetched(tmp_path, calls)
    assert calls == [2, 3, 2]


def test_a_damaged_or_foreign_matrix_is_searched_for_again(tmp_path: pathlib.Path) -> None:
    calls: list[int] = []
    first = _fetched(tmp_path, calls)
    (entry,) = tmp_path.iterdir()
    arrays = entry / checkpoints._ARRAYS_FILE
    for damage in (
        lambda: arrays.write_bytes(arrays.read_bytes()[:-7]),
        lambda: (entry / checkpoints._DESCRIPTION_FILE).unlink(),
        lambda: checkpoints.save(factorizations.banded(7, 2), entry),
    ):
        damage()
        with pytest.warns(CacheWarning):
            assert _fetched(tmp_path, calls).has_same_matrix(first)
        assert _fetched(tmp_path, calls).has_same_matrix(first)
    assert len(calls) == 4


_DRAWN_SIZES: dict[str, Any] = {"num_rounds": 6, "population": 90, "clients_per_round": 10}


def test_a_kept_noise_multiplier_is_for_what_it_follows_from(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates are not taken for certified numbers, nor another matrix's for this one's."""
    made = itertools.count(1.0)
    for kind in (MinSeparationSampling, PoissonSampling, Certification):
        name = "estimated" if kind is Certification else "calibrated"
        monkeypatch.setattr(kind, name, lambda *unused, **also_unused: next(made))
    for kind in (MinSeparationSampling, PoissonSampling):
        # Each number that is read is checked, and these keep any target.
        kept = types.SimpleNamespace(epsilon=0.0)
        monkeypatch.setattr(kind, "amplified", lambda *unused, kept=kept, **also_unused: kept)
    scheme = sampling_scheme("min_separation", **_DRAWN_SIZES, num_bands=2)
    poisson = sampling_scheme("poisson", **_DRAWN_SIZES, num_bands=2)
    bands = np.column_stack([np.ones(6), np.full(6, 0.5)])
    bands[0, 1] = 0.0
    first, second = (
        factorizations.BandedFactorization(bands * each) for each in ([1.0, 1.0], [1.0, 0.5])
    )

    def all_of() -> list[float]:
        return [
            planner.calibrated(
                matrix, each, epsilon, delta, tmp_path, is_estimate=rough
            ).noise_multiplier
            for each, epsilon, delta, matrix, rough in (
                (scheme, 4.0, 1e-6, first, False),
                (scheme, 4.0, 1e-6, first, True),
                (scheme, 4.0, 1e-6, second, False),
                (scheme, 4.0, 1e-6, second, True),
                (scheme, 4.0, 1e-5, first, False),
                (scheme, 5.0, 1e-6, first, False),
                (poisson, 4.0, 1e-6, first, False),
                (poisson, 4.0, 1e-5, first, False),
            )
        ]

    assert all_of() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert all_of() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    # Another version of the accounting, or of what it is built on, computes anew.
    monkeypatch.setattr(certificate_search, "ACCOUNTING_VERSION", "another one")
    assert min(all_of()) == 9.0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "another one")
    assert min(all_of()) == 17.0
    monkeypatch.setattr(version, "__version__", "another one")
    assert min(all_of()) == 25.0


def test_a_search_tests_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[float] = []

    def fails(run: Any, *_: Any) -> Any:
        tested.append(run.sigma)
        raise accounting.TailError("Nothing is proved.")

    monkeypatch.setattr(certificate_search, "_amplified", fails)
    scheme = MinSeparationSampling(4, 1, 40, 4, 1)
    enough = 2.0 * accounting.noise_multiplier(1.0, 1e-3, disjoint_participations=4)
    for most in (1, 3, certificates.MECHANISMS):
        tested.clear()
        found = scheme.calibrated(1.0, 1e-3, None, Certification(most_tests=most))
        assert found == pytest.approx(enough)
        assert 0 < len(tested) <= most
    for most in (0, certificates.MECHANISMS + 1):
        with pytest.raises(ValueError, match="most_tests"):
            Certification(most_tests=most)


def test_the_numbers_of_bands_are_powers_of_two_and_the_most() -> None:
    assert planning.powers_of_two(1) == [1]
    assert planning.powers_of_two(8) == [1, 2, 4, 8]
    assert planning.powers_of_two(342) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 342]
