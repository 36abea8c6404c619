"""Searches for Monte Carlo certificates of runs whose clients draw their rounds in secret.

``search`` proposes certificates, which the kernel tests (``kernel.certificate``), and caches them;
``certification`` has its options, ``columns`` extracts the columns of a strategy matrix, and
``curves`` bounds both divergences at many epsilons.
"""

__all__: list[str] = []
