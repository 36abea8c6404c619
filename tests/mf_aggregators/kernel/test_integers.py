"""Updates and rows as integers, against exact arithmetic, and roundings, attacked by two runs."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from mf_aggregators import adaptive_clip
from mf_aggregators.factorizations import Factorization, noise_rows, toeplitz, tree_aggregation
from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.kernel import draws, integers
from mf_aggregators.kernel.draws import STEP, TILE, Engine
from mf_aggregators.kernel.integers import (
    STEPS_PER_CLIP_NORM,
    IntegerRows,
    IntegerSums,
    Rounding,
    RowLayout,
    Segment,
)
from mf_aggregators.kernel.rows import (
    BandedNoise,
    Blocks,
    NoiseRecursion,
    ScaledNoise,
    StateSpaceNoise,
    Strategy,
    WindowNoise,
)
from mf_aggregators.participation import MinSeparation
from tests.examples import examples
from tests.mf_aggregators import random_recursions, small_mechanisms
from tests.mf_aggregators.random_recursions import banded_rows
from tests.refusals import refuses

_STEPS = [STEPS_PER_CLIP_NORM, 2**21, 1000, 3, 1]
_ANY_FLOATS = hypothesis_numpy.arrays(
    st.sampled_from([np.float32, np.float64]), st.integers(0, 40), elements={"allow_nan": True}
)
_SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from([(TILE,), (TILE - 1,), (2, TILE + 1)]),
)
_TENSORS = st.lists(st.tuples(_SHAPES, st.sampled_from(["float32", "float64"])), max_size=6)
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
_EVERY_MECHANISM = pytest.mark.parametrize(
    "factorization", small_mechanisms.factorizations(64), ids=str
)
_ROUNDS, _WHOLE = 9, 30
_SIZES: dict[str, Any] = {"num_parameters": 10**6, "largest_cohort": 100}
_WIDTH = 3


@given(
    st.lists(_ANY_FLOATS, min_size=1, max_size=3), st.floats(1e-30, 1e30), st.sampled_from(_STEPS)
)
@settings(deadline=None, max_examples=examples(200))
def test_no_update_is_longer_than_the_clip_norm(
    update: list[np.ndarray], clip_norm: float, steps: int
) -> None:
    """In exact arithmetic, whatever it is: and it has the direction and length that it may."""
    found = np.concatenate(integers.clip_to_grid(update, clip_norm, steps))
    assert found.dtype == np.int64
    flat = np.concatenate(update).astype(np.float64)
    assert sum(int(each) ** 2 for each in found) <= steps**2
    if not np.all(np.isfinite(flat)):
        assert not np.any(found)
        return
    exact = [Fraction(float(each)) / Fraction(clip_norm) for each in flat]
    squared = sum(each**2 for each in exact)
    length = Fraction(math.isqrt(int(squared * 2**200)), 2**100) if squared > 1 else Fraction(1)
    for number, each in zip(found.tolist(), exact, strict=True):
        # Rounded to the nearest step, or towards zero by less than one, after a margin of 1e-9.
        expected = each / length * steps
        assert abs(number - expected) <= 1 + abs(expected) * Fraction(2, 10**9)
        if squared < (1 - Fraction(len(flat), steps)) ** 2 and len(flat) < steps:
            assert abs(number - expected) <= Fraction(1, 2) + Fraction(1, 10**6)


def test_an_update_that_is_as_long_as_the_clip_norm_keeps_its_length() -> None:
    cases: list[tuple[list[float], float, int, list[int]]] = [
        ([0.0, -1.0], 1.0, STEPS_PER_CLIP_NORM, [0, -STEPS_PER_CLIP_NORM]),
        ([3.0, 4.0], 5.0, 1000, [600, 800]),
        ([6.0, 8.0], 5.0, 1000, [600, 800]),
        ([1e-289, 0.0], 1e-289, 10, [10, 0]),
        ([6e-200, 8e-200], 5e-200, 1000, [600, 800]),
    ]
    for update, clip_norm, steps, expected in cases:
        (found,) = integers.clip_to_grid([np.array(update)], clip_norm, steps)
        assert found.tolist() == expected


def test_nothing_is_left_of_an_update_that_floats_left_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The integers have the last word, whatever the arithmetic before them does."""
    scaling: Any = integers.scaling
    # The margin is for errors of floats: of 1.2 steps here.
    for longer, expected in ((1.001, 0), (1.0 + 1.2 * 2.0**-30, STEPS_PER_CLIP_NORM)):

        def of(*arguments: Any, longer: float = longer) -> Any:
            unit, scale, is_within = scaling(*arguments)
            return unit, longer * scale, is_within

        monkeypatch.setattr(integers, "scaling", of)
        (found,) = integers.clip_to_grid([np.array([5.0])], 5.0, STEPS_PER_CLIP_NORM)
        assert found.tolist() == [expected]


def test_an_update_of_the_clip_norm_is_within_it() -> None:
    for entry, is_within in ((5.0, True), (np.nextafter(5.0, 6.0), False)):
        scaled, indicator = adaptive_clip.clip_with_indicator([np.array([entry])], 5.0)
        assert (scaled[0].tolist(), indicator) == ([1.0], 0.5 if is_within else -0.5)


def test_no_integer_of_an_update_wraps() -> None:
    """Neither where arrays say nothing of some entries nor where scales are beyond floats."""
    masked: Any = np.ma.masked_array([0.1, 2.0**32], mask=[False, True])
    for update, clip_norm in ((masked, 1.0), (np.full(3, 5e-291), 1e-295), (np.zeros(3), 1e-300)):
        (found,) = integers.clip_to_grid([update], clip_norm, STEPS_PER_CLIP_NORM)
        assert sum(each**2 for each in found.tolist()) <= STEPS_PER_CLIP_NORM**2


def test_functions_of_others_make_no_update_longer() -> None:
    """Not even where their sums of squares would wrap."""
    for number in (0, 1, 2**20, 2**31, 2**62, -(2**63)):

        def to_grid(*arguments: Any, number: int = number) -> None:
            arguments[-1][:] = number

        engine = Engine(squares=lambda *_, **__: 1, to_grid=to_grid)
        (found,) = integers.clip_to_grid([np.ones(16)], 1.0, STEPS_PER_CLIP_NORM, engine=engine)
        assert found.tolist() == 16 * [number if 0 <= number <= 2**28 else 0]


def test_an_update_that_changes_while_it_is_clipped_is_no_longer() -> None:
    class Changing:
        """Is short where its norm is taken, and then long: 17 squares of 2^30 wrap to one."""

        shape = (17,)

        def __init__(self, last: float) -> None:
            self.arrays = [np.full(17, last), np.eye(17)[0]]

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return self.arrays.pop(0)

    for last in (1.0, 2.0**33, 1e300, np.nan):
        changing: Any = Changing(last)
        (found,) = integers.clip_to_grid([changing], 1.0, STEPS_PER_CLIP_NORM)
        assert sum(each**2 for each in found.tolist()) <= STEPS_PER_CLIP_NORM**2


def test_steps_are_written_into_contiguous_int64_alone() -> None:
    wrong: list[Any] = [np.empty((3, 2), np.int64, order="F"), np.empty((3, 2), np.int32)]
    for into in wrong:
        with refuses("contiguous", "int64"):
            integers.clip_to_grid([np.ones((3, 2))], 1.0, 10, [into])


@given(st.integers(0, 2**45))
def test_squares_add_up_within_int64(num_entries: int) -> None:
    units = integers.units_of_squares(num_entries)
    # Each square is rounded up.
    assert num_entries * (units + 1.0) < 2.0**63
    assert units == 2.0**52 or 4.0 * num_entries * units >= 2.0**62
    assert math.frexp(units)[0] == 0.5


def test_grids_check_their_numbers() -> None:
    three: Any = np.int64(3)
    assert len({IntegerSums(three), IntegerSums(3)}) == 1
    assert type(IntegerSums(three).largest_cohort) is int
    assert IntegerSums(2**31 - 1, 32).steps_per_clip_norm == 1
    for wrong in ((0,), (1, 65), (1, 1), (2**31, 32), (1.5,), (1, -1)):
        with refuses("bits" if len(wrong) > 1 else "largest_cohort"):
            IntegerSums(*wrong)  # type: ignore[arg-type]


def test_float64_tensors_start_at_the_next_tile() -> None:
    shapes = ((3,), (TILE - 2,), (), (0,), (2, 2))
    dtypes = ("float32", "float32", "float64", "float64", "float32")
    layout = RowLayout(shapes, dtypes)
    found = layout.segments
    assert found == (Segment("float32", 0, TILE + 5, (0, 1, 4)), Segment("float64", 2, 1, (2, 3)))
    assert [segment.first_tile * TILE for segment in found] == [0, 2 * TILE]
    assert [segment.num_tiles for segment in found] == [2, 1]
    assert layout.size == TILE + 6


@given(_TENSORS)
def test_every_entry_has_a_coordinate_of_its_own(
    tensors: list[tuple[tuple[int, ...], str]],
) -> None:
    layout = RowLayout(tuple(shape for shape, _ in tensors), tuple(dtype for _, dtype in tensors))
    flats = []
    end = 0
    for segment in layout.segments:
        assert segment.first_tile == math.ceil(end / TILE)
        end = segment.first_tile * TILE + segment.size
        flats.append(np.arange(segment.first_tile * TILE, end, dtype=segment.dtype))
    found = layout.tensors(flats)
    for array, (shape, dtype) in zip(found, tensors, strict=True):
        assert (array.shape, array.dtype.name) == (shape, dtype)
    # Tensors of one dtype follow one another in order.
    for dtype in ("float32", "float64"):
        expected = [flat for flat in flats if flat.dtype == dtype]
        entries = [np.ravel(array) for array in found if array.dtype == dtype]
        np.testing.assert_array_equal(
            np.concatenate([*entries, np.empty(0)]), np.concatenate([*expected, np.empty(0)])
        )
    sizes = sum(math.prod(shape) for shape, _ in tensors)
    assert layout.size == sizes


def test_vectors_of_another_size_are_refused() -> None:
    layout = RowLayout(((3,),), ("float32",))
    with refuses("(3,)"):
        layout.tensors([np.zeros(4, np.float32)])


def test_other_dtypes_and_lengths_are_refused() -> None:
    with refuses("float16"):
        RowLayout(((3,),), ("float16",))
    with refuses("2"):
        RowLayout(((3,),), ("float32", "float32"))


def _exact(array: np.ndarray) -> np.ndarray:
    """The same numbers as fractions."""
    return np.vectorize(Fraction, otypes=[object])(array)


def _rounded(number: Fraction) -> int:
    """To nearest, ties to even."""
    return round(number)


def _rows_by_definition(rows: IntegerRows, z: np.ndarray) -> np.ndarray:
    """The rows of the module's docstring, with all earlier ones at hand and no rounding else."""
    unit, shift = rows.recursion.normalised, rows.shift
    # Rows of scaled mechanisms are those of the inner ones, over and times scales.
    scales, drawn = np.ones(unit.num_rounds), z.astype(object)
    if isinstance(unit, ScaledNoise):
        scales = unit.row_scales
        drawn = drawn * np.vectorize(Fraction, otypes=[object])(unit.scales)[:, np.newaxis]
        unit = unit.inner
        assert isinstance(unit, (StateSpaceNoise, WindowNoise))
    made: list[list[int]] = []
    vectors: list[list[Fraction]] = []
    for i in range(unit.num_rounds):
        row = []
        for d in range(z.shape[1]):
            earlier = _earlier(unit, i, d, made, drawn, vectors) * Fraction(scales[i])
            if not isinstance(unit, WindowNoise):
                earlier *= 2**shift
            w = int(z[i, d]) + _rounded(earlier)
            row.append(math.floor(Fraction(w + 2 ** (shift - 1), 2**shift)))
        made.append(row)
        if isinstance(unit, StateSpaceNoise):
            vectors = _following(unit, i, [each / Fraction(scales[i]) for each in row], vectors)
    return np.array(made)


def _earlier(
    unit: NoiseRecursion,
    i: int,
    d: int,
    made: list[list[int]],
    z: np.ndarray,
    vectors: list[list[Fraction]],
) -> Fraction:
    total = Fraction(0)
    if isinstance(unit, BandedNoise):
        weights = unit.bands[i if len(unit.bands) > 1 else 0]
        for lag in range(1, min(len(weights), i + 1)):
            total -= Fraction(weights[lag]) * made[i - lag][d]
    elif isinstance(unit, WindowNoise):
        window = unit.window[i if len(unit.window) > 1 else 0]
        for lag in range(1, min(unit.rows_of_z_per_round, i + 1)):
            total += Fraction(window[lag]) * z[i - lag, d]
        for j in range(min(i - unit.rows_of_z_per_round + 2, i)):
            gain = sum(
                map(math.prod, zip(_exact(unit.left[i]), _exact(unit.right[j]), strict=True))
            )
            total += gain * z[j, d]
    elif isinstance(unit, StateSpaceNoise) and vectors:
        outputs = unit.outputs[unit.phases[i]]
        total = sum(
            (Fraction(w) * v[d] for w, v in zip(outputs, vectors, strict=True)), Fraction(0)
        )
    return total


def _following(
    unit: StateSpaceNoise, i: int, row: list[Fraction], vectors: list[list[Fraction]]
) -> list[list[Fraction]]:
    p = unit.phases[i]
    vectors = vectors or [[Fraction(0)] * len(row)] * unit.num_state_vectors
    return [
        [
            Fraction(unit.decays[p, s]) * before + Fraction(unit.feedbacks[p, s]) * number
            for before, number in zip(vectors[unit.sources[p, s]], row, strict=True)
        ]
        for s in range(unit.num_state_vectors)
    ]


def _all_rows(
    rows: IntegerRows, z: np.ndarray, before: IntegerRows | None = None, change: int = 0
) -> np.ndarray:
    """All rows, of which the first ``change`` are made by the rows before."""
    history, found = tuple(np.zeros((rows.recursion.num_state_vectors, z.shape[1]))), []
    for i, row_of_z in enumerate(z):
        now = before if before is not None and i < change else rows
        row, history = now.next_row(i, history, row_of_z)
        found.append(row)
    return np.array(found)


def _in_blocks(rows: IntegerRows, z: np.ndarray, starts: list[int]) -> np.ndarray:
    blocks, made = Blocks(rows.recursion, np.array(starts)), np.empty(z.shape, np.int64)
    state = np.zeros((rows.recursion.num_state_vectors, z.shape[1]))
    for number in range(blocks.num_blocks):
        start, end = blocks.rounds(number)
        earlier = made[start - blocks.num_earlier_rows(number) : start]
        made[start:end], state = rows.block(
            blocks.transition(number),
            np.concatenate([earlier, state]),
            z[blocks.first_row_of_z(number) :].__getitem__,
        )
    return made


def _z(num_rounds: int, size: int) -> np.ndarray:
    return np.array([draws.integers(_SEED, i, 0, size) for i in range(num_rounds)])


@pytest.mark.short_cases(6)
@_EVERY_MECHANISM
def test_rows_are_those_of_exact_rational_arithmetic(
    factorization: Factorization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: floats err by less than a thousandth of a step, so that few could differ."""
    rows = IntegerRows.of(factorization.noise_recursion())
    z = _z(64, 3)
    expected = _rows_by_definition(rows, z)
    np.testing.assert_array_equal(_all_rows(rows, z), expected)
    monkeypatch.setattr(integers, "_ROWS_OF_Z_AT_ONCE", 7)
    np.testing.assert_array_equal(_in_blocks(rows, z, [0, 1, 2, 5, 40, 64]), expected)


@given(random_recursions.recursions())
@settings(deadline=None, max_examples=examples(200))
def test_no_row_exceeds_its_integers_where_z_is_at_most_twenty_standard_deviations(
    recursion: NoiseRecursion,
) -> None:
    """With the Z of that norm that makes each row the largest."""
    rows = IntegerRows.of(recursion)
    matrix = noise_rows.dense(rows.recursion.normalised)
    norms = np.linalg.norm(matrix, axis=1)
    # Column i is the worst for row i; Z is a normal number's worth along the row.
    worst = 20.0 * draws.STANDARD_DEVIATION * matrix.T / norms
    found = _all_rows(rows, np.rint(worst).astype(np.int64))
    own = np.diagonal(found)
    assert np.all(np.abs(own) < 2**31)
    assert np.all(np.abs(own) * 2.0**rows.shift <= rows.largest_row)
    # The finest shift of which this holds, but for one.
    assert np.max(np.abs(own)) > 2**29 or rows.shift == 1


def test_roundings_count_among_what_32_bits_hold() -> None:
    """Coarse steps of many rounds, all of which drive the last row."""
    inverse = np.eye(400)
    inverse[-1, :-1] = 1e3
    rows = IntegerRows.of(dense_rows(inverse))
    last = np.abs(noise_rows.dense(rows.recursion.normalised)[-1])
    of_z = 20.0 * draws.STANDARD_DEVIATION * float(np.linalg.norm(last))
    # Half a step of a row and half of Z, in each round and with the sign of its weight.
    of_roundings = (2.0 ** (rows.shift - 1) + 0.5) * float(np.sum(last))
    assert of_roundings > 1e-5 * of_z
    assert of_z + of_roundings <= rows.largest_row < 2.0 ** (31 + rows.shift)


def test_a_matrix_that_is_nearly_singular_is_refused() -> None:
    with refuses("singular"):
        IntegerRows.of(dense_rows(np.array([[1.0, 0.0], [1e9, 1.0]])))
    with refuses("diagonal"):
        IntegerRows.of(dense_rows(np.array([[1.0, 0.0], [1.0, 0.0]])))


@given(random_recursions.recursions())
@settings(deadline=None, max_examples=examples(50))
def test_histories_are_values_and_no_row_comes_after_the_last(recursion: NoiseRecursion) -> None:
    rows = IntegerRows.of(recursion)
    z = _z(recursion.num_rounds, 4)
    history = tuple(np.zeros((rows.recursion.num_state_vectors, 4)))
    for i, row_of_z in enumerate(z):
        before = np.array(history), row_of_z.copy()
        row, following = rows.next_row(i, history, row_of_z)
        np.testing.assert_array_equal(rows.next_row(i, history, row_of_z)[0], row)
        np.testing.assert_array_equal(history, before[0])
        np.testing.assert_array_equal(row_of_z, before[1])
        kept = recursion.num_earlier_rows
        if recursion.draws_earlier_rows_of_z:
            kept = recursion.rows_of_z_per_round
        assert len(following) == recursion.num_state_vectors + min(i + 1, kept)
        assert all(each.shape == (4,) for each in following)
        history = following
    with refuses("rounds"):
        rows.next_row(recursion.num_rounds, history, z[0])


@given(st.integers(0, 20_000), random_recursions.recursions())
@settings(deadline=None, max_examples=examples(20))
def test_pieces_of_coordinates_do_not_matter(size: int, recursion: NoiseRecursion) -> None:
    rows = IntegerRows.of(recursion)
    z = _z(recursion.num_rounds, size)
    whole = _all_rows(rows, z)
    ends = _all_rows(rows, z[:, -3:])
    np.testing.assert_array_equal(whole[:, -3:], ends)


def _goes_on(factorization: Factorization) -> bool:
    is_full = factorization.parameters.get("decoder") == "full"
    is_toeplitz = factorization.mechanism in ("blt", "toeplitz")
    is_scaled = is_toeplitz and factorization.parameters.get("equal_column_norms", False)
    return factorization.can_extend and not is_full and not is_scaled


_EXTENDABLE = [
    *filter(_goes_on, small_mechanisms.factorizations(_ROUNDS)),
    toeplitz(_ROUNDS),
    toeplitz(_ROUNDS, coefficients="square_root"),
]


_EVERY_EXTENDABLE = pytest.mark.parametrize(
    "factorization",
    _EXTENDABLE,
    ids=[f"{i}-{each.mechanism}" for i, each in enumerate(_EXTENDABLE)],
)


def _recursions(factorization: Factorization) -> tuple[NoiseRecursion, NoiseRecursion]:
    """Those of the plan and of the whole, in the scale of the plan."""
    sensitivity = factorization.sensitivity(MinSeparation(4)).value
    whole = factorization.extended(_WHOLE)
    first, second = (
        random_recursions.divided(each.noise_recursion(), sensitivity)
        for each in (factorization, whole)
    )
    return first, second


@_EVERY_EXTENDABLE
def test_integers_and_steps_that_were_released_stay(factorization: Factorization) -> None:
    first, whole = _recursions(factorization)
    before, after = IntegerRows.of(first), IntegerRows.of(whole, first)
    z = _z(_WHOLE, 500)
    np.testing.assert_array_equal(_all_rows(after, z)[:_ROUNDS], _all_rows(before, z[:_ROUNDS]))
    np.testing.assert_array_equal(after.steps[:_ROUNDS], before.steps)
    assert after.shift == before.shift


@_EVERY_EXTENDABLE
def test_rows_go_on_from_a_state_of_any_round(factorization: Factorization) -> None:
    """As those of the whole matrix from its first row on."""
    first, whole = _recursions(factorization)
    before, after = IntegerRows.of(first), IntegerRows.of(whole, first)
    z = _z(_WHOLE, 40)
    expected = _all_rows(after, z)
    for change in range(_ROUNDS + 1):
        np.testing.assert_array_equal(_all_rows(after, z, before, change), expected)


def test_histories_that_lack_rows_are_refused() -> None:
    """Those of a matrix that keeps fewer rows, after as many rounds as it keeps."""
    long, few = (toeplitz(20, bands).noise_recursion() for bands in (5, 3))
    before, after = IntegerRows.of(few), IntegerRows.of(long)
    history, z = tuple(np.zeros((before.recursion.num_state_vectors, 2))), np.ones(2, np.int64)
    for i in range(3):
        _, history = before.next_row(i, history, z)
    with refuses("needs 3", "found 2", "another"):
        after.next_row(3, history, z)


@_EVERY_EXTENDABLE
@pytest.mark.parametrize("storage", ["state", "disk"])
def test_noise_stays_and_covers_what_is_stated(factorization: Factorization, storage: str) -> None:
    first, whole = _recursions(factorization)
    is_on_disk = storage == "disk"
    before = Rounding.of(IntegerRows.of(first), Blocks.of(first) if is_on_disk else None)
    after = Rounding.of(
        IntegerRows.of(whole, first), Blocks.of(whole, (_ROUNDS,)) if is_on_disk else None
    )
    drawn = before.enlarged(1.5, **_SIZES)
    covered = after.covered(drawn, **_SIZES)
    # The bound of the module's docstring, in its own terms, for one and for the least s.
    rows = after.rows
    for s in (1.7, 1.0, 1.0 / np.max(np.abs(whole.diagonal))):
        moved = s * (1.0 / drawn + 1e3 * np.max(np.abs(rows.steps)))
        moved += after.operator_norm * (1.0 + 2.0 * after.float_error) * STEP * 1e3 * _WHOLE**0.5
        assert moved <= s / covered
    # It is no looser than it has to be, for the least s.
    assert covered * (1.0 + 1e-6) >= s / moved


@_EVERY_EXTENDABLE
def test_covering_is_the_inverse_of_enlarging(factorization: Factorization) -> None:
    first, _ = _recursions(factorization)
    rounding = Rounding.of(IntegerRows.of(first))
    for stddev in (5e-4, 1.5, 20.0):
        found = rounding.covered(rounding.enlarged(stddev, **_SIZES), **_SIZES)
        assert found <= stddev
        assert found == pytest.approx(stddev, rel=1e-9)


@pytest.mark.parametrize(("deviations", "holds"), [(9.0, False), (16.9, False), (17.1, True)])
def test_longer_rows_are_held_to_seventeen_standard_deviations(
    deviations: float, holds: bool
) -> None:
    """Twelve in the world that released a number, and five that a client moves it by."""
    first = np.array([[1.0]])
    shift = IntegerRows.of(dense_rows(first)).shift
    norm = 2.0 ** (31 + shift) / (deviations * draws.STANDARD_DEVIATION)
    longer = dense_rows(np.array([[1.0, 0.0], [(norm**2 - 1.0) ** 0.5, 1.0]]))
    if holds:
        rows = IntegerRows.of(longer, dense_rows(first))
        assert rows.largest_row >= 17.0 * draws.STANDARD_DEVIATION * norm
    else:
        with refuses("extension"):
            IntegerRows.of(longer, dense_rows(first))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("num_rounds", [4, 5, 15, 255, 256, 1023, 1024, 2047])
def test_trees_of_any_length_can_become_four_times_as_long(num_rounds: int) -> None:
    made = tree_aggregation(num_rounds)
    rows = IntegerRows.of(made.extended(4 * num_rounds).noise_recursion(), made.noise_recursion())
    # Seventeen standard deviations of a row, of which five are the client's.
    largest = 17.0 * draws.STANDARD_DEVIATION * np.max(rows.recursion.normalised.row_norms()[0])
    assert largest < 2.0 ** (31 + rows.shift)


class _Run:
    """Makes rows of noise for given releases: in which Z would they be, with these sums?"""

    def __init__(self, rows: IntegerRows, blocks: Blocks) -> None:
        self.rows, self.blocks = rows, blocks

    def z_of(self, released: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """The (n, width) int64 rows of Z that give the integers v, in blocks."""
        rows, blocks, unit = self.rows, self.blocks, self.rows.recursion.normalised
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


def _encoded(rows: IntegerRows, dx: np.ndarray) -> np.ndarray:
    """2^c C1 dx."""
    return 2.0**rows.shift * np.linalg.solve(noise_rows.dense(rows.recursion.normalised), dx)


@st.composite
def _attacks(draw: st.DrawFn) -> tuple[IntegerRows, Blocks, Rounding, int]:
    recursion = draw(random_recursions.recursions())
    rows = IntegerRows.of(recursion)
    n = recursion.num_rounds
    if draw(st.booleans()):
        single = Blocks(recursion, np.arange(n + 1))
        return rows, single, Rounding.of(rows), draw(st.integers(0, 2**32 - 1))
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
    n, earlier = rows.recursion.num_rounds, rows.recursion.normalised.num_earlier_rows
    if (
        rows.recursion.normalised.draws_earlier_rows_of_z
        or rows.recursion.normalised.num_state_vectors
    ):
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
    rounding = Rounding.of(IntegerRows.of(BandedNoise(1000)))

    def enlarged(sigma: float, num_parameters: int) -> float:
        return rounding.enlarged(sigma, num_parameters=num_parameters, largest_cohort=1000)

    assert enlarged(1.0, 10**6) < 1.0002
    with refuses("rounding", "allowed"):
        enlarged(1e3, 10**8)
    with refuses("64 bits"):
        enlarged(1e-14, 10)


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_an_unknown_error_of_floats_is_no_bound(unknown: float) -> None:
    rows = IntegerRows.of(BandedNoise(3))
    for rounding in (Rounding(rows, 1.0, unknown), Rounding(rows, unknown, 0.0)):
        for covers in (rounding.enlarged, rounding.covered):
            with refuses("rounding", "allowed"):
                covers(1.0, num_parameters=1, largest_cohort=1)


def test_an_error_that_is_not_a_number_is_not_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of rows, the largest error counts, and NaN in any of them."""
    rows = IntegerRows.of(banded_rows(np.tri(3, 2)))
    transition = BandedNoise.transition

    def broken(normalised: BandedNoise, start: int, end: int) -> np.ndarray:
        return transition(normalised, start, end) * (math.nan if start == 1 else 1.0)

    monkeypatch.setattr(BandedNoise, "transition", broken)
    assert math.isnan(Rounding.of(rows).float_error)


def test_bounds_of_errors_and_norms_are_those_of_their_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    redrawn = WindowNoise(5, np.ones((1, 2)), *np.linspace(0.2, 0.6, 10).reshape(2, 5, 1))
    kept = tree_aggregation(5).noise_recursion()
    for recursion, driving in ((kept, 3.0), (redrawn, float(draws.LARGEST))):
        blocks, m = Blocks(recursion, np.array([0, 2, 5])), recursion.num_state_vectors
        weights, before = np.abs(blocks.transition(1)), np.linspace(4.0, 7.0, m)
        sizes = np.append(before, np.full(weights.shape[1] - m, driving))
        expected = (len(sizes) + 4) * 2.0**-53 * (weights @ sizes) + weights[:, :m] @ before
        found = integers._errors(IntegerRows(recursion, 1, 3.0, before), blocks, 1, before)
        assert np.append(*found) == pytest.approx([np.max(expected[:3]), *expected[3:]])
    # Errors of columns of C count in each entry, and so do the largest scales.
    scales = np.array([4.0, 1.0]), np.array([1.0, 8.0])
    for strategy, norms in (
        (Strategy(np.array([[1.0, 0.0], [-2.0, 3.0]]), 5, 0.25, True), (4.25, 6.25)),
        (Strategy(np.array([[1.0, -2.0]]), 5, 0.25, scales=scales), (97.25, 97.25)),
    ):
        monkeypatch.setattr(integers, "strategy_of", lambda *_, found=strategy: found)
        assert integers._strategy_norms(redrawn) == norms
    assert integers._strategy_norms(kept) == (1.0, 1.0)
