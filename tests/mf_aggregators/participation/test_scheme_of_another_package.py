"""A sampling scheme that is defined here goes through guarantee, ledger and statement."""

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.participation import FixedEpochOrder, Sampler, SamplingScheme, registry
from mf_aggregators.participation.random_participation import Amplified, Certification
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import RealisedParticipation
from mf_aggregators.privacy.statement import PrivacyStatement, RunFacts
from mf_aggregators.sampling import random_streams
from mf_aggregators.sampling.random_streams import Stream


@dataclasses.dataclass(frozen=True)
class _OneShuffle(SamplingScheme):
    """Batches of one shuffled list, in the same order each epoch, with nothing amplified."""

    name: ClassVar[str] = "one_shuffle"
    has_random_sizes: ClassVar[bool] = False

    @classmethod
    def of_sizes(
        cls,
        num_rounds: int,
        num_bands: int,
        population: int,
        clients_per_round: int,
        separation: int | None = None,
    ) -> "_OneShuffle":
        del separation
        return cls(num_rounds, num_bands, population, clients_per_round)

    @property
    def _epoch(self) -> int:
        return self.population // self.clients_per_round

    def schema(self) -> FixedEpochOrder:
        return FixedEpochOrder(math.ceil(self.num_rounds / self._epoch), self._epoch)

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: np.ndarray | None,
        certification: Certification,
        num_coordinates: int,
    ) -> Amplified:
        del columns, certification
        most = self.most_participations()
        epsilon = mfa.accounting.epsilon(
            sigma / math.sqrt(most),
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=most,
        )
        return Amplified(epsilon, None)

    def calibrated(
        self,
        target: float,
        delta: float,
        columns: np.ndarray | None,
        certification: Certification,
        num_coordinates: int,
    ) -> float:
        del columns, certification
        most = self.most_participations()
        return math.sqrt(most) * mfa.accounting.noise_multiplier(
            target, delta, num_coordinates=num_coordinates, disjoint_participations=most
        )

    def sampler(self, seed: int) -> "_Sampler":
        return _Sampler(self, seed)

    def _deviation_of_rounds(self, cohorts: Sequence[np.ndarray]) -> str | None:
        for index in range(self._epoch, len(cohorts)):
            if not np.array_equal(cohorts[index], cohorts[index - self._epoch]):
                return f"round {index + 1} has other clients than that of the epoch before"
        return None

    @property
    def label(self) -> str:
        return "one shuffle"

    def condition(self, sampler: str | None = None) -> str:
        return f"a data centre draws every batch by {sampler}."

    def accounting_words(self) -> str:
        return "Nothing is amplified by one shuffle."

    def assumption_words(self) -> str:
        return "One shuffle: batches come in the same secret order each epoch."

    def together_words(self) -> str:
        return "All rounds together are one Gaussian mechanism."


class _Sampler(Sampler):
    def _draw(self, round_index: int) -> np.ndarray:
        size = self.scheme.clients_per_round
        order = random_streams.generator_of(self.seed, Stream.BATCHES, 100).permutation(
            self.scheme.population
        )
        first = round_index % (self.scheme.population // size) * size
        return np.sort(order[first : first + size])

    def _num_eligible(self, round_index: int) -> int:
        return self.scheme.population


_SCHEME = _OneShuffle(num_rounds=12, num_bands=2, population=40, clients_per_round=10)


def test_the_scheme_has_a_guarantee_of_its_own_and_a_statement() -> None:
    factorization = mfa.factorizations.banded(12, num_bands=2)
    sigma = _SCHEME.noise_multiplier(4.0, 1e-5)
    plan = guarantees.sampled(factorization, _SCHEME, sigma, 1e-5)
    # Three participations of a client, of orthogonal columns of equal norm: the fixed order.
    order = guarantees.planned(factorization, FixedEpochOrder(3, 4), sigma / math.sqrt(3.0), 1e-5)
    assert plan.epsilon == pytest.approx(order.epsilon, rel=1e-9)
    assert plan.participation == FixedEpochOrder(3, 4)
    assert plan.event() == order.event()
    rates = np.array([0.001, 0.1])
    np.testing.assert_allclose(
        plan.true_positive_rate(rates), order.true_positive_rate(rates), rtol=1e-9
    )
    facts = RunFacts("banded, 12 rounds", 40, 10, 1.0, noise_seed_is_fixed=False)
    took_place = RealisedParticipation(12, 40, 4, 3, keeps_sampling=True)
    realised = guarantees.realised(plan, factorization, took_place)
    statement = PrivacyStatement(facts, plan, took_place, realised)
    assert statement.status == "finished"
    text = statement.to_markdown()
    assert _SCHEME.accounting_words() in text
    assert _SCHEME.assumption_words() in text
    assert statement.to_dict()["amplification"] == _SCHEME.to_dict()


def test_its_ledgers_are_checked() -> None:
    sampler = _SCHEME.sampler(7)
    cohorts = [sampler.draw(index) for index in range(12)]
    assert sampler.deviation(40, cohorts) is None
    moved = [*cohorts[:-1], cohorts[0]]
    assert "round 12" in str(_SCHEME.deviation(40, moved))
    assert _SCHEME.sampler(8).deviation(40, cohorts) is not None


def test_its_entry_point_makes_it_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.EntryPoint("one_shuffle", f"{__name__}:_OneShuffle", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [found])
    fresh = functools.cache(registry.sampling_schemes.__wrapped__)
    monkeypatch.setattr(registry, "sampling_schemes", fresh)
    assert registry.sampling_from_dict(_SCHEME.to_dict()) == _SCHEME
    broken = importlib.metadata.EntryPoint("poisson", f"{__name__}:_OneShuffle", registry.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])
    fresh.cache_clear()
    with pytest.warns(registry.SchemeWarning):
        assert "one_shuffle" not in registry.sampling_schemes()
