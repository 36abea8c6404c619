"""Differential privacy by matrix factorization (MF-DP-FTRL, BandMF) for TensorFlow Federated.

The mathematics (workloads, participation schemas, factorizations, their sensitivity,
checkpoints, accounting) needs no TensorFlow. ``mf_dp_aggregator`` imports TensorFlow Federated when
it is first used, and ``figures`` imports matplotlib.
"""

import importlib
from typing import TYPE_CHECKING

from mf_aggregators import (
    accounting,
    checkpoints,
    clip_search,
    factorizations,
    noise,
    participation,
    sensitivity,
    workloads,
)
from mf_aggregators import rate_search as rate_search
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.aggregator import Aggregator
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.mechanism import Mechanism, calibrate, load, spent
from mf_aggregators.tff import installation
from mf_aggregators.version import __version__

if TYPE_CHECKING:
    from mf_aggregators import audit, planning, privacy
    from mf_aggregators.tff.aggregator import mf_dp_aggregator

__all__ = [
    "AdaptiveClip",
    "Aggregator",
    "Error",
    "Mechanism",
    "__version__",
    "accounting",
    "audit",
    "calibrate",
    "checkpoints",
    "clip_search",
    "factorizations",
    "load",
    "mf_dp_aggregator",
    "noise",
    "participation",
    "planning",
    "privacy",
    "sensitivity",
    "spent",
    "tff",
    "workloads",
]

# Packages that are imported on first use, and not by ``import mf_aggregators``.
_IMPORTED_WHEN_USED = ("audit", "commands", "figures", "planning", "privacy")


def __getattr__(name: str) -> object:
    # TensorFlow Federated takes seconds to import, and the mathematics runs
    # where it cannot be installed at all.
    if name == "mf_dp_aggregator":
        try:
            from mf_aggregators.tff.aggregator import mf_dp_aggregator
        except ModuleNotFoundError as error:
            explained = installation.explained("mf_aggregators.mf_dp_aggregator", error)
            if explained is None:
                raise
            raise explained from error
        # Stores the name, so that Python finds it without this function from now on.
        globals()[name] = mf_dp_aggregator
        return mf_dp_aggregator
    if name in _IMPORTED_WHEN_USED:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
