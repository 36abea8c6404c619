"""Files of claims: round trips are exact; an altered file is refused or has another claim."""

import contextlib
import dataclasses
import io
import math
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.checkpoints import claim_file
from mf_aggregators.kernel import claim as claims
from mf_aggregators.kernel.certificate import Certificate
from mf_aggregators.kernel.claim import Basis, Claim, Limit, Pattern
from mf_aggregators.kernel.losses import (
    BallsInBins,
    FixedSize,
    MinSeparation,
    Poisson,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import BandedNoise
from mf_aggregators.kernel.sensitivity import Schema
from tests.examples import examples
from tests.mf_aggregators import random_recursions
from tests.mf_aggregators.random_recursions import banded_rows

_CERTIFICATE = Certificate(3.5, 1e-6, 1, 4, 2048, 0.25, 1024, (0.5, 1.5), 2**62)
_TAKING_PART: tuple[tuple[Any, Basis], ...] = (
    *((Schema(None, 3), basis) for basis in (Basis.PLAN, Basis.LEDGER)),
    (Schema(2, 3, is_even=True), Basis.PLAN),
    *((Pattern(rounds), Basis.LEDGER) for rounds in ((), (0,), (0, 2**40))),
    (Limit(0.1), Basis.RULE),
    (TruncatedPoisson(9, 2, 40, 3, 5), Basis.DRAWS),
    *((kind(9, 2, 40, 3), Basis.DRAWS) for kind in (Poisson, FixedSize)),
    *((kind(9, 2, 40, 3), Basis.DRAWS) for kind in (Shuffling, RandomAllocation)),
    *((kind(9, 2, 40, 3, 4), Basis.DRAWS) for kind in (MinSeparation, BallsInBins)),
)
_sigmas = st.one_of(st.just(0.0), st.floats(1e-300, 1e300))
_deltas = st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)
_epsilons = st.one_of(st.none(), st.just(math.inf), st.floats(0.0, 1e300))


@st.composite
def _claims(draw: st.DrawFn) -> Claim:
    taking_part, basis = draw(st.sampled_from(_TAKING_PART))
    is_secret = isinstance(taking_part, (MinSeparation, BallsInBins))
    return Claim(
        draw(random_recursions.recursions()),
        taking_part,
        draw(_sigmas),
        draw(_deltas),
        draw(_epsilons),
        draw(st.one_of(st.none(), st.integers(1, 2**62))),
        basis,
        draw(st.integers(1, 2**62)),
        _CERTIFICATE if is_secret and draw(st.booleans()) else None,
    )


def _leaves(value: Any, path: str = "") -> dict[str, tuple[type, Any]]:
    """The numbers of a claim by path, with their types and bits."""
    if dataclasses.is_dataclass(value):
        found: dict[str, tuple[type, Any]] = {path: (type(value), "")}
        for each in dataclasses.fields(value):
            found |= _leaves(getattr(value, each.name), f"{path}.{each.name}")
        return found
    if isinstance(value, np.ndarray):
        return {path: (type(value), (value.dtype.str, value.shape, value.tobytes()))}
    return {path: (type(value), repr(value))}


def _bytes_of(arrays: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file


def _read(arrays: dict[str, Any], path: pathlib.Path) -> Claim:
    path.write_bytes(_bytes_of(arrays).getvalue())
    return claim_file.read_claim(path)


def _written(claim: Claim, path: pathlib.Path) -> dict[str, np.ndarray]:
    claim_file.write_claim(claim, path)
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("claims") / "claim.npz"


@pytest.fixture(scope="module")
def secret(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a claim that has all parts."""
    rows = banded_rows(np.array([[1.0, 0.0], [1.0, 0.5]]))
    secret_rounds = MinSeparation(2, 2, 40, 3, 4)
    claim = Claim(
        *(rows, secret_rounds, 1.5, 1e-6, 3.5),
        certificate=_CERTIFICATE,
        num_rounds=2,
    )
    return _written(claim, path)


@given(_claims())
@settings(max_examples=examples(150), deadline=None)
def test_a_claim_comes_back_bit_for_bit(path: pathlib.Path, claim: Claim) -> None:
    arrays = _written(claim, path)
    assert _leaves(claim_file.read_claim(path)) == _leaves(claim)
    # Plain numbers alone: no objects.
    assert {each.dtype.kind for each in arrays.values()} <= {*"bifU"}
    first = path.read_bytes()
    claim_file.write_claim(claim, path)
    assert path.read_bytes() == first


_ALTERATIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "another number": lambda array: array + np.ones((), array.dtype),
    "another type of number": lambda array: array.astype(np.float32),
    "an integer or a float": lambda array: array.astype(
        np.float64 if array.dtype.kind in "ib" else np.int64
    ),
    "big end first": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "NaN": lambda array: array * math.nan,
    "another shape": lambda array: array[None],
    "less": lambda array: array[:-1] if array.ndim else np.zeros(()),
    "a text": lambda array: np.array("Claim"),
    "an object": lambda array: array.astype(object),
    "a name of another part": lambda array: np.array("Schema"),
}


@pytest.mark.parametrize("what", _ALTERATIONS)
def test_an_altered_number_is_refused_or_another_claim(
    what: str, secret: dict[str, np.ndarray], path: pathlib.Path
) -> None:
    same = _leaves(_read(secret, path))
    for name, array in secret.items():
        try:
            altered = _ALTERATIONS[what](array)
        except (TypeError, ValueError):  # It cannot be done to a text.
            continue
        with contextlib.suppress(ValueError):
            read = _read({**secret, name: altered}, path)
            assert what in ("another number", "less"), name
            assert _leaves(read) != same, name


def test_what_is_left_out_is_refused_or_none(
    secret: dict[str, np.ndarray], path: pathlib.Path
) -> None:
    for name in secret:
        less = {each: array for each, array in secret.items() if each != name}
        if name not in ("epsilon", "num_rounds"):
            with pytest.raises(ValueError, match="holds no claim"):
                _read(less, path)
        else:
            part, _, attribute = name.rpartition(".")
            read = _read(less, path)
            assert getattr(getattr(read, part) if part else read, attribute) is None


@given(st.sampled_from(["extra", "rows.rows", "taking_part.is_even", "certificate.digest", ""]))
def test_a_name_that_is_not_known_is_refused(
    secret: dict[str, np.ndarray], path: pathlib.Path, name: str
) -> None:
    with pytest.raises(ValueError, match="holds no claim"):
        _read({**secret, name: np.array(1)}, path)


def test_numbers_that_are_not_used_are_refused(path: pathlib.Path) -> None:
    """Entries above the diagonal become zero, so that a file that has others is not as written."""
    arrays = _written(Claim(banded_rows(np.ones((3, 2))), Schema(1, 1), 1.0, 1e-6), path)
    arrays["rows.bands"][0, 1] = 1.0
    with pytest.raises(ValueError, match=r"rows\.bands"):
        _read(arrays, path)


def test_a_name_that_is_there_twice_is_refused(
    secret: dict[str, np.ndarray], path: pathlib.Path
) -> None:
    path.write_bytes(_bytes_of(secret).getvalue())
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("sigma.npy", archive.read("sigma.npy"))
    with pytest.raises(ValueError, match="holds no claim"):
        claim_file.read_claim(path)


class _Loud:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (self._path,)


def test_no_pickle_is_read(secret: dict[str, np.ndarray], path: pathlib.Path) -> None:
    created = path.with_name("created")
    with pytest.raises(ValueError, match="holds no claim"):
        _read({**secret, "sigma": np.array(_Loud(created), object)}, path)
    assert not created.exists()


@pytest.mark.parametrize("contents", [b"", b"PK\x03\x04", _bytes_of({"sigma": 1.0}).getvalue()])
def test_other_files_are_refused(contents: bytes, path: pathlib.Path) -> None:
    path.write_bytes(contents)
    with pytest.raises(ValueError, match="holds no claim"):
        claim_file.read_claim(path)


def test_an_epsilon_in_a_file_is_a_claim(path: pathlib.Path) -> None:
    claim = Claim(BandedNoise(2), Schema(1, 1), 1.0, 1e-6)
    proved = claims.check(claim)
    arrays = _written(proved.claim, path)
    assert claims.check(claim_file.read_claim(path)) == proved
    for factor in (0.5, 1.0 - 1e-6):
        with pytest.raises(NotProved):
            claims.check(_read({**arrays, "epsilon": arrays["epsilon"] * factor}, path))
    more = {**arrays, "sigma": arrays["sigma"] * 2.0}
    assert claims.check(_read(more, path)).epsilon < proved.epsilon
