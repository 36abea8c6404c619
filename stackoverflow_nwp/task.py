"""The next-word-prediction task, which is TFF's StackOverflow baseline on arrays of tokens.

The model, the special tokens and the metrics are those of
``tff.simulation.baselines.stackoverflow``; sentences come tokenized already, with the
tokens that its preprocessing gives.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.baselines import keras_metrics
from tensorflow_federated.python.simulation.baselines.stackoverflow import (
    word_prediction_models,
    word_prediction_preprocessing,
)

from mf_aggregators import random_streams
from simulations.training import training_parts
from simulations.training.training_parts import keras_evaluation
from stackoverflow_nwp.token_arrays import ClientTokens

# The papers' metric: the accuracy that does not count out-of-vocabulary and end-of-sentence tokens.
ACCURACY = "accuracy_without_out_of_vocab_or_end_of_sentence"

_EVALUATION_BATCH_SIZE = 128


@dataclasses.dataclass(frozen=True)
class NextWordTask:
    """Next-word-prediction task of a vocabulary size, a sentence length and a model size.

    Attributes:
      vocab_size: Words in the vocabulary, special tokens not counted.
      sequence_length: Words of a sentence that are predicted.
      embedding_size: The size of the embedding and of the layer before the logits.
      lstm_size: Units of the LSTM.
      shared_embedding: Whether the logits use the transposed input embedding.
    """

    vocab_size: int
    sequence_length: int
    embedding_size: int
    lstm_size: int
    shared_embedding: bool

    @property
    def special_tokens(self) -> word_prediction_preprocessing.SpecialTokens:
        """TFF's special tokens for this vocabulary."""
        return word_prediction_preprocessing.get_special_tokens(self.vocab_size)

    def keras_model(self) -> tf.keras.Model:
        """Returns TFF's recurrent model of this size, uncompiled."""
        return word_prediction_models.create_recurrent_model(
            vocab_size=self.vocab_size + self.special_tokens.get_number_of_special_tokens(),
            embedding_size=self.embedding_size,
            lstm_size=self.lstm_size,
            shared_embedding=self.shared_embedding,
        )

    def model_fn(self) -> Callable[[], tff.learning.models.VariableModel]:
        """Returns the function that builds ``tff.learning``'s model."""
        spec = tf.TensorSpec((None, self.sequence_length), tf.int32)

        def build() -> tff.learning.models.VariableModel:
            return tff.learning.models.from_keras_model(
                keras_model=self.keras_model(),
                loss=_loss(),
                input_spec=(spec, spec),
                metrics=self._metrics(),
            )

        return build

    def _metrics(self) -> list[tf.keras.metrics.Metric]:
        special = self.special_tokens
        no_words = [special.padding, special.end_of_sentence, *special.out_of_vocab]
        return [
            keras_metrics.NumTokensCounter(masked_tokens=[special.padding]),
            keras_metrics.MaskedCategoricalAccuracy(
                name="accuracy", masked_tokens=[special.padding]
            ),
            keras_metrics.MaskedCategoricalAccuracy(name=ACCURACY, masked_tokens=no_words),
        ]

    def evaluate(self, weights: Sequence[np.ndarray], sentences: np.ndarray) -> Mapping[str, float]:
        """Returns the ``loss`` (per token, in nats) and the accuracies of a model, by name.

        Args:
          weights: The model's weights, in the model's order.
          sentences: (m, sequence_length + 1) int32 tokens.
        """
        return self._evaluation(
            weights, sentences[:, :-1], sentences[:, 1:], batch_size=_EVALUATION_BATCH_SIZE
        )

    @functools.cached_property
    def _evaluation(self) -> Callable[..., Mapping[str, float]]:
        return keras_evaluation(self._compiled_model)

    def _compiled_model(self) -> tf.keras.Model:
        model = self.keras_model()
        model.compile(loss=_loss(), weighted_metrics=self._metrics())
        return model

    def constant_accuracy(self, train: np.ndarray, test: np.ndarray) -> tuple[int, float]:
        """Returns the most frequent word of some sentences, and its accuracy on others.

        Args:
          train: (m, sequence_length + 1) tokens that the word is counted on.
          test: (p, sequence_length + 1) tokens that it is tried on.

        Returns:
          The word's token, and the share of words to predict in ``test`` that it is.
        """
        words = np.arange(1, self.vocab_size + 1)
        counts = np.bincount(train[:, 1:].ravel(), minlength=self.vocab_size + 1)[words]
        targets = test[:, 1:].ravel()
        targets = targets[(targets >= 1) & (targets <= self.vocab_size)]
        token = int(words[np.argmax(counts)])
        return token, float(np.mean(targets == token)) if len(targets) else 0.0


@dataclasses.dataclass(frozen=True)
class ClientDatasets:
    """Function from a client and a round to batches, which depend on seed, client and round alone.

    Attributes:
      tokens: The clients' sentences.
      sentences_per_client: The most sentences of a client in a round: a new sample in each.
      batch_size: Sentences in a local step.
      epochs: How often the client goes through them.
      seed: Seed for drawing the samples.
    """

    tokens: ClientTokens
    sentences_per_client: int
    batch_size: int
    epochs: int
    seed: int

    def __call__(self, client_id: str, round_index: int) -> tf.data.Dataset:
        """Returns the batches of a client in a round: (inputs, targets), int32."""
        sentences = self.tokens.tokens_of(client_id)
        order = training_parts.sample_order(self.seed, round_index, client_id, len(sentences))
        chosen = sentences[order[: self.sentences_per_client]]
        dataset = tf.data.Dataset.from_tensor_slices((chosen[:, :-1], chosen[:, 1:]))
        return training_parts.batches(dataset, self.batch_size, self.epochs)


def all_sentences(
    tokens: ClientTokens, at_most: int, seed: int, split_number: int = 0
) -> np.ndarray:
    """Returns a sample of sentences from the clients of a split; the seed determines the sample.

    Args:
      tokens: The split.
      at_most: How many sentences.
      seed: The seed of the run.
      split_number: The number of the split, from 0: different numbers make the samples of a run's
        splits independent.

    Returns:
      (m, sequence_length + 1) int32.
    """
    generator = random_streams.generator_of(seed, random_streams.Stream.EVALUATION, split_number)
    order = generator.permutation(len(tokens.client_ids))
    chosen: list[np.ndarray] = []
    found = 0
    # Take whole clients in random order, so that a large split need not be read to its end.
    for client in order:
        chosen.append(tokens.tokens_of(tokens.client_ids[client]))
        found += len(chosen[-1])
        if found >= at_most:
            break
    return np.concatenate(chosen)[:at_most]


def _loss() -> tf.keras.losses.Loss:
    # The loss ignores padding itself: the model's mask would do so too, but does not reach every
    # place that computes the loss.
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
