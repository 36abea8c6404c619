"""Guarantees come from checks of the kernel alone."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from mf_aggregators.kernel import claim, composition, proved
from mf_aggregators.kernel.rows import BandedNoise
from mf_aggregators.kernel.schemas import Schema

_MADE = [
    claim.check(claim.Claim(BandedNoise(np.ones((3, 1))), Schema(1, 1), 2.0, 1e-5)),
    composition.check_composed(composition.Composed((), 1e-5)),
]


@pytest.mark.parametrize("guarantee", _MADE)
def test_a_guarantee_is_made_by_its_check_alone(guarantee: proved.Proved) -> None:
    kind = type(guarantee)
    attempts: list[Callable[[], object]] = [
        lambda: kind(),
        lambda: kind.__new__(kind),
        lambda: type("Other", (kind,), {}),
        lambda: pickle.dumps(guarantee),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match=f"{kind.__name__}|a guarantee is not pickled"):
            attempt()
    with pytest.raises(AttributeError, match="epsilon of a guarantee cannot be set"):
        setattr(guarantee, "epsilon", 0.1)  # noqa: B010
    with pytest.raises(AttributeError, match="epsilon of a guarantee cannot be deleted"):
        delattr(guarantee, "epsilon")
    assert copy.copy(guarantee) is copy.deepcopy(guarantee) is guarantee


def test_values_are_those_that_were_proved() -> None:
    class Small(proved.Proved):
        __slots__ = ("number",)
        number: int

    assert proved.made(Small, {"number": 3}).number == 3
    with pytest.raises(TypeError, match="Small has no subclasses"):
        type("Smaller", (Small,), {})
