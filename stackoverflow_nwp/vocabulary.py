"""Word counts and vocabularies of federated text, as TFF defines them for StackOverflow.

A word's count is the number of training clients that have at least one example with it, so that
one client's many sentences count no more than another's one.
"""

import collections
import hashlib
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence

from mf_aggregators import atomic_files
from mf_aggregators.progress_bars import ProgressBar
from stackoverflow_nwp import federated_text

_LOGGER = logging.getLogger(__name__)


def count_words(tokens_by_client: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Counts for each word the clients that use it.

    Args:
        tokens_by_client: Pairs of a client and the space-separated tokens of one of its examples,
            in any order.

    Returns:
        The counts, most frequent word first, words with equal counts in alphabetical order.
    """
    clients: dict[str, int] = {}
    words: dict[str, int] = {}
    # One set of pairs of small integers, rather than a set of clients for each word.
    pairs: set[tuple[int, int]] = set()
    counts: collections.Counter[str] = collections.Counter()
    for client, tokens in tokens_by_client:
        client_number = clients.setdefault(client, len(clients))
        for word in tokens.split():
            pair = (client_number, words.setdefault(word, len(words)))
            if pair not in pairs:
                pairs.add(pair)
                counts[word] += 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def word_counts_path(path: pathlib.Path) -> pathlib.Path:
    """Names the file in which the word counts of federated text are cached.

    Args:
        path: A SQLite file of federated text.

    Returns:
        The path beside it that ends in ".word_count", as TFF's file for StackOverflow does.
    """
    return path.with_suffix(".word_count")


def write_word_counts(path: pathlib.Path, word_counts: dict[str, int]) -> None:
    """Writes word counts in TFF's text format, a word and its count a line.

    Args:
        path: The file, replaced in one step if it is there.
        word_counts: Counts by word, in the order to write.
    """
    lines = (f"{word} {count}\n" for word, count in word_counts.items())
    atomic_files.write_text(path, "".join(lines))


def read_word_counts(path: pathlib.Path) -> dict[str, int]:
    """Reads word counts in TFF's text format.

    Args:
        path: The file.

    Returns:
        Counts by word, in the order of the file.

    Raises:
        ValueError: A line is not a word and a count, or a word occurs twice.
        OSError: The file cannot be read.
    """
    word_counts: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split()
        if len(fields) != 2 or not fields[1].isdecimal() or fields[0] in word_counts:
            raise ValueError(f"{path}, line {number}: expected a new word and its count.")
        word_counts[fields[0]] = int(fields[1])
    return word_counts


def count_training_words(path: pathlib.Path, show_progress: bool = True) -> dict[str, int]:
    """Counts the words of federated text by its training clients.

    Args:
        path: A SQLite file of federated text.
        show_progress: Whether to draw a progress bar on standard error.

    Returns:
        The counts, most frequent word first, words with equal counts in alphabetical order.
    """
    return count_words(
        ProgressBar(
            federated_text.read_tokens(path, federated_text.TRAIN),
            desc="Counting words",
            unit="sentence",
            disable=not show_progress,
        )
    )


def load_word_counts(
    path: pathlib.Path, count: Callable[[pathlib.Path], dict[str, int]] = count_training_words
) -> dict[str, int]:
    """Reads the cached word counts of federated text, or counts and caches them.

    The cache has the time stamp of the text that it was made from, and is made anew when that
    differs.

    Args:
        path: A SQLite file of federated text.
        count: What gives the counts of the file if they are not cached.

    Returns:
        The counts, most frequent word first.
    """
    cache = word_counts_path(path)
    text_time = path.stat().st_mtime_ns
    try:
        if cache.stat().st_mtime_ns == text_time:
            return read_word_counts(cache)
    except (OSError, ValueError):
        pass  # Missing or broken: made anew.
    word_counts = count(path)
    try:
        write_word_counts(cache, word_counts)
        os.utime(cache, ns=(text_time, text_time))
    except OSError as error:
        # A shared, read-only data set works too; it is only slower.
        _LOGGER.warning("Could not cache the word counts in %s: %s", cache, error)
    return word_counts


def most_frequent(word_counts: dict[str, int], size: int) -> tuple[str, ...]:
    """Takes the vocabulary of the most frequent words.

    Args:
        word_counts: Counts by word, most frequent first.
        size: How many words to take.

    Returns:
        The first `size` words.

    Raises:
        ValueError: The size is not positive, or the text has fewer words.
    """
    if size < 1:
        raise ValueError(f"The vocabulary size must be positive, not {size}.")
    if size > len(word_counts):
        raise ValueError(
            f"The training text has {len(word_counts)} different words, fewer than the vocabulary"
            f" size {size}: lower the size or use more text."
        )
    return tuple(word_counts)[:size]


def fingerprint(vocabulary: Sequence[str]) -> str:
    """Identifies a vocabulary by its words and their order.

    Args:
        vocabulary: The words.

    Returns:
        Sixteen hexadecimal digits.
    """
    return hashlib.sha256("\n".join(vocabulary).encode("utf-8")).hexdigest()[:16]
