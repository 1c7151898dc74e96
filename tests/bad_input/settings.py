"""Overrides of every setting."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from typing import Any

from hypothesis import strategies as st

from jaxvlm.config import Config
from tests.bad_input import values

COMMANDS = ("train conversations", "train conversations", "train pairs", "plan conversations")
WHOLE = [0, -1, 1, 3, 7, 10**6, 10**12, -(10**12), 2**63, 10**40]
NUMBERS = [0.0, -1.0, 0.5, 1e12, 1e308, float("nan"), float("inf"), -float("inf"), 1e-320]
WORDS = ["", "x", "auto", "none", "gone.py:X", "../..", "/dev/zero", "\ud800", "\x00", "x" * 5_000]
SEVERAL = ["()", "(0,)", "(-1,)", "('x',)", "('',)", "(1, 2, 3)", "(1e400,)", "'x'", "(None,)", "("]
"""Values of the right type; :data:`values.VALUES` are mostly of another."""


def names(group: Any = Config, at: str = "") -> list[str]:
    """Dotted names of all settings."""
    config = Config() if group is Config else group
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found += names(value, f"{at}{field.name}.")
        else:
            found.append(f"{at}{field.name}")
    return found


@st.composite
def overrides(draw: st.DrawFn) -> tuple[str, bytes]:
    """("override", JSON of a setting's name, its value, and the command that takes it)."""
    # One number for most of it: what is drawn part by part is drawn again with one part changed.
    chance = random.Random(draw(st.integers(0, 2**63)))
    name, command = chance.choice(names()), chance.choice(COMMANDS)
    default = functools.reduce(getattr, name.split("."), Config())
    known: dict[type, list[Any]] = {int: WHOLE, float: NUMBERS, str: WORDS, tuple: SEVERAL}
    right = known.get(type(default), ["True", "False"])
    value = chance.choice(right) if chance.random() < 0.8 else draw(values.VALUES)
    return "override", json.dumps([name, value, command]).encode()
