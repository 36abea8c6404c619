"""A federated training run: its configuration, directory, loop, records, statement and figures."""
