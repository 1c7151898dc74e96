"""Compile-only devices."""

from __future__ import annotations

import sys

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.planner.compiled import topology


@pytest.mark.parametrize(
    ("name", "slices", "message"),
    [
        ("h200:12", 1, "up to 8 H200, or a multiple of 8"),
        ("h200:many", 1, "up to 8 H200, or a multiple of 8"),
        ("h200:8", 2, "only TPUs have slices"),
        ("v99x:2x2", 1, "v99x:2x2: unknown target, or its compiler is missing"),
    ],
)
def test_an_unknown_target_is_refused(name, slices, message):
    with pytest.raises(ConfigError, match=message):
        topology.devices(name, slices)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "count"),
    [("v6e:1x1", 1), ("v5e:1x2", 2), ("v5p:1x1x1", 1), ("v5p:1x2x2", 4), ("v6e:2x4", 8)],
)
def test_a_few_chips_are_a_host(name, count):
    assert len(topology.devices(name)) == count


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxvlm\[aot\]'"):
        topology.devices("v5e:2x2")
