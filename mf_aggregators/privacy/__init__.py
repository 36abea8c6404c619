"""What can be stated of a run: its guarantee, who took part, and the statement in words."""

__all__ = [
    "attackers",
    "client_names",
    "guarantees",
    "ledgers",
    "other_runs",
    "round_times",
    "statement_file",
    "statements",
    "stopping_rules",
    "units",
]
