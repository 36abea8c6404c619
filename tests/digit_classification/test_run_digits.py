"""The command: its defaults, its flags, and whole runs in both settings."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from absl import flags

from digit_classification import data, run_digits
from simulations import run_flags


def _options(*arguments: str) -> dict[str, Any]:
    values = flags.FlagValues()
    flags.DEFINE_enum("format", "text", ["text", "json"], "", flag_values=values)
    run_flags.define_flags(values, run_digits.COMMAND)
    values(["run-digits", *arguments])
    return run_flags.options_of(values, run_digits.COMMAND)


def test_defaults_depend_on_the_setting() -> None:
    groups, single = _options(), _options("--examples_per_client=1")
    assert (groups["batch_size"], single["batch_size"]) == (10, 1)
    assert (groups["clients_per_round"], single["clients_per_round"]) == (10, 50)
    assert groups["target_epsilon"] == single["target_epsilon"] == 8.0
    assert _options("--examples_per_client=1", "--batch_size=2")["batch_size"] == 2


def test_help_says_the_defaults_of_both_settings() -> None:
    texts = run_digits.COMMAND.default_texts
    assert texts["clients_per_round"] == "Default: 10; 50 with --examples_per_client=1."
    assert texts["delta"] == "Default: 0.0001."
    values = flags.FlagValues()
    run_flags.define_flags(values, run_digits.COMMAND)
    assert set(texts) <= set(values)


def test_clients_without_images_are_refused() -> None:
    with pytest.raises(ValueError, match="--examples_per_client must be at least 1, found 0"):
        _options("--examples_per_client=0")


def test_data_counts_its_clients() -> None:
    for arguments, clients in (((), 143), (("--examples_per_client=1",), 1415)):
        opened = run_digits.COMMAND.open_data(_options(*arguments))
        assert opened.num_clients == clients
        assert opened.fingerprint() == data.concatenated(data.load()).fingerprint()


def test_facts_as_lines() -> None:
    facts = {
        "num_examples": 1415,
        "most_frequent_digit": 3,
        "most_frequent_digit_accuracy": 0.1031746,
    }
    lines = run_digits.COMMAND.outcome_lines(facts)
    assert list(lines) == [("training images", "1,415"), ("always 3", "10.32 %")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--clients_per_round=10", "--mechanism=banded"],
        [
            "--examples_per_client=1",
            "--clients_per_round=20",
            "--sampling=poisson",
            "--num_bands=2",
        ],
    ],
    ids=["groups", "centralised"],
)
def test_a_whole_run(arguments: list[str], tmp_path: pathlib.Path) -> None:
    output = tmp_path / "run"
    command = [sys.executable, "-m", "digit_classification.run_digits", f"--output_dir={output}"]
    command += ["--num_rounds=4", "--format=json", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert result["rounds"] == 4
    assert 0.0 <= result["test_accuracy"] <= 1.0
    assert result["privacy"]["planned"]["epsilon"] == pytest.approx(8.0, rel=1e-3)
    assert result["privacy"]["status"] == "finished"
    assert (output / "PRIVACY.md").exists()
