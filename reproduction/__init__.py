"""The papers' tables and figures, recomputed beside what was printed."""
