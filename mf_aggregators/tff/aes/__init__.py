"""Random bits by AES-128, made outside of TensorFlow by a thread of the aggregator's process."""

# The aggregator starts the thread and ends it: nothing here is for others.
__all__: list[str] = []
