"""Nests of arrays (dicts, lists, tuples, named tuples), with leaves in the order of ``tf.nest``."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# The floating-point dtypes of models, and what noise for them is computed in.
NOISE_DTYPES = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float64": "float64",
}


def leaves_of(nest: Any) -> list[Any]:
    """Returns the arrays of a nest, in the order of ``tf.nest``: dicts by sorted keys."""
    leaves: list[Any] = []
    _mapped(leaves.append, nest)
    return leaves


def in_structure(nest: Any, leaves: Sequence[Any]) -> Any:
    """Returns a nest with other leaves.

    Args:
      nest: The nest.
      leaves: As many as it has, in the order of :func:`leaves_of`.
    """
    following = iter(leaves)
    return _mapped(lambda _: next(following), nest)


def tensor_of(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the name of the dtype of an array, or of anything that has both.

    Raises:
      TypeError: If the dtype is not float64, float32, float16 or bfloat16.
    """
    # Arrays of other frameworks and plain specifications have these two as well.
    array = leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else np.asarray(leaf)
    name = (getattr(array.dtype, "name", None) or str(array.dtype)).removeprefix("torch.")
    if name not in NOISE_DTYPES:
        raise TypeError(
            f"noise can be added to {', '.join(NOISE_DTYPES)} arrays, found one of dtype "
            f"{name} and shape {tuple(array.shape)}: leave integers and flags out of what "
            "is aggregated, or cast them."
        )
    return tuple(int(size) for size in array.shape), name


def _mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with ``function`` of each leaf in its place, called in the order of ``tf.nest``."""
    if isinstance(nest, Mapping):
        # The order of insertion is not part of a dict's structure; ``tf.nest`` sorts as well.
        found = {key: _mapped(function, nest[key]) for key in sorted(nest)}
        in_order = ((key, found[key]) for key in nest)
        is_ordered = isinstance(nest, collections.OrderedDict)
        return collections.OrderedDict(in_order) if is_ordered else dict(in_order)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_mapped(function, child) for child in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(_mapped(function, child) for child in nest)
    return function(nest)
