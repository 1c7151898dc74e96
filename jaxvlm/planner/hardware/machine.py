"""Machines to plan for: chips of a kind, their interconnect, and which sizes can be rented."""

from __future__ import annotations

import difflib
import importlib.metadata
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware import calibrate
from jaxvlm.planner.hardware.calibrate import Rates
from jaxvlm.train import chips
from jaxvlm.train.chips import Chip


class AchievedShares(NamedTuple):
    """Fractions of the makers' peak figures that a train step reaches, 0..1."""

    matmul: float
    scores: float
    """Attention's matmuls."""
    hbm: float
    links: float
    network: float
    source: str
    """Where the fractions are from."""


class Machine(NamedTuple):
    """Devices of one kind and their interconnect."""

    name: str
    """The kind as written in ``--devices``: ``h200``, ``v5p``, ``cpu``."""
    platform: str
    """cpu | gpu | tpu."""
    devices: int
    """Number of JAX devices."""
    devices_per_host: int
    """Devices per host."""
    hosts: int
    chip: Chip
    """Chip of a device; unknown rates are 0."""
    links: float
    """Bytes/s that leave a device over fast links; 0: unknown, or there are none."""
    network: float
    """Bytes/s per device between hosts (GPU) or slices (TPU); 0: unknown, or there is none."""
    topology: str
    """Torus of a TPU slice, ``2x2x4``; "" for all other machines."""
    slices: int
    """Groups of devices whose fast links do not leave the group."""
    shares: AchievedShares
    missing: tuple[str, ...] = ()
    """Names of figures that are unknown."""
    rates: Rates | None = None
    """Rates measured on such a device; ``chip`` and ``shares`` summarize them."""
    dtype: str = "bfloat16"
    """Dtype of the matmuls."""

    @property
    def island(self) -> int:
        """Devices that fast links connect."""
        return self.devices // self.slices


class _Kind(NamedTuple):
    platform: str
    device_kind: str  # as JAX spells it, for chips.lookup
    devices_per_host: int
    network: float  # GB/s that leave a device between hosts or slices
    island: int = 0  # devices that fast links connect; 0: a host's (GPU), a slice's (TPU)
    chip_devices: int = 1  # JAX devices per chip
    scores: float = 0.0  # share that attention's matmuls reach; 0: the platform's


# Share of peak rates that attention kernels reach, by generation; training runs cuDNN's.
# arXiv 2307.08691, abstract: FlashAttention-2 gets 50 to 73 % of an A100's. cuDNN's kernels there
# use the same algorithm. There is no figure for workstation cards; their matrix instructions are
# of Ampere's kind, not Hopper's.
_AMPERE = 0.6
# arXiv 2407.08608, figures 5 and 6: cuDNN on H100, heads of 128, 4k to 16k tokens: 518 to 539
# TFLOP/s forward and causal, 499 to 518 backward, of 989.
_HOPPER = 0.52
# together.ai/blog/flashattention-4: on B200 1,605 TFLOP/s, up to 1.3 times cuDNN 9.13, of 2,250
_BLACKWELL = 0.55


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
_SHAPES = {
    # cloud.google.com/tpu/docs/v5e, v6e: "2D slice shapes that are supported"
    "v5e": _FLAT,
    "v6e": _FLAT,
    # cloud.google.com/tpu/docs/v5p: "most common single-slice shapes", 6,144 chips at most
    "v5p": (*_SMALL, "8x16x16", "16x16x16", "16x16x24"),
    # cloud.google.com/tpu/docs/types-topologies: AxBxC, A<=B<=C, each at most 4 or a multiple of
    # 4; cloud.google.com/tpu/docs/v4: 4,096 chips per pod. Only shapes near to cubes are listed.
    "v4": (
        *_SMALL, "4x4x12", "4x4x16", "4x8x12", "4x12x16", "8x8x12", "8x12x16", "8x16x16",
        "12x16x16", "16x16x16",
    ),
    # cloud.google.com/tpu/docs/tpu7x: no list is published; v5p's, and a pod of 9,216
    "7x": (*_SMALL, "8x16x16", "16x16x16", "16x16x24", "16x24x24"),
}  # fmt: skip

_KINDS = {
    # Chips per host: cloud.google.com/tpu/docs, one page per kind. Network: the same pages, data
    # center network per chip: v5e 6.4 Tbit/s per pod of 256, v5p 50 Gbit/s, v6e 25.6 Tbit/s per
    # pod of 256, 7x 100 Gbit/s. There is no figure for v4.
    "v4": _Kind("tpu", "TPU v4", 4, 0),
    "v5e": _Kind("tpu", "TPU v5 lite", 8, 3.125),
    "v5p": _Kind("tpu", "TPU v5p", 4, 6.25),
    "v6e": _Kind("tpu", "TPU v6 lite", 8, 12.5),
    "7x": _Kind("tpu", "TPU7x", 4, 12.5, chip_devices=2),
    # NVIDIA DGX A100 datasheets: 8 GPUs, 8 x 200 Gbit/s InfiniBand for compute
    "a100-40gb": _Kind("gpu", "NVIDIA A100-SXM4-40GB", 8, 25, scores=_AMPERE),
    "a100": _Kind("gpu", "NVIDIA A100-SXM4-80GB", 8, 25, scores=_AMPERE),
    # PCIe cards: the network between hosts is the builder's choice
    "a100-pcie-40gb": _Kind("gpu", "NVIDIA A100-PCIE-40GB", 8, 0, scores=_AMPERE),
    # NVIDIA DGX H100, H200 and B200 datasheets: 8 GPUs, 8 x 400 Gbit/s; the same as AWS p5 and
    # p6-b200 (3,200 Gbit/s EFA per instance) and torchtitan's cluster (400 Gbit/s per GPU)
    "h100": _Kind("gpu", "NVIDIA H100 80GB HBM3", 8, 50, scores=_HOPPER),
    "h200": _Kind("gpu", "NVIDIA H200", 8, 50, scores=_HOPPER),
    "b200": _Kind("gpu", "NVIDIA B200", 8, 50, scores=_BLACKWELL),
    # GB200 NVL72: 72 GPUs in one NVLink domain, 4 per tray; AWS p6e-gb200: 28.8 Tbit/s for 72
    "gb200": _Kind("gpu", "NVIDIA GB200", 4, 50, island=72, scores=_BLACKWELL),
    # Workstation cards: the network between hosts is the builder's choice
    "rtx4090": _Kind("gpu", "NVIDIA GeForce RTX 4090", 8, 0, scores=_AMPERE),
    "rtx6000ada": _Kind("gpu", "NVIDIA RTX 6000 Ada Generation", 8, 0, scores=_AMPERE),
    "rtxpro6000": _Kind(
        "gpu", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 8, 0, scores=_AMPERE
    ),
}
_ALSO = {"a100-80gb": "a100", "tpu7x": "7x", "v7x": "7x", "rtx-4090": "rtx4090"}
_SHARES = {
    # matmul: fitted to MaxText's row for one host of H100, and to the median of every second of its
    # TPU rows ("fitted" in benchmarks/published_measurements.json); MaxText compiles with XLA, as
    # we do. The held-out rows, and those of other programs, are in
    # benchmarks/results/planner_published.json. scores: for GPUs by generation, above; there is no
    # figure for TPUs. hbm, links and network: assumed, no source.
    "gpu": AchievedShares(
        0.597, _AMPERE, 0.8, 0.8, 0.8, "published runs of XLA; memory and links are guesses"
    ),
    "tpu": AchievedShares(
        0.868, 0.868, 0.8, 0.8, 0.8, "published runs of XLA; memory and links are guesses"
    ),
}


MOST = 2**16
"""Largest number of devices that can be planned for."""


def names() -> tuple[str, ...]:
    """Kinds of machines that :func:`parse` knows."""
    return (*_KINDS, "cpu")


def parse(text: str, dtype: str = "bfloat16", rates: Rates | None = None) -> Machine:
    """Parse ``h200:8``, ``v5p:2x2x4``, ``v5e:16``, ``2xv5e:16x16`` (slices) or ``cpu:8``.

    Args:
        text: a kind, and the number of JAX devices or the torus; a number of TPU slices in front.
        dtype: of matmuls, bfloat16 or float32.
        rates: rates measured on such a device; ``None``: the saved ones, if there are any.

    Raises:
        ConfigError: an unknown kind, no devices, or a shape that can't be rented.
    """
    match = re.fullmatch(r"(?:(\d+)x(?=[a-z]|7x))?([a-z0-9-]+?)(?::(\d+(?:x\d+)*))?", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is no machine; use h200:8, v5p:2x2x4, 2xv5e:16x16 or cpu:8")
    slices, kind, size = int(match[1] or 1), match[2], match[3] or "1"
    if (count := slices * math.prod(map(int, size.split("x")))) > MOST:
        raise ConfigError(f"{text}: {count:,} devices; a plan takes at most {MOST:,}")
    kind = _ALSO.get(kind, kind)
    if kind == "cpu":
        return _cpu(text, size, slices, dtype, rates)
    if kind not in _KINDS:
        near = difflib.get_close_matches(kind, (*names(), *_ALSO), n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"{text}: unknown chip {kind!r}; {hint}known: {', '.join(names())}")
    row = _KINDS[kind]
    chip = chips.lookup(row.device_kind, dtype)
    assert chip is not None
    make = _slice if row.platform == "tpu" else _nodes
    devices, devices_per_host, topology = make(text, kind, size, slices)
    links = chips.links(chip.name) * _sides(topology)
    own = row.island or devices_per_host
    groups = slices if row.platform == "tpu" else max(1, -(-devices // own))
    unknown = {
        "fast links": not links and devices > groups,
        "network": not row.network and groups > 1,
    }
    shares = _SHARES[row.platform]
    shares = shares._replace(scores=row.scores or shares.scores)
    machine = Machine(
        kind, row.platform, devices, devices_per_host, -(-devices // devices_per_host), chip, links,
        row.network * 1e9 / row.chip_devices, topology, groups, shares,
        tuple(f"{chip.name}: {name}" for name, is_so in unknown.items() if is_so), dtype=dtype,
    )  # fmt: skip
    return _calibrated(machine, rates or _saved_rates(lambda name: _is_chip(name, chip, dtype)))


def _sides(topology: str) -> float:
    """Share of a chip's links that rings can use.

    A side of one chip has no link; along a side without a wrap-around link, a ring goes there and
    back.

    Source:
        cloud.google.com/tpu/docs and jax-ml.github.io/scaling-book/tpus: two dims wrap around where
        a side is a pod's 16, three where the slice is made of cubes of 4x4x4.
    """
    if not topology:
        return 1.0
    sides = [int(n) for n in topology.split("x")]
    if len(sides) == 3:
        wraps = [not any(n % 4 for n in sides)] * 3
    else:
        wraps = [n == 16 for n in sides]
    shares = [1.0 if has_wrap else 0.5 if n > 1 else 0.0 for n, has_wrap in zip(sides, wraps)]
    return sum(shares) / len(shares)


def _is_chip(kind: str, chip: Chip, dtype: str) -> bool:
    other = chips.lookup(kind, dtype)
    return other is not None and other.name == chip.name


def _saved_rates(kinds: Callable[[str], bool]) -> Rates | None:
    return calibrate.load(kinds, importlib.metadata.version("jax"))


def _calibrated(machine: Machine, rates: Rates | None) -> Machine:
    """The machine with measured rates instead of assumed ones."""
    if rates is None or machine.dtype not in rates.matmul:
        return machine
    chip = machine.chip
    matmul, scores = (
        max(rate for by_size in table[machine.dtype].values() for rate in by_size.values())
        for table in (rates.matmul, rates.scores)
    )
    memory = rates.moved(2**40)
    if not chip.peak_flops:
        chip = chip._replace(peak_flops=matmul, hbm_bandwidth=memory)
    shares = machine.shares._replace(
        matmul=min(1.0, matmul / chip.peak_flops), scores=min(1.0, scores / chip.peak_flops),
        hbm=min(1.0, memory / chip.hbm_bandwidth),
        source=f"measured with JAX {rates.jax}",
    )  # fmt: skip
    links, missing = machine.links, machine.missing
    if rates.links and machine.platform == "cpu":
        links = rates.links
    elif rates.links:
        shares = shares._replace(links=min(1.0, rates.links / machine.links) if links else 1.0)
    return machine._replace(chip=chip, shares=shares, links=links, missing=missing, rates=rates)


def _nodes(text: str, kind: str, size: str, slices: int) -> tuple[int, int, str]:
    """(devices, devices per host, "") of GPUs: part of one host, or several full hosts."""
    if slices != 1 or "x" in size:
        raise ConfigError(f"{text}: GPUs are given by their number, as in {kind}:8")
    count = int(size)
    _check_count(text, count)
    devices_per_host = _KINDS[kind].devices_per_host
    if count > devices_per_host and count % devices_per_host:
        low = count // devices_per_host * devices_per_host
        raise ConfigError(
            f"{text}: a host has {devices_per_host} GPUs, so more than {devices_per_host} must "
            f"be a multiple of {devices_per_host}; nearest: {low} or {low + devices_per_host}"
        )
    island = _KINDS[kind].island
    if island and count > island and count % island:
        low = count // island * island
        raise ConfigError(
            f"{text}: an NVLink domain has {island} GPUs, so more than {island} must be a multiple "
            f"of {island}; nearest: {low} or {low + island}"
        )
    if count < devices_per_host and devices_per_host % count:
        fits = [n for n in (1, 2, 4, 8) if n <= devices_per_host]
        near = sorted(fits, key=lambda n: abs(n - count))[:2]
        raise ConfigError(
            f"{text}: of a host's {devices_per_host} GPUs one rents {', '.join(map(str, fits))}; "
            "nearest: " + " or ".join(map(str, sorted(near)))
        )
    return count, min(devices_per_host, count), ""


def _slice(text: str, kind: str, size: str, slices: int) -> tuple[int, int, str]:
    """(devices, devices per host, torus) of TPU slices that can be rented."""
    if slices < 1:
        raise ConfigError(f"{text}: zero slices; ask for at least 1")
    row, sides = _KINDS[kind], [int(n) for n in size.split("x")]
    chips_wanted = math.prod(sides)
    _check_count(text, chips_wanted)
    shapes = _SHAPES[kind]
    if "x" in size:
        fits = [s for s in shapes if sorted(map(int, s.split("x"))) == sorted(sides)]
    else:
        if chips_wanted % row.chip_devices:
            raise ConfigError(
                f"{text}: a chip is {row.chip_devices} JAX devices; ask for a multiple of that"
            )

        chips_wanted //= row.chip_devices
        fits = [s for s in shapes if _size(s) == chips_wanted]
    if not fits:
        near = sorted(shapes, key=lambda s: abs(math.log(_size(s) / chips_wanted)))[:3]
        raise ConfigError(
            f"{text}: no such slice can be rented; nearest: "
            + ", ".join(f"{s} ({_size(s)} chips)" for s in sorted(near, key=_size))
        )
    count = chips_wanted * row.chip_devices
    return count * slices, min(row.devices_per_host * row.chip_devices, count), fits[0]


def _size(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


def _check_count(text: str, count: int) -> None:
    if count < 1:
        raise ConfigError(f"{text}: zero devices train nothing; ask for at least 1")


def _cpu(text: str, size: str, slices: int, dtype: str, rates: Rates | None) -> Machine:
    """CPU devices that share one host's cores, as JAX creates them for tests."""
    if "x" in size or slices != 1:
        raise ConfigError(f"{text}: CPU devices are given by their number, as in cpu:8")
    count = int(size)
    _check_count(text, count)
    chip = Chip("cpu", 0.0, 0, 0.0)
    shares = AchievedShares(1.0, 1.0, 1.0, 1.0, 1.0, "not known")
    machine = Machine("cpu", "cpu", count, count, 1, chip, 0.0, 0.0, "", 1, shares, dtype=dtype)
    kind = calibrate.cpu_kind()
    machine = _calibrated(machine, rates or _saved_rates(lambda name: name == kind))
    if machine.rates is None:
        missing = "cpu: all rates; jaxvlm plan --calibrate measures them"
        machine = machine._replace(missing=(missing,))
    return machine
