"""Replicas against sums over all tuples of patterns, and what is drawn against exact integrals."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.accounting import tilted_outputs
from mf_aggregators.accounting.participation_laws import (
    CoinsUnderTimers,
    OneBin,
    OnePart,
    ParticipationLaw,
)
from mf_aggregators.accounting.tilted_outputs import TiltedOutputs, Untilted
from tests.examples import examples
from tests.mf_aggregators.accounting import participation_patterns
from tests.mf_aggregators.accounting.participation_patterns import cases, mechanism
from tests.refusals import refuses


@given(cases(with_parts=False))
@settings(max_examples=examples(60), deadline=None)
def test_moments_are_those_of_all_tuples(
    case: tuple[ParticipationLaw, np.ndarray, float],
) -> None:
    patterns = participation_patterns.of(*case)
    gram = patterns.means @ patterns.means.T / case[2] ** 2
    order = 1
    while order <= 4 and len(patterns.probabilities) ** order <= 3000:
        expected = sum(
            np.prod(patterns.probabilities[list(each)])
            * math.exp(sum(gram[i, j] for i, j in itertools.combinations(each, 2)))
            for each in itertools.product(range(len(gram)), repeat=order)
        )
        found = TiltedOutputs(mechanism(*case), order).log_moment
        assert found == pytest.approx(math.log(expected), abs=1e-11)
        order += 1


@pytest.mark.parametrize(
    ("law", "matrix"),
    [
        (CoinsUnderTimers(0.35, 2), [[0.8, 0.0], [0.6, 1.0]]),
        (CoinsUnderTimers(0.35, 1, is_stationary=False), [[1.0, 0.0], [0.0, 0.7]]),
        (CoinsUnderTimers(1.0, 2), [[0.8, 0.0], [0.6, 0.9]]),
        (OneBin(3), [[0.8, 0.0], [0.6, 1.0]]),
    ],
)
@pytest.mark.parametrize("order", [0, 1, 2, 4])
def test_losses_have_the_tilted_law(
    law: ParticipationLaw, matrix: list[list[float]], order: int
) -> None:
    """The distribution of losses, against a fine grid of outputs: Kolmogorov and Smirnov.

    Each of these sixteen tests fails by chance with probability 1e-6; the seed is fixed.
    """
    c, sigma = np.array(matrix), 0.9
    of = mechanism(law, c, sigma)
    rng = np.random.default_rng(order)
    outputs: TiltedOutputs | Untilted = TiltedOutputs(of, order) if order else Untilted(of)
    drawn = np.sort(np.concatenate([outputs.log_ratios(rng, 1000) for _ in range(6)]))
    axis = np.linspace(-7.0, 11.0, 401)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1)
    losses = participation_patterns.of(law, c, sigma).log_ratios(grid)
    weights = np.exp(order * losses) * np.prod(scipy.stats.norm.pdf(grid, 0.0, sigma), axis=0)
    by_loss = np.argsort(losses)
    cumulative = np.cumsum(weights[by_loss]) / np.sum(weights)
    expected = np.interp(drawn, losses[by_loss], cumulative)
    steps = np.arange(len(drawn) + 1) / len(drawn)
    distance = max(np.max(np.abs(expected - steps[1:])), np.max(np.abs(expected - steps[:-1])))
    assert distance < scipy.stats.kstwo.isf(1e-6, len(drawn)) + 4e-3


def test_orders_end_where_tables_are_large() -> None:
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.0, 1.0, (2052, 64))
    for separation, expected in ((64, [1, 2, 3]), (342, [1, 2])):
        laws: list[ParticipationLaw] = [CoinsUnderTimers(0.01, separation), OneBin(separation)]
        for law in laws:
            of = tilted_outputs.Mechanism(columns, 1.0, law)
            orders = tilted_outputs.possible_orders(of)
            assert orders == expected


def test_bands_beyond_the_separation_are_refused() -> None:
    with refuses("separation", "3 bands"):
        tilted_outputs.Mechanism(np.ones((5, 3)), 1.0, OneBin(2))


def test_parts_are_not_drawn() -> None:
    of = tilted_outputs.Mechanism(np.ones((5, 1)), 1.0, OnePart(0.5, 2))
    with pytest.raises(TypeError):
        TiltedOutputs(of, 2)


@given(st.integers(1, 3), st.integers(0, 1000))
@settings(max_examples=examples(12), deadline=None)
def test_replicas_keep_their_separation(order: int, seed: int) -> None:
    """In no window of b rounds do more participations begin than there are replicas."""
    law = CoinsUnderTimers(0.6, 3)
    chains = tilted_outputs._Chains(mechanism(law, np.eye(20), 1.0), law, order)
    counts = chains.draw(np.random.default_rng(seed), 50)
    windows = sum(counts[shift : shift + 18] for shift in range(3))
    assert np.max(windows) <= order
    assert np.max(counts) >= 1
