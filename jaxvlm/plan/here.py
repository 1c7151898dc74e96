"""The planner's machine of devices that are there."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.plan import chips, machine
from jaxvlm.plan.machine import Machine


def machine_of(devices: Sequence[Any], dtype: str) -> Machine:
    """The planner's machine of a run's devices: their chip, and which of them fast links join.

    Raises:
        ConfigError: its chip, or how they are joined, is none that the planner knows.
    """
    kind, count = devices[0].device_kind, len(devices)
    if devices[0].platform == "cpu":
        return machine.parse(f"cpu:{count}", dtype)
    slow = count > 1 and re.search("pcie", kind, re.IGNORECASE)  # the same chip without its links
    chip = None if slow else chips.lookup(kind, dtype)
    for name in machine.names():
        if chip is None or name == "cpu":
            continue
        if machine.parse(f"{name}:{_least(name)}", dtype).chip.name == chip.name:
            return _joined(name, devices, dtype)
    raise ConfigError(f"{kind}: the planner does not know this chip")


def _joined(name: str, devices: Sequence[Any], dtype: str) -> Machine:
    """So many of a kind in the slices or hosts that the devices say they are in."""
    is_tpu = devices[0].platform == "tpu"
    # JAX numbers a GPU's host as a slice too, so that a process of each GPU is no host of its own.
    marks = ("slice_index",) if is_tpu else ("slice_index", "process_index")
    refused: list[ConfigError] = []
    for mark in marks:
        own = collections.Counter(getattr(d, mark, d.process_index) for d in devices)
        try:
            return _of_groups(name, list(own.values()), is_tpu, dtype)
        except ConfigError as error:
            refused.append(error)
    raise refused[-1]


def _of_groups(name: str, sizes: list[int], is_tpu: bool, dtype: str) -> Machine:
    groups, size = len(sizes), sizes[0]
    if len(set(sizes)) > 1:
        raise ConfigError(f"{name}: groups of {sizes} devices; the planner knows equal ones")
    if is_tpu:
        return machine.parse(f"{groups}x{name}:{size}" if groups > 1 else f"{name}:{size}", dtype)
    one = machine.parse(f"{name}:{size}", dtype)
    if one.slices > 1:
        raise ConfigError(f"{size} x {name} in one host; the planner knows hosts of {one.a_host}")
    if groups == 1:
        return one
    unknown = () if one.network else (f"{one.chip.name}: network",)
    return one._replace(
        devices=groups * size, hosts=groups * one.hosts, slices=groups,
        missing=one.missing + unknown,
    )  # fmt: skip


def _least(name: str) -> int:
    """Devices of the smallest machine of a kind."""
    for count in (1, 2, 4, 8):
        try:
            machine.parse(f"{name}:{count}")
        except ConfigError:
            continue
        return count
    return 1
