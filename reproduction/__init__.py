"""The papers' tables and figures, recomputed and compared with the printed numbers."""
