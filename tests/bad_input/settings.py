"""Overrides of every setting, and files of a workdir."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import strategies as st

from jaxvlm.config import Config
from tests.bad_input import values

NUMBERS = [0, -1, 10**12, -(10**12), float("nan"), float("inf"), -float("inf"), 1e12, 0.5]


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
    """("override", JSON of a setting's name and its value)."""
    value = draw(st.one_of(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), values.VALUES))
    return "override", json.dumps([draw(st.sampled_from(names())), value]).encode()
