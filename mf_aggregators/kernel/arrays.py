"""Types of arrays, by what their entries are."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ComplexArray: TypeAlias = npt.NDArray[np.complexfloating[Any, Any]]
# Rows of noise are floats, or integers in quantization steps.
RealArray: TypeAlias = FloatArray | IntArray
