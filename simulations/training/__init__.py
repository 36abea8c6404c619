"""The parts of training: the interface of a task, its clients, learning rates and aggregation."""
