"""What a process's exit status says to whoever started it; imports no JAX."""

LOST = 75
"""Another process was lost: EX_TEMPFAIL, the same command resumes the run."""
ERRORS = (1, 2)
"""Errors that would come again: of the run, and of bad input."""
