"""Who takes part in a round: cohorts of devices, and batches that a data centre draws."""
