"""Files of claims: plain numbers, which an auditor can check with any program.

A file is an ``.npz`` archive. It has one array for each number of a claim, named by the path of the
attribute, such as ``sigma`` or ``rows.bands``. For a part of a claim (such as ``rows``), the name
of its class is stored as a text. Attributes that are None are left out.

    claim_file.write_claim(guarantee.claim, "claim.npz")
    guarantee = kernel.claim.check(claim_file.read_claim("claim.npz"))
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mf_aggregators.kernel.certificate import Certificate
from mf_aggregators.kernel.claim import Basis, Claim, Pattern, TakingPart
from mf_aggregators.kernel.numbers import Dataclass
from mf_aggregators.kernel.rows import BandedNoise, ScaledNoise, StateSpaceNoise, WindowNoise

# The name of the array with the format's version, and the version.
_VERSION_NAME, _VERSION = "claim_format", 1
_PARTS: Mapping[str, tuple[type[Dataclass], ...]] = {
    "rows": (BandedNoise, WindowNoise, StateSpaceNoise, ScaledNoise),
    "rows.inner": (BandedNoise, WindowNoise, StateSpaceNoise),
    "taking_part": get_args(TakingPart),
    "certificate": (Certificate,),
}
_Array: TypeAlias = npt.NDArray[np.generic]
_DTYPES: Mapping[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}


def write_claim(claim: Claim, path: str | os.PathLike[str]) -> None:
    """Writes a claim to a file, which :func:`read_claim` reads.

    Args:
      claim: The claim.
      path: The file, by convention ``.npz``; an existing file is replaced.

    Raises:
      OSError: If the file cannot be written.
      OverflowError: If an integer has more than 64 bits.
    """
    arrays = _arrays(claim)
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def read_claim(path: str | os.PathLike[str]) -> Claim:
    """Reads a claim without proving it (``claim.check`` does that).

    Args:
      path: A file that :func:`write_claim` wrote.

    Returns:
      The claim.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If the file is not exactly one claim: if a name is unknown, missing or repeated; a
        number is NaN, out of its range or of another type; or a part is of an unknown class.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
            num_names = len(file.files)
        claim = _claim(arrays)
        expected = _arrays(claim)
        wrong = arrays.keys() ^ expected.keys()
        wrong |= {name for name in expected if not _are_same(arrays.get(name), expected[name])}
        if wrong or num_names != len(arrays):
            raise ValueError(f"no claim has these entries: {', '.join(sorted(wrong))}")
    except OSError:
        raise
    except Exception as error:  # A damaged archive raises many types.
        raise ValueError(f"{path} holds no claim ({error!r}).") from error
    return claim


def _arrays(claim: Claim) -> dict[str, _Array]:
    """The arrays of a claim's file, by name."""
    if type(claim) is not Claim:
        raise TypeError(f"claim must be a Claim, found {type(claim)}.")
    found = {_VERSION_NAME: _VERSION, **_flattened("", claim)}
    return {name: np.array(each, _DTYPES.get(type(each))) for name, each in found.items()}


def _flattened(prefix: str, of: Dataclass) -> dict[str, object]:
    """The attributes of a dataclass and of its parts, by path."""
    found: dict[str, object] = {}
    for name, value in _attributes(of).items():
        path = f"{prefix}{name}"
        if isinstance(value, Basis):
            found[path] = value.name
        elif path not in _PARTS:
            found[path] = value
        else:
            found |= {path: type(value).__name__, **_flattened(f"{path}.", getattr(of, name))}
    return found


def _attributes(of: Dataclass) -> dict[str, object]:
    """The constructor's attributes of a dataclass, without those that are None."""
    names = [each.name for each in dataclasses.fields(of) if each.init]
    return {name: value for name in names if (value := getattr(of, name)) is not None}


def _claim(arrays: Mapping[str, _Array]) -> Claim:
    """The claim of a file's arrays, ignoring names that a claim does not have."""
    values: dict[str, object] = {
        each.name: arrays[each.name][()]
        for each in dataclasses.fields(Claim)
        if each.name in arrays
    }
    for name in _PARTS.keys() & values.keys():
        values[name] = _part(name, arrays)
    # The constructor checks its arguments.
    return Claim(**{**values, "basis": Basis[str(values["basis"])]})  # type: ignore[arg-type]


def _part(path: str, arrays: Mapping[str, _Array]) -> object:
    """The part of a claim at a path."""
    kind = {each.__name__: each for each in _PARTS[path]}[str(arrays[path][()])]
    return kind(**_arguments(kind, path, arrays))


def _arguments(kind: type[Dataclass], name: str, arrays: Mapping[str, _Array]) -> dict[str, object]:
    """The arguments of a part's constructor; attributes without an array are None."""
    found: dict[str, object] = {}
    for each in dataclasses.fields(kind):
        array = arrays.get(f"{name}.{each.name}")
        if array is None:
            if each.init and each.default is dataclasses.MISSING:
                found[each.name] = None
        elif f"{name}.{each.name}" in _PARTS:
            found[each.name] = _part(f"{name}.{each.name}", arrays)
        elif array.ndim == 0:
            found[each.name] = array.item()
        else:
            holds_tuples = kind in (Pattern, Certificate)
            found[each.name] = tuple(array.tolist()) if holds_tuples else array
    return found


def _are_same(found: _Array | None, wanted: _Array) -> bool:
    """Whether two arrays have the same type and numbers, without NaN."""
    return found is not None and found.dtype == wanted.dtype and np.array_equal(found, wanted)
