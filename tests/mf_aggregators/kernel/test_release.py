"""Releases against their definition: clipped sums plus rows of C^-1 Z, added as integers."""

import copy
import dataclasses
import itertools
import math
import os
import pathlib
import pickle
import secrets
import stat
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import tree_aggregation
from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.kernel import draws
from mf_aggregators.kernel import release as kernel_release
from mf_aggregators.kernel.claim import Claim
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.integers import IntegerRows, IntegerSums, Rounding, RowLayout, Segment
from mf_aggregators.kernel.numbers import NotProved, ReleaseError
from mf_aggregators.kernel.release import Release, ReleaseRecord, ReleaseState, RowsInFiles
from mf_aggregators.kernel.rows import (
    BandedNoise,
    Blocks,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)
from mf_aggregators.kernel.sensitivity import Schema
from tests.examples import examples
from tests.mf_aggregators.random_recursions import banded_rows, toeplitz_rows

_ROUNDS, _NORM, _SIGMA = 6, 2.0, 3.0
_LAYOUT = RowLayout(((2, 3), (), (4,)), ("float32", "float64", "float32"))
_SCALES = [1.0, 2.0, 0.5]
_ONE, _OTHER, _OF_NOISE = b"1" * 32, b"2" * 32, b"n" * 32


def _bands(num_rounds: int = _ROUNDS) -> np.ndarray:
    return np.tril(np.full((num_rounds, 3), 1.0))[:, :3] * [2.0, -1.0, 0.5]


def _claim(sigma: float = _SIGMA, rows: Any = None, **changes: Any) -> Claim:
    rows = banded_rows(_bands()) if rows is None else rows
    return Claim(rows, Schema(1, 1), sigma, 1e-6, **changes)


def _release(claim: Claim | None = None, **changes: Any) -> Release:
    options: dict[str, Any] = {"layout": _LAYOUT, **changes}
    norm, sums = options.pop("norm", _NORM), options.pop("sums", IntegerSums())
    return Release((*options.pop("earlier", ()), claim or _claim()), norm, sums, **options)


def _vectors(seed: int, number: int, size: float = 1.0) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [
        [np.asarray(generator.normal(0.0, size, shape)) for shape in _LAYOUT.shapes]
        for _ in range(number)
    ]


def _flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in arrays])


@given(st.integers(0, 2**32 - 1), st.integers(0, 4), st.sampled_from([1e-3, 1.0, 50.0]))
@settings(deadline=None, max_examples=examples(10))
def test_a_release_is_the_clipped_sum_plus_the_row(seed: int, number: int, size: float) -> None:
    release = _release()
    state, vectors = release.start(), _vectors(seed, number, size)
    matrix = np.zeros((_ROUNDS, _ROUNDS))
    for i, t in itertools.product(range(_ROUNDS), range(3)):
        if i >= t:
            matrix[i, i - t] = _bands()[i, t]
    clipped = np.zeros(11)
    for vector in vectors:
        clipped += _flat(vector) * min(1.0, _NORM / float(np.linalg.norm(_flat(vector))))
    # Float32 tensors come first, and float64 ones begin a tile.
    places = [*range(6), draws.TILE, *range(6, 10)]
    z = np.array(
        [[draws.integers(state.seed, i, at, 1)[0] for at in places] for i in range(_ROUNDS)]
    )
    expected = np.linalg.solve(matrix, z / draws.STANDARD_DEVIATION) * _SIGMA * _NORM
    scales = np.repeat(_SCALES, [6, 1, 4])
    for i in range(_ROUNDS):
        state, released = release.next(state, vectors, _SCALES)
        assert [array.shape for array in released] == [*_LAYOUT.shapes]
        np.testing.assert_allclose(
            _flat(released), (clipped + expected[i]) * scales, rtol=1e-6, atol=1e-5
        )
    assert state.round_index == release.num_rounds == _ROUNDS
    with pytest.raises(ReleaseError, match="6 rounds"):
        release.next(state, vectors, _SCALES)


@given(st.data())
@settings(deadline=None, max_examples=examples(40))
def test_one_client_moves_the_integers_of_a_sum_by_the_norm_at_most(data: st.DataObject) -> None:
    """Whatever it sends: in exact integers, before noise."""
    entry = st.one_of(
        st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([1e-300, 1e300, math.nan])
    )
    entries = data.draw(st.lists(entry, min_size=11, max_size=11))
    sums = IntegerSums(data.draw(st.integers(1, 1000)), data.draw(st.integers(32, 64)))
    release = _release(sums=sums)
    vector = [np.array(entries[:6]).reshape(2, 3), np.array(entries[6]), np.array(entries[7:])]
    steps = [int(each) for each in _flat(release.clipped(vector))]
    assert sum(each**2 for each in steps) <= sums.steps_per_clip_norm**2
    if not np.all(np.isfinite(entries)):
        assert not any(steps)


def test_a_row_is_added_to_one_sum_in_one_way(tmp_path: pathlib.Path) -> None:
    release = _release(record=ReleaseRecord(tmp_path))
    state, vectors = release.start(), _vectors(1, 2)
    _, first = release.next(state, vectors, _SCALES)
    _, again = _release(record=ReleaseRecord(tmp_path)).next(state, vectors[::-1], _SCALES)
    np.testing.assert_array_equal(_flat(first), _flat(again))
    for others, scales in ((vectors[:1], _SCALES), (vectors, [1.0, 2.0, 0.25])):
        with pytest.raises(ReleaseError, match="other data"):
            release.next(state, others, scales)
    following = release.spend(state)
    with pytest.raises(ReleaseError, match="spent"):
        release.next(state, vectors, _SCALES)
    assert release.next(following, vectors, _SCALES)[0].round_index == 2


def test_sums_that_no_records_have_are_refused() -> None:
    release = _release(sums=IntegerSums(2))
    state, most = release.start(), 2**30
    zeros = [np.zeros(shape, np.int64) for shape in _LAYOUT.shapes]
    for error, text, sums, number in (
        (ValueError, "3 arrays", zeros[:2], 1),
        (ValueError, "shape", [*zeros[:2], np.zeros(3, np.int64)], 1),
        (TypeError, "int64", [*zeros[:2], np.zeros(4)], 1),
        (TypeError, "list", [*zeros[:2], [0, 0, 0, 0]], 1),
        (TypeError, "MaskedArray", [*zeros[:2], np.ma.zeros(4, np.int64)], 1),
        (ValueError, "sign", [*zeros[:2], np.array([0, 0, 0, most + 1])], 1),
        (ValueError, "sign", [*zeros[:2], np.array([0, -2 * most - 1, 0, 0])], 2),
        (ValueError, "sign", [*zeros[:2], np.array([0, 1, 0, 0])], 0),
        (ValueError, "num_clients", zeros, -1),
        (ReleaseError, "More than 2", zeros, 3),
    ):
        with pytest.raises(error, match=text):
            release.release(state, sums, number, _SCALES)  # type: ignore[arg-type]
    with pytest.raises(ReleaseError, match="More than 2"):
        release.next(state, _vectors(1, 3), _SCALES)
    with pytest.raises(ValueError, match="shapes"):
        release.next(state, [_vectors(1, 1)[0][::-1]], _SCALES)
    largest = [*zeros[:2], np.array([0, 2 * most, 0, -2 * most])]
    assert release.release(state, largest, 2, _SCALES)[0].round_index == 1


def test_without_noise_sums_are_released_as_they_are() -> None:
    release = _release(_claim(0.0), sums=IntegerSums(2))
    state, vectors = release.start(), _vectors(1, 2, 0.1)
    assert (release.has_noise, release.stddev) == (False, 0.0)
    assert _release(_claim(1e-4), sums=IntegerSums(2)).has_noise
    for number in (2, 1):
        following, released = release.next(state, vectors[:number], _SCALES)
        total = sum(map(_flat, vectors[:number]), np.zeros(11)) * np.repeat(_SCALES, [6, 1, 4])
        np.testing.assert_allclose(_flat(released), total, atol=1e-7)
    assert release.spend(following).round_index == 2


_OTHERS: list[dict[str, Any]] = [
    {"claim": _claim(math.nextafter(3.0, 4.0))},
    {"claim": _claim(rows=banded_rows(np.nextafter(_bands(), 4.0)))},
    {"claim": _claim(num_rounds=5)},
    {"norm": math.nextafter(2.0, 3.0)},
    {"sums": IntegerSums(2**35)},
    {"layout": RowLayout(((11,),), ("float32",))},
    {"is_on_disk": True},
    {"label": "other"},
]


@pytest.mark.parametrize("changes", _OTHERS, ids=lambda changes: next(iter(changes)))
def test_digests_bind_what_bits_follow_from(changes: dict[str, Any]) -> None:
    release, other = _release(), _release(**changes)
    assert release.digest != other.digest
    assert release.digest == _release().digest
    state = release.start()
    if "layout" not in changes:
        with pytest.raises(ReleaseError, match="another"):
            other.spend(state)
    following = release.spend(state)
    for use in (other.spend, other.arrays_of):
        with pytest.raises(ReleaseError, match="another"):
            use(following)
    # What a release does not depend on.
    assert _release(dataclasses.replace(_claim(), delta=0.1)).digest == release.digest


def test_states_of_another_arithmetic_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of_now = _release()
    state = of_now.spend(of_now.start())
    monkeypatch.setattr(kernel_release, "NOISE_FORMAT", draws.NOISE_FORMAT - 1)
    with pytest.raises(ReleaseError, match="options or version"):
        _release().arrays_of(state)


def test_roundings_of_blocks_are_paid_for() -> None:
    claim = _claim(rows=tree_aggregation(300).noise_recursion())
    in_state, on_disk = (_release(claim, is_on_disk=each) for each in (False, True))
    rows, blocks = in_state.rows, on_disk.blocks
    assert Rounding.of(rows, blocks).float_error > 2.0 * Rounding.of(rows).float_error
    assert on_disk.stddev > in_state.stddev


def test_the_layout_may_come_later() -> None:
    early = _release(layout=None)
    state = early.start()
    with pytest.raises(ValueError, match="with_layout"):
        early.next(state, [], [])
    release = early.with_layout(_LAYOUT)
    assert release.digest == _release().digest != early.digest
    assert release.with_layout(_LAYOUT) is release
    following, _ = release.next(state, _vectors(1, 1), _SCALES)
    with pytest.raises(ReleaseError, match="another"):
        early.with_layout(RowLayout(((11,),), ("float32",))).spend(following)
    # Neither is a later state one of a run that is yet to begin.
    with pytest.raises(ReleaseError, match="another"):
        early.arrays_of(following)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_states_are_written_and_read(is_on_disk: bool, tmp_path: pathlib.Path) -> None:
    release = _release(is_on_disk=is_on_disk, directory=tmp_path)
    state = release.start()
    for i in range(3):
        arrays = release.arrays_of(state)
        found = release.state_of(arrays)
        assert found.round_index == i
        following, released = release.next(state, _vectors(i, 2), _SCALES)
        _, again = release.next(found, _vectors(i, 2), _SCALES)
        np.testing.assert_array_equal(_flat(released), _flat(again))
        for name, array in arrays.items() if i % 2 else ():
            changed = np.array(array)
            changed.flat[-1] += 1
            with pytest.raises((ValueError, ReleaseError)):
                release.state_of({**arrays, name: changed})
        if i:
            histories = [name for name in arrays if name.startswith("history")]
            assert bool(histories) is not is_on_disk
            for name in histories:
                others = {other: arrays[other] for other in arrays if other != name}
                with pytest.raises(ValueError, match="written"):
                    release.state_of(others)
        state = following
    with pytest.raises(KeyError):
        release.state_of({})


def test_states_and_releases_are_made_and_altered_by_nobody_else() -> None:
    release = _release()
    state = release.start()
    assert copy.copy(state) is state
    assert copy.deepcopy([state, release])[1] is release
    assert str(int(state.seed[0])) not in repr(state)
    attempts: tuple[Any, ...] = (ReleaseState, lambda: pickle.dumps(state))
    for make in attempts:
        with pytest.raises(TypeError):
            make()
    for kind in (Release, ReleaseState):
        with pytest.raises(TypeError, match="no subclasses"):
            type("Other", (kind,), {})
    for each, name in ((state, "round_index"), (release, "norm")):
        with pytest.raises(AttributeError):
            setattr(each, name, 0)
        with pytest.raises(AttributeError):
            delattr(each, name)
    following = release.spend(state)
    for array in (following.seed, following.stream, *itertools.chain(*following.histories)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(TypeError, match="state"):
        release.spend("state")  # type: ignore[arg-type]
    for wrong in ({"sums": 64}, {"record": {}}, {"earlier": [1]}):
        with pytest.raises(TypeError):
            _release(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Release(["claim"], 1.0, IntegerSums())  # type: ignore[list-item]
    for norm in (0.0, 1e-260):
        with pytest.raises(ValueError, match="norm"):
            _release(norm=norm)


def test_seeds_are_fresh_unless_they_are_given() -> None:
    release = _release()
    states = [release.start() for _ in range(3)]
    secrets = {int(number) for state in states for number in (*state.seed, *state.stream)}
    assert len(secrets) == 12
    fixed = np.array([1, 2])
    assert release.start(fixed).seed.tolist() == [1, 2]
    assert release.start(fixed).stream_name != release.start(fixed).stream_name
    fixed[0] = 3


def test_copies_in_other_processes_are_made_anew(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ReleaseError, match="cannot be pickled"):
        pickle.dumps(_release())
    release = _release(record=ReleaseRecord(tmp_path), label="mine", directory=tmp_path)
    other = pickle.loads(pickle.dumps(release))
    assert other.digest == release.digest
    assert other.stddev == release.stddev


# ----- Extended runs.


def _extended(sigma: float, first: Any, whole: Any, **changes: Any) -> Release:
    return _release(_claim(sigma, whole), earlier=[_claim(rows=first)], **changes)


def _state_space(num_rounds: int) -> StateSpaceNoise:
    return StateSpaceNoise(
        phases=np.zeros(num_rounds, np.int64),
        gains=np.array([0.5]),
        outputs=np.array([[0.25]]),
        sources=np.array([[0]]),
        decays=np.array([[0.9]]),
        feedbacks=np.array([[-0.5]]),
    )


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda rounds: banded_rows(_bands(rounds)),
        lambda rounds: toeplitz_rows(rounds, np.array([1.0, 0.5])),
        lambda rounds: dense_rows(np.tril(np.ones((rounds, rounds)))),
        _state_space,
    ],
)
def test_extended_runs_go_on_with_their_noise(
    make: Any, is_on_disk: bool, tmp_path: pathlib.Path
) -> None:
    options: dict[str, Any] = {"is_on_disk": is_on_disk, "directory": tmp_path}
    begun = _release(_claim(rows=make(4)), **options)
    whole = _extended(0.99 * _SIGMA, make(4), make(9), **options)
    assert whole.stddev == begun.stddev
    # Roundings of more rounds take a little.
    assert 0.999 * _SIGMA < whole.covered(11) < _SIGMA
    assert begun.covered(11) == _SIGMA
    fixed = np.array([3, 4])
    planned, state = [], whole.start(fixed)
    for _ in range(9):
        state, released = whole.next(state, [], _SCALES)
        planned.append(_flat(released))
    noises = [ReleaseRecord._of_process[state.stream_name, i][32:] for i in (3, 4)]
    assert noises == [digest for _, digest in whole.noise_digests]
    state, found = begun.start(fixed), []
    for i in range(9):
        release = begun if i < 3 else whole
        state, released = release.next(state, [], _SCALES)
        found.append(_flat(released))
    np.testing.assert_array_equal(found, planned)
    with pytest.raises(ReleaseError, match="another"):
        begun.spend(state)
    # Nor does an extension of other length.
    with pytest.raises(ReleaseError, match="another"):
        _extended(0.99 * _SIGMA, make(4), make(12), **options).spend(state)


def test_extended_runs_claim_no_more_noise_than_they_draw() -> None:
    first, whole = banded_rows(_bands(4)), banded_rows(_bands(9))
    covered = _extended(0.0, first, whole).covered(11)
    _extended(covered, first, whole)
    for sigma in (covered * (1.0 + 1e-9), _SIGMA):
        with pytest.raises(NotProved, match="covers"):
            _extended(sigma, first, whole)
    # Rows stay in the steps they began with, though 20 standard deviations need coarser ones.
    one = IntegerRows.of(dense_rows(np.eye(1)))
    longer = dense_rows(np.array([[1.0, 0.0], [1.47, 1.0]]))
    assert _extended(1.0, one.recursion, longer).rows.shift == one.shift
    assert IntegerRows.of(longer).shift > one.shift
    # Without a layout nothing is released yet.
    assert _extended(_SIGMA, first, whole, layout=None).stddev == 0.0
    nothing = _release(_claim(0.0, whole), earlier=[_claim(0.0, first)])
    assert nothing.covered(11) == 0.0
    # Nor does a horizon that was extended once more.
    for sigmas in ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (_SIGMA, 9.0, 1.0), (_SIGMA, _SIGMA, 1.0)):
        claims = [_claim(*each) for each in zip(sigmas, (first, whole, whole), strict=True)]
        with pytest.raises(NotProved, match="covers"):
            _release(claims[-1], earlier=claims[:-1])


def test_extended_rows_begin_with_those_before() -> None:
    first, other = _bands(4), _bands(9)
    for place, change in (((3, 1), 1e-12), ((2, 0), 1e-12)):
        whole = other.copy()
        whole[place] += change
        with pytest.raises(NotProved, match="continued"):
            _extended(1.0, banded_rows(first), banded_rows(whole))
    with pytest.raises(NotProved, match="continued"):
        _extended(1.0, dense_rows(np.diag([1.0, 2.0])), dense_rows(np.diag([1.0, 3.0, 1.0])))
    with pytest.raises(NotProved, match="continued"):
        _extended(1.0, banded_rows(np.ones((4, 1))), banded_rows(np.ones((3, 1))))
    # Weights of rows of Z are none of rows of the noise.
    of_z = WindowNoise(9, np.array([[1.0, 0.7]]), *np.zeros((2, 9, 0)))
    kinds = [toeplitz_rows(9, np.array([1.0, -0.7])), of_z]
    for before, after in (kinds, kinds[::-1]):
        with pytest.raises(NotProved, match="continued"):
            _extended(1.0, before, after)
    # As little noise as there is, is noise.
    assert _extended(0.1, banded_rows(first), banded_rows(other), layout=None).has_noise
    for shorter in (banded_rows(_bands(3)), toeplitz_rows(9, np.array([2.0, -1.0, 0.4]))):
        with pytest.raises(NotProved, match="continued"):
            _extended(1.0, banded_rows(first), shorter)


def test_claims_of_other_rows_or_of_fewer_numbers_are_refused() -> None:
    class Other(BandedNoise):
        pass

    with pytest.raises(NotProved, match="classes"):
        _release(_claim(rows=Other(6, _bands())))
    with pytest.raises(NotProved, match="6 rounds"):
        _release(_claim(num_rounds=7))
    with pytest.raises(NotProved, match="numbers"):
        _release(_claim(num_coordinates=65))
    _release(_claim(num_coordinates=66))
    with pytest.raises(ValueError, match="numbers of noise"):
        _release(layout=RowLayout(((2**39,),), ("float32",)))
    few = _release(_claim(num_rounds=2))
    state = few.spend(few.spend(few.start()))
    with pytest.raises(ReleaseError, match="2 rounds"):
        few.spend(state)


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_row_has_one_sum(has_directory: bool, tmp_path: pathlib.Path) -> None:
    one, other = (ReleaseRecord(tmp_path if has_directory else None) for _ in range(2))
    stream = str(tmp_path.name)
    one.check(stream, 0, _ONE, _OF_NOISE)
    for record in (one, other):
        record.check(stream, 0, _ONE, _OF_NOISE)
        with pytest.raises(ReleaseError, match="other data"):
            record.check(stream, 0, _OTHER, _OF_NOISE)
    # Other rows, and rows of other streams, are others.
    other.check(stream, 1, _OTHER, _OF_NOISE)
    other.check(f"{stream}-other", 0, _OTHER, _OF_NOISE)
    other.spend(stream, 0)
    for found in (_ONE, _OTHER):
        with pytest.raises(ReleaseError, match="spent"):
            other.check(stream, 0, found, _OF_NOISE)
    # One that knows the sum asks the directory again.
    with pytest.raises(ReleaseError, match="spent"):
        one.check(stream, 0, _ONE, _OF_NOISE)
    other.spend(stream, 2)
    with pytest.raises(ReleaseError, match="Round 2 was spent"):
        one.check(stream, 2, _ONE, _OF_NOISE)


def test_files_are_private_and_whole(tmp_path: pathlib.Path) -> None:
    record = ReleaseRecord(tmp_path)
    record.check("stream", 3, _ONE, _OF_NOISE)
    assert (tmp_path / "released" / "stream").stat().st_mode & 0o077 == 0
    (path,) = (tmp_path / "released" / "stream").iterdir()
    assert (path.name, path.read_bytes(), path.stat().st_mode & 0o077) == (
        "round-3",
        _ONE + _OF_NOISE,
        0,
    )
    record.spend("stream", 3)
    (path,) = (tmp_path / "released" / "stream").iterdir()
    assert path.read_bytes() == b"spent"
    assert pickle.loads(pickle.dumps(record))._directory == tmp_path


def test_a_directory_that_was_emptied_is_not_forgotten(tmp_path: pathlib.Path) -> None:
    record = ReleaseRecord(tmp_path)
    record.check("stream", 0, _ONE, _OF_NOISE)
    (tmp_path / "released" / "stream" / "round-0").unlink()
    with pytest.raises(ReleaseError, match="other data"):
        record.check("stream", 0, _OTHER, _OF_NOISE)


def test_what_is_written_reaches_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file first, and then the directory that names it."""
    synchronised: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synchronised.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    ReleaseRecord(tmp_path).check("stream", 0, _ONE, _OF_NOISE)
    assert [pathlib.Path(path).parent.name for path in synchronised] == ["stream", "released"]


def test_what_is_added_to_sums_while_they_are_released_is_in_no_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the record would have another sum than the release, and the row a second one."""
    release = _release()
    state, sums = release.start(), [np.zeros(shape, np.int64) for shape in _LAYOUT.shapes]
    _, first = release.release(state, sums, 1, _SCALES)
    next_row = Release._next_row

    def late(self: Release, state: ReleaseState) -> Any:
        for array in sums:
            array += 1
        return next_row(self, state)

    monkeypatch.setattr(Release, "_next_row", late)
    _, again = release.release(state, sums, 1, _SCALES)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_record_that_cannot_be_written_refuses(tmp_path: pathlib.Path) -> None:
    (tmp_path / "released").write_bytes(b"")
    record = ReleaseRecord(tmp_path)
    with pytest.raises(OSError, match="released"):
        record.check("stream", 0, _ONE, _OF_NOISE)
    with pytest.raises(OSError, match="released"):
        record.spend("stream", 0)
    with pytest.raises(TypeError, match="subclasses"):
        type("Lenient", (ReleaseRecord,), {})


def test_a_record_of_a_process_is_of_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ReleaseRecord()
    with pytest.raises(ReleaseError, match="noise_directory"):
        pickle.dumps(record)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (lambda: record.check("fork", 0, _ONE, _OF_NOISE), lambda: record.spend("fork", 0)):
        with pytest.raises(ReleaseError, match="another process"):
            use()


_SEED = np.array([3, -5], np.int64)
_MANY = 150
_GENERATOR = np.random.default_rng(0)
_KINDS: dict[str, NoiseRecursion] = {
    "independent": BandedNoise(_MANY),
    "banded": banded_rows(_GENERATOR.uniform(0.5, 1.0, (_MANY, 5)) * [2.0, 1.0, 0.5, 0.2, 0.1]),
    "toeplitz": toeplitz_rows(_MANY, 1.0 / np.arange(1.0, 91.0)),
    "dense": dense_rows(np.eye(_MANY) - 0.2 * np.tri(_MANY, k=-1)),
    "window": WindowNoise(
        _MANY,
        _GENERATOR.uniform(0.5, 1.0, (_MANY, 3)),
        _GENERATOR.uniform(-0.1, 0.1, (_MANY, 2)),
        _GENERATOR.uniform(-1.0, 1.0, (_MANY, 2)),
    ),
    "state space": StateSpaceNoise(
        phases=np.arange(_MANY) % 2,
        gains=np.array([1.0, 2.0]),
        outputs=np.array([[0.3, -0.2], [0.1, 0.5]]),
        sources=np.array([[0, 1], [1, 0]]),
        decays=np.array([[0.9, 0.5], [0.8, 0.7]]),
        feedbacks=np.array([[-0.5, 0.3], [0.2, -0.4]]),
    ),
}
_EVERY_KIND = pytest.mark.parametrize("kind", _KINDS)
_TWO_DTYPES = RowLayout(((3,), (2,)), ("float64", "float32"))


def _files(kind: str, directory: pathlib.Path) -> RowsInFiles:
    rows = IntegerRows.of(_KINDS[kind])
    return RowsInFiles(rows, Blocks.of(rows.recursion), _SEED, directory)


def _one_by_one(files: RowsInFiles, segment: Segment, num_rounds: int = _MANY) -> np.ndarray:
    history, made = tuple(np.zeros((files.rows.recursion.num_state_vectors, segment.size))), []
    for i in range(num_rounds):
        z = segment.row_of_z(files.seed, i)
        row, history = files.rows.next_row(i, history, z)
        made.append(row)
    return np.array(made)


@_EVERY_KIND
def test_rows_are_those_that_are_made_one_by_one(kind: str, tmp_path: pathlib.Path) -> None:
    files = _files(kind, tmp_path)
    for segment in _TWO_DTYPES.segments:
        found = np.array([files.row(segment, i) for i in range(_MANY)])
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, _one_by_one(files, segment))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tile-0", "tile-1"]
    for folder in tmp_path.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        names = [path.name for path in folder.iterdir()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
        # What neither the last block nor the one before it needs is gone.
        blocks, earlier = files.blocks, files.rows.recursion.normalised.num_earlier_rows
        begin = blocks.starts[blocks.num_blocks - 2]
        rows = {int(name[4:]) for name in names if name.startswith("row-")}
        assert rows == set(range(max(0, begin - earlier), _MANY))
        states = {int(name[6:]) for name in names if name.startswith("state-")}
        is_kept = bool(files.rows.recursion.normalised.num_state_vectors)
        last = blocks.num_blocks - 1
        assert states == ({last - 1, last} if is_kept else set())


@given(kind=st.sampled_from([*_KINDS]), data=st.data())
@settings(deadline=None, max_examples=examples(60))
def test_files_that_are_lost_or_damaged_are_made_again(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    files = _files(kind, tmp_path_factory.mktemp("rows"))
    (segment, _) = _TWO_DTYPES.segments
    end = data.draw(st.integers(1, 20))
    expected = _one_by_one(files, segment, 24)
    for i in range(end):
        files.row(segment, i)
    paths = sorted((files.directory / "tile-0").iterdir())
    for path in data.draw(st.lists(st.sampled_from(paths), max_size=5, unique=True)):
        contents = bytearray(path.read_bytes())
        harm = data.draw(st.sampled_from(["delete", "cut", "flip", "swap", "empty"]))
        if harm == "delete":
            path.unlink()
        elif harm == "cut":
            path.write_bytes(contents[:-4])
        elif harm == "flip":
            contents[data.draw(st.integers(0, len(contents) - 1))] ^= 1
            path.write_bytes(contents)
        elif harm == "swap":
            others = [other for other in paths if other.exists() and other != path]
            path.write_bytes(others[0].read_bytes() if others else b"")
        else:
            path.write_bytes(b"")
    again = dataclasses.replace(files)
    for i in data.draw(st.lists(st.integers(0, 23), min_size=1, max_size=6)):
        np.testing.assert_array_equal(again.row(segment, i), expected[i])


def test_files_of_other_noise_are_not_taken(tmp_path: pathlib.Path) -> None:
    files = _files("banded", tmp_path)
    segment = _TWO_DTYPES.segments[0]
    first = _KINDS["banded"]
    assert isinstance(first, BandedNoise)
    bands = first.bands.copy()
    bands[20, 1] *= 1.5
    other = IntegerRows.of(banded_rows(bands))
    coarser = dataclasses.replace(files.rows, shift=files.rows.shift + 1)
    finer = Blocks(files.blocks.recursion, np.arange(_MANY + 1))
    for changed in (
        dataclasses.replace(files, seed=_SEED + 1),
        dataclasses.replace(files, rows=other, blocks=Blocks.of(other.recursion)),
        dataclasses.replace(files, rows=coarser),
        dataclasses.replace(files, blocks=finer),
    ):
        for i in range(24):
            files.row(segment, i)
        names = [f"row-{i}" for i in (22, 23)]
        before = [(tmp_path / "tile-0" / name).read_bytes() for name in names]
        np.testing.assert_array_equal(changed.row(segment, 23), _one_by_one(changed, segment)[23])
        assert (tmp_path / "tile-0" / names[1]).read_bytes() != before[1]
        # Nor are those of a longer segment.
    longer = dataclasses.replace(segment, size=segment.size + 1)
    np.testing.assert_array_equal(files.row(longer, 23), _one_by_one(files, longer)[23])


def test_tiles_are_made_one_by_one(tmp_path: pathlib.Path) -> None:
    files = _files("state space", tmp_path)
    (segment,) = RowLayout(((TILE + 3,),), ("float32",)).segments
    expected = _one_by_one(files, segment, 3)
    for i in (2, 0, 1):
        np.testing.assert_array_equal(files.row(segment, i), expected[i])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tile-0", "tile-1"]


def test_nothing_is_left_of_a_file_that_cannot_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="full"):
        ReleaseRecord(tmp_path).spend("stream", 0)
    assert not list((tmp_path / "released" / "stream").iterdir())


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_functions_of_others_draw_the_same_noise_or_are_refused(
    is_on_disk: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a run begins, when it goes on, and in its rounds; never for less than a tile."""
    calls: list[int] = []
    factor = [1]

    def fill_tile(seed: np.ndarray, row: int, tile: int, found: np.ndarray) -> None:
        calls.append(tile)
        found[:] = factor[0] * draws.integers(seed, row, tile * TILE, TILE)

    layout = RowLayout(((TILE, 2), (5,)), ("float32", "float64"))
    options: dict[str, Any] = {"layout": layout, "is_on_disk": is_on_disk}
    plain = _release(directory=tmp_path / "plain", **options)
    other = _release(directory=tmp_path / "other", compiled=lambda: (fill_tile,), **options)
    vector: list[Any] = [np.ones((TILE, 2), np.float32), np.zeros(5)]
    state, same = plain.start(np.array([3, 4])), other.start(np.array([3, 4]))
    for _ in range(_ROUNDS):
        state, expected = plain.next(state, [vector], [1.0, 1.0])
        calls.clear()
        same, found = other.next(same, [vector], [1.0, 1.0])
        for each, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(each, wanted)
    saved = other.arrays_of(other.start())
    monkeypatch.setattr(secrets, "randbelow", lambda n: 0)
    before = other.start()
    factor[0] = 2
    with pytest.raises(ReleaseError, match="compiled"):
        other.start()
    with pytest.raises(ReleaseError, match="compiled"):
        other.state_of(saved)
    with pytest.raises(ReleaseError, match="compiled"):
        other.next(before, [vector], [1.0, 1.0])
    calls.clear()
    small = _release(compiled=lambda: (fill_tile,))
    small.next(small.start(), _vectors(1, 1), _SCALES)
    assert not calls


def test_states_share_the_rows_that_both_have() -> None:
    """A round copies no row of an earlier one."""
    release = _release()
    state = release.start()
    for _ in range(4):
        before = state.histories
        state, _ = release.next(state, _vectors(0, 1), _SCALES)
        for old, new in zip(before, state.histories, strict=False):
            assert [id(each) for each in old[-1:]] == [id(each) for each in new[:-1][-1:]]


def test_blocks_are_made_in_shares(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round makes a share of the next block's tiles, and no round all of them."""
    rows = IntegerRows.of(_KINDS["state space"])
    files = RowsInFiles(rows, Blocks.of(rows.recursion), _SEED, tmp_path)
    segment = Segment("float32", 0, 8 * TILE, (0,))
    made: list[int] = []
    original = RowsInFiles._make

    def make(self: Any, tile: Segment, block: int, engine: Any) -> Any:
        made.append(block)
        return original(self, tile, block, engine)

    monkeypatch.setattr(RowsInFiles, "_make", make)
    for i in range(24):
        block = int(np.searchsorted(files.blocks.starts, i, side="right")) - 1
        start, end = files.blocks.rounds(block)
        files.row(segment, i)
        found, made = made.copy(), []
        if i:
            assert set(found) <= {block + 1}
            assert len(found) <= -(-8 // (end - start))
