"""Statements of runs in one's own loop, by the NumPy aggregator; ``tff`` and Flower have theirs."""

import itertools
import pathlib
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.adaptive_clip import NoiseSplit
from mf_aggregators.aggregator import ReleaseError
from mf_aggregators.commands import report
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.noise import places
from mf_aggregators.noise.places import RecordError
from mf_aggregators.participation import MinSeparation, PoissonSampling
from mf_aggregators.privacy import statement_file
from mf_aggregators.privacy.ledgers import RoundTimes
from mf_aggregators.privacy.statements import Statement
from tests.refusals import refuses

_ROUNDS, _COHORT = 6, 30
_LEDGER = [[f"phone {i % 3} {number}" for number in range(_COHORT)] for i in range(_ROUNDS)]
_COUNTS = [_COHORT] * _ROUNDS


def _mechanism(noise_multiplier: float = 1.0) -> mfa.Mechanism:
    return mfa.Mechanism(mfa.factorizations.banded(_ROUNDS, 3), MinSeparation(3), noise_multiplier)


def _aggregator(mechanism: mfa.Mechanism | None = None, **changes: Any) -> mfa.Aggregator:
    options: dict[str, Any] = {"clip_norm": 1.0, "clients_per_round": _COHORT, **changes}
    return mfa.Aggregator(mechanism or _mechanism(), **options)


def _run(aggregator: mfa.Aggregator, rounds: int = _ROUNDS, state: Any = None) -> Any:
    state = aggregator.initialize() if state is None else state
    for _ in range(rounds - state.round_index):
        state, _ = aggregator.next(state, itertools.repeat(np.ones(2), 2))
    return state


def _statement(aggregator: mfa.Aggregator, ledger: Any = _LEDGER, **changes: Any) -> Statement:
    told: dict[str, Any] = {
        **{"population": 200, "public_data": "none", "enforcement": "Each phone keeps a timer."},
        **changes,
    }
    return aggregator.statement(ledger, **told)


def _facts(statement: Statement) -> dict[str, tuple[Any, str]]:
    facts: Any = statement.to_dict()["facts"]
    return {name: (each["value"], each["origin"]) for name, each in facts.items()}


def test_a_fixed_seed_guarantees_nothing() -> None:
    found = _statement(_aggregator(seed=3))
    assert not found.to_dict()["is_private"]
    assert "**Warning.** The seed of the noise was given" in found.to_markdown()


def test_the_aggregator_tells_what_it_knows(tmp_path: pathlib.Path) -> None:
    aggregator = _aggregator(clip_norm=0.25, noise_directory=tmp_path)
    _run(aggregator)
    found = _statement(aggregator, round_counts=_COUNTS, delta=1e-5, responsible="Ada")
    assert found.stated == _mechanism().guarantee(1e-5)
    facts = _facts(found)
    by_aggregator = "read from the aggregator"
    assert facts["clip_norm"] == ("0.25", by_aggregator)
    assert facts["clients_per_round"] == ("30", by_aggregator)
    assert facts["seed_is_fixed"] == (False, by_aggregator)
    assert facts["aggregator"][1] == by_aggregator
    assert mfa.__version__ in facts["aggregator"][0]
    assert facts["is_finished"] == (True, "noise was used for every round")
    assert facts["population"] == (200, "told by Ada")
    assert facts["secure_sums"] == (None, "not stated")
    document: dict[str, Any] = found.to_dict()
    assert not list(statement_file.problems(document))
    record = places.ReleasedSums.read(tmp_path, *places.ReleasedSums.streams(tmp_path))
    assert record.num_sums == document["noise"]["recorded_sums"] == _ROUNDS
    assert set(record.of_rounds.values()) == {document["noise"]["digest"]}
    assert document["noise"]["record_sha256"] == record.sha256
    assert f"the record has {_ROUNDS} sums with this noise" in found.to_markdown()
    # It names no files to make it again from.
    found.write(tmp_path / "a.md", tmp_path / "a.json")
    with pytest.raises(CommandError, match="made in Python"):
        report.verify(str(tmp_path / "a.md"))


def test_without_a_directory_no_record_is_claimed() -> None:
    aggregator = _aggregator()
    state = _run(aggregator, 4)
    found = _statement(aggregator, _LEDGER[:4], state=state)
    assert (found.evidence.num_sums, found.status) == (None, "open")
    assert (
        "This statement names no record of the sums that noise was added to." in found.to_markdown()
    )
    assert _statement(aggregator, _LEDGER[:4], is_finished=True).status == "stopped"


def test_delta_follows_from_the_population() -> None:
    delta = _statement(_aggregator()).plan.delta
    assert 0.9 * 200**-1.1 < delta <= 200**-1.1


def test_an_adaptive_clip_norm_is_stated_with_its_split() -> None:
    clip = mfa.AdaptiveClip(initial_norm=0.5)
    found = _statement(_aggregator(clip_norm=clip))
    split = NoiseSplit.of(1.0, clip.clipped_count_stddev_for(1.0, _COHORT))
    assert (found.facts.clip, found.facts.split) == (clip, split)
    text = found.to_markdown()
    assert "clipped to an L2 norm that adapts: 0.5 in the first round" in text
    # The same noise over the sensitivity of more rounds is less, relative to it.
    extended = _mechanism().extended(9)
    longer = _statement(_aggregator(extended, clip_norm=clip), [*_LEDGER, *_LEDGER[:3]])
    assert longer.facts.split is not None
    ratio = longer.facts.split.update_noise_multiplier / split.update_noise_multiplier
    assert ratio == pytest.approx(extended.noise_multiplier)


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (("population", "200", "300"), {"ledger": [[f"c{i}" for i in range(300)]]}),
        (("ledger", "30", "3"), {"clients_per_round": 3}),
        (("ledger", "30", "3"), {"clients_per_round": 3, "round_counts": _COUNTS}),
        (("ledger", "30", "100"), {"clients_per_round": 100}),
        (("public_data",), {"public_data": ""}),
        (("enforcement",), {"enforcement": " \n"}),
        (("population",), {"population": 0}),
        (("delta",), {"delta": 1.0}),
        (("secure_sums",), {"secure_sums": "yes"}),
        (("custody",), {"custody": "a\nb"}),
    ],
)
def test_what_contradicts_the_aggregator_is_refused(
    names: tuple[str, ...], changes: dict[str, Any]
) -> None:
    options = dict(changes)
    size = len(options.get("ledger", _LEDGER)[0])
    aggregator = _aggregator(clients_per_round=options.pop("clients_per_round", size))
    with refuses(*names, error=(TypeError, ValueError)):
        _statement(aggregator, options.pop("ledger", _LEDGER), **options)


def test_an_aggregator_has_a_clip_norm_above_zero() -> None:
    with refuses("clip_norm"):
        _aggregator(clip_norm=-1.0)


def test_unknown_facts_and_those_of_the_aggregator_are_refused() -> None:
    for name in ("secure_aggregation", "clip_norm", "seed_is_fixed", "origins"):
        with refuses(name, error=TypeError):
            _statement(_aggregator(), **{name: 1})


def test_devices_that_dropped_out_are_no_contradiction_if_the_server_counted() -> None:
    counts = [_COHORT] * _ROUNDS
    found = _statement(_aggregator(clients_per_round=100), round_counts=counts)
    assert found.observed_participation is not None
    assert found.observed_participation.gap is not None
    assert found.stated == found.plan


def test_a_ledger_without_the_last_rounds_is_refused(tmp_path: pathlib.Path) -> None:
    aggregator = _aggregator(noise_directory=tmp_path)
    state = _run(aggregator)
    for known in ({}, {"state": state}):
        with refuses("ledger", "4", "6"):
            _statement(aggregator, _LEDGER[:4], **known)
    # One that names the clients of a round that was not released is right.
    shorter = _aggregator(noise_directory=tmp_path / "other")
    state = _run(shorter, 4)
    assert _statement(shorter, _LEDGER[:5], state=state).evidence.num_sums == 4


def test_times_without_the_last_rounds_are_refused() -> None:
    aggregator = _aggregator()
    state = _run(aggregator)
    for rounds in (3, _ROUNDS):
        starts = 3600.0 * np.arange(rounds)
        times = RoundTimes(starts, starts + 60.0, timer_hours=3.0)
        if rounds == _ROUNDS:
            assert _statement(aggregator, times, state=state).status == "finished"
        else:
            with refuses("3 rounds", "6", "times"):
                _statement(aggregator, times, state=state)


def test_the_state_of_other_noise_is_refused() -> None:
    weak, strong = _aggregator(), _aggregator(_mechanism(3.0))
    state = _run(weak)
    with refuses("another aggregator", error=ReleaseError):
        _statement(strong, state=state)
    # That of a run that was extended is its own.
    extended = _aggregator(_mechanism().extended(9, num_parameters=2))
    assert _statement(extended, state=state).status == "open"


def test_a_mapping_is_for_the_rounds_that_were_released() -> None:
    aggregator = _aggregator()
    state = _run(aggregator, 2)
    names = {name: [i] for i, cohort in enumerate(_LEDGER[:2]) for name in cohort}
    found = _statement(aggregator, names, state=state, round_counts=[_COHORT] * 2)
    assert found.observed_participation is not None
    assert (found.observed_participation.num_rounds, found.status) == (2, "open")


def test_a_record_of_other_noise_is_refused(tmp_path: pathlib.Path) -> None:
    _run(_aggregator(noise_directory=tmp_path))
    other = _aggregator(_mechanism(2.0), noise_directory=tmp_path)
    with refuses("another mechanism", "round 1", error=RecordError):
        _statement(other)


def test_a_record_of_two_runs_needs_the_state(tmp_path: pathlib.Path) -> None:
    aggregator = _aggregator(noise_directory=tmp_path)
    states = [_run(aggregator, rounds) for rounds in (6, 2)]
    with refuses("2 runs", "state"):
        _statement(aggregator)
    numbers = [
        _statement(aggregator, _LEDGER[:rounds], state=state).evidence.num_sums
        for rounds, state in zip((6, 2), states, strict=True)
    ]
    assert numbers == [6, 2]
    # A run that has not begun has no sum.
    fresh = _statement(aggregator, [], state=aggregator.initialize())
    assert fresh.evidence.num_sums is None


def test_an_extended_run_has_the_noise_of_each_horizon(tmp_path: pathlib.Path) -> None:
    first = _mechanism()
    state = _run(_aggregator(first, noise_directory=tmp_path), 5)
    whole = first.extended(9, num_parameters=2)
    aggregator = _aggregator(whole, noise_directory=tmp_path)
    state = _run(aggregator, 9, aggregator.spend(state))
    found = _statement(aggregator, [*_LEDGER, *_LEDGER[:3]], state=state, delta=1e-5)
    assert found.plan == whole.guarantee(1e-5)
    assert found.earlier_plans == (first.guarantee(1e-5),)
    record = places.ReleasedSums.read(tmp_path, state.noise.stream_name)
    early, late = (each.guarantee(1e-5).noise_digest.hex() for each in (first, whole))
    assert list(record.of_rounds.values()) == [early] * 5 + [""] + [late] * 3
    assert (record.num_sums, found.evidence.num_sums, record.num_rounds) == (8, 8, 9)


def test_a_scheme_has_its_own_population() -> None:
    scheme = PoissonSampling(
        num_rounds=_ROUNDS, num_bands=3, population=600, clients_per_round=_COHORT
    )
    mechanism = mfa.Mechanism(mfa.factorizations.banded(_ROUNDS, 3), scheme, 1.0)
    with refuses("population", "200", "600"):
        _statement(_aggregator(mechanism))
