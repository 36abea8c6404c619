"""Comparisons of training runs: several mechanisms, each trained several times."""
