"""Several runs, side by side."""
