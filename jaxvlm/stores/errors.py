"""Errors of stores, and what is said of others; imports no JAX."""


class StoreError(RuntimeError):
    """An object store refused, or did not answer in time; nothing that it holds was changed.

    Args:
        message: says what, where, and what to do.
        passes: whether the same request may succeed later.
    """

    def __init__(self, message: str, passes: bool = False):
        super().__init__(message)
        self.passes = passes


class OtherBytes(Exception):
    """What came is not what the store lists."""


def error_line(error: BaseException, whole: bool = False) -> str:
    """An error's kind and the first line of its message, or all of it as one; 300 characters."""
    lines = str(error).strip().splitlines()
    text = " ".join(line.strip() for line in (lines if whole else lines[:1]))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
