"""The data of a next-word run, before and after TensorFlow is loaded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import memory
from simulations.training.federated_task import HELDOUT, FederatedTask
from stackoverflow_nwp import datasets

# The number of sentences that the most frequent word is counted on.
_COUNTED_SENTENCES = 50_000
_BYTES_PER_NUMBER = 4


@dataclasses.dataclass(frozen=True)
class NextWordData:
    """A data set of text and the flags of a run on it.

    Attributes:
      text: The data set.
      options: Every flag by name.
    """

    text: datasets.FederatedText
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The file."""
        return str(self.text.path)

    @property
    def num_clients(self) -> int:
        """The training clients."""
        return self.text.splits["train"].clients

    def fingerprint(self) -> str:
        """Returns a hash that tells this file from another."""
        return self.text.fingerprint()

    def load(self, seed: int) -> FederatedTask:
        """Returns the task; see :class:`simulations.training.federated_task.TaskData`."""
        import tensorflow as tf

        from stackoverflow_nwp.task import ACCURACY, ClientDatasets, NextWordTask, all_sentences

        options = self.options
        task = NextWordTask(
            options["vocab_size"],
            options["sequence_length"],
            options["embedding_size"],
            options["lstm_size"],
            options["shared_embedding"],
        )
        words = self.text.vocabulary(options["vocab_size"])
        splits = {
            split: self.text.client_tokens(split, words, options["sequence_length"])
            for split in ("train", "heldout", "test")
        }
        heldout, test, counted = (
            all_sentences(splits[split], at_most, seed, number)
            for number, (split, at_most) in enumerate(
                (
                    ("heldout", options["heldout_sentences"]),
                    ("test", options["test_sentences"]),
                    ("train", _COUNTED_SENTENCES),
                )
            )
        )
        tf.keras.utils.set_random_seed(seed % 2**32)
        initial_weights = tuple(task.keras_model().get_weights())
        word, word_accuracy = task.constant_accuracy(counted, test)

        def evaluate(weights: Sequence[np.ndarray], split: str) -> Mapping[str, float]:
            values = task.evaluate(weights, heldout if split == HELDOUT else test)
            return {"loss": values["loss"], "accuracy": values[ACCURACY]}

        return FederatedTask(
            client_ids=tuple(splits["train"].client_ids),
            client_dataset=ClientDatasets(
                splits["train"],
                options["sentences_per_client"],
                options["batch_size"],
                options["client_epochs"],
                seed,
            ),
            model_fn=task.model_fn(),
            initial_weights=initial_weights,
            evaluate=evaluate,
            accuracy=ACCURACY,
            facts={
                "most_frequent_word": words[word - 1],
                "most_frequent_word_accuracy": word_accuracy,
            },
        )


def open_data(options: Mapping[str, Any]) -> NextWordData:
    """Opens the data set of a run, making or downloading it the first time.

    Args:
      options: Every flag by name, checked one by one.

    Returns:
      The data.

    Raises:
      ValueError: If there is no such data set, or it is too small for the flags.
    """
    cohort = options["simulated_clients"] or options["clients_per_round"]
    text = datasets.load(options["dataset"], options["cache_dir"], min_train_clients=cohort)
    # Refuses a vocabulary that the text cannot fill before anything is written.
    text.vocabulary(options["vocab_size"])
    _check_memory(text, options)
    return NextWordData(text, options)


def _check_memory(text: datasets.FederatedText, options: Mapping[str, Any]) -> None:
    """Refuses a model, or sentences, that no memory could hold."""
    embedding, units, words = (
        options[name] for name in ("embedding_size", "lstm_size", "vocab_size")
    )
    parameters = words * embedding + 4 * units * (embedding + units) + units * embedding
    memory.check(
        2 * _BYTES_PER_NUMBER * parameters,
        f"a model of at least {parameters} parameters",
        "use a smaller --embedding_size or --lstm_size",
    )
    sentences = sum(
        min(options[f"{split}_sentences"], text.splits[split].examples)
        for split in ("heldout", "test")
    )
    memory.check(
        _BYTES_PER_NUMBER * sentences * options["sequence_length"],
        f"{sentences} sentences of {options['sequence_length']} words each",
        "use a smaller --sequence_length, or fewer --heldout_sentences and --test_sentences",
    )
