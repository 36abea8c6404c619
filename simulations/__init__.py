"""Simulations of private federated training: cohorts, participation timers, training loop."""
