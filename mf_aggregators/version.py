"""The version of mf_aggregators, stated once."""

__version__ = "3.0.0.dev0"
