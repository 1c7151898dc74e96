"""Which tests share a process: a plugin of pytest.

A file's tests share fixtures and compiled programs. pytest-xdist's ``--dist loadgroup`` no longer
keeps them together: it writes a test's group into its id, which pytest 9.2 does not read
(https://github.com/pytest-dev/pytest-xdist/issues/1386), and nothing says so.
"""

from __future__ import annotations

from typing import Any

import deadline
from xdist.scheduler import LoadScopeScheduling

SPLIT = {"tests/parallel/test_strategies.py"}
"""Files of minutes whose tests share what their first parameter chooses, and nothing else."""


def group(nodeid: str) -> str:
    """Name the tests that run in one process with the test of this id."""
    file, _, test = nodeid.partition("::")
    _, _, parameters = test.partition("[")
    return f"{file}[{parameters.split('-')[0]}" if file in SPLIT and parameters else file


class Groups(LoadScopeScheduling):
    """Gives each process whole groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: Any, log: Any) -> Groups | None:
    """Take the place of ``--dist loadscope``, the default in setup.cfg."""
    if deadline.is_set():  # the order of the collected tests, which is another in each run
        config.option.loadscopereorder = False
    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None
