"""How many examples and combinations a check has in the short test, and in the long one."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

# conftest.py sets it for the long test, before test modules are imported.
_LONG_TEST = "MF_AGGREGATORS_LONG_TEST"
# For whoever has an hour more, as CONTRIBUTING.md says.
_EVERY_CASE = "MF_AGGREGATORS_EVERY_CASE"


def examples(number: int, one_in: int = 6) -> int:
    """Returns how many examples to draw.

    Args:
      number: How many the long test draws.
      one_in: The short one draws a sixth or another part of them, and at least four.
    """
    return number if _LONG_TEST in os.environ else max(4, number // one_in)


def of_many(number: int, usual: int) -> int:
    """Returns how many cases a check has of which each takes seconds.

    Args:
      number: How many there are where the environment asks for every case.
      usual: How many the long test has otherwise.
    """
    return number if _EVERY_CASE in os.environ else usual


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Returns all combinations of values, as parameters of a test of one parameter for each axis.

    Those of the short test are as many as the longest axis has values, and have each value of each
    axis; the others are marked as long.

    Args:
      *axes: The values of each parameter.
    """
    most = max(map(len, axes))
    short = {tuple(number % len(axis) for axis in axes) for number in range(most)}
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, indices, strict=True)),
            marks=() if indices in short else pytest.mark.long,
        )
        for indices in itertools.product(*(range(len(axis)) for axis in axes))
    ]
