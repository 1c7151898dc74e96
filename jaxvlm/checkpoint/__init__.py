"""Checkpoints of a train state, and the run's record ``config.json``."""
