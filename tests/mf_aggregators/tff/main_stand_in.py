"""A stand-in for TensorFlow Federated's main branch, made of the release that is installed.

Its packages have the names that ``tff_main.json`` says that the main branch exports, and no
others; what stands behind a name is the release's. As a program it runs two rounds of an
aggregator under the names of the release, and two of one with the same seed under those of the main
branch, without TensorFlow Privacy, and prints as JSON what they released.
"""

import importlib
import json
import os
import pathlib
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

RECORD = json.loads((pathlib.Path(__file__).parent / "tff_main.json").read_text(encoding="utf-8"))


def install() -> None:
    """Puts the stand-ins in the place of the packages, for imports from now on."""
    import tensorflow_federated as tff
    import tensorflow_privacy as tfp

    exports = RECORD["exports"]
    # Of the release, one package has what is two packages in the main branch.
    stand_ins = {
        package: _with_names(package, exports[package], tff)
        for package in ("federated_language", "tensorflow_federated")
    }
    # This one has moved from one module to another.
    stand_ins[
        "tensorflow_federated"
    ].tensorflow.type_to_tf_tensor_specs = tff.types.type_to_tf_tensor_specs
    stand_ins["tensorflow_federated"].__path__ = tff.__path__
    stand_ins["federated_language"].__path__ = []
    query = "tensorflow_federated.python.aggregators.privacy.query"
    stand_ins[query] = _with_names(query, RECORD["besides"][query], tfp)
    for name, there in (
        ("common_libs.structure", "tensorflow_federated.python.common_libs.structure"),
        ("proto.computation_pb2", "tensorflow_federated.proto.v0.computation_pb2"),
    ):
        stand_ins[f"federated_language.{name}"] = importlib.import_module(there)
    # Parents of modules that are imported by their full names.
    for parent in (
        "federated_language.common_libs",
        "federated_language.proto",
        "tensorflow_federated.python.aggregators.privacy",
    ):
        stand_ins[parent] = types.ModuleType(parent)
        stand_ins[parent].__path__ = []
    sys.modules.update(stand_ins)
    # As where it is not installed.
    sys.modules["tensorflow_privacy"] = None  # type: ignore[assignment]


def _with_names(title: str, names: Mapping[str, Any], real: Any) -> types.ModuleType:
    module = types.ModuleType(title)
    for name, inner in names.items():
        if not hasattr(real, name):
            # New in the main branch.
            continue
        found = getattr(real, name)
        if isinstance(inner, dict) and isinstance(found, types.ModuleType):
            found = _with_names(f"{title}.{name}", inner, found)
        setattr(module, name, found)
    return module


def _two_rounds() -> list[list[float]]:
    import mf_aggregators as mfa
    from mf_aggregators.tff import compatibility
    from mf_aggregators.tff.dp_query import FixedSeedWarning

    warnings.simplefilter("ignore", FixedSeedWarning)
    aggregator = mfa.mf_dp_aggregator(
        mfa.factorizations.banded(mfa.workloads.prefix_sum(4), 2),
        participation=mfa.participation.MinSeparation(2),
        noise_multiplier=1.0,
        clip_norm=1.0,
        clients_per_round=2,
        seed=7,
    )
    process = aggregator.create(compatibility.TensorType(np.float32, [3]))
    state, found = process.initialize(), []
    for _ in range(2):
        output = process.next(state, [np.array([0.1, 0.2, 0.3], np.float32)] * 2)
        state = output.state
        found.append([float(each) for each in output.result])
    return found


def _forget_the_library() -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "mf_aggregators"]:
        del sys.modules[name]


def _compare() -> None:
    from mf_aggregators.tff import compatibility

    result: dict[str, Any] = {"release": [compatibility.LAYOUT.language, _two_rounds()]}
    _forget_the_library()
    install()
    from mf_aggregators.tff import compatibility as anew

    result["main"] = [anew.LAYOUT.language, _two_rounds()]
    result["base"] = anew.SumAggregationDPQuery.__name__
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from mf_aggregators.tff import processes

    try:
        _compare()
    finally:
        processes.end_workers()
