"""Compiled functions have the bits of the kernel. Tests need the extra ``fast``."""

import dataclasses
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import noise
from mf_aggregators.kernel import draws, integers
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.noise import fast_tiles
from tests.examples import examples


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    fast_tiles.load.cache_clear()
    yield
    fast_tiles.load.cache_clear()


def _functions() -> tuple[Any, ...]:
    found = fast_tiles.load()
    assert found, "install the extra fast: nothing is skipped"
    return found


def _released() -> list[np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aggregator = mfa.Aggregator(
            mfa.Mechanism(mfa.factorizations.banded(4, 3), mfa.participation.MinSeparation(3), 1.0),
            clip_norm=1.0,
            clients_per_round=2,
            seed=5,
        )
    state, found = aggregator.initialize(), []
    updates = [np.linspace(-1.0, 1.0, 17 * TILE + 3).astype(np.float32)] * 2
    for _ in range(3):
        state, mean = aggregator.next(state, updates)
        found.append(mean)
    return found


@settings(deadline=None, max_examples=examples(20))
@given(
    st.tuples(*2 * [st.integers(-(2**63), 2**63 - 1)]),
    st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1), st.just(2**63 - 1)),
    st.one_of(st.integers(0, 5), st.integers(0, 2**40 - 1), st.just(2**40 - 1)),
)
def test_tiles_are_the_kernels(seed: tuple[int, int], row: int, tile: int) -> None:
    functions, found = _functions(), np.full(TILE, -1, np.int64)
    functions[0](np.array(seed), row, tile, found)
    np.testing.assert_array_equal(found, draws.integers(np.array(seed), row, tile * TILE, TILE))


@settings(deadline=None, max_examples=examples(200))
@given(
    st.sampled_from(["<f4", ">f4", "<f8", "<f2"]),
    st.integers(0, 2**32),
    st.sampled_from([1e-300, 1e-30, 1.0, 1e5, 1e30]),
    st.sampled_from([1.0, 1e-40, 1e9, np.nan, np.inf]),
)
def test_updates_are_clipped_alike(dtype: str, seed: int, norm: float, last: float) -> None:
    entries = [*100.0 * np.random.default_rng(seed).standard_normal(2**14), last]
    # Neither aligned nor writeable.
    update = np.frombuffer(b"." + np.array(entries, dtype).tobytes(), dtype, offset=1)
    engines = (draws.Engine(None, *each) for each in ((), _functions()))
    sizes = norm, integers.STEPS_PER_CLIP_NORM
    plain, fast = (integers.clip_to_grid([update], *sizes, engine=each)[0] for each in engines)
    np.testing.assert_array_equal(fast, plain)


def test_ties_are_decided_by_any_of_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """By thresholds that equal a tie's words up to a place, and are one more or less there."""
    _functions()
    from mf_aggregators.noise import numba_tiles

    table, seed = draws.table(), np.array([7, -8])
    original = draws._AliasTable.draw
    for tile in range(40):
        further = table.further.copy()

        def near(
            self: draws._AliasTable, words: np.ndarray, tie_words: object, tile: int = tile
        ) -> np.ndarray:
            columns = (words & np.uint32(0xFFFF)).ravel()
            is_tied = words.ravel() >> 16 == self.packed[columns] >> 16
            ties = columns[is_tied]
            drawn = tie_words(len(ties))  # type: ignore[operator]
            for k, column in enumerate(ties):
                self.further[column] = drawn[k]
                place = (tile + k) % 10
                if place < 9:
                    changed = int(drawn[k, place]) + (1 if k % 2 else -1)
                    self.further[column, place] = changed % 2**32
            return original(self, words, lambda _: drawn)

        other = dataclasses.replace(table, further=further)
        with monkeypatch.context() as patch:
            patch.setattr(draws, "table", lambda other=other: other)
            patch.setattr(draws._AliasTable, "draw", near)
            expected = draws.integers(seed, 2, tile * TILE, TILE)
        found = np.empty(TILE, np.int64)
        key = seed.view("<u4")
        numba_tiles.fill(key, 2, tile, other.packed, other.further, found)
        np.testing.assert_array_equal(found, expected)


def test_an_aggregator_releases_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _functions()
    fast = _released()
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    fast_tiles.load.cache_clear()
    np.testing.assert_array_equal(_released(), fast)
    assert not fast_tiles.load()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_numba_that_does_not_work_changes_speed_alone(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(os.environ, "NUMBA_DISABLE_JIT", raising=False)
    # None is a module that is missing; an empty one has no compiler.
    found = types.ModuleType("numba") if is_broken else None
    monkeypatch.setitem(sys.modules, "numba", found)
    monkeypatch.delitem(sys.modules, "mf_aggregators.noise.numba_tiles", raising=False)
    monkeypatch.delattr(noise, "numba_tiles", raising=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert not fast_tiles.load()
    assert [str(each.message).split(",")[0] for each in warned] == is_broken * [
        "Numba does not work"
    ]
