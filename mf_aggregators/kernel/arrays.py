"""Types of arrays, by what their entries are."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ComplexArray: TypeAlias = npt.NDArray[np.complexfloating[Any, Any]]
# Rows of noise are floats, or integers in quantization steps.
RealArray: TypeAlias = FloatArray | IntArray

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def underflow_is_zero(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Lets floats of a function underflow to zero, also under ``np.seterr(all="raise")``.

    Args:
      function: The function.
    """

    @functools.wraps(function)
    def quiet(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        with np.errstate(under="ignore"):
            return function(*arguments, **options)

    return quiet
