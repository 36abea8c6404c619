"""Turns sentences into rows of token ids, equal to TFF's next-word-prediction preprocessing.

TFF's pipeline builds a lookup table for every client in every round. Here text is tokenized once
and the arrays are cached (`EagerClientTokens`), or, for data too large for that, a client is
tokenized when it is asked for (`LazyClientTokens`). Both give the same rows.
"""

import array
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mf_aggregators import atomic_files, checkpoints
from mf_aggregators.progress_bars import ProgressBar
from stackoverflow_nwp import federated_text
from stackoverflow_nwp.federated_text import Contents

_LOGGER = logging.getLogger(__name__)

# The number of words kept of a sentence in the papers' experiments, and TFF's default.
DEFAULT_SEQUENCE_LENGTH = 20
# The most examples that are tokenized as a whole: more of them take more than a few minutes.
MAX_EAGER_EXAMPLES = 5_000_000
_CACHE_FORMAT = 3


class SpecialTokens(NamedTuple):
    """Ids of special tokens, those that are not words of the vocabulary, as TFF numbers them.

    Attributes:
        padding: Fills rows up to their length.
        out_of_vocabulary: Stands for every unknown word.
        beginning_of_sentence: The first token of each row.
        end_of_sentence: Follows the last word of a sentence that was not cut.
    """

    padding: int
    out_of_vocabulary: int
    beginning_of_sentence: int
    end_of_sentence: int


class ClientTokens(Protocol):
    """The tokenized sentences of the clients of one split."""

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The clients' names, sorted."""

    def tokens_of(self, client_id: str) -> np.ndarray:
        """Returns a client's sentences as rows of token ids.

        Args:
            client_id: One of `client_ids`.

        Returns:
            A read-only int32 array with one row of ``sequence_length + 1`` token ids per sentence.

        Raises:
            KeyError: There is no such client.
        """


class SentenceTokenizer:
    """Maps a sentence to token ids, exactly as TFF's `build_to_ids_fn` with padding does.

    Attributes:
        sequence_length: The number of words kept of a sentence.
        special_tokens: The ids of special tokens.
    """

    def __init__(
        self, vocabulary: Sequence[str], sequence_length: int = DEFAULT_SEQUENCE_LENGTH
    ) -> None:
        """Numbers the words from 1 in their order.

        Raises:
            ValueError: The vocabulary is empty or has a word twice, or the length is not positive.
        """
        if not vocabulary or len(set(vocabulary)) != len(vocabulary):
            raise ValueError("The vocabulary must hold at least one word, and none twice.")
        if sequence_length < 1:
            raise ValueError(f"The sequence length must be positive, not {sequence_length}.")
        self.sequence_length = sequence_length
        # The id 0 is padding, words are numbered from 1, and all unknown words share one id.
        self.special_tokens = SpecialTokens(0, *(len(vocabulary) + more for more in (1, 2, 3)))
        self._ids = {word: number for number, word in enumerate(vocabulary, start=1)}

    def row(self, tokens: str) -> list[int]:
        """Returns the `sequence_length + 1` ids of a sentence of tokens with single spaces between.

        The ids are those of: the beginning of the sentence; its words; its end, unless words fill
        the row; padding.
        """
        special = self.special_tokens
        # Split at each single space, as TFF does: between two spaces in a row there is an empty,
        # unknown word, and an empty sentence consists of one such word.
        words = tokens.split(" ", self.sequence_length)[: self.sequence_length]
        ids = [special.beginning_of_sentence]
        ids += [self._ids.get(word, special.out_of_vocabulary) for word in words]
        if len(words) < self.sequence_length:
            ids.append(special.end_of_sentence)
            ids += [special.padding] * (self.sequence_length - len(words) - 1)
        return ids

    def rows(self, sentences: Sequence[str]) -> np.ndarray:
        """Returns an int32 array with a row for each sentence."""
        rows = [self.row(sentence) for sentence in sentences]
        return np.array(rows, dtype=np.int32).reshape(len(rows), self.sequence_length + 1)


@dataclasses.dataclass(frozen=True, eq=False)
class EagerClientTokens:
    """Tokens of a split that are all in memory, client after client.

    Attributes:
        client_ids: The clients' names, sorted.
        offsets: Client i has the rows from `offsets[i]` up to `offsets[i + 1]`.
        tokens: One row of token ids per sentence.
    """

    client_ids: tuple[str, ...]
    offsets: np.ndarray
    tokens: np.ndarray

    @functools.cached_property
    def _positions(self) -> dict[str, int]:
        return {client: i for i, client in enumerate(self.client_ids)}

    def tokens_of(self, client_id: str) -> np.ndarray:
        """Returns a view of a client's rows; see `ClientTokens`."""
        position = self._positions[client_id]
        view = self.tokens[self.offsets[position] : self.offsets[position + 1]]
        view.flags.writeable = False
        return view


class LazyClientTokens:
    """Tokens of a split that are read from a SQLite file, client by client, when asked for."""

    def __init__(self, contents: Contents, split: str, tokenizer: SentenceTokenizer) -> None:
        """Lists the clients of a split of a SQLite file."""
        self._contents = contents
        self._split = split
        self._tokenizer = tokenizer
        self._client_ids = federated_text.clients_of_split(contents.path, split)
        contents.check()
        self._known = frozenset(self._client_ids)

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The clients' names, sorted."""
        return self._client_ids

    def tokens_of(self, client_id: str) -> np.ndarray:
        """Reads and tokenizes a client's sentences; see `ClientTokens`.

        Raises:
            ValueError: The file has changed since it was opened.
        """
        if client_id not in self._known:
            raise KeyError(client_id)
        path = self._contents.path
        sentences = federated_text.read_tokens_of_client(path, self._split, client_id)
        self._contents.check()
        rows = self._tokenizer.rows(sentences)
        rows.flags.writeable = False
        return rows


def tokenize_split(
    path: pathlib.Path, split: str, tokenizer: SentenceTokenizer, show_progress: bool = True
) -> EagerClientTokens:
    """Tokenizes all sentences of a split, each client's in the order of the file."""
    # Use arrays, because lists of lists would take gigabytes for millions of sentences.
    tokens, owners = array.array("i"), array.array("i")
    client_ids = federated_text.clients_of_split(path, split)
    numbers = {client: number for number, client in enumerate(client_ids)}
    sentences = ProgressBar(
        federated_text.read_tokens(path, split),
        desc=f"Tokenizing {split}",
        unit="sentence",
        disable=not show_progress,
    )
    for client, sentence in sentences:
        if client in numbers:
            tokens.extend(tokenizer.row(sentence))
            owners.append(numbers[client])
    rows = np.frombuffer(tokens, np.intc).reshape(-1, tokenizer.sequence_length + 1)
    of_rows = np.frombuffer(owners, np.intc)
    lengths = np.bincount(of_rows, minlength=len(client_ids))
    return EagerClientTokens(
        client_ids=client_ids,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=rows[np.argsort(of_rows, kind="stable")].astype(np.int32, copy=False),
    )


def load_token_arrays(
    contents: Contents,
    split: str,
    vocabulary: Sequence[str],
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    show_progress: bool = True,
) -> EagerClientTokens:
    """Returns the tokens of a split; reads them from the cache if an earlier call saved them.

    A cached copy is used only if it is undamaged and was made from the same contents, split,
    vocabulary (most frequent word first) and length.

    Raises:
        ValueError: The file cannot be read, or has changed.
    """
    tokenizer, path = SentenceTokenizer(vocabulary, sequence_length), contents.path
    # Each split, length and vocabulary has a cache file of its own, so that alternating between two
    # vocabularies rebuilds neither.
    purpose = json.dumps([split, sequence_length, [*vocabulary]])
    key = json.dumps([_CACHE_FORMAT, purpose, contents.sha256])
    name = hashlib.sha256(purpose.encode()).hexdigest()[:12]
    cache = path.with_name(f"{path.stem}.tokens-{name}.npz")
    arrays = _read_cache(cache, key, sequence_length)
    if arrays is not None:
        return arrays
    arrays = tokenize_split(path, split, tokenizer, show_progress)
    contents.check()
    try:
        with atomic_files.writing(cache) as file:
            np.savez(
                file,
                key=np.array(key),
                client_ids=np.array(arrays.client_ids, dtype=np.str_),
                offsets=arrays.offsets,
                tokens=arrays.tokens,
            )
    except OSError as error:
        _LOGGER.warning("Could not cache the tokens in %s: %s", cache, error)
    return arrays


def open_client_tokens(
    contents: Contents,
    split: str,
    vocabulary: Sequence[str],
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_eager_examples: int = MAX_EAGER_EXAMPLES,
    show_progress: bool = True,
) -> ClientTokens:
    """Opens the tokens of a split's clients, in memory unless the split is too large.

    Args:
        contents: A SQLite file of federated text.
        split: The split's name.
        vocabulary: The words, most frequent first.
        sequence_length: The number of words to keep of a sentence.
        max_eager_examples: A split with more examples than this is read a client at a time.
        show_progress: Whether to draw a progress bar on standard error.

    Raises:
        ValueError: The file has no such split, or has changed.
    """
    path = contents.path
    counts = federated_text.count_splits(path)
    if split not in counts:
        raise ValueError(f"{path} has no split {split!r}, only {', '.join(sorted(counts))}.")
    if counts[split].examples > max_eager_examples:
        return LazyClientTokens(contents, split, SentenceTokenizer(vocabulary, sequence_length))
    return load_token_arrays(contents, split, vocabulary, sequence_length, show_progress)


def _read_cache(cache: pathlib.Path, key: str, sequence_length: int) -> EagerClientTokens | None:
    """Reads cached token arrays; None if they are missing, damaged or made for another key."""
    try:
        contents = checkpoints.archived_arrays(cache)
        if str(contents["key"]) != key:
            return None
        client_ids = tuple(str(client) for client in contents["client_ids"])
        offsets, tokens = contents["offsets"], contents["tokens"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = (
        offsets.shape == (len(client_ids) + 1,)
        and tokens.shape == (int(offsets[-1]), sequence_length + 1)
        and tokens.dtype == np.int32
    )
    return EagerClientTokens(client_ids, offsets, tokens) if whole else None
