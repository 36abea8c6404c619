"""What roundings take of the noise, attacked by two runs that release the same integers."""

import math
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from mf_aggregators.factorizations import (
    Factorization,
    banded,
    banded_inverse,
    blt,
    identity,
    noise_rows,
    optimal,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.kernel import noising_matrices
from mf_aggregators.kernel.draws import STEP
from mf_aggregators.kernel.integer_rows import IntegerRows, Rounding
from mf_aggregators.kernel.noising_matrices import Blocks
from mf_aggregators.kernel.rows import NoiseRecursion, banded_rows, independent_rows
from mf_aggregators.participation import MinSeparation
from mf_aggregators.workloads import prefix_sum
from tests.examples import examples
from tests.mf_aggregators import random_recursions, small_mechanisms
from tests.refusals import refuses

_WIDTH = 3


class _Run:
    """Makes rows of noise for given releases: in which Z would they be, with these sums?"""

    def __init__(self, rows: IntegerRows, blocks: Blocks) -> None:
        self.rows, self.blocks = rows, blocks

    def z_of(self, released: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """The (n, width) int64 rows of Z that give the integers v, in blocks."""
        rows, blocks, unit = self.rows, self.blocks, self.rows.normalised
        w = released - (sums << rows.shift)
        y = (w + (1 << (rows.shift - 1))) >> rows.shift
        z, draws = np.zeros_like(w), unit.draws_earlier_rows_of_z
        vectors = np.zeros((unit.num_state_vectors, w.shape[1]))
        for block in range(blocks.num_blocks):
            start, end = blocks.rounds(block)
            weights, size = blocks.transition(block), end - start
            before = y[start - blocks.num_earlier_rows(block) : start]
            first = blocks.first_row_of_z(block)
            for i in range(size):
                # This row and later ones have weight zero.
                inputs = np.concatenate([before * rows.row_to_z, vectors * rows.row_to_z])
                own = z[first:end] if draws else y[start:end] * rows.row_to_z
                earlier = weights[i] @ np.concatenate([inputs, own])
                z[start + i] = w[start + i] - np.rint(earlier).astype(np.int64)
            driving = z[first:end] if draws else y[start:end]
            if len(vectors):
                vectors = weights[size:] @ np.concatenate([vectors, driving])
        return z


def _single(recursion: NoiseRecursion) -> Blocks:
    return Blocks(recursion, np.arange(recursion.num_rounds + 1))


def _encoded(rows: IntegerRows, dx: np.ndarray) -> np.ndarray:
    """2^c C1 dx."""
    return 2.0**rows.shift * np.linalg.solve(noise_rows.dense(rows.normalised), dx)


@st.composite
def _attacks(draw: st.DrawFn) -> tuple[IntegerRows, Blocks, Rounding, int]:
    recursion = draw(random_recursions.recursions())
    rows = IntegerRows.of(recursion)
    n = recursion.num_rounds
    if draw(st.booleans()):
        return rows, _single(recursion), Rounding.of(rows), draw(st.integers(0, 2**32 - 1))
    inner = draw(st.sets(st.integers(1, n - 1), max_size=4)) if n > 1 else set()
    blocks = Blocks(recursion, np.array([0, *sorted(inner), n], np.int64))
    return rows, blocks, Rounding.of(rows, blocks), draw(st.integers(0, 2**32 - 1))


def _excess(rows: IntegerRows, blocks: Blocks, seed: int) -> float:
    """||dZ + 2^c C1 dx|| for releases and updates of a seed: what roundings add."""
    generator = np.random.default_rng(seed)
    shape = rows.recursion.num_rounds, _WIDTH
    released = generator.integers(-(2**34), 2**34, shape)
    sums = generator.integers(-(2**20), 2**20, shape)
    dx = generator.integers(-5, 6, shape) * (generator.random(shape) < 0.5)
    run = _Run(rows, blocks)
    dz = run.z_of(released, sums + dx) - run.z_of(released, sums)
    return float(np.linalg.norm(dz + _encoded(rows, dx)))


@given(_attacks())
@settings(deadline=None, max_examples=examples(300))
def test_roundings_move_z_by_no_more_than_the_bound(
    attack: tuple[IntegerRows, Blocks, Rounding, int],
) -> None:
    rows, blocks, rounding, seed = attack
    excess = _excess(rows, blocks, seed)
    bound = rounding.operator_norm * (1.0 + 2.0 * rounding.float_error)
    bound *= math.sqrt(rows.recursion.num_rounds * _WIDTH)
    target(excess / bound)
    # The test's own matrix has errors of floats.
    assert excess <= bound * (1.0 + 1e-6) + 1e-3


@pytest.mark.parametrize(
    "factorization",
    [toeplitz(40, 6), small_mechanisms.blt(40, 2), optimal(prefix_sum(40))],
    ids=lambda factorization: str(factorization.mechanism),
)
def test_the_bound_is_of_the_size_of_what_roundings_do(factorization: Factorization) -> None:
    """Random data reach a third of it, and a tenth where C amplifies roundings."""
    rows = IntegerRows.of(factorization.noise_recursion())
    rounding = Rounding.of(rows)
    excess = max(_excess(rows, _single(rows.recursion), seed) for seed in range(20))
    bound = rounding.operator_norm * math.sqrt(40 * _WIDTH)
    assert excess > bound * (0.1 if rows.normalised.draws_earlier_rows_of_z else 0.3)
    assert rounding.float_error < 1e-2


@pytest.mark.parametrize("factorization", small_mechanisms.factorizations(9), ids=str)
def test_noise_is_enlarged_by_what_roundings_take(factorization: Factorization) -> None:
    """||dZ|| of the worst participation is within what the noise multiplier says."""
    rows = IntegerRows.of(factorization.noise_recursion())
    rounding = Rounding.of(rows, Blocks.of(rows.recursion))
    norms = np.linalg.norm(np.linalg.inv(noise_rows.dense(rows.recursion)), axis=0)
    num_parameters, asked = 2_000_000, 0.7 * float(np.max(norms))
    stddev = rounding.enlarged(asked, num_parameters=num_parameters, largest_cohort=1000)
    assert asked < stddev < 1.02 * asked
    step = stddev * np.max(np.abs(rows.steps))
    # Of all clients, and of one that takes part once, in the round that changes least.
    for sensitivity in (float(np.max(norms)), float(np.min(norms))):
        moved = sensitivity * (1.0 + math.sqrt(num_parameters) * step) / stddev
        moved += rounding.operator_norm * STEP * math.sqrt(num_parameters * 9)
        assert moved <= sensitivity / asked
        # And not by much more than that.
        assert moved >= sensitivity / asked * (1.0 - 1e-3)


@given(_attacks())
@settings(deadline=None, max_examples=examples(100))
def test_rows_that_follow_from_the_same_rows_have_the_same_z(
    attack: tuple[IntegerRows, Blocks, Rounding, int],
) -> None:
    """Amplification takes it that a participation changes b rows, also where blocks are larger."""
    rows, blocks, _, seed = attack
    generator = np.random.default_rng(seed)
    n, earlier = rows.recursion.num_rounds, rows.normalised.num_earlier_rows
    if rows.normalised.draws_earlier_rows_of_z or rows.normalised.num_state_vectors:
        return
    released = generator.integers(-(2**34), 2**34, (n, _WIDTH))
    dx = np.zeros((n, _WIDTH), np.int64)
    taken = generator.integers(n)
    dx[taken] = generator.integers(-5, 6, _WIDTH)
    run = _Run(rows, blocks)
    dz = run.z_of(released, dx) - run.z_of(released, np.zeros_like(dx))
    changed = np.flatnonzero(np.any(dz, axis=1))
    assert np.all((changed >= taken) & (changed <= taken + earlier))


def test_noise_that_roundings_would_take_too_much_of_is_refused() -> None:
    rounding = Rounding.of(IntegerRows.of(independent_rows(1000)))

    def enlarged(sigma: float, num_parameters: int) -> float:
        return rounding.enlarged(sigma, num_parameters=num_parameters, largest_cohort=1000)

    assert enlarged(1.0, 10**6) < 1.0002
    with refuses("rounding", "clip norms"):
        enlarged(1e3, 10**8)
    with refuses("64 bits"):
        enlarged(1e-14, 10)


def test_float_errors_of_state_vectors_are_those_of_all_rounds() -> None:
    """They add up: of twice as many rounds, at most about twice as much, and never less."""
    errors = [
        Rounding.of(IntegerRows.of(blt(n, 3).noise_recursion())).float_error
        for n in (100, 200, 400)
    ]
    assert errors == sorted(errors)
    assert 0.0 < errors[0] < errors[-1] < 1.0


_OF_DOCUMENTS = MinSeparation(342, 6)
_PRINTED: dict[str, Callable[[int], Factorization]] = {
    "`identity`": identity,
    "`blt`, 4 buffers": lambda n: blt(n, 4, participation=_OF_DOCUMENTS),
    "`toeplitz`, 64 bands": lambda n: toeplitz(n, 64, participation=_OF_DOCUMENTS),
    "`banded`, 16 bands": lambda n: banded(prefix_sum(n), 16, participation=_OF_DOCUMENTS),
    "`tree`, decoder `full`": lambda n: tree_aggregation(n, "full"),
    "`tree`, decoder `online`": lambda n: tree_aggregation(n, "online"),
    "`banded_inverse`, 16 bands": lambda n: banded_inverse(n, 16, participation=_OF_DOCUMENTS),
    "`optimal` (dense)": lambda n: optimal(prefix_sum(n)),
}

# Their searches are slow at this size.
_SEARCHED = "`banded`, 16 bands", "`optimal` (dense)"


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in _SEARCHED else name
        for name in _PRINTED
    ],
)
def test_the_table_of_the_documents(name: str) -> None:
    """How much more noise the rows of each mechanism need, in per cent, rounded up."""
    text = (pathlib.Path(__file__).parents[3] / "docs" / "noise.md").read_text()
    header, _, *lines = text.split("\n| 2,052 rounds, ")[1].split("\n\n")[0].splitlines()
    num_parameters = int(header.split("|")[0].split()[2].replace(",", ""))
    rows = {cells[0]: cells[1:] for cells in map(_cells, lines)}
    assert rows.keys() == _PRINTED.keys()
    factorization = _PRINTED[name](2052)
    sensitivity = factorization.sensitivity(_OF_DOCUMENTS).value
    rows_of_noise = IntegerRows.of(
        random_recursions.divided(factorization.noise_recursion(), sensitivity)
    )
    rounding = Rounding.of(rows_of_noise, Blocks.of(rows_of_noise.recursion))
    for noise_multiplier, printed in zip((0.3, 1.0, 8.0), rows[name], strict=True):

        def more(sigma: float = noise_multiplier) -> float:
            stddev = rounding.enlarged(sigma, num_parameters=num_parameters, largest_cohort=1 << 22)
            return 100.0 * (stddev / sigma - 1.0)

        if printed == "refused":
            with refuses("rounding", "clip norms"):
                more()
        else:
            number = float(printed.split()[0])
            last_digit = 10.0 ** -len(printed.split()[0].partition(".")[2])
            assert number - last_digit < more() <= number


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_an_unknown_error_of_floats_is_no_bound(unknown: float) -> None:
    rows = IntegerRows.of(independent_rows(3))
    for rounding in (Rounding(rows, 1.0, unknown), Rounding(rows, unknown, 0.0)):
        for covers in (rounding.enlarged, rounding.covered):
            with refuses("rounding", "clip norms"):
                covers(1.0, num_parameters=1, largest_cohort=1)


def test_an_error_that_is_not_a_number_is_not_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of rows, the largest error counts, and NaN in any of them."""
    rows = IntegerRows.of(banded_rows(np.tri(3, 2)))
    transition = noising_matrices.transition

    def broken(normalised: NoiseRecursion, start: int, end: int) -> np.ndarray:
        return transition(normalised, start, end) * (math.nan if start == 1 else 1.0)

    monkeypatch.setattr(noising_matrices, "transition", broken)
    assert math.isnan(Rounding.of(rows).float_error)
