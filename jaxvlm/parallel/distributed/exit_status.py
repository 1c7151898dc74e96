"""What a process's exit status says to whoever started it; imports no JAX."""

LOST = 75
"""Another process was lost: EX_TEMPFAIL, the same command resumes the run."""
ERRORS = (1, 2)
"""Errors that would come again: of the run, and of bad input."""


def is_error(status: int) -> bool:
    """Whether a process ended in an error of its own; 128 and more, and negative, is by a signal.

    What renders jobs for other programs writes this rule in their words.
    """
    return 0 < status < 128 and status != LOST
