"""What a device sends in a step, by strategy: from shapes and settings, nothing compiled.

Bytes are those of ring algorithms. ``benchmarks/results/collectives_aot.json`` has what compilers
make of the same strategies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxvlm.config import MeshConfig, ModelConfig
from jaxvlm.parallel.mesh import AXES, BATCH_AXES
from jaxvlm.parallel.schedule import timetable
from jaxvlm.plan import parts
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.memory import Setup


class Message(NamedTuple):
    """A collective, all its repetitions in a step together."""

    kind: str
    """all-gather | reduce-scatter | all-reduce | all-to-all | permute."""
    axes: tuple[str, ...]
    """Of the mesh, those whose devices take part."""
    part: str
    """The tower that it is for."""
    bytes: float
    """Of the whole array: what is gathered, or summed up, on a device. permute: what is sent."""
    times: float
    hidden: bool
    """It can run beside the tower's matmuls: what it brings is wanted a layer later, or not
    before the layer's end. The others are waited for."""
    once: bool = False
    """A step has it once, however many times rows go through the tower."""

    def sent(self, mesh: MeshConfig) -> float:
        """Bytes that a device sends."""
        n = _size(mesh, self.axes)
        if self.kind == "permute":
            return self.bytes * self.times
        factor = {"all-reduce": 2.0}.get(self.kind, 1.0)
        return factor * (n - 1) / n * self.bytes * self.times


def messages(setup: Setup, width: int) -> list[Message]:
    """All of a step.

    Args:
        setup: what is planned.
        width: bytes of a number in the compute dtype.
    """
    found = [*_weights(setup, width), *_activations(setup, width)]
    return [m for m in found if m.axes and m.bytes and m.times]


def _size(mesh: MeshConfig, axes: tuple[str, ...]) -> int:
    return math.prod(getattr(mesh, axis) for axis in axes)


def _weights(setup: Setup, c: int) -> Iterator[Message]:
    """Parameters, and their gradients."""
    mesh, strategy, times = setup.mesh, setup.strategy, setup.microbatches
    gone = parts.passes(setup)
    for tower, w in parts.weights(setup.config).items():
        ways = gone[tower]
        fields = (strategy.gathered, strategy.params, strategy.optimizer)
        gathered, stored, kept = (_used(mesh, axes) for axes in fields)
        if tower in strategy.whole:
            gathered = stored = ()
        learned = w.blocks * ways.learns + w.other * ways.other, w.experts * ways.experts
        for size, own, experts in zip((w.blocks + w.other, w.experts), learned, (False, True)):
            over = mesh.tensor * (mesh.stage if tower == "decoder" else 1)
            over *= mesh.expert if experts else 1
            size, own = size / over, own / over
            once = tuple(a for a in stored if a not in gathered)
            bits = 1.0 if strategy.gather_bits == 8 else 4.0
            share = bits * size / _size(mesh, gathered)
            yield Message("all-gather", once, tower, share, 1, False, True)
            rounds = times * (2 if ways.back else 1)
            yield Message("all-gather", gathered, tower, c * size, rounds, True)
            yield Message("reduce-scatter", gathered, tower, c * own, times, True)
            yield from _sums(setup, tower, c, own, gathered, stored, kept, experts)


def _used(mesh: MeshConfig, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in AXES if a in axes and getattr(mesh, a) > 1)


def _sums(
    setup: Setup, tower: str, c: int, size: float | int, gathered: tuple[str, ...],
    stored: tuple[str, ...], kept: tuple[str, ...], experts: bool,
) -> Iterator[Message]:  # fmt: skip
    """Gradients over the batch axes that they are not split over while they are made."""
    mesh, strategy = setup.mesh, setup.strategy
    batch = tuple(a for a in BATCH_AXES if a != "expert" or not experts)
    rest = tuple(a for a in batch if getattr(mesh, a) > 1 and a not in gathered)
    share = size / _size(mesh, gathered)
    width: float = c if setup.microbatches == 1 else 4  # sums of microbatches are float32
    width = width if strategy.reduce_bits == 32 else strategy.reduce_bits / 8
    split = tuple(a for a in rest if a in kept)
    summed = tuple(a for a in rest if a not in kept)
    times = 1 if set(strategy.gradients).isdisjoint(rest) else setup.microbatches
    # XLA for GPUs sums up in the loop over layers: whole gradients (DDP, ZeRO-1 and 2) each beside
    # the matmul that makes the next one. What FSDP has scattered comes last in a layer, the sum
    # over ``data`` behind it with no matmul left to run beside (JAX 0.10.2, for 64 H200).
    # Microbatches are added up first, and sums in fewer bits are of all gradients at once.
    beside = setup.microbatches == 1 and strategy.reduce_bits == 32 and not gathered
    once, left = times < setup.microbatches, width * share / _size(mesh, split)
    yield Message("reduce-scatter", split, tower, width * share, times, beside, once)
    yield Message("all-reduce", summed, tower, left, times, beside, once)
    after = tuple(a for a in kept if a not in stored)  # new parameters, to where they lie
    yield Message("all-gather", after, tower, 4 * size / _size(mesh, stored), 1, False, True)
    if mesh.context > 1:
        yield Message("all-reduce", ("context",), tower, c * share, setup.microbatches, beside)


def _activations(setup: Setup, c: int) -> Iterator[Message]:
    """What is sent between a block's matmuls."""
    config, mesh, times = setup.config, setup.mesh, setup.microbatches
    rows = setup.rows / _size(mesh, (*BATCH_AXES, "context")) / times
    patches, _ = parts.pictures(setup)
    pictures = rows * setup.pictures * patches / mesh.stage
    tokens = {"vision": pictures, "top": pictures}
    tokens["decoder"] = tokens["text"] = rows * setup.length
    gone, layers = parts.passes(setup), parts.layers(config)
    for tower, b in parts.blocks(config).items():
        ways, n = gone[tower], layers[tower]
        n = max(1, n // mesh.stage) if tower == "decoder" and n else n
        size = c * tokens[tower] * b.width
        if not size * n:
            continue
        rounds = n * times * (1 + ways.back)
        if mesh.tensor > 1:  # one sum behind attention, one behind the MLP; both again backwards
            again = n * times * ways.again  # the MLP's is not wanted a second time
            yield Message("all-reduce", ("tensor",), tower, size, 2 * rounds + again, False)
        if mesh.context > 1 and (tower in ("decoder", "text") or config.vision.packed):
            yield from _context(setup, ways, b, n * times, tokens[tower], c)
        if b.experts and mesh.expert > 1:  # tokens to all, sums back
            whole = size * mesh.expert
            wide = n * times * (1 + ways.again + ways.back)
            yield Message("all-gather", ("expert",), tower, whole, wide, False)
            yield Message(
                "reduce-scatter", ("expert",), tower, whole, n * times * (1 + ways.back), False
            )
    if mesh.stage > 1:
        yield from _stages(setup, tokens["decoder"], c)


def rounds(setup: Setup, documents: float | int) -> Message:
    """Documents' vectors on their way past all queries, and their gradients.

    Args:
        setup: what is planned.
        documents: numbers in a device's vectors.
    """
    axes = tuple(a for a in BATCH_AXES if getattr(setup.mesh, a) > 1)
    turns = _size(setup.mesh, axes) - 1
    return Message("permute", axes, "loss", 4.0 * documents * turns, 4, True)


def _stages(setup: Setup, tokens: float | int, c: int) -> Iterator[Message]:
    """A pipeline's: in each tick units go on, and what leaves a stage at the end goes to all."""
    mesh, strategy, times = setup.mesh, setup.strategy, setup.microbatches
    axes, ways = ("stage",), parts.passes(setup)["decoder"]
    assert isinstance(setup.config, ModelConfig), "a dual encoder has no stages"
    size = c * tokens * setup.config.decoder.width
    table = timetable(strategy.schedule, mesh.stage, times, max(1, strategy.chunks))
    ticks = len(table.forward) * (1 + ways.back)
    yield Message("permute", axes, "decoder", size, ticks, True)
    yield Message("all-reduce", axes, "decoder", size, ticks, False)
    # Embedding and head are split over stages by vocabulary: vectors, and float32 gradients.
    yield Message("all-reduce", axes, "head", size * (1 + 4 / c * ways.back), times, False)
    if strategy.schedule == "interleaved":  # layers to where the schedule wants them, and back
        moved = 4 * parts.weights(setup.config)["decoder"].blocks / mesh.tensor / mesh.stage
        yield Message("permute", axes, "decoder", moved, 1 + ways.learns, False)


def _context(
    setup: Setup,
    ways: parts.Passes,
    b: parts.Block,
    times: float | int,
    tokens: float | int,
    c: int,
) -> Iterator[Message]:
    """How the parts of rows attend; ``times`` is layers times microbatches."""
    n, axes, forward = setup.mesh.context, ("context",), 1 + ways.again
    keys = 2 * b.kv_width(setup.mesh.tensor) * tokens
    if setup.strategy.context == "ring":  # in the backward pass with their gradients, in float32
        turns = (n - 1) * forward + n * ways.back
        yield Message("permute", axes, "decoder", keys * c, times * turns, True)
        yield Message("permute", axes, "decoder", keys * 4, times * n * ways.back, True)
    elif setup.strategy.context == "ulysses":
        sent = (keys + 2 * b.heads * b.head_dim / setup.mesh.tensor * tokens) * c
        yield Message("all-to-all", axes, "decoder", sent, times * (forward + ways.back), False)
    else:
        yield Message("all-gather", axes, "decoder", n * keys * c, times * forward, False)
        yield Message("reduce-scatter", axes, "decoder", n * keys * 4, times * ways.back, False)


def seconds(message: Message, mesh: MeshConfig, machine: Machine) -> tuple[float, float]:
    """(over fast links, between hosts or slices); the two run at once in a ring.

    Neighbours along the mesh's last axes are nearest to each other. A ring over many hosts leaves
    a host once for all of its devices that are in the ring, so these share their network's rate.
    """
    n = _size(mesh, message.axes)
    if n == 1:
        return 0.0, 0.0
    inner = math.prod(
        getattr(mesh, a) for a in AXES[AXES.index(message.axes[-1]) + 1 :] if a not in message.axes
    )
    near = max(1, min(n, machine.island // inner)) if machine.island > inner else 1
    sent = message.sent(mesh)
    fast = machine.links * machine.shares.links * _links_used(near, machine)
    links = sent / fast if near > 1 and fast else 0.0
    if near == n:
        return links, 0.0
    rate = machine.network * machine.shares.network * near
    return links, sent / rate if rate else 0.0


def _links_used(devices: int, machine: Machine) -> float:
    """The share of a TPU's links that a ring of so many devices can use: those along its sides."""
    sides = sum(side != "1" for side in machine.topology.split("x"))
    if machine.platform != "tpu" or devices >= machine.island:
        return 1.0
    return max(1.0, sides * math.log(devices) / math.log(machine.island)) / sides
