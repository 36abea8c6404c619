"""Names of TensorFlow Federated (TFF) 0.87 and TensorFlow Privacy that move in later versions.

TFF's main branch, from which no release was made, has placements, types and computations in the
package ``federated_language``, and its own copy of the DPQueries of TensorFlow Privacy. Whoever
ports this library finds all that moves here; no other module names it. What both export
(``tff.aggregators``, ``tff.learning``, ``tff.templates``, ``tff.tensorflow``, ``tff.backends``,
``tff.simulation``) stays where it is.
"""

from typing import Any

import tensorflow_federated as tff
import tensorflow_privacy as tfp

try:
    from tensorflow_federated.proto.v0 import computation_pb2 as computation_pb2

    AsyncExecutionContext: Any = tff.framework.AsyncExecutionContext
    ConcreteComputation: Any = tff.framework.ConcreteComputation
    SyncContext: Any = tff.framework.SyncContext
    get_context_stack: Any = tff.framework.get_context_stack
    set_default_context: Any = tff.framework.set_default_context

    FederatedDataSource: Any = tff.program.FederatedDataSource
    FederatedDataSourceIterator: Any = tff.program.FederatedDataSourceIterator
    ReleaseManager: Any = tff.program.ReleaseManager

    # TFF's DifferentiallyPrivateFactory insists on this base class.
    SumAggregationDPQuery: Any = tfp.SumAggregationDPQuery
    NormalizedQuery: Any = tfp.NormalizedQuery

    # The placements of all clients and of the server.
    CLIENTS: Any = tff.CLIENTS
    SERVER: Any = tff.SERVER
    FederatedType: Any = tff.FederatedType
    FunctionType: Any = tff.FunctionType
    StructType: Any = tff.StructType
    TensorType: Any = tff.TensorType
    to_type: Any = tff.to_type
    type_to_tf_tensor_specs: Any = tff.types.type_to_tf_tensor_specs
    structure: Any = tff.structure

    federated_aggregate: Any = tff.federated_aggregate
    federated_broadcast: Any = tff.federated_broadcast
    federated_computation: Any = tff.federated_computation
    federated_eval: Any = tff.federated_eval
    federated_map: Any = tff.federated_map
    federated_secure_sum_bitwidth: Any = tff.federated_secure_sum_bitwidth
    federated_sum: Any = tff.federated_sum
    federated_value: Any = tff.federated_value
    federated_zip: Any = tff.federated_zip
except (AttributeError, ImportError) as error:
    raise ImportError(
        "mf_aggregators needs TensorFlow Federated 0.87, and found "
        f"{getattr(tff, '__version__', 'another one')} ({error}): docs/installing.md says how to "
        "install it."
    ) from error
