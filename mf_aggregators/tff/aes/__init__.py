"""Random bits by AES-128, made outside of TensorFlow by a thread of the aggregator's process."""
