"""Default settings of a run: a small one for the docstrings, the papers' for StackOverflow."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stackoverflow_nwp import datasets


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run uses where its flags do not say otherwise.

    Attributes:
      vocab_size: Words in the vocabulary.
      embedding_size: The size of the embedding of the model.
      lstm_size: The units of the LSTM of the model.
      num_rounds: n.
      clients_per_round: m.
      max_bands: The most bands of C; the separation is the other limit.
      sentences_per_client: The most sentences of a client in a round.
      batch_size: Sentences in a local step.
      client_epochs: Passes of a client over its sentences of a round.
      client_optimizer: ``sgd`` or ``adam``.
      client_learning_rate: The learning rate of the client's optimizer.
      server_learning_rate: The learning rate of the server's SGD with momentum.
      server_momentum: The momentum of the server's SGD with momentum.
      server_warmup: Share of the rounds, the first ones, in which the rate rises from 5 %.
      server_cooldown: Share of the rounds, the last ones, in which the rate falls to 5 %.
      clip_norm: L2 norm that each client's update is clipped to.
      zeroing_norm: L-infinity norm above which an update is replaced by zero; None for none.
      target_epsilon: The epsilon of the planned guarantee.
      delta: The delta of the planned guarantee.
      evaluate_every: Rounds between evaluations.
      heldout_sentences: Sentences of held-out clients, for evaluations during training.
      test_sentences: Sentences of test clients, for the final accuracy.
    """

    vocab_size: int
    embedding_size: int
    lstm_size: int
    num_rounds: int
    clients_per_round: int
    max_bands: int
    sentences_per_client: int
    batch_size: int
    client_epochs: int
    client_optimizer: str
    client_learning_rate: float
    server_learning_rate: float
    server_momentum: float
    server_warmup: float
    server_cooldown: float
    clip_norm: float
    zeroing_norm: float | None
    target_epsilon: float
    delta: float
    evaluate_every: int
    heldout_sentences: int
    test_sentences: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by the names of their flags."""
        return dataclasses.asdict(self)


SMALL = Settings(
    vocab_size=2000,
    embedding_size=16,
    lstm_size=32,
    num_rounds=200,
    clients_per_round=100,
    max_bands=64,
    sentences_per_client=64,
    batch_size=16,
    client_epochs=1,
    client_optimizer="sgd",
    client_learning_rate=2.0,
    server_learning_rate=1.5,
    server_momentum=0.8,
    server_warmup=0.0,
    server_cooldown=0.4,
    clip_norm=1.2,
    zeroing_norm=None,
    target_epsilon=8.0,
    delta=1e-4,
    evaluate_every=10,
    heldout_sentences=2_000,
    test_sentences=20_000,
)

# BandMF Sec. 6 and App. I: 2052 rounds of 1000 clients, six participations at least 342
# rounds apart. Their noise rows take 6 GB of disk.
PAPER = Settings(
    vocab_size=10_000,
    embedding_size=96,
    lstm_size=670,
    num_rounds=2052,
    clients_per_round=1000,
    max_bands=342,
    sentences_per_client=256,
    batch_size=16,
    client_epochs=1,
    client_optimizer="sgd",
    client_learning_rate=1.0,
    server_learning_rate=0.5,
    server_momentum=0.95,
    server_warmup=0.15,
    server_cooldown=0.25,
    clip_norm=1.0,
    zeroing_norm=1.0,
    target_epsilon=8.0,
    delta=1e-6,
    evaluate_every=20,
    heldout_sentences=10_000,
    test_sentences=100_000,
)


def for_dataset(dataset: str) -> Settings:
    """Returns the settings for a data set by its name: the papers' for StackOverflow's only."""
    return PAPER if dataset == datasets.STACKOVERFLOW else SMALL


def default_texts() -> Mapping[str, str]:
    """Returns what ``--help`` says of each default, by flag: both settings, side by side."""
    small, paper = SMALL.to_dict(), PAPER.to_dict()
    texts = {}
    for name, default in small.items():
        other = _text(paper[name])
        different = (
            "" if paper[name] == default else f"; {other} with --dataset={datasets.STACKOVERFLOW}"
        )
        texts[name] = f"Default: {_text(default)}{different}."
    return texts


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
