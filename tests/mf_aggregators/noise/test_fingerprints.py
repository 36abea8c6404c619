"""Fingerprints tell noising matrices and descriptions from one another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators.kernel.rows import BandedNoise, fingerprint
from mf_aggregators.noise import noising_matrices
from tests.mf_aggregators import small_mechanisms


def _bands(seed: int) -> np.ndarray:
    bands = np.random.default_rng(seed).uniform(0.2, 1.0, (12, 3))
    bands[0, 1:] = bands[1, 2] = 0.0
    return bands


@given(st.integers(0, 11), st.integers(0, 2), st.sampled_from([1e-5, 0.1]))
def test_a_change_of_any_entry_changes_it(row: int, band: int, change: float) -> None:
    bands = _bands(3)
    if band > row:
        return
    changed = bands.copy()
    changed[row, band] *= 1.0 + change
    one, other = (fingerprint(["a"], BandedNoise(each)) for each in (bands, changed))
    assert one != other
    # What processors round differently is no change.
    changed[row, band] = bands[row, band] * (1.0 + 2.0**-51)
    assert one == fingerprint(["a"], BandedNoise(changed))


@pytest.mark.parametrize(
    "other",
    [1.0, {"a": 2.0}, {"b": 1.0}, [1.0], {"a": [1.0, None]}, {"a": 1.0 + 1e-8}, {"a": True}],
    ids=str,
)
def test_descriptions_differ(other: object) -> None:
    recursion = mfa.factorizations.identity(4).noise_recursion()
    one = fingerprint({"a": 1.0}, recursion)
    assert one != fingerprint(other, recursion)
    assert one == fingerprint({"a": 1.0 + 2.0**-52}, recursion)
    assert len(one) == 16


def test_every_mechanism_and_scale_has_one_of_its_own() -> None:
    found = {
        fingerprint([], noising_matrices.scaled_to_sensitivity_one(each, sensitivity))
        for factorization in small_mechanisms.factorizations(9)
        for each in [factorization.noise_recursion()]
        for sensitivity in (1.0, 1.0 + 1e-6)
    }
    assert len(found) == 2 * len(small_mechanisms.factorizations(9))
