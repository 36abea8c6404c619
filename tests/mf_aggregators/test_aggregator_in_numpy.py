"""The aggregator in NumPy by itself: means, what is refused, states; ``tff`` compares its bits."""

import dataclasses
import json
import pathlib
import pickle
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.aggregator import ReleaseError, StateError
from mf_aggregators.kernel.release import ReleaseRecord
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
        state, release = aggregator.next(state, list[np.ndarray]())
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


def test_a_row_is_not_added_twice_under_another_clip_norm(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of a state may go on with other norms, and the same sum in steps of them."""
    clip = mfa.AdaptiveClip(1.0, update_period=1)
    aggregator = _aggregator(clip_norm=clip)
    state = aggregator.initialize()
    # An aggregator of another directory shares the record, and one of another process does not.
    with refuses("other data", error=ReleaseError):
        for number, name in enumerate(("one", "other")):
            beside = _aggregator(clip_norm=clip, noise_directory=tmp_path / name)
            beside.next(state, [np.full(2, 9.0 * number)] * 2)
    monkeypatch.setattr(ReleaseRecord, "_of_process", {})
    copy = _aggregator(clip_norm=clip)
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
    aggregator = aggregator.with_template(np.ones(3))
    assert aggregator.next(aggregator.initialize(), list[np.ndarray]())[1].shape == (3,)


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
    with refuses("accessible to other users", f"chmod 600 {path}", error=StateError):
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


def test_of_two_threads_one_releases(tmp_path: pathlib.Path) -> None:
    """Both have looked whether the round was released before one of them has recorded it."""
    both = threading.Barrier(2)

    class Slow(dict[tuple[str, int], bytes]):
        def get(self, *arguments: Any) -> Any:
            found = super().get(*arguments)
            both.wait(120.0)
            return found

        def setdefault(self, *arguments: Any) -> Any:
            both.wait(120.0)
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
        (
            {"clip_norm": mfa.AdaptiveClip(clipped_count_stddev=1e30)},
            "clipped_count_stddev",
            ValueError,
        ),
        ({"clip_norm": 1e7, "template": np.ones(2, np.float16)}, "float16", ValueError),
        ({"clip_norm": 1e-8, "template": np.ones(2, np.float16)}, "float16", ValueError),
        ({"noise_storage": "auto"}, "noise_storage", ValueError),
        ({"noise_storage": "tape"}, "noise_storage", ValueError),
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


def test_grids_that_are_too_coarse_are_refused() -> None:
    options: dict[str, Any] = {"secure_aggregation_bits": 24, "clients_per_round": 1000.0}
    # sqrt(d) / (2 * 8388) is 5 per cent of a clip norm at 703,000 numbers.
    _aggregator(template=np.zeros(700_000), **options)
    with refuses("clip norms", "secure_aggregation_bits"):
        _aggregator(template=np.zeros(710_000), **options)
    with refuses("secure_aggregation_bits", "fraction"):
        _aggregator(
            clip_norm=mfa.AdaptiveClip(1.0), clients_per_round=5000.0, secure_aggregation_bits=24
        )


def test_only_a_record_in_a_directory_is_pickled(tmp_path: pathlib.Path) -> None:
    """A temporary directory ends with the process that made it, and is none."""
    for storage in ("state", "disk"):
        with refuses("noise_directory", error=ReleaseError):
            pickle.dumps(_aggregator(noise_storage=storage))
    aggregator = _aggregator(noise_directory=tmp_path / "noise")
    state = aggregator.initialize()
    aggregator.next(state, [np.array([0.1, 0.2])])
    with refuses("other data", error=ReleaseError):
        pickle.loads(pickle.dumps(aggregator)).next(state, [np.array([0.1, 0.3])])


@pytest.mark.parametrize("before", [None, "one"])
def test_no_other_directory_or_forked_process_has_a_row_of_a_state(
    before: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state, update = _aggregator(noise_directory=before).initialize(), np.zeros(2)
    if before is None:
        monkeypatch.setattr("os.getpid", lambda: -1)
    for directory in (None, "other"):
        options: dict[str, Any] = {"template": update, "noise_directory": directory}
        with refuses("forked", error=ReleaseError):
            _aggregator(**options).next(state, [update])
        with refuses("forked", error=ReleaseError):
            _aggregator(**options).spend(state)
    if before is not None:
        monkeypatch.setattr("os.getpid", lambda: -1)
        _aggregator(noise_directory=tmp_path / before).next(state, [update])
        # There, the same relative path is another directory.
        monkeypatch.chdir("other")
        with refuses("forked", error=ReleaseError):
            _aggregator(noise_directory=before).next(state, [update])


def test_no_noise_has_to_be_asked_for() -> None:
    options: list[dict[str, Any]] = [{}, {"allow_no_noise": "no"}]
    for each in options:
        with refuses("allow_no_noise"):
            _aggregator(_mechanism(0.0), **each)


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


def test_an_extended_run_is_checked_for_the_size_of_its_updates(tmp_path: pathlib.Path) -> None:
    """The mechanism is stated for no rounding; rows of integers have less noise than that."""
    first = mfa.Mechanism(
        mfa.factorizations.blt(_NUM_ROUNDS, 2), mfa.participation.MinSeparation(3, 2), 1.0
    )
    begun, whole = _aggregator(first), _aggregator(first.extended(2 * _NUM_ROUNDS))
    state, _ = begun.next(begun.initialize(), [np.ones(1000)])
    begun.save_state(state, tmp_path / "state.npz")
    with refuses("num_parameters"):
        whole.next(state, [np.ones(1000)])
    with refuses("state.npz", error=StateError):
        whole.load_state(tmp_path / "state.npz")


def test_a_drawn_number_of_clients_needs_a_template() -> None:
    scheme = mfa.participation.PoissonSampling(_NUM_ROUNDS, 1, 50, 5)
    mechanism = mfa.Mechanism(mfa.factorizations.identity(_NUM_ROUNDS), scheme, 1.0)
    with refuses("template"):
        _aggregator(mechanism).initialize()
    aggregator = _aggregator(mechanism).with_template(np.zeros(3))
    assert aggregator.next(aggregator.initialize(), list[np.ndarray]())[1].shape == (3,)
