"""Counts the files with functions that run on typical journeys through the product.

``python -m docs.extensions.journeys`` prints the table, and with the name of a journey its files. A
build of the site puts the table into ``architecture.md``, and ``tests/test_site.py`` holds each
number below a ceiling.
"""

import contextlib
import functools
import gc
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

import mf_aggregators as mfa
from mf_aggregators.commands import command_line, plan

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ROOT = pathlib.Path(__file__).parents[2]
_LIBRARY = _ROOT / "mf_aggregators"
# The packages with files that are counted.
_PACKAGES = ("mf_aggregators", "simulations")
_HERE = "<!-- journeys -->"


def _mechanism(
    participation: mfa.participation.Participation, num_rounds: int = 16, num_bands: int = 2
) -> mfa.Mechanism:
    matrix = mfa.factorizations.banded(num_rounds, num_bands=num_bands)
    return mfa.Mechanism(matrix, participation, 1.2)


def _row_in_numpy(directory: pathlib.Path) -> Callable[[], object]:
    _mechanism(mfa.participation.MinSeparation(4)).save(directory / "mechanism")

    def journey() -> object:
        mechanism = mfa.load(directory / "mechanism")
        aggregator = mfa.Aggregator(mechanism, clip_norm=1.0, clients_per_round=1, seed=1)
        return aggregator.next(aggregator.initialize(), [[np.ones(5)]])

    return journey


def _row_in_tff(directory: pathlib.Path) -> Callable[[], object]:
    import tensorflow as tf

    from mf_aggregators.tff.dp_query import MatrixFactorizationSumQuery

    _mechanism(mfa.participation.MinSeparation(4)).save(directory / "mechanism")

    def journey() -> object:
        mechanism = mfa.load(directory / "mechanism")
        aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=1, seed=1)
        query = aggregator.query([tf.TensorSpec([5], tf.float32)])
        assert isinstance(query, MatrixFactorizationSumQuery)
        state = query.initial_global_state()
        update = [tf.ones([5])]
        record = query.preprocess_record(query.derive_sample_params(state), update)
        return query.get_noised_result(record, state)

    return journey


def _epsilon_of_timers(_: pathlib.Path) -> Callable[[], object]:
    mechanism = _mechanism(mfa.participation.MinSeparation(4))
    return lambda: mechanism.guarantee(1e-6)


def _epsilon_of_random_check_ins(_: pathlib.Path) -> Callable[[], object]:
    mechanism = _mechanism(mfa.participation.MinSeparationSampling(16, 2, 100, 10, separation=4))
    return lambda: mechanism.guarantee(1e-4)


def _calibrated_for_poisson(_: pathlib.Path) -> Callable[[], object]:
    scheme = mfa.participation.PoissonSampling(64, 4, 4000, 10)
    matrix = mfa.factorizations.banded(64, num_bands=4)
    return lambda: mfa.calibrate(matrix, scheme, epsilon=2.0, delta=1e-6).guarantee(1e-6)


def _plan(directory: pathlib.Path) -> Callable[[], object]:
    sizes = "--num_rounds=24 --population=480 --clients_per_round=40 --target_epsilon=8"
    words = ["mf-plan", *sizes.split(), "--format=json", f"--cache_dir={directory}"]
    return lambda: plan.run(words)


def _run_of_digits(directory: pathlib.Path) -> Callable[[], object]:
    from simulations.examples.digits import COMMAND
    from simulations.runs import run_command, run_config

    def journey() -> object:
        status = command_line.run(
            COMMAND.description,
            lambda values: run_config.define_flags(values, COMMAND),
            lambda values: run_command.main(values, COMMAND),
            [COMMAND.name, "--num_rounds=2", f"--output_dir={directory / 'run'}"],
        )
        if status:
            raise RuntimeError(f"the run ended with status {status}.")
        return status

    return journey


# This journey is profiled in a process of its own, because it leaves a process of TFF's running
# until it exits.
_RUN = "`run-digits`, two rounds"
JOURNEYS: Mapping[str, Callable[[pathlib.Path], Callable[[], object]]] = {
    "a saved mechanism to a released row, in NumPy": _row_in_numpy,
    "a saved mechanism to a released row, in TFF": _row_in_tff,
    "epsilon of timers": _epsilon_of_timers,
    "epsilon of random check-ins, with its certificate": _epsilon_of_random_check_ins,
    "calibration and guarantee of Poisson sampling": _calibrated_for_poisson,
    _RUN: _run_of_digits,
    "`mf-plan` for 24 rounds": _plan,
}


def files_of(journey: str) -> list[str]:
    """Returns the product's files with functions that run on a journey, with empty caches.

    Args:
      journey: A key of ``JOURNEYS``.

    Returns:
      Paths, sorted: those of the library from its folder, others from the root.
    """
    if journey != _RUN:
        return _profiled(journey)
    command = [sys.executable, "-m", "docs.extensions.journeys", journey]
    ended = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True)
    return ended.stdout.split()


def _profiled(journey: str) -> list[str]:
    found: set[str] = set()
    folders = tuple(f"{_ROOT / package}{os.sep}" for package in _PACKAGES)

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(folders):
            base = _LIBRARY if file.startswith(folders[0]) else _ROOT
            found.add(pathlib.Path(file).relative_to(base).as_posix())

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Standard error is redirected to a file, because TFF's worker needs its file descriptor.
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        first, second, home = (
            pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)
        )
        cache = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = os.fspath(home / "first")
        try:
            # A first run, not profiled, does the imports.
            JOURNEYS[journey](first)()
            run = JOURNEYS[journey](second)
            os.environ["XDG_CACHE_HOME"] = os.fspath(home / "second")
            for each in gc.get_objects():
                if isinstance(each, functools._lru_cache_wrapper) and (
                    each.__module__.startswith(_PACKAGES)
                ):
                    each.cache_clear()
            threading.setprofile(profile)
            sys.setprofile(profile)
            try:
                run()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = cache
    return sorted(found)


@functools.cache
def table() -> str:
    """Returns a table of all journeys and their numbers of files, in Markdown."""
    lines = ["| journey | files | which |", "| --- | --- | --- |"]
    for journey in JOURNEYS:
        files = files_of(journey)
        names = ", ".join(f"`{name.removesuffix('.py')}`" for name in files)
        lines.append(f"| {journey} | {len(files)} | {names} |")
    return "\n".join(lines)


def _with_table(app: "Sphinx", name: str, source: list[str]) -> None:
    if _HERE in source[0]:
        source[0] = source[0].replace(_HERE, table())


def setup(app: "Sphinx") -> dict[str, bool]:
    """Sphinx extension that puts the table of journeys into architecture.md."""
    app.connect("source-read", _with_table)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    print("\n".join(_profiled(sys.argv[1])) if sys.argv[1:] else table())
