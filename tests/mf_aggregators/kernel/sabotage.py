"""Which functions outside the kernel can make a stated epsilon false?

    python -m tests.mf_aggregators.kernel.sabotage --processes 2

A journey calibrates a mechanism, asks for its guarantee and its statement, and releases eight
rounds in NumPy. "loaded" saves and loads the mechanism, "extended" has three more rounds than were
planned, "adaptive" releases the clipped-count indicator beside the updates, "observed" states what
a ledger shows, "poisson" and "fixed_size" draw their clients. "tff" and "tff disk" run the graphs
of TensorFlow Federated, without its worker and its sums. Every function of ``mf_aggregators``
outside ``mf_aggregators/kernel`` that runs on it is replaced, one after another, by one that
returns the original's numbers halved, doubled, zero, NaN, or shifted (plus one; entries of arrays
moved by one place): fractions in some runs, integers in others. Numbers in tuples, mappings and
objects are altered too. Classes of the kernel are altered through their constructors alone.
``__code__`` is replaced, so that functions that other modules have imported by name are replaced as
well. Constants of modules outside the kernel are altered in the same ways, each name by itself.

Each journey ends in a refusal (an exception), a true statement or a false one. The truth is
measured from what is released, and uses nothing of the library:

- The covariance of released rows of noise is estimated over many coordinates, of all and of each
  of eight blocks. Rows are compared between two runs, so that noise that is known is found, and
  between coordinates, so that noise that is used twice is found.
- A client's update is far beyond the clip norm. Two runs of one seed differ in it alone, so that
  what it adds to each row is found, wherever it is added.
- The largest Mahalanobis distance of a client's contributions is taken over all patterns of
  participation that the *printed* schema allows, and all signs; the library's matrices make equal
  signs the worst. It is a lower bound of the truth, so that a true statement is not called false.
- The pairs of a statement are given to the kernel as claims, as its reader does with
  ``mf-report --verify``: a statement that nobody checks is as good as who wrote it.
- What a ledger shows has to be true of the rounds of its clients too. Of "adaptive", the updates
  are measured alone. Of "poisson" and "fixed_size", the rounds of one client are composed by
  dp-accounting, from the distance of each round and the printed sizes; the sampler's draws are
  counted over many seeds.
- For Gaussian noise, q = x^T S^-1 x with the estimate S of n samples in p dimensions is the true
  value times n / chi2 (n - p + 1 degrees of freedom). So the lower end of a confidence interval is
  exact, and is compared with the largest distance for which the stated (epsilon, delta) holds. A
  true statement is called false with probability at most 1e-6 a journey.
"""

import argparse
import collections
import concurrent.futures
import copy
import dataclasses
import enum
import functools
import gc
import importlib
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import pickle
import re
import signal
import sys
import tempfile
import types
import unittest.mock
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution

import mf_aggregators as mfa
from mf_aggregators.kernel.claim import check
from mf_aggregators.privacy import statement_file, statements

ROUNDS, DELTA, EPSILON = 8, 1e-5, 4.0
WAYS = (
    *("half", "double", "zero", "nan", "shifted"),
    *("half integers", "double integers", "zero integers", "shifted integers"),
)
IN_TFF = ("tff", "tff disk")
SAMPLED = ("poisson", "fixed_size")
JOURNEYS = ("banded", "blt", "loaded", "extended", "adaptive", "observed", *SAMPLED, *IN_TFF)
FALSE_ALARM = 1e-6
_COORDINATES, _FEW, _BLOCKS = 24_000, 64, 8
_LIBRARY = pathlib.Path(mfa.__file__).parent
_SECONDS, _DEPTH = 30, 4
_BLT = ("blt", "tff")
# The coordinate that a round's contribution goes to, in the middle of eight of its own.
_PLACES = [8 * j + 3 for j in range(ROUNDS)]
# The kinds of numbers that a value has, where nothing is altered.
_TOUCH = "touch"
_FACTORS = {"double": 2, "zero": 0, "nan": math.nan, _TOUCH: 1}
_CONSTRUCTORS = ("__init__", "__post_init__")
_touched: set[str] = set()
_PAIR = re.compile(r"\((\S+), (\S+)\)-DP")
_DRAWS = re.compile(
    r"(?:poisson|fixed_size) sampling of (\S+) of (\S+) clients, if nobody learns who was drawn"
)
# The clients of the journey "observed", who take turns, and the seeds whose draws are counted.
_TURNS, _SEEDS = 4, 150
# The rounds that "extended" begins with; the bands and the population of "poisson".
_BEGUN, _BANDS, _POPULATION = 5, 2, 16
# Losses are rounded down to multiples of it.
_INTERVAL = 1e-3
_STATED = re.compile(
    r"\((\S+), (\S+)\)-DP for each client over (\S+) rounds?: ([^\n]*)(?:\n[^\n]*)?"
)
_END = r"rounds? apart(?=[,.;:\n]|$)"
_SCHEMA = re.compile(
    rf"(?:at most (\S+) )?participations(?:(,) adjacent ones exactly| at least) (\S+) {_END}"
)


# ----- The journey.


@dataclasses.dataclass(frozen=True)
class Run:
    """What a journey stated and released.

    Attributes:
      printed: The guarantee in words.
      epsilon: Its epsilon.
      delta: Its delta.
      noise: (rounds, coordinates), released without contributions.
      other_noise: The first rows of another run of the mechanism.
      without: (rounds, few coordinates), released with a fixed seed and without contributions.
      with_client: The same with a contribution in each round, each to a coordinate of its own.
      more: Further pairs of epsilon and delta that are stated of the run, under its schema.
      begun: The words, epsilon and delta of the first rounds, of a run that was extended.
      ledger: The rounds of clients, of whom the statement has to be true whatever it says.
      drawn: (seeds, rounds, clients) of whom a sampler drew; None where nobody draws.
    """

    printed: str
    epsilon: float
    delta: float
    noise: np.ndarray
    other_noise: np.ndarray
    without: np.ndarray
    with_client: np.ndarray
    more: tuple[tuple[float, float], ...] = ()
    begun: tuple[str, float, float] | None = None
    ledger: tuple[tuple[int, ...], ...] = ()
    drawn: np.ndarray | None = None


def factorizations() -> dict[str, bytes]:
    """Returns the pickled matrices of the journeys."""
    banded = mfa.factorizations.banded(ROUNDS, num_bands=3)
    made = {
        **dict.fromkeys(JOURNEYS, banded),
        **dict.fromkeys(_BLT, mfa.factorizations.blt(ROUNDS, num_buffers=2)),
        "extended": mfa.factorizations.toeplitz(_BEGUN, num_bands=3),
        **dict.fromkeys(SAMPLED, mfa.factorizations.banded(ROUNDS, num_bands=_BANDS)),
    }
    return {name: pickle.dumps(each) for name, each in made.items()}


def run(name: str, factorization: Any) -> Run:
    """Runs a journey: calibrates, states and releases.

    Args:
      name: Of the journey.
      factorization: Its matrix, for 8 rounds, or for those that an extended run begins with.
    """
    participation: Any = mfa.participation.MinSeparation(*((2, 3) if name in _BLT else (3,)))
    if name in SAMPLED:
        sizes = {"num_rounds": ROUNDS, "num_bands": _BANDS, "population": _POPULATION}
        participation = mfa.participation.sampling_scheme(name, clients_per_round=2, **sizes)
    begun = mfa.calibrate(factorization, participation, epsilon=EPSILON, delta=DELTA)
    mechanism = begun
    if name == "extended":
        mechanism = begun.extended(ROUNDS, num_parameters=_COORDINATES, storage="state")
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        if name == "loaded":
            mechanism.save(folder / "mechanism")
            begun = mechanism = mfa.load(folder / "mechanism")
        subject: Any = mechanism
        if name == "observed":
            lines = [f"client {i % _TURNS},{i}" for i in range(ROUNDS)]
            (folder / "ledger.csv").write_text("\n".join(["client,round", *lines]))
            (folder / "counts.csv").write_text("1\n" * ROUNDS)
            subject = mechanism.observed(folder / "ledger.csv", round_counts=folder / "counts.csv")
    guarantee = subject.guarantee(DELTA)
    facts = statements.RunFacts(
        mechanism="8 rounds",
        population=16,
        clients_per_round=2,
        clip=1.0,
        public_data="none",
        enforcement="Timers.",
    )
    said = subject.statement(facts, DELTA).to_dict()
    stated = said["headline"]
    pairs = (
        [] if stated["epsilon"] is None else [(float(stated["epsilon"]), float(stated["delta"]))]
    )
    # Others have pairs of the plan or of first rounds as well, which are of other schemas.
    if name not in ("extended", "observed"):
        pairs += [(float(e), float(d)) for e, d in _PAIR.findall(statement_file.render(said))]
    for epsilon, delta in pairs:
        check(dataclasses.replace(guarantee.claim, epsilon=epsilon, delta=delta))
    earlier = begun.guarantee(DELTA) if name == "extended" else None
    is_adaptive = name in ("adaptive", "tff")
    clip: Any = mfa.AdaptiveClip(1.0, learning_rate=0.0) if is_adaptive else 1.0

    @functools.cache
    def factory(seed: int | None, rounds: int) -> Any:
        # The two runs of a fixed seed are of one process, and all others of several.
        del rounds
        storage = "disk" if name == "tff disk" else "state"
        options = {"clip_norm": clip, "clients_per_round": 1, "noise_storage": storage}
        return mfa.mf_dp_aggregator(mechanism, seed=seed, **options)

    def released(size: int, rounds: int, norm: float = 0.0, seed: int | None = None) -> np.ndarray:
        updates = np.zeros((rounds, size), np.float32)
        updates[range(rounds), _PLACES[:rounds]] = norm
        if name in IN_TFF:
            return _released_in_tff(factory(seed, rounds), updates)
        template = {"w": updates[0]}
        first, then = (
            mfa.Aggregator(each, clip, clients_per_round=1, seed=seed, template=template)
            for each in (begun, mechanism)
        )
        state, rows = first.initialize(), []
        for i, update in enumerate(updates):
            aggregator = first if i < begun.num_rounds else then
            state, row = aggregator.next(state, [{"w": update}])
            rows.append(np.asarray(row["w"], np.float64))
        return np.array(rows)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Run(
            str(guarantee),
            float(guarantee.epsilon),
            float(guarantee.delta),
            released(_COORDINATES, ROUNDS),
            released(_COORDINATES, 1),
            released(_FEW, ROUNDS, seed=1),
            released(_FEW, ROUNDS, norm=50.0, seed=1),
            tuple(pairs),
            None if earlier is None else (str(earlier), float(earlier.epsilon), earlier.delta),
            tuple((i, i + _TURNS) for i in range(_TURNS)) if name == "observed" else (),
            _draws(mechanism.sampling) if name in SAMPLED else None,
        )


@functools.cache
def _graphs_of_tff(factory: Any) -> tuple[Any, Callable[..., Any]]:
    """The query of a process, and the graph of its rounds, which TFF's worker runs."""
    import tensorflow as tf
    import tensorflow_federated as tff

    class Query(tff.aggregators.DifferentiallyPrivateFactory):
        def __init__(self, query: Any, sums: Any) -> None:
            raise StopIteration(query)

    with unittest.mock.patch.object(tff.aggregators, Query.__bases__[0].__name__, Query):
        try:
            factory.create(tff.TensorType(np.float32, [_COORDINATES]))
        except StopIteration as found:
            query = found.value

    @tf.function(autograph=False)
    def released(state: Any, update: Any) -> Any:
        record = query.preprocess_record(query.derive_sample_params(state), update)
        total = tf.nest.map_structure(lambda each: tf.cast(each, tf.int64), record)
        return query.get_noised_result(total, state)[:2]

    return query, released


def _released_in_tff(factory: Any, updates: np.ndarray) -> np.ndarray:
    """What the graphs of a process release, (rounds, coordinates).

    One size for all runs takes the least time: equal graphs are compared with the kernel once.
    """
    query, released = _graphs_of_tff(factory)
    state, rows = query.initial_global_state(), []
    for update in updates:
        row, state = released(state, np.pad(update, (0, _COORDINATES - len(update))))
        rows.append(np.asarray(row, np.float64)[: len(update)])
    return np.array(rows)


def _draws(scheme: Any) -> np.ndarray:
    """Whom samplers of many seeds draw, (seeds, rounds, clients)."""
    found = np.zeros((_SEEDS, ROUNDS, _POPULATION), bool)
    for seed in range(_SEEDS):
        sampler = scheme.sampler(seed)
        for i in range(ROUNDS):
            found[seed, i, np.asarray(sampler.draw(i), int)] = True
    return found


# ----- The truth.


def patterns(most: float, separation: float, is_even: bool) -> Iterator[tuple[int, ...]]:
    """Yields every set of rounds that a schema allows one client."""
    for size in range(1, ROUNDS + 1):
        for rounds in itertools.combinations(range(ROUNDS), size):
            gaps = np.diff(rounds)
            fits = gaps == separation if is_even else gaps >= separation
            if size <= most and bool(np.all(fits)):
                yield rounds


@functools.cache
def largest_distance(epsilon: float, delta: float) -> float:
    """Returns the largest d for which N(0, 1) and N(d, 1) are (epsilon, delta)-close.

    delta(d) = Phi(d / 2 - epsilon / d) - e^epsilon Phi(-d / 2 - epsilon / d) (Balle and Wang,
    2018, Thm 8).
    """
    if epsilon < 0.0 or not 0.0 <= delta <= 1.0:
        return 0.0
    if math.isinf(epsilon) or delta == 1.0:
        return math.inf

    def too_much(d: float) -> float:
        below = scipy.stats.norm.logcdf(-d / 2 - epsilon / d)
        return float(
            scipy.stats.norm.cdf(d / 2 - epsilon / d) - math.exp(min(epsilon + below, 0.0)) - delta
        )

    return float(scipy.optimize.brentq(too_much, 1e-12, 1e6, xtol=1e-12))


_Printed = tuple[float, float, bool]


def stated(found: Run) -> tuple[float, float, _Printed | tuple[float, float]]:
    """Returns the stated epsilon, delta and schema: of the words and of the number, the better.

    Of draws, the clients of a round and the population are in the place of the schema.

    Raises:
      ValueError: If the words cannot be read.
    """
    match = _STATED.fullmatch(found.printed)
    if match is None:
        raise ValueError(found.printed)
    # Printed epsilons and deltas are rounded up, to a few digits.
    epsilon, delta = float(match[1]), float(match[2])
    if sizes := _DRAWS.fullmatch(match[4]):
        printed_sizes = float(sizes[1]), float(sizes[2])
        return min(epsilon, found.epsilon), min(delta, found.delta), printed_sizes
    # Assumptions may follow.
    schema = (1.0, 1.0, False) if match[4].startswith("at most one participation") else None
    if sizes := _SCHEMA.match(match[4]):
        schema = float(sizes[1] or ROUNDS), float(sizes[3]), bool(sizes[2])
    if schema is not None:
        return min(epsilon, found.epsilon), min(delta, found.delta), schema
    raise ValueError(found.printed)


def distance(
    noise: np.ndarray,
    shifts: np.ndarray,
    allowed: Sequence[tuple[int, ...]],
    alarm: float,
) -> float:
    """Returns a lower confidence bound of the largest Mahalanobis distance.

    Args:
      noise: (rounds, coordinates).
      shifts: (rounds, rounds): what participation j moves released row i by.
      allowed: The sets of rounds that one client may take part in.
      alarm: The probability of a bound that is too large.
    """
    samples = noise.shape[1] - 1
    spread = noise.std(axis=1)
    moved = np.abs(shifts).max(axis=1)
    if np.any((spread == 0.0) & (moved > 0.0)):
        return math.inf
    kept = spread > 0.0
    if not np.any(kept):
        return 0.0
    scaled = noise[kept] / spread[kept, None]
    covariance = np.cov(scaled)
    values, vectors = np.linalg.eigh(np.atleast_2d(covariance))
    whitened = vectors.T @ (shifts[kept] / spread[kept, None])
    unknown = values > 1e-12 * values[-1]
    if np.any(np.abs(whitened[~unknown]) > 1e-9):
        return math.inf
    whitened = whitened[unknown] / np.sqrt(values[unknown, None])
    signed = [
        (rounds, (1.0, *signs))
        for rounds in allowed
        for signs in itertools.product((1.0, -1.0), repeat=len(rounds) - 1)
    ]
    combined = np.zeros((len(signed) + 1, ROUNDS))
    for index, (rounds, signs) in enumerate(signed):
        combined[index, list(rounds)] = signs
    largest = float(np.max(np.sum((combined @ whitened.T) ** 2, axis=1)))
    degrees = samples - int(unknown.sum()) + 1
    least = scipy.stats.chi2.ppf(alarm / len(combined), degrees) / samples
    return math.sqrt(largest * float(least))


def measured(found: Run, allowed: Sequence[tuple[int, ...]]) -> float:
    """Returns a lower confidence bound of the largest distance of a run, over blocks too.

    Args:
      found: The run.
      allowed: The sets of rounds that one client may take part in.

    Raises:
      ValueError: If the noise is known, used twice, or differs between two runs of one seed; the
        text says which.
    """
    noise, without, with_client = found.noise, found.without, found.with_client
    if not np.array_equal(np.isfinite(without), np.isfinite(with_client)):
        raise ValueError("NaN tells of an update")
    # A row that is NaN throughout tells nothing.
    told = np.isfinite(noise).all(axis=1) & np.isfinite(without).all(axis=1)
    difference = np.where(told[:, None], with_client - without, 0.0)
    if np.any(np.count_nonzero(difference, axis=1) > _FEW // 2):
        raise ValueError("the noise of two runs of one seed differs")
    # Numbers that are moved by one place stay among the eight coordinates of their round.
    of_rounds = difference.reshape(ROUNDS, ROUNDS, _FEW // ROUNDS)
    signs = np.where(of_rounds.sum(axis=2) < 0.0, -1.0, 1.0)
    shifts = signs * np.linalg.norm(of_rounds, axis=2)
    noise = np.where(told[:, None], noise, 0.0)
    if not np.any(noise):
        return math.inf if np.any(shifts) else 0.0
    if np.any(shifts):
        # Of one row alone, two numbers of float32 may be equal by chance.
        if told.sum() > 1 and len(np.unique(noise, axis=1).T) < noise.shape[1]:
            raise ValueError("noise is used for two coordinates")
        other = np.nan_to_num(found.other_noise)
        for row in noise:
            if row.any() and other[0].any():
                agreement = abs(np.corrcoef(row, other[0])[0, 1]) * math.sqrt(len(row))
                if agreement > 8.0:
                    raise ValueError("two runs have the same noise")
    alarm = FALSE_ALARM / (_BLOCKS + 1)
    parts = [noise, *np.split(noise, _BLOCKS, axis=1)]
    return max(distance(part, shifts, allowed, alarm) for part in parts)


def epsilons_of_draws(
    distances: Sequence[float], probability: float, deltas: Sequence[float]
) -> list[float]:
    """Returns lower bounds of the epsilons of rounds that a client joins by independent coins.

    Args:
      distances: Of each round.
      probability: That the client joins.
      deltas: The deltas.
    """
    if not 0.0 < probability <= 1.0:
        return [0.0] * len(deltas)
    if math.inf in distances:
        return [math.inf] * len(deltas)
    losses = [
        privacy_loss_distribution.from_gaussian_mechanism(
            1.0 / each,
            pessimistic_estimate=False,
            value_discretization_interval=_INTERVAL,
            use_connect_dots=False,
            sampling_prob=probability,
        )
        for each in distances
        if each > 0.0
    ]
    if not losses:
        return [0.0] * len(deltas)
    composed = functools.reduce(lambda one, other: one.compose(other), losses)
    return [float(composed.get_epsilon_for_delta(delta)) for delta in deltas]


def draws_differ(drawn: np.ndarray, probability: float) -> bool:
    """Whether draws show a larger probability than this, or rounds that depend on one another.

    Args:
      drawn: (seeds, rounds, clients).
      probability: That a client of a group is drawn; groups take turns.
    """
    # (seeds, clients, rounds of a group) by group.
    groups = [np.moveaxis(drawn[:, group::_BANDS], 1, 2) for group in range(_BANDS)]
    if np.any(sum(each.any(axis=2).astype(int) for each in groups) > 1):
        return True
    in_rounds = np.concatenate(groups, axis=1)
    in_both = in_rounds[:, :, ::2] & in_rounds[:, :, 1::2]
    return any(
        scipy.stats.binom.sf(int(each.sum()) - 1, each.size // _BANDS, min(p, 1.0)) < FALSE_ALARM
        for each, p in ((in_rounds, probability), (in_both, probability**2))
    )


def _first_rounds(found: Run) -> Run:
    """A run that was not extended, as one that released nothing later."""
    values: dict[str, Any] = {
        name: np.concatenate([rows[:_BEGUN], np.zeros_like(rows[_BEGUN:])])
        for name in ("noise", "without", "with_client")
        for rows in [getattr(found, name)]
    }
    values |= zip(("printed", "epsilon", "delta"), found.begun or (), strict=True)
    return dataclasses.replace(found, **values)


def verdict(found: Run) -> tuple[str, str]:
    """Returns "true" or "FALSE", and the reason."""
    try:
        epsilon, delta, schema = stated(found)
        pairs = [(epsilon, delta), *found.more]
        if any(math.isnan(each) for each in (found.epsilon, *itertools.chain(*pairs))):
            return "FALSE", "NaN is stated"
        if len(schema) == 2:
            return _verdict_of_draws(found, pairs, *schema)
        least = measured(found, [*patterns(*schema), *found.ledger])
        if found.begun is not None:
            first = _first_rounds(found)
            *pair, schema = stated(first)
            if measured(first, [*patterns(*schema)]) > largest_distance(*pair):
                return "FALSE", f"of the first rounds, {found.begun} is stated"
    except ValueError as error:
        return "FALSE", str(error)
    allowed, epsilon, delta = min((largest_distance(*pair), *pair) for pair in pairs)
    return (
        "FALSE" if least > allowed else "true",
        f"({epsilon:.4g}, {delta:.1e}) allows a distance of {allowed:.3g}, at least {least:.3g}",
    )


def _verdict_of_draws(
    found: Run, pairs: Sequence[tuple[float, float]], batch: float, population: float
) -> tuple[str, str]:
    assert found.drawn is not None
    probability = batch * _BANDS / population
    if draws_differ(found.drawn, probability):
        return "FALSE", "clients are drawn more often than is printed, or not independently"
    distances = [measured(found, [(i,)]) for i in range(ROUNDS)]
    of_groups = [distances[group::_BANDS] for group in range(_BANDS)]
    # The smallest of each delta.
    by_delta = {delta: epsilon for epsilon, delta in sorted(pairs, reverse=True)}
    found_epsilons = epsilons_of_draws(
        max(of_groups, key=lambda each: sum(d * d for d in each)), probability, [*by_delta]
    )
    reasons = [
        (least > epsilon, f"({epsilon:.4g}, {delta:.1e}), at least {least:.4g}")
        for (delta, epsilon), least in zip(by_delta.items(), found_epsilons, strict=True)
    ]
    is_false, reason = max(reasons)
    return "FALSE" if is_false else "true", reason


# ----- Sabotage.


def _number(value: Any, way: str) -> Any:
    """A number or an array with its entries altered; those that ``way`` is not about stay."""
    operation, _, kind = way.partition(" ")
    is_whole = isinstance(value, int) or np.asarray(value).dtype.kind in "iu"
    _touched.add("integers" if is_whole else "")
    if is_whole != (kind == "integers"):
        return value
    with np.errstate(all="ignore"):
        if operation == "half":
            return value // 2 if is_whole else value / 2
        if operation in _FACTORS:
            return value * _FACTORS[operation]
        if isinstance(value, np.ndarray) and value.size > 1:
            return np.roll(value, 1)
        return value + 1


def _tensor(value: Any, way: str) -> Any:
    """A tensor of a graph, or of none, with its entries altered."""
    import tensorflow as tf

    operation, _, kind = way.partition(" ")
    is_whole = not value.dtype.is_floating
    if value.dtype not in (tf.bool, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint32):
        return value
    _touched.add("integers" if is_whole else "")
    if is_whole != (kind == "integers") or operation == _TOUCH:
        return value
    wide = tf.cast(value, tf.int64 if is_whole else tf.float64)
    flat = tf.reshape(wide, [-1])
    changed = {
        "half": lambda: wide // 2 if is_whole else wide / 2.0,
        "double": lambda: wide * 2,
        "zero": lambda: tf.zeros_like(wide),
        "nan": lambda: wide * math.nan,
        "shifted": lambda: (
            tf.reshape(tf.roll(flat, 1, 0), tf.shape(wide)) if wide.shape.rank else wide + 1
        ),
    }[operation]()
    changed = 1 - wide if value.dtype == tf.bool and operation == "shifted" else changed
    return tf.ensure_shape(tf.cast(changed, value.dtype), value.shape)


def altered(value: Any, way: str, depth: int = 0) -> Any:
    """Returns a value with its numbers altered in one of ``WAYS``."""
    if value is None or isinstance(value, str | bytes | enum.Enum | type) or depth > _DEPTH:
        return value
    if isinstance(value, bool | np.bool_):
        _touched.add("integers")
        turned = {"zero integers": False, "shifted integers": not value}
        return type(value)(turned.get(way, value))
    if isinstance(value, np.generic):
        changed = _number(value, way) if value.dtype.kind in "iuf" else value
        return np.asarray(changed, value.dtype)[()]
    if type(value) in (int, float):
        return _number(value, way)
    if type(value) is np.ndarray:
        if value.dtype.kind not in "iuf":
            return value
        changed = np.array(_number(value, way), value.dtype)
        changed.flags.writeable = value.flags.writeable
        return changed
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(value, tensorflow.Tensor):
        return _tensor(value, way)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(altered(each, way, depth + 1) for each in value)
    if type(value) in (tuple, list):
        return type(value)(altered(each, way, depth + 1) for each in value)
    if type(value) is dict:
        return {key: altered(each, way, depth + 1) for key, each in value.items()}
    return _altered_object(value, way, depth)


def _altered_object(value: Any, way: str, depth: int) -> Any:
    module = type(value).__module__
    if not module.startswith("mf_aggregators"):
        return value
    if dataclasses.is_dataclass(value):
        fields = {
            each.name: altered(getattr(value, each.name), way, depth + 1)
            for each in dataclasses.fields(value)
            if hasattr(value, each.name)
        }
        if module.startswith("mf_aggregators.kernel"):
            try:
                kept = {e.name: fields[e.name] for e in dataclasses.fields(value) if e.init}
                return dataclasses.replace(value, **kept)
            except Exception:
                return value
        try:
            other = copy.copy(value)
        except Exception:
            return value
        for name, each in fields.items():
            object.__setattr__(other, name, each)
        return other
    if module.startswith("mf_aggregators.kernel") or not hasattr(value, "__dict__"):
        return value
    try:
        other = object.__new__(type(value))
    except TypeError:
        return value
    other.__dict__.update(altered(dict(value.__dict__), way, depth + 1))
    return other


def _spoil(instance: Any, way: str) -> None:
    """Alters the attributes that a constructor has set."""
    for name, value in list(getattr(instance, "__dict__", {}).items()):
        object.__setattr__(instance, name, altered(value, way, 1))


def _altered_items(generator: Iterator[Any], way: str) -> Iterator[Any]:
    try:
        value = next(generator)
        while True:
            try:
                sent = yield altered(value, way)
            except GeneratorExit:
                generator.close()  # type: ignore[attr-defined]
                raise
            except BaseException as error:
                value = generator.throw(error)  # type: ignore[attr-defined]
            else:
                value = generator.send(sent)  # type: ignore[attr-defined]
    except StopIteration as end:
        return altered(end.value, way)


def replace(functions: Iterable[Any], way: str) -> None:
    """Replaces the code of functions by one that alters what they return. For good."""
    for function in functions:
        original = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        original.__kwdefaults__ = function.__kwdefaults__
        is_constructor = function.__name__ in _CONSTRUCTORS

        def sabotaged(
            *args: Any,
            _original: Callable[..., Any] = original,
            _is_constructor: bool = is_constructor,
            **options: Any,
        ) -> Any:
            value = _original(*args, **options)
            if _is_constructor:
                _spoil(args[0], way)
                return value
            if isinstance(value, types.GeneratorType):
                return _altered_items(value, way)
            return altered(value, way)

        registry = sys.__dict__.setdefault("_sabotaged", {})
        registry[id(function)] = sabotaged
        source = (
            "def caller(*args, **options):\n"
            "    import sys\n"
            f"    return sys._sabotaged[{id(function)}](*args, **options)\n"
        )
        namespace: dict[str, Any] = {}
        exec(source, namespace)
        code = namespace["caller"].__code__
        function.__code__ = code.replace(co_freevars=function.__code__.co_freevars)


# ----- Functions of the library.

Key = tuple[str, int, str]


def _key(code: types.CodeType) -> Key | None:
    """The file below the library, the line and the name of a function outside the kernel."""
    file = code.co_filename
    if not file.startswith(f"{_LIBRARY}/") or code.co_name.startswith("<"):
        return None
    relative = file.removeprefix(f"{_LIBRARY}/")
    return None if relative.startswith("kernel/") else (relative, code.co_firstlineno, code.co_name)


def functions_by_key() -> dict[Key, list[types.FunctionType]]:
    """Returns all function objects of the library outside the kernel."""
    found: dict[Key, list[types.FunctionType]] = collections.defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and (key := _key(each.__code__)):
            found[key].append(each)
    return found


def constants_by_key() -> dict[Key, dict[str, Any]]:
    """Returns the names in capitals of modules outside the kernel, with their namespaces."""
    return {
        (file.removeprefix(f"{_LIBRARY}/"), 0, name): vars(module)
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None) or "").startswith(f"{_LIBRARY}/")
        and not file.startswith(f"{_LIBRARY}/kernel/")
        for name in vars(module)
        if name.isupper()
    }


def _kinds(value: Any) -> set[str]:
    """The kinds of numbers in a value."""
    _touched.clear()
    altered(value, _TOUCH)
    return set(_touched)


def _reached(name: str, factorization: bytes) -> list[tuple[Key, list[str]]]:
    found: dict[Key, set[str]] = collections.defaultdict(set)
    is_looking = False

    def profile(frame: types.FrameType, event: str, returned: object) -> None:
        nonlocal is_looking
        if is_looking or event not in ("call", "return") or not (key := _key(frame.f_code)):
            return
        found[key]
        if event == "return":
            is_looking = True
            if key[2] in _CONSTRUCTORS:
                # The first local is the object.
                returned = dict(getattr(next(iter(frame.f_locals.values())), "__dict__", {}))
            found[key] |= _kinds(returned)
            is_looking = False

    matrix = pickle.loads(factorization)
    sys.setprofile(profile)
    try:
        run(name, matrix)
    finally:
        sys.setprofile(None)
    files = {file for file, *_ in found}
    for key, namespace in constants_by_key().items():
        if key[0] in files:
            found[key] = _kinds(namespace[key[2]])
    return sorted((key, sorted(kinds)) for key, kinds in found.items())


def in_child(function: Callable[[], Any], seconds: int = _SECONDS) -> Any:
    """Returns the JSON-able result of a function that runs in a forked process.

    Raises:
      TimeoutError: If it takes longer, or the process dies.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        # Processor time, so that a busy machine ends no case.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(40 * seconds)
        with os.fdopen(writing, "w") as pipe:
            for each in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), each)
            try:
                json.dump(function(), pipe)
                pipe.flush()
            finally:
                os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise TimeoutError
    return json.loads(text)


def reached(name: str, factorization: bytes) -> dict[Key, list[str]]:
    """Returns the functions outside the kernel that run on a journey, and their modules' constants.

    Each has the kinds of its numbers: "integers", and "" for fractions. Constants have line 0.
    """
    found = in_child(lambda: _reached(name, factorization), 120)
    return {tuple(key): kinds for key, kinds in found}


def sabotage(name: str, factorization: bytes, replaced: Callable[[], object]) -> tuple[str, str]:
    """Returns how a journey ends after something is replaced: the verdict and its reason."""

    def journey() -> tuple[str, str]:
        matrix = pickle.loads(factorization)
        if name in IN_TFF:
            # Optimising a graph would take longer than its eight rounds.
            options = importlib.import_module("tensorflow").config.optimizer
            options.set_experimental_options({"disable_meta_optimizer": True})
        try:
            replaced()
            found = run(name, matrix)
        except Exception as error:
            return "refusal", f"{type(error).__name__}: {error}"[:200]
        return verdict(found)

    try:
        kind, reason = in_child(journey)
    except TimeoutError:
        return "refusal", f"no end within {_SECONDS} s"
    return kind, reason


def warm(matrices: dict[str, bytes]) -> None:
    """Fills the kernel's caches, and empties all others.

    Nothing runs in TensorFlow: a process that is forked from its threads would wait for good.
    """
    if matrices.keys() & {*IN_TFF}:
        importlib.import_module("mf_aggregators.tff.aggregator")
    for name, matrix in matrices.items():
        if name not in IN_TFF:
            run(name, pickle.loads(matrix))
    for each in gc.get_objects():
        if isinstance(each, functools._lru_cache_wrapper):
            module = getattr(each, "__module__", None) or ""
            if module.startswith("mf_aggregators") and ".kernel" not in module:
                each.cache_clear()


@dataclasses.dataclass(frozen=True)
class Case:
    """One function or constant, replaced in one way on one journey."""

    journey: str
    key: Key
    way: str


def cases(journeys: Sequence[str], matrices: dict[str, bytes], ways: Sequence[str]) -> list[Case]:
    """Returns all cases of journeys in which numbers are altered."""
    with _pool(1, journeys, matrices) as pool:
        found = pool.map(reached, journeys, [matrices[each] for each in journeys])
    return [
        Case(journey, key, way)
        for journey, kinds_by_key in zip(journeys, found, strict=True)
        for key, kinds in kinds_by_key.items()
        for way in ways
        if way.partition(" ")[2] in kinds
    ]


_STATE: dict[str, Any] = {}


def _prepare(matrices: dict[str, bytes]) -> None:
    warm(matrices)
    _STATE.update(matrices=matrices, functions=functions_by_key(), constants=constants_by_key())


def _judge(case: Case) -> tuple[Case, str, str]:
    functions, namespace = (_STATE[name].get(case.key) for name in ("functions", "constants"))
    if not functions and namespace is None:
        return case, "nested", "made when another function runs, which is replaced"

    def replaced() -> None:
        if functions:
            replace(functions, case.way)
        else:
            name = case.key[2]
            namespace[name] = altered(namespace[name], case.way)

    return case, *sabotage(case.journey, _STATE["matrices"][case.journey], replaced)


def _pool(
    processes: int, journeys: Iterable[str], matrices: dict[str, bytes]
) -> concurrent.futures.Executor:
    # A process that was forked from one with threads may wait for a lock for good.
    context = multiprocessing.get_context("spawn")
    needed = {each: matrices[each] for each in journeys}
    return concurrent.futures.ProcessPoolExecutor(processes, context, _prepare, (needed,))


def judged(
    found: Sequence[Case], matrices: dict[str, bytes], processes: int
) -> Generator[tuple[Case, str, str], None, None]:
    """Yields each case with its verdict ("refusal", "true" or "FALSE") and the reason.

    A function that another one makes when it runs is "nested": the other one is replaced. To stop,
    close the generator.
    """
    pool = _pool(processes, [each.journey for each in found], matrices)
    try:
        yield from pool.map(_judge, found, chunksize=4)
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> None:
    """Prints what makes a statement false, and how many cases end in which way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--journeys", nargs="+", default=JOURNEYS, choices=JOURNEYS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--modules", nargs="+", default=[""], help="beginnings of files' names")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    matrices = factorizations()
    found = [
        each
        for each in cases(options.journeys, matrices, options.ways)
        if each.key[0].startswith(tuple(options.modules))
    ]
    totals: collections.Counter[str] = collections.Counter()
    for case, kind, reason in judged(found, matrices, options.processes):
        totals[kind] += 1
        if kind == "FALSE":
            print(f"{case}: {reason}", flush=True)
    print(*(f"{kind}: {number}" for kind, number in sorted(totals.items())), sep=", ")


if __name__ == "__main__":
    main()
