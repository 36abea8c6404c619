"""The aggregator in NumPy by itself: means, what is refused, states; ``tff`` compares its bits."""

import collections
import copy
import dataclasses
import json
import os
import pathlib
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.aggregator import ReleaseError, StateError
from mf_aggregators.factorizations import Factorization, noise_rows
from mf_aggregators.kernel import draws
from mf_aggregators.noise import DEFAULT_SOURCE, FixedSeedWarning
from tests import flipped_bits
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.refusals import refuses

_NUM_ROUNDS = 6
_SCHEMA = mfa.participation.MinSeparation(3)


class _Layer(NamedTuple):
    kernel: np.ndarray
    bias: np.ndarray


def _mechanism(noise_multiplier: float = 1.0, mechanism: int = 2) -> mfa.Mechanism:
    factorization = small_mechanisms.factorizations(_NUM_ROUNDS)[mechanism]
    return mfa.Mechanism(factorization, _SCHEMA, noise_multiplier)


def _aggregator(mechanism: mfa.Mechanism | None = None, **changes: Any) -> mfa.Aggregator:
    arguments: dict[str, Any] = {"clip_norm": 1.0, "clients_per_round": 2.0, **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return mfa.Aggregator(mechanism or _mechanism(), **arguments)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10.0), st.integers(1, 5))
@settings(deadline=None, max_examples=examples(60))
def test_without_noise_it_is_the_mean_of_clipped_updates(
    seed: int, clip_norm: float, clients: int
) -> None:
    generator = np.random.default_rng(seed)
    aggregator = _aggregator(
        _mechanism(0.0), clip_norm=clip_norm, clients_per_round=3.0, allow_no_noise=True
    )
    updates: list[dict[str, Any]] = [
        {"one": _Layer(generator.normal(size=(2, 3)), generator.normal(size=3)), "b": np.ones(2)}
        for _ in range(clients)
    ]
    state, release = aggregator.next(aggregator.initialize(), iter(updates))
    assert state.round_index == 1
    assert isinstance(release["one"], _Layer)
    expected = np.zeros(11)
    for update in updates:
        flat = np.concatenate([update["b"], update["one"].kernel.ravel(), update["one"].bias])
        expected += flat * min(1.0, clip_norm / float(np.linalg.norm(flat)))
    found = np.concatenate([release["b"], release["one"].kernel.ravel(), release["one"].bias])
    np.testing.assert_allclose(found, expected / 3.0, atol=1e-8 * clip_norm * clients)


def test_the_noise_is_that_of_the_matrix() -> None:
    """C times the released noise is white, of the standard deviation that was asked for."""
    mechanism = _mechanism(1.5)
    aggregator = _aggregator(
        mechanism, clip_norm=2.0, clients_per_round=4.0, template=np.ones(1500)
    )
    state, rows = aggregator.initialize(), []
    for _ in range(_NUM_ROUNDS):
        state, release = aggregator.next(state, [])
        rows.append(release)
    sensitivity = mechanism.factorization.sensitivity(_SCHEMA).value
    z = mechanism.factorization.strategy_matrix() @ np.array(rows) * 4.0
    check_standard_normal(z / (1.5 * 2.0 * sensitivity))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_counts_as_zero(value: float) -> None:
    aggregator = _aggregator(_mechanism(0.0), allow_no_noise=True)
    updates = [np.array([0.1, 0.2]), np.array([value, 0.5])]
    _, release = aggregator.next(aggregator.initialize(), updates)
    np.testing.assert_allclose(release, [0.05, 0.1], atol=1e-8)
    # Nor does it say of its norm that it is within the clip norm, or that it is not.
    clip = mfa.AdaptiveClip(1.0)
    aggregator = _aggregator(_mechanism(0.0), clip_norm=clip, allow_no_noise=True)
    state, _ = aggregator.next(aggregator.initialize(), updates)
    assert aggregator.metrics(state)["unclipped_fraction"] == pytest.approx(0.75, abs=1e-8)


def _same_noise_on_other_data(aggregator: mfa.Aggregator, state: Any) -> None:
    aggregator.next(state, [np.array([0.1, 0.2])])
    with refuses("other data", error=ReleaseError):
        aggregator.next(state, [np.array([0.1, 0.3])])


def test_a_round_is_released_for_the_same_updates_alone() -> None:
    aggregator = _aggregator()
    state = aggregator.initialize()
    updates = [np.array([0.1, 0.2]), np.array([1.0, 3.0])]
    following, first = aggregator.next(state, updates)
    _, again = aggregator.next(state, updates[::-1])
    np.testing.assert_array_equal(first, again)
    with refuses("other data", error=ReleaseError):
        aggregator.next(state, updates[:1])
    assert aggregator.next(following, updates[:1])[0].round_index == 2


def test_a_row_is_not_added_twice_under_another_clip_norm(tmp_path: pathlib.Path) -> None:
    """Two copies of a state may go on with other norms, and the same sum in steps of them."""
    clip = mfa.AdaptiveClip(1.0, update_period=1)
    # Records in two directories know nothing of one another.
    aggregator, copy = (
        _aggregator(clip_norm=clip, noise_directory=tmp_path / name) for name in ("one", "other")
    )
    state = aggregator.initialize()
    following, _ = aggregator.next(state, [np.zeros(2)] * 2)
    other, _ = copy.next(state, [np.full(2, 9.0)] * 2)
    norms = [
        each.metrics(then)["next_clip_norm"]
        for each, then in ((aggregator, following), (copy, other))
    ]
    assert norms[0] != norms[1]
    aggregator.next(following, [np.zeros(2)] * 2)
    with refuses("other data", error=ReleaseError):
        aggregator.next(other, [np.zeros(2)] * 2)


def test_the_record_of_a_directory_outlives_the_process(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "noise"
    state = _aggregator(noise_directory=directory).initialize()
    _same_noise_on_other_data(_aggregator(noise_directory=directory), state)
    with refuses("other data", error=ReleaseError):
        _aggregator(noise_directory=directory).next(state, [np.array([0.0, 0.2])])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_share_the_record(copied: Callable[[Any], Any]) -> None:
    aggregator = _aggregator()
    state = aggregator.initialize()
    other = copied(aggregator)
    aggregator.next(state, [np.array([0.1, 0.2])])
    with refuses("other data", error=ReleaseError):
        other.next(state, [np.array([0.1, 0.3])])


@pytest.mark.parametrize("storage", ["state", "disk"])
def test_aggregators_made_alike_share_the_record_of_a_process(storage: str) -> None:
    """A notebook's cell that runs again makes a second one, and its state goes on."""
    options: dict[str, Any] = {"template": np.zeros(2), "noise_storage": storage}
    aggregator, other = (_aggregator(**options) for _ in range(2))
    state = aggregator.initialize()
    aggregator.next(state, [np.array([0.1, 0.2])])
    with refuses("other data", error=ReleaseError):
        other.next(state, [np.array([0.1, 0.3])])
    following = other.spend(state)
    with refuses("was spent", error=ReleaseError):
        aggregator.next(state, [np.array([0.1, 0.2])])
    aggregator.next(following, [np.array([0.1, 0.2])])


def test_only_a_record_in_a_directory_is_pickled(tmp_path: pathlib.Path) -> None:
    """A temporary directory ends with the process that made it, and is none."""
    for storage in ("state", "disk"):
        with refuses("noise_directory", "save_state", error=ReleaseError):
            pickle.dumps(_aggregator(noise_storage=storage))
    aggregator = _aggregator(noise_directory=tmp_path / "noise")
    state = aggregator.initialize()
    other = pickle.loads(pickle.dumps(aggregator))
    following, first = aggregator.next(state, [np.array([0.1, 0.2])])
    np.testing.assert_array_equal(other.next(state, [np.array([0.1, 0.2])])[1], first)
    with refuses("other data", error=ReleaseError):
        pickle.loads(pickle.dumps(aggregator)).next(state, [np.array([0.1, 0.3])])
    assert other.next(following, [np.zeros(2)])[0].round_index == 2


@pytest.mark.parametrize("storage", ["state", "disk"])
def test_a_forked_process_has_no_record_of_its_own(storage: str, tmp_path: pathlib.Path) -> None:
    """It shares the record in a directory, and releases nothing without one."""

    def forked(aggregator: mfa.Aggregator, value: float) -> str:
        """Returns how a round ended in a process that was forked."""
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                aggregator.next(state, [np.full(2, value)])
                os.write(write, b"released")
            except ReleaseError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as said:
            return said.read()

    aggregator = _aggregator(noise_storage=storage)
    state = aggregator.initialize()
    assert "another process" in forked(aggregator, 0.1)
    aggregator.next(state, [np.full(2, 0.2)])
    shared = _aggregator(noise_storage=storage, noise_directory=tmp_path / "noise")
    assert forked(shared, 0.1) == "released"
    assert shared.next(state, [np.full(2, 0.1)])[0].round_index == 1
    assert "other data" in forked(shared, 0.2)


def test_a_directory_that_is_deleted_meanwhile_is_not_forgotten(tmp_path: pathlib.Path) -> None:
    aggregator = _aggregator(noise_directory=tmp_path / "noise")
    state = aggregator.initialize()
    aggregator.next(state, [np.zeros(2)])
    shutil.rmtree(tmp_path / "noise")
    with refuses("other data", error=ReleaseError):
        aggregator.next(state, [np.ones(2)])


@pytest.mark.parametrize("clip_norm", [1.0, mfa.AdaptiveClip(1.0, update_period=2)])
@pytest.mark.parametrize("storage", ["state", "disk"])
@pytest.mark.parametrize("mechanism", [2, 6, 11, 12])
def test_after_a_spent_round_a_run_has_the_rows_that_it_would_have_had(
    mechanism: int, storage: str, clip_norm: Any
) -> None:
    chosen: dict[str, Any] = {"clip_norm": clip_norm, "seed": 7, "noise_storage": storage}
    whole, other = (_aggregator(_mechanism(1.0, mechanism), **chosen) for _ in range(2))
    state, spent = whole.initialize(), other.initialize()
    # The first round's norm stays: both have the same one until a fraction is released.
    state, _ = whole.next(state, [np.zeros(5)])
    spent = other.with_template(np.zeros(5)).spend(spent)
    assert spent.clip == other.initialize().clip
    assert spent.round_index == 1
    spent = dataclasses.replace(spent, clip=state.clip)
    for _ in range(_NUM_ROUNDS - 1):
        state, expected = whole.next(state, [np.ones(5)])
        spent, found = other.next(spent, [np.ones(5)])
        np.testing.assert_array_equal(found, expected)
    with refuses(f"{_NUM_ROUNDS} rounds", error=ReleaseError):
        other.spend(spent)


@pytest.mark.parametrize("was_released", [True, False])
@pytest.mark.parametrize("has_directory", [True, False])
def test_a_spent_round_is_never_released(
    was_released: bool, has_directory: bool, tmp_path: pathlib.Path
) -> None:
    """Neither again nor for the first time, in this process or, with a directory, in another."""
    options: dict[str, Any] = {"noise_directory": tmp_path / "noise"} if has_directory else {}
    aggregator, other = _aggregator(**options), _aggregator(**options)
    state, updates = aggregator.initialize(), [np.array([0.1, 0.2])]
    aggregator = aggregator.with_template(updates[0])
    if was_released:
        aggregator.next(state, updates)
        other.next(state, updates)
    following = aggregator.spend(state)
    others = [aggregator, copy.deepcopy(aggregator)]
    others += [other, _aggregator(**options)] if has_directory else []
    for each in others:
        for sent in (updates, [np.zeros(2)], []):
            # A process that knows another sum of the round looks no further.
            with refuses("noise" if each is other else "spent", error=ReleaseError):
                each.with_template(updates[0]).next(state, sent)
    # A crash before the state is saved: it may be spent again.
    assert aggregator.spend(state).round_index == following.round_index == 1
    assert aggregator.next(following, updates)[0].round_index == 2


def test_a_state_of_no_updates_is_spent_with_a_template() -> None:
    aggregator = _aggregator()
    state = aggregator.initialize()
    with refuses("with_template", "spend"):
        aggregator.spend(state)
    following = aggregator.with_template({"a": np.ones(2)}).spend(state)
    assert aggregator.next(following, [{"a": np.zeros(2)}])[0].round_index == 2
    with refuses("another aggregator", error=ReleaseError):
        _aggregator(clip_norm=2.0, template={"a": np.ones(2)}).spend(state)


def test_a_sum_that_was_kept_is_released_again(tmp_path: pathlib.Path) -> None:
    """In another process, whose record is in the directory: the same bits, and no other sum."""
    options: dict[str, Any] = {"noise_directory": tmp_path / "noise"}
    aggregator = _aggregator(**options)
    state = aggregator.initialize()
    updates = [np.array([0.1, 0.2]), np.array([0.3, 0.1])]
    records = [aggregator.record(state, each)[0] for each in updates]
    aggregator.save_state(state, tmp_path / "state.npz")
    _, first = aggregator.release(state, [records[0] + records[1]], 2, updates[0])
    again = _aggregator(**options)
    state = again.load_state(tmp_path / "state.npz")
    np.testing.assert_array_equal(
        again.release(state, [records[0] + records[1]], 2, updates[0])[1], first
    )
    with refuses("other data", error=ReleaseError):
        again.release(state, records[:1], 1, updates[0])


@pytest.mark.parametrize("clip_norm", [1.0, mfa.AdaptiveClip(1.0)])
def test_updates_without_entries_have_rounds_as_well(clip_norm: Any) -> None:
    aggregator = _aggregator(clip_norm=clip_norm)
    state, release = aggregator.next(aggregator.initialize(), [{}, {}])
    assert (release, state.round_index) == ({}, 1)
    fraction = aggregator.metrics(state).get("unclipped_fraction", 0.0)
    assert (fraction != 0.0) is isinstance(clip_norm, mfa.AdaptiveClip)


def test_there_is_noise_for_so_many_rounds() -> None:
    aggregator = _aggregator()
    state = aggregator.initialize()
    for _ in range(_NUM_ROUNDS):
        state, _ = aggregator.next(state, [np.ones(3)])
    with refuses(f"{_NUM_ROUNDS} rounds", error=ReleaseError):
        aggregator.next(state, [np.ones(3)])


def test_more_clients_than_a_sum_holds_release_nothing() -> None:
    aggregator = _aggregator(largest_cohort=2)
    state = aggregator.initialize()
    with refuses("More than 2 clients", error=ReleaseError):
        aggregator.next(state, [np.ones(3)] * 3)
    assert aggregator.next(state, [np.ones(3)] * 2)[0].round_index == 1


def test_a_grid_that_is_too_coarse_for_an_update_is_refused() -> None:
    # sqrt(d) / (2 * 8388) is 5 per cent of a clip norm at 703,000 numbers.
    options: dict[str, Any] = {"secure_aggregation_bits": 24, "clients_per_round": 1000.0}
    _aggregator(template=np.zeros(700_000), **options)
    with refuses("clip norms", "secure_aggregation_bits"):
        _aggregator(template=np.zeros(710_000), **options)


def test_other_tensors_than_those_before_are_refused() -> None:
    aggregator = _aggregator()
    state, _ = aggregator.next(aggregator.initialize(), [np.ones(3)])
    for other in (np.ones(2), np.ones(3, np.float32), [np.ones(3), np.ones(1)]):
        with refuses("float64[3]"):
            aggregator.next(state, [other])
    with refuses("int64", error=TypeError):
        aggregator.next(aggregator.initialize(), [np.ones(3, np.int64)])
    with refuses("with_template", "next"):
        aggregator.next(aggregator.initialize(), [])
    assert aggregator.with_template(np.ones(3)).next(aggregator.initialize(), [])[1].shape == (3,)


class _Weights(NamedTuple):
    kernel: np.ndarray
    offset: np.ndarray


_ONE, _TWO = np.ones(1), np.full(1, 2.0)


@pytest.mark.parametrize(
    ("first", "other", "names"),
    [
        ({"a": _ONE, "b": _ONE}, {"a": _ONE, "c": _ONE}, ("b", "c")),
        (
            {f"dense_{i}": _ONE for i in range(1, 11)},
            {f"dense_{i:02}": _ONE for i in range(1, 11)},
            ("dense_1", "dense_01"),
        ),
        ({"a": _ONE}, [_ONE], ("a", "0")),
        ({0: _ONE}, [_ONE], ("{0}", "[0]")),
        ([_ONE], (_ONE,), ("[0]", "(0)")),
        (_Layer(_ONE, _ONE), _Weights(_ONE, _ONE), ("bias", "offset")),
        (_Layer(_ONE, _ONE), (_ONE, _ONE), ("kernel", "(0)")),
        ({"a": {"b": _ONE}}, {"a": _ONE}, ("['a']['b']", "['a']")),
        ([_ONE], [_ONE, _ONE], ("no more leaves", "[1]")),
    ],
)
def test_updates_are_matched_by_name(
    first: Any, other: Any, names: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    aggregator = _aggregator()
    with refuses("containers", *names):
        aggregator.next(aggregator.initialize(), [first, other])
    with refuses("containers", *names):
        _aggregator(template=first).next(_aggregator(template=first).initialize(), [other])
    # A state that was saved keeps the names, for updates and sums alike.
    aggregator.save_state(aggregator.next(aggregator.initialize(), [first])[0], tmp_path / "state")
    resumed = _aggregator()
    state = resumed.load_state(tmp_path / "state")
    with refuses("containers", *names):
        resumed.next(state, [other])
    with refuses("containers", *names):
        resumed.release(state, resumed.record(state, first), 1, other)
    assert resumed.next(state, [first])[0].round_index == 2


def test_dicts_are_matched_in_any_order() -> None:
    aggregator = _aggregator(_mechanism(0.0), allow_no_noise=True, clip_norm=9.0)
    updates = [{"a": _ONE, "b": _TWO}, collections.OrderedDict(b=_TWO, a=_ONE)]
    _, mean = aggregator.next(aggregator.initialize(), updates)
    np.testing.assert_allclose([mean["a"], mean["b"]], [_ONE, _TWO], atol=1e-6)


class _Sparse:
    """As those of scipy, TensorFlow and others: a shape and a dtype, and no array."""

    shape, dtype = (2,), np.dtype(np.float32)


class _Labelled(_Sparse):
    """As those of pandas and xarray: entries have names, and places follow from them."""

    def __array__(self, *_: Any) -> np.ndarray:
        return np.ones(2, np.float32)


@pytest.mark.parametrize(
    "leaf",
    [
        np.ma.masked_array([1.0, 2.0], [False, True]),
        np.asmatrix([[1.0, 2.0]]),
        np.rec.array([(1.0, 2.0)], dtype=[("x", "f4"), ("y", "f4")]),
        np.array([(1.0, 2.0)], dtype=[("x", "f4"), ("y", "f4")]),
        np.array([1.0, None], object),
        scipy.sparse.coo_matrix((2, 2), dtype=np.float32),
        _Sparse(),
        _Labelled(),
        None,
        "weights",
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_plain_array_is_refused_by_place_and_type(leaf: Any) -> None:
    aggregator = _aggregator()
    with refuses("['layers'][1]", type(leaf).__name__, error=TypeError):
        aggregator.next(aggregator.initialize(), [{"layers": [_ONE, leaf]}])
    template = {"layers": [_ONE, np.ones(2, np.float32)]}
    with refuses("['layers'][1]", type(leaf).__name__, error=TypeError):
        _aggregator(template=template).next(
            _aggregator(template=template).initialize(), [{"layers": [_ONE, leaf]}]
        )


def test_sums_are_plain_arrays() -> None:
    """A mask would hide entries that no records add up to, but for the noise's sum."""
    aggregator = _aggregator()
    state = aggregator.initialize()
    hidden: Any = np.ma.masked_array(np.array([0, 2**40]), [False, True])
    with refuses("MaskedArray", error=TypeError):
        aggregator.release(state, [hidden], 1, np.zeros(2))
    with refuses("list", error=TypeError):
        aggregator.release(state, np.zeros((1, 2), np.int64).tolist(), 1, np.zeros(2))
    for number in (0, 2):
        with refuses("1 arrays", str(number)):
            aggregator.release(state, [np.zeros(2, np.int64)] * number, 1, np.zeros(2))
    mapped = np.zeros(2, np.int64).view(np.memmap)
    assert aggregator.release(state, [mapped], 1, np.zeros(2))[0].round_index == 1


def _states(aggregator: mfa.Aggregator, state: Any, rounds: int) -> Iterator[tuple[Any, Any]]:
    for i in range(rounds):
        state, release = aggregator.next(state, [np.full(5, 0.1 * i), np.arange(5.0)])
        yield state, release


@pytest.mark.short_cases(12)
@pytest.mark.parametrize("storage", ["state", "disk"])
@pytest.mark.parametrize("mechanism", range(len(small_mechanisms.factorizations(_NUM_ROUNDS))))
def test_a_saved_run_goes_on_as_it_would_have(
    mechanism: int, storage: str, tmp_path: pathlib.Path
) -> None:
    """Files of rows may be lost on the way, or damaged: they are made again."""
    clip = mfa.AdaptiveClip(0.5, update_period=1) if mechanism % 2 else 1.0
    chosen = {"clip_norm": clip, "seed": 7, "noise_storage": storage}
    through = list(
        _states(
            whole := _aggregator(_mechanism(1.0, mechanism), **chosen),
            whole.initialize(),
            _NUM_ROUNDS,
        )
    )
    directory = tmp_path / "noise" if storage == "disk" else None
    begun = _aggregator(_mechanism(1.0, mechanism), noise_directory=directory, **chosen)
    *_, (state, _) = _states(begun, begun.initialize(), 3)
    begun.save_state(state, tmp_path / "state.npz")
    assert (tmp_path / "state.npz").stat().st_mode & 0o077 == 0
    for number, path in enumerate(sorted(tmp_path.rglob("row-*"))):
        path.unlink() if number % 2 else path.write_bytes(path.read_bytes()[:-1])
    resumed = _aggregator(_mechanism(1.0, mechanism), noise_directory=directory, **chosen)
    state = resumed.load_state(tmp_path / "state.npz")
    for i in range(3, _NUM_ROUNDS):
        state, release = resumed.next(state, [np.full(5, 0.1 * i), np.arange(5.0)])
        np.testing.assert_array_equal(release, through[i][1])


@pytest.mark.parametrize("storage", ["state", "disk"])
def test_a_saved_run_without_noise_goes_on(storage: str, tmp_path: pathlib.Path) -> None:
    chosen = {"noise_storage": storage, "allow_no_noise": True}
    aggregator = _aggregator(_mechanism(0.0), **chosen)
    *_, (state, _), (_, expected) = _states(aggregator, aggregator.initialize(), 3)
    aggregator.save_state(state, tmp_path / "state.npz")
    resumed = _aggregator(_mechanism(0.0), **chosen)
    state = resumed.load_state(tmp_path / "state.npz")
    assert state.round_index == 2
    _, found = resumed.next(state, [np.full(5, 0.2), np.arange(5.0)])
    np.testing.assert_array_equal(found, expected)


def test_states_of_other_runs_are_refused(tmp_path: pathlib.Path) -> None:
    aggregator = _aggregator()
    path = tmp_path / "state.npz"
    aggregator.save_state(aggregator.next(aggregator.initialize(), [np.ones(2)])[0], path)
    others = [
        _aggregator(_mechanism(1.1)),
        _aggregator(_mechanism(1.0, 3)),
        _aggregator(noise_source="philox"),
        _aggregator(clip_norm=mfa.AdaptiveClip(1.0)),
    ]
    for other in others:
        with refuses("state.npz", error=StateError):
            other.load_state(path)
    _check_flipped(path, aggregator)
    path.write_bytes(path.read_bytes()[:-40])
    for broken in (path, tmp_path / "missing"):
        with refuses(broken.name, error=StateError):
            aggregator.load_state(broken)


def _arrays(state: Any) -> dict[str, np.ndarray]:
    return _aggregator()._of_tensors(state.tensors).arrays_of(state.noise)


def _check_flipped(path: pathlib.Path, aggregator: mfa.Aggregator) -> None:
    """A state with a wrong bit is refused, or read as it was."""
    expected, refused = aggregator.load_state(path), 0
    for _ in flipped_bits.flipped(path):
        try:
            found = aggregator.load_state(path)
        except StateError:
            refused += 1
            continue
        assert (found.tensors, found.clip) == (expected.tensors, expected.clip)
        np.testing.assert_equal(_arrays(found), _arrays(expected))
    assert refused > 250


def test_states_of_another_version_are_refused_by_their_format(tmp_path: pathlib.Path) -> None:
    """Those of format 1 have no names of arrays."""
    aggregator, path = _aggregator(), tmp_path / "state.npz"
    aggregator.save_state(aggregator.next(aggregator.initialize(), [np.ones(2)])[0], path)
    with np.load(path) as file:
        arrays = dict(file)
    described = json.loads(str(arrays["described"]))
    arrays["described"] = np.array(json.dumps({**described, "state_format": 1}))
    np.savez(path, **arrays)
    with refuses("state.npz", "format is 1", "version", error=StateError):
        aggregator.load_state(path)


def test_a_state_that_others_may_read_is_refused(tmp_path: pathlib.Path) -> None:
    """It holds the seed: who has read it subtracts the noise."""
    aggregator = _aggregator()
    path = tmp_path / "state.npz"
    aggregator.save_state(aggregator.next(aggregator.initialize(), [np.ones(2)])[0], path)
    path.chmod(0o644)
    with refuses("open to others", f"chmod 600 {path}", error=StateError):
        aggregator.load_state(path)
    path.chmod(0o600)
    aggregator.load_state(path)


def test_a_sum_that_was_made_elsewhere_is_released_alike() -> None:
    aggregator = _aggregator(seed=3, secure_aggregation_bits=40, largest_cohort=4)
    updates = [np.random.default_rng(i).normal(size=6) for i in range(4)]
    state = aggregator.initialize()
    records = [aggregator.record(state, update) for update in updates]
    sums = [sum(parts[1:], parts[0]) for parts in zip(*records, strict=True)]
    assert all(np.max(np.abs(total)) < 2**39 for total in sums)
    _, expected = aggregator.next(state, updates)
    _, found = aggregator.release(state, sums, 4, updates[0])
    np.testing.assert_array_equal(found, expected)
    with refuses("int64", error=TypeError):
        aggregator.release(state, [total.astype(float) for total in sums], 4, updates[0])
    with refuses("shape"):
        aggregator.release(state, [total[:1] for total in sums], 4, updates[0])
    with refuses("sums must be 1 arrays", "found 2"):
        aggregator.release(state, [*sums, *sums], 4, updates[0])


def test_a_sum_that_no_records_have_is_refused() -> None:
    """A residue of a sum about zero moves by 2^32 steps with one client, under the same noise."""
    aggregator = _aggregator(secure_aggregation_bits=32, largest_cohort=2)
    state = aggregator.initialize()
    ((total,),) = (aggregator.record(state, np.array([0.2, -0.1])),)
    following, _ = aggregator.release(state, [2 * total], 2, np.zeros(2))
    for number, sums in [(1, total % 2**32), (2, total % 2**32), (0, total)]:
        with refuses("sign"):
            aggregator.release(following, [sums], number, np.zeros(2))
    # The largest that there is, either way.
    (largest,) = aggregator.record(state, np.array([3.0, 0.0]))
    for sign in (-2, 2):
        assert aggregator.release(following, [sign * largest], 2, np.zeros(2))[0].round_index == 2
        following = aggregator.release(aggregator.initialize(), [total], 1, np.zeros(2))[0]
    for longer in (2 * largest + 1, -2 * largest - 1):
        with refuses("sign"):
            aggregator.release(following, [longer], 2, np.zeros(2))


def test_of_two_threads_one_releases(tmp_path: pathlib.Path) -> None:
    """Both have looked whether the round was released before one of them has recorded it."""
    both = threading.Barrier(2)

    class Slow(dict[tuple[str, int], bytes]):
        def get(self, *arguments: Any) -> Any:
            found = super().get(*arguments)
            both.wait(10.0)
            return found

        def setdefault(self, *arguments: Any) -> Any:
            both.wait(10.0)
            return super().setdefault(*arguments)

    aggregator = _aggregator()
    aggregator._release.record._digests = Slow()
    state = aggregator.initialize()

    def release(value: float) -> bool:
        try:
            aggregator.next(state, [np.full(3, value)])
        except ReleaseError:
            return False
        return True

    with futures.ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(release, [0.1, 0.2])) == [False, True]


def test_seeds_are_drawn_anew_and_are_not_printed() -> None:
    aggregator = _aggregator(template=np.ones(2))
    one, other = aggregator.initialize(), aggregator.initialize()
    assert not np.array_equal(one.noise.seed, other.noise.seed)
    assert not np.array_equal(one.noise.stream, other.noise.stream)
    assert str(one.noise.seed[0]) not in repr(one)
    assert "history" not in repr(one)
    with pytest.warns(FixedSeedWarning):
        mfa.Aggregator(_mechanism(), 1.0, 2.0, seed=1)


@pytest.mark.parametrize(
    ("changes", "named", "error"),
    [
        ({"clip_norm": 0.0}, "clip_norm", ValueError),
        ({"clip_norm": 1e39}, "clip_norm", ValueError),
        ({"clip_norm": 1e30}, "clip_norm", ValueError),
        ({"clients_per_round": -1.0}, "clients_per_round", ValueError),
        ({"clients_per_round": 1e-46}, "clients_per_round", ValueError),
        ({"clip_norm": 1e20, "clients_per_round": 1e-20}, "clients_per_round", ValueError),
        ({"clip_norm": 1e-30, "clients_per_round": 1e9}, "clients_per_round", ValueError),
        (
            {"clip_norm": mfa.AdaptiveClip(1e20), "clients_per_round": 1e-8},
            "largest_norm",
            ValueError,
        ),
        ({"clip_norm": 1e7, "template": np.ones(2, np.float16)}, "float16", ValueError),
        ({"clip_norm": 1e-8, "template": np.ones(2, np.float16)}, "float16", ValueError),
        ({"noise_storage": "auto"}, "noise_storage", ValueError),
        ({"noise_storage": "tape"}, "noise_storage", ValueError),
        ({"noise_source": "dice"}, "noise_source", ValueError),
        ({"secure_aggregation_bits": 70}, "secure_aggregation_bits", ValueError),
        ({"largest_cohort": 1}, "largest_cohort", ValueError),
        ({"seed": -1}, "seed", ValueError),
        ({"mechanism": "directory"}, "mechanism", TypeError),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], named: str, error: type) -> None:
    with refuses(named, error=error):
        _aggregator(**changes)


@given(
    st.floats(-45.0, 45.0),
    st.floats(-50.0, 12.0),
    st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.booleans(),
)
@settings(deadline=None, max_examples=examples(400))
def test_no_release_is_infinite_or_zero(
    norm: float, clients: float, noise_multiplier: float, dtype: type, adapts: bool
) -> None:
    """Whatever the clip norm, the cohort and the noise: they are refused, or give a mean."""
    chosen: dict[str, Any] = {"clip_norm": 10.0**norm, "clients_per_round": 10.0**clients}
    update: Any = np.full(20, 10.0**norm if 10.0**norm < np.finfo(dtype).max else 1.0, dtype)
    try:
        if adapts:
            chosen["clip_norm"] = mfa.AdaptiveClip(10.0**norm)
        aggregator = _aggregator(
            _mechanism(noise_multiplier), template=update, allow_no_noise=True, **chosen
        )
    except ValueError:
        return
    _, mean = aggregator.next(aggregator.initialize(), [update])
    assert np.all(np.isfinite(mean))
    assert np.any(mean) or noise_multiplier == 0.0


def test_no_noise_has_to_be_asked_for() -> None:
    with refuses("allow_no_noise"):
        _aggregator(_mechanism(0.0))


def test_a_run_that_is_extended_goes_on_from_its_state(tmp_path: pathlib.Path) -> None:
    """Rows of noise of the first horizon stay what they were, bit for bit."""
    factorization = mfa.factorizations.blt(_NUM_ROUNDS, 2)
    first = mfa.Mechanism(factorization, mfa.participation.MinSeparation(3, 2), 1.0)
    whole = first.extended(2 * _NUM_ROUNDS, num_parameters=10, storage="state")
    begun = _aggregator(first, seed=5)
    *_, (state, _) = _states(begun, begun.initialize(), _NUM_ROUNDS)
    begun.save_state(state, tmp_path / "state.npz")
    longer = _aggregator(whole, seed=5)
    state, _ = longer.next(longer.load_state(tmp_path / "state.npz"), [np.ones(5)])
    assert state.round_index == _NUM_ROUNDS + 1
    again = _aggregator(whole, seed=5)
    for (_, one), (_, other) in zip(
        _states(begun2 := _aggregator(first, seed=5), begun2.initialize(), _NUM_ROUNDS),
        _states(again, again.initialize(), _NUM_ROUNDS),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def _extendable(num_rounds: int, kind: int) -> Factorization:
    return (
        mfa.factorizations.identity,
        mfa.factorizations.tree_aggregation,
        mfa.factorizations.toeplitz,
        lambda rounds: mfa.factorizations.toeplitz(rounds, coefficients="square_root"),
        lambda rounds: mfa.factorizations.toeplitz(rounds, min(2, rounds)),
        lambda rounds: mfa.factorizations.banded(rounds, min(3, rounds)),
        lambda rounds: small_mechanisms.blt(rounds, 2),
    )[kind](num_rounds)


@given(st.data())
@settings(
    deadline=None,
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_rows_of_an_extended_run_are_those_of_its_whole_matrix(
    tmp_path: pathlib.Path, data: st.DataObject
) -> None:
    """From a state of any round of any horizon, saved or not, and extended once or twice."""
    more = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    rounds = int(data.draw(st.integers(1, 7)))
    made = _extendable(rounds, data.draw(st.integers(0, 6)))
    storage = data.draw(st.sampled_from(["state", "disk"]))
    schema = mfa.participation.MinSeparation(data.draw(st.integers(1, rounds)))
    horizons = [mfa.Mechanism(made, schema, 1.5)]
    for number in more:
        rounds = min(rounds + number, 4 * made.num_rounds)
        if rounds > horizons[-1].num_rounds:
            try:
                longer = horizons[-1].extended(rounds, num_parameters=70, storage=storage)
            except ValueError as error:
                # Rows of a tree grow beyond the integers that a run began with.
                assume("extend it by less" not in str(error))
                raise
            horizons.append(longer)
    whole = horizons[-1]
    options: dict[str, Any] = {"noise_storage": storage, "template": np.zeros(70), "seed": 11}
    last = _aggregator(whole, **options)
    state = start = last.initialize()
    planned = []
    for _ in range(whole.num_rounds):
        state, release = last.next(state, [])
        planned.append(release)
    # Of Z, all of it, and the dense matrix.
    z = [
        draws.integers(DEFAULT_SOURCE, start.noise.seed, i, 0, 70) for i in range(whole.num_rounds)
    ]
    matrix = noise_rows.dense(whole.factorization.noise_recursion())
    expected = horizons[0].sigma * (matrix @ np.array(z, np.float64)) * draws.STEP
    np.testing.assert_allclose(np.array(planned) * 2.0, expected, rtol=1e-5, atol=1e-5)
    state, released = _aggregator(horizons[0], **options).initialize(), []
    for horizon in horizons:
        aggregator = _aggregator(horizon, **options)
        if data.draw(st.booleans()):
            aggregator.save_state(state, tmp_path / "state.npz")
            state = aggregator.load_state(tmp_path / "state.npz")
        least = whole.num_rounds if horizon is whole else 0
        for _ in range(
            state.round_index, max(least, data.draw(st.integers(0, horizon.num_rounds)))
        ):
            state, release = aggregator.next(state, [])
            released.append(release)
    np.testing.assert_array_equal(released, planned)


@pytest.mark.parametrize(
    "changes",
    [
        {"largest_cohort": 2**32},
        {"secure_aggregation_bits": 50},
        {"noise_storage": "disk"},
        {"clip_norm": 2.0},
        {"clients_per_round": 3.0},
        {"mechanism": _mechanism(2.0)},
        {"mechanism": _mechanism(1.0, 3)},
    ],
)
def test_no_other_aggregator_goes_on_from_a_state(
    changes: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """In other steps, sums beside the same row of noise would tell what they are."""
    aggregator, other = _aggregator(), _aggregator(**changes)
    state, _ = aggregator.next(aggregator.initialize(), [np.ones(3)])
    with refuses("another aggregator", error=ReleaseError):
        other.next(state, [np.ones(3)])
    aggregator.save_state(state, tmp_path / "state.npz")
    with refuses("state.npz", error=StateError):
        other.load_state(tmp_path / "state.npz")
    with refuses("another aggregator", error=ReleaseError):
        other.save_state(state, tmp_path / "other.npz")
    # An aggregator that is made again is the same.
    assert _aggregator().next(state, [np.ones(3)])[0].round_index == 2


def test_a_state_of_one_extension_is_none_of_another(tmp_path: pathlib.Path) -> None:
    """The whole would be a matrix of neither, with a larger sensitivity than both."""
    first = mfa.Mechanism(
        mfa.factorizations.banded(8, num_bands=4), mfa.participation.MinSeparation(4), 1.0
    )
    longer, shorter = (
        _aggregator(first.extended(rounds, num_parameters=3, storage="state"))
        for rounds in (48, 16)
    )
    state = longer.initialize()
    for _ in range(10):
        state, _ = longer.next(state, [np.ones(3)])
    longer.save_state(state, tmp_path / "state.npz")
    with refuses("state.npz", error=StateError):
        shorter.load_state(tmp_path / "state.npz")
    with refuses("another aggregator", error=ReleaseError):
        shorter.next(state, [np.ones(3)])
    assert longer.load_state(tmp_path / "state.npz").round_index == 10


def test_an_extended_run_is_checked_for_the_size_of_its_updates(tmp_path: pathlib.Path) -> None:
    """The mechanism is stated for no rounding; rows of integers have less noise than that."""
    first = mfa.Mechanism(
        mfa.factorizations.blt(_NUM_ROUNDS, 2), mfa.participation.MinSeparation(3, 2), 1.0
    )
    begun, whole = _aggregator(first), _aggregator(first.extended(2 * _NUM_ROUNDS))
    state, _ = begun.next(begun.initialize(), [np.ones(1000)])
    begun.save_state(state, tmp_path / "state.npz")
    with refuses("noise multiplier"):
        whole.next(state, [np.ones(1000)])
    with refuses("state.npz", error=StateError):
        whole.load_state(tmp_path / "state.npz")


def test_a_drawn_number_of_clients_needs_a_template() -> None:
    scheme = mfa.participation.PoissonSampling(_NUM_ROUNDS, 1, 50, 5)
    mechanism = mfa.Mechanism(mfa.factorizations.identity(_NUM_ROUNDS), scheme, 1.0)
    with refuses("template"):
        _aggregator(mechanism).initialize()
    aggregator = _aggregator(mechanism).with_template(np.zeros(3))
    assert aggregator.next(aggregator.initialize(), [])[1].shape == (3,)


def test_states_are_values() -> None:
    aggregator = _aggregator(seed=1)
    state, _ = aggregator.next(aggregator.initialize(), [np.ones(4)])
    before = [history.copy() for history in state.noise.histories]
    aggregator.next(state, [np.zeros(4)])
    for one, other in zip(before, state.noise.histories, strict=True):
        np.testing.assert_array_equal(one, other)
    assert dataclasses.replace(state).round_index == 1
