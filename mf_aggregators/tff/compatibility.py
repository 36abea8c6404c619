"""Names of TensorFlow Federated (TFF) 0.87 and TensorFlow Privacy that move in later versions.

TFF's main branch, from which no release was made, has placements, types and computations in the
package ``federated_language``, and its own copy of the DPQueries of TensorFlow Privacy. Whoever
ports this library finds all that moves here; no other module names it. What both export
(``tff.aggregators``, ``tff.learning``, ``tff.templates``, ``tff.tensorflow``, ``tff.backends``,
``tff.simulation``) stays where it is.
"""

import importlib
import operator
from types import ModuleType
from typing import Any

import tensorflow_federated as tff
import tensorflow_privacy as tfp


def _named(path: str, package: ModuleType = tff) -> Any:
    """Returns what a package has under a dotted name.

    Raises:
      ImportError: If it is not there.
    """
    try:
        return operator.attrgetter(path)(package)
    except AttributeError as error:
        raise ImportError(
            f"mf_aggregators needs TensorFlow Federated 0.87, and {path} is not in what is "
            f"installed, {getattr(tff, '__version__', 'another version')} ({error}): "
            "docs/installing.md says how to install it."
        ) from error


computation_pb2: Any = importlib.import_module("tensorflow_federated.proto.v0.computation_pb2")

AsyncExecutionContext: Any = _named("framework.AsyncExecutionContext")
ConcreteComputation: Any = _named("framework.ConcreteComputation")
SyncContext: Any = _named("framework.SyncContext")
get_context_stack: Any = _named("framework.get_context_stack")
set_default_context: Any = _named("framework.set_default_context")

# TFF's DifferentiallyPrivateFactory insists on this base class.
SumAggregationDPQuery: Any = _named("SumAggregationDPQuery", tfp)
NormalizedQuery: Any = _named("NormalizedQuery", tfp)

# The placement of all clients.
CLIENTS: Any = _named("CLIENTS")
# The placement of the server.
SERVER: Any = _named("SERVER")
FederatedType: Any = _named("FederatedType")
FunctionType: Any = _named("FunctionType")
SequenceType: Any = _named("SequenceType")
StructType: Any = _named("StructType")
TensorType: Any = _named("TensorType")
to_type: Any = _named("to_type")
type_to_tf_tensor_specs: Any = _named("types.type_to_tf_tensor_specs")
tensorflow_to_type: Any = _named("types.tensorflow_to_type")
structure: Any = _named("structure")

federated_aggregate: Any = _named("federated_aggregate")
federated_broadcast: Any = _named("federated_broadcast")
federated_computation: Any = _named("federated_computation")
federated_eval: Any = _named("federated_eval")
federated_map: Any = _named("federated_map")
federated_secure_sum_bitwidth: Any = _named("federated_secure_sum_bitwidth")
federated_sum: Any = _named("federated_sum")
federated_value: Any = _named("federated_value")
federated_zip: Any = _named("federated_zip")

# Local training, with what each client measures: no public name of TFF has both.
build_model_delta_update_with_tff_optimizer: Any = _named(
    "build_model_delta_update_with_tff_optimizer",
    importlib.import_module(
        "tensorflow_federated.python.learning.templates.model_delta_client_work"
    ),
)
