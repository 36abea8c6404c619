"""Nests of arrays (dicts, lists, tuples, named tuples, attrs), in the order of ``tf.nest``."""

import collections
import itertools
import operator
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
    return [leaf for _, leaf in named_leaves(nest)]


def named_leaves(nest: Any) -> list[tuple[str, Any]]:
    """Returns each array of a nest with its path, in the order of :func:`leaves_of`.

    A path has the kind of each container and the name in it: ``['a']`` in a dict (``{1}`` for a key
    that is no text), ``.kernel`` in a named tuple, ``[0]`` in a list, ``(0)`` in a tuple.
    """
    leaves: list[tuple[str, Any]] = []
    _mapped(lambda path, leaf: leaves.append((path, leaf)), nest)
    return leaves


def in_structure(nest: Any, leaves: Sequence[Any]) -> Any:
    """Returns a nest with other leaves.

    Args:
      nest: The nest.
      leaves: As many as it has, in the order of :func:`leaves_of`.
    """
    following = iter(leaves)
    return _mapped(lambda *_: next(following), nest)


def tensor_of(leaf: Any, path: str = "", *, is_array: bool = False) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the name of the dtype of an array, or of anything that has both.

    Args:
      leaf: The array.
      path: Its path in a nest, for the message.
      is_array: Whether the leaf has to have values, and not only a shape and a dtype.

    Raises:
      TypeError: If it is a sparse, ragged, masked or labelled array, a matrix or anything else but
        a plain array of numbers, or its dtype is not float64, float32, float16 or bfloat16.
    """
    shape = getattr(leaf, "shape", None)
    is_specification = not is_array and hasattr(leaf, "dtype") and not hasattr(leaf, "__array__")
    if not is_plain(leaf) and (not is_specification or shape is None or None in tuple(shape)):
        raise TypeError(not_plain(leaf, path))
    # Arrays of other frameworks and plain specifications have these two as well.
    array = leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else np.asarray(leaf)
    name = (getattr(array.dtype, "name", None) or str(array.dtype)).removeprefix("torch.")
    if name not in NOISE_DTYPES:
        raise TypeError(
            f"noise can be added to {', '.join(NOISE_DTYPES)} arrays, found one of dtype "
            f"{name} and shape {tuple(array.shape)}{path and f' at {path}'}: leave integers and "
            "flags out of what is aggregated, or cast them."
        )
    return tuple(int(size) for size in array.shape), name


def check_same(
    expected: Sequence[tuple[str, Any]],
    found: Sequence[tuple[str, Any]],
    is_same: Callable[[Any, Any], bool] = operator.eq,
) -> None:
    """Raises ValueError unless two nests have the same paths and kinds of leaves.

    Args:
      expected: The path of each expected leaf, and its dtype or shape.
      found: The path of each found leaf, and its dtype or shape.
      is_same: Compares a dtype or shape with another one.
    """
    for pair in itertools.zip_longest(expected, found):
        if None in pair or pair[0][0] != pair[1][0] or not is_same(pair[0][1], pair[1][1]):
            one, other = (
                f"{each[1]} {f'at {each[0]}' if each[0] else 'alone'}" if each else "no more leaves"
                for each in pair
            )
            raise ValueError(
                f"an update must have {one}, found {other}: names, containers, shapes and dtypes "
                "are those of the run's first update, or of its template or query."
            )


def is_plain(leaf: Any) -> bool:
    """Returns whether an object is a dense array of numbers, without mask, labels or units."""
    kind, layout = type(leaf), str(getattr(leaf, "layout", ""))
    if isinstance(leaf, np.ndarray):
        return kind in (np.ndarray, np.memmap) and leaf.dtype.names is None and leaf.dtype != object
    if kind.__module__.startswith("tensorflow."):
        return hasattr(leaf, "__array__")
    is_sparse = layout.startswith("torch.") and layout != "torch.strided"
    return isinstance(leaf, float | np.generic) or (hasattr(leaf, "__dlpack__") and not is_sparse)


def not_plain(leaf: Any, path: str) -> str:
    """Returns the message for a leaf that is no plain array."""
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
    return (
        f"{f'the leaf {path} of an update' if path else 'an update'} is a {kind}{dtype}, and "
        "updates are dicts, lists, tuples and named tuples of plain arrays of numbers: convert it "
        "to a dense array."
    )


def _mapped(function: Callable[[str, Any], Any], nest: Any, path: str = "") -> Any:
    """The nest with ``function`` of path and leaf in each place, in the order of ``tf.nest``."""
    if isinstance(nest, Mapping):
        # The order of insertion is not part of a dict's structure; ``tf.nest`` sorts as well.
        named = (
            (key, f"[{key!r}]" if isinstance(key, str) else f"{{{key!r}}}") for key in sorted(nest)
        )
        found = {key: _mapped(function, nest[key], path + name) for key, name in named}
        in_order = ((key, found[key]) for key in nest)
        is_ordered = isinstance(nest, collections.OrderedDict)
        return collections.OrderedDict(in_order) if is_ordered else dict(in_order)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        pairs = zip(nest._fields, nest, strict=True)
        return type(nest)(*(_mapped(function, child, f"{path}.{name}") for name, child in pairs))
    if hasattr(type(nest), "__attrs_attrs__"):
        names = [field.name for field in type(nest).__attrs_attrs__]
        return type(nest)(
            *(_mapped(function, getattr(nest, name), f"{path}.{name}") for name in names)
        )
    if isinstance(nest, list | tuple):
        ends = "[]" if isinstance(nest, list) else "()"
        numbered = enumerate(nest)
        return type(nest)(
            _mapped(function, child, f"{path}{ends[0]}{i}{ends[1]}") for i, child in numbered
        )
    return function(path, nest)
