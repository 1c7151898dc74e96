"""Errors of checkpoints, and what is said of others; imports no JAX."""


class CheckpointError(RuntimeError):
    """A checkpoint can't be used; the message names it, the reason, and what to do."""


def error_line(error: BaseException, whole: bool = False) -> str:
    """An error's kind and the first line of its message, or all of it as one; 300 characters."""
    lines = str(error).strip().splitlines()
    text = " ".join(line.strip() for line in (lines if whole else lines[:1]))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
