"""The planner's description of the machine that a run is on."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.train import chips


def machine_of(devices: Sequence[Any], dtype: str) -> Machine:
    """The planner's machine for a run's devices: their chip, and which of them fast links connect.

    Raises:
        ConfigError: the planner does not know their chip, or how they are connected.
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
            return _of_kind(name, devices, dtype)
    known = ", ".join(machine.names())
    raise ConfigError(f"{kind}: the planner does not know this chip; known: {known}")


def _of_kind(name: str, devices: Sequence[Any], dtype: str) -> Machine:
    """A machine of this kind, with the slices or hosts that the devices report."""
    is_tpu = devices[0].platform == "tpu"
    # JAX numbers GPU hosts as slices too; with one process per GPU, a process is not a host.
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
        raise ConfigError(
            f"{name}: hosts or slices of {sizes} devices; the planner needs groups of equal size"
        )
    if is_tpu:
        return machine.parse(f"{groups}x{name}:{size}" if groups > 1 else f"{name}:{size}", dtype)
    one = machine.parse(f"{name}:{size}", dtype)
    if one.slices > 1:
        raise ConfigError(
            f"{size} x {name} in one host; the planner knows hosts of {one.devices_per_host} "
            "devices"
        )
    if groups == 1:
        return one
    unknown = () if one.network else (f"{one.chip.name}: network",)
    return one._replace(
        devices=groups * size, hosts=groups * one.hosts, slices=groups,
        missing=one.missing + unknown,
    )  # fmt: skip


def _least(name: str) -> int:
    """Number of devices of the smallest machine of a kind."""
    for count in (1, 2, 4, 8):
        try:
            machine.parse(f"{name}:{count}")
        except ConfigError:
            continue
        return count
    return 1
