"""What every mechanism promises, checked on all of them alike."""

import functools
import pathlib
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import checkpoints, lower_bounds, workloads
from mf_aggregators.factorizations import (
    BandedFactorization,
    BandedInverseFactorization,
    DenseFactorization,
    Factorization,
    IdentityFactorization,
    NotConvergedWarning,
    StructuredFactorization,
    ToeplitzFactorization,
    TreeAggregationFactorization,
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
from mf_aggregators.factorizations.factorization import bands_of_matrix
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.blt_of_scales import blt_of_scales
from tests.mf_aggregators.toeplitz_cases import dense, schemas
from tests.refusals import refuses

_NUM_ROUNDS = 11
_EPOCHS = FixedEpochOrder(3, 4)
_RATES = tuple(float(rate) for rate in np.linspace(1.0, 0.2, _NUM_ROUNDS))

_WORKLOADS = {
    "prefix_sum": Workload("prefix_sum", _NUM_ROUNDS),
    "momentum": Workload("momentum_sgd", _NUM_ROUNDS, 0.9),
    "constant rate": Workload("momentum_sgd", _NUM_ROUNDS, 0.5, (0.3,) * _NUM_ROUNDS),
    "decaying rates": Workload("momentum_sgd", _NUM_ROUNDS, 0.7, _RATES),
}
_SCHEMAS: tuple[Participation, ...] = (
    SingleParticipation(),
    FixedEpochOrder(3, 4),
    FixedEpochOrder(2, 3),
    FixedEpochOrder(20, 1),
    MinSeparation(4),
    MinSeparation(3, 2),
    MinSeparation(1, 2),
    MinSeparation(_NUM_ROUNDS),
)


def _prefix_sum() -> np.ndarray:
    return workloads.prefix_sum(_NUM_ROUNDS)


_MAKERS: dict[str, Callable[[], Factorization]] = {
    "identity": lambda: identity(_NUM_ROUNDS),
    "tree online": lambda: tree_aggregation(_NUM_ROUNDS),
    "tree full": lambda: tree_aggregation(_NUM_ROUNDS, "full"),
    "optimal": lambda: optimal(_prefix_sum()),
    "optimal for epochs": lambda: optimal(_prefix_sum(), _EPOCHS),
    "optimal of equal norms": lambda: optimal(_prefix_sum(), _EPOCHS, equal_column_norms=True),
    "banded": lambda: banded(_prefix_sum(), 4),
    "banded of free norms": lambda: banded(
        _prefix_sum(), 3, False, FixedEpochOrder(2, 3), relative_gap=1e-3
    ),
    "structured": lambda: structured(optimal(_prefix_sum()), 2, 3),
    "structured without rest": lambda: structured(optimal(_prefix_sum()), 3, 0),
    "toeplitz": lambda: toeplitz(_NUM_ROUNDS, 4),
    "toeplitz for epochs": lambda: toeplitz(_NUM_ROUNDS, 8, _EPOCHS),
    "toeplitz of all bands": lambda: toeplitz(_NUM_ROUNDS),
    "toeplitz of equal norms": lambda: toeplitz(_NUM_ROUNDS, 4, equal_column_norms=True),
    "toeplitz of all bands and equal norms": lambda: toeplitz(_NUM_ROUNDS, equal_column_norms=True),
    "blt": lambda: blt(_NUM_ROUNDS, 2),
    "blt of equal norms": lambda: blt(_NUM_ROUNDS, 2, equal_column_norms=True),
    "blt of equal norms for epochs": lambda: blt(
        Workload("momentum_sgd", _NUM_ROUNDS, 0.7, _RATES), 2, _EPOCHS, equal_column_norms=True
    ),
    "banded inverse": lambda: banded_inverse(_NUM_ROUNDS, 4),
    "banded inverse for epochs": lambda: banded_inverse(_NUM_ROUNDS, 4, _EPOCHS),
    "banded inverse of equal norms": lambda: banded_inverse(
        _NUM_ROUNDS, 4, equal_column_norms=True
    ),
}


@functools.cache
def _made(name: str) -> Factorization:
    return _MAKERS[name]()


every_mechanism = pytest.mark.parametrize("name", _MAKERS)


@every_mechanism
def test_a_described_workload_gives_the_errors_of_its_matrix(name: str) -> None:
    factorization = _made(name)
    for workload in _WORKLOADS.values():
        squared = factorization.squared_decoder_rows(workload)
        decoder = factorization.decoder_matrix(workload)
        expected = np.sum(np.square(decoder), axis=1)
        np.testing.assert_allclose(squared, expected, rtol=1e-9)
        np.testing.assert_allclose(
            factorization.squared_decoder_rows(workload.matrix()), expected, rtol=1e-9
        )
        for schema in _SCHEMAS[:2]:
            variances = factorization.sensitivity(schema).value ** 2 * expected
            np.testing.assert_allclose(
                factorization.per_round_variance(workload, schema), variances, rtol=1e-9
            )
            errors = (
                factorization.total_error(workload, schema),
                factorization.rmse(workload, schema),
                factorization.max_error(workload, schema),
            )
            expected_errors = np.sqrt([np.sum(variances), np.mean(variances), np.max(variances)])
            np.testing.assert_allclose(errors, expected_errors, rtol=1e-9)
            found = factorization.errors(workload, schema)
            assert tuple(found.to_dict().values()) == errors
            assert found.sensitivity == factorization.sensitivity(schema)


@pytest.mark.short_cases(36)
@every_mechanism
@pytest.mark.parametrize("schema", _SCHEMAS, ids=str)
def test_the_sensitivity_is_never_below_the_largest_change(
    name: str, schema: Participation
) -> None:
    factorization = _made(name)
    strategy = factorization.strategy_matrix()
    computed = factorization.sensitivity(schema)
    truth = brute_force.scalar_sensitivity(strategy, schema)
    assert computed.value >= truth * (1 - 1e-12)
    if computed.is_exact:
        assert computed.value == pytest.approx(truth, rel=1e-9)
    else:
        # A bound, but not an absurd one: at most the sum of column norms of a pattern.
        norms = np.linalg.norm(strategy, axis=0)
        worst = max(
            float(np.sum(norms[list(pattern)]))
            for pattern in brute_force.patterns(schema, _NUM_ROUNDS)
        )
        assert computed.value <= worst * (1 + 1e-9)
    generator = np.random.default_rng(0)
    for pattern in ((0, 4, 8), (2, 6, 10)):
        if pattern in set(brute_force.patterns(schema, _NUM_ROUNDS)):
            change = brute_force.vector_change(strategy, pattern, 3, generator)
            assert change <= computed.value * (1 + 1e-9)


@every_mechanism
def test_certified_gaps_are_those_of_the_stated_schema(name: str) -> None:
    """At the prefix sum and the schema it was made for, no mechanism beats a certificate."""
    factorization = _made(name)
    gap, schema = factorization.optimality_gap, factorization.participation
    assert (gap is not None) == isinstance(factorization, (DenseFactorization, BandedFactorization))
    if gap is None or name not in ("optimal", "optimal for epochs"):
        return
    assert schema is not None
    workload = _WORKLOADS["prefix_sum"]
    bound = factorization.total_error(workload, schema) / np.sqrt(1.0 + gap)
    for other in _MAKERS:
        assert _made(other).total_error(workload, schema) >= bound * (1 - 1e-9), other


@every_mechanism
@pytest.mark.parametrize("factor", [-3.0, 1e-60, 1e60])
def test_the_scale_of_the_strategy_matrix_changes_no_error(name: str, factor: float) -> None:
    factorization = _made(name)
    scaled = DenseFactorization(factor * factorization.strategy_matrix())
    # Under the other schemas a dense matrix may have a bound instead of the exact value.
    for schema in (SingleParticipation(), FixedEpochOrder(3, 4)):
        assert scaled.sensitivity(schema).value == pytest.approx(
            abs(factor) * factorization.sensitivity(schema).value, rel=1e-9
        )
        for workload in (_WORKLOADS["prefix_sum"], _WORKLOADS["momentum"]):
            np.testing.assert_allclose(
                scaled.per_round_variance(workload, schema),
                factorization.per_round_variance(workload, schema),
                rtol=1e-8,
            )


@every_mechanism
def test_rows_past_the_last_and_other_sizes_are_refused(name: str) -> None:
    factorization = _made(name)
    recursion = factorization.noise_recursion()
    assert recursion.num_rounds == factorization.num_rounds == _NUM_ROUNDS
    with refuses("rounds"):
        noise_rows.apply(recursion, np.ones((_NUM_ROUNDS + 1, 2)))
    for function in (factorization.noise_rows, factorization.encode):
        with refuses("rows"):
            function(np.ones((_NUM_ROUNDS + 1, 2)))
    for workload in (workloads.prefix_sum(5), Workload("prefix_sum", 5)):
        with refuses("rounds"):
            factorization.squared_decoder_rows(workload)


@every_mechanism
def test_a_checkpoint_gives_the_mechanism_back(name: str, tmp_path: pathlib.Path) -> None:
    factorization = _made(name)
    checkpoints.save(factorization, tmp_path / "c")
    loaded = checkpoints.load(tmp_path / "c")
    assert type(loaded) is type(factorization)
    assert loaded.participation == factorization.participation
    assert loaded.optimality_gap == factorization.optimality_gap
    assert loaded.parameters == factorization.parameters
    z = np.random.default_rng(5).normal(size=(_NUM_ROUNDS, 3))
    np.testing.assert_array_equal(loaded.noise_rows(z), factorization.noise_rows(z))
    for schema in _SCHEMAS:
        ours, theirs = factorization.sensitivity(schema), loaded.sensitivity(schema)
        assert theirs.value == ours.value
        assert (theirs.is_exact, theirs.theorem) == (ours.is_exact, ours.theorem)
        for workload in _WORKLOADS.values():
            np.testing.assert_array_equal(
                loaded.per_round_variance(workload, schema),
                factorization.per_round_variance(workload, schema),
            )


@pytest.mark.parametrize(
    ("make", "most_numbers"),
    [
        (lambda n: identity(n), 0),
        (lambda n: tree_aggregation(n), 0),
        (lambda n: tree_aggregation(n, "full"), 0),
        (lambda n: toeplitz(n, 16), 16),
        (lambda n: toeplitz(n, 16, equal_column_norms=True), 16),
        (lambda n: toeplitz(n, coefficients="square_root"), 600),
        (lambda n: blt(n, 2), 4),
        (lambda n: banded_inverse(n, 16), 16),
        (lambda n: BandedFactorization(np.tri(n, 16)), 16 * 600),
        (
            lambda n: StructuredFactorization(np.tri(n, 4), np.ones((n, 3)), np.ones((n, 3))),
            (4 + 3 + 3) * 600,
        ),
    ],
)
def test_structured_mechanisms_store_what_their_structure_needs(
    make: Callable[[int], Factorization], most_numbers: int, tmp_path: pathlib.Path
) -> None:
    num_rounds = 600
    factorization = make(num_rounds)
    sizes = [array.size for array in factorization.arrays().values()]
    assert sum(sizes) <= most_numbers < num_rounds**2 / 20
    assert all(array.dtype == np.float64 for array in factorization.arrays().values())
    checkpoints.save(factorization, tmp_path / "c")
    stored = (tmp_path / "c" / checkpoints._ARRAYS_FILE).stat().st_size
    assert stored <= 8 * most_numbers + 2000


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda n: identity(n),
        lambda n: tree_aggregation(n),
        lambda n: toeplitz(n, 100, MinSeparation(1000, 20)),
        pytest.param(
            lambda n: banded_inverse(n, 3, MinSeparation(1000, 20)), marks=pytest.mark.long
        ),
        lambda n: blt(n, 4, MinSeparation(10_000, 6)),
    ],
)
def test_many_rounds_need_no_dense_matrix(
    make: Callable[[int], Factorization], tmp_path: pathlib.Path
) -> None:
    num_rounds = 100_000
    workload = Workload("prefix_sum", num_rounds)
    schema = FixedEpochOrder(4, 25_000)
    tracemalloc.start()
    try:
        factorization = make(num_rounds)
        rmse = factorization.rmse(workload, schema)
        checkpoints.save(factorization, tmp_path / "c", participation=schema)
        loaded = checkpoints.load(tmp_path / "c")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 200e6
    bound = lower_bounds.compute(workload, schema)
    assert bound is not None
    assert bound.rmse <= rmse <= identity(num_rounds).rmse(workload, schema)
    for each in (schema, MinSeparation(10_000, 6)):
        assert loaded.sensitivity(each) == factorization.sensitivity(each)


_KINDS = ("identity", "online", "full", "dense", "banded", "structured", "toeplitz", "normalised",
          "inverse", "blt")  # fmt: skip


@st.composite
def _unoptimised(
    draw: st.DrawFn, kind: str, largest: int
) -> tuple[Factorization, np.ndarray | None]:
    """A matrix that no optimiser would choose, of any sign, and what it is by its definition."""
    num_rounds = draw(st.integers(1, largest))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.integers(1, num_rounds))
    # Positive and falling, so that some sensitivities are exact, or of any sign.
    series = generator.uniform(0.1, 1.0, width) / max(1.0, width / 4.0)
    series = np.sort(series)[::-1] if draw(st.booleans()) else series * generator.choice([-1, 1])
    series = series + (generator.normal(size=width) / width if draw(st.booleans()) else 0.0)
    series[0] = draw(st.sampled_from([-1.5, 0.8, 2.0, float(max(1.0, np.max(np.abs(series))))]))
    toeplitz_matrix = dense(series, num_rounds)
    matrix = np.tril(generator.normal(size=(num_rounds, num_rounds))) / num_rounds
    np.fill_diagonal(matrix, generator.uniform(0.5, 2.0, num_rounds))
    of_width = np.tril(matrix) - np.tril(matrix, -width)
    bands = bands_of_matrix(of_width, width)
    if kind == "identity":
        return IdentityFactorization(num_rounds), np.eye(num_rounds)
    if kind in ("online", "full"):
        return TreeAggregationFactorization(num_rounds, kind), None
    if kind == "dense":
        return DenseFactorization(matrix), matrix
    if kind == "banded":
        return BandedFactorization(bands), of_width
    if kind == "structured":
        left, right = generator.normal(size=(2, num_rounds, draw(st.integers(0, num_rounds))))
        decoder = of_width + np.tril(left @ right.T, -width) / num_rounds**2
        strategy = np.linalg.solve(decoder, np.tri(num_rounds))
        return StructuredFactorization(bands, left / num_rounds, right / num_rounds), strategy
    if kind == "toeplitz":
        return ToeplitzFactorization(num_rounds, series), toeplitz_matrix
    if kind == "normalised":
        normalised = ToeplitzFactorization(num_rounds, series, equal_column_norms=True)
        return normalised, toeplitz_matrix / np.linalg.norm(toeplitz_matrix, axis=0)
    if kind == "inverse":
        return BandedInverseFactorization(num_rounds, series), np.linalg.inv(toeplitz_matrix)
    decays = np.linspace(0.95, 0.1, 3)[:width]
    scales = generator.uniform(0.01, 1.0 / 3.0, len(decays))
    powers = decays ** np.arange(num_rounds - 1)[:, np.newaxis]
    return (
        blt_of_scales(num_rounds, decays, scales),
        dense(np.append(1.0, powers @ scales), num_rounds),
    )


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("kind", _KINDS)
@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_sensitivities_of_any_matrix(kind: str, data: st.DataObject) -> None:
    factorization, _ = data.draw(_unoptimised(kind, 8))
    num_rounds = factorization.num_rounds
    schema = data.draw(schemas(num_rounds))
    computed = factorization.sensitivity(schema)
    truth = brute_force.scalar_sensitivity(factorization.strategy_matrix(), schema)
    assert computed.value >= truth * (1 - 1e-11)
    if computed.is_exact:
        assert computed.value == pytest.approx(truth, rel=1e-9)
    exact = kind in ("identity", "full", "blt") or schema == SingleParticipation()
    assert computed.is_exact or not exact


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(5)
@pytest.mark.parametrize("kind", _KINDS)
@given(st.data(), st.floats(0.0, 0.95))
@settings(max_examples=examples(60, one_in=10), deadline=None)
def test_every_view_is_that_of_the_dense_matrix(
    kind: str, data: st.DataObject, momentum: float
) -> None:
    factorization, definition = data.draw(_unoptimised(kind, 24))
    num_rounds = factorization.num_rounds
    strategy = factorization.strategy_matrix()
    noising = factorization.noising_matrix()
    size = float(np.max(np.abs(noising))) * max(1.0, float(np.max(np.abs(strategy))))
    if definition is not None:
        np.testing.assert_allclose(strategy, definition, atol=1e-11 * size)
    described = Workload("momentum_sgd", num_rounds, momentum)
    any_array = np.tril(np.random.default_rng(0).normal(size=(num_rounds, num_rounds)))
    np.fill_diagonal(any_array, 1.0)
    for workload, matrix in (
        (Workload("prefix_sum", num_rounds), np.tri(num_rounds)),
        (described, described.matrix()),
        (any_array, any_array),
    ):
        decoder = factorization.decoder_matrix(workload)
        tolerance = 1e-11 * size * num_rounds * float(np.max(np.abs(matrix)))
        np.testing.assert_allclose(decoder @ strategy, matrix, atol=tolerance)
        np.testing.assert_allclose(decoder, matrix @ noising, atol=tolerance)
        expected = np.sum(np.square(decoder), axis=1)
        for given_as in (workload, matrix):
            squared = factorization.squared_decoder_rows(given_as)
            np.testing.assert_allclose(squared, expected, rtol=1e-7)
    streamed = factorization.noise_rows(np.eye(num_rounds))
    np.testing.assert_allclose(streamed @ strategy, np.eye(num_rounds), atol=1e-10 * size)
    assert factorization.noise_rows(np.ones((num_rounds, 2), np.float32)).dtype == np.float32
    for shape in ((), (2,), (2, 3)):
        z = np.random.default_rng(1).normal(size=(num_rounds, *shape))
        for found, matrix in (
            (factorization.noise_rows(z), streamed),
            (factorization.encode(z), strategy),
        ):
            np.testing.assert_allclose(found, np.tensordot(matrix, z, axes=1), atol=1e-9 * size)
    for schema in (SingleParticipation(), FixedEpochOrder(2, max(1, num_rounds // 2))):
        bound = lower_bounds.compute(described, schema)
        assert bound is not None
        error = factorization.total_error(described, schema)
        assert error >= bound.total_error * (1 - 1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: toeplitz(200, 60, MinSeparation(50), error="max"),
        lambda: banded_inverse(200, 20, MinSeparation(50), error="max"),
        lambda: blt(200, 3, MinSeparation(50), error="max"),
        lambda: optimal(Workload("momentum_sgd", 32)),
        lambda: optimal(Workload("prefix_sum", 18), FixedEpochOrder(3, 6)),
        lambda: optimal(Workload("prefix_sum", 18), FixedEpochOrder(3, 6), equal_column_norms=True),
    ],
)
def test_the_same_arguments_give_the_same_bits(make: Callable[[], Factorization]) -> None:
    first, second = make().arrays(), make().arrays()
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)


@pytest.mark.parametrize(
    "make",
    [
        lambda: toeplitz(200, 50, max_evaluations=2),
        lambda: banded_inverse(200, 30, max_evaluations=2),
        lambda: banded_inverse(200, 30, MinSeparation(20), max_evaluations=2),
        lambda: blt(200, 2, max_evaluations=3),
        lambda: structured(optimal(64), 2, 2, max_iterations=3),
        lambda: banded(64, 8, max_evaluations=2),
    ],
)
def test_a_solver_that_is_stopped_says_so(make: Callable[[], Factorization]) -> None:
    with pytest.warns(NotConvergedWarning):
        gap = make().optimality_gap
    assert gap is None or gap > 1e-5


@pytest.mark.parametrize(
    ("make", "arguments", "options", "name"),
    [
        (toeplitz, (0,), {}, "num_rounds"),
        (toeplitz, (8, 9), {}, "num_bands"),
        (toeplitz, (8, 2.5), {}, "num_bands"),
        (toeplitz, (8, 2), {"coefficients": "best"}, "coefficients"),
        (toeplitz, (8, 2), {"error": "worst"}, "error"),
        (toeplitz, (8, 2), {"max_evaluations": 0}, "max_evaluations"),
        (toeplitz, (10**7, 10**4), {"equal_column_norms": True}, "equal_column_norms"),
        (banded_inverse, (8, 9), {}, "num_bands"),
        (blt, (8, 0), {}, "num_buffers"),
        (blt, (8, 9), {}, "num_buffers"),
        (banded, (8, 0), {}, "num_bands"),
        (banded, (8, 9), {}, "num_bands"),
        (banded, (8, 4), {"participation": MinSeparation(3)}, "separation"),
        (structured, (identity(8), 0, 2), {}, "num_diagonals"),
        (structured, (identity(8), 9, 2), {}, "num_diagonals"),
        (structured, (identity(8), 2, -1), {}, "rank"),
        (structured, (identity(8), 2, 9), {}, "rank"),
        (tree_aggregation, (0,), {}, "num_rounds"),
        (tree_aggregation, (True,), {}, "num_rounds"),
        (tree_aggregation, (4, "offline"), {}, "decoder"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_arguments_out_of_range_are_refused(
    make: Callable[..., Factorization],
    arguments: tuple[object, ...],
    options: dict[str, object],
    name: str,
) -> None:
    with refuses(name):
        make(*arguments, **options)


def test_matrices_of_other_fields_are_others() -> None:
    """Also where their arrays are the same."""
    plain = toeplitz(8, 3)
    equal = ToeplitzFactorization(8, plain.coefficients, equal_column_norms=True)
    assert not plain.has_same_matrix(equal)
    assert not tree_aggregation(8, "online").has_same_matrix(tree_aggregation(8, "full"))
    assert plain.has_same_matrix(toeplitz(8, 3))


def test_an_extension_states_no_weights_and_no_workload_of_fewer_rounds() -> None:
    rates = Workload("momentum_sgd", 8, 0.5, tuple(np.linspace(1.0, 0.3, 8)))
    weights = np.arange(1.0, 9.0)
    for made in (toeplitz(8, 3, error=weights), toeplitz(rates, 3), banded(8, 3, error=weights)):
        assert {"weights", "workload"} & set(made.parameters)
        longer = made.extended(12)
        assert "weights" not in longer.parameters
        assert longer.parameters.get("error") != "weights"
        own = made.parameters.get("workload")
        assert own is None or longer.parameters.get("workload") != own
        assert longer.optimality_gap is None
