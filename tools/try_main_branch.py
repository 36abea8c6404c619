r"""Builds the aggregator with the sources of TensorFlow Federated's main branch; runs its noise.

  PYTHONPATH=SOURCES:. python3.12 tools/try_main_branch.py
  .venv/bin/python tools/try_main_branch.py

SOURCES is a folder with the Python files of the main branch, from which no package is made, below
tensorflow_federated/. What they import that has to be compiled is replaced by names without
meaning, so that computations are built with the main branch and TensorFlow, and TFF's executors run
none of them. The DPQuery is run by TensorFlow itself. Without SOURCES the same is done with the
release that is installed: the last line, a digest of four rounds of noise, has to be the same.

Python 3.12 needs tensorflow 2.21, federated_language 0.5.3, dp-accounting 0.6.0, dm-tree, attrs,
cachetools, portpicker, tqdm, grpcio, scipy, matplotlib, markdown, psutil and cryptography.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types
import warnings
from typing import Any
from unittest import mock

_COMPILED = ("tensorflow_federated.cc", "tensorflow_federated.proto.v0.executor_pb2")


class _Nothing(types.ModuleType):
    """A module that has every name, and means nothing by it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds such modules in the place of what has to be compiled."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Returns a specification for what has to be compiled; see the base class."""
        if not name.startswith(_COMPILED):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Returns the module; see the base class."""
        return _Nothing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing; see the base class."""


def _prepare() -> None:
    """Replaces what has to be compiled, if TFF is there as sources."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    found = importlib.util.find_spec("tensorflow_federated")
    if found is None or found.origin is None:
        sys.exit("TensorFlow Federated is not there: put its sources on PYTHONPATH.")
    folder = pathlib.Path(found.origin).parent
    if (folder / "cc").is_dir() and not list((folder / "proto").rglob("*_pb2.py")):
        sys.meta_path.insert(0, _Finder())
        # Looked for, and started with the first computation that is run.
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / "worker_binary").touch()


def _build() -> None:
    import numpy as np
    import tensorflow as tf
    import tensorflow_federated as tff

    import mf_aggregators as mfa
    from mf_aggregators.tff import client_sums, compatibility

    versions = (
        f"TensorFlow {tf.__version__}, NumPy {np.__version__}, Python {sys.version.split()[0]}"
    )
    print(f"{compatibility.LAYOUT.title} ({tff.__version__}), {versions}")

    def aggregator(**changes: Any) -> Any:
        return mfa.mf_dp_aggregator(
            mfa.factorizations.banded(mfa.workloads.prefix_sum(4), 2),
            participation=mfa.participation.MinSeparation(2),
            noise_multiplier=1.0,
            clip_norm=1.0,
            clients_per_round=2,
            **changes,
        )

    def model_fn() -> Any:
        return tff.learning.models.from_keras_model(
            tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)]),
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
        )

    update = compatibility.TensorType(np.float32, [3])
    sgd = tff.learning.optimizers.build_sgdm(0.1)
    algorithms = tff.learning.algorithms
    built = {
        "aggregator": lambda: aggregator().create(update),
        "aggregator, secure sums": lambda: aggregator(secure_aggregation_bits=32).create(update),
        "aggregator, rows on disk": lambda: aggregator(noise_storage="disk").create(update),
        "zeroing around it": lambda: tff.aggregators.zeroing_factory(1.0, aggregator()).create(
            update
        ),
        "build_unweighted_fed_avg": lambda: algorithms.build_unweighted_fed_avg(
            model_fn, sgd, model_aggregator=aggregator()
        ),
        "build_unweighted_mime_lite": lambda: algorithms.build_unweighted_mime_lite(
            model_fn, sgd, model_aggregator=aggregator(), full_gradient_aggregator=aggregator()
        ),
    }
    for name, build in built.items():
        try:
            process = build()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        client_sums.check(process.next)
        print(f"{name}: built, {len(client_sums.of(process.next))} sums over clients")


def _noise() -> str:
    """A digest of what four rounds of the DPQuery release, and their first number."""
    import numpy as np
    import tensorflow as tf

    import mf_aggregators as mfa
    from mf_aggregators.tff.dp_query import FixedSeedWarning, MatrixFactorizationSumQuery

    warnings.simplefilter("ignore", FixedSeedWarning)
    # In closed form: the last bits of an optimum depend on the version of SciPy.
    factorization = mfa.factorizations.toeplitz(4)
    sensitivity = factorization.sensitivity(mfa.participation.MinSeparation(2)).value
    specs = [tf.TensorSpec([100], tf.float32), tf.TensorSpec([], tf.float64)]
    query = MatrixFactorizationSumQuery(
        factorization.noise_recursion().scaled_to_sensitivity_one(sensitivity),
        specs,
        l2_norm_clip=1.0,
        noise_stddev=1.0,
        seed=7,
    )
    state, digest, first = query.initial_global_state(), hashlib.sha256(), 0.0
    for number in range(4):
        sums = query.initial_sample_state(specs)
        for client in range(3):
            record = [tf.fill([100], 0.01 * (client + number)), tf.constant(0.5, tf.float64)]
            sums = query.accumulate_record(query.derive_sample_params(state), sums, record)
        result, state, _ = query.get_noised_result(sums, state)
        for each in result:
            digest.update(np.asarray(each).tobytes())
        first = first or float(result[0][0])
    return f"{digest.hexdigest()[:16]}, first number {first!r}"


if __name__ == "__main__":
    _prepare()
    _build()
    print(f"four rounds of noise: {_noise()}", flush=True)
