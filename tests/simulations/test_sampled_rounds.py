"""Rounds in TFF whose clients a data sampler draws, with rounds of no client among them."""

import pathlib
from typing import Any

import numpy as np
import pytest

from mf_aggregators.participation import (
    BallsInBins,
    MinSeparationSampling,
    PoissonSampling,
    Sampler,
    SamplingScheme,
    SingleParticipation,
)
from simulations.devices import device_behaviour
from simulations.devices.device_behaviour import Independent
from simulations.runs import training_loop
from simulations.runs.run_directory import LedgerError, ParticipationLedger
from simulations.runs.training_loop import FederatedRun
from tests.refusals import refuses
from tests.simulations import linear_run

_NUM_ROUNDS = 6
_SCHEME = PoissonSampling(_NUM_ROUNDS, num_bands=2, population=9, clients_per_round=3)


@pytest.fixture(scope="module")
def process() -> Any:
    return linear_run.learning_process(_NUM_ROUNDS)


class _Sampler(Sampler):
    """A sampler of which some rounds are known to be empty."""

    def draw(self, round_index: int) -> np.ndarray:
        clients = super().draw(round_index)
        return clients[:0] if round_index in (0, 3) else clients


def _sampler(seed: int = 1) -> Sampler:
    return _Sampler(_SCHEME, seed)


def _run(process: Any, **changes: Any) -> FederatedRun:
    # The timers of this schema would let nobody take part twice.
    arguments = {"sampler": _sampler(), "participation": SingleParticipation(), **changes}
    return linear_run.federated_run(process, _NUM_ROUNDS, **arguments)


@pytest.mark.long
def test_a_sampled_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    process: Any, tmp_path: pathlib.Path
) -> None:
    models, ledger = linear_run.finish(_run(process), tmp_path / "whole")
    assert ledger.num_rounds == _NUM_ROUNDS
    assert [len(cohort) > 0 for cohort in ledger.cohorts] == [False, True, True, False, True, True]
    assert _sampler().deviation(len(ledger.client_ids), ledger.cohorts) is None
    parts: list[np.ndarray] = []
    for at_most in (1, 3, None):
        more, resumed = linear_run.finish(_run(process), tmp_path / "parts", at_most)
        parts.extend(more)
    np.testing.assert_array_equal(np.array(parts), np.array(models))
    on_disk = ParticipationLedger.load(tmp_path / "parts" / "ledger.npz")
    for found in (resumed, on_disk):
        assert found.sampling == _SCHEME
        for cohort, expected in zip(found.cohorts, ledger.cohorts, strict=True):
            np.testing.assert_array_equal(cohort, expected)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "scheme",
    [
        MinSeparationSampling(_NUM_ROUNDS, 2, population=9, clients_per_round=3, separation=2),
        BallsInBins(_NUM_ROUNDS, 2, population=9, clients_per_round=3, separation=3),
    ],
    ids=str,
)
def test_batches_of_any_size_are_released_and_resumed(
    process: Any, tmp_path: pathlib.Path, scheme: SamplingScheme
) -> None:
    """Clients that draw for themselves, of whom half cannot be asked."""
    drawn = scheme.sampler(2)
    sampler = device_behaviour.AvailableClients(drawn, Independent(0.5), 7, 300.0)
    models, ledger = linear_run.finish(_run(process, sampler=sampler), tmp_path / "whole")
    assert len({len(cohort) for cohort in ledger.cohorts}) > 1
    assert sampler.deviation(len(ledger.client_ids), ledger.cohorts) is None
    assert drawn.deviation(len(ledger.client_ids), ledger.cohorts) is not None
    parts: list[np.ndarray] = []
    for at_most in (2, None):
        again = device_behaviour.AvailableClients(scheme.sampler(2), Independent(0.5), 7, 300.0)
        more, resumed = linear_run.finish(_run(process, sampler=again), tmp_path / "parts", at_most)
        parts.extend(more)
    np.testing.assert_array_equal(np.array(parts), np.array(models))
    assert resumed.digest() == ledger.digest()


@pytest.mark.parametrize("storage", ["state", pytest.param("disk", marks=pytest.mark.long)])
def test_a_round_of_no_client_releases_the_noise_of_its_own_row(
    process: Any, tmp_path: pathlib.Path, storage: str
) -> None:
    """So does a round whose only client has no data: its sum is zero, and its noise is not.

    The same row must not be added to other data afterwards either.
    """
    if storage == "disk":
        process = linear_run.learning_process(
            _NUM_ROUNDS, noise_storage=storage, noise_directory=tmp_path / "noise"
        )
    run = linear_run.federated_run(process, _NUM_ROUNDS)
    nothing = run.client_dataset("client_1", 0).take(0)
    states = {"none": run.initial_state, "empty": run.initial_state}
    previous = np.zeros(3)
    for index in range(3):
        before = states["none"]
        outputs = {
            "none": process.next(before, []),
            "empty": process.next(states["empty"], [nothing]),
        }
        states = {name: output.state for name, output in outputs.items()}
        weights = {name: linear_run.weights_of(process, state) for name, state in states.items()}
        np.testing.assert_array_equal(weights["none"], weights["empty"])
        assert np.all(weights["none"] != previous)
        assert np.all(np.isfinite(weights["none"]))
        previous = weights["none"]
        released = outputs["none"].metrics["aggregator"]["dp_query_metrics"]["rounds_released"]
        assert released == index + 1
    if storage == "disk":
        with refuses("data", error=Exception):
            process.next(before, [run.client_dataset("client_1", 0)])


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (PoissonSampling(_NUM_ROUNDS, 2, 9, 3), None),
        (None, PoissonSampling(_NUM_ROUNDS, 2, 9, 3)),
        (PoissonSampling(_NUM_ROUNDS, 2, 9, 3), PoissonSampling(_NUM_ROUNDS, 3, 9, 3)),
    ],
)
def test_a_run_does_not_go_on_with_another_way_of_drawing(
    process: Any,
    tmp_path: pathlib.Path,
    first: PoissonSampling | None,
    then: PoissonSampling | None,
) -> None:
    samplers = [None if scheme is None else scheme.sampler(1) for scheme in (first, then)]
    store = linear_run.store_of(tmp_path)
    training_loop.start(_run(process, sampler=samplers[0]), store)
    with pytest.raises(LedgerError):
        training_loop.start(_run(process, sampler=samplers[1]), store)


@pytest.mark.long
def test_a_released_round_is_not_run_again_with_the_draws_of_another_seed(
    process: Any, tmp_path: pathlib.Path
) -> None:
    _, ledger = linear_run.finish(_run(process), tmp_path, at_most=1)
    # A second round in the ledger, as if the process had ended before its state was saved.
    ledger.with_round(_sampler().draw(1)).save(tmp_path / "ledger.npz")
    with refuses("round 2", error=LedgerError):
        linear_run.finish(_run(process, sampler=_sampler(seed=2)), tmp_path)
    models, _ = linear_run.finish(_run(process), tmp_path)
    assert len(models) == _NUM_ROUNDS - 1
