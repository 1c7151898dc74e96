"""FLOPs that a compiled step executes, over those that are useful, and a roofline of its program.

Useful are those of docs/training.md. Executed are the program's matmuls, read from its text, and
attention's, counted from the tiles that the kernels visit for a typical row: a number of
conversations with images of different sizes, which fill it as packing does, and no tile exactly.
Of cuDNN's kernels, which tell nothing, it is assumed that they compute the whole square of the
tokens, two products of it forward and five backward, of heads that are padded to a multiple of 16.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hlo_costs import Op
from jaxvlm.config import ModelConfig
from jaxvlm.models import model_flops
from jaxvlm.nn.kernels import flash_gpu, flash_tpu
from jaxvlm.nn.kernels.blocks import needed, ranges, visits
from jaxvlm.nn.mask import Spans, of_segments
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.types import Batch

LENGTH, PATCHES = 4096, 8192
GRIDS = ((32, 32), (28, 36), (24, 42), (36, 28), (30, 34), (40, 24), (26, 38), (34, 30))
"""Patches of the row's images, height and width; images of one size have that instead."""
CONVERSATIONS = ((2, 282), (1, 160), (1, 430), (2, 350), (1, 106), (1, 692))
"""Images and tokens of text of the row's conversations."""
PROMPT = 32
"""Tokens of the question after a conversation's images, where a prompt is read both ways."""
_GPU = {"flash_forward": 2, "flash_backward_queries": 3, "flash_backward_keys": 4}
_TPU = {"flash_forward": 2, "flash_backward": 5}
_CUDNN = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""Products of a tile's queries and keys that a kernel computes, by name."""
_OVER_HEAD = {"flash_forward": 1, "flash_backward": 2}
"""Those of a TPU's kernels that sum over a head's dims."""
_ARRAY = {"v5p": 128, "v6e": 256}
"""Side of a TPU's matrix unit: a sum over fewer terms takes as long.

Source: cloud.google.com/tpu/docs/v5p and v6e.
"""


class Row(NamedTuple):
    """The typical row."""

    batch: Batch
    """Numpy fields of [1, T]."""
    masks: dict[int, Spans]
    """Number of tokens -> the mask of attention over so many: the decoder's and the tower's."""


def typical_row(config: ModelConfig) -> Row:
    """Make the row, and its masks."""
    segment, group = (np.zeros((1, LENGTH), np.int32) for _ in range(2))
    starts, at, sizes = [], 0, iter(_image_tokens(config))
    for number, (images, text) in enumerate(CONVERSATIONS, 1):
        begin = at
        for size in itertools.islice(sizes, images):
            starts.append(at)
            at += size
        group[0, begin : at + PROMPT] = number
        at += text
        segment[0, begin:at] = number
    groups = jnp.asarray(group) if config.decoder.visual_mask != "causal" else None
    batch = Batch(segment, np.ones((1, LENGTH), np.float32), segment[:, None], segment)
    batch = batch._replace(image_start=np.asarray([starts]), bidirectional=groups)
    masks = {LENGTH: of_segments(LENGTH, True, jnp.asarray(segment), None, groups)}
    if not config.vision.packed:
        side = config.vision.image_size // config.vision.patch_size
        return Row(batch, masks | {side**2: of_segments(side**2, False)})
    grid = np.asarray([[(1, *g) for g in GRIDS]])
    image = np.zeros((1, PATCHES), np.int32)
    counts = [h * w for h, w in GRIDS]
    image[0, : sum(counts)] = np.repeat(np.arange(len(counts)) + 1, counts)
    return Row(
        batch._replace(grid=grid),
        masks | {PATCHES: of_segments(PATCHES, False, jnp.asarray(image))},
    )


def _image_tokens(config: ModelConfig) -> Iterator[int]:
    side = config.vision.image_size // config.vision.patch_size
    for grid in GRIDS:
        h, w = grid if config.vision.packed else (side, side)
        yield h * w // config.connector.merge**2


def useful(config: ModelConfig, rows: int) -> float:
    """FLOPs of a step on so many typical rows, all parameters trained, as MFU counts them."""
    trained = {f"{part}/all" for part in ("vision", "connector", "decoder")}
    return model_flops.of_batch(config, trained, typical_row(config).batch, rows)[1].total


class Attention(NamedTuple):
    """Matmuls of an attention kernel."""

    flops: float
    """Executed, dims that are padded to a tile included."""
    slots: float
    """FLOPs that the matrix unit could have done in the time that they take it at full rate."""


def attention(op: Op, masks: Mapping[int, Spans], machine: Machine, shared: int) -> Attention:
    """Count an attention kernel's FLOPs in one call.

    Args:
        op: the kernel.
        masks: of :class:`Row`.
        machine: kind of the devices.
        shared: bytes of a GPU's shared memory that a program can have.
    """
    if op.name in _CUDNN:
        batch, heads, length, dim = _dims_of_cudnn(op, masks)
        each = 2.0 * _CUDNN[op.name] * length**2 * (-(-dim // 16) * 16)
        return Attention(batch * heads * each, batch * heads * each)
    q = next(x for x in op.operands if len(x) == 4)
    if machine.platform == "gpu":
        batch, length, heads, dim = q
        width = sum(width for _, width in flash_gpu._parts(dim))
        area = gpu_area(op.name, masks[length], dim, shared)
        flops = 2.0 * _GPU[op.name] * area * width * batch * heads
        return Attention(flops, flops)
    batch, heads, dim, length = q
    area = tpu_area(masks[length], length)
    products, side = _TPU[op.name], _ARRAY[machine.name]
    over_head = _OVER_HEAD[op.name]
    one = 2.0 * area * batch * heads
    padded = over_head * -(-dim // side) * side + (products - over_head) * dim
    return Attention(one * products * dim, one * padded)


def _dims_of_cudnn(op: Op, masks: Mapping[int, Spans]) -> tuple[int, int, int, int]:
    first = next(x for x in op.operands if len(x) == 4)
    batch, one, other, dim = first
    return (batch, other, one, dim) if one in masks else (batch, one, other, dim)


@functools.cache
def _visits(query: int, key: int, of_keys: bool) -> Any:
    return jax.jit(lambda spans: visits(spans, query, key, of_keys))


def gpu_area(kernel: str, spans: Spans, dim: int, shared: int) -> float:
    """Pairs of a query and a key in the tiles that a GPU kernel computes, per head."""
    sizes = flash_gpu.sizes_for(dim, jnp.bfloat16, shared)
    of_keys = kernel == "flash_backward_keys"
    block = {"flash_forward": sizes.forward, "flash_backward_queries": sizes.queries}
    own = block.get(kernel, sizes.keys)
    pair = (own.other, own.own) if of_keys else (own.own, own.other)
    listed = _visits(*pair, of_keys)(_padded(spans, sizes.unit))
    count = sum(int(jnp.sum(runs.end[..., -1])) for runs in listed)
    return float(count * own.own * own.other)


def tpu_area(spans: Spans, length: int) -> float:
    """Pairs of a query and a key in the tiles that a TPU kernel computes, per head."""
    sizes = flash_tpu.sizes_for(length)
    spans = _padded(spans, sizes.unit)
    parts = spans.start.shape[1] // sizes.part
    return (
        float(jnp.sum(needed(ranges(spans, sizes.query), parts, sizes.part)))
        * sizes.query
        * sizes.part
    )


def _padded(spans: Spans, unit: int) -> Spans:
    more = -spans.start.shape[1] % unit
    return jax.tree.map(lambda x: jnp.pad(jnp.asarray(x), ((0, 0), (0, more))), spans)


class Roofline(NamedTuple):
    """Seconds of a step on one device that its program cannot go below at given rates."""

    matmuls: float
    """Operations whose matmuls take longer than their memory traffic."""
    attention: float
    memory: float
    """Operations whose memory traffic takes longer."""
    traffic: float
    """All memory traffic, that of copies beside other operations included."""
    wires: float
    """Bytes on the fastest links, all of them beside other work."""

    @property
    def total(self) -> float:
        """The longest of work, memory traffic and links."""
        return max(self.matmuls + self.attention + self.memory, self.traffic, self.wires)


def roofline(
    ops: Iterable[tuple[Op, Attention | None]], machine: Machine, sent: float, shares: bool
) -> Roofline:
    """Sum up the operations' longer times, of matmuls or of memory.

    Args:
        ops: the program's operations; of attention kernels, their matmuls too.
        machine: its rates.
        sent: bytes that a device sends.
        shares: at the share of the peak rates that the planner assumes; else at the peaks.
    """
    of = machine.shares
    matmul, scores, hbm, links = (of.matmul, of.scores, of.hbm, of.links) if shares else (1.0,) * 4
    seconds = dict.fromkeys(("matmuls", "attention", "memory", "traffic"), 0.0)
    for op, kernel in ops:
        moved = op.times * op.moved / (machine.chip.hbm_bandwidth * hbm)
        seconds["traffic"] += moved
        if op.hidden:
            continue
        flops = op.flops if kernel is None else kernel.slots
        busy = op.times * flops / (machine.chip.peak_flops * (scores if kernel else matmul))
        kind = "memory" if moved > busy else "attention" if kernel else "matmuls"
        seconds[kind] += max(busy, moved)
    wires = sent / (machine.links * links) if sent else 0.0
    return Roofline(**seconds, wires=wires)


def with_attention(
    ops: Iterable[Op], masks: Mapping[int, Spans], machine: Machine, shared: int
) -> list[tuple[Op, Attention | None]]:
    """Operations, and those that are attention kernels with their matmuls; as :func:`attention`."""
    kernels = {*_GPU, *_TPU, *_CUDNN}
    return [
        (op, attention(op, masks, machine, shared) if op.name in kernels else None) for op in ops
    ]


def executed(ops: Iterable[tuple[Op, Attention | None]]) -> dict[str, float]:
    """FLOPs of a step's matmuls on one device: attention's, and all others'."""
    found = {"attention": 0.0, "others": 0.0}
    for op, kernel in ops:
        found["attention" if kernel else "others"] += op.times * (
            kernel.flops if kernel else op.flops
        )
    return found
