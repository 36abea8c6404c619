"""Offline commands: ``mf-factorize``, ``mf-plan``, ``mf-audit`` and ``mf-report``.

Commands of other packages use the public modules of this package, so that their flags, help, output
and exit statuses are of the same kind.
"""

__all__ = [
    "command_line",
    "mechanism_flags",
    "plan",
    "stated_runs",
]
