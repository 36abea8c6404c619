"""How many files a maintainer opens to follow one thing through the code.

``docs/architecture.md`` leads to a page for each journey, which lists its files. Where a small run
can show them, they are the files whose functions ran; elsewhere they are those that imports lead to
from the first file, within the named packages. What stands beside a path is a closed door: the
journey needs to know what it returns, and not how.
"""

import ast
import functools
import gc
import os
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

import mf_aggregators as mfa
from mf_aggregators.kernel import discrete_gaussian
from mf_aggregators.noise import FixedSeedWarning
from mf_aggregators.participation.monte_carlo.certification import Certification
from mf_aggregators.privacy import guarantees
from mf_aggregators.tff import tensor_streams
from mf_aggregators.tff.dp_query import MatrixFactorizationSumQuery
from mf_aggregators.tff.tensor_streams import NoiseOptions

ROOT = pathlib.Path(__file__).resolve().parent.parent
_LIBRARY = ROOT / "mf_aggregators"
_SPECS = (tf.TensorSpec([5], tf.float32),)
# A file of a journey: its name, where it is, and what its page says of it.
_STEP = re.compile(r"^\d+\. \[`([^`]+)`\]\(([^)]+)\):\n((?:   .*\n)+)", re.MULTILINE)

# Checks of arguments, and what processes tell one another of a refusal.
_TOOLS = ("kernel/validation.py", "memory.py", "tff/processes.py", "__init__.py")
_ROW_DOORS = (
    *_TOOLS,
    # Which storage is cheaper, the schema in the state, and the sum that the row is added to.
    *(
        "noise/costs.py",
        "kernel/noising_matrices.py",
        "tff/declared_participation.py",
        "tff/grid.py",
        "kernel/integers.py",
        "kernel/draws.py",
    ),
    # The names of its tensors, and the seed of a test.
    *("noise/nests.py", "noise/draws.py"),
    # How large rows may be, how many of them are charged for, and what else a checkpoint names.
    *("linear_algebra/", "kernel/gaussian.py", "participation", "kernel/sensitivity.py"),
    "factorizations/factorization.py",
)
_CHECK_IN_DOORS = (
    *_TOOLS,
    # Epsilons of one Gaussian mechanism, the schema that every draw keeps, and progress.
    *("kernel/arrays.py", "kernel/gaussian.py", "kernel/draws_of_clients.py"),
    *("kernel/discrete_gaussian.py", "participation/kinds.py"),
    "progress_bars.py",
)
_RUN_DOORS = (
    # Text as rows of token numbers, and where it comes from.
    *("stackoverflow_nwp/federated_text.py", "stackoverflow_nwp/token_arrays.py"),
    *("stackoverflow_nwp/docstrings.py", "stackoverflow_nwp/text_cleaning.py"),
    *("stackoverflow_nwp/shakespeare.py", "stackoverflow_nwp/character_task.py"),
    # What is handed to TensorFlow Federated: batches, rates, an aggregator, an evaluation, and the
    # weights that training begins with.
    *("simulations/training/model_parts.py", "simulations/training/weights_files.py"),
    *("simulations/training/task_parts.py", "simulations/training/learning_rate_schedules.py"),
    "simulations/training/private_aggregation.py",
    # Who of the devices takes part in a round, workers on other machines, an audit, and what is
    # measured and drawn of rounds.
    *("simulations/devices/availability.py", "simulations/devices/device_populations.py"),
    *("simulations/workers/", "simulations/runs/canary_clients.py"),
    *("simulations/runs/round_metrics.py", "simulations/runs/run_figures.py"),
)
_CLIP_DOORS = (
    *_TOOLS,
    *("kernel/", "factorizations/", "linear_algebra/", "noise/", "participation"),
    *("mechanism.py", "sensitivity.py", "tff/tensor_streams.py", "tff/tensor_rows.py"),
    *("tff/declared_participation.py", "kernel/integers.py"),
)


def _files_of(function: Callable[[], object], doors: tuple[str, ...]) -> set[str]:
    """The library's files whose functions run, but for doors and what runs behind them."""
    found: set[str] = set()
    behind = 0

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        nonlocal behind
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{_LIBRARY}/"):
            return
        file = code.co_filename.removeprefix(f"{_LIBRARY}/")
        if file.startswith(doors):
            behind += 1 if event == "call" else -1
        elif event == "call" and not behind and code.co_name != "<module>":
            found.add(file)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert behind == 0
    return found


def _all_files_of(function: Callable[[], object]) -> set[str]:
    """The library's files whose functions run, nothing subtracted, with empty caches."""
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper) and (
            each.__module__.startswith("mf_aggregators")
        ):
            each.cache_clear()
    return _files_of(function, ())


def _release(query: MatrixFactorizationSumQuery) -> np.ndarray:
    """What a round of one client releases."""
    state = query.initial_global_state()
    record = query.preprocess_record(query.derive_sample_params(state), [tf.ones([5])])
    (released,), _, _ = query.get_noised_result(record, state)
    return np.asarray(released)


def _listed(heading: str) -> set[str]:
    """The files that the page of a journey lists, each with names that it has."""
    documents = ROOT / "docs"
    overview = (documents / "architecture.md").read_text(encoding="utf-8")
    row = rf"^\| \[{re.escape(heading)}\]\((\S+)\) \| (\d+) \|$"
    ((link, number),) = re.findall(row, overview, re.MULTILINE)
    page = documents / link
    steps = _STEP.findall(page.read_text(encoding="utf-8"))
    assert len(steps) == int(number)
    for file, target, words in steps:
        path = (page.parent / target).resolve()
        assert path.as_posix().endswith(f"/{file}")
        code = path.read_text(encoding="utf-8")
        for name in re.findall(r"`(?:\w+\.)?([A-Za-z_]+)`", words):
            assert name in ("json", "npz") or re.search(rf"\b{name}\b", code), (file, name)
    return {file for file, *_ in steps}


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("storage", ["state", "disk"])
def test_a_row_of_noise_from_checkpoint_to_model(storage: str, tmp_path: pathlib.Path) -> None:
    mfa.checkpoints.save(mfa.factorizations.banded(8, num_bands=3), tmp_path / "banded")
    # Kept from another test, it would not be opened again.
    discrete_gaussian.table.cache_clear()
    released = []

    def journey() -> None:
        recursion = mfa.checkpoints.load(tmp_path / "banded").noise_recursion()
        options = NoiseOptions.of(storage, None, "chacha20")
        noise = tensor_streams.make(recursion, _SPECS, options)
        query = MatrixFactorizationSumQuery(
            recursion, list(_SPECS), l2_norm_clip=1.0, noise_stddev=2.0, seed=1, noise=noise
        )
        released.append(_release(query))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        found = _files_of(journey, _ROW_DOORS)
    assert np.std(released) > 0.1
    listed = _listed("a row of noise, from checkpoint to model")
    assert len(listed) <= 9
    on_disk = {"tff/rows_on_disk.py", "noise/noise_directory.py", "tff/noise_files.py"}
    on_disk |= {"tff/release_record.py"}
    if storage == "state":
        assert found == listed
    else:
        assert found - {"atomic_files.py"} == listed | on_disk


def test_a_clip_norm_that_adapts() -> None:
    def journey() -> None:
        aggregator = mfa.mf_dp_aggregator(
            mfa.factorizations.identity(8),
            participation=mfa.participation.MinSeparation(4),
            noise_multiplier=0.5,
            clip_norm=mfa.AdaptiveClip(1.0),
            clients_per_round=2,
            seed=1,
        )
        _release(aggregator.query(list(_SPECS)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        found = _files_of(journey, _CLIP_DOORS)
    assert found == _listed("`clip_norm=AdaptiveClip(...)`")
    assert len(found) <= 5


def test_epsilon_of_random_check_ins_and_its_certificate() -> None:
    scheme = mfa.participation.MinSeparationSampling(16, 2, 100, 10, separation=4)
    columns = guarantees.columns_of(mfa.factorizations.banded(16, num_bands=2), scheme)
    found = []

    def journey() -> None:
        found.append(scheme.amplified(1.2, 1e-4, columns, Certification()))

    files = _files_of(journey, _CHECK_IN_DOORS)
    assert found[0].certificate is not None
    assert files == _listed("epsilon of a run with random check-ins, and its certificate")
    assert len(files) <= 7


def _epsilon_of_timers() -> Callable[[], object]:
    timers = mfa.participation.MinSeparation(4)
    mechanism = mfa.Mechanism(mfa.factorizations.banded(16, num_bands=2), timers, 1.2)
    return lambda: mechanism.guarantee(1e-6)


def _epsilon_of_random_check_ins() -> Callable[[], object]:
    scheme = mfa.participation.MinSeparationSampling(16, 2, 100, 10, separation=4)
    mechanism = mfa.Mechanism(mfa.factorizations.banded(16, num_bands=2), scheme, 1.2)
    return lambda: mechanism.guarantee(1e-4)


def _calibrated_for_poisson() -> Callable[[], object]:
    scheme = mfa.participation.PoissonSampling(64, 4, 4000, 10)
    banded = mfa.factorizations.banded(64, num_bands=4)
    return lambda: mfa.calibrate(banded, scheme, epsilon=2.0, delta=1e-6).guarantee(1e-6)


# What is prepared, and the most files. The goals are 8, 12 and 10.
@pytest.mark.parametrize(
    ("prepared", "most"),
    [(_epsilon_of_timers, 16), (_epsilon_of_random_check_ins, 32), (_calibrated_for_poisson, 26)],
)
def test_files_that_an_epsilon_rests_on(
    prepared: Callable[[], Callable[[], object]],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    tmp_path: pathlib.Path,
) -> None:
    # No certificate is kept there.
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    files = _all_files_of(prepared())
    record_property("files", sorted(files))
    assert len(files) <= most, f"{len(files)} files: {sorted(files)}"


def test_flags_to_run_and_resume() -> None:
    start, packages = "stackoverflow_nwp/run_stackoverflow.py", ("stackoverflow_nwp", "simulations")
    found = _reached(start, packages, doors=_RUN_DOORS)
    assert found == _listed("`run-stackoverflow`: flags to run, and resume")
    assert len(found) <= 14
    # Doors lead to no further files of the path, and are not many.
    assert len(_reached(start, packages)) <= 32


def test_how_mechanisms_are_ranked() -> None:
    packages = ("mf_aggregators/planning", "mf_aggregators/catalogue")
    found = _reached("mf_aggregators/planning/planner.py", packages)
    assert {each.removeprefix("mf_aggregators/") for each in found} == _listed(
        "`mf-plan`: how mechanisms are ranked"
    )
    assert len(found) <= 7


def _reached(start: str, packages: tuple[str, ...], doors: tuple[str, ...] = ()) -> set[str]:
    """The files of packages that imports lead to, but for doors and what is behind them."""
    found: set[str] = set()
    left = [ROOT / start]
    while left:
        file = left.pop()
        name = file.relative_to(ROOT).as_posix()
        if name not in found and name.startswith(packages) and not name.startswith(doors or "/"):
            found.add(name)
            left += _imported(file)
    return found


def _imported(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """The modules of the repository that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = ROOT / node.module.replace(".", "/")
            for name in node.names:
                for path in (module / f"{name.name}.py", module / name.name / "__init__.py"):
                    if path.exists():
                        yield path
            if module.with_suffix(".py").exists():
                yield module.with_suffix(".py")
