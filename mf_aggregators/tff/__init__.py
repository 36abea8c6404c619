"""The aggregator in TensorFlow Federated, and the noise as TensorFlow graphs."""

# Modules by name: most of them import TensorFlow, which not every user of the library has.
__all__ = [
    "averaging_with_metrics",
    "client_sums",
    "dp_query",
    "processes",
    "tensor_rows",
]
