"""What can be stated of a run: its guarantee, who took part, and the statement in words."""

__all__ = [
    "amplification_conditions",
    "attackers",
    "client_names",
    "extensions",
    "guarantees",
    "ledgers",
    "printed_guarantees",
    "sampled_cohorts",
    "statement",
    "stopping_rules",
]
