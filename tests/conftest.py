"""What all tests share: which of them run and when, and that no process outlives them."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import pathlib
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests import graph_checks

if TYPE_CHECKING:
    from tests.simulations.command_processes import CommandServer

# Before TensorFlow is imported, which prints pages without it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Which tests/examples.py reads as well.
_LONG_TEST = "MF_AGGREGATORS_LONG_TEST"
_EVERY_CASE = "MF_AGGREGATORS_EVERY_CASE"
_LIBRARY = pathlib.Path(__file__).parent / "mf_aggregators"
# One of TFF that has more is not left to the tests of the next module.
_MOST_BYTES_OF_WORKER = 400 << 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that runs long tests too."""
    parser.addoption("--all", action="store_true", help="run the tests marked as long, too")


def pytest_configure(config: pytest.Config) -> None:
    """Tells randomised checks whether they have the time of the long test."""
    if config.option.all:
        os.environ[_LONG_TEST] = "1"
    # How long an example takes says how busy the machine is.
    number = 100 if config.option.all else 40
    hypothesis.settings.register_profile("tests", deadline=None, max_examples=number)
    hypothesis.settings.load_profile("tests")
    # Tests of the warning expect it by its class.
    config.addinivalue_line("filterwarnings", "ignore:a fixed seed makes the noise predictable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports all modules without a search for garbage, which would take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Lets each of several processes begin with other modules.

    Each of them imports all modules, and compiles those that no other one has compiled yet.
    """
    report = yield
    if isinstance(collector, pytest.Dir):
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        nodes = report.result
        first = len(nodes) // 2 * (number // 2)
        report.result = [*nodes[first:], *nodes[:first]][:: -1 if number % 2 else 1]
    return report


# Before pytest's own, which reads -m.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves long tests out, unless they are asked for: by --all, by -m, or by a test's name.

    The library's modules, which are many and quick, come last, and of them those without
    TensorFlow; modules that take minutes come first. So of several processes, none is left with a
    long module while the others have nothing to do.
    """
    items.sort(
        key=lambda item: (
            item.path.is_relative_to(_LIBRARY),
            not item.path.is_relative_to(_LIBRARY / "tff"),
            not (config.option.all and item.get_closest_marker("begun_first")),
            item.path,
        )
    )
    for item in _further_cases(items, "short_cases", are_long=False):
        item.add_marker("long")
    is_named = any("::" in arg for arg in config.args)
    if _EVERY_CASE not in os.environ and not is_named:
        left_out = set(_further_cases(items, "long_cases", are_long=True))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if config.option.all or config.option.markexpr or is_named:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def _further_cases(items: list[pytest.Item], name: str, are_long: bool) -> Iterator[pytest.Item]:
    """Yields the cases that a marker leaves out of a test's: those between, evenly.

    Args:
      items: All tests.
      name: Of the marker, whose argument is how many cases stay.
      are_long: Whether it is about the cases that are marked as long, or about the others.
    """
    of_tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        is_long = item.get_closest_marker("long") is not None
        if item.get_closest_marker(name) and is_long == are_long:
            of_tests[item.nodeid.partition("[")[0]].append(item)
    for cases in of_tests.values():
        marker = cases[0].get_closest_marker(name)
        assert marker is not None
        (number,) = marker.args
        last = len(cases) - 1
        kept = {round(index * last / max(1, number - 1)) for index in range(number)}
        yield from (item for index, item in enumerate(cases) if index not in kept)


@pytest.fixture(scope="session", autouse=True)
def _graphs_are_compared_once_a_kind(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets all processes of a run of the tests know which graphs were compared with the kernel."""
    own = tmp_path_factory.getbasetemp()
    graph_checks.begin((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compared")


@pytest.fixture(scope="session", autouse=True)
def _small_graphs_run_as_traced(request: pytest.FixtureRequest) -> None:
    """Leaves the optimisation of graphs, which takes longer than they run, to the long test."""
    if "tensorflow" in sys.modules and not request.config.option.all:
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out comparisons of graphs with the kernel that were made for another test."""
    graph_checks.compare_kinds_once(item.path.name != "test_graph_check.py")


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """Starts commands that run TensorFlow Federated."""
    from tests.simulations.command_processes import CommandServer

    server = CommandServer(tmp_path_factory.mktemp("commands"))
    yield server
    server.end()


@pytest.fixture(scope="module", autouse=True)
def _no_large_worker_outlives_a_module() -> Iterator[None]:
    """Ends workers that keep much memory; to end one takes a look at every object of Python."""
    yield
    if "tensorflow_federated" in sys.modules:
        import psutil

        from mf_aggregators.tff import processes

        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process().children()
            workers = [child for child in children if child.name() == processes._WORKER]
            if any(worker.memory_info().rss > _MOST_BYTES_OF_WORKER for worker in workers):
                processes.end_workers()


@pytest.fixture(scope="module", autouse=True)
def _no_context_of_tff_outlives_a_module() -> Iterator[None]:
    """Restores TFF's default context: documents and commands set another one."""
    was_imported = "tensorflow_federated" in sys.modules
    if was_imported:
        import tensorflow_federated as tff

        before = tff.framework.get_context_stack().current
    yield
    if was_imported:
        tff.framework.set_default_context(before)
    elif "tensorflow_federated" in sys.modules:
        import tensorflow_federated as tff

        tff.backends.native.set_sync_local_cpp_execution_context()


@pytest.fixture
def _runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets commands that train run in a test: they leave signals and the environment alone."""
    from mf_aggregators.tff import processes

    monkeypatch.setattr(processes, "prepare_environment", lambda: None)
    monkeypatch.setattr(processes, "end_workers_at_exit", lambda: None)
    yield
    processes.end_workers()


def pytest_sessionfinish() -> None:
    """Ends TFF's workers while Python is still whole."""
    if "tensorflow_federated" in sys.modules:
        from mf_aggregators.tff import processes

        processes.end_workers()
