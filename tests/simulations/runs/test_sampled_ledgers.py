"""A ledger is taken for a sampled one only if a data sampler can have made it."""

import dataclasses

import numpy as np
import pytest

from mf_aggregators import factorizations
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import Sampler, sampling_scheme, sampling_schemes
from simulations.runs.run_directory import ParticipationLedger

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


def test_a_client_that_was_left_out_is_found_by_the_holder_of_the_seed() -> None:
    sampler = _sampler("poisson")
    ledger = _ledger(sampler, 13)
    changed = _with_cohort(ledger, 12, ledger.cohorts[12][1:])
    assert sampler.scheme.deviation(len(changed.client_ids), changed.cohorts) is None
    found = sampler.deviation(len(changed.client_ids), changed.cohorts)
    assert found == "the clients of round 13 (counted from 1) are not those that the sampler draws"
