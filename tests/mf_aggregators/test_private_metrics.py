"""What private metrics take of the noise."""

import math
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.factorizations import Factorization, blt, identity, toeplitz
from mf_aggregators.participation import MinSeparation
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from tests.examples import examples
from tests.refusals import refuses


def _metrics(number: int, **changes: Any) -> PrivateMetrics:
    metrics = tuple(BoundedMetric(f"metric {i}", -i, i + 1.0) for i in range(number))
    return PrivateMetrics(metrics, **changes)


@given(
    st.floats(0.01, 100.0),
    st.integers(1, 6),
    st.floats(1e-3, 3.0),
    st.floats(1.0, 1e4),
    st.one_of(st.none(), st.floats(0.51, 1000.0)),
)
@settings(max_examples=examples(200), deadline=None)
def test_no_client_moves_more_standard_deviations_than_the_noise_multiplier_says(
    z: float, number: int, increase: float, clients: float, count_over_z: float | None
) -> None:
    """An update, an indicator and metrics at the ends of their ranges, each over its noise."""
    clip: float | AdaptiveClip = 0.3
    before = z
    if count_over_z is not None:
        clip = AdaptiveClip(0.3, clipped_count_stddev=count_over_z * z)
        before = NoiseSplit.of(z, count_over_z * z).update_noise_multiplier
    split = _metrics(number, noise_increase=increase).split_noise(z, clip, clients)
    moved = math.sqrt(
        split.update_noise_multiplier**-2
        + 0.25 * split.clipped_count_stddev**-2
        + number * 0.25 * split.metric_stddev**-2
    )
    assert moved == pytest.approx(1.0 / z, rel=1e-9)
    # The whole price, over a run whose clip norm is the same without metrics.
    assert split.update_noise_multiplier == pytest.approx((1.0 + increase) * before)
    # The same in vectors, whose coordinates all have one noise.
    assert z * split.vector_norm == pytest.approx(split.update_noise_multiplier, rel=1e-9)
    weights = (split.indicator_weight, *number * [split.metric_weight])
    assert math.hypot(1.0, *(0.5 * weight for weight in weights)) <= split.vector_norm * (1 + 1e-15)
    for weight, stddev in zip(
        weights, (split.clipped_count_stddev, *number * [split.metric_stddev]), strict=True
    ):
        assert weight * stddev == pytest.approx(split.update_noise_multiplier)


def test_the_noise_of_a_run_that_trains() -> None:
    """Four metrics share what 1 % more noise on the updates leaves of the guarantee."""
    metrics = PrivateMetrics.of_training(10.0, 1000, counts_clients=False)
    assert [each.name for each in metrics.metrics] == ["loss", "accuracy", "examples"]
    split = metrics.split_noise(2.0, 1.5, 100)
    assert split.update_noise_multiplier == pytest.approx(2.02)
    assert split.metric_stddev == split.clipped_count_stddev
    assert split.metric_stddev**-2 == pytest.approx(2.0**-2 - 2.02**-2)
    assert split.metric_stddev == pytest.approx(4.04 / math.sqrt(0.0804))
    # A norm that stays is the same as a constant one, and so is one whose bounds are equal.
    stays = AdaptiveClip.constant(1.5)
    assert stays.next_norm(1.5, -1e9) == 1.5
    assert metrics.split_noise(2.0, stays, 100) == split


def test_where_the_number_of_clients_is_a_secret_it_is_a_metric() -> None:
    (*_, count) = PrivateMetrics.of_training(10.0, 1000, counts_clients=True).metrics
    # A client that is not there counts as none, and each that is there as one.
    assert (count.name, count.middle, count.largest) == ("count", 0.0, 1.0)


def test_without_noise_nothing_is_weighted() -> None:
    split = _metrics(3).split_noise(0.0, 1.0, 10)
    assert (split.update_noise_multiplier, split.metric_stddev) == (0.0, 0.0)
    assert split.vector_norm == pytest.approx(math.sqrt(2.0))


@pytest.mark.long
@pytest.mark.parametrize("mechanism", ["`identity`", "`blt`, 4 buffers", "`toeplitz`, 64 bands"])
def test_the_tables_of_the_documents(mechanism: str) -> None:
    """Standard deviations from dense rows of noise, those of norms by a recursion step by step."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "noise.md").read_text()
    num_rounds, schema = 2052, MinSeparation(342, 6)
    factorization: Factorization = {
        "`identity`": lambda: identity(num_rounds),
        "`blt`, 4 buffers": lambda: blt(num_rounds, 4, participation=schema),
        "`toeplitz`, 64 bands": lambda: toeplitz(num_rounds, 64, participation=schema),
    }[mechanism]()
    unit = factorization.noise_rows(np.eye(num_rounds)) * factorization.sensitivity(schema).value

    def check(table: str, found: list[float], digit: float) -> None:
        lines = text.split(f"| {table} with noise of |")[1].split("\n\n")[0].splitlines()
        (printed,) = (line.strip("|").split("|")[1:] for line in lines if mechanism in line)
        cells = [float(cell) for cell in printed]
        assert cells == [pytest.approx(each, abs=0.6 * digit) for each in found]

    # Of four metrics, one of them the indicator, at noise multiplier 1.
    stddev = math.sqrt(1.0 / (1.0 - 1.01**-2)) / 1000.0
    assert f"{1000.0 * stddev:.2f} z ranges" in text
    rows, means = stddev * unit, []
    for window in (1, 10, 50, 100):
        sums = np.cumsum(rows, axis=0)
        sums[window:] -= np.cumsum(rows, axis=0)[:-window]
        means.append(np.max(np.linalg.norm(sums[window - 1 :], axis=1)) / window)
    check("private metrics", means, 1e-4)

    def of_logarithm(rate: float, fractions: list[np.ndarray]) -> float:
        # The fraction below the median moves by the density of a normal number there.
        density, row, largest = 1.0 / math.sqrt(2.0 * math.pi), np.zeros(num_rounds), 0.0
        for fraction in fractions:
            row = row - rate * (density * row + fraction)
            largest = max(largest, float(np.linalg.norm(row)))
        return largest

    rows = AdaptiveClip().clipped_count_stddev_for(1.0, 100) / 100 * unit
    tens = [rows[start : start + 10] for start in range(0, num_rounds - 9, 10)]
    logarithms = (
        of_logarithm(0.2, list(rows)),
        of_logarithm(1.0, [np.mean(ten, axis=0) for ten in tens]),
        of_logarithm(1.0, [ten[-1] for ten in tens]),
    )
    check("adaptive clipping", [float(np.max(np.linalg.norm(rows, axis=1))), *logarithms], 1e-3)


@pytest.mark.parametrize(
    "ends",
    [
        (1.0, 1.0),
        (2.0, 1.0),
        (0.0, math.inf),
        (math.nan, 1.0),
        # Quotients that overflow, underflow, or are above one half because ends are rounded.
        (-1e308, 1e308),
        (0.0, 5e-324),
        (0.0, 1e-310),
        (0.0, 1e-46),
        (0.0, 1e39),
        (1e16, 1e16 + 2.0),
        (0.0, "1"),
        (False, 1.0),
    ],
)
def test_ranges_that_are_none_are_refused(ends: tuple[Any, Any]) -> None:
    with refuses("range of loss"):
        BoundedMetric("loss", *ends)


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0.0, 1.0),
)
@settings(max_examples=examples(400), deadline=None)
def test_a_value_in_a_range_counts_at_most_half_of_it(
    smallest: float, largest: float, share: float
) -> None:
    """And its ends, in float32 too, nearly as much: no range that is accepted loses a metric."""
    try:
        metric = BoundedMetric("loss", smallest, largest)
    except ValueError:
        return
    inside = metric.smallest + share * metric.range
    number: Any
    for number in (np.float64, np.float32):
        below, within, above = (
            (number(value) - number(metric.middle)) / number(metric.range)
            for value in (metric.smallest, inside, metric.largest)
        )
        slack = 1e-2 if number is np.float32 else 1e-9
        assert (below, above) == (pytest.approx(-0.5, abs=slack), pytest.approx(0.5, abs=slack))
        assert within == pytest.approx(share - 0.5, abs=slack)
