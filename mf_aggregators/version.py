"""The version of mf_aggregators, stated once."""

__version__ = "2.0.0"
