"""Files of arrays: a damaged one is refused by one error."""

import pathlib
from typing import Any

import numpy as np

from mf_aggregators import inputs
from tests import flipped_bits
from tests.refusals import refuses


def test_arrays_of_a_damaged_archive_are_refused_by_one_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "arrays.npz"
    np.savez(path, one=np.arange(3.0), two=np.array("text"))
    refused = 0
    expected: dict[str, Any] = {"one": np.arange(3.0), "two": "text"}
    for _ in flipped_bits.flipped(path):
        try:
            found = inputs.archived_arrays(path)
        except (OSError, ValueError):
            refused += 1
            continue
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name])
    assert refused > 250
    assert list(inputs.archived_arrays(path)) == ["one", "two"]
    np.save(tmp_path / "array.npy", np.ones(2))
    with refuses("damaged"):
        inputs.archived_arrays(tmp_path / "array.npy")
