"""What is trained: the interface of a task, its clients, learning rates and aggregation."""
