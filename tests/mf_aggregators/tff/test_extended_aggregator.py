"""Aggregators of runs that were extended: a saved state goes on, and released rows stay."""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mf_aggregators as mfa
from mf_aggregators.factorizations import Factorization, noise_rows
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
)
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from mf_aggregators.tff import processes
from tests.mf_aggregators import small_mechanisms
from tests.refusals import refuses

_BEFORE, _WHOLE = 7, 12
_SIZE = 40
_SPECS = tf.TensorSpec((_SIZE,), tf.float64)
_SCHEMA, _MULTIPLIER = MinSeparation(4), 0.8
_SUMS = mfa.workloads.prefix_sum(_BEFORE)

_MADE = {
    "identity": mfa.factorizations.identity(_BEFORE),
    "tree": mfa.factorizations.tree_aggregation(_BEFORE),
    "blt": small_mechanisms.blt(_BEFORE, 2),
    "banded toeplitz": mfa.factorizations.toeplitz(_BEFORE, 3),
    "toeplitz": mfa.factorizations.toeplitz(_BEFORE),
    "banded": mfa.factorizations.banded(_SUMS, 3),
}


def _began(
    whole: Factorization, *later: Participation, schema: Participation = _SCHEMA
) -> mfa.Mechanism:
    """What a run did, in its first horizon and some later ones, that goes on with a matrix."""
    mechanism = mfa.Mechanism(whole.at_horizon(_BEFORE), schema, _MULTIPLIER)
    sizes: dict[str, Any] = {"num_parameters": 2**8, "largest_cohort": 2**22}
    for rounds, each in zip(whole.horizons[1:], later, strict=False):
        matrix = whole.at_horizon(rounds)
        mechanism = mechanism.extended(rounds, each, factorization=matrix, **sizes)
    return mechanism


def _query(
    factorization: Factorization,
    participation: Any = _SCHEMA,
    specs: Any = _SPECS,
    noise_multiplier: float = _MULTIPLIER,
    began: mfa.Mechanism | None = None,
    **changes: Any,
) -> Any:
    arguments: dict[str, Any] = {
        "clip_norm": 1.0,
        "clients_per_round": 4,
        "seed": 3,
        "noise_storage": "state",
        **changes,
    }
    mechanism = mfa.Mechanism(factorization, participation, noise_multiplier, began)
    return mfa.mf_dp_aggregator(mechanism, **arguments).query(specs)


def _extended_query(whole: Factorization, specs: Any = _SPECS, **changes: Any) -> Any:
    size = sum(spec.shape.num_elements() for spec in tf.nest.flatten(specs))
    beside = int(isinstance(changes.get("clip_norm"), mfa.AdaptiveClip))
    if "metrics" in changes:
        beside = 1 + len(changes["metrics"].metrics)
    began = changes.pop("began", None) or _began(whole)
    found = began.extended(
        whole.num_rounds,
        changes.get("participation", _SCHEMA),
        num_parameters=size + beside,
        largest_cohort=2**22,
        storage=changes.get("noise_storage", "state"),
        factorization=whole,
    ).noise_multiplier
    return _query(whole, specs=specs, **{"noise_multiplier": found, "began": began, **changes})


@functools.lru_cache(maxsize=1)
def _step(query: Any) -> Any:
    """The graph of a query's rounds, which takes a second to make, while it is in use."""
    return tf.function(query.get_noised_result, autograph=False)


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    """Lets the last graph go while Python is still whole: later, TensorFlow complains."""
    yield
    _step.cache_clear()


def _rounds(query: Any, state: Any, first: int, end: int) -> tuple[list[np.ndarray], Any]:
    """What is released of sums that differ from round to round, and the state after them."""
    released = []
    step = _step(query)
    for i in range(first, end):
        params = query.derive_sample_params(state)
        record: Any = tf.constant(np.sin(np.arange(_SIZE) + i))
        if getattr(query, "_metrics", None) is not None:
            record = {"update": record, "metrics": {"loss": tf.constant(0.1 * i)}}
        sample = query.preprocess_record(params, record)
        result, state, _ = step(sample, state)
        released.append(np.asarray(result))
    return released, state


def _saved(state: Any) -> Any:
    """A state as a file gives it back."""
    return tf.nest.map_structure(lambda leaf: np.asarray(leaf), state)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("name", "storage"),
    [
        *(
            (name, "state")
            if name in ("blt", "banded")
            else pytest.param(name, "state", marks=pytest.mark.long)
            for name in _MADE
        ),
        # Rows of several tiles go on in files in the short run, below.
        *(
            pytest.param(name, "disk", marks=pytest.mark.long)
            for name in _MADE
            if name != "identity"
        ),
    ],
)
def test_a_saved_state_goes_on_and_no_released_bit_changes(
    name: str, storage: str, tmp_path: pathlib.Path
) -> None:
    before = _MADE[name]
    whole = before.extended(_WHOLE, participation=_SCHEMA)
    noise: dict[str, Any] = {"noise_storage": storage}
    if storage == "disk":
        noise["noise_directory"] = tmp_path / "noise"
    query = _query(before, **noise)
    start = query.initial_global_state()
    released, state = _rounds(query, start, 0, _BEFORE)
    longer = _extended_query(whole, **noise)
    later, _ = _rounds(longer, _saved(state), _BEFORE, _WHOLE)
    # From an older state, and from the first one, the same rounds release the same bits.
    again, _ = _rounds(longer, _saved(start), 0, _WHOLE)
    for ours, theirs in zip([*released, *later], again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # Their noise is that of the whole matrix in the scale of the first plan: L^-1 rows of Z.
    sums = np.array([np.sin(np.arange(_SIZE) + i) for i in range(_WHOLE)])
    norms = np.maximum(1.0, np.linalg.norm(sums, axis=1, keepdims=True))
    drawn = np.array([*released, *later]) - sums / norms
    stddev = _MULTIPLIER * before.sensitivity(_SCHEMA).value
    recursion = whole.noise_recursion()
    z = np.linalg.solve(noise_rows.dense(recursion)[:, :_WHOLE], drawn / stddev)
    assert np.all(np.abs(z) < 6.0)
    assert np.mean(np.square(z)) == pytest.approx(1.0, abs=0.3)


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("blt", {"clip_norm": mfa.AdaptiveClip(initial_norm=1.0)}),
        ("banded", {"clip_norm": mfa.AdaptiveClip(initial_norm=1.0)}),
        ("blt", {"metrics": PrivateMetrics((BoundedMetric("loss", 0.0, 1.0),))}),
    ],
    ids=["blt", "banded", "metrics"],
)
def test_what_is_released_beside_updates_goes_on(name: str, more: dict[str, Any]) -> None:
    before = _MADE[name]
    whole = before.extended(_WHOLE, participation=_SCHEMA)
    query = _query(before, **more)
    start = query.initial_global_state()
    released, state = _rounds(query, start, 0, _BEFORE)
    longer = _extended_query(whole, **more)
    later, end = _rounds(longer, _saved(state), _BEFORE, _WHOLE)
    again, other = _rounds(longer, _saved(start), 0, _WHOLE)
    for ours, theirs in zip([*released, *later], again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert float(end.clip.norm) == float(other.clip.norm)
    np.testing.assert_array_equal(end.released_metrics, other.released_metrics)


def test_a_whole_that_is_stated_better_than_it_is_is_refused() -> None:
    whole = _MADE["blt"].extended(_WHOLE)
    for stated in (_MULTIPLIER, 10.0):
        with refuses("noise multiplier"):
            _query(whole, noise_multiplier=stated, began=_began(whole))
    # Less than there is may be stated; the noise is the same.
    _query(whole, noise_multiplier=0.1, began=_began(whole))


def test_the_state_of_an_extended_run_tells_the_schema_of_the_whole() -> None:
    whole = _extended_query(_MADE["blt"].extended(_WHOLE), participation=MinSeparation(2))
    state = _saved(_query(_MADE["blt"]).initial_global_state())
    assert processes.participations_in(state) == (_SCHEMA,)
    _, state = _rounds(whole, state, 0, 1)
    assert processes.participations_in(state) == (MinSeparation(2),)
    assert state.fingerprint == whole.initial_global_state().fingerprint


def test_a_state_goes_on_under_an_extension_alone() -> None:
    """Not under the horizon before it, nor an extension of another run, nor with other options."""
    extended = _MADE["blt"].extended(_WHOLE)
    first, whole = _query(_MADE["blt"]), _extended_query(extended)
    state = _saved(first.initial_global_state())
    _, of_whole = _rounds(whole, state, 0, 1)
    _rounds(whole, of_whole, 1, 2)
    weaker = mfa.Mechanism(_MADE["blt"], _SCHEMA, 0.9 * _MULTIPLIER)
    other = _extended_query(_MADE["identity"].extended(_WHOLE), began=None)
    for query, each in (
        (first, of_whole),
        (other, state._replace(history=other.initial_global_state().history)),
        (_extended_query(extended, began=weaker), state),
        (_extended_query(extended, clip_norm=2.0), state),
    ):
        with refuses("fresh state", error=tf.errors.InvalidArgumentError):
            _rounds(query, each, 0, 1)


def test_every_horizon_of_a_run_that_is_extended_twice_counts() -> None:
    whole = _MADE["blt"].extended(9).extended(_WHOLE)
    assert whole.horizons == (_BEFORE, 9)
    stated: dict[str, Any] = {"participation": MinSeparation(4), "noise_multiplier": 0.1}
    with refuses("7", "9"):
        _query(whole, began=_began(whole), **stated)
    with refuses("horizon", "9"):
        _query(whole, began=_began(whole, MinSeparation(2)), **stated)
    _query(whole, began=_began(whole, MinSeparation(4)), **stated)


def test_a_mechanism_is_not_contradicted() -> None:
    mechanism = mfa.Mechanism(_MADE["blt"], _SCHEMA, 0.8)
    with refuses("participation", error=TypeError):
        mfa.mf_dp_aggregator(
            mechanism, participation=MinSeparation(5), clip_norm=1.0, clients_per_round=4
        )
    with refuses("noise_multiplier", error=TypeError):
        mfa.mf_dp_aggregator(_MADE["blt"], clip_norm=1.0, clients_per_round=4)
    # Roundings of the rounds of a model that nobody has named.
    whole = mechanism.extended(_WHOLE)
    with refuses("num_parameters"):
        mfa.mf_dp_aggregator(whole, clip_norm=1.0, clients_per_round=4).query(_SPECS)


def test_no_secure_round_tells_the_size_of_a_random_batch() -> None:
    """A round of more clients than expected is none that is refused."""
    sizes = (_BEFORE, 1, 40, 4)
    for scheme, most in (
        (mfa.participation.PoissonSampling(*sizes), 40),
        (mfa.participation.FixedSizeSampling(*sizes), 4),
    ):
        mechanism = mfa.Mechanism(mfa.factorizations.identity(_BEFORE), scheme, 1.0)
        aggregator = mfa.mf_dp_aggregator(
            mechanism, clip_norm=1.0, clients_per_round=4, secure_aggregation_bits=40
        )
        assert aggregator._options.sums.largest_cohort == most
