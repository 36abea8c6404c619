"""run-digits: its images, its defaults, its flags, and whole runs in both settings."""

import csv
import functools
import pathlib
import shutil
from typing import Any

import pytest

from mf_aggregators.adaptive_clip import AdaptiveClip
from simulations.examples import digits
from simulations.runs.run_config import RunConfig
from simulations.training.federated_task import ImageData
from tests import console_commands
from tests.simulations.parsed_flags import config_of

pytestmark = pytest.mark.begun_first

_FORMS = digits.load()


def _options(*arguments: str) -> RunConfig:
    return config_of(digits.COMMAND, *arguments)


def test_defaults_depend_on_the_setting() -> None:
    groups, single = _options(), _options("--examples_per_client=1")
    assert (groups["batch_size"], single["batch_size"]) == (10, 1)
    assert (groups["clients_per_round"], single["clients_per_round"]) == (10, 50)
    assert groups["target_epsilon"] == single["target_epsilon"] == 8.0
    assert _options("--examples_per_client=1", "--batch_size=2")["batch_size"] == 2


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.usefixtures("_runs_in_this_process")
@pytest.mark.parametrize(
    "arguments",
    [["--secure_aggregation"], [], ["--secure_aggregation", "--private_metrics"]],
    ids=["secure", "open", "secure, with metrics"],
)
def test_a_run_whose_clip_norm_adapts_resumes_with_it(
    arguments: list[str], tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "run"
    command = (
        f"--output_dir={output}",
        "--num_rounds=4",
        "--clip_norm=adaptive",
        "--clip_update_period=1",
        "--seed=3",
        "--format=json",
        *arguments,
    )
    first, metrics = _call(*command).fields(), _metrics(output)
    norms = [row["clip_norm"] for row in metrics]
    clip = AdaptiveClip(update_period=1)
    for before, after, row in zip(norms, norms[1:], metrics, strict=False):
        assert after == pytest.approx(clip.next_norm(before, row["unclipped_fraction"]))
    assert all("clipped_fraction" not in row for row in metrics)
    # A secure sum measures nothing of the clients.
    assert all(("update_norm" in row) == (not arguments) for row in metrics)
    assert norms[0] == 0.1
    assert float(first["privacy"]["planned"]["epsilon"]) == pytest.approx(8.0, rel=1e-3)
    shutil.rmtree(output / "checkpoints" / "round_4")
    again = _call(*command).fields()
    # The statement has hashes of files, and the seconds of a round are its own.
    for name in ("planned", "observed", "clipping"):
        assert again["privacy"][name] == first["privacy"][name]
    assert {**again, "privacy": None} == {**first, "privacy": None}
    assert _metrics(output) == metrics
    _call(*command, "--clip_quantile=0.9").refused(
        "with other flags: to resume it, leave out --clip_quantile;"
    )


def _metrics(output: pathlib.Path) -> list[dict[str, float]]:
    with (output / "metrics.csv").open(newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value and name != "seconds"}
            for row in csv.DictReader(file)
        ]


_call = functools.partial(console_commands.call, "run-digits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--public_data= "], "--public_data must be a text of one line"),
        (["--custody=\u202eabc"], "--custody must be a text of one line"),
        (["--workers=a:0"], "--workers: the worker address 'a:0'"),
        (["--other_runs=text.txt"], "--other_runs=text.txt is neither"),
        (["--largest_loss=1"], "--largest_loss needs --private_metrics"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text("0.5")
    _call("--output_dir=run", *arguments).refused(message)
    assert not pathlib.Path("run").exists()


def test_data_that_cannot_be_read_leave_no_run_behind(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a download that fails after the number of clients is known."""

    def fails(self: Any) -> str:
        raise ValueError("the images could not be downloaded.")

    monkeypatch.setattr(ImageData, "fingerprint", fails)
    status, _, err = _call(
        f"--output_dir={tmp_path / 'run'}", "--num_rounds=2", "--mechanism=identity"
    )
    assert (status, err) == (2, "run-digits: the images could not be downloaded.\n")
    assert not (tmp_path / "run").exists()
