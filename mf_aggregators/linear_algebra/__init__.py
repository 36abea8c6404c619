"""Arithmetic of banded matrices, of Toeplitz matrices as power series, and of singular values."""

__all__ = ["power_series"]
