"""Offline commands: ``mf-factorize``, ``mf-plan``, ``mf-audit`` and ``mf-report``.

Its public modules are for commands of other packages, which have flags, help, output and exit
statuses of the same kind.
"""

__all__ = [
    "command_line",
    "mechanism_flags",
    "plan",
    "stated_runs",
]
