r"""run-stackoverflow: one federated training run of next-word prediction, private or not.

Without flags it trains a small model on the docstrings of the installed packages, under a
banded matrix-factorization mechanism with participation timers, and writes the guarantee
that holds for the run. Run again with the same --output_dir, it resumes.

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
from mf_aggregators.commands.flag_groups import FlagGroup
from simulations.runs import federated_runs
from simulations.training.federated_task import TaskCommand
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
    group = FlagGroup(values, "Data", texts)
    group.path(
        "dataset",
        "The text: docstrings (made from the installed packages, once), stackoverflow (TFF's, a "
        "download of 3 GB), or a .sqlite file in its format (make-text-dataset makes one).",
        datasets.DOCSTRINGS,
    )
    group.integer("vocab_size", "The number of words in the vocabulary.")
    group.integer("sequence_length", "The number of words of a sentence.", 20)
    group.integer("sentences_per_client", "The most sentences of a client in a round.")
    group.integer(
        "heldout_sentences",
        "The number of sentences that the model is evaluated on during training.",
    )
    group.integer(
        "test_sentences", "The number of sentences of test clients for the final accuracy."
    )
    group = FlagGroup(values, "Model", texts)
    group.integer("embedding_size", "The size of the embedding.")
    group.integer("lstm_size", "The units of the LSTM.")
    group.boolean("shared_embedding", "Whether the logits use the input embedding.", False)


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
