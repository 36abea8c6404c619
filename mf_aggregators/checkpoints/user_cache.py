"""The name of ``mf_aggregators.user_cache`` in versions up to 0.5.0."""

from mf_aggregators.user_cache import directory

__all__ = ["directory"]
