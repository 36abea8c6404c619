"""The version of mf_aggregators, stated once."""

__version__ = "1.0.0"
