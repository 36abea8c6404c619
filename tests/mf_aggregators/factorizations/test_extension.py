"""Factorizations that go on after their last round: the rows that stay, and what is refused."""

import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import catalogue, checkpoints, workloads
from mf_aggregators.accounting import zcdp_rho
from mf_aggregators.factorizations import (
    BandedFactorization,
    BltFactorization,
    DenseFactorization,
    ExtensionError,
    Factorization,
    banded,
    banded_inverse,
    blt,
    identity,
    noise_rows,
    optimal,
    structured,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.kernel.rows import Blocks
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.mf_aggregators import brute_force, small_mechanisms
from tests.refusals import refuses

_ROUNDS = 11
_ROOT = pathlib.Path(__file__).parents[3]


def _sums(num_rounds: int) -> Workload:
    return workloads.Workload.described({"name": "prefix_sum"}, num_rounds)


def _extendable(num_rounds: int) -> list[Factorization]:
    """Factorizations of every kind that goes on, and of every kind of noise."""
    return [
        identity(num_rounds),
        tree_aggregation(num_rounds),
        small_mechanisms.blt(num_rounds, 2),
        toeplitz(num_rounds, 3),
        toeplitz(num_rounds),
        toeplitz(num_rounds, coefficients="square_root"),
        toeplitz(num_rounds, num_rounds, MinSeparation(4)),
        banded(_sums(num_rounds), 1),
        banded(_sums(num_rounds), 4),
        banded(_sums(num_rounds), 3, False, FixedEpochOrder(3, 4)),
    ]


_ALL = _extendable(_ROUNDS)
_EVERY = pytest.mark.parametrize(
    "factorization", _ALL, ids=[f"{i}-{each.mechanism}" for i, each in enumerate(_ALL)]
)


@_EVERY
@pytest.mark.parametrize("ends", [(12,), (23,), (13, 40)])
def test_rows_of_noise_stay(factorization: Factorization, ends: tuple[int]) -> None:
    z = np.random.default_rng(0).normal(size=(ends[-1], 40))
    before = noise_rows.apply(factorization.noise_recursion(), z[:_ROUNDS])
    whole = factorization
    for end in ends:
        whole = whole.extended(end)
    assert whole.num_rounds == ends[-1]
    assert whole.horizons == (_ROUNDS, *ends[:-1])
    recursion = whole.noise_recursion()
    rows = noise_rows.apply(recursion, z)
    # Rows that are released are integers, and stay bit for bit; products of floats here may not.
    np.testing.assert_allclose(rows[:_ROUNDS], before, atol=1e-14)
    # Those of the whole are rows of one matrix, which the encoder inverts.
    np.testing.assert_allclose(whole.noising_matrix()[:, : ends[-1]], _square(whole), atol=1e-12)
    assert type(recursion) is type(factorization.noise_recursion())
    alone = factorization.noise_recursion()
    assert recursion.num_earlier_rows == alone.num_earlier_rows
    assert recursion.num_state_vectors == alone.num_state_vectors


def _square(factorization: Factorization) -> np.ndarray:
    """C^-1 from C, or from rows of a stream for a tree, which has more rows than rounds."""
    strategy = factorization.strategy_matrix()
    if len(strategy) == factorization.num_rounds:
        return np.linalg.inv(strategy)
    return factorization.noising_matrix()[:, : factorization.num_rounds]


@_EVERY
def test_the_leading_part_of_the_matrix_stays(factorization: Factorization) -> None:
    whole = factorization.extended(20)
    if factorization.mechanism == "tree":
        before, after = (
            noise_rows.dense(each.noise_recursion()) for each in (factorization, whole)
        )
    else:
        before, after = factorization.strategy_matrix(), whole.strategy_matrix()
    np.testing.assert_allclose(after[:_ROUNDS, :_ROUNDS], before, rtol=1e-12, atol=1e-300)
    assert whole.mechanism == factorization.mechanism
    assert whole.optimality_gap is None


@_EVERY
def test_what_was_extended_is_found_again(
    factorization: Factorization, tmp_path: pathlib.Path
) -> None:
    checkpoints.save(factorization.extended(13).extended(20), tmp_path / "checkpoint")
    whole = checkpoints.load(tmp_path / "checkpoint")
    assert whole.horizons == (_ROUNDS, 13)
    first, second = whole.at_horizon(_ROUNDS), whole.at_horizon(13)
    assert (first.horizons, second.horizons) == ((), (_ROUNDS,))
    for name, array in factorization.arrays().items():
        np.testing.assert_array_equal(first.arrays()[name], array)
    z = np.random.default_rng(1).normal(size=(20, 7))
    np.testing.assert_array_equal(
        noise_rows.apply(first.noise_recursion(), z[:_ROUNDS]),
        noise_rows.apply(factorization.noise_recursion(), z[:_ROUNDS]),
    )
    np.testing.assert_allclose(
        noise_rows.apply(second.noise_recursion(), z[:13]),
        noise_rows.apply(whole.noise_recursion(), z)[:13],
        atol=1e-14,
    )
    with refuses("12"):
        whole.at_horizon(12)


@_EVERY
@pytest.mark.parametrize("ends", [(12,), (60,), (13, 63)])
def test_blocks_of_earlier_plans_stay(factorization: Factorization, ends: tuple[int]) -> None:
    plans, recursion = [_ROUNDS], factorization.noise_recursion()
    before, whole = Blocks.of(recursion), factorization
    for end in ends:
        whole = whole.extended(end)
        blocks = Blocks.of(whole.noise_recursion(), plans)
        assert list(blocks.starts[: before.num_blocks + 1]) == list(before.starts)
        assert blocks.starts[-1] == end
        assert np.all(np.diff(blocks.starts) > 0)
        for block in range(before.num_blocks):
            np.testing.assert_array_equal(blocks.transition(block), before.transition(block))
            assert blocks.first_row_of_z(block) == before.first_row_of_z(block)
        before = blocks
        plans.append(end)


def _most_columns(gram: np.ndarray, separation: int, most: int) -> float:
    """The largest sum of the entries of a Gram matrix over the pairs of a pattern."""
    best = 0.0
    schema = MinSeparation(separation, most)
    for pattern in brute_force.patterns(schema, len(gram)):
        best = max(best, float(np.sum(gram[np.ix_(pattern, pattern)])))
    return best


@st.composite
def _decays(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Interlacing decays of one or two buffers."""
    numbers = draw(st.lists(st.floats(0.02, 0.98), min_size=2, max_size=2, unique=True))
    outer, inner = sorted(numbers, reverse=True)
    return np.array([outer]), np.array([inner])


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.integers(1, 6), _decays())
def test_zcdp_of_trees_and_blts_is_that_of_their_columns(
    before: int, more: int, separation: int, most: int, decays: tuple[np.ndarray, np.ndarray]
) -> None:
    rounds = before + more
    schema = MinSeparation(separation, most)
    # A tree, from its definition: all complete nodes of 2^h rounds.
    nodes = [
        [start <= i < start + size for i in range(rounds)]
        for size in (1, 2, 4, 8)
        for start in range(0, rounds - size + 1, size)
    ]
    # A BLT, from its generating function: (1 - e x) / (1 - d x).
    (decay,), (inverse,) = decays
    column = [1.0, *((decay - inverse) * decay**t for t in range(rounds - 1))]
    matrix = np.array(
        [[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)]
    )
    tree = tree_aggregation(before).extended(rounds)
    released = np.linalg.inv(tree.noise_rows(np.eye(rounds)))
    for made, strategy, bound in (
        (tree, released, np.array(nodes, float)),
        (BltFactorization(before, *decays).extended(rounds), matrix, matrix),
    ):
        squared = _most_columns(strategy.T @ strategy, separation, most)
        found = made.sensitivity(schema)
        assert found.value**2 <= _most_columns(bound.T @ bound, separation, most) * (1 + 1e-9)
        assert found.value**2 >= squared * (1 - 1e-9)
        if found.is_exact:
            assert found.value**2 == pytest.approx(squared, rel=1e-9)
        # sigma s / s' for the sigma = 1.5 of the shorter plan.
        first = made.at_horizon(before).sensitivity(schema).value
        whole = 1.5 * first / found.value
        rho = found.value**2 / first**2 / (2 * 1.5**2)
        assert zcdp_rho(whole) == pytest.approx(rho, rel=1e-9)


@_EVERY
@pytest.mark.parametrize(
    "schema", [SingleParticipation(), MinSeparation(4), MinSeparation(2, 3), FixedEpochOrder(3, 5)]
)
def test_the_sensitivity_of_the_whole_bounds_every_pattern(
    factorization: Factorization, schema: Participation
) -> None:
    whole = factorization.extended(14, participation=schema)
    stated = whole.sensitivity(schema)
    worst = brute_force.scalar_sensitivity(whole.strategy_matrix(), schema)
    assert stated.value >= worst * (1.0 - 1e-12)
    assert stated.value >= factorization.sensitivity(schema).value * (1.0 - 1e-12)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(2, 12), st.integers(1, 12), st.integers(1, 6), st.data())
def test_banded_matrices_of_any_kind_go_on(
    before: int, more: int, num_bands: int, data: st.DataObject
) -> None:
    num_bands = min(num_bands, before)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    bands = generator.normal(size=(before, num_bands)) * np.tri(before, num_bands)
    bands[:, 0] = generator.uniform(0.5, 2.0, size=before)
    made = BandedFactorization(bands)
    schemas: list[Participation] = [SingleParticipation(), MinSeparation(num_bands)]
    schema = data.draw(st.sampled_from(schemas))
    whole = made.extended(before + more, participation=schema)
    np.testing.assert_array_equal(whole.arrays()["bands"][:before], bands)
    error = whole.total_error(_sums(before + more), schema)
    # 32 bits hold the rows in the steps that the run began with.
    norms = [each.noise_recursion().normalised.row_norms()[0] for each in (made, whole)]
    assert np.max(norms[1]) <= 1.1 * np.max(norms[0])
    # At least as good as to begin anew, with independent noise, after the first plan.
    anew = np.zeros((before + more, num_bands))
    anew[:before] = bands
    columns = np.linalg.norm(made.strategy_matrix(), axis=0)[: max(1, before - num_bands + 1)]
    anew[before:, 0] = np.sqrt(np.mean(np.square(columns)))
    assert error <= BandedFactorization(anew).total_error(_sums(before + more), schema) * (1 + 1e-6)


# How much the error of an extension to twice the rounds is above that of an optimum for them.
_AT_MOST = {"blt": 1.03, "toeplitz": 1.03, "banded": 1.08, "tree": 1.0 + 1e-12, "identity": 1.0}


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("schema", [SingleParticipation(), MinSeparation(16)])
def test_extensions_are_nearly_as_good_as_what_is_planned_for_all_rounds(
    schema: Participation,
) -> None:
    def made(num_rounds: int) -> list[Factorization]:
        return [
            blt(num_rounds, 2, schema),
            toeplitz(num_rounds, 16, schema),
            banded(_sums(num_rounds), 16),
            tree_aggregation(num_rounds),
            identity(num_rounds),
        ]

    for before, planned in zip(made(64), made(128), strict=True):
        whole = before.extended(128, participation=schema)
        errors = [each.total_error(_sums(128), schema) for each in (whole, planned)]
        assert errors[0] <= _AT_MOST[whole.mechanism] * errors[1]


def _refused(factorization: Factorization, num_rounds: int = 20) -> str:
    with pytest.raises(ExtensionError) as caught:
        factorization.extended(num_rounds)
    return str(caught.value)


def test_what_cannot_go_on_says_why() -> None:
    dense = optimal(workloads.prefix_sum(8))
    assert "more rounds change the first rows" in _refused(dense)
    assert "bands of C^-1 are optimised together" in _refused(banded_inverse(8, 2))
    assert "approximates a matrix for one number of rounds" in _refused(structured(dense, 2, 1))
    assert "depends on all later rounds" in _refused(tree_aggregation(8, "full"))
    assert "scaled up because they end" in _refused(toeplitz(8, 3, equal_column_norms=True))


def test_a_tree_goes_on_as_long_as_its_state_has_room() -> None:
    made = tree_aggregation(600)
    assert made.extended(4095).num_rounds == 4095
    assert "at most 4095 rounds" in _refused(made, 4096)
    # What it began with decides, however often it is extended.
    assert "began with 600 rounds" in _refused(made.extended(4000), 4096)


@_EVERY
def test_an_extension_has_more_rounds(factorization: Factorization) -> None:
    for rounds in (_ROUNDS, _ROUNDS - 1):
        assert "has 11 rounds already" in _refused(factorization, rounds)
    with refuses("19 rounds"):
        factorization.extended(20, workload=_sums(19))


def test_every_mechanism_says_whether_it_goes_on() -> None:
    for mechanism in catalogue.ENTRIES.values():
        made = mechanism.factorization
        assert made is not None
        assert made.can_extend != (made.reason != Factorization.reason), "either, or why not"


def _rows_of_the_documents(heading: str) -> dict[str, list[str]]:
    """The cells of a table of docs/mechanisms.md by its first column."""
    text = (_ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    lines = text[text.index(heading) :].splitlines()[2:]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines)
    ]
    return {first: rest for first, *rest in rows}


def test_the_table_of_the_documents_is_what_mechanisms_say() -> None:
    own = {
        f"`{name}`": (made.can_extend, "" if made.can_extend else made.reason)
        for name, each in catalogue.ENTRIES.items()
        if (made := each.factorization) is not None
    }
    rows = _rows_of_the_documents("| mechanism | how it is extended |")
    assert {name: (bool(how), reason) for name, (how, reason) in rows.items()} == own


def test_a_class_that_cannot_go_on_extends_nothing() -> None:
    """Whatever a checkpoint says."""
    broken = DenseFactorization(np.eye(5), parameters={"extends": [3]})
    with pytest.raises(ExtensionError):
        broken.at_horizon(3)
