"""CIFAR-10: files in its two formats, the papers' size by default, flags, and a small run."""

import functools
import pathlib
import sys

import numpy as np
import pytest

from mf_aggregators.participation import sampling_scheme
from simulations.examples import cifar10
from simulations.runs.run_config import RunConfig
from tests import console_commands
from tests.refusals import refuses
from tests.simulations.examples import cifar10_files
from tests.simulations.parsed_flags import config_of


def _options(*arguments: str) -> RunConfig:
    return config_of(cifar10.COMMAND, *arguments)


def test_the_defaults_are_20_epochs_in_batches_of_500() -> None:
    options = _options()
    images = cifar10.COMMAND.open_data(options).num_clients
    assert options.num_rounds * options.clients_per_round == 20 * images
    # The last 500 of the 2,000 rounds.
    assert options.server_cooldown * options.num_rounds == 500


_call = functools.partial(console_commands.call, "run-cifar10")


@pytest.mark.long_cases(0)
@pytest.mark.long
@pytest.mark.usefixtures("_runs_in_this_process")
def test_a_whole_run_on_files_of_the_same_format(tmp_path: pathlib.Path) -> None:
    directory, output = cifar10_files.write_binary(tmp_path / "bin", 40), tmp_path / "run"
    result = _call(
        *(f"--output_dir={output}", f"--cifar10_dir={directory}", "--sampling=poisson"),
        *("--num_bands=2", "--num_rounds=4", "--clients_per_round=5", "--delta=1e-3"),
        *("--noise_multiplier=1.5", "--evaluate_every=2", "--format=json"),
    ).fields()
    assert result["rounds"] == 4
    assert result["num_examples"] == 200
    assert result["num_parameters"] == 550_570
    epsilon = sampling_scheme(
        "poisson", num_rounds=4, num_bands=2, population=200, clients_per_round=5
    ).epsilon(1.5, 1e-3)
    assert result["privacy"]["planned"]["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    assert result["privacy"]["status"] == "finished"


def test_the_binary_version_is_read_image_by_image(tmp_path: pathlib.Path) -> None:
    directory = cifar10_files.write_binary(tmp_path / "bin", 7)
    train, test = cifar10.load(directory)
    assert (len(train), len(test)) == (35, 7)
    assert train.pixels.shape == (35, *cifar10.SHAPE)
    assert train.pixels.dtype == np.uint8
    assert train.labels.dtype == np.int32
    written = cifar10_files.batches(7)
    for place, name in enumerate(cifar10_files.NAMES[:-1]):
        pixels, labels = written[name]
        np.testing.assert_array_equal(train.labels[7 * place : 7 * place + 7], labels)
        for image in range(7):
            for row, column, channel in ((0, 0, 0), (3, 30, 1), (31, 5, 2)):
                value = pixels[image, 1024 * channel + 32 * row + column]
                assert train.pixels[7 * place + image, row, column, channel] == value


@pytest.mark.long
def test_both_versions_are_the_same_images(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras reads files of full size only."""
    import tensorflow as tf

    pickled = cifar10_files.write_pickled(tmp_path / "py", 10_000, seed=1)
    module = sys.modules[tf.keras.datasets.cifar10.load_data.__module__]
    monkeypatch.setattr(module, "get_file", lambda *args, **more: str(pickled))
    downloaded = cifar10.load(None)
    binary = cifar10.load(cifar10_files.write_binary(tmp_path / "bin", 10_000, seed=1))
    assert len(downloaded[0]) == cifar10.NUM_TRAINING_IMAGES
    for one, other in zip(downloaded, binary, strict=True):
        assert one.fingerprint() == other.fingerprint()


def test_missing_cut_and_foreign_files_are_refused(tmp_path: pathlib.Path) -> None:
    directory = cifar10_files.write_binary(tmp_path / "bin", 3)
    whole = (directory / "data_batch_4.bin").read_bytes()
    for damaged, named in (
        (whole[:-1], "records"),
        (b"", "0 bytes"),
        (b"\x0a" + whole[1:], "class 10"),
    ):
        (directory / "data_batch_4.bin").write_bytes(damaged)
        with refuses("data_batch_4.bin", named):
            cifar10.load(directory)
    (directory / "data_batch_4.bin").unlink()
    with refuses("data_batch_4.bin", "--cifar10_dir"):
        cifar10.load(directory)
