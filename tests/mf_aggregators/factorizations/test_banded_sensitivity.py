"""Sensitivities from bands against those of the dense matrix and of all patterns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import sensitivity
from mf_aggregators.factorizations.banded import sensitivity_of_bands
from mf_aggregators.linear_algebra.banded_matrices import matrix_from_bands
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from tests.examples import examples


def _bands(data: st.DataObject, num_rounds: int) -> np.ndarray:
    num_bands = data.draw(st.integers(1, num_rounds))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    bands = generator.normal(size=(num_rounds, num_bands))
    if data.draw(st.booleans()):
        bands = np.abs(bands)
    if data.draw(st.booleans()):
        bands[:, num_bands // 2 + 1 :] = 0.0
    return np.where(np.tri(num_rounds, num_bands, dtype=bool), bands, 0.0)


def _schema(data: st.DataObject, num_rounds: int) -> Participation:
    separation = data.draw(st.integers(1, num_rounds))
    most = data.draw(st.integers(1, -(-num_rounds // separation)))
    schemas: list[Participation] = [
        SingleParticipation(),
        MinSeparation(separation),
        MinSeparation(separation, most),
        FixedEpochOrder(most, separation),
    ]
    return data.draw(st.sampled_from(schemas))


@given(st.integers(1, 60), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_bands_give_what_the_dense_matrix_gives(num_rounds: int, data: st.DataObject) -> None:
    bands = _bands(data, num_rounds)
    participation = _schema(data, num_rounds)
    found = sensitivity_of_bands(bands, participation)
    dense = sensitivity.compute(matrix_from_bands(bands), participation)
    assert found == pytest.approx(dense, rel=1e-12)
    assert found.is_exact == dense.is_exact
    assert found.theorem == dense.theorem


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(
    "participation",
    [
        MinSeparation(1000, 20),
        MinSeparation(10, 50),
        MinSeparation(10),
        MinSeparation(1),
        FixedEpochOrder(12_500, 8),
        SingleParticipation(),
    ],
    ids=str,
)
def test_a_hundred_thousand_rounds_need_no_dense_matrix(participation: Participation) -> None:
    bands = np.where(np.tri(100_000, 32, dtype=bool), 0.9 ** np.arange(32), 0.0)
    found = sensitivity_of_bands(bands, participation)
    # The same in all rounds, so that a matrix for fewer rounds bounds it from below.
    fewer = sensitivity.compute(matrix_from_bands(bands[:100]), participation)
    assert found >= fewer
