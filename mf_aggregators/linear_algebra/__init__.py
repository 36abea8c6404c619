"""Arithmetic of banded matrices, of Toeplitz matrices as power series, and of singular values."""

__all__ = ["banded_matrices", "power_series"]
