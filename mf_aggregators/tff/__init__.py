"""The aggregator in TensorFlow Federated, and the noise as TensorFlow graphs."""
