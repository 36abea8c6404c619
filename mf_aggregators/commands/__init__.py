"""Offline commands: ``mf-factorize`` and ``mf-report``."""
