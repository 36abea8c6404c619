"""Records a run, and replays it without one client and with its releases frozen.

The grey-box test of Cebere et al. (arXiv:2602.17454). If the library computes anything from a
client's data and not from releases, a replay differs: in a call, a state or an output. The sums
that are released differ by at most what the guarantee allows for. Planted faults of each kind are
found.
"""

import copy
import dataclasses
import sys
import types
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

import mf_aggregators as mfa
from mf_aggregators.aggregator import Aggregator
from mf_aggregators.kernel.release import Release
from mf_aggregators.participation import MinSeparation
from tests.mf_aggregators import small_mechanisms

_ROUNDS, _SEPARATION, _OTHERS, _SHAPES = 8, 3, 3, ((3,), (2, 2))
_DELTA = 1e-6
# A client's own work, which may depend on its data.
_OF_CLIENTS = {"_vector_of", "clipped"}
_MATRICES = tuple(
    each
    for each in small_mechanisms.factorizations(_ROUNDS)
    if each.strategy_matrix().shape == (_ROUNDS, _ROUNDS)
)


@dataclasses.dataclass
class _Run:
    """The sums and releases of a run, the calls of the library, and all that a caller sees."""

    sums: list[np.ndarray] = dataclasses.field(default_factory=list)
    releases: list[Any] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    seen: list[Any] = dataclasses.field(default_factory=list)
    stddev: float = 0.0


def _run(aggregator: Aggregator, updates: Sequence[Any], recorded: _Run | None = None) -> _Run:
    """Runs all rounds; with the releases of a recorded run, if there is one."""
    run, real = _Run(), Release.release

    def released(self: Release, state: Any, sums: Any, number: int, scales: Any) -> Any:
        unit = self.norm / self.sums.steps_per_clip_norm
        run.sums.append(unit * np.concatenate([each.ravel() for each in sums]).astype(float))
        run.seen.append(list(scales))
        run.stddev = self.stddev
        following, found = real(self, state, sums, number, scales)
        if recorded is not None:
            found = copy.deepcopy(recorded.releases[len(run.releases)])
        run.releases.append(copy.deepcopy(found))
        return following, found

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        caller: types.FrameType | None = frame
        if event != "call" or f"{mfa.__name__}/" not in frame.f_code.co_filename:
            return
        while caller is not None:
            if caller.f_code.co_name in {*_OF_CLIENTS, "<genexpr>"}:
                return
            caller = caller.f_back
        run.calls.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Release, "release", released)
        state = aggregator.initialize()
        sys.setprofile(profile)
        try:
            for of_round in updates:
                state, mean = aggregator.next(state, of_round)
                run.seen += [*mean, *(state.clip or ())]
        finally:
            sys.setprofile(None)
    return run


def _problems(aggregator: Aggregator, updates: Sequence[Any], times: Sequence[int]) -> list[str]:
    """The kinds of differences between a run and its replay that no guarantee allows."""
    without = [of_round[i in times :] for i, of_round in enumerate(updates)]
    # Caches are filled by a first run.
    _run(aggregator, updates)
    run = _run(aggregator, updates)
    replay = _run(aggregator, without, run)
    found = ["calls"] if run.calls != replay.calls else []
    if not all(
        np.array_equal(a, b, equal_nan=True) for a, b in zip(run.seen, replay.seen, strict=True)
    ):
        found.append("seen")
    mechanism = aggregator.mechanism
    moved = np.array(run.sums) - np.array(replay.sums)
    shift = float(np.linalg.norm(mechanism.factorization.strategy_matrix() @ moved)) / run.stddev
    epsilon = float(mechanism.guarantee(_DELTA).epsilon)
    # The least delta of two Gaussians that far apart (Balle and Wang 2018, Thm. 8).
    ratio = epsilon / max(shift, 1e-9)
    near, far = shift / 2 - ratio, -shift / 2 - ratio
    delta = stats.norm.cdf(near) - np.exp(epsilon + stats.norm.logcdf(far))
    return [*found, "sensitivity"] if delta > _DELTA * (1.0 + 1e-6) else found


def _aggregator(matrix: mfa.factorizations.Factorization, clip: Any) -> Aggregator:
    mechanism = mfa.Mechanism(matrix, MinSeparation(_SEPARATION), 1.1)
    with pytest.warns(mfa.noise.FixedSeedWarning):
        return Aggregator(mechanism, clip, _OTHERS + 1, seed=5)


def _updates(seed: int, size: float, direction: bool) -> list[list[list[np.ndarray]]]:
    """The updates of a client of a size, and of others, in each round; all in one direction."""
    generator = np.random.default_rng(seed)
    first = [generator.standard_normal(shape) for shape in _SHAPES]
    return [
        [
            [
                size * (each if direction else generator.standard_normal(each.shape))
                for each in first
            ],
            *([generator.standard_normal(shape) for shape in _SHAPES] for _ in range(_OTHERS)),
        ]
        for _ in range(_ROUNDS)
    ]


_CLIPS = (0.7, mfa.AdaptiveClip(initial_norm=0.5))


@hypothesis.given(
    matrix=st.sampled_from(_MATRICES),
    clip=st.sampled_from(_CLIPS),
    seed=st.integers(0, 2**32),
    size=st.sampled_from([0.0, 1e-3, 1.0, 50.0, 1e200, np.nan, np.inf]),
    direction=st.booleans(),
    first=st.integers(0, _SEPARATION - 1),
)
@hypothesis.settings(max_examples=10, deadline=None)
def test_a_replay_without_a_client_differs_in_sums_alone(
    matrix: Any, clip: Any, seed: int, size: float, direction: bool, first: int
) -> None:
    aggregator = _aggregator(matrix, clip)

    times = range(first, _ROUNDS, _SEPARATION)
    assert _problems(aggregator, _updates(seed, size, direction), times) == []


@pytest.mark.parametrize("clip", _CLIPS, ids=["constant", "adaptive"])
@pytest.mark.parametrize("fault", ["unclipped", "look", "branch", "too close"])
def test_planted_faults_are_found(fault: str, clip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator, times = _aggregator(_MATRICES[2], clip), range(0, _ROUNDS, _SEPARATION)
    clipped, following = Release.clipped, Aggregator._following

    def unclipped(self: Release, vector: Any, into: Any = None, *others: Any) -> Any:
        found = clipped(self, vector, into, *others)
        for each in found:
            np.multiply(each, 2, out=each)
        return found

    def looking(
        self: Aggregator, state: Any, noise: Any, released: Any, structure: Sequence[Any]
    ) -> Any:
        # The structure is the first update, whose data no caller may learn of.
        size = float(np.abs(structure[0]).sum())
        if fault == "look":
            released = [each + size for each in released]
        elif size > 10.0:
            self._scales(state)
        return following(self, state, noise, released, structure)

    if fault == "unclipped":
        monkeypatch.setattr(Release, "clipped", unclipped)
    elif fault == "too close":
        times = range(0, _ROUNDS, _SEPARATION - 1)
    else:
        monkeypatch.setattr(Aggregator, "_following", looking)

    kind = {"look": "seen", "branch": "calls"}.get(fault, "sensitivity")
    assert kind in _problems(aggregator, _updates(1, 50.0, True), times)
