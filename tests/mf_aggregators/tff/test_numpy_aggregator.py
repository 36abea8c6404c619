"""The aggregator in NumPy and in TFF's graphs release the same bits: each is a test of the other.

The long test draws 3 aggregators, or 100, and has five runs of each, the short one
two runs of one of each kind.
"""

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow_federated as tff
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import aggregator as numpy_aggregator
from mf_aggregators.kernel.integers import IntegerRows
from mf_aggregators.tff import graph_check
from tests.examples import of_many
from tests.mf_aggregators import small_mechanisms

_NUM_ROUNDS = 5
_LONG, _RUNS = of_many(100, 3), 5
_RUNS_IN_SHORT = 2


@dataclasses.dataclass(frozen=True)
class _Case:
    """Runs of three rounds: what aggregators are made with, and what clients send."""

    mechanism: mfa.Mechanism
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    options: dict[str, Any]
    clients: tuple[int, ...]
    seed: int

    def updates(self, run: int) -> list[list[collections.OrderedDict[str, np.ndarray]]]:
        generator = np.random.default_rng([self.seed, run])
        clients = np.roll(self.clients, run)

        def update() -> collections.OrderedDict[str, np.ndarray]:
            length = 10.0 ** generator.uniform(-4.0, 3.0)
            arrays = (
                (length * generator.normal(size=shape)).astype(dtype)
                for shape, dtype in self.tensors
            )
            return collections.OrderedDict(zip("abc", arrays, strict=False))

        rounds = [[update() for _ in range(number)] for number in clients]
        # One that counts as zero.
        rounds[-1][0]["a"] = np.full_like(rounds[-1][0]["a"], np.nan)
        return rounds


_shapes = st.sampled_from([(), (3,), (2, 4), (1, 1, 5), (0,), (65_600,)])
_dtypes = st.sampled_from(["float16", "float32", "float64"])
_constant_clips = st.floats(0.05, 20.0)
_adaptive_clips = st.builds(
    mfa.AdaptiveClip,
    initial_norm=st.floats(0.05, 20.0),
    learning_rate=st.one_of(st.floats(0.2, 3.0), st.just(0.0)),
    update_period=st.integers(1, 2),
)


@st.composite
def _cases(draw: st.DrawFn, clips: st.SearchStrategy[Any]) -> _Case:
    # The first case has the first of everything: noise that follows from an earlier row in memory.
    factorizations = small_mechanisms.factorizations(_NUM_ROUNDS)
    factorization = draw(st.sampled_from([*factorizations[2:], *factorizations[:2]]))
    schema = draw(
        st.sampled_from(
            [mfa.participation.SingleParticipation(), mfa.participation.MinSeparation(2)]
        )
    )
    tensors = draw(st.lists(st.tuples(_shapes, _dtypes), min_size=1, max_size=3))
    bits = draw(st.sampled_from([None, 33, 50]))
    multiplier = draw(st.sampled_from([*np.geomspace(0.3, 10.0, 8), 0.0]))
    return _Case(
        mechanism=mfa.Mechanism(factorization, schema, float(multiplier)),
        tensors=(*tensors, ((2,), "float32")),
        options={
            "clip_norm": draw(clips),
            "clients_per_round": draw(st.floats(0.5, 6.0)),
            "seed": draw(st.integers(0, 2**80)),
            "noise_storage": draw(st.sampled_from(["state", "disk"])),
            "secure_aggregation_bits": bits,
            "largest_cohort": 6,
            "allow_no_noise": True,
        },
        clients=tuple(draw(st.lists(st.integers(1, 5), min_size=3, max_size=3))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def _differences(case: _Case, runs: int) -> list[str]:
    """What differs between the two, over all rounds of so many runs of a case.

    Most of the time goes into making TFF's computations, once for all runs.
    """
    value_type = tff.types.to_type(
        collections.OrderedDict(
            (name, tff.TensorType(np.dtype(dtype).type, shape))
            for name, (shape, dtype) in zip("abc", case.tensors, strict=False)
        )
    )
    in_tff = mfa.mf_dp_aggregator(case.mechanism, **case.options).create(value_type)
    in_numpy = mfa.Aggregator(case.mechanism, **case.options)
    return [
        f"{difference} of run {run}"
        for run in range(runs)
        for difference in _differences_of(in_tff, in_numpy, case.updates(run))
    ]


def _differences_of(in_tff: Any, in_numpy: mfa.Aggregator, updates: list[Any]) -> list[str]:
    tff_state, state, found = in_tff.initialize(), in_numpy.initialize(), []
    for number, of_round in enumerate(updates):
        output = in_tff.next(tff_state, of_round)
        tff_state = output.state
        state, release = in_numpy.next(state, of_round)
        for name, array in release.items():
            other = np.asarray(output.result[name])
            is_same = array.dtype == other.dtype and array.tobytes() == other.tobytes()
            found += [] if is_same else [f"{name} in round {number}"]
        shown = output.measurements["dp_query_metrics"]
        metrics = in_numpy.metrics(state)
        found += [
            f"{name} in round {number}"
            for name, value in metrics.items()
            if np.float64(shown[name]).tobytes() != np.float64(value).tobytes()
        ]
    return found


# Cases are large: the first one that differs says enough.
_PHASES = (Phase.explicit, Phase.generate)


def _settings(number: int) -> settings:
    return settings(
        deadline=None,
        max_examples=number,
        phases=_PHASES,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def _updates_fit(case: _Case) -> bool:
    """Whether both accept the sizes; refusals are the same code in both."""
    sums = numpy_aggregator._integer_sums(case.options["secure_aggregation_bits"], 6, 5.0)
    size = sum(int(np.prod(shape)) for shape, _ in case.tensors)
    return numpy_aggregator._rounding(sums, size) < 0.05


@pytest.mark.short_cases(1)
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize("clips", [_constant_clips, _adaptive_clips], ids=["constant", "adaptive"])
@given(st.data())
@_settings(1)
def test_a_few_runs_have_the_same_bits(clips: st.SearchStrategy[Any], data: st.DataObject) -> None:
    assert _differences(data.draw(_cases(clips).filter(_updates_fit)), _RUNS_IN_SHORT) == []


# Of 500 runs.
@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
@given(_cases(st.one_of(_constant_clips, _adaptive_clips)).filter(_updates_fit))
@_settings(_LONG)
def test_many_runs_have_the_same_bits(case: _Case) -> None:
    assert _differences(case, _RUNS) == []


def _a_case(**options: Any) -> _Case:
    factorization = small_mechanisms.factorizations(_NUM_ROUNDS)[2]
    return _Case(
        mfa.Mechanism(factorization, mfa.participation.SingleParticipation(), 1.0),
        (((6,), "float64"), ((2,), "float32")),
        {"clip_norm": 1.0, "clients_per_round": 2.0, "seed": 1, **options},
        (2, 2, 2),
        3,
    )


@pytest.mark.long_cases(0)
@pytest.mark.parametrize("storage", ["state", pytest.param("disk", marks=pytest.mark.long)])
def test_a_mutant_of_the_rows_is_seen(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round, each mutant of a graph differs from NumPy in the same comparison."""
    case = _a_case(noise_storage=storage)
    intact = IntegerRows.integer_row

    def off_by_one(rows: IntegerRows, z: Any, earlier: Any) -> Any:
        return intact(rows, z + 1, earlier + 2.0**rows.shift)

    monkeypatch.setattr(IntegerRows, "integer_row", off_by_one)
    # It would refuse the process.
    monkeypatch.setattr(graph_check, "check", lambda query: None)
    assert "a in round 0 of run 0" in _differences(case, 1)


@pytest.mark.long
def test_a_run_that_is_extended_twice_has_the_bits_of_the_whole() -> None:
    """A ring of rows of Z grows with each horizon, where a graph draws them again."""
    first = mfa.Mechanism(mfa.factorizations.toeplitz(2), mfa.participation.MinSeparation(2), 1.0)
    longer = first.extended(3, num_parameters=8, storage="state")
    whole = longer.extended(5, num_parameters=8, storage="state")
    case = dataclasses.replace(_a_case(noise_storage="state"), clients=(2,) * 5)
    value_type = tff.types.to_type(
        collections.OrderedDict(
            a=tff.TensorType(np.float64, (6,)), b=tff.TensorType(np.float32, (2,))
        )
    )
    in_tff = mfa.mf_dp_aggregator(whole, **case.options).create(value_type)
    horizons = [mfa.Aggregator(each, **case.options) for each in whole.horizons]
    tff_state, state = in_tff.initialize(), horizons[0].initialize()
    for i, updates in enumerate(case.updates(0)):
        output = in_tff.next(tff_state, updates)
        tff_state = output.state
        aggregator = next(each for each in horizons if i < each.mechanism.num_rounds)
        state, release = aggregator.next(state, updates)
        for name, array in release.items():
            np.testing.assert_array_equal(array, np.asarray(output.result[name]))
