r"""Writes a file like TFF's StackOverflow data, in the same format and of the same size.

  python benchmarks/stackoverflow_file.py --output=full.sqlite
  python benchmarks/stackoverflow_file.py --output=small.sqlite --clients=34248 --sentences=1358187

The splits have the published numbers of clients, in proportion to --clients, and of sentences, in
proportion to --sentences. By default, all clients are there with a tenth of their sentences (5 GB,
some minutes). How many a client has is log-normal, at least one each. Sentences have lengths by a
Poisson distribution and words by Zipf's law over 10,000, so that there is nothing to learn but how
frequent words are. Clients of the test split are clients of the training split too, as in TFF's
data. The file of word counts that TFF offers beside its data is written as well.

``run-stackoverflow --dataset=full.sqlite`` opens it. With ``--dataset=stackoverflow``, the name
has to be ``stackoverflow.sqlite``, in ``--cache_dir``.
"""

import pathlib
import sys
import time
from collections.abc import Iterator

import numpy as np
from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.kernel import numbers
from stackoverflow_nwp import datasets, federated_text

# The numbers of clients and sentences in each split, by the documentation of TFF's loader.
PUBLISHED = {
    federated_text.TRAIN: (342_477, 135_818_730),
    federated_text.HELDOUT: (38_758, 16_491_230),
    federated_text.TEST: (204_088, 16_586_035),
}
# The number of different words, which is the papers' vocabulary.
NUM_WORDS = 10_000
# The mean number of words in a sentence after the first word.
_MEAN_FURTHER_WORDS = 11.0
# The standard deviation, over clients, of the logarithm of the number of sentences.
_SKEW = 1.2
# An example without tokens; its other fields have lengths as in TFF's data.
_EXAMPLE = federated_text.Example(
    "client",
    federated_text.TRAIN,
    "",
    creation_date="2013-07-05 12:41:20.41 UTC",
    tags="python|machine-learning|privacy",
    title="how to sum updates of many clients with noise",
    post_type="answer",
    score=3,
)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the generator."""
    clients, sentences = PUBLISHED[federated_text.TRAIN]
    flags.DEFINE_string("output", None, "The file to write. Required.", flag_values=values)
    flags.DEFINE_integer("clients", clients, "Training clients.", flag_values=values)
    flags.DEFINE_integer("sentences", sentences // 10, "Their sentences.", flag_values=values)
    flags.DEFINE_integer("seed", 1, "A seed of all that is random.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Writes the data set and its file of word counts."""
    command_line.check_choice(bool(values.output), "--output is needed: the file to write.")
    numbers.positive_integer(values.clients, "--clients")
    numbers.integer_at_least(values.sentences, values.clients, "--sentences")
    numbers.integer_at_least(values.seed, 0, "--seed")
    command_line.check_choice(
        not pathlib.Path(values.output).is_dir(),
        f"--output={values.output} is a directory: name a file.",
    )
    command_line.check_file(values.output, "output")
    start = time.monotonic()
    path = pathlib.Path(values.output)
    counts = np.zeros(NUM_WORDS, np.int64)
    rows = _rows(values.clients, values.sentences, np.random.default_rng(values.seed), counts)
    written = federated_text.write_serialized(path, rows)
    _write_word_counts(path, counts)
    fields = {
        **{f"{split} clients": count.clients for split, count in written.items()},
        **{f"{split} sentences": count.examples for split, count in written.items()},
        "bytes": path.stat().st_size,
        "seconds": time.monotonic() - start,
    }
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def words() -> list[str]:
    """Returns distinct made-up words, the most frequent first; frequent words are short."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    found = list(letters)
    for prefix in found:
        if len(found) >= NUM_WORDS:
            break
        found += [prefix + letter for letter in letters]
    return found[:NUM_WORDS]


def sizes(clients: int, sentences: int, generator: np.random.Generator) -> np.ndarray:
    """Draws clients' log-normal numbers of sentences, (clients,) int64, with a given sum."""
    weights = generator.lognormal(sigma=_SKEW, size=clients)
    exact = (sentences - clients) * weights / weights.sum()
    found = np.floor(exact).astype(np.int64)
    # Round up the numbers with the largest remainders, so that the sum is exact.
    left = sentences - clients - int(found.sum())
    found[np.argsort(found - exact)[:left]] += 1
    return found + 1


def serialize(tokens: bytes, before: bytes, after: bytes) -> bytes:
    """Returns a serialized example, made of encoded tokens and the encoded fields around them."""
    text = b"\n" + _varint(len(tokens)) + tokens
    feature = b"\n" + _varint(len(text)) + text
    entry = b"\n\x06tokens\x12" + _varint(len(feature)) + feature
    features = before + b"\n" + _varint(len(entry)) + entry + after
    return b"\n" + _varint(len(features)) + features


def around_tokens() -> tuple[bytes, bytes]:
    """Returns the encoded fields of an example that stand before its tokens, and those after."""
    encoded = federated_text.serialize(_EXAMPLE)
    features = encoded[_length_and_start(encoded)[1] :]
    fields = []
    while features:
        length, start = _length_and_start(features)
        fields.append(features[: start + length])
        features = features[start + length :]
    place = next(i for i, field in enumerate(fields) if b"\n\x06tokens" in field)
    return b"".join(fields[:place]), b"".join(fields[place + 1 :])


def _length_and_start(field: bytes) -> tuple[int, int]:
    """Decodes the length of an encoded field's contents, and the place where these begin."""
    length, start = 0, 1
    while field[start] >= 128:
        length |= (field[start] & 127) << 7 * (start - 1)
        start += 1
    return length | field[start] << 7 * (start - 1), start + 1


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    return bytes((number & 127 | 128,)) + _varint(number >> 7)


def _rows(
    clients: int, sentences: int, generator: np.random.Generator, counts: np.ndarray
) -> Iterator[tuple[str, str, bytes]]:
    """Yields all rows of the data set, and counts the training clients that use each word."""
    vocabulary = np.array([word.encode() for word in words()], dtype=object)
    shares = 1.0 / np.arange(1, NUM_WORDS + 1)
    shares = np.cumsum(shares / shares.sum())
    shares[-1] = 1.0
    before, after = around_tokens()
    all_clients, all_sentences = PUBLISHED[federated_text.TRAIN]
    for split, (split_clients, split_sentences) in PUBLISHED.items():
        number = max(1, round(clients * split_clients / all_clients))
        total = max(number, round(sentences * split_sentences / all_sentences))
        for client, size in enumerate(sizes(number, total, generator).tolist()):
            # Clients' numbers that are multiples of ten are held out; all others train and test.
            name = client * 10 if split == federated_text.HELDOUT else client // 9 * 10
            name += 0 if split == federated_text.HELDOUT else client % 9 + 1
            lengths = 1 + generator.poisson(_MEAN_FURTHER_WORDS, size)
            ends = np.cumsum(lengths)
            drawn = np.searchsorted(shares, generator.random(int(ends[-1])))
            if split == federated_text.TRAIN:
                counts[np.unique(drawn)] += 1
            text = vocabulary[drawn].tolist()
            first = 0
            for last in ends.tolist():
                tokens = b" ".join(text[first:last])
                yield split, f"{name:08d}", serialize(tokens, before, after)
                first = last


def _write_word_counts(path: pathlib.Path, counts: np.ndarray) -> None:
    """Writes the file of word counts to the place where run-stackoverflow looks for it."""
    found = zip(words(), counts.tolist(), strict=True)
    by_count = sorted(((word, count) for word, count in found if count), key=lambda each: -each[1])
    datasets.load_word_counts(federated_text.Contents.of(path), lambda: dict(by_count))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
