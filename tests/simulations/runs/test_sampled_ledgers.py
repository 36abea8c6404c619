"""A ledger is taken for a sampled one only if a data sampler can have made it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import factorizations
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import Sampler, sampling_scheme, sampling_schemes
from simulations.runs.round_records import ParticipationLedger

_NAMES = tuple(sampling_schemes())


def _sampler(name: str, seed: int = 3) -> Sampler:
    scheme = sampling_scheme(name, num_rounds=13, num_bands=3, population=26, clients_per_round=4)
    return scheme.sampler(seed)


def _ledger(sampler: Sampler, rounds: int) -> ParticipationLedger:
    scheme = sampler.scheme
    clients = tuple(f"client_{i}" for i in range(scheme.population))
    cohorts = tuple(sampler.draw(index) for index in range(rounds))
    return ParticipationLedger(clients, cohorts, scheme)


def _with_cohort(ledger: ParticipationLedger, index: int, clients: object) -> ParticipationLedger:
    cohorts = list(ledger.cohorts)
    cohorts[index] = np.array(clients, dtype=np.int64)
    return dataclasses.replace(ledger, cohorts=tuple(cohorts))


@given(st.sampled_from(_NAMES), st.integers(0, 13), st.integers(0, 2**128 - 1))
@settings(deadline=None)
def test_what_a_sampler_drew_has_no_deviation(name: str, rounds: int, seed: int) -> None:
    sampler = _sampler(name, seed)
    ledger = _ledger(sampler, rounds)
    assert sampler.scheme.deviation(len(ledger.client_ids), ledger.cohorts) is None
    assert sampler.deviation(len(ledger.client_ids), ledger.cohorts) is None


@pytest.mark.parametrize("name", _NAMES)
def test_a_ledger_of_another_scheme_or_of_timers_deviates(name: str) -> None:
    sampler = _sampler(name)
    ledger = _ledger(sampler, 13)
    mechanism = Mechanism(factorizations.identity(13), sampler.scheme, 1.0)
    assert mechanism.observed(ledger.record(), sampler=sampler).keeps_participation is True
    others = [
        None,
        *(_sampler(other).scheme for other in _NAMES if other != name),
        dataclasses.replace(sampler.scheme, num_bands=2),
        dataclasses.replace(sampler.scheme, num_rounds=14),
        dataclasses.replace(sampler.scheme, population=27),
    ]
    for other in others:
        changed = dataclasses.replace(ledger, sampling=other)
        observed = mechanism.observed(changed.record(), sampler=sampler)
        assert observed.keeps_participation is False
        assert observed.deviation == "the ledger records another way of drawing clients"


@pytest.mark.parametrize("name", _NAMES)
def test_a_ledger_of_other_sizes_deviates(name: str) -> None:
    sampler = _sampler(name)
    ledger = _ledger(sampler, 13)
    more_clients = dataclasses.replace(ledger, client_ids=(*ledger.client_ids, "another"))
    more_rounds = ledger.with_round(sampler.draw(1))
    for changed, message in (
        (more_clients, "has 27 clients, not 26"),
        (more_rounds, "has 14 rounds, more than 13"),
    ):
        assert message in str(sampler.scheme.deviation(len(changed.client_ids), changed.cohorts))


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("clients", [[1, 1, 2, 3], [3, 1, 2, 0], [-1, 0, 1, 2], [0, 1, 2, 26]])
def test_cohorts_that_are_no_sets_of_clients_are_found(name: str, clients: list[int]) -> None:
    sampler = _sampler(name)
    changed = _with_cohort(_ledger(sampler, 13), 0, clients)
    found = sampler.scheme.deviation(len(changed.client_ids), changed.cohorts)
    assert "round 1 (counted from 1) are not different ones" in str(found)


@pytest.mark.parametrize("name", _NAMES)
def test_draws_of_another_seed_deviate_only_from_those_of_the_sampler(name: str) -> None:
    """What looks like sampling, and was chosen, is found by whoever holds the seed."""
    sampler, other = _sampler(name), _sampler(name, seed=4)
    ledger = _ledger(other, 13)
    assert sampler.scheme.deviation(len(ledger.client_ids), ledger.cohorts) is None
    found = sampler.deviation(len(ledger.client_ids), ledger.cohorts)
    assert found == "the clients of round 1 (counted from 1) are not those that the sampler draws"


def test_a_client_that_was_left_out_is_found_by_the_holder_of_the_seed() -> None:
    sampler = _sampler("poisson")
    ledger = _ledger(sampler, 13)
    changed = _with_cohort(ledger, 12, ledger.cohorts[12][1:])
    assert sampler.scheme.deviation(len(changed.client_ids), changed.cohorts) is None
    found = sampler.deviation(len(changed.client_ids), changed.cohorts)
    assert found == "the clients of round 13 (counted from 1) are not those that the sampler draws"
