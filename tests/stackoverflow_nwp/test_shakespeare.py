"""Plays as federated text: who says what, whose speeches train, and files that are damaged."""

import pathlib
import sqlite3

import pytest

from stackoverflow_nwp import datasets, federated_text, shakespeare
from stackoverflow_nwp.federated_text import HELDOUT, TEST, TRAIN

_CAPITALS = """THE PLAY

PERSONS REPRESENTED.

KING OF NOWHERE

ACT I.

SCENE I. A room.

[Enter the KING and a FOOL.]

KING.
Who goes [aside] there?

[A long direction,
of two lines.]

Nobody.
It is late.

FIRST FOOL.
  A fool, my lord.

KING.
Come in.

[Exeunt.]

SCENE II. Another room.

FIRST FOOL.
What now?

A COURTIER
Silence!
"""
_TITLES = """Scene I. Elsinore.

Ber.
Who's there?

Lady Capulet.
Farewell.

[Exit.]

Good night.

Ber.
He.
"""


def test_who_says_what() -> None:
    assert shakespeare.speeches_of_play(_CAPITALS) == [
        ("KING", "Who goes there?\nNobody.\nIt is late."),
        ("FIRST_FOOL", "A fool, my lord."),
        ("KING", "Come in."),
        ("FIRST_FOOL", "What now?"),
        ("A_COURTIER", "Silence!"),
    ]
    # A line of its own that no other line follows is no name.
    assert shakespeare.speeches_of_play(_TITLES) == [
        ("BER", "Who's there?"),
        ("LADY_CAPULET", "Farewell.\nGood night."),
        ("BER", "He."),
    ]
    assert shakespeare.speeches_of_play("Prose, and no play.\n") == []


def test_nine_tenths_of_the_speeches_of_a_role_train() -> None:
    numbers = [1, 2, 3, 9, 10, 11, 19, 20, 21, 358]
    roles = {f"role{number}": [f"{i}" for i in range(number)] for number in numbers}
    of_split = shakespeare.split(roles)
    assert "role1" not in of_split[TRAIN]
    for number, train in zip(numbers[1:], [1, 2, 8, 9, 9, 17, 18, 18, 322], strict=True):
        role = f"role{number}"
        later = [of_split[split][role] for split in (HELDOUT, TEST) if role in of_split[split]]
        assert len(later) == 1
        assert len(of_split[TRAIN][role]) == train
        assert [*of_split[TRAIN][role], *later[0]] == roles[role]
    many = shakespeare.split({f"role{i}": ["a", "b"] for i in range(2000)})
    # A fifth of the roles, within five standard deviations of a binomial variable.
    assert abs(len(many[HELDOUT]) - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5
    assert len(many[HELDOUT]) + len(many[TEST]) == len(many[TRAIN]) == 2000


def _package(directory: pathlib.Path) -> pathlib.Path:
    """Texts in the package's form: 37 plays, and poems and first folios that are none of them."""
    texts = directory / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    for number in range(37):
        (texts / f"play{number}_gut.txt").write_text(_CAPITALS)
    for other in ("sonnets_gut.txt", "play0_gut_f.txt", "metadata.txt"):
        (texts / other).write_text("BY ME.\nRhymes.\n")
    (directory / "shksprdata" / "__init__.py").write_text("raise SystemExit('imported')\n")
    return texts


def test_the_packages_plays_become_a_data_set(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = _package(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert shakespeare.installed_texts() == texts
    speeches = datasets.load_speeches(tmp_path)
    assert len(speeches.by_split[TRAIN]) == 2 * 37
    assert speeches.by_split[TRAIN]["play3_KING"] == ["Who goes there?\nNobody.\nIt is late."]
    loaded = datasets.load("shakespeare", tmp_path / "cache")
    sentences = federated_text.read_tokens_of_client(loaded.path, TRAIN, "play3_KING")
    assert sentences == ["who goes there ?", "nobody .", "it is late ."]
    assert datasets.load("shakespeare", tmp_path / "cache").path == loaded.path


def _tff_file(path: pathlib.Path, feature: str = "snippets") -> pathlib.Path:
    """A file in the format of TFF's download, with its metadata."""
    import tensorflow as tf

    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    connection.execute(
        "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
    )
    for role in range(12):
        for split, texts in (
            ("train", ("To be or not to be.", "Aye,\nthat is the question here.")),
            ("test", ("The rest is silence.",)),
        ):
            for text in texts:
                example = tf.train.Example()
                example.features.feature[feature].bytes_list.value.append(text.encode())
                connection.execute(
                    "INSERT INTO examples VALUES (?, ?, ?)",
                    (split, f"ROLE_{role}", example.SerializeToString()),
                )
            connection.execute(
                "INSERT INTO client_metadata VALUES (?, ?, ?)", (f"ROLE_{role}", split, len(texts))
            )
    connection.commit()
    connection.close()
    return path


def test_tffs_download_is_read_where_there_is_no_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TFF's own reader sees in the same file what ours has."""
    from tensorflow_federated.python.simulation.datasets import download
    from tensorflow_federated.python.simulation.datasets import shakespeare as of_tff

    made = _tff_file(tmp_path / "made.sqlite").read_bytes()

    def fetch(origin: str, local_path: str, *rest: object) -> str:
        assert origin.endswith("shakespeare.sqlite.lzma")
        pathlib.Path(local_path).write_bytes(made)
        return local_path

    monkeypatch.setattr(download, "_fetch_lzma_file", fetch)
    monkeypatch.setattr(shakespeare, "installed_texts", lambda: None)
    speeches = datasets.load_speeches(tmp_path / "cache")
    kept = tmp_path / "cache" / "shakespeare.sqlite"
    assert kept.read_bytes() == made
    for client_data, splits in zip(
        of_tff.load_data(str(tmp_path / "cache")), ((TRAIN,), (HELDOUT, TEST)), strict=True
    ):
        for role in client_data.client_ids:
            dataset = client_data.create_tf_dataset_for_client(role)
            snippets = [each["snippets"].decode() for each in dataset.as_numpy_iterator()]
            ours = [speeches.by_split[split].get(role) for split in splits]
            assert [own for own in ours if own] == [snippets]
    assert datasets.load("shakespeare", tmp_path / "cache").splits[TRAIN].clients == 12
