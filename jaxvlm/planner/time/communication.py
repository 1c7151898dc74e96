"""Bytes that a device sends in a step, by strategy, from shapes and settings without compiling.

Bytes are those of ring algorithms. ``benchmarks/results/collectives_aot.json`` has the bytes that
compilers send for the same strategies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxvlm.config import GRAD_REDUCE_BITS, MeshConfig, ModelConfig, grad_reduce_bits
from jaxvlm.parallel.grad_reduce import ORDER
from jaxvlm.parallel.mesh import AXES, BATCH_AXES, ISLAND
from jaxvlm.parallel.pipeline.schedule import timetable
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.time import workload


class Message(NamedTuple):
    """A collective, with all its repetitions in a step."""

    kind: str
    """all-gather | reduce-scatter | all-reduce | all-to-all | permute."""
    axes: tuple[str, ...]
    """Mesh axes whose devices take part."""
    part: str
    """Tower that it belongs to."""
    bytes: float
    """Size of the full array on a device, all-gathered or summed. permute: bytes sent."""
    times: float
    hidden: bool
    """Whether it overlaps with the tower's matmuls: its result is needed a layer later, or not
    before the layer's end. A step waits for the others.
    """
    once: bool = False
    """Whether a step runs it once, however often batches go through the tower."""

    def sent(self, mesh: MeshConfig) -> float:
        """Bytes that a device sends."""
        n = _size(mesh, self.axes)
        if self.kind == "permute":
            return self.bytes * self.times
        factor = {"all-reduce": 2.0}.get(self.kind, 1.0)
        return factor * (n - 1) / n * self.bytes * self.times


def messages(setup: StepSetup, width: int) -> list[Message]:
    """All collectives of a step.

    Args:
        setup: the train step.
        width: bytes of a number in the compute dtype.
    """
    collectives = [*_weights(setup, width), *_activations(setup, width)]
    return [m for m in collectives if m.axes and m.bytes and m.times]


def _size(mesh: MeshConfig, axes: tuple[str, ...]) -> int:
    return math.prod(getattr(mesh, axis) for axis in axes)


def _weights(setup: StepSetup, c: int) -> Iterator[Message]:
    """Collectives of parameters and their gradients."""
    mesh, strategy, times = setup.mesh, setup.strategy, setup.microbatches
    by_tower, bytes_of = workload.passes(setup), workload.stored_bytes(setup)
    for tower, w in workload.weights(setup.config).items():
        fwd_bwd = by_tower[tower]
        fields = (strategy.all_gathered, strategy.params, strategy.optimizer)
        gathered, stored, updated = (_used(mesh, axes) for axes in fields)
        if tower in strategy.replicated:
            gathered = stored = ()
        trained = w.blocks * fwd_bwd.trained + w.other * fwd_bwd.other, w.experts * fwd_bwd.experts
        for size, own, experts in zip((w.blocks + w.other, w.experts), trained, (False, True)):
            over = mesh.tensor * (mesh.pipeline if tower == "decoder" else 1)
            over *= mesh.expert if experts else 1
            size, own = size / over, own / over
            once = tuple(a for a in stored if a not in gathered)
            bits = 1.0 if strategy.param_gather_dtype == "int8" else bytes_of[tower]
            share = bits * size / _size(mesh, gathered)
            yield Message("all-gather", once, tower, share, 1, False, True)
            ring_exchange = times * (2 if fwd_bwd.backward else 1)
            yield Message("all-gather", gathered, tower, c * size, ring_exchange, True)
            # Where a batch axis is left to reduce over, only that reduction is in fewer bits.
            rest = [a for a in ORDER if getattr(mesh, a) > 1 and a not in strategy.all_gathered]
            quantized = strategy.grad_reduce_dtype != "float32" and not rest
            width = grad_reduce_bits(strategy) / 8 if quantized else c
            yield Message("reduce-scatter", gathered, tower, width * own, times, True)
            yield from _sums(setup, tower, c, own, gathered, stored, updated, experts)


def _used(mesh: MeshConfig, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in AXES if a in axes and getattr(mesh, a) > 1)


def _sums(
    setup: StepSetup, tower: str, c: int, size: float | int, gathered: tuple[str, ...],
    stored: tuple[str, ...], updated: tuple[str, ...], experts: bool,
) -> Iterator[Message]:  # fmt: skip
    """Reductions of gradients over the batch axes that do not shard them while they are
    computed.
    """
    mesh, strategy = setup.mesh, setup.strategy
    batch = tuple(a for a in BATCH_AXES if a != "expert" or not experts)
    if setup.outer:  # over islands, changes of parameters are reduced instead, and not each step
        batch = tuple(a for a in batch if a != ISLAND)
        bits = GRAD_REDUCE_BITS[setup.outer.delta_dtype] / 8 * size / _size(mesh, stored)
        yield Message("all-reduce", (ISLAND,), tower, bits, 1 / setup.outer.steps, False, True)
    rest = tuple(a for a in batch if getattr(mesh, a) > 1 and a not in gathered)
    share = size / _size(mesh, gathered)
    width: float = c if setup.microbatches == 1 else 4  # accumulated gradients are float32
    width = width if strategy.grad_reduce_dtype == "float32" else grad_reduce_bits(strategy) / 8
    split = tuple(a for a in rest if a in updated)
    summed = tuple(a for a in rest if a not in updated)
    times = 1 if set(strategy.gradients).isdisjoint(rest) else setup.microbatches
    # XLA for GPUs reduces in the loop over layers: unsharded gradients (DDP, ZeRO-1 and 2) each
    # overlap with the matmul of the next one. FSDP's reduce-scatter comes last in a layer, and
    # the all-reduce over ``data`` after it has no matmul left to overlap with (JAX 0.10.2, for 64
    # H200). Microbatches are accumulated first, and reductions in fewer bits run once for all
    # gradients.
    overlaps = setup.microbatches == 1 and strategy.grad_reduce_dtype == "float32" and not gathered
    once, unreduced = times < setup.microbatches, width * share / _size(mesh, split)
    yield Message("reduce-scatter", split, tower, width * share, times, overlaps, once)
    yield Message("all-reduce", summed, tower, unreduced, times, overlaps, once)
    after = tuple(a for a in updated if a not in stored)  # new parameters, to their sharding
    yield Message("all-gather", after, tower, 4 * size / _size(mesh, stored), 1, False, True)
    if mesh.context > 1:
        yield Message("all-reduce", ("context",), tower, c * share, setup.microbatches, overlaps)


def _activations(setup: StepSetup, c: int) -> Iterator[Message]:
    """Collectives between a block's matmuls."""
    config, mesh, times = setup.config, setup.mesh, setup.microbatches
    rows = setup.rows / _size(mesh, (*BATCH_AXES, "context")) / times
    patches, _ = workload.image_patches(setup)
    images = rows * setup.images * patches / mesh.pipeline
    tokens = {"vision": images, "vision_top": images}
    tokens["decoder"] = tokens["text"] = rows * setup.length
    by_tower, layers = workload.passes(setup), workload.layers(config)
    for tower, b in workload.blocks(config).items():
        fwd_bwd, n = by_tower[tower], layers[tower]
        n = max(1, n // mesh.pipeline) if tower == "decoder" and n else n
        size = c * tokens[tower] * b.width
        if not size * n:
            continue
        ring_exchange = n * times * (1 + fwd_bwd.backward)
        if mesh.tensor > 1:
            # One after attention, one after the MLP; both again in the backward pass.
            recomputed = n * times * fwd_bwd.recomputes  # remat does not need the MLP's
            reduced = 2 * ring_exchange + recomputed
            yield Message("all-reduce", ("tensor",), tower, size, reduced, False)
        if mesh.context > 1 and (tower in ("decoder", "text") or config.vision.packed):
            yield from _context(setup, fwd_bwd, b, n * times, tokens[tower], c)
        if b.experts and mesh.expert > 1:  # gather tokens, reduce-scatter their sums
            gathered = size * mesh.expert
            gathers = n * times * (1 + fwd_bwd.recomputes + fwd_bwd.backward)
            yield Message("all-gather", ("expert",), tower, gathered, gathers, False)
            yield Message("reduce-scatter", ("expert",), tower, gathered, ring_exchange, False)
    if mesh.pipeline > 1:
        yield from _stages(setup, tokens["decoder"], c)


def ring_exchange(setup: StepSetup, documents: float | int) -> Message:
    """Ring exchange of documents' embeddings, past all queries, and of their gradients.

    Args:
        setup: the train step.
        documents: numbers in the embeddings of a device's documents.
    """
    axes = tuple(a for a in BATCH_AXES if getattr(setup.mesh, a) > 1)
    turns = _size(setup.mesh, axes) - 1
    return Message("permute", axes, "loss", 4.0 * documents * turns, 4, True)


def _stages(setup: StepSetup, tokens: float | int, c: int) -> Iterator[Message]:
    """Pipeline: each tick sends microbatches on, and the last stage's output goes to all."""
    mesh, strategy, times = setup.mesh, setup.strategy, setup.microbatches
    axes, fwd_bwd = ("pipeline",), workload.passes(setup)["decoder"]
    assert isinstance(setup.config, ModelConfig), "a dual encoder has no stages"
    size = c * tokens * setup.config.decoder.width
    table = timetable(strategy.schedule, mesh.pipeline, times, max(1, strategy.virtual_stages))
    ticks = len(table.forward) * (1 + fwd_bwd.backward)
    yield Message("permute", axes, "decoder", size, ticks, True)
    yield Message("all-reduce", axes, "decoder", size, ticks, False)
    # Embedding and head are sharded over stages by vocabulary: activations, float32 gradients.
    yield Message("all-reduce", axes, "head", size * (1 + 4 / c * fwd_bwd.backward), times, False)
    if strategy.schedule == "interleaved":  # layers to the schedule's stages, and back
        moved = 4 * workload.weights(setup.config)["decoder"].blocks / mesh.tensor / mesh.pipeline
        yield Message("permute", axes, "decoder", moved, 1 + fwd_bwd.trained, False)


def _context(
    setup: StepSetup,
    fwd_bwd: workload.ForwardBackward,
    b: workload.Block,
    times: float | int,
    tokens: float | int,
    c: int,
) -> Iterator[Message]:
    """Context parallelism of attention; ``times`` is layers times microbatches."""
    n, axes, forward = setup.mesh.context, ("context",), 1 + fwd_bwd.recomputes
    keys = 2 * b.kv_width(setup.mesh.tensor) * tokens
    if setup.strategy.context == "ring":  # the backward pass sends float32 gradients too
        turns = (n - 1) * forward + n * fwd_bwd.backward
        yield Message("permute", axes, "decoder", keys * c, times * turns, True)
        yield Message("permute", axes, "decoder", keys * 4, times * n * fwd_bwd.backward, True)
    elif setup.strategy.context == "ulysses":
        sent = (keys + 2 * b.heads * b.head_dim / setup.mesh.tensor * tokens) * c
        exchanges = times * (forward + fwd_bwd.backward)
        yield Message("all-to-all", axes, "decoder", sent, exchanges, False)
    else:
        yield Message("all-gather", axes, "decoder", n * keys * c, times * forward, False)
        backward = times * fwd_bwd.backward
        yield Message("reduce-scatter", axes, "decoder", n * keys * 4, backward, False)


def seconds(message: Message, mesh: MeshConfig, machine: Machine) -> tuple[float, float]:
    """Seconds over fast links, and between hosts or slices; in a ring both run at the same time.

    Neighbours along the mesh's last axes are closest to each other. A ring over many hosts leaves
    a host once for all of its devices in the ring, so these share their network's rate.
    """
    n = _size(mesh, message.axes)
    if n == 1:
        return 0.0, 0.0
    near, sent = _near(message.axes, mesh, machine), message.sent(mesh)
    fast = machine.links * machine.shares.links * _links_used(near, machine)
    links = sent / fast if near > 1 and fast else 0.0
    if near == n:
        return links, 0.0
    rate = machine.network * machine.shares.network * near
    return links, sent / rate if rate else 0.0


def _near(axes: tuple[str, ...], mesh: MeshConfig, machine: Machine) -> int:
    """Devices of a group over ``axes`` that fast links connect."""
    if machine.platform == "tpu":  # as jaxvlm.parallel.mesh lays axes over slices
        islands = math.gcd(mesh.island, machine.slices)
        across = {ISLAND: islands, "data": math.gcd(mesh.data, machine.slices // islands)}
        return math.prod(getattr(mesh, axis) // across.get(axis, 1) for axis in axes)
    inner = math.prod(getattr(mesh, a) for a in AXES[AXES.index(axes[-1]) + 1 :] if a not in axes)
    return max(1, min(_size(mesh, axes), machine.island // inner))


def _links_used(devices: int, machine: Machine) -> float:
    """Share of a TPU's links that a ring of so many devices uses: those along its sides."""
    sides = sum(side != "1" for side in machine.topology.split("x"))
    if machine.platform != "tpu" or devices >= machine.island:
        return 1.0
    return max(1.0, sides * math.log(devices) / math.log(machine.island)) / sides
