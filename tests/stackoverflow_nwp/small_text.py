"""A small data set for the tests of the text data."""

import pathlib
from typing import Any

from stackoverflow_nwp.federated_text import Example

WORDS = ("the", "cat", "sat", "on", "a", "mat", ".", "<URL>", "it's", "unknown-word")


def small_examples() -> list[Example]:
    """Makes sentences of 0 to 25 words for clients of all splits, one of them in two splits."""
    examples = []
    for split, clients in (("train", 6), ("heldout", 2), ("test", 3)):
        for client in range(clients):
            name = f"{split}.client{client}"
            for number in range(client % 4 + 1):
                length = (7 * client + 11 * number) % 26
                tokens = " ".join(
                    WORDS[(client + number + i * i) % len(WORDS)] for i in range(length)
                )
                examples.append(
                    Example(name, split, tokens, tags="tag|other", title="A title", score=client)
                )
    # StackOverflow's training clients come back in the test split with later posts.
    examples.append(Example("train.client0", "test", "the mat", post_type="answer"))
    return examples


def client_data(path: pathlib.Path, split: str) -> Any:
    """Opens a split as a `tff.simulation.datasets.ClientData` of StackOverflow's six fields."""
    import tensorflow as tf
    import tensorflow_federated as tff

    fields = {
        name: tf.io.FixedLenFeature((), tf.int64 if name == "score" else tf.string)
        for name in ("creation_date", "score", "tags", "title", "tokens", "type")
    }

    def parse(dataset: Any) -> Any:
        return dataset.map(
            lambda proto: tf.io.parse_single_example(proto, fields),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    return tff.simulation.datasets.SqlClientData(str(path), split).preprocess(parse)
