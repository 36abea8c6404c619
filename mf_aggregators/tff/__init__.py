"""The aggregator in TensorFlow Federated, and the noise as TensorFlow graphs."""

# The names of modules; they are not imported here, because most of them import TensorFlow, which
# some users of the library do not have.
__all__ = [
    "averaging_with_metrics",
    "client_sums",
    "dp_query",
    "processes",
    "tensor_rows",
]
