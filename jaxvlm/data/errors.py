"""What data can do wrong: errors that name what, where and what to do, in one line."""

from __future__ import annotations

from typing import NamedTuple


class DataError(ValueError):
    """Data that a run can't use; the message says what, where and what to do."""


class ImageError(ValueError):
    """A picture that can't be decoded; the message is the reason."""


class Problem(NamedTuple):
    """A record that is refused or skipped."""

    id: str
    """The record's id, or ``file:line`` where it has none."""
    reason: str
    """Why, in a few words that are the same for like records."""
    detail: str = ""
    """What is particular to this one (a path, a count)."""

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


def enforce(
    problems: list[Problem], total: int, on_bad: str, max_skip_share: float, what: str
) -> None:
    """Stop the run where skipping isn't allowed, or where too much would be skipped.

    Args:
        problems: records that can't be used.
        total: records in all, good and bad.
        on_bad: ``refuse`` | ``skip``.
        max_skip_share: share of ``total`` that may be skipped.
        what: the data's name, for the message.

    Raises:
        DataError: one line with the count, the share and the first reasons.
    """
    if not problems:
        return
    first = "; ".join(str(p) for p in problems[:3]) + ("; ..." if len(problems) > 3 else "")
    if on_bad == "refuse":
        raise DataError(
            f"{what}: {len(problems)} of {total} records can't be used: {first}. Mend them, or"
            " set data.on_bad=skip (data.on_long=skip for long ones)"
        )
    share = len(problems) / max(total, 1)
    if share > max_skip_share:
        raise DataError(
            f"{what}: {len(problems)} of {total} records ({share:.1%}) can't be used, over"
            f" data.max_skip_share={max_skip_share:.1%}: {first}. `jaxvlm data check` lists them"
        )
