"""The version of mf_aggregators, stated once."""

__version__ = "0.6.0"
