"""Constructors of public value types refuse values that are none of an attribute's."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import factorizations, private_metrics
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    sampling_scheme,
    sampling_schemes,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy.guarantees import ObservedParticipation, StoppingRule, WorstClient
from mf_aggregators.privacy.ledgers import Ledger, RoundTimes
from mf_aggregators.privacy.statements import Evidence, RunFacts
from mf_aggregators.workloads import Workload
from tests.refusals import refuses

# The test replaces each attribute by each of these.
_OTHERS = ("x", math.nan, math.inf, -1, True, ())
# Attributes that may be one of them: texts, lists, truth values, and where there is no bound.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bool": (True,),
    "str": ("x",),
    "tuple": ((),),
    "smallest": (-1,),
    # Rounding may put it below zero.
    "optimality_gap": (-1,),
}
# The names of attributes in messages, where they differ.
_CALLED = {"name of Workload": "workload"}


def _values() -> Iterator[Any]:
    timers = MinSeparation(2, 3)
    mechanism = mfa.Mechanism(factorizations.identity(8), timers, 1.0)
    guarantee = mechanism.guarantee(1e-6)
    clip = mfa.AdaptiveClip(0.5, smallest_norm=0.1, largest_norm=1.0, clipped_count_stddev=1.0)
    metrics = private_metrics.PrivateMetrics((private_metrics.BoundedMetric("loss", 0.0, 1.0),))
    schemes = [
        sampling_scheme(name, num_rounds=8, num_bands=2, population=400, clients_per_round=10)
        for name in sampling_schemes()
    ]
    yield from (mechanism, clip, timers, FixedEpochOrder(2, 3), *schemes)
    yield Workload("momentum_sgd", 8, momentum=0.9, learning_rates=(0.5,) * 8)
    yield from (
        dataclasses.replace(made, participation=timers, optimality_gap=0.5)
        for made in (
            factorizations.identity(8),
            factorizations.tree_aggregation(8),
            factorizations.from_matrix(np.tri(8)),
            factorizations.from_bands(np.where(np.tri(8, 2), 1.0, 0.0)),
            factorizations.toeplitz(8),
            factorizations.blt(8),
            factorizations.banded_inverse(8, num_bands=2),
            factorizations.structured(factorizations.optimal(8), 2, 1),
        )
    )
    yield mfa.planning.Setting(8, 100, 2, timers, None, 4.0, 1e-6, 1000, noise_memory=1e9)
    yield Ledger(("a",), (np.array([0]),), 1)
    yield RoundTimes(np.array([0.0, 1.0]), np.array([1.0, 2.0]), 48.0, max_participations=3)
    yield ObservedParticipation(8, 2, 2, 2, True, 3, "a", "b")
    yield Evidence({"a": "b"}, {"a": "c"}, {"d": "e"})
    yield RunFacts(
        mechanism="a",
        population=10,
        clients_per_round=2,
        clip=clip,
        public_data="b",
        enforcement="c",
        metrics=metrics,
    )
    yield WorstClient("a", (0,), guarantee)
    yield from (metrics, *metrics.metrics)
    yield mfa.audit.Claim(mechanism, 1.0, 2.0)
    yield Certification(0, 100)
    yield StoppingRule(guarantee, 100.0)


_EACH_VALUE = pytest.mark.parametrize("value", [*_values()], ids=lambda value: type(value).__name__)


@_EACH_VALUE
def test_an_attribute_refuses_values_of_other_types(value: Any) -> None:
    for field in dataclasses.fields(value):
        kept = getattr(value, field.name)
        if not field.init or kept is None:
            continue
        attribute = f"{field.name} of {type(value).__name__}"
        for other in _OTHERS:
            allowed = (
                *_ALLOWED.get(type(kept).__name__, ()),
                *_ALLOWED.get(field.name, ()),
                *_ALLOWED.get(attribute, ()),
            )
            if any(other is each for each in allowed):
                continue
            # Objects of the library are checked by type as well.
            with refuses(_CALLED.get(attribute, field.name), error=(ValueError, TypeError)):
                dataclasses.replace(value, **{field.name: other})


@_EACH_VALUE
def test_an_entry_that_is_no_number_is_refused(value: Any) -> None:
    for field in dataclasses.fields(value):
        kept = getattr(value, field.name)
        if field.init and np.size(kept) and np.asarray(kept).dtype.kind == "f" and np.ndim(kept):
            for other in ("x", math.nan, math.inf, True):
                entries = np.array(kept, dtype=object)
                entries.flat[-1] = other
                with refuses(field.name):
                    dataclasses.replace(value, **{field.name: entries.tolist()})
