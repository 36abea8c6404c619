"""Recursions of random weights, as no mechanism has them all, for hypothesis."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import (
    BandedNoise,
    NoiseRecursion,
    ScaledNoise,
    StateSpaceNoise,
    WindowNoise,
)

_KINDS = (
    BandedNoise,
    None,
    WindowNoise,
    StateSpaceNoise,
    ScaledNoise,
)
# Random weights of more rounds are made smaller, or rows would grow without bound.
_FEW_ROUNDS = 9


@st.composite
def recursions(draw: st.DrawFn, max_rounds: int = _FEW_ROUNDS) -> NoiseRecursion:
    """Recursions of all kinds: phases, sources, feedback, windows longer than the run.

    Args:
      draw: Hypothesis passes it.
      max_rounds: The most rounds. Rows stay near one in size however many there are.

    Returns:
      A strategy.
    """
    # None stands for a dense matrix.
    kind = draw(st.sampled_from(_KINDS))
    num_rounds = draw(st.integers(1, max_rounds))
    width = draw(st.integers(1, num_rounds + (2 if kind is WindowNoise else 0)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    is_long = num_rounds > _FEW_ROUNDS
    if kind is BandedNoise and draw(st.booleans()):
        coefficients = generator.normal(size=width) / (width if is_long else 1.0)
        coefficients[0] = 1.5
        return toeplitz_rows(num_rounds, coefficients)
    if kind is BandedNoise:
        bands = np.tril(generator.normal(size=(num_rounds, width)))
        bands /= 2.0 * width if is_long else 1.0
        bands[:, 0] = generator.uniform(0.5, 2.0, num_rounds)
        return BandedNoise(num_rounds, bands)
    if kind is ScaledNoise:
        inner = draw(_toeplitz_rows(num_rounds, width, generator, is_long))
        scales = np.exp(generator.uniform(-1.0, 1.0, (2, num_rounds)))
        # Rows of columns of one norm have scales of rows alone.
        scales[0] = scales[0] if draw(st.booleans()) else 1.0
        return ScaledNoise(inner, *scales)
    if kind is None:
        matrix = np.tril(generator.normal(size=(num_rounds, num_rounds)))
        return dense_rows(matrix + np.diag(_away_from_zero(generator, num_rounds)))
    if kind is WindowNoise:
        rank = draw(st.integers(0, 3))
        rows = draw(st.sampled_from([1, num_rounds]))
        left, right = generator.normal(size=(2, num_rounds, rank))
        window = generator.normal(size=(rows, width))
        # Of the entries on the diagonal, so that C exists.
        diagonal = _away_from_zero(generator, num_rounds)
        if width == 1:
            window = np.ones((rows, 1))
            left *= 0.2 / np.maximum(1.0, np.abs(np.sum(left * right, axis=1, keepdims=True)))
        else:
            window[:, 0] = diagonal[:rows]
        return WindowNoise(num_rounds, window, left, right)
    phases, states = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    outputs, decays, feedbacks = generator.normal(size=(3, phases, states)) / 2.0
    if is_long:
        # |decay| + |feedback| * sum |outputs| < 1, so that the state vectors stay bounded.
        decays, feedbacks = np.clip(decays, -0.5, 0.5), np.clip(feedbacks, -0.4, 0.4)
        outputs /= np.maximum(1.0, np.sum(np.abs(outputs), axis=1, keepdims=True))
    return StateSpaceNoise(
        phases=generator.integers(0, phases, num_rounds),
        gains=_away_from_zero(generator, phases),
        outputs=outputs,
        sources=generator.integers(0, states, (phases, states)),
        decays=decays,
        feedbacks=feedbacks * draw(st.sampled_from([0.0, 1.0])),
    )


@st.composite
def _toeplitz_rows(
    draw: st.DrawFn, num_rounds: int, width: int, generator: np.random.Generator, is_long: bool
) -> NoiseRecursion:
    """Rows of all kinds that are the same in all rounds, without scales."""
    coefficients = generator.normal(size=(1, width)) / (2.0 * width if is_long else 1.0)
    coefficients[0, 0] = 1.5
    kind = draw(st.sampled_from([BandedNoise, WindowNoise, StateSpaceNoise]))
    if kind is BandedNoise:
        return BandedNoise(num_rounds, coefficients)
    if kind is WindowNoise:
        return WindowNoise(num_rounds, coefficients, *np.empty((2, num_rounds, 0)))
    states = draw(st.integers(1, 4))
    return StateSpaceNoise(
        phases=np.zeros(num_rounds, np.int64),
        gains=np.array([0.7]),
        outputs=generator.uniform(-0.2, 0.2, (1, states)),
        sources=np.arange(states)[np.newaxis],
        decays=generator.uniform(-0.5, 0.5, (1, states)),
        feedbacks=generator.uniform(-0.5, 0.5, (1, states)),
    )


def by_definition(recursion: NoiseRecursion, z: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows as the docstrings of classes define them, and the state vectors after each round.

    Args:
      recursion: The noising matrix of n rounds.
      z: (n, size) rows of Z.
    """
    if isinstance(recursion, ScaledNoise):
        rows, states = by_definition(recursion.inner, z * recursion.scales[:, np.newaxis])
        return rows * recursion.row_scales[:, np.newaxis], states
    rows, state = np.zeros_like(z), np.zeros((recursion.num_state_vectors, z.shape[1]))
    states = []
    for i in range(len(z)):
        if isinstance(recursion, BandedNoise):
            bands = recursion.bands[i if len(recursion.bands) > 1 else 0]
            for t in range(1, min(len(bands), i + 1)):
                rows[i] -= bands[t] * rows[i - t]
            rows[i] = (rows[i] + z[i]) / bands[0]
        elif isinstance(recursion, WindowNoise):
            length = recursion.rows_of_z_per_round
            window = recursion.window[i if len(recursion.window) > 1 else 0]
            if i - length + 1 >= 0:
                state = state + np.outer(recursion.right[i - length + 1], z[i - length + 1])
            rows[i] = recursion.left[i] @ state
            for t in range(min(length, i + 1)):
                rows[i] += window[t] * z[i - t]
        else:
            assert isinstance(recursion, StateSpaceNoise)
            p = recursion.phases[i]
            rows[i] = recursion.gains[p] * z[i] + recursion.outputs[p] @ state
            kept = recursion.decays[p][:, np.newaxis] * state[recursion.sources[p]]
            state = kept + np.outer(recursion.feedbacks[p], rows[i])
        states.append(state)
    return rows, states


def divided(rows: NoiseRecursion, divisor: float) -> NoiseRecursion:
    """Returns the noising matrix of C / divisor."""
    if isinstance(rows, ScaledNoise):
        return dataclasses.replace(rows, row_scales=rows.row_scales * divisor)
    if isinstance(rows, BandedNoise):
        return dataclasses.replace(rows, bands=rows.bands / divisor)
    if isinstance(rows, WindowNoise):
        return dataclasses.replace(rows, window=rows.window * divisor, left=rows.left * divisor)
    assert isinstance(rows, StateSpaceNoise)
    return dataclasses.replace(rows, gains=rows.gains * divisor)


def _away_from_zero(generator: np.random.Generator, count: int) -> np.ndarray:
    """Numbers of both signs, none of which is nearly zero."""
    return generator.uniform(0.5, 2.0, count) * generator.choice([-1.0, 1.0], count)


def banded_rows(bands: FloatArray) -> BandedNoise:
    """Returns the rows of a C with ``bands[i, t] = C[i, i - t]``, (n, b)."""
    return BandedNoise(len(bands), bands)


def toeplitz_rows(num_rounds: int, coefficients: FloatArray) -> BandedNoise:
    """Returns the rows of a Toeplitz C with these coefficients, (b,)."""
    return BandedNoise(num_rounds, np.asarray(coefficients)[np.newaxis])
