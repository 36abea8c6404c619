"""Tests of federated_text, among them that TFF reads what it writes."""

import contextlib
import pathlib
from typing import Any

import pytest

from stackoverflow_nwp import federated_text
from tests.stackoverflow_nwp.small_text import small_examples


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "small.sqlite"
    federated_text.write(path, small_examples())
    return path


@pytest.mark.parametrize("split", federated_text.SPLITS)
def test_tff_reads_the_same_examples(small_file: pathlib.Path, split: str) -> None:
    import tensorflow_federated as tff
    from tensorflow_federated.python.simulation.datasets import stackoverflow

    data = tff.simulation.datasets.SqlClientData(str(small_file), split).preprocess(
        stackoverflow._add_proto_parsing
    )
    expected: dict[str, list[dict[str, Any]]] = {}
    for example in small_examples():
        if example.split == split:
            expected.setdefault(example.client_id, []).append(
                {
                    "creation_date": example.creation_date.encode(),
                    "score": example.score,
                    "tags": example.tags.encode(),
                    "title": example.title.encode(),
                    "tokens": example.tokens.encode(),
                    "type": example.post_type.encode(),
                }
            )
    assert list(data.client_ids) == sorted(expected)
    for client, examples in expected.items():
        dataset = data.create_tf_dataset_for_client(client)
        assert [dict(example) for example in dataset.as_numpy_iterator()] == examples


def test_schema_is_that_of_tff(small_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import tensorflow as tf
    from tensorflow_federated.python.simulation.datasets import sql_client_data_utils

    theirs = tmp_path / "theirs" / "theirs.sqlite"
    sql_client_data_utils.save_to_sql_client_data(
        ["a"], lambda _: tf.data.Dataset.from_tensor_slices({"tokens": ["x"]}), str(theirs)
    )
    for table in ("examples", "client_metadata"):
        columns = []
        for path in (small_file, theirs):
            with contextlib.closing(federated_text.read_only(path)) as connection:
                columns.append(list(connection.execute(f"PRAGMA table_info({table})")))
        assert columns[0] == columns[1]


def test_counts_and_round_trip(small_file: pathlib.Path) -> None:
    assert federated_text.count_splits(small_file) == {
        "heldout": federated_text.SplitCounts(2, 3),
        "test": federated_text.SplitCounts(4, 7),
        "train": federated_text.SplitCounts(6, 13),
    }
    assert list(federated_text.read_examples(small_file)) == small_examples()
    assert federated_text.clients_of_split(small_file, "heldout") == (
        "heldout.client0",
        "heldout.client1",
    )


def test_split_of_client_has_the_shares_asked_for() -> None:
    splits = [federated_text.split_of_client(f"client{i}") for i in range(5000)]
    assert splits.count("train") == pytest.approx(4000, abs=100)
    assert splits.count("heldout") == pytest.approx(500, abs=80)
    assert splits.count("test") == pytest.approx(500, abs=80)
    # Fixed for ever: data sets made anew must keep their splits.
    assert [federated_text.split_of_client(name) for name in ("numpy", "scipy.stats", "keras")] == [
        "train",
        "train",
        "train",
    ]
