"""Errors about data: each message is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxvlm.config import DataConfig

_log = logging.getLogger("jaxvlm.data")
MIXTURE = "config.data.mixture"
"""Setting that names a run's sources; messages call a source by it."""


class DataError(ValueError):
    """Data that a run can't use; the message says what is wrong, where, and what to do."""


class NothingUsable(DataError):
    """Data of which no record can be used.

    Args:
        message: see :class:`DataError`.
        problems: the problem of each record.
    """

    def __init__(self, message: str, problems: list[Problem]):
        super().__init__(message)
        self.problems = problems


class TooFewRecords(DataError):
    """Data that do not fill one batch.

    Args:
        found: how many there are, and the batch size that they are fewer than.
        most: the largest batch size that they fill; at least 1.
        advice: what to do.
    """

    def __init__(self, found: str, most: int, advice: str):
        super().__init__(f"{found}; {advice}")
        self.found, self.most, self.advice = found, most, advice


class ImageError(ValueError):
    """An image that can't be decoded; the message is the reason."""


_MOVES = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A line for messages: what would move a terminal's cursor, or turn its text, is escaped."""
    return _MOVES.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Problem(NamedTuple):
    """A record that is refused or skipped."""

    id: str
    """The record's id, or ``file:line`` where it has none."""
    reason: str
    """Short reason; the same words for all records with the same fault."""
    detail: str = ""
    """Specifics of this record (a path, a count)."""

    def __str__(self) -> str:
        return printable(f"{self.id}: {self.reason}" + f" ({self.detail})" * bool(self.detail))


def enforce(
    problems: list[Problem],
    total: int,
    on_bad_record: str,
    max_skip_fraction: float,
    what: str,
    check: str = "",
) -> None:
    """Stop the run if skipping is not allowed, or if too many records would be skipped.

    Args:
        problems: records that can't be used.
        total: number of all records, good and bad.
        on_bad_record: ``refuse`` | ``skip``.
        max_skip_fraction: fraction of ``total`` that may be skipped, 0..1.
        what: name of the data, for the message.
        check: command that lists the problems; by default that of a file ``what``.

    Raises:
        DataError: one line with the count, the share and the first reasons.
    """
    if not problems:
        return
    first = "; ".join(str(p) for p in problems[:3]) + ("; ..." if len(problems) > 3 else "")
    if on_bad_record == "refuse":
        raise DataError(
            f"{what}: {len(problems)} of {total} records can't be used: {first}. Fix them, or"
            " set data.on_bad_record=skip (data.on_too_long=skip for long ones)"
        )
    share = len(problems) / max(total, 1)
    if share > max_skip_fraction:
        raise DataError(
            f"{what}: {len(problems)} of {total} records ({share:.1%}) can't be used, over"
            f" data.max_skip_fraction={max_skip_fraction:.1%}: {first}."
            f" `{check or f'jaxvlm data check {what} --config=RECIPE'}` lists them"
        )


class Part(NamedTuple):
    """Data whose skipped records are counted by themselves: a file's, or those of a source."""

    what: str
    """Its name in messages."""
    total: int
    """Number of all records, good and bad."""
    problems: list[Problem]
    """Records that are skipped from the start."""
    check: str = ""
    """Command that lists them; see :func:`enforce`."""


def numbers(config: DataConfig) -> Callable[[str], int]:
    """A function of a record's id: the index of its source, 0 where the data are no mixture."""
    of = {name: i for i, name in enumerate(config.mixture)}
    return lambda identifier: of[identifier.partition("/")[0]] if of else 0


def enforce_limits(
    name: str,
    config: DataConfig,
    records: int,
    unread: Sequence[Problem],
    bad: Sequence[Problem],
    too_long: Sequence[Problem],
) -> Part:
    """Stop the run if too many records of the data, or of one source of a mixture, are skipped.

    Args:
        name: of the data, for messages.
        config: data settings.
        records: number of records that were read.
        unread: items that are no record.
        bad: records that ``data.on_bad_record`` is about.
        too_long: records that ``data.on_too_long`` is about.

    Returns:
        The data, with all problems.

    Raises:
        DataError: one line with the count, the share and the first reasons.
    """
    file = "" if name.startswith(MIXTURE) else f"{name} "
    check, refused = f"jaxvlm data check {file}--config=RECIPE", [*unread, *bad]
    total, limit = records + len(unread), config.max_skip_fraction
    enforce(refused, total, config.on_bad_record, limit, name, check)
    enforce(list(too_long), total, config.on_too_long, 1.0, name, check)
    enforce([*refused, *too_long], total, "skip", limit, name, check)
    return Part(name, total, [*refused, *too_long], check)


class SkippedRecords:
    """Records that a run skips because an image failed, each counted once; for several threads.

    Args:
        parts: the data's parts.
        config: settings of how many records may be skipped.
        part_of: record's id -> index of its part.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        config: DataConfig,
        part_of: Callable[[str], int] = lambda identifier: 0,
    ):
        self._parts, self._config, self._part_of = parts, config, part_of
        self._by_record: dict[int, Problem] = {}
        self._lock = threading.Lock()

    def __contains__(self, record: int) -> bool:
        return record in self._by_record

    def problems(self) -> list[Problem]:
        """List the records skipped so far, on this process."""
        with self._lock:
            return list(self._by_record.values())

    def add(self, failed: Mapping[int, Problem]) -> None:
        """Add records (index -> problem); raises DataError if too many of a part are skipped."""
        with self._lock:
            for record, problem in failed.items():
                if self._by_record.setdefault(record, problem) is problem:
                    what = self._parts[self._part_of(problem.id)].what
                    _log.warning("%s: skipped: %s", what, problem)
        config, skipped = self._config, self.problems()
        for i in {self._part_of(problem.id) for problem in failed.values()}:
            part = self._parts[i]
            own = [x for x in skipped if self._part_of(x.id) == i]
            enforce(own, part.total, config.on_bad_record, 1.0, part.what, part.check)
            known = [*part.problems, *own]
            limit = config.max_skip_fraction
            enforce(known, part.total, "skip", limit, part.what, part.check)
