"""A sampling scheme that is defined here goes through guarantee, ledger and statement."""

import dataclasses
import functools
import importlib.metadata
import math
from typing import ClassVar

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import random_streams
from mf_aggregators.participation import (
    FixedEpochOrder,
    Sampler,
    SamplingScheme,
    registry,
)
from mf_aggregators.participation.schemes import accounted
from mf_aggregators.planning import planner, plans, proposals
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import ObservedParticipation
from mf_aggregators.privacy.statement import PrivacyStatement, RunFacts
from mf_aggregators.random_streams import Stream
from tests.refusals import refuses


class _Sampler(Sampler):
    def _draw(self, round_index: int) -> np.ndarray:
        size = self.scheme.clients_per_round
        order = random_streams.generator_of(self.seed, Stream.BATCHES, 100).permutation(
            self.scheme.population
        )
        first = round_index % (self.scheme.population // size) * size
        return np.sort(order[first : first + size])


@dataclasses.dataclass(frozen=True)
class _OneShuffle(SamplingScheme):
    """Batches of one shuffled list, in the same order each epoch, with nothing amplified."""

    name: ClassVar[str] = "one_shuffle"
    has_random_sizes: ClassVar[bool] = False

    def schema(self) -> FixedEpochOrder:
        batches = self.population // self.clients_per_round
        return FixedEpochOrder(math.ceil(self.num_rounds / batches), batches)

    def sampler(self, seed: int) -> _Sampler:
        return _Sampler(self, seed)


_SCHEME = _OneShuffle(num_rounds=12, num_bands=2, population=40, clients_per_round=10)


def test_the_scheme_has_a_guarantee_of_its_own_and_a_statement() -> None:
    factorization = mfa.factorizations.banded(12, num_bands=2)
    sigma = _SCHEME.noise_multiplier(4.0, 1e-5)
    plan = guarantees.sampled(factorization, _SCHEME, sigma, 1e-5)
    # Three participations of a client, of orthogonal columns of equal norm: the fixed order.
    order = guarantees.planned(factorization, FixedEpochOrder(3, 4), sigma / math.sqrt(3.0), 1e-5)
    assert plan.epsilon == pytest.approx(order.epsilon, rel=1e-9)
    assert plan.participation == FixedEpochOrder(3, 4)
    alone = mfa.accounting.composed_epsilon([order.event()], 1e-5)
    assert mfa.accounting.composed_epsilon([plan.event()], 1e-5) >= alone * (1.0 - 1e-9)
    rates = np.array([0.001, 0.1])
    np.testing.assert_allclose(
        plan.true_positive_rate(rates), order.true_positive_rate(rates), rtol=1e-9
    )
    facts = RunFacts(
        "banded, 12 rounds",
        40,
        10,
        1.0,
        noise_seed_is_fixed=False,
        public_data="none",
        enforcement="The server draws every batch.",
    )
    observed = ObservedParticipation(12, 40, 4, 3, keeps_sampling=True)
    guarantee = guarantees.observed(plan, factorization, observed)
    statement = PrivacyStatement(facts, plan, observed, guarantee)
    assert statement.status == "finished"
    text = statement.to_markdown()
    assert _SCHEME.accounting_words() in text
    assert _SCHEME.assumption_words() in text
    # Nothing rests on draws that nobody knows.
    assert "with amplification" not in text.lower()
    assert "secret here" not in text
    assert plan.part_of_client().amplified_epsilon is None
    assert statement.to_dict()["amplification"] == _SCHEME.to_dict()


def test_its_ledgers_are_checked() -> None:
    sampler = _SCHEME.sampler(7)
    cohorts = [sampler.draw(index) for index in range(12)]
    assert sampler.deviation(40, cohorts) is None
    # Twice within one epoch, and an epoch without some clients.
    for moved in ([*cohorts[:-1], cohorts[0]], [*cohorts[:4], *cohorts[7:8], *cohorts[5:8]]):
        assert "exactly 4 rounds apart" in str(_SCHEME.deviation(40, moved))
    assert _SCHEME.sampler(8).deviation(40, cohorts) is not None


def test_participations_that_share_rows_are_not_accounted_for_by_default() -> None:
    """Four batches in an epoch are too few for five bands: norms would not add in squares."""
    scheme = dataclasses.replace(_SCHEME, num_bands=5)
    for refused in (
        lambda: scheme.epsilon(1.0, 1e-5),
        lambda: scheme.noise_multiplier(4.0, 1e-5),
        lambda: scheme.event(1.0),
        # And so before a run of it begins.
        lambda: mfa.Mechanism(mfa.factorizations.banded(12, num_bands=5), scheme, 1.0),
    ):
        with refuses("4 apart", "5 bands"):
            refused()
    assert dataclasses.replace(scheme, num_rounds=5, population=50).epsilon(1.0, 1e-5) < 5.0
    with refuses("separation"):
        _OneShuffle.of_sizes(12, 2, 40, 10, separation=3)


def test_its_entry_point_makes_it_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.EntryPoint("one_shuffle", f"{__name__}:_OneShuffle", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [found])
    fresh = functools.cache(registry.sampling_schemes.__wrapped__)
    monkeypatch.setattr(registry, "sampling_schemes", fresh)
    assert registry.sampling_from_dict(_SCHEME.to_dict()) == accounted(_SCHEME)
    broken = importlib.metadata.EntryPoint("poisson", f"{__name__}:_OneShuffle", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])
    fresh.cache_clear()
    with pytest.warns(registry.SchemeWarning):
        assert "one_shuffle" not in registry.sampling_schemes()


def test_a_plan_for_any_way_to_take_part_weighs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, type[SamplingScheme]] = {
        **registry.sampling_schemes(),
        "one_shuffle": _OneShuffle,
    }
    for module in (registry, planner, proposals):
        monkeypatch.setattr(module, "sampling_schemes", lambda: known)
    setting = plans.Setting(12, 40, 10, None, plans.ANY_SAMPLING, 8.0, 1e-3, 100)
    found = planner._proposals(setting, None, ["identity"])
    ways = [None if each.sampling is None else each.sampling.name for each in found]
    # Timers, and all but what another scheme is always better than.
    assert ways.count(None) == 1
    weighed = {name for name, each in known.items() if not each.is_dominated}
    assert set(ways) == {None, *weighed}
    assert "one_shuffle" in weighed
    assert known.keys() - weighed == {"fixed_size", "shuffling"}
