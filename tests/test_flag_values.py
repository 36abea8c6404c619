"""Every numeric flag of every command, with values that are absurd.

A command may refuse them, in one line, or work with them: it must not fail in any other way. What
would train or attack for hours is cut off where it begins: the flags were accepted then.
"""

import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from absl import flags

from mf_aggregators import audit, checkpoints, factorizations, inputs, workloads
from mf_aggregators.commands import command_line
from mf_aggregators.participation import MinSeparation
from reproduction import reproduce_paper
from simulations import start_worker
from simulations.comparison import repeated_runs
from simulations.runs import run_command
from tests import console_commands

_INTEGERS = ("0", "-1", str(10**12), str(2**63 - 1), str(2**63), str(10**30))
_NUMBERS = ("0", "-1", "1e-300", "1e300", "nan", "inf", "-inf")
_LISTS = ("nan", "inf", "-1", "1e300", "", "x")
_LISTS_OF_NUMBERS = ("utc_offsets", "utc_weights", "targets")

_FACTORIZE = "--num_rounds=4 --output={folder}/output --overwrite"
_PLAN = (
    "--num_rounds=2 --population=20 --clients_per_round=10 --target_epsilon=4 --model_size=100 "
    "--cache_dir={folder}/cache"
)
_SIMULATE = "--population=60 --clients_per_round=5 --num_rounds=4"
_CALLS = (
    ("mf-factorize", f"{_FACTORIZE} --mechanism=identity"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=tree"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=optimal"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=banded --separation=2"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=banded --num_bands=2 --workload=momentum_sgd"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=toeplitz --separation=2"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=blt --num_buffers=1 --separation=2"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=banded_inverse --num_bands=2 --separation=2"),
    ("mf-factorize", f"{_FACTORIZE} --mechanism=structured --num_diagonals=2 --rank=1"),
    ("mf-report", "--checkpoint={folder}/checkpoint"),
    ("mf-report", "--checkpoint={folder}/checkpoint --target_epsilon=4 --separation=2"),
    ("mf-plan", _PLAN),
    ("mf-plan", f"{_PLAN} --sampling=poisson"),
    ("mf-audit", "--mechanism=identity --num_rounds=4"),
    ("mf-audit", "--mechanism=toeplitz --num_rounds=4 --separation=2"),
    ("simulate-participation", f"{_SIMULATE} --separation=3"),
    (
        "simulate-participation",
        f"{_SIMULATE} --separation=2 --availability=independent --available_probability=0.5",
    ),
    (
        "simulate-participation",
        f"{_SIMULATE} --timer=wall_clock --timer_hours=1 --availability=diurnal",
    ),
    ("compare-mechanisms", "--output_dir={folder}/comparison"),
    ("make-text-dataset", "--input={folder}/text --output={folder}/text.sqlite --overwrite"),
    ("reproduce-paper", "--output_dir={folder}/report --only=bandmf-production"),
    ("run-digits", "--output_dir={folder}/run --num_rounds=4 --mechanism=identity"),
    ("start-tff-worker", ""),
)


class _AcceptedError(ValueError):
    """The flags were accepted, and what takes long would begin."""


def _begin(*unused: Any, **also_unused: Any) -> NoReturn:
    raise _AcceptedError("accepted")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Has a checkpoint and some text."""
    folder = tmp_path_factory.mktemp("values")
    checkpoints.save(
        factorizations.banded(workloads.prefix_sum(4), 2, participation=MinSeparation(2)),
        folder / "checkpoint",
    )
    (folder / "text").mkdir()
    for name in ("one", "two", "three"):
        (folder / "text" / f"{name}.txt").write_text("A sentence of some words.\n")
    return folder


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is not checked before it is allocated fails here, and not on the whole machine."""
    monkeypatch.setattr(inputs, "_available_bytes", lambda: 2e9)
    with inputs.limited_memory():
        yield


@pytest.fixture(autouse=True)
def _nothing_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in (
        (audit._Runner, "__init__"),
        (run_command, "_train"),
        (repeated_runs, "run_all"),
        (reproduce_paper, "_run"),
        (start_worker, "_binary"),
    ):
        monkeypatch.setattr(place, name, _begin)


def _bad_values(flag: "flags.Flag[Any]") -> tuple[str, ...]:
    kind = type(flag.parser).__name__
    if flag.name in _LISTS_OF_NUMBERS:
        return _LISTS
    return {"IntegerParser": _INTEGERS, "FloatParser": _NUMBERS}.get(kind, ())


@pytest.mark.long_cases(3)
@pytest.mark.short_cases(4)
@pytest.mark.parametrize(
    ("command", "arguments"),
    _CALLS,
)
def test_a_command_works_with_a_value_or_refuses_it_in_one_line(
    command: str, arguments: str, folder: pathlib.Path
) -> None:
    values = console_commands.flags_of(command)
    for name in values:
        for value in _bad_values(values[name]):
            shutil.rmtree(folder / "run", ignore_errors=True)
            given = f"{arguments} --{name}={value}".format(folder=folder).split()
            ended = console_commands.call(command, *given)
            assert ended.status in (0, 2), (given, ended)
            assert "internal error" not in ended.errors, (given, ended)
            # What NumPy or Python says when an allocation has failed: nobody had checked.
            assert "Unable to allocate" not in ended.errors, (given, ended)
            assert command_line._OUT_OF_MEMORY not in ended.errors, (given, ended)
            if ended.status == 2:
                # Progress bars may have been before it.
                *_, last = ended.errors.strip().splitlines()
                assert f"{command}: " in last, (given, ended)
                assert last.rpartition(f"{command}: ")[2].strip(), (given, ended)


def test_every_command_has_its_numbers_tried() -> None:
    tried = {command for command, _ in _CALLS}
    # Their flags are those of run-digits, and they need other data.
    others = {"run-cifar10", "run-fashion-mnist", "run-stackoverflow"}
    assert tried | others == set(console_commands.of_setup()["commands"])
