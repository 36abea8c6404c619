"""Tests of token_arrays: the very rows of TFF's preprocessing, cached or read when asked for."""

import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackoverflow_nwp import federated_text, token_arrays
from stackoverflow_nwp.federated_text import Contents
from tests.examples import examples
from tests.stackoverflow_nwp.small_text import WORDS

_VOCABULARY = WORDS[:-1]


@pytest.fixture(scope="module")
def tff_rows() -> Callable[[list[str]], np.ndarray]:
    """TFF's mapping of sentences to padded rows of 5 + 1 tokens."""
    import tensorflow as tf
    from tensorflow_federated.python.simulation.baselines.stackoverflow import (
        word_prediction_preprocessing as preprocessing,
    )

    to_ids = tf.function(
        preprocessing.build_to_ids_fn(list(_VOCABULARY), 5),
        input_signature=[{"tokens": tf.TensorSpec((), tf.string)}],
    )

    def rows(sentences: list[str]) -> np.ndarray:
        padded = [
            np.pad(ids, (0, 6 - len(ids)))
            for ids in (to_ids({"tokens": tf.constant(text)}).numpy() for text in sentences)
        ]
        return np.array(padded)

    return rows


def test_special_tokens_are_those_of_tff() -> None:
    from tensorflow_federated.python.simulation.baselines.stackoverflow import (
        word_prediction_preprocessing as preprocessing,
    )

    theirs = preprocessing.get_special_tokens(123, num_out_of_vocab_buckets=1)
    ours = token_arrays.SentenceTokenizer([str(word) for word in range(123)]).special_tokens
    assert ours == token_arrays.SpecialTokens(
        padding=theirs.padding,
        out_of_vocabulary=theirs.out_of_vocab[0],
        beginning_of_sentence=theirs.beginning_of_sentence,
        end_of_sentence=theirs.end_of_sentence,
    )


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from((*WORDS, "", "\t", "na\u00efve", "The")), max_size=8).map(
            " ".join
        ),
        min_size=1,
        max_size=4,
    )
)
def test_rows_are_those_of_tff(
    tff_rows: Callable[[list[str]], np.ndarray], sentences: list[str]
) -> None:
    tokenizer = token_arrays.SentenceTokenizer(_VOCABULARY, 5)
    np.testing.assert_array_equal(tokenizer.rows(sentences), tff_rows(sentences))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("split", federated_text.SPLITS)
def test_clients_have_the_rows_of_tffs_pipeline(small_file: pathlib.Path, split: str) -> None:
    import tensorflow_federated as tff
    from tensorflow_federated.python.simulation.baselines.stackoverflow import (
        word_prediction_preprocessing as preprocessing,
    )
    from tensorflow_federated.python.simulation.datasets import stackoverflow

    data = tff.simulation.datasets.SqlClientData(str(small_file), split).preprocess(
        stackoverflow._add_proto_parsing
    )
    preprocess = preprocessing.create_preprocess_fn(
        tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=100, shuffle_buffer_size=1),
        list(_VOCABULARY),
        sequence_length=20,
    )
    eager = token_arrays.open_client_tokens(
        Contents.of(small_file), split, _VOCABULARY, show_progress=False
    )
    lazy = token_arrays.open_client_tokens(
        Contents.of(small_file), split, _VOCABULARY, max_eager_examples=0
    )
    assert isinstance(eager, token_arrays.EagerClientTokens)
    assert isinstance(lazy, token_arrays.LazyClientTokens)
    assert eager.client_ids == lazy.client_ids == tuple(data.client_ids)
    # A client of each length is enough of the slow pipeline.
    for client in eager.client_ids[:2]:
        batch = preprocess(data.create_tf_dataset_for_client(client))
        ((inputs, targets),) = batch.as_numpy_iterator()
        np.testing.assert_array_equal(eager.tokens_of(client)[:, :-1], inputs)
        np.testing.assert_array_equal(eager.tokens_of(client)[:, 1:], targets)
    for client in eager.client_ids:
        assert eager.tokens_of(client).dtype == lazy.tokens_of(client).dtype == np.int32
        np.testing.assert_array_equal(eager.tokens_of(client), lazy.tokens_of(client))
    both: tuple[token_arrays.ClientTokens, ...] = (eager, lazy)
    for tokens in both:
        with pytest.raises(KeyError):
            tokens.tokens_of("nobody")


def test_arrays_are_cached(small_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(length: int = 20) -> token_arrays.EagerClientTokens:
        return token_arrays.load_token_arrays(
            Contents.of(small_file), "train", _VOCABULARY, length, show_progress=False
        )

    first = load()
    (cache,) = small_file.parent.glob("*.npz")
    calls = []
    tokenize = token_arrays.tokenize_split

    def counted(*arguments: object) -> token_arrays.EagerClientTokens:
        calls.append(arguments)
        return tokenize(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(token_arrays, "tokenize_split", counted)
    second = load()
    assert not calls
    assert first.client_ids == second.client_ids
    np.testing.assert_array_equal(first.offsets, second.offsets)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    # Cut short, or no archive at all: made anew.
    for contents in (cache.read_bytes()[:-200], b"", b"text"):
        cache.write_bytes(contents)
        calls.clear()
        np.testing.assert_array_equal(load().tokens, first.tokens)
        assert len(calls) == 1
    # Another length has a cache of its own.
    calls.clear()
    assert load(5).tokens.shape[1] == 6
    load()
    assert len(calls) == 1
