"""The strategy for Flower: who is drawn, what is released, what a killed run goes on from.

Where Flower cannot be imported, ``fake_flwr`` stands in for its classes;
``test_other_environments`` runs this file where it can.
"""

import doctest
import itertools
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.aggregator import ReleaseError, StateError
from mf_aggregators.audit.statistics import _maximal_patterns
from mf_aggregators.noise import FixedSeedWarning
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import LedgerError
from tests.mf_aggregators import fake_flwr
from tests.refusals import refuses

flower, flwr = fake_flwr.imported()
_FedAvg: Any = flwr.FedAvg

_NUM_ROUNDS, _POPULATION, _COHORT = 6, 12, 3
_SCHEMA = mfa.participation.MinSeparation(3)
_NAMES = tuple(f"client-{number}" for number in range(_POPULATION))


class _Killed(BaseException):
    """The process ends here."""


def _moved(name: str, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a client makes of a model: a function of the two."""
    target = np.random.default_rng(_NAMES.index(name)).normal(size=6)
    weights = model["weights"] + 0.3 * (target.reshape(2, 3) - model["weights"])
    bias = model["bias"] + np.float32(0.1 * _NAMES.index(name))
    return {"weights": weights, "bias": bias}


class _Grid:
    """Nodes with other numbers each time, which say their names and train."""

    def __init__(
        self, names: Iterable[str] = _NAMES, moved: Callable[..., Any] = _moved, first: int = 100
    ) -> None:
        self.names = dict(enumerate(names, first))
        self.moved = moved
        self.asked: list[list[str]] = []
        self.replies: Callable[[list[Any]], list[Any]] = list

    def get_node_ids(self) -> list[int]:
        return list(self.names)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        sent = list(messages)
        replies = [each for each in map(self._reply, sent) if each is not None]
        if sent and sent[0].metadata.message_type == "train":
            self.asked.append([self.names[each.metadata.dst_node_id] for each in sent])
            replies = self.replies(replies)
        return replies

    def _reply(self, message: Any) -> Any:
        name = self.names[message.metadata.dst_node_id]
        if message.metadata.message_type == "query.client_name":
            return flower.name_reply(message, name)
        model = {key: array.numpy() for key, array in message.content["arrays"].items()}
        return _reply_of(message, self.moved(name, model))


def _reply_of(message: Any, *models: dict[str, np.ndarray]) -> Any:
    records = {f"arrays{number or ''}": _record(each) for number, each in enumerate(models)}
    metrics = flwr.MetricRecord({"loss": 0.1234})
    return flwr.Message(flwr.RecordDict({**records, "metrics": metrics}), reply_to=message)


def _record(arrays: dict[str, np.ndarray]) -> Any:
    return flwr.ArrayRecord({key: flwr.Array(np.asarray(array)) for key, array in arrays.items()})


def _initial() -> dict[str, np.ndarray]:
    return {"weights": np.zeros((2, 3)), "bias": np.zeros((), np.float32)}


def _mechanism(noise_multiplier: float = 1.0, schema: Any = _SCHEMA) -> mfa.Mechanism:
    factorization = mfa.factorizations.banded(_NUM_ROUNDS, 3)
    return mfa.Mechanism(factorization, schema, noise_multiplier)


def _strategy(
    directory: pathlib.Path, mechanism: mfa.Mechanism | None = None, **changes: Any
) -> Any:
    options = {
        "strategy": flwr.FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
        "clip_norm": 1.0,
        "clients_per_round": _COHORT,
        "seed": 7,
        "patience": 0.0,
        **changes,
    }
    return flower.MatrixFactorization(
        options.pop("strategy"), mechanism or _mechanism(), directory=directory, **options
    )


def _without_noise(directory: pathlib.Path, **changes: Any) -> Any:
    options = {"strategy": flwr.FedAvg(), "allow_no_noise": True, "seed": None, **changes}
    return _strategy(directory, _mechanism(0.0), **options)


def _bits(result: Any) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in result.arrays.items()}


def _run(strategy: Any, grid: _Grid | None = None, **options: Any) -> dict[str, bytes]:
    return _bits(strategy.start(grid or _Grid(), _record(_initial()), **options))


def test_examples_print_what_they_show() -> None:
    names = ("flwr", "flwr.app", "flwr.serverapp", "flwr.serverapp.strategy")
    modules = {**dict.fromkeys(names, flwr), "mf_aggregators.flower": flower}
    with mock.patch.dict(sys.modules, modules):
        assert doctest.testmod(flower, raise_on_error=True).attempted > 10


def test_a_flower_that_fails_to_import_has_a_stand_in(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside the protobuf of TensorFlow Federated, where it is installed without packages."""
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "__init__.py").touch()
    (tmp_path / "flwr" / "app.py").write_text("from google.protobuf import no_such_name\n")
    for name in [each for each in sys.modules if each.partition(".")[0] == "flwr"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert fake_flwr.imported()[1].Message is fake_flwr.Message


def test_it_releases_what_the_aggregator_does(tmp_path: pathlib.Path) -> None:
    """The model by FedAvg of as many clients, from an aggregator with the same seed."""
    grid = _Grid()
    result = _strategy(tmp_path / "run", strategy=flwr.FedAvg()).start(grid, _record(_initial()))
    with pytest.warns(FixedSeedWarning):
        aggregator = mfa.Aggregator(_mechanism(), 1.0, _COHORT, seed=7)
    state, model = aggregator.initialize(), _initial()
    for names in grid.asked:
        updates = [
            {key: array - model[key] for key, array in _moved(each, model).items()}
            for each in names
        ]
        state, mean = aggregator.next(state, updates)
        model = {key: array + mean[key] for key, array in model.items()}
    assert len(grid.asked) == _NUM_ROUNDS
    assert _bits(result) == {key: array.tobytes() for key, array in model.items()}


def test_without_noise_it_is_federated_averaging_of_clipped_updates(
    tmp_path: pathlib.Path,
) -> None:
    grid = _Grid()
    found = _without_noise(tmp_path / "run", clip_norm=0.5).start(
        grid, _record(_initial()), num_rounds=1
    )
    expected = np.zeros(7)
    for name in grid.asked[0]:
        moved = _moved(name, _initial())
        update = np.append(moved["weights"], moved["bias"])
        expected += update * min(1.0, 0.5 / float(np.linalg.norm(update))) / _COHORT
    weights = found.arrays["weights"].numpy().ravel()
    np.testing.assert_allclose(weights, expected[:-1], atol=1e-7)
    np.testing.assert_allclose(found.arrays["bias"].numpy(), expected[-1], atol=1e-7)


def test_a_run_is_stated_by_its_own_ledger_and_record(tmp_path: pathlib.Path) -> None:
    told = {"population": _POPULATION, "public_data": "none", "delta": 1e-2}
    strategy = _strategy(tmp_path / "run", seed=None)
    with refuses("no run", error=StateError):
        strategy.statement(**told)
    _run(strategy, num_rounds=4)
    # Another process makes the same one.
    later = _strategy(tmp_path / "run", seed=None).statement(**told)
    found = strategy.statement(**told)
    assert found.to_dict() == later.to_dict()
    assert (found.status, found.evidence.num_sums) == ("open", 4)
    assert (found.keeps_plan, found.observed_participation.gap) == (True, None)
    assert found.stated == _mechanism().guarantee(1e-2)
    facts = found.to_dict()["facts"]
    assert facts["secure_sums"]["value"] is False
    assert "Flower" in facts["aggregator"]["value"]
    assert "name" in facts["enforcement"]["value"]
    assert facts["enforcement"]["origin"] == "read from the aggregator"
    names = [[f"other {number}" for number in range(_COHORT)]] * 3
    with refuses("ledger", "3", "4"):
        strategy.statement(names, **told)
    with refuses("population", "2"):
        strategy.statement(**{**told, "population": 2})


@pytest.mark.parametrize(
    "schema",
    [
        mfa.participation.SingleParticipation(),
        mfa.participation.MinSeparation(2, 2),
        mfa.participation.MinSeparation(4),
        mfa.participation.FixedEpochOrder(2, 4),
    ],
)
def test_clients_keep_to_the_schema(schema: Any, tmp_path: pathlib.Path) -> None:
    names = tuple(f"client-{number}" for number in range(3 * _POPULATION // 2))
    grid = _Grid(names, lambda name, model: model)
    mechanism = _mechanism(1.0, schema)
    _run(_strategy(tmp_path / "run", mechanism), grid)
    assert [len(set(each)) for each in grid.asked] == [_COHORT] * _NUM_ROUNDS
    for name in names:
        rounds = [i for i, each in enumerate(grid.asked) if name in each]
        assert rounds in [[], *(list(each) for each in _allowed(schema))]
    ledger = ledgers.load(tmp_path / "run" / "ledger.npz", _NUM_ROUNDS)
    shown = [sorted(ledger.client_ids[each] for each in cohort) for cohort in ledger.cohorts()]
    assert shown == [sorted(each) for each in grid.asked]
    assert mechanism.observed(ledger).keeps_participation


def _allowed(schema: Any) -> set[tuple[int, ...]]:
    """All parts of the largest patterns, of which a ledger may show any that is so far apart."""
    return {
        part
        for pattern in _maximal_patterns(schema.as_schema(), _NUM_ROUNDS)
        for size in range(1, len(pattern) + 1)
        for part in itertools.combinations(pattern, size)
    }


def test_the_ledger_has_a_round_before_its_clients_are_asked(tmp_path: pathlib.Path) -> None:
    def moved(name: str, model: Any) -> Any:
        ledger = ledgers.load(tmp_path / "run" / "ledger.npz", _NUM_ROUNDS)
        last = ledger.cohorts()[-1]
        assert name in [ledger.client_ids[each] for each in last]
        return _moved(name, model)

    _run(_strategy(tmp_path / "run"), _Grid(moved=moved))


def _dying(monkeypatch: pytest.MonkeyPatch, at: int, is_before: bool) -> list[str]:
    """Ends the process at one of the moments in which a file takes its name."""
    seen: list[str] = []

    def dying(intact: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*paths: Any) -> Any:
            seen.append(pathlib.Path(paths[1]).name)
            if len(seen) == at and is_before:
                raise _Killed
            taken = intact(*paths)
            if len(seen) == at:
                raise _Killed
            return taken

        return taking

    monkeypatch.setattr(pathlib.Path, "replace", dying(pathlib.Path.replace))
    monkeypatch.setattr(os, "link", dying(os.link))
    return seen


@pytest.mark.parametrize("is_before", [True, False])
def test_a_killed_run_ends_in_the_same_bits(
    is_before: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before or after any file is there, and gone on with by nodes of other numbers."""
    expected = _run(_strategy(tmp_path / "whole"), num_rounds=3)
    cohorts = ledgers.load(tmp_path / "whole" / "ledger.npz", 3).cohorts()
    moments = 0
    for at in itertools.count(1):
        directory = tmp_path / str(at)
        with monkeypatch.context() as patched:
            seen = _dying(patched, at, is_before)
            try:
                _run(_strategy(directory), num_rounds=3)
            except _Killed:
                moments += 1
            else:
                break
        found = _run(_strategy(directory), _Grid(first=7000 + at), num_rounds=3)
        assert found == expected, seen
        ledger = ledgers.load(directory / "ledger.npz", 3)
        assert len(ledger.cohorts()) == 3
        assert all(map(np.array_equal, ledger.cohorts(), cohorts))
    # Of each round: ledger, sum, record of the release, state, model.
    assert moments >= 15


def test_a_released_round_stays_what_it_was(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that send something else when a run goes on have no part in a round that was."""
    expected = _run(_strategy(tmp_path / "whole"), num_rounds=1)
    directory = tmp_path / "run"
    with monkeypatch.context() as patched:
        saved = flower.MatrixFactorization._save

        def dying(strategy: Any) -> None:
            if strategy._state.round_index:
                raise _Killed
            saved(strategy)

        patched.setattr(flower.MatrixFactorization, "_save", dying)
        with pytest.raises(_Killed):
            _run(_strategy(directory), num_rounds=1)
    others = _Grid(moved=lambda name, model: _moved("client-0", model))
    assert _run(_strategy(directory), others, num_rounds=1) == expected
    assert others.asked == []
    assert not list(directory.glob("sum-*"))


def test_other_clients_release_nothing_of_a_round_again(tmp_path: pathlib.Path) -> None:
    """An older state is put back: the round's clients may send the same again, and no more."""
    directory, kept = tmp_path / "run", tmp_path / "kept"
    _run(_strategy(directory), num_rounds=2)
    shutil.copytree(directory, kept)
    expected = _run(_strategy(directory), num_rounds=3)
    for kind in ("state", "model"):
        (directory / f"{kind}-000003.npz").unlink()
        shutil.copy(kept / f"{kind}-000002.npz", directory)
    same = shutil.copytree(directory, tmp_path / "same")
    assert _run(_strategy(same), num_rounds=3) == expected
    others = _Grid(moved=lambda name, model: _moved("client-0", model))
    with refuses("other data", error=ReleaseError):
        _run(_strategy(directory), others, num_rounds=3)


def test_what_does_not_belong_together_is_refused(tmp_path: pathlib.Path) -> None:
    directory, other = tmp_path / "run", tmp_path / "other"
    _run(_strategy(directory), num_rounds=2)
    _run(_strategy(other, cohort_seed=3), num_rounds=2)

    def broken(name: str, change: Callable[[pathlib.Path], Any]) -> pathlib.Path:
        copy = tmp_path / name
        shutil.copytree(directory, copy)
        change(copy)
        return copy

    cases: list[tuple[Any, type[Exception], Any]] = [
        (lambda at: (at / "ledger.npz").unlink(), LedgerError, None),
        (lambda at: shutil.copy(other / "ledger.npz", at), LedgerError, None),
        (lambda at: (at / "model-000002.npz").unlink(), StateError, None),
        (lambda at: (at / "state-000002.npz").unlink(), StateError, None),
        (lambda at: (at / "model-000002.npz").write_bytes(b"PK"), StateError, None),
        (lambda at: (at / "sum-000002.npz").write_bytes(b"PK"), StateError, None),
        # Another run's secret, under which that run may release the round as well.
        (lambda at: shutil.copy(other / "state-000002.npz", at), LedgerError, None),
        (lambda at: None, StateError, _mechanism(1.1)),
    ]
    for number, (change, error, mechanism) in enumerate(cases):
        copy = broken(str(number), change)
        grid = _Grid()
        with refuses(str(copy), error=error):
            _run(_strategy(copy, mechanism), grid)
        assert grid.asked == []


def test_what_the_wrapped_strategy_keeps_comes_back(tmp_path: pathlib.Path) -> None:
    class Keeping(_FedAvg):
        """Keeps arrays in all ways that Flower's strategies do."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, _ = super().aggregate_train(server_round, replies)
            self.kept_list = [array.numpy() for array in arrays.values()]
            self.kept_dict = {f"a/{key}": array.numpy() for key, array in arrays.items()}
            self.kept_record = arrays
            return arrays, None

    strategies = [Keeping(), Keeping()]
    for each in strategies:
        _run(_strategy(tmp_path / "run", strategy=each), num_rounds=1)
    first, second = strategies
    assert [each.tolist() for each in second.kept_list] == [
        each.tolist() for each in first.kept_list
    ]
    assert list(second.kept_dict) == list(first.kept_dict) == ["a/weights", "a/bias"]
    assert type(second.kept_record) is type(first.kept_record)
    assert second.kept_dict["a/bias"].dtype == np.float32


def test_too_few_clients_end_a_run_that_goes_on_with_more(tmp_path: pathlib.Path) -> None:
    few = _Grid(_NAMES[:5])
    with refuses("round 2", "3", "5", "2", error=RuntimeError):
        _run(_strategy(tmp_path / "run"), few)
    assert len(ledgers.load(tmp_path / "run" / "ledger.npz", 6).cohorts()) == 1
    more = _Grid()
    _run(_strategy(tmp_path / "run"), more)
    assert len(few.asked + more.asked) == _NUM_ROUNDS


def test_a_round_without_replies_is_begun_again_by_its_clients(tmp_path: pathlib.Path) -> None:
    silent = _Grid()
    silent.replies = lambda replies: []
    with refuses("round 1", error=RuntimeError):
        _run(_strategy(tmp_path / "run"), silent)
    again = _Grid(sorted(_NAMES, reverse=True))
    assert _run(_strategy(tmp_path / "run"), again) == _run(_strategy(tmp_path / "whole"))
    assert sorted(again.asked[0]) == sorted(silent.asked[0])
    # Those that are still there, where others are not.
    _run(_strategy(tmp_path / "third"), third := _Grid(), num_rounds=1)
    assert len(third.asked[0]) == _COHORT


def test_a_spent_round_is_never_released_and_its_clients_took_part(
    tmp_path: pathlib.Path,
) -> None:
    """A round's clients are gone; the run goes on without it, with the rows of later rounds."""
    directory, schema = tmp_path / "run", mfa.participation.MinSeparation(3)
    with refuses("run", error=StateError):
        _strategy(directory, strategy=flwr.FedAvg()).spend()
    before = _run(_strategy(directory, strategy=flwr.FedAvg()), num_rounds=1)
    silent = _Grid()
    silent.replies = lambda replies: []
    with refuses("round 2", error=RuntimeError):
        _run(_strategy(directory, strategy=flwr.FedAvg()), silent)
    gone = silent.asked[0]
    others = _Grid([name for name in _NAMES if name not in gone])
    with refuses("round 2", "spend()", error=RuntimeError):
        _run(_strategy(directory, strategy=flwr.FedAvg()), others)
    kept = shutil.copytree(directory, tmp_path / "kept")
    _strategy(directory, strategy=flwr.FedAvg()).spend()
    evaluated: list[dict[str, bytes]] = []
    result = _strategy(directory, strategy=flwr.FedAvg()).start(
        others,
        _record(_initial()),
        num_rounds=3,
        evaluate_fn=lambda number, arrays: evaluated.append(
            {name: array.numpy().tobytes() for name, array in arrays.items()}
        ),
    )
    assert evaluated[0] == before
    (cohort,) = others.asked
    ledger = ledgers.load(directory / "ledger.npz", 3)
    shown = [sorted(ledger.client_ids[each] for each in found) for found in ledger.cohorts()]
    assert shown[1:] == [sorted(gone), sorted(cohort)]
    assert _mechanism(1.0, schema).observed(ledger).keeps_participation
    # The third row of the same noise, beside what these clients sent.
    with pytest.warns(FixedSeedWarning):
        aggregator = mfa.Aggregator(_mechanism(), 1.0, _COHORT, seed=7, template=_initial())
    state, model = aggregator.initialize(), _of_bits(before)
    for _ in range(2):
        state, _ = aggregator.next(state, [])
    updates = [
        {key: array - model[key] for key, array in _moved(each, model).items()} for each in cohort
    ]
    _, mean = aggregator.next(state, updates)
    expected = {key: (array + mean[key]).tobytes() for key, array in model.items()}
    assert _bits(result) == expected
    # Files of before are put back, and the clients of the spent round are there again.
    for kind in ("state", "model"):
        (directory / f"{kind}-000003.npz").unlink()
        shutil.copy(kept / f"{kind}-000001.npz", directory)
    shutil.copy(kept / "ledger.npz", directory)
    with refuses("spent", error=ReleaseError):
        _run(_strategy(directory, strategy=flwr.FedAvg()))


def test_a_damaged_sum_is_given_up(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "run"
    _run(_strategy(directory), num_rounds=1)
    (directory / "sum-000001.npz").write_bytes(b"PK")
    with refuses("sum-000001.npz", error=StateError):
        _run(_strategy(directory))
    _strategy(directory).spend()
    later = _Grid()
    _run(_strategy(directory), later)
    assert len(later.asked) == _NUM_ROUNDS - 2
    with refuses(f"{_NUM_ROUNDS} rounds", error=ReleaseError):
        _strategy(directory).spend()


def _of_bits(bits: dict[str, bytes]) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(bits[name], array.dtype).reshape(array.shape)
        for name, array in _initial().items()
    }


_BAD = {
    "nan": lambda model: {**model, "weights": np.full((2, 3), np.nan)},
    "infinite": lambda model: {**model, "bias": np.float32(np.inf)},
    "other shape": lambda model: {**model, "weights": np.ones(6)},
    "other dtype": lambda model: {**model, "bias": np.float64(1.0)},
    "other names": lambda model: {**model, "further": np.ones(2)},
    "none": lambda model: {},
}


@pytest.mark.parametrize("kind", sorted(_BAD))
def test_a_bad_model_counts_as_zero(kind: str, tmp_path: pathlib.Path) -> None:
    """The mean is that of the others, divided by as many clients as before."""
    bad: list[str] = []

    def moved(name: str, model: Any) -> Any:
        bad[:] = bad or [name]
        return _BAD[kind](model) if name == bad[0] else _moved(name, model)

    grid = _Grid(moved=moved)
    result = _without_noise(tmp_path / "run").start(grid, _record(_initial()), num_rounds=1)
    expected: Any = 0.0
    for name in grid.asked[0]:
        if name != bad[0]:
            update = _moved(name, _initial())
            norm = float(np.linalg.norm([*update["weights"].ravel(), update["bias"]]))
            expected = expected + update["bias"] / max(1.0, norm)
    np.testing.assert_allclose(result.arrays["bias"].numpy(), expected / _COHORT, atol=1e-6)


@pytest.mark.parametrize("data", [b"", b"junk", b"\x93NUMPY\x01\x00", "header"])
def test_bytes_that_are_no_array_end_no_round(data: Any, tmp_path: pathlib.Path) -> None:
    """Else one client could end all rounds that it is asked in."""
    grid = _Grid()

    def broken(replies: list[Any]) -> list[Any]:
        (arrays,) = replies[0].content.array_records.values()
        array = arrays["weights"]
        # As many numbers as no machine has room for.
        large = array.data.replace(b"(2, 3), }" + b" " * 14, b"(2, 999999999999999), }")
        assert large != array.data
        array.data = large if data == "header" else data
        return replies

    grid.replies = broken
    found = _run(_without_noise(tmp_path / "run"), grid, num_rounds=1)
    # Flower asks the clients of a round in any order.
    others, bad = _Grid(), grid.asked[0][0]
    others.replies = lambda replies: [
        each for each in replies if others.names[each.metadata.src_node_id] != bad
    ]
    assert found == _run(_without_noise(tmp_path / "others"), others, num_rounds=1)


def test_each_client_counts_once(tmp_path: pathlib.Path) -> None:
    """Replies that come twice, come from others, have two models or an error add nothing."""
    first, second = _Grid(), _Grid()

    def more(replies: list[Any]) -> list[Any]:
        sent = replies[0]
        query = flwr.Message(
            flwr.RecordDict(), dst_node_id=sent.metadata.src_node_id, message_type="train"
        )
        outside = next(each for each in second.names if second.names[each] not in second.asked[0])
        other = flwr.Message(flwr.RecordDict(), dst_node_id=outside, message_type="train")
        failed = flwr.Message(flwr.Error(1, "it was switched off"), reply_to=query)
        model = _moved("client-3", _initial())
        return [
            failed,
            *replies,
            *replies,
            failed,
            _reply_of(query, model),
            _reply_of(other, model),
        ]

    second.replies = more
    one = _run(_without_noise(tmp_path / "one"), first, num_rounds=1)
    assert _run(_without_noise(tmp_path / "two"), second, num_rounds=1) == one
    third = _Grid()
    third.replies = lambda replies: [
        _reply_of(
            flwr.Message(
                flwr.RecordDict(), dst_node_id=replies[0].metadata.src_node_id, message_type="train"
            ),
            *[_moved("client-3", _initial())] * 2,
        )
    ]
    with refuses("round 1", error=RuntimeError):
        _run(_without_noise(tmp_path / "three"), third)


def test_names_that_cannot_be_told_apart_take_no_part(tmp_path: pathlib.Path) -> None:
    """Two nodes of one name may be one client, which would count twice in a round."""
    grid = _Grid([*_NAMES[:5], "client-0", "client-0", "client-1", "", "a\0b"])
    _run(_strategy(tmp_path / "run"), grid, num_rounds=1)
    assert sorted(grid.asked[0]) == ["client-2", "client-3", "client-4"]
    for number, few in enumerate(["client-0", ""]):
        with refuses("round 1", error=RuntimeError):
            _run(_strategy(tmp_path / str(number)), _Grid([*_NAMES[:3], "client-0", few]))


def test_an_extended_run_keeps_the_schema_of_each_horizon(tmp_path: pathlib.Path) -> None:
    first = mfa.Mechanism(
        mfa.factorizations.blt(_NUM_ROUNDS, 2), mfa.participation.MinSeparation(3, 1), 1.0
    )
    whole = first.extended(9, mfa.participation.MinSeparation(3, 2), num_parameters=7)
    _run(_strategy(tmp_path / "run", whole, clients_per_round=2))
    ledger = ledgers.load(tmp_path / "run" / "ledger.npz", 9)
    assert whole.observed(ledger).keeps_participation
    # In the first horizon, each took part once.
    assert all(np.sum(rounds < _NUM_ROUNDS) <= 1 for rounds in ledger.rounds_of_clients)


def test_a_node_that_says_no_name_takes_no_part(tmp_path: pathlib.Path) -> None:
    class Grid(_Grid):
        def _reply(self, message: Any) -> Any:
            if message.metadata.message_type == "query.client_name":
                if self.names[message.metadata.dst_node_id] == "client-0":
                    return flwr.Message(flwr.Error(1, "no such action"), reply_to=message)
                if self.names[message.metadata.dst_node_id] == "client-1":
                    return flwr.Message(flwr.RecordDict(), reply_to=message)
                if self.names[message.metadata.dst_node_id] == "client-2":
                    return None
            return super()._reply(message)

    grid = Grid(_NAMES[:6])
    _run(_strategy(tmp_path / "run"), grid, num_rounds=1)
    assert sorted(grid.asked[0]) == ["client-3", "client-4", "client-5"]


def test_what_is_saved_is_its_owners(tmp_path: pathlib.Path) -> None:
    _run(_strategy(tmp_path / "run", seed=None), num_rounds=1)
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    for path in (tmp_path / "run").glob("*-*.npz"):
        assert path.stat().st_mode & 0o077 == 0
    (tmp_path / "run").chmod(0o755)
    with refuses("noise_directory"):
        _strategy(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "named", "error"),
    [
        ({"strategy": "FedAvg"}, "FedAvg", TypeError),
        ({"strategy": flwr.FedAvg(fraction_train=0.5)}, "fraction_train", ValueError),
        ({"strategy": flwr.FedAvg(min_available_nodes=4)}, "min_available_nodes", ValueError),
        ({"clients_per_round": 0}, "clients_per_round", ValueError),
        ({"clients_per_round": 2.5}, "clients_per_round", ValueError),
        ({"clip_norm": 0.0}, "clip_norm", ValueError),
        ({"cohort_seed": -1}, "cohort_seed", ValueError),
        ({"patience": -1.0}, "patience", ValueError),
        ({"mechanism": "blt"}, "mechanism", TypeError),
        (
            {
                "mechanism": mfa.Mechanism(
                    mfa.factorizations.identity(_NUM_ROUNDS),
                    mfa.participation.PoissonSampling(_NUM_ROUNDS, 1, _POPULATION, _COHORT),
                    1.0,
                )
            },
            "poisson",
            ValueError,
        ),
    ],
)
def test_bad_arguments_are_named(
    changes: dict[str, Any], named: str, error: type[Exception], tmp_path: pathlib.Path
) -> None:
    with refuses(named, error=error):
        _strategy(tmp_path / "run", **changes)
    with refuses("start", error=RuntimeError):
        _strategy(tmp_path / "run").configure_train(1, _record(_initial()), {}, _Grid())
