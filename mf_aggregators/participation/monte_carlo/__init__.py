"""Monte Carlo certificates of the privacy of runs whose clients draw for themselves.

``distributions`` has the pair of distributions that dominates a run, ``importance_sampling`` draws
outputs where its privacy losses are large, ``certificates`` tests an epsilon, ``search`` finds one
that passes and keeps it.
"""

__all__: list[str] = []
