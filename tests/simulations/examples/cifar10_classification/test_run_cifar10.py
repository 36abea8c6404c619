"""The command: the papers' size by default, its flags, and a whole small run."""

import functools
import json
import pathlib

import pytest

from mf_aggregators.participation import sampling_scheme
from simulations.examples.cifar10_classification import run_cifar10
from simulations.runs.run_config import RunConfig
from tests.refusals import refuses
from tests.simulations import parsed_flags
from tests.simulations.examples.cifar10_classification import cifar10_files
from tests.simulations.parsed_flags import config_of


def _options(*arguments: str) -> RunConfig:
    return config_of(run_cifar10.COMMAND, *arguments)


def test_the_defaults_are_20_epochs_in_batches_of_500() -> None:
    options = _options()
    images = run_cifar10.COMMAND.open_data(options).num_clients
    assert options["num_rounds"] * options["clients_per_round"] == 20 * images
    # The last 500 of the 2,000 rounds.
    assert options["server_cooldown"] * options["num_rounds"] == 500


def test_a_client_has_one_image() -> None:
    for flag in ("--batch_size=2", "--client_epochs=3"):
        with refuses("run-cifar10"):
            _options(flag)


_call = functools.partial(parsed_flags.call, run_cifar10.COMMAND)


def test_a_directory_without_the_files_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    status, _, err = _call(capsys, f"--cifar10_dir={tmp_path}", f"--output_dir={tmp_path / 'run'}")
    assert status == 2
    assert "data_batch_1.bin cannot be read" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.usefixtures("_runs_in_this_process")
def test_a_whole_run_on_files_of_the_same_format(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, output = cifar10_files.write_binary(tmp_path / "bin", 40), tmp_path / "run"
    status, out, errors = _call(
        capfd,
        *(f"--output_dir={output}", f"--cifar10_dir={directory}", "--sampling=poisson"),
        *("--num_bands=2", "--num_rounds=4", "--clients_per_round=5", "--delta=1e-3"),
        *("--noise_multiplier=1.5", "--evaluate_every=2", "--format=json"),
    )
    assert status == 0, errors
    result = json.loads(out)
    assert result["rounds"] == 4
    assert result["num_examples"] == 200
    assert result["num_parameters"] == 550_570
    epsilon = sampling_scheme(
        "poisson", num_rounds=4, num_bands=2, population=200, clients_per_round=5
    ).epsilon(1.5, 1e-3)
    assert result["privacy"]["planned"]["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    assert result["privacy"]["status"] == "finished"
