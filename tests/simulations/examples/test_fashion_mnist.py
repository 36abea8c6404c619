"""Fashion-MNIST: files of every origin, clients by flags, refusals, and whole small runs."""

import functools
import gzip
import pathlib
import sys
from collections.abc import Callable

import numpy as np
import pytest

from simulations.examples import fashion_mnist
from tests import console_commands
from tests.refusals import refuses
from tests.simulations.examples import fashion_mnist_files as files

_call = functools.partial(console_commands.call, "run-fashion-mnist")


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.usefixtures("_runs_in_this_process")
@pytest.mark.parametrize(
    "arguments", [("--sampling=poisson", "--num_bands=2"), ("--num_clients=20",)]
)
def test_a_whole_run_on_files_of_the_same_format(
    arguments: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    directory, output = files.write(tmp_path / "files", 60, 20), tmp_path / "run"
    result = _call(
        *(f"--output_dir={output}", f"--data_dir={directory}", *arguments),
        *("--num_rounds=4", "--clients_per_round=5", "--delta=1e-3"),
        *("--noise_multiplier=1.5", "--evaluate_every=2", "--format=json"),
    ).fields()
    assert (result["rounds"], result["num_examples"]) == (4, 60)
    assert result["num_parameters"] == 26_010
    assert result["privacy"]["status"] == "finished"


@pytest.mark.parametrize("compressed", [True, False])
def test_images_and_labels_are_those_that_were_written(
    compressed: bool, tmp_path: pathlib.Path
) -> None:
    directory = files.write(tmp_path / "files", 7, 3, compressed)
    for images, size, seed in zip(fashion_mnist.load(directory), (7, 3), (0, 1), strict=True):
        pixels, labels = files.arrays(size, seed)
        assert images.pixels.shape == (size, *fashion_mnist.SHAPE)
        assert images.pixels.dtype == np.uint8
        assert images.labels.dtype == np.int32
        np.testing.assert_array_equal(images.pixels[..., 0], pixels)
        np.testing.assert_array_equal(images.labels, labels)


def _truncated(contents: bytes) -> bytes:
    return contents[:-5]


def _unpacked(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda contents: gzip.compress(change(gzip.decompress(contents)))


_IMAGES, _LABELS = f"train-{files.IMAGES}.gz", f"train-{files.LABELS}.gz"


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        (_IMAGES, _truncated, "cannot be read"),
        (_IMAGES, lambda contents: contents[:40] + b"\xff" * 9 + contents[49:], "cannot be read"),
        (_IMAGES, _unpacked(lambda contents: contents[:-1]), "damaged"),
        # Numbers of four bytes; the array of labels; images of 20 x 20; none; far too many.
        (_IMAGES, _unpacked(lambda contents: b"\0\0\x0c\3" + contents[4:]), "damaged"),
        (_IMAGES, _unpacked(lambda contents: files.idx(np.zeros(7, np.uint8))), "damaged"),
        (_IMAGES, lambda _: gzip.compress(files.idx(np.zeros((7, 20, 20), "u1"))), "damaged"),
        (_IMAGES, lambda _: gzip.compress(files.idx(np.zeros((0, 28, 28), "u1"))), "damaged"),
        (_IMAGES, _unpacked(lambda contents: contents[:4] + b"\xff" * 4 + contents[8:]), "damaged"),
        (_LABELS, lambda _: gzip.compress(files.idx(np.full(7, 10, np.uint8))), "class 10"),
        (_LABELS, lambda _: gzip.compress(files.idx(np.zeros(6, np.uint8))), "6 labels"),
    ],
)
def test_damaged_files_and_those_of_another_format_are_refused(
    name: str, damage: Callable[[bytes], bytes], named: str, tmp_path: pathlib.Path
) -> None:
    directory = files.write(tmp_path / "files", 7, 3)
    path = directory / name
    path.write_bytes(damage(path.read_bytes()))
    with refuses(name, named):
        fashion_mnist.load(directory)


def test_keras_download_is_read_as_the_files_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras does not look at headers, and takes as many images as there are labels."""
    import tensorflow as tf

    directory = files.write(tmp_path / "files", 7, 3)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_DIRECTORY", tmp_path / "none")
    module = sys.modules[tf.keras.datasets.fashion_mnist.load_data.__module__]
    monkeypatch.setattr(module, "get_file", lambda name, **more: str(directory / name))
    for one, other in zip(fashion_mnist.load(None), fashion_mnist.load(directory), strict=True):
        assert one.fingerprint() == other.fingerprint()
