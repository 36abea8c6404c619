"""Tries searches for clip norm, server rate and matrix on three data sets with small linear models.

Prints what a private search for the clip norm finds on three data sets, from starts that are ten
times too small and too large; the accuracy of runs with it, with other norms and with other server
rates; and which matrix suits which server optimizer. A run has 100 rounds of 50 clients at (8,
0.0001)-DP, together with its search if it has one. ``--part=rates`` searches for the server rate of
runs of 200 rounds instead, and compares with the best rate of the grid.

Noise of the runs is drawn in floating point by a generator that is no secret: they protect nobody.

Example:
  .venv/bin/python benchmarks/own_data.py --seeds=5
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy.signal
import scipy.special
import scipy.stats
import sklearn.datasets
from absl import flags

import mf_aggregators as mfa
from mf_aggregators import clip_search, rate_search
from mf_aggregators.commands import command_line

# The model of a server and its momentum.
_Server: TypeAlias = tuple[np.ndarray, np.ndarray]
_ROUNDS, _CLIENTS, _SEPARATION = 100, 50, 3
_ROUNDS_OF_RATES = 200
_EPSILON, _DELTA = 8.0, 1e-4
_EXAMPLES, _LETTERS, _STEPS, _CLIENT_RATE = 8, 40, 5, 0.5
_STARTS, _FACTORS = (0.1, 10.0), (0.1, 0.3, 1.0, 3.0)
# Learning rates of the server: with rate 1, a step is the mean of the clients' updates. Adam's
# rates are a hundredth of these.
_RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
_MOMENTUM, _SECOND, _SMALL = 0.9, 0.99, 1e-8


class Data(NamedTuple):
    """Data: (clients, examples, features) ``x`` and (clients, examples, classes) ``y``; tests."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def _dealt(x: np.ndarray, labels: np.ndarray) -> Data:
    """Deals examples out to clients, eight to each; a fifth of all examples is for tests."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], np.eye(int(np.max(labels)) + 1)[labels[order]]
    tests = len(x) // 5
    end = tests + (len(x) - tests) // _EXAMPLES * _EXAMPLES
    of_x, of_y = (each[tests:end].reshape(-1, _EXAMPLES, each.shape[1]) for each in (x, y))
    return Data(of_x, of_y, x[:tests], y[:tests])


def _digits() -> Data:
    x, labels = sklearn.datasets.load_digits(return_X_y=True)
    return _dealt(x / 16.0, labels)


def _trees() -> Data:
    """Returns made-up measurements with features of very different sizes, in seven classes."""
    x, labels = sklearn.datasets.make_classification(
        6000, 30, n_informative=12, n_classes=7, class_sep=1.5, random_state=0
    )
    return _dealt(x * np.geomspace(0.3, 3.0, 30), labels)


def _documented() -> Iterator[str]:
    for module in (np, scipy.stats, scipy.signal, scipy.special):
        for name in sorted(dir(module)):
            words = " ".join((inspect.getdoc(getattr(module, name)) or "").lower().split())
            letters = "".join(
                each for each in words if (each.isascii() and each.isalpha()) or each == " "
            )
            if len(letters) >= _LETTERS + 2:
                yield letters[: _LETTERS + 2]


def _letters() -> Data:
    """Returns data for predicting the next letter; clients are NumPy's and SciPy's docstrings."""
    texts = sorted(set(_documented()))
    codes = np.array(
        [[" abcdefghijklmnopqrstuvwxyz".index(each) for each in text] for text in texts]
    )
    codes = codes[np.random.default_rng(0).permutation(len(codes))]
    one_hot = np.eye(27)[codes]
    x = np.concatenate([one_hot[:, :-2], one_hot[:, 1:-1]], axis=2)
    y, tests = one_hot[:, 2:], len(codes) // 5
    return Data(x[tests:], y[tests:], x[:tests].reshape(-1, x.shape[2]), y[:tests].reshape(-1, 27))


DATA: dict[str, Callable[[], Data]] = {"digits": _digits, "made up": _trees, "letters": _letters}


def updates(model: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the clients' updates, (clients, d, c), each from a few steps of gradient descent."""
    local = np.broadcast_to(model, (len(x), *model.shape)).copy()
    for _ in range(_STEPS):
        slope = scipy.special.softmax(x @ local, axis=2) - y
        local -= _CLIENT_RATE / x.shape[1] * np.swapaxes(x, 1, 2) @ slope
    return local - model


def _norms(of_clients: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.sum(np.square(of_clients), axis=(1, 2))))


def _cohort(data: Data, number: int, seed: int) -> np.ndarray:
    """Returns the cohort of a round; in this order, a client returns after all others took part."""
    order = np.random.default_rng(seed).permutation(len(data.x))
    start = number * _CLIENTS % (len(order) - len(order) % _CLIENTS)
    return np.asarray(order[start : start + _CLIENTS])


def _zeros(data: Data) -> np.ndarray:
    return np.zeros((data.x.shape[2], data.y.shape[2]))


def mechanism(data: Data, momentum: float | None, rounds: int = _ROUNDS) -> mfa.Mechanism:
    """Returns the mechanism of a run, optimised for momentum; None means independent noise."""
    timers = mfa.participation.MinSeparation(max(_SEPARATION, len(data.x) // _CLIENTS))
    made: mfa.factorizations.Factorization = mfa.factorizations.identity(rounds)
    if momentum is not None:
        workload: int | mfa.workloads.Workload = rounds
        if momentum:
            workload = mfa.workloads.Workload("momentum_sgd", rounds, momentum)
        made = mfa.factorizations.toeplitz(
            workload, num_bands=min(rounds, timers.separation), participation=timers
        )
    return mfa.calibrate(made, timers, epsilon=_EPSILON, delta=_DELTA)


def accuracy(
    data: Data, run: mfa.Mechanism, optimizer: str, norm: float, rate: float, seed: int
) -> float:
    """Trains a model in a run, and returns its test accuracy in percent."""
    model = _zeros(data)
    noise = run.factorization.noise_rows(
        np.random.default_rng(seed).standard_normal((run.num_rounds, model.size))
    )
    first, second = np.zeros(model.shape), np.zeros(model.shape)
    for number in range(run.num_rounds):
        cohort = _cohort(data, number, seed)
        found = updates(model, data.x[cohort], data.y[cohort])
        found *= np.minimum(1.0, norm / np.maximum(_norms(found), 1e-30))[:, None, None]
        total = np.sum(found, axis=0) + run.sigma * norm * noise[number].reshape(model.shape)
        mean = total / _CLIENTS
        if optimizer == "SGD":
            model += rate * mean
            continue
        first = _MOMENTUM * first + (1.0 - _MOMENTUM) * mean
        if optimizer == "momentum":
            model += rate * first
            continue
        second = _SECOND * second + (1.0 - _SECOND) * mean**2
        unbiased = second / (1.0 - _SECOND ** (number + 1))
        step = first / (1.0 - _MOMENTUM ** (number + 1))
        model += rate * step / (np.sqrt(unbiased) + _SMALL)
    hits = np.argmax(data.test_x @ model, axis=1) == np.argmax(data.test_y, axis=1)
    return 100.0 * float(np.mean(hits))


def best(
    data: Data, run: mfa.Mechanism, optimizer: str, norm: float, seeds: int
) -> tuple[float, list[float]]:
    """Returns the best server rate, tuned with one seed, and its accuracies with other seeds."""
    unit = 0.01 if optimizer == "Adam" else 1.0
    tried = [unit * rate for rate in _RATES]
    rates = {rate: accuracy(data, run, optimizer, norm, rate, 1000) for rate in tried}
    rate = max(rates, key=lambda each: rates[each])
    found = [accuracy(data, run, optimizer, norm, rate, seed) for seed in range(seeds)]
    return rate, found


def _interval(found: list[float]) -> str:
    half = scipy.stats.t.ppf(0.975, len(found) - 1) * scipy.stats.sem(found)
    return f"{np.mean(found):.1f} ± {half:.1f} %"


def searched(data: Data, start: float, seed: int) -> tuple[float, float, mfa.Mechanism]:
    """Searches for a clip norm; returns it, the exact median and the run's mechanism."""
    whole = mechanism(data, 0.0)
    noise = clip_search.noise_of_run(whole.noise_multiplier)
    run = mfa.Mechanism(whole.factorization, whole.participation, noise)
    model = _zeros(data)
    median = float(np.median(_norms(updates(model, data.x, data.y))))

    def norms_of(number: int, clip_norm: float) -> np.ndarray:
        del clip_norm
        cohort = _cohort(data, number, seed)
        return _norms(updates(model, data.x[cohort], data.y[cohort]))

    search = clip_search.of_run(run, whole.noise_multiplier)
    found = clip_search.find(
        search, norms_of, clients_per_round=_CLIENTS, initial_norm=start * median
    )
    return found.clip_norm, median, run


def rate_searched(
    data: Data, whole: mfa.Mechanism, norm: float, seed: int
) -> tuple[float, mfa.Mechanism]:
    """Runs a private search for the server rate; returns the rate and the mechanism of the run."""
    noise = clip_search.noise_of_run(whole.noise_multiplier, rate_search.SHARE)
    run = mfa.Mechanism(whole.factorization, whole.participation, noise)

    def updates_of(
        candidate: int, number: int, server: _Server
    ) -> Iterator[tuple[np.ndarray, float]]:
        cohort = _cohort(data, number, 100 * seed + candidate)
        x, y, model = data.x[cohort], data.y[cohort], server[0]
        right = np.mean(np.argmax(x @ model, axis=2) == np.argmax(y, axis=2), axis=1)
        return zip(updates(model, x, y), right, strict=True)

    def step(server: _Server, mean: np.ndarray, rate: float) -> _Server:
        first = _MOMENTUM * server[1] + (1.0 - _MOMENTUM) * mean
        return server[0] + rate * first, first

    found = rate_search.find(
        rate_search.of_run(run, whole.noise_multiplier, len(_RATES)),
        _RATES,
        updates_of,
        step,
        (_zeros(data), _zeros(data)),
        clip_norm=norm,
        clients_per_round=_CLIENTS,
    )
    return found.rate, run


def _compare_rates(data: Data, add: Callable[[str, str], None], seeds: int) -> None:
    whole = mechanism(data, 0.0, _ROUNDS_OF_RATES)
    norm = float(np.median(_norms(updates(_zeros(data), data.x, data.y))))
    for rate in _RATES:
        found = [accuracy(data, whole, "momentum", norm, rate, seed) for seed in range(seeds)]
        add(f"rate {rate:g}, no search", _interval(found))
    searched_rates = [rate_searched(data, whole, norm, seed) for seed in range(seeds)]
    found = [
        accuracy(data, run, "momentum", norm, rate, seed)
        for seed, (rate, run) in enumerate(searched_rates)
    ]
    rates = ", ".join(f"{rate:g}" for rate, _ in searched_rates)
    add("rates as found", f"{_interval(found)} at {rates}")


def _add(rows: list[tuple[str, str, str]], name: str, what: str, found: str) -> None:
    rows.append((name, what, found))
    print(f"{name:<8}  {what:<32}  {found}", file=sys.stderr, flush=True)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("seeds", 5, "Runs of each.", lower_bound=2, flag_values=values)
    parts = ["clip norms", "rates"]
    flags.DEFINE_enum("part", parts[0], parts, "What to measure.", flag_values=values)
    names = list(DATA)
    flags.DEFINE_multi_enum("only", names, names, "Which data.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Runs the searches and the trainings, and prints their tables."""
    rows: list[tuple[str, str, str]] = []
    for name in values.only:
        data = DATA[name]()
        add = functools.partial(_add, rows, name)
        add("clients", str(len(data.x)))
        if values.part == "rates":
            _compare_rates(data, add, values.seeds)
            continue
        for start in _STARTS:
            norms = [searched(data, start, seed)[:2] for seed in range(values.seeds)]
            off = [found / median for found, median in norms]
            add(f"search from {start:g} of the median", f"{min(off):.2f} to {max(off):.2f} of it")
        norm, _, run = searched(data, _STARTS[0], 0)
        for factor in _FACTORS:
            rate, found = best(data, run, "momentum", factor * norm, values.seeds)
            add(f"norm {factor:g} of what it found", f"{_interval(found)} at rate {rate:.2g}")
        found = [accuracy(data, run, "momentum", norm, 1.0, seed) for seed in range(values.seeds)]
        add("norm as found, rate 1", _interval(found))
        for momentum in (None, 0.0, _MOMENTUM):
            whole = mechanism(data, momentum)
            matrix = {None: "identity", 0.0: "prefix sum"}.get(momentum, "momentum 0.9")
            for optimizer in ("SGD", "momentum", "Adam"):
                rate, found = best(data, whole, optimizer, norm, values.seeds)
                add(f"{optimizer}, matrix: {matrix}", f"{_interval(found)} at rate {rate:.2g}")
    text = "\n".join(f"{name:<8}  {what:<32}  {found}" for name, what, found in rows)
    command_line.print_result(values, {"rows": rows}, text)


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
