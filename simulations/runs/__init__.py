"""A training run: its directory, flags, plan, loop, ledger, statement and figures."""
