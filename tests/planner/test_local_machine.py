"""The machine that JAX's devices are of: slices, hosts, islands of fast links."""

from __future__ import annotations

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.hardware.local_machine import machine_of


class _Chip:
    """What a device says of itself."""

    def __init__(self, kind, host=0, piece=None, platform="gpu"):
        self.device_kind, self.process_index, self.platform = kind, host, platform
        if piece is not None:
            self.slice_index = piece


def _chips(kind, groups, size, **more):
    return [_Chip(kind, host=g, piece=g, **more) for g in range(groups) for _ in range(size)]


def test_slices_and_hosts_are_the_devices_own():
    pods = machine_of(_chips("TPU v5 lite", 2, 16, platform="tpu"), "bfloat16")
    assert (pods.slices, pods.devices, pods.topology) == (2, 32, "4x4")
    h100 = "NVIDIA H100 80GB HBM3"
    halves = machine_of(_chips(h100, 2, 4), "bfloat16")
    assert (halves.devices, halves.devices_per_host, halves.hosts, halves.slices) == (8, 4, 2, 2)
    assert not halves.missing and halves.island == 4
    whole = machine_of(_chips(h100, 2, 8), "bfloat16")
    assert whole == machine.parse("h100:16")
    a_process_each = [_Chip(h100, host=i, piece=0) for i in range(8)]
    assert machine_of(a_process_each, "bfloat16") == machine.parse("h100:8")
    cards = machine_of(_chips("NVIDIA GeForce RTX 4090", 2, 4), "bfloat16")
    assert cards.missing == ("RTX 4090: network",)


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ([_Chip("NVIDIA A100-PCIE-40GB")] * 8, "does not know this chip"),
        (_chips("NVIDIA H100 80GB HBM3", 1, 16), "knows hosts of 8"),
        (_chips("NVIDIA H100 80GB HBM3", 1, 4) + [_Chip("NVIDIA H100 80GB HBM3", 1, 1)], "equal"),
        ([_Chip("TPU v9", platform="tpu")], "TPU v9: the planner does not know"),
    ],
)
def test_devices_that_are_joined_otherwise_are_refused(devices, says):
    with pytest.raises(ConfigError, match=says):
        machine_of(devices, "bfloat16")
