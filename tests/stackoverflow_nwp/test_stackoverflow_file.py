"""The generated file of StackOverflow's size, small: read back, and compared with its laws."""

import collections
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import scipy.stats

from benchmarks import stackoverflow_file
from mf_aggregators.commands import command_line
from stackoverflow_nwp import datasets, federated_text
from stackoverflow_nwp.federated_text import Example, SplitCounts


def _call(*arguments: str) -> int:
    return command_line.run(
        stackoverflow_file.__doc__ or "",
        stackoverflow_file.define_flags,
        stackoverflow_file.main,
        ["stackoverflow_file", *arguments],
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("generated") / "small.sqlite"
    assert _call(f"--output={path}", "--clients=300", "--sentences=6000", "--seed=5") == 0
    return path


def test_splits_are_in_the_published_proportion(path: pathlib.Path) -> None:
    text = datasets.load(str(path))
    assert dict(text.splits) == {
        "train": SplitCounts(300, 6000),
        "heldout": SplitCounts(34, 729),
        "test": SplitCounts(179, 733),
    }
    train, heldout, test = (
        federated_text.clients_of_split(path, split) for split in federated_text.SPLITS
    )
    # Users whose number is divisible by ten are held out, and nobody else; test clients train.
    assert all(int(client) % 10 == 0 for client in heldout)
    assert all(int(client) % 10 for client in train)
    assert set(test) < set(train)


def test_examples_are_those_of_the_encoder(path: pathlib.Path) -> None:
    """Byte for byte, as TFF reads them; short and long sentences have lengths of other sizes."""
    examples = list(federated_text.read_examples(path))
    assert len(examples) == 6000 + 729 + 733
    assert examples[0].title
    assert examples[0].tags.count("|") == 2
    before, after = stackoverflow_file.around_tokens()
    for tokens in (examples[0].tokens, "", "a" * 120, "a b " * 1000, "x" * 20_000):
        ours = stackoverflow_file.serialize(tokens.encode(), before, after)
        example = Example("c", "train", tokens, **stackoverflow_file._OTHER_FIELDS)
        assert ours == federated_text.serialize(example)


def test_words_are_counted_by_clients(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = collections.defaultdict[str, set[str]](set)
    for client, tokens in federated_text.read_tokens(path, "train"):
        for word in tokens.split():
            clients[word].add(client)
    expected = {word: len(own) for word, own in clients.items()}

    def refuse(path: pathlib.Path) -> Any:
        raise AssertionError("the counts beside the file are not taken")

    monkeypatch.setattr(datasets, "_count_training_words", refuse)
    counts = datasets.load(str(path)).word_counts()
    assert counts == expected
    assert list(counts.values()) == sorted(counts.values(), reverse=True)


def test_words_follow_zipfs_law(path: pathlib.Path) -> None:
    """Each of four ranks is off by five standard deviations with less than 1e-6."""
    vocabulary = stackoverflow_file.words()
    assert len(set(vocabulary)) == len(vocabulary) == 10_000
    lengths, drawn = [], collections.Counter[str]()
    for _, tokens in federated_text.read_tokens(path, "train"):
        sentence = tokens.split(" ")
        lengths.append(len(sentence))
        drawn.update(sentence)
    total = sum(lengths)
    # One, and a Poisson variable with mean 11.
    assert min(lengths) >= 1
    assert abs(np.mean(lengths) - 12.0) < 5.0 * math.sqrt(11.0 / len(lengths))
    harmonic = sum(1.0 / rank for rank in range(1, 10_001))
    for rank in (1, 2, 10, 100):
        share = 1.0 / (rank * harmonic)
        error = math.sqrt(total * share * (1.0 - share))
        assert abs(drawn[vocabulary[rank - 1]] - total * share) < 5.0 * error


def test_sizes_are_skewed_and_add_up() -> None:
    found = stackoverflow_file.sizes(20_000, 800_000, np.random.default_rng(0))
    assert (found.sum(), found.min() >= 1) == (800_000, True)
    # Of log-normal sizes, the largest tenth has this share (its Lorenz curve); a bit less, because
    # the first sentence of each client is no matter of chance.
    share = scipy.stats.norm.cdf(1.2 - scipy.stats.norm.isf(0.1))
    largest = np.sort(found)[-2000:].sum()
    assert (largest - 2000) / (800_000 - 20_000) == pytest.approx(share, abs=0.03)
    assert stackoverflow_file.sizes(7, 7, np.random.default_rng(0)).tolist() == [1] * 7
