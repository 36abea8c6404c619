"""Guarantees of runs, ledgers of participation, and privacy statements."""

__all__ = ["guarantees", "ledgers", "statement_file", "statements"]
