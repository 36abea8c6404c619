"""The version of mf_aggregators, stated once."""

__version__ = "0.1.0"
