"""Ticks: as many as have room, at numbers that people count in or at given places."""

import math
import re
from collections.abc import Sequence
from typing import TypeAlias

import matplotlib.axis
import matplotlib.ticker
import numpy as np

from mf_aggregators.figures.number_labels import PlainNumbers
from mf_aggregators.figures.text import POINTS_PER_INCH, SMALL

Numbers: TypeAlias = Sequence[float] | np.ndarray
_MOST_TICKS = 9


def set_places(axis: matplotlib.axis.Axis, places: Numbers) -> None:
    """Puts ticks of an axis at the places that have points, as many as have room.

    Args:
      axis: The axis, with its scale set.
      places: The places.
    """
    axis.set_major_locator(_Places(places))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(PlainNumbers())


class Ticks(matplotlib.ticker.Locator):
    """Ticks that depend on the room that they have, until a layout settles them."""

    settled: Sequence[float] | None = None

    def __call__(self) -> Sequence[float]:
        """Returns the places of the ticks: those that are settled, or as many as have room."""
        assert isinstance(self.axis, matplotlib.axis.Axis)
        if self.settled is not None:
            return self.settled
        return self.tick_values(*self.axis.get_view_interval())


class LinearTicks(Ticks):
    """Ticks of a linear axis: round numbers, as many as have room."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Returns the places of the ticks."""
        assert isinstance(self.axis, matplotlib.axis.Axis)
        return _round_numbers(self.axis, *sorted((vmin, vmax)))


class LogarithmicTicks(Ticks):
    """Ticks of a logarithmic axis: numbers that people count in, as many as have room."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Returns the places of the ticks."""
        assert isinstance(self.axis, matplotlib.axis.Axis)
        low, high = sorted((vmin, vmax))
        if not 0.0 < low < high or not math.isfinite(high):
            return []
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        for factors, every in (
            ((1, 1.5, 2, 3, 4, 5, 6, 7, 8), 1),
            ((1, 2, 3, 5, 7), 1),
            ((1, 2, 5), 1),
            ((1, 3), 1),
            *(((1,), every) for every in range(1, 2 + (last - first) // 2)),
        ):
            found = [
                factor * 10.0**exponent
                for exponent in range(first, last + 1)
                if exponent % every == 0
                for factor in factors
                if low <= factor * 10.0**exponent <= high
            ]
            if 2 <= len(found) <= _MOST_TICKS and _have_room(self.axis, found):
                return found
        # Less than a factor of two: as on a linear axis.
        return _round_numbers(self.axis, low, high)


class _Places(Ticks):
    """Ticks at given places, or at every second or third of them where there is no room."""

    def __init__(self, places: Numbers) -> None:
        self._places = np.unique(np.asarray(places, float))

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Returns the places of the ticks."""
        assert isinstance(self.axis, matplotlib.axis.Axis)
        low, high = sorted((vmin, vmax))
        inside = [float(place) for place in self._places if low <= place <= high]
        for every in range(1, len(inside)):
            if _have_room(self.axis, inside[::every]):
                return inside[::every]
        return inside[:1]


def _round_numbers(axis: matplotlib.axis.Axis, low: float, high: float) -> list[float]:
    found: list[float] = []
    for number in range(_MOST_TICKS, 0, -1):
        locator = matplotlib.ticker.MaxNLocator(number, steps=[1, 2, 2.5, 5, 10])
        found = [float(place) for place in locator.tick_values(low, high) if low <= place <= high]
        if _have_room(axis, found):
            return found
    return found[:1]


def _have_room(axis: matplotlib.axis.Axis, places: Sequence[float]) -> bool:
    """Whether the labels of ticks are apart."""
    if len(places) < 2:
        return True
    box = axis.axes.bbox
    where = axis.get_transform().transform(np.array([*axis.get_view_interval(), *places], float))
    share = float(np.min(np.diff(np.sort(where[2:]))) / abs(where[1] - where[0]))
    if axis is axis.axes.yaxis:
        length, size = box.height, 1.5 * SMALL
    else:
        labels = axis.get_major_formatter().format_ticks(list(places))
        # Powers have words of mathematical text that are not written.
        most = max(len(re.sub(r"\\cdot|[${}^]", "", label)) for label in labels)
        length, size = box.width, (most + 1) * SMALL * 0.65
    points = length / float(axis.axes.figure.dpi) * POINTS_PER_INCH
    return share * points >= size
