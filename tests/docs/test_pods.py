"""The lines of docs/pods.md run, as far as a machine without a scheduler can run them."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from jaxvlm.cli.main import run as cli
from jaxvlm.launch.targets import TARGETS
from jaxvlm.parallel.distributed.places import LAUNCHERS

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/pods.md").read_text()
LINES = re.findall(r"^jaxvlm launch .*$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[2])
def test_a_dry_run_of_each_target(line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    assert "--dry_run" in words
    assert cli(words) == 0, capsys.readouterr().err
    assert "planned: it fits" in capsys.readouterr().out


def test_all_targets_and_launchers_are_on_the_page():
    assert {line.split()[2] for line in LINES} == set(TARGETS)
    for launcher in LAUNCHERS:
        named = (launcher.name, launcher.num_processes)
        assert any(name in PAGE for name in named), launcher
