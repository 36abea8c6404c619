"""Devices of a simulation: their availability, their timers and when they check in."""
