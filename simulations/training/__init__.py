"""Parts of federated training: a task's interface, clients' data, learning rates, aggregation."""
