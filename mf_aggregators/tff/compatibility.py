"""The names of TensorFlow Federated and TensorFlow Privacy that move, under names that do not.

Two layouts are known. ``RELEASE_0_87`` is that of TensorFlow Federated (TFF) 0.87, the newest
release, with TensorFlow Privacy. ``MAIN`` is that of TFF's main branch of August 2026, from which
no release was made: what is not about TensorFlow is in the package ``federated_language``, and
the DPQueries of TensorFlow Privacy that TFF uses were copied into TFF. Names that both export
as ``tff.aggregators``, ``tff.learning``, ``tff.templates``, ``tff.tensorflow``, ``tff.backends``
and ``tff.simulation`` stay where they are, and are not here.

The aggregator's interface to TFF is TensorFlow Privacy's ``DPQuery`` in both. With
``RELEASE_0_87`` the class is ``tensorflow_privacy.SumAggregationDPQuery``, and TFF's
``DifferentiallyPrivateFactory`` insists on it. With ``MAIN`` it is the class of the same name in
``tensorflow_federated.python.aggregators.privacy.query``, which TFF does not export; the factory
there takes any object with its methods, and TensorFlow Privacy need not be installed.

``docs/installing.md`` says what was run with which layout.
"""

import dataclasses
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tensorflow_federated as tff

if TYPE_CHECKING:
    # Imported below by its name. Whoever lists what this package depends on finds it here.
    import tensorflow_privacy  # noqa: F401


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a version of TFF has the names that move.

    Attributes:
      title: What it is called in messages.
      language: The package of placements, types, and computations over clients and server. Below
        it are the modules ``framework`` and ``program``.
      structure: The module of functions of structures, such as ``name_list``.
      protos: The package of the protocol buffers of computations.
      tensor_specs: Where ``type_to_tf_tensor_specs`` is.
      queries: The module of the DPQueries.
    """

    title: str
    language: str
    structure: str
    protos: str
    tensor_specs: str
    queries: str

    def path_of(self, name: str) -> str:
        """Returns the full name of what this module calls ``name``.

        Args:
          name: One of ``NAMES``.
        """
        if name in _OF_FRAMEWORK:
            return f"{self.language}.framework.{name}"
        if name in _OF_PROGRAM:
            return f"{self.language}.program.{name}"
        if name in _OF_QUERIES:
            return f"{self.queries}.{name}"
        others = {
            "structure": self.structure,
            "computation_pb2": f"{self.protos}.computation_pb2",
            "type_to_tf_tensor_specs": f"{self.tensor_specs}.type_to_tf_tensor_specs",
        }
        return others.get(name, f"{self.language}.{name}")


# Where the names are in the newest package of the registry.
RELEASE_0_87 = Layout(
    title="TensorFlow Federated 0.87",
    language="tensorflow_federated",
    structure="tensorflow_federated.structure",
    protos="tensorflow_federated.proto.v0",
    tensor_specs="tensorflow_federated.types",
    queries="tensorflow_privacy",
)
# Where they are in the main branch, as ``docs/installing.md`` says.
MAIN = Layout(
    title="TensorFlow Federated's main branch of August 2026",
    language="federated_language",
    structure="federated_language.common_libs.structure",
    protos="federated_language.proto",
    tensor_specs="tensorflow_federated.tensorflow",
    queries="tensorflow_federated.python.aggregators.privacy.query",
)

_OF_FRAMEWORK = (
    "AsyncExecutionContext",
    "ConcreteComputation",
    "SyncContext",
    "get_context_stack",
    "set_default_context",
)
_OF_PROGRAM = ("FederatedDataSource", "FederatedDataSourceIterator", "ReleaseManager")
_OF_QUERIES = ("NormalizedQuery", "SumAggregationDPQuery")
_OF_LANGUAGE = (
    "CLIENTS",
    "SERVER",
    "FederatedType",
    "FunctionType",
    "StructType",
    "TensorType",
    "federated_aggregate",
    "federated_broadcast",
    "federated_computation",
    "federated_eval",
    "federated_map",
    "federated_secure_sum_bitwidth",
    "federated_sum",
    "federated_value",
    "federated_zip",
    "to_type",
)
_OTHERS = ("computation_pb2", "structure", "type_to_tf_tensor_specs")
# Every name that this module has from elsewhere.
NAMES = (*_OF_FRAMEWORK, *_OF_PROGRAM, *_OF_QUERIES, *_OF_LANGUAGE, *_OTHERS)


def layout_of(federated: ModuleType) -> Layout:
    """Returns the layout of an installed TFF.

    Args:
      federated: The package ``tensorflow_federated``.
    """
    return RELEASE_0_87 if hasattr(federated, "federated_computation") else MAIN


def find(layout: Layout, name: str) -> Any:
    """Returns what a layout has under a name.

    Args:
      layout: The layout.
      name: One of ``NAMES``.

    Raises:
      ImportError: If it is not there; the message says which versions are known.
    """
    path = layout.path_of(name)
    try:
        return _at(path)
    except (AttributeError, ImportError) as error:
        version = getattr(tff, "__version__", "of an unknown version")
        raise ImportError(
            f"TensorFlow Federated {version} was taken for {layout.title}, and {path} is not "
            f"there ({error}): mf_aggregators knows {RELEASE_0_87.title} and {MAIN.title}. Install "
            "one of them, as docs/installing.md says."
        ) from error


def proto_of(computation: Any) -> Any:
    """Returns the protocol buffer of a computation.

    Args:
      computation: What ``federated_computation`` and its like return.
    """
    if hasattr(computation, "to_proto"):
        return computation.to_proto()
    return ConcreteComputation.get_proto(computation)


def _at(path: str) -> Any:
    """The module, or what a module has, under a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        if not parent:
            raise
        return getattr(_at(parent), name)


# That of the version that is installed.
LAYOUT = layout_of(tff)

AsyncExecutionContext: Any = find(LAYOUT, "AsyncExecutionContext")
ConcreteComputation: Any = find(LAYOUT, "ConcreteComputation")
SyncContext: Any = find(LAYOUT, "SyncContext")
get_context_stack: Any = find(LAYOUT, "get_context_stack")
set_default_context: Any = find(LAYOUT, "set_default_context")

FederatedDataSource: Any = find(LAYOUT, "FederatedDataSource")
FederatedDataSourceIterator: Any = find(LAYOUT, "FederatedDataSourceIterator")
ReleaseManager: Any = find(LAYOUT, "ReleaseManager")

NormalizedQuery: Any = find(LAYOUT, "NormalizedQuery")
SumAggregationDPQuery: Any = find(LAYOUT, "SumAggregationDPQuery")

# The placement of all clients.
CLIENTS: Any = find(LAYOUT, "CLIENTS")
# The placement of the server.
SERVER: Any = find(LAYOUT, "SERVER")
FederatedType: Any = find(LAYOUT, "FederatedType")
FunctionType: Any = find(LAYOUT, "FunctionType")
StructType: Any = find(LAYOUT, "StructType")
TensorType: Any = find(LAYOUT, "TensorType")
federated_aggregate: Any = find(LAYOUT, "federated_aggregate")
federated_broadcast: Any = find(LAYOUT, "federated_broadcast")
federated_computation: Any = find(LAYOUT, "federated_computation")
federated_eval: Any = find(LAYOUT, "federated_eval")
federated_map: Any = find(LAYOUT, "federated_map")
federated_secure_sum_bitwidth: Any = find(LAYOUT, "federated_secure_sum_bitwidth")
federated_sum: Any = find(LAYOUT, "federated_sum")
federated_value: Any = find(LAYOUT, "federated_value")
federated_zip: Any = find(LAYOUT, "federated_zip")
to_type: Any = find(LAYOUT, "to_type")

computation_pb2: Any = find(LAYOUT, "computation_pb2")
structure: Any = find(LAYOUT, "structure")
type_to_tf_tensor_specs: Any = find(LAYOUT, "type_to_tf_tensor_specs")
