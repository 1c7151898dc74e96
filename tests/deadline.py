"""A time by which no further test is started: what is left out is said, and fails nothing.

Machines differ by a factor of three. On a slow one, checks that end with some long tests left out
are worth more than checks that are cut off.
"""

from __future__ import annotations

import os
import random
import time

import pytest

_NAME = "JAXVLM_TEST_DEADLINE"  # seconds of time.time(); tests' processes inherit it
_LEFT_OUT = "no time was left"


def set_in(minutes: float) -> None:
    """Let no test of this run and its processes start later than in so many minutes."""
    os.environ.setdefault(_NAME, str(time.time() + 60 * minutes))


def is_set() -> bool:
    """Whether tests may be left out."""
    return _NAME in os.environ


def shuffle(items: list[pytest.Item]) -> None:
    """Put files in an order that is another in each run, so that each is left out at times."""
    files = sorted({item.nodeid.partition("::")[0] for item in items})
    random.Random(os.environ[_NAME]).shuffle(files)  # the same in each process
    place = {file: i for i, file in enumerate(files)}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def keep() -> None:
    """Skip the test that is about to start if the deadline is over."""
    if time.time() > float(os.environ.get(_NAME, "inf")):
        # Not a failure: the run was told to end in time, and names the test at its end.
        pytest.skip(_LEFT_OUT)


def left_out(reports: list[pytest.TestReport]) -> list[str]:
    """The tests that :func:`keep` skipped."""
    return sorted(x.nodeid for x in reports if _LEFT_OUT in str(x.longrepr))
