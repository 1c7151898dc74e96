"""Peak rates of accelerators, from a table or measured: the denominators of MFU and the planner.

A row is one *JAX device*. A TPU v4 or v5p chip is one device (two cores run as one); a TPU7x
chip is two, so its row holds half a chip. Rates are dense (no sparsity).

``float32`` is the rate of a float32 matmul at JAX's default precision: TF32 on NVIDIA's tensor
cores, one bfloat16 pass on TPUs. Memory is the maker's figure, read as GiB (as drivers report
it); the driver and XLA reserve some of it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Chip(NamedTuple):
    """One JAX device, for one dtype."""

    name: str
    """Common name."""
    peak_flops: float
    """Dense matmul FLOP/s in the requested dtype."""
    hbm_bytes: int
    """Device memory in bytes."""
    hbm_bandwidth: float
    """Bytes/s between memory and cores."""


class _Row(NamedTuple):
    pattern: str  # regular expression, searched in device_kind, case ignored
    name: str
    bf16: float  # TFLOP/s
    fp32: float  # TFLOP/s, see above
    gib: int
    gb_per_s: float


# The first row whose pattern matches wins, so special forms come before general ones.
_ROWS = (
    # cloud.google.com/tpu/docs/v4: 275 TFLOPs bf16, 32 GiB, 1200 GBps
    _Row(r"TPU v4(?! lite)", "TPU v4", 275, 275, 32, 1200),
    # cloud.google.com/tpu/docs/v5e: 197 TFLOPs bf16, 16 GB, 819 GBps
    _Row(r"TPU v5 ?(lite|e)", "TPU v5e", 197, 197, 16, 819),
    # cloud.google.com/tpu/docs/v5p: 459 TFLOPs bf16, 95 GB, 2765 GBps
    _Row(r"TPU v5(p|$)", "TPU v5p", 459, 459, 95, 2765),
    # cloud.google.com/tpu/docs/v6e: 918 TFLOPs bf16, 32 GB, 1638 GBps
    _Row(r"TPU v6 ?(lite|e)", "TPU v6e", 918, 918, 32, 1638),
    # cloud.google.com/tpu/docs/tpu7x: a chip has 2307 TFLOPs bf16, 192 GiB, 7380 GBps
    _Row(r"TPU ?v?7x", "TPU7x (half a chip)", 1153.5, 1153.5, 96, 3690),
    # NVIDIA A100 datasheet: 312 bf16, 156 TF32; 1555 GB/s (40 GB), 1935 (80 GB PCIe), 2039 (SXM)
    _Row(r"A100.*80GB PCIe", "A100 80GB PCIe", 312, 156, 80, 1935),
    _Row(r"A100.*80GB", "A100 80GB SXM", 312, 156, 80, 2039),
    _Row(r"A100-PCIE", "A100 40GB PCIe", 312, 156, 40, 1555),
    _Row(r"A100", "A100 40GB", 312, 156, 40, 1555),
    # NVIDIA H100 datasheet, sparse figures halved. PCIe: 756 bf16, 378 TF32, 2.0 TB/s
    _Row(r"H100 PCIe", "H100 PCIe", 756, 378, 80, 2000),
    # NVL, same datasheet: 835.5 bf16, 417.5 TF32, 94 GB, 3.9 TB/s
    _Row(r"H100 NVL", "H100 NVL", 835.5, 417.5, 94, 3900),
    # SXM, same datasheet: 989.5 bf16, 494.7 TF32, 80 GB, 3.35 TB/s
    _Row(r"H100", "H100 SXM", 989.5, 494.7, 80, 3350),
    # NVIDIA H200 datasheet, sparse figures halved. NVL: 835.5 bf16, 417.5 TF32, 141 GB, 4.8 TB/s
    _Row(r"H200 NVL", "H200 NVL", 835.5, 417.5, 141, 4800),
    # SXM, same datasheet: 989.5 bf16, 494.7 TF32
    _Row(r"(?<!G)H200", "H200 SXM", 989.5, 494.7, 141, 4800),
    # NVIDIA GB200 NVL72 datasheet, per GPU: 2500 bf16, 1250 TF32 (dense), 186 GB, 8 TB/s
    _Row(r"GB200", "GB200", 2500, 1250, 186, 8000),
    # NVIDIA HGX B200 datasheet, per GPU: 2250 bf16, 1125 TF32 (dense), 180 GB, 7.7 TB/s
    _Row(r"B200", "B200", 2250, 1125, 180, 7700),
    # NVIDIA Ada GPU architecture whitepaper: 165.2 bf16 with fp32 sums, 82.6 TF32, 1008 GB/s
    _Row(r"RTX 4090(?! (Laptop|D))", "RTX 4090", 165.2, 82.6, 24, 1008),
    # NVIDIA RTX 6000 Ada datasheet, sparse figures halved: 364.2 bf16, 182.1 TF32, 960 GB/s
    _Row(r"RTX 6000 Ada", "RTX 6000 Ada", 364.2, 182.1, 48, 960),
    # NVIDIA RTX Blackwell PRO whitepaper: 503.8 bf16, 251.9 TF32 (dense), 96 GB, 1792 GB/s
    _Row(r"RTX PRO 6000 Blackwell(?! Max-Q)", "RTX PRO 6000", 503.8, 251.9, 96, 1792),
)


def lookup(device_kind: str, dtype: str) -> Chip | None:
    """The chip named by ``jax.Device.device_kind``, for matmuls in ``dtype``.

    Args:
        device_kind: as JAX gives it, e.g. ``NVIDIA H100 80GB HBM3`` or ``TPU v5 lite``.
        dtype: ``bfloat16`` or ``float32``; float16 runs at bfloat16's rate.

    Returns:
        None if the table has no such chip. It has no CPUs: measure a matmul there.

    Raises:
        ValueError: another dtype.
    """
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"no peak rate is known for dtype={dtype!r}; use bfloat16 or float32")
    for row in _ROWS:
        if re.search(row.pattern, device_kind, re.IGNORECASE):
            tera = row.fp32 if dtype == "float32" else row.bf16
            return Chip(row.name, tera * 1e12, row.gib * 2**30, row.gb_per_s * 1e9)
    return None


_LINKS = {
    # cloud.google.com/tpu/docs/v5e, v5p, v6e, tpu7x: bidirectional inter-chip interconnect per
    # chip, GB/s: 400, 1200, 800, 1200; half of it is outgoing. Older pages give the outgoing half
    # as 1,600, 4,800, 3,200 Gbit/s. A TPU7x chip has two devices.
    "TPU v5e": 200,
    "TPU v5p": 600,
    "TPU v6e": 400,
    "TPU7x (half a chip)": 300,
    # arXiv 2304.01433, table 4: six links of 50 GB/s each way
    "TPU v4": 300,
    # NVIDIA A100 datasheet: NVLink 600 GB/s, both directions together, as below
    "A100 40GB": 300,
    "A100 80GB SXM": 300,
    # NVIDIA H100 and H200 datasheets: 900 GB/s
    "H100 SXM": 450,
    "H200 SXM": 450,
    # NVIDIA HGX B200 and GB200 NVL72 datasheets: 1.8 TB/s
    "B200": 900,
    "GB200": 900,
    # PCIe x16 each way, generation 4 or 5. NVLink bridges between pairs of cards are not counted.
    "A100 40GB PCIe": 31.5,
    "A100 80GB PCIe": 31.5,
    "H100 PCIe": 63,
    "H100 NVL": 63,
    "H200 NVL": 63,
    "RTX 6000 Ada": 31.5,
    "RTX PRO 6000": 63,
    # GeForce drivers let no card read another's memory: data goes through host memory, where it is
    # written and read again. Half of PCIe 4 is assumed for that; there is no published figure.
    "RTX 4090": 15.75,
}


def links(name: str) -> float:
    """Bytes/s that leave a device over its fast links, in a slice or in a host; 0: unknown.

    Args:
        name: name of a :class:`Chip`.
    """
    return _LINKS.get(name, 0.0) * 1e9


class PeakRate:
    """Matmul FLOP/s that all devices together reach at best: MFU's denominator.

    A measured rate is too low where the machine was busy: it is measured again when a run beats it.

    Args:
        meshes: the devices, all of one kind.
        dtype: dtype of the matmuls.

    Attributes:
        flops: the rate.
        source: a chip's name, or how it was measured.
    """

    def __init__(self, meshes: Sequence[jax.sharding.Mesh], dtype: str):
        device, size = meshes[0].devices.flat[0], sum(mesh.size for mesh in meshes)
        chip = lookup(device.device_kind, dtype)
        self._measurements = 0 if chip else _MEASUREMENTS
        # Forced CPU devices share the cores, so one matmul measures the rate of all of them.
        on_cpu = device.platform == "cpu"
        self._matmul = (jnp.dtype("float32"), 1024) if on_cpu else (jnp.dtype(dtype), 8192)
        self._times = 1 if on_cpu else size
        self.flops = chip.peak_flops * size if chip else self._measured()
        self.source = chip.name if chip else "measured matmul"

    def share(self, flops: float) -> float | None:
        """Return ``flops`` over the rate, or ``None`` if it is above it.

        Args:
            flops: FLOP/s of a run.
        """
        if flops > self.flops and self._measurements:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no memory left for matrices
                self.flops = max(self.flops, self._measured())
        return flops / self.flops if flops <= self.flops else None

    def _measured(self) -> float:
        self._measurements -= 1
        return _measured(*self._matmul) * self._times


_MEASUREMENTS = 4
"""Matmul measurements of a run: a busy machine may have been idle in one of them."""


def _measured(dtype: Any, size: int, repeats: int = 3) -> float:
    """Measured matmul FLOP/s of one device."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
