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
  run-stackoverflow --output_dir=runs/plays --dataset=shakespeare
  run-stackoverflow --output_dir=runs/letters --dataset=shakespeare --characters
  run-stackoverflow --output_dir=runs/nightly --availability=diurnal --over_selection=1.3
  run-stackoverflow --output_dir=runs/paper --dataset=stackoverflow --simulated_clients=100
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from absl import flags

from mf_aggregators import inputs
from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel import numbers
from simulations import flag_fields
from simulations.runs import run_command
from simulations.training.federated_task import (
    HELDOUT,
    FederatedTask,
    TaskCommand,
    default_texts,
    integers,
    option,
)
from stackoverflow_nwp import datasets, shakespeare
from stackoverflow_nwp.token_arrays import MAX_EAGER_EXAMPLES, open_client_tokens

_OF_MODEL = ("embedding_size", "lstm_size")
_OF_DATA = ("vocab_size", "sequence_length", "sentences_per_client")
_COUNTS = (*_OF_DATA, *_OF_MODEL, "heldout_sentences", "test_sentences")
# The most training sentences in which words are counted to find the most frequent one.
_COUNTED_SENTENCES = 50_000
# A split is tokenized as a whole if it has at most this many times the needed sentences.
_MOST_READ = 10
_BYTES_PER_NUMBER = 4


@dataclasses.dataclass(frozen=True)
class _Defaults:
    """Default flags of run-stackoverflow, by name; without arguments, those for small data sets.

    ``max_bands`` is not a flag: it limits the default number of bands of C, as the separation does.
    """

    vocab_size: int = 2000
    sequence_length: int = 20
    embedding_size: int = 16
    lstm_size: int = 32
    num_rounds: int = 200
    clients_per_round: int = 100
    max_bands: int = 64
    sentences_per_client: int = 64
    batch_size: int = 16
    client_epochs: int = 1
    client_optimizer: str = "sgd"
    client_learning_rate: float = 2.0
    server_learning_rate: float = 1.5
    server_momentum: float = 0.8
    server_warmup: float = 0.0
    server_cooldown: float = 0.4
    clip_norm: float = 1.2
    zeroing_norm: float | None = None
    target_epsilon: float = 8.0
    delta: float = 1e-4
    evaluate_every: int = 10
    heldout_sentences: int = 2_000
    test_sentences: int = 20_000


SMALL = _Defaults()

# Default flags for StackOverflow, from BandMF Sec. 6 and App. I: 2052 rounds of 1000 clients, six
# participations at least 342 rounds apart. The run's noise rows take 6 GB of disk.
PAPER = _Defaults(
    vocab_size=10_000,
    embedding_size=96,
    lstm_size=670,
    num_rounds=2052,
    clients_per_round=1000,
    max_bands=342,
    sentences_per_client=256,
    client_learning_rate=1.0,
    server_learning_rate=0.5,
    server_momentum=0.95,
    server_warmup=0.15,
    server_cooldown=0.25,
    clip_norm=1.0,
    zeroing_norm=1.0,
    delta=1e-6,
    evaluate_every=20,
    heldout_sentences=10_000,
    test_sentences=100_000,
)

# Default flags for words of Shakespeare's plays. A third of the 1,113 roles take part in each
# round: with fewer, the noise would exceed their updates. The vocabulary has 4,000 words: with
# 2,000, a ninth of the text is out of vocabulary, and a model learns to predict unknown words.
PLAYS = _Defaults(
    vocab_size=4_000,
    num_rounds=30,
    clients_per_round=370,
    sentences_per_client=16,
    server_learning_rate=1.0,
    evaluate_every=5,
    heldout_sentences=1_000,
    test_sentences=5_000,
)

# Default flags for characters of Shakespeare's plays, TFF's own task. TFF's model is large for this
# number of clients.
CHARACTERS = dataclasses.replace(
    _Defaults(**{**vars(PLAYS), **shakespeare.CHARACTER_MODEL}),
    num_rounds=40,
    clients_per_round=20,
    sentences_per_client=16,
    batch_size=4,
    client_learning_rate=1.0,
    server_learning_rate=0.3,
    heldout_sentences=200,
    test_sentences=1_000,
)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the task: its data, model and evaluation.

    Flags:
      dataset: The text: docstrings (made once, from the installed packages), shakespeare (roles of
        plays, from the package shakespeare or TFF's download), stackoverflow (TFF's, a download of
        3 GB), or a .sqlite file in its format (make-text-dataset makes one).
      characters: Whether to predict characters, with TFF's own model and preprocessing for
        Shakespeare. Only with --dataset=shakespeare; sentences are then pieces of 80 characters.
      vocab_size: The number of words in the vocabulary.
      sequence_length: The number of words to which a sentence is cut or padded.
      sentences_per_client: The most sentences of a client in a round.
      heldout_sentences: The number of held-out sentences for the evaluations during training.
      test_sentences: The number of sentences of test clients for the final accuracy.
      embedding_size: The dimension of the word embedding.
      lstm_size: The number of units of the LSTM.
      shared_embedding: Whether the output layer uses the input embedding.
    """
    texts = flag_fields.texts_of(define_flags)
    data, model = (FlagGroup(values, title, _default_texts()) for title in ("Data", "Model"))
    data.path("dataset", texts["dataset"], datasets.DOCSTRINGS)
    data.boolean("characters", texts["characters"], False)
    for name in texts:
        if name in _COUNTS:
            (model if name in _OF_MODEL else data).integer(name, texts[name])
    model.boolean("shared_embedding", texts["shared_embedding"], False)


def defaults(values: flags.FlagValues) -> Mapping[str, object]:
    """Returns the default flags for the data set; for StackOverflow, the papers' values."""
    if values.dataset == datasets.SHAKESPEARE:
        return vars(CHARACTERS if values.characters else PLAYS)
    return vars(PAPER if values.dataset == datasets.STACKOVERFLOW else SMALL)


def _default_texts() -> Mapping[str, str]:
    def text(value: object) -> str:
        if value is None:
            return "none"
        return f"{value:g}" if isinstance(value, float) else str(value)

    usual = vars(SMALL)
    texts = default_texts(usual, vars(PAPER), f"--dataset={datasets.STACKOVERFLOW}", text)
    for others, condition in (
        (vars(PLAYS), f"--dataset={datasets.SHAKESPEARE}"),
        (vars(CHARACTERS), "--characters"),
    ):
        for name in texts:
            if others[name] != usual[name]:
                texts[name] = f"{texts[name][:-1]}; {text(others[name])} with {condition}."
        usual = others
    return texts


def check_flags(options: Mapping[str, object]) -> None:
    """Checks the flags of the task; raises ValueError if one is out of its range."""
    for name in _COUNTS:
        numbers.positive_integer(options[name], f"--{name}")
    if not options["characters"]:
        return
    if options["dataset"] != datasets.SHAKESPEARE:
        raise ValueError(
            f"--characters needs --dataset={datasets.SHAKESPEARE}, found {options['dataset']}."
        )
    for name, value in (*shakespeare.CHARACTER_MODEL.items(), ("shared_embedding", False)):
        if options[name] != value:
            raise ValueError(
                f"--{name} must be {value} with --characters, whose model is TFF's own: found "
                f"{options[name]}."
            )


@dataclasses.dataclass(frozen=True)
class NextWordData:
    """Data of a run that predicts words, made of a data set of text and the run's flags."""

    text: datasets.FederatedText
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        """The path of the data set's file."""
        return str(self.text.path)

    @property
    def num_clients(self) -> int:
        """The number of training clients."""
        return self.text.splits["train"].clients

    def fingerprint(self) -> str:
        """Returns the hash of the data set's file."""
        return self.text.fingerprint()

    def load(self, seed: int) -> FederatedTask:
        """Returns the task; see :class:`simulations.training.federated_task.TaskData`."""
        import tensorflow as tf

        from stackoverflow_nwp.task import ACCURACY, ClientDatasets, NextWordTask, all_sentences

        options, sizes = self.options, ("vocab_size", "sequence_length", *_OF_MODEL)
        vocabulary, length, embedding, units = integers(options, *sizes)
        shared = inputs.part(options["shared_embedding"], bool)
        task = NextWordTask(vocabulary, length, embedding, units, shared)
        contents, words = self.text.contents, self.text.vocabulary(vocabulary)
        in_round = ("sentences_per_client", "batch_size", "client_epochs")
        most, batch_size, epochs = integers(options, *in_round)
        num_heldout, num_test = integers(options, "heldout_sentences", "test_sentences")
        splits = {"train": open_client_tokens(contents, "train", words, length)}
        for split, wanted in (("heldout", num_heldout), ("test", num_test)):
            # Limit the sentences in memory: if a split has many more than needed, clients are read
            # one by one.
            at_most = min(_MOST_READ * wanted, MAX_EAGER_EXAMPLES)
            splits[split] = open_client_tokens(contents, split, words, length, at_most)
        heldout = all_sentences(splits["heldout"], num_heldout, seed, 0)
        test = all_sentences(splits["test"], num_test, seed, 1)
        counted = all_sentences(splits["train"], _COUNTED_SENTENCES, seed, 2)
        tf.keras.utils.set_random_seed(seed % 2**32)
        initial_weights = tuple(task.keras_model().get_weights())
        word, word_accuracy = task.constant_accuracy(counted, test)

        def evaluate(weights: Sequence[np.ndarray], split: str) -> Mapping[str, float]:
            values = task.evaluate(weights, heldout if split == HELDOUT else test)
            return {"loss": values["loss"], "accuracy": values[ACCURACY]}

        return FederatedTask(
            client_ids=tuple(splits["train"].client_ids),
            client_dataset=ClientDatasets(splits["train"], most, batch_size, epochs, seed),
            model_fn=task.model_fn(),
            initial_weights=initial_weights,
            evaluate=evaluate,
            accuracy=ACCURACY,
            facts={
                "most_frequent_word": words[word - 1],
                "most_frequent_word_accuracy": word_accuracy,
            },
        )


@dataclasses.dataclass(frozen=True)
class CharacterData:
    """Data of a run that predicts characters, made of Shakespeare's plays and the run's flags."""

    speeches: shakespeare.Speeches
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        """The source of the plays: the installed package, or TFF's download."""
        return self.speeches.name

    @property
    def num_clients(self) -> int:
        """The number of roles."""
        return len(self.speeches.by_split["train"])

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all speeches in the plays."""
        return self.speeches.fingerprint()

    def load(self, seed: int) -> FederatedTask:
        """Returns the task; see :class:`simulations.training.federated_task.TaskData`."""
        from stackoverflow_nwp import character_task

        return character_task.federated_task(self.speeches, self.options, seed)


def open_data(options: Mapping[str, object]) -> NextWordData | CharacterData:
    """Opens the data set of a run, making or downloading it the first time.

    Raises:
      ValueError: If there is no such data set, or it is too small for the flags.
    """
    length, cohort = integers(options, "sequence_length", "clients_per_round")
    cohort = option(options, int, "simulated_clients") or cohort
    cache = option(options, str, "cache_dir")
    if options["characters"]:
        with command_line.naming("dataset"):
            data = CharacterData(datasets.load_speeches(cache), options)
            if data.num_clients < cohort:
                raise ValueError(
                    f"{data.name} has {data.num_clients} roles, fewer than the {cohort} needed: "
                    "use fewer clients per round."
                )
        return data
    with command_line.naming("dataset"):
        text = datasets.load(inputs.part(options["dataset"], str), cache, min_train_clients=cohort)
    # Before anything is written, raise an error if the text has fewer words than --vocab_size.
    words, embedding, units = integers(options, "vocab_size", *_OF_MODEL)
    with command_line.naming("vocab_size"):
        text.vocabulary(words)
    # Also before, raise an error if the model or the sentences would not fit into memory.
    parameters = words * embedding + 4 * units * (embedding + units) + units * embedding
    inputs.check_memory(
        2 * _BYTES_PER_NUMBER * parameters,
        f"a model of at least {parameters} parameters",
        "use a smaller --embedding_size or --lstm_size",
    )
    sentences = sum(
        min(*integers(options, f"{split}_sentences"), text.splits[split].examples)
        for split in ("heldout", "test")
    )
    inputs.check_memory(
        _BYTES_PER_NUMBER * sentences * length,
        f"{sentences} sentences of {length} words each",
        "use a smaller --sequence_length, or fewer --heldout_sentences and --test_sentences",
    )
    return NextWordData(text, options)


def outcome_lines(facts: Mapping[str, object]) -> Sequence[tuple[str, str]]:
    """Returns the baseline of always predicting the most frequent word, or character."""
    unit = "character" if "most_frequent_character" in facts else "word"
    accuracy = run_command.percent(option(facts, float, f"most_frequent_{unit}_accuracy"))
    return [(f"always {facts[f'most_frequent_{unit}']!r}", str(accuracy))]


def command() -> TaskCommand:
    """Returns the definition of the run-stackoverflow command."""
    return TaskCommand(
        name="run-stackoverflow",
        description=__doc__ or "",
        define_flags=define_flags,
        defaults=defaults,
        default_texts=_default_texts(),
        check_flags=check_flags,
        open_data=open_data,
        outcome_lines=outcome_lines,
    )


def run() -> None:
    """Entry point of the console command."""
    run_command.run(command())


if __name__ == "__main__":
    run()
