"""Searches for Monte Carlo certificates of runs whose clients draw their rounds in secret.

``search`` proposes certificates, which the kernel tests (``kernel.certificate``), and caches them;
``certification`` has its options, and ``columns`` extracts the columns of a strategy matrix.
"""

__all__: list[str] = []
