"""What can be stated of a run: its guarantee, who took part, and the statement in words."""

__all__ = [
    "attackers",
    "client_names",
    "guarantees",
    "ledgers",
    "provenance",
    "round_times",
    "statement",
    "stopping_rules",
]
