"""CIFAR-10 from files in its two formats, and files that are damaged."""

import pathlib
import sys

import numpy as np
import pytest

from simulations.examples.cifar10_classification import data
from tests.refusals import refuses
from tests.simulations.examples.cifar10_classification import cifar10_files


def test_the_binary_version_is_read_image_by_image(tmp_path: pathlib.Path) -> None:
    directory = cifar10_files.write_binary(tmp_path / "bin", 7)
    train, test = data.load(directory)
    assert (len(train), len(test)) == (35, 7)
    assert train.pixels.shape == (35, *data.SHAPE)
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
    downloaded = data.load(None)
    binary = data.load(cifar10_files.write_binary(tmp_path / "bin", 10_000, seed=1))
    assert len(downloaded[0]) == data.NUM_TRAINING_IMAGES
    for one, other in zip(downloaded, binary, strict=True):
        assert one.fingerprint() == other.fingerprint()


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    def failing(*args: object, **more: object) -> str:
        raise Exception("URL fetch failure on https://example.org: None -- no route")

    module = sys.modules[tf.keras.datasets.cifar10.load_data.__module__]
    monkeypatch.setattr(module, "get_file", failing)
    with refuses("no route", "--cifar10_dir"):
        data.load(None)


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
            data.load(directory)
    (directory / "data_batch_4.bin").unlink()
    with refuses("data_batch_4.bin", "--cifar10_dir"):
        data.load(directory)
