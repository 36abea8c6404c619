"""Run directories: new ones, old ones, and directories that are none."""

import csv
import pathlib

import pytest

from simulations import run_directory
from simulations.run_directory import MetricsLog, RunDirectory, RunDirectoryError


def test_a_new_directory_has_no_configuration(tmp_path: pathlib.Path) -> None:
    assert RunDirectory(tmp_path / "run").read_config() is None
    (tmp_path / "empty").mkdir()
    assert RunDirectory(tmp_path / "empty").read_config() is None


def test_a_configuration_is_read_back(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "run")
    directory.create({"flags": {"num_rounds": 3}})
    assert directory.read_config() == {"flags": {"num_rounds": 3}}


def test_other_directories_are_left_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "photo.jpg").write_text("")
    with pytest.raises(RunDirectoryError, match="not the directory of a run"):
        RunDirectory(tmp_path).read_config()
    with pytest.raises(RunDirectoryError, match="not the directory of a run"):
        RunDirectory(tmp_path / "photo.jpg").read_config()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_broken_configurations_are_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"config\.json cannot be read"):
        RunDirectory(tmp_path).read_config()


def test_a_run_goes_on_only_with_its_own_flags(tmp_path: pathlib.Path) -> None:
    run_directory.check_same_flags({"a": 1, "b": None}, {"a": 1, "b": None}, tmp_path)
    others: list[dict[str, int | None]] = [
        {"a": 2, "b": None},
        {"b": None},
        {"a": 1, "b": None, "c": 3},
    ]
    for other in others:
        with pytest.raises(RunDirectoryError, match="other flags"):
            run_directory.check_same_flags({"a": 1, "b": None}, other, tmp_path)


def test_infinite_numbers_never_reach_a_json_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        RunDirectory(tmp_path).write_json("x.json", {"epsilon": float("inf")})


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_have_one_row_a_round_also_after_a_resume(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path)
    log = MetricsLog(directory, ["loss", "accuracy"], 0)
    log.append(1, {"loss": 2.5})
    log.append(2, {"loss": float("nan"), "accuracy": 0.5})
    log.append(3, {"loss": 1.5})
    # The state of round 3 was not saved, so its row is no longer true.
    log = MetricsLog(directory, ["loss", "accuracy"], 2)
    log.append(3, {"loss": 1.25})
    assert _rows(tmp_path) == [
        {"round": "1", "loss": "2.5", "accuracy": ""},
        {"round": "2", "loss": "", "accuracy": "0.5"},
        {"round": "3", "loss": "1.25", "accuracy": ""},
    ]


def test_a_half_written_row_is_dropped(tmp_path: pathlib.Path) -> None:
    (tmp_path / "metrics.csv").write_text("round,loss\n1,2.5\ngarbage")
    MetricsLog(RunDirectory(tmp_path), ["loss"], 1)
    assert _rows(tmp_path) == [{"round": "1", "loss": "2.5"}]
