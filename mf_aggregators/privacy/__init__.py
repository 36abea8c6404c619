"""Guarantees of runs, ledgers of participation, and privacy statements."""

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
