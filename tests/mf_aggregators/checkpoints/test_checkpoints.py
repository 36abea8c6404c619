"""Checkpoints: round trips, and refusal of everything that is not whole."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mf_aggregators import checkpoints, workloads
from mf_aggregators.checkpoints import CheckpointError
from mf_aggregators.factorizations import (
    BandedFactorization,
    BandedInverseFactorization,
    BltFactorization,
    DenseFactorization,
    Factorization,
    IdentityFactorization,
    StructuredFactorization,
    ToeplitzFactorization,
    TreeAggregationFactorization,
    banded,
    identity,
)
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from tests import flipped_bits
from tests.refusals import refuses


def test_the_description_states_what_the_factorization_computes(tmp_path: pathlib.Path) -> None:
    factorization = banded(workloads.prefix_sum(12), 3)
    participation = MinSeparation(4, 2)
    workload = {"name": "momentum_sgd", "momentum": 0.5, "learning_rates": None}
    checkpoints.save(factorization, tmp_path / "c", workload=workload, participation=participation)
    _, description = checkpoints.load_with_description(tmp_path / "c")
    matrix = workloads.momentum_sgd(12, 0.5)
    errors: Any = description["errors"]
    assert errors["workload"] == workload
    assert errors["sensitivity"] == pytest.approx(np.sqrt(2))
    assert errors["rmse"] == pytest.approx(factorization.rmse(matrix, participation))
    assert errors["max_error"] == pytest.approx(factorization.max_error(matrix, participation))
    assert errors["total_error"] == pytest.approx(factorization.total_error(matrix, participation))
    assert description["format_version"] == checkpoints._FORMAT_VERSION
    assert description["mechanism"] == "banded"


_KEYS = [
    *("format_version", "library_version", "mechanism", "num_rounds", "parameters"),
    *("optimised_for", "optimality_gap", "errors", "arrays_sha256", "description_sha256"),
]
_ROOTS = np.array([1.0, 0.5])


@pytest.mark.parametrize(
    ("factorization", "parameters", "arrays"),
    [
        (IdentityFactorization(4), {}, {}),
        (TreeAggregationFactorization(4, "full"), {"decoder": "full"}, {}),
        (BandedFactorization(np.tri(50, 4)), {}, {"bands": np.tri(50, 4)}),
        (
            DenseFactorization(np.tri(3) + np.eye(3)),
            {},
            {"lower_triangle": np.array([2.0, 1.0, 2.0, 1.0, 1.0, 2.0])},
        ),
        (
            ToeplitzFactorization(4, _ROOTS, parameters={"num_bands": 2}),
            {"num_bands": 2, "equal_column_norms": False},
            {"coefficients": _ROOTS},
        ),
        (
            ToeplitzFactorization(4, _ROOTS, equal_column_norms=True),
            {"equal_column_norms": True},
            {"coefficients": _ROOTS},
        ),
        (BandedInverseFactorization(4, _ROOTS), {}, {"coefficients": _ROOTS}),
        (
            BltFactorization(4, np.array([0.9]), np.array([0.5])),
            {},
            {"buffer_decays": np.array([0.9]), "inverse_decays": np.array([0.5])},
        ),
        (
            StructuredFactorization(np.tri(4, 2), np.ones((4, 1)), 2.0 * np.ones((4, 1))),
            {},
            {"diagonals": np.tri(4, 2), "left": np.ones((4, 1)), "right": 2.0 * np.ones((4, 1))},
        ),
    ],
    ids=lambda each: each.mechanism if isinstance(each, Factorization) else "",
)
def test_the_format_is_what_it_was(
    factorization: Factorization,
    parameters: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    tmp_path: pathlib.Path,
) -> None:
    checkpoints.save(factorization, tmp_path / "c")
    description = json.loads((tmp_path / "c" / checkpoints._DESCRIPTION_FILE).read_text())
    assert list(description) == _KEYS
    assert list(description["parameters"].items()) == list(parameters.items())
    with np.load(tmp_path / "c" / checkpoints._ARRAYS_FILE) as archive:
        assert archive.files == list(arrays)
        for name, expected in arrays.items():
            assert archive[name].dtype == np.float64
            np.testing.assert_array_equal(archive[name], expected)
    loaded = checkpoints.load(tmp_path / "c")
    assert loaded.has_same_matrix(factorization)
    assert loaded.parameters == factorization.parameters


def test_nothing_else_is_ever_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    (tmp_path / "file").write_text("two")
    for name in ("thesis", "file"):
        with pytest.raises(CheckpointError):
            checkpoints.save(identity(3), tmp_path / name)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "one"
    assert (tmp_path / "file").read_text() == "two"


def test_a_save_replaces_a_checkpoint_or_leaves_nothing_behind(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(identity(5), tmp_path / "c")

    def fail(*unused: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(CheckpointError):
        checkpoints.save(identity(6), tmp_path / "c")
    assert checkpoints.load(tmp_path / "c").num_rounds == 5
    monkeypatch.undo()
    checkpoints.save(identity(6), tmp_path / "c")
    assert checkpoints.load(tmp_path / "c").num_rounds == 6
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def _saved(tmp_path: pathlib.Path) -> pathlib.Path:
    checkpoints.save(banded(workloads.prefix_sum(12), 3), tmp_path / "c")
    return tmp_path / "c"


def test_missing_files_are_named(tmp_path: pathlib.Path) -> None:
    with refuses("nowhere/factorization.json", error=CheckpointError):
        checkpoints.load(tmp_path / "nowhere")
    directory = _saved(tmp_path)
    (directory / "arrays.npz").unlink()
    with refuses("arrays.npz", error=CheckpointError):
        checkpoints.load(directory)


def test_truncated_and_altered_arrays_are_refused(tmp_path: pathlib.Path) -> None:
    directory = _saved(tmp_path)
    whole = (directory / "arrays.npz").read_bytes()
    for damaged in (whole[:-1], b"", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        (directory / "arrays.npz").write_bytes(damaged)
        with refuses("arrays.npz", "SHA-256", error=CheckpointError):
            checkpoints.load(directory)


def test_damaged_arrays_with_the_hash_of_their_bytes_are_refused(tmp_path: pathlib.Path) -> None:
    directory = _saved(tmp_path)
    description = json.loads((directory / "factorization.json").read_text())
    refused = 0
    for _ in flipped_bits.flipped(directory / "arrays.npz"):
        contents = (directory / "arrays.npz").read_bytes()
        description["arrays_sha256"] = hashlib.sha256(contents).hexdigest()
        description["description_sha256"] = checkpoints._hash_of(description)
        (directory / "factorization.json").write_text(json.dumps(description))
        try:
            checkpoints.load(directory)
        except CheckpointError:
            refused += 1
    assert refused > 250


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format_version": "one"}', '{"format_version": 1}', "\x00"]
)
def test_broken_descriptions_are_refused(tmp_path: pathlib.Path, text: str) -> None:
    directory = _saved(tmp_path)
    (directory / "factorization.json").write_text(text)
    with refuses("factorization.json", error=CheckpointError):
        checkpoints.load(directory)


def _alter(directory: pathlib.Path, changes: dict[str, object], is_forged: bool = False) -> None:
    path = directory / "factorization.json"
    description = json.loads(path.read_text()) | changes
    if is_forged:
        description["description_sha256"] = checkpoints._hash_of(description)
    path.write_text(json.dumps(description))


@pytest.mark.parametrize(
    "changes",
    [
        {"mechanism": "magic"},
        {"num_rounds": 13},
        {"num_rounds": "twelve"},
        {"optimised_for": {"schema": "often"}},
        {"errors": {}},
        {"parameters": 3},
        {"errors": None},
        {"format_version": checkpoints._FORMAT_VERSION + 1},
    ],
)
def test_descriptions_that_do_not_fit_are_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any]
) -> None:
    directory = _saved(tmp_path)
    _alter(directory, changes)
    with refuses("factorization.json", error=CheckpointError):
        checkpoints.load(directory)


@pytest.mark.parametrize("factor", [0.9, 1.0 - 1e-6, 0.0, float("nan")])
@pytest.mark.parametrize(
    ("participation", "is_exact"),
    [
        (SingleParticipation(), True),
        (MinSeparation(4, 2), True),
        (FixedEpochOrder(3, 2), True),
        # Bands overlap between participations: only an upper bound is known.
        (MinSeparation(2), False),
    ],
    ids=str,
)
def test_the_stated_sensitivity_is_not_trusted(
    tmp_path: pathlib.Path, participation: Participation, is_exact: bool, factor: float
) -> None:
    directory = tmp_path / "c"
    checkpoints.save(banded(workloads.prefix_sum(12), 3), directory, participation=participation)
    errors = json.loads((directory / "factorization.json").read_text())["errors"]
    assert errors["sensitivity_is_exact"] is is_exact
    checkpoints.load(directory)
    errors["sensitivity"] *= factor
    _alter(directory, {"errors": errors}, is_forged=True)
    with refuses("sensitivity", error=CheckpointError):
        checkpoints.load(directory)


def test_any_other_change_of_the_description_is_noticed(tmp_path: pathlib.Path) -> None:
    for name, value in (("num_rounds", 5), ("optimality_gap", -1.0)):
        checkpoints.save(identity(4), tmp_path / name)
        _alter(tmp_path / name, {name: value})
        with refuses("factorization.json", "SHA-256", error=CheckpointError):
            checkpoints.load(tmp_path / name)


def test_arrays_of_a_damaged_archive_are_refused_by_one_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "arrays.npz"
    np.savez(path, one=np.arange(3.0), two=np.array("text"))
    refused = 0
    expected: dict[str, Any] = {"one": np.arange(3.0), "two": "text"}
    for _ in flipped_bits.flipped(path):
        try:
            found = checkpoints.archived_arrays(path)
        except (OSError, ValueError):
            refused += 1
            continue
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name])
    assert refused > 250
    assert list(checkpoints.archived_arrays(path)) == ["one", "two"]
    np.save(tmp_path / "array.npy", np.ones(2))
    with refuses("damaged"):
        checkpoints.archived_arrays(tmp_path / "array.npy")
