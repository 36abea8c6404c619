r"""Compares server optimizers and ways to clip with momentum SGD, under correlated noise.

  python benchmarks/server_optimizers.py --output=docstrings.jsonl
  python benchmarks/server_optimizers.py --dataset=shakespeare --clients_per_round=50 \
    --output=plays.jsonl

Federated averaging of the quick start's model in JAX, cut so that a run takes seconds: few clients
stand for a cohort, whose noise their mean has, and sentences and vocabulary are shorter. Each
method has the same trials on a seed of its own, and the best of them, by accuracy on held-out
clients, trains with further seeds, which all methods share: data, cohorts, first model and noise.
The table has test accuracies with 95 % intervals of Student's t, and those of paired differences
from the first method. Trials that are in --output are not run again.

Noise is drawn in floating point by a generator that is no secret: these runs protect nobody.
"""

import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from absl import flags

import mf_aggregators as mfa
from mf_aggregators import inputs
from mf_aggregators.commands import command_line
from simulations.runs.run_plan import Schedule
from stackoverflow_nwp import datasets, token_arrays

_EMBEDDING, _UNITS, _WORDS, _LENGTH, _BATCH = 16, 32, 1000, 12, 16
# the tokens for padding, unknown words, the beginning and the end of a sentence
_VOCABULARY = _WORDS + 4
_SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding": (_VOCABULARY, _EMBEDDING),
    "lstm_input": (_EMBEDDING, 4 * _UNITS),
    "lstm_recurrent": (_UNITS, 4 * _UNITS),
    "lstm_bias": (4 * _UNITS,),
    "dense": (_UNITS, _EMBEDDING),
    "dense_bias": (_EMBEDDING,),
    "logits": (_EMBEDDING, _VOCABULARY),
    "logits_bias": (_VOCABULARY,),
}
_SIZES = [math.prod(shape) for shape in _SHAPES.values()]
_PARAMETERS = sum(_SIZES)
# The clip norm and the clients' learning rate, which are those of the quick start.
_CLIP, _CLIENT_RATE = 1.2, 2.0
# The weight of second moments, in the joint vector of an update and its squares that is clipped.
_SECOND_MOMENT_WEIGHT = 16.0
_TUNING_SEED = 1000
# Learning rates to try, each as the server's learning rate over 1 - momentum.
_RATES = (2.5, 5.0, 10.0)

_SUBTRACTED = "Adam less noise"
_RELEASED = "released second moments"
_SCALED = "scale then privatize"

# For each method, the hyperparameter that is tuned in addition to the learning rate, and its
# values. For adaptive optimizers it is the epsilon (or floor) of the denominator, in units of the
# noise.
METHODS: Mapping[str, tuple[str, tuple[float, float]]] = {
    "momentum SGD": ("momentum", (0.9, 0.8)),
    "Adam": ("epsilon", (1.0, 0.1)),
    "Adagrad": ("epsilon", (1.0, 0.1)),
    "Yogi": ("epsilon", (1.0, 0.1)),
    _SUBTRACTED: ("epsilon", (0.3, 0.1)),
    _RELEASED: ("epsilon", (0.3, 0.1)),
    _SCALED: ("epsilon", (1.0, 0.3)),
    "per-layer clipping": ("share", (0.0, 0.5)),
    "normalized updates": ("offset", (0.01, 0.3)),
}


def joint_clip_factor(update: jax.Array, weight: float) -> jax.Array:
    """Returns the largest f <= 1 with |f u|^2 + weight |(f u)^2|^2 <= 1, squares by entry.

    With it, the joint vector (f u, sqrt(weight) (f u)^2) has an L2 norm of at most 1 whatever u
    is, so that both moments are one release of sensitivity 1. Clipping u alone to norm 1 would
    leave the joint vector with a norm of up to sqrt(1 + weight), for a u of one entry: second
    moments (arXiv 2502.06597) are free of charge between neighbours that replace a client, where
    opposite updates have the same squares, and not where a client is left out.

    Args:
      update: (d,) u.
      weight: At least 0.
    """
    second, fourth = jnp.sum(update**2), weight * jnp.sum(update**4)
    # The positive root f^2 of fourth f^4 + second f^2 = 1, in the form without cancellation.
    square = 2.0 / (second + jnp.sqrt(second**2 + 4.0 * fourth))
    return jnp.sqrt(jnp.minimum(1.0, square))


def _tensors(vector: jax.Array) -> dict[str, jax.Array]:
    parts = jnp.split(vector, np.cumsum(_SIZES)[:-1])
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(_SHAPES.items(), parts, strict=True)
    }


def _initial_weights(seed: int) -> np.ndarray:
    """Draws initial weights as Keras does: uniform embeddings, Glorot's matrices, forget bias 1."""
    generator = np.random.default_rng(seed)
    tensors = []
    for name, shape in _SHAPES.items():
        bound = 0.05 if name == "embedding" else math.sqrt(6.0 / sum(shape))
        tensor = generator.uniform(-bound, bound, shape) if len(shape) == 2 else np.zeros(shape)
        if name == "lstm_recurrent":
            tensor = np.linalg.qr(generator.normal(size=shape[::-1]))[0].T
        elif name == "lstm_bias":
            tensor[_UNITS : 2 * _UNITS] = 1.0
        tensors.append(tensor.ravel())
    return np.concatenate(tensors).astype(np.float32)


def _logits(vector: jax.Array, sentences: jax.Array) -> jax.Array:
    model = _tensors(vector)
    inputs = sentences[:, :-1]
    gates = model["embedding"][inputs] @ model["lstm_input"] + model["lstm_bias"]

    def step(
        state: tuple[jax.Array, jax.Array], gate_inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, cell = state
        i, f, g, o = jnp.split(gate_inputs + hidden @ model["lstm_recurrent"], 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((len(inputs), _UNITS))
    _, hidden = jax.lax.scan(step, (zeros, zeros), jnp.swapaxes(gates, 0, 1), unroll=4)
    dense = jnp.swapaxes(hidden, 0, 1) @ model["dense"] + model["dense_bias"]
    return dense @ model["logits"] + model["logits_bias"]


def _loss(vector: jax.Array, sentences: jax.Array) -> jax.Array:
    targets = sentences[:, 1:]
    logits = _logits(vector, sentences)
    losses = (
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    )
    return jnp.sum(losses * (targets > 0)) / jnp.maximum(jnp.sum(targets > 0), 1)


def _client_update(vector: jax.Array, sentences: jax.Array) -> jax.Array:
    def step(current: jax.Array, batch: jax.Array) -> tuple[jax.Array, None]:
        return current - _CLIENT_RATE * jax.grad(_loss)(current, batch), None

    trained, _ = jax.lax.scan(step, vector, sentences.reshape(-1, _BATCH, _LENGTH + 1))
    return trained - vector


@jax.jit
def _accuracy(vector: jax.Array, sentences: jax.Array) -> jax.Array:
    """Returns the share of known words that are predicted, without ends of sentences."""
    targets = sentences[:, 1:]
    words = (targets >= 1) & (targets <= _WORDS)
    hits = jnp.argmax(_logits(vector, sentences), -1) == targets
    return jnp.sum(hits & words) / jnp.sum(words)


def _clipped(method: str, update: jax.Array, other: float) -> jax.Array:
    """Returns a client's update clipped by a method, in clip norms: its L2 norm is at most 1."""
    update = update / _CLIP
    if method == _RELEASED:
        return update * joint_clip_factor(update, _SECOND_MOMENT_WEIGHT)
    if method == "normalized updates":
        return update / (jnp.linalg.norm(update) + other)
    if method == "per-layer clipping":
        # The layers' squared clip norms have the sum 1, and are equal or proportional to powers of
        # layers' sizes.
        squares = jnp.asarray(_SIZES, jnp.float32) ** other
        squares /= jnp.sum(squares)
        layers = list(_tensors(update).values())
        return jnp.concatenate(
            [
                jnp.ravel(layer) / jnp.maximum(1.0, jnp.linalg.norm(layer) / jnp.sqrt(square))
                for layer, square in zip(layers, squares, strict=True)
            ]
        )
    return update / jnp.maximum(1.0, jnp.linalg.norm(update))


@functools.partial(jax.jit, static_argnames=("method",))
def train(
    method: str,
    start: jax.Array,
    rounds: Mapping[str, jax.Array],
    unit: float,
    rate: float,
    other: float,
) -> jax.Array:
    """Trains a model in one run and returns the model.

    Args:
      method: One of ``METHODS``.
      start: (d,) first model.
      rounds: What is read round by round: (n, clients, sentences, length + 1) ``sentences``,
        (n, d) ``noise`` of the mean and ``second_noise``, at clip norm 1, the (n,) ``stddev`` of
        its entries, the (n,) ``schedule`` and the (n,) ``number`` of the round.
      unit: The root mean square of the standard deviations.
      rate: The learning rate of the server over 1 - momentum. Adaptive optimizers are
        momentum SGD of this rate for entries whose second moments are noise alone.
      other: The other hyperparameter.
    """
    noise = unit * _CLIP
    momentum = other if method == "momentum SGD" else 0.9
    epsilon = other * noise

    def one_round(
        state: tuple[jax.Array, jax.Array, jax.Array], given: Mapping[str, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        model, first, second = state
        scale = jnp.ones_like(model)
        if method == _SCALED:
            scale = jnp.sqrt(second) + epsilon
            scale /= jnp.sqrt(jnp.mean(scale**2))

        def of_client(sentences: jax.Array) -> tuple[jax.Array, jax.Array]:
            update = _client_update(model, sentences.astype(jnp.int32))
            clipped = _clipped(method, update / scale, other)
            return clipped, clipped**2

        means, squares = (
            jnp.mean(each, axis=0) for each in jax.lax.map(of_client, given["sentences"])
        )
        mean = scale * _CLIP * (means + given["noise"])
        number, moment = given["number"], mean**2
        denominator, usual = jnp.ones_like(model), 1.0
        if method == "Adagrad":
            second = second + moment
            denominator = jnp.sqrt(second) + epsilon
            usual = noise * math.sqrt(len(rounds["number"]) / 2) + epsilon
        elif method == "Yogi":
            second = second - 0.01 * jnp.sign(second - moment) * moment
            denominator, usual = jnp.sqrt(second) + epsilon, noise + epsilon
        elif method == _RELEASED:
            moment = squares + given["second_noise"] / math.sqrt(_SECOND_MOMENT_WEIGHT)
            second = second + _CLIP**2 * moment
            denominator = jnp.sqrt(jnp.maximum(second / (number + 1.0), epsilon**2))
            usual = epsilon
        elif method == _SUBTRACTED:
            second = 0.99 * second + 0.01 * (moment - (_CLIP * given["stddev"]) ** 2)
            unbiased = second / (1.0 - 0.99 ** (number + 1.0))
            denominator, usual = jnp.sqrt(jnp.maximum(unbiased, epsilon**2)), epsilon
        elif method in ("Adam", _SCALED):
            second = 0.99 * second + 0.01 * moment
            denominator = jnp.sqrt(second / (1.0 - 0.99 ** (number + 1.0))) + epsilon
            usual = noise + epsilon
        if method == _RELEASED:
            # Scale the mean before momentum, as an aggregator can do it.
            mean = mean * usual / denominator
            denominator, usual = jnp.ones_like(model), 1.0
        first = momentum * first + (1.0 - momentum) * mean
        step = first * usual / denominator
        return (model + rate * given["schedule"] * step, first, second), None

    zeros = jnp.zeros_like(start)
    # Yogi starts with the noise's variance as second moment: its first steps would divide by zero
    # otherwise.
    second = jnp.full_like(start, noise**2 if method == "Yogi" else 0.0)
    return jax.lax.scan(one_round, (start, zeros, second), rounds)[0][0]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting that all runs on one text share, with data, cohort size, matrix and noise.

    Attributes:
      tokens: By split, the sentences of each client.
      clients: How many clients are trained in a round.
      sentences: The most sentences of a client in a round.
      factorization: The mechanism's factorization, which has the rounds and the separation.
      unit: Standard deviation of the noise of a mean for a row of C^-1 of norm 1, at clip norm 1.
    """

    tokens: Mapping[str, list[np.ndarray]]
    clients: int
    sentences: int
    factorization: mfa.factorizations.Factorization
    separation: int
    unit: float

    def rounds(self, seed: int) -> dict[str, np.ndarray]:
        """Returns the inputs of :func:`train` for a run with this seed."""
        generator = np.random.default_rng(seed)
        clients, num_rounds = self.tokens["train"], self.factorization.num_rounds
        groups = np.array_split(generator.permutation(len(clients)), self.separation)
        shape = (num_rounds, self.clients, self.sentences, _LENGTH + 1)
        sentences = np.zeros(shape, np.int16)
        for number in range(num_rounds):
            cohort = generator.choice(groups[number % self.separation], self.clients, False)
            for place, client in enumerate(cohort):
                chosen = generator.permutation(clients[client])[: self.sentences]
                sentences[number, place, : len(chosen)] = chosen
        noise = self.unit * self.factorization.noise_rows(
            generator.standard_normal((num_rounds, 2 * _PARAMETERS))
        ).astype(np.float32)
        rates = Schedule(cooldown_share=0.4).rates(num_rounds, 1.0)
        return {
            "sentences": sentences,
            "noise": noise[:, :_PARAMETERS],
            "second_noise": noise[:, _PARAMETERS:],
            "stddev": (self.unit * self.row_norms()).astype(np.float32),
            "schedule": np.asarray(rates, np.float32),
            "number": np.arange(num_rounds, dtype=np.float32),
        }

    def row_norms(self) -> np.ndarray:
        """Returns the (n,) L2 norms of the rows of C^-1."""
        rows = self.factorization.noise_recursion()
        return np.abs(rows.diagonal) * rows.normalised.row_norms()[0]


def setting(values: flags.FlagValues) -> Setting:
    """Returns the setting that the flags describe: its text, and noise of their epsilon."""
    text = datasets.load(values.dataset, min_train_clients=values.clients_per_round)
    words = text.vocabulary(_WORDS)
    tokens = {}
    for split in ("train", "heldout", "test"):
        clients = token_arrays.open_client_tokens(text.contents, split, words, _LENGTH)
        tokens[split] = [np.asarray(clients.tokens_of(name)) for name in clients.client_ids]
    separation = len(tokens["train"]) // values.clients_per_round
    factorization = mfa.factorizations.banded(
        values.num_rounds, num_bands=min(separation, values.num_rounds)
    )
    mechanism = mfa.calibrate(
        factorization,
        mfa.participation.MinSeparation(
            separation=separation, max_participations=math.ceil(values.num_rounds / separation)
        ),
        epsilon=values.target_epsilon,
        delta=1e-4,
    )
    sensitivity = factorization.sensitivity(mechanism.participation).value
    unit = mechanism.noise_multiplier * sensitivity / values.clients_per_round
    return Setting(tokens, values.simulated_clients, 32, factorization, separation, unit)


class Trials:
    """Trains and evaluates runs; each run is made once and its result kept in a JSON-lines file."""

    def __init__(self, path: pathlib.Path, setting_of_runs: Setting) -> None:
        self._path, self._setting = path, setting_of_runs
        self._found: dict[tuple[object, ...], float] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    trial = inputs.part(inputs.parsed_json(line), dict)
                    self._found[tuple(trial["key"])] = float(trial["accuracy"])
                except (KeyError, TypeError, ValueError):
                    raise ValueError(
                        f"{path} has lines that are no trials: name another file."
                    ) from None
        self._seed: int | None = None
        self._rounds: dict[str, np.ndarray] = {}
        generator = np.random.default_rng(0)
        self._evaluation = {
            split: generator.permutation(np.concatenate(setting_of_runs.tokens[split]))[:4000]
            for split in ("heldout", "test")
        }

    def accuracy(self, split: str, method: str, seed: int, rate: float, other: float) -> float:
        """Returns the accuracy of a run's last model on a split, in percent."""
        key = (split, method, seed, rate, other)
        if key not in self._found:
            if self._seed != seed:
                self._seed, self._rounds = seed, self._setting.rounds(seed)
            norms = self._setting.row_norms()
            unit = self._setting.unit * math.sqrt(float(np.mean(norms**2)))
            model = train(method, _initial_weights(seed), self._rounds, unit, rate, other)
            self._found[key] = 100.0 * float(_accuracy(model, self._evaluation[split]))
            line = json.dumps({"key": key, "accuracy": self._found[key]})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
            print(line, file=sys.stderr, flush=True)
        return self._found[key]

    def best(self, method: str) -> tuple[float, float]:
        """Returns the best learning rate and other hyperparameter on held-out clients."""
        others = METHODS[method][1]

        def heldout(pair: tuple[float, float]) -> float:
            return self.accuracy("heldout", method, _TUNING_SEED, *pair)

        best = max(_RATES, key=lambda rate: heldout((rate, others[0])))
        # If the best rate is the smallest or the largest, try one more beyond it.
        beyond = {_RATES[0]: _RATES[0] / 2.0, _RATES[-1]: _RATES[-1] * 2.0}
        if best in beyond:
            best = max(best, beyond[best], key=lambda rate: heldout((rate, others[0])))
        return max(((best, other) for other in others), key=heldout)


def _interval(values: np.ndarray) -> tuple[float, float]:
    quantile = float(scipy.stats.t.ppf(0.975, len(values) - 1))
    return float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    text = "docstrings, shakespeare, or a file of make-text-dataset."
    flags.DEFINE_string("dataset", datasets.DOCSTRINGS, text, flag_values=values)
    flags.DEFINE_string("output", None, "JSON lines of all runs.", flag_values=values)
    flags.mark_flag_as_required("output", flag_values=values)
    for name, default, smallest, about in (
        ("num_rounds", 200, 1, "Rounds of a run."),
        ("clients_per_round", 100, 1, "Clients of a cohort."),
        ("simulated_clients", 4, 1, "Clients of a cohort that are trained."),
        ("seeds", 5, 2, "Runs of the best of each method."),
    ):
        flags.DEFINE_integer(name, default, about, lower_bound=smallest, flag_values=values)
    flags.DEFINE_float("target_epsilon", 8.0, "Epsilon, at delta 1e-4.", flag_values=values)
    methods = list(METHODS)
    flags.DEFINE_multi_enum("only", methods, methods, "Which methods.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Tunes each method, trains its best with every seed, and prints the table."""
    trials = Trials(pathlib.Path(values.output), setting(values))
    best = {method: trials.best(method) for method in values.only}
    found = {method: np.zeros(values.seeds) for method in best}
    for seed in range(values.seeds):
        for method, pair in best.items():
            found[method][seed] = trials.accuracy("test", method, seed, *pair)
    rows = []
    baseline = found[next(iter(best))]
    for method, (rate, other) in best.items():
        mean, half_width = _interval(found[method])
        difference, of_difference = _interval(found[method] - baseline)
        rows.append(
            {
                "method": method,
                "learning_rate": rate,
                METHODS[method][0]: other,
                "accuracy": (mean, half_width),
                "difference": (difference, of_difference),
            }
        )
    lines = [
        (
            row["method"],
            "rate {:g}; {:.2f} ± {:.2f} %; {:+.2f} ± {:.2f}".format(
                row["learning_rate"], *row["accuracy"], *row["difference"]
            ),
        )
        for row in rows
    ]
    command_line.print_result(values, {"rows": rows}, command_line.table(lines))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
