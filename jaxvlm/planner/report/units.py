"""Formatting of bytes and seconds for people."""

from __future__ import annotations


def gib(size: float | int) -> str:
    """Bytes in GiB or MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def seconds(value: float | int | None) -> str:
    """Seconds or milliseconds; ``-`` if rates are unknown."""
    if not value:
        return "-"
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"
