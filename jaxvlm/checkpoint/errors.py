"""Errors of checkpoints; imports no JAX."""


class CheckpointError(RuntimeError):
    """A checkpoint can't be used; the message names it, the reason, and what to do."""
