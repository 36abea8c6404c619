r"""run-stackoverflow: one federated training run of next-word prediction, private or not.

Without flags it trains a small model on the docstrings of the installed packages, under a
banded matrix-factorization mechanism with participation timers, and writes the guarantee
that the run earned. Run again with the same --output_dir, it resumes.

Examples:
  run-stackoverflow --output_dir=runs/banded
  run-stackoverflow --output_dir=runs/independent --mechanism=identity
  run-stackoverflow --output_dir=runs/not_private --mechanism=none
  run-stackoverflow --output_dir=runs/mine --dataset=my_text.sqlite --target_epsilon=4
  run-stackoverflow --output_dir=runs/sampled --sampling=poisson --num_bands=4
  run-stackoverflow --output_dir=runs/nightly --availability=diurnal --over_selection=1.3
  run-stackoverflow --output_dir=runs/paper --dataset=stackoverflow --simulated_clients=100
"""

from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from mf_aggregators import validation
from simulations import federated_runs
from simulations.federated_task import TaskCommand
from stackoverflow_nwp import datasets, next_word_data, settings

_COUNTS = (
    "vocab_size",
    "sequence_length",
    "embedding_size",
    "lstm_size",
    "sentences_per_client",
    "heldout_sentences",
    "test_sentences",
)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the task: its data, model and evaluation."""
    texts = settings.default_texts()

    def integer(name: str, text: str) -> None:
        flags.DEFINE_integer(name, None, f"{text} {texts[name]}", flag_values=values)

    flags.DEFINE_string(
        "dataset",
        datasets.DOCSTRINGS,
        "docstrings (made from the installed packages, once), stackoverflow (TFF's, a download of "
        "3 GB), or a .sqlite file in its format (make-text-dataset makes one).",
        flag_values=values,
    )
    integer("vocab_size", "Words in the vocabulary.")
    flags.DEFINE_integer("sequence_length", 20, "Words of a sentence.", flag_values=values)
    integer("embedding_size", "Size of the embedding.")
    integer("lstm_size", "Units of the LSTM.")
    flags.DEFINE_bool(
        "shared_embedding", False, "Whether logits use the input embedding.", flag_values=values
    )
    integer("sentences_per_client", "The most sentences of a client in a round.")
    integer("heldout_sentences", "Sentences that the model is evaluated on during training.")
    integer("test_sentences", "Sentences of test clients for the final accuracy.")


def defaults(values: flags.FlagValues) -> Mapping[str, Any]:
    """Returns the defaults for the data set."""
    return settings.for_dataset(values.dataset).to_dict()


def check_flags(options: Mapping[str, Any]) -> None:
    """Checks the flags of the task.

    Args:
      options: Every flag by name, defaults filled in.

    Raises:
      ValueError: If one is out of its range.
    """
    for name in _COUNTS:
        validation.positive_integer(options[name], f"--{name}")


def outcome_lines(facts: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """Returns the baseline of always predicting the most frequent word."""
    accuracy = federated_runs.percent(facts["most_frequent_word_accuracy"])
    return [(f"always {facts['most_frequent_word']!r}", str(accuracy))]


def command() -> TaskCommand:
    """Returns the command."""
    return TaskCommand(
        name="run-stackoverflow",
        description=__doc__ or "",
        define_flags=define_flags,
        defaults=defaults,
        default_texts=settings.default_texts(),
        check_flags=check_flags,
        open_data=next_word_data.open_data,
        outcome_lines=outcome_lines,
    )


def run() -> None:
    """Entry point of the console command."""
    federated_runs.run(command())


if __name__ == "__main__":
    run()
