"""How long a train step takes, before anything is compiled: a roofline, part by part.

A matmul takes as long as its FLOPs or its bytes do, whichever is more; all else takes its bytes.
What a device does runs one after the other, so these add up. Collectives that a layer's matmuls
can hide behind cost what is left over; the others are waited for. No tracing, no devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxvlm.config import ConfigError, DualConfig, MeshConfig
from jaxvlm.parallel.schedule import timetable
from jaxvlm.plan import calibrate, count, parts, wires

if TYPE_CHECKING:
    from jaxvlm.plan.calibrate import Rates
    from jaxvlm.plan.machine import Machine
    from jaxvlm.plan.memory import Setup

_UPDATE = 36.0
"""Bytes a parameter of AdamW and of clipping: gradient read for the norm, parameter, gradient and
two moments read and three written, and the gradient's sum written before that."""


class StepTime(NamedTuple):
    """Seconds of a step of one device; the rates are of all devices."""

    compute: float
    """Matmuls, as far as FLOPs bound them."""
    hbm: float
    """What memory bounds: all that is no matmul, the update, and matmuls that are thin."""
    links: float
    """Collectives over fast links, beside matmuls or not."""
    network: float
    """Between hosts (GPU) or slices (TPU)."""
    bubble: float
    """Of a pipeline."""
    input: float
    """Reading batches, beside the step."""
    exposed: float
    """Of ``links`` and ``network``, what nothing hides."""
    total: float
    model_flops: float
    """Of a step, all devices: see ``plan.count``."""
    hardware_flops: float
    """What is really computed, of all devices: recomputation and hidden halves too."""
    mfu: float
    """model_flops / (total x peak); 0 where the peak is not known."""
    hfu: float
    tokens_per_s: float
    pictures_per_s: float
    bound: str
    """compute | hbm | links | network | bubble | input: what takes longest."""
    parts: dict[str, float]
    """Seconds of compute and memory by part; ``update`` is the optimizer's."""
    missing: tuple[str, ...]
    """Figures that are not known and were taken as free: the step takes longer than is said."""


def step_time(
    setup: Setup,
    machine: Machine,
    input_seconds: float | int = 0.0,
    grad_cache: bool = False,
) -> StepTime:
    """How long a step takes.

    Args:
        setup: model, mesh, strategy and batch.
        machine: of as many devices as the mesh.
        input_seconds: that a host takes to make its part of a batch, where that is known.
        grad_cache: ``microbatches`` are chunks of a batch of pairs, whose vectors are made once
            more before any gradient is.

    Raises:
        ConfigError: a mesh of another size, or a model that can't be planned yet.
    """
    _check(setup, machine)
    width = 4 if setup.config.dtype == "float32" else 2
    again = setup._replace(frozen=("*",)) if grad_cache else None
    work = [*parts.ops(setup, width, _fused(setup)), *_update(setup, width)]
    work += parts.ops(again, width, _fused(setup)) if again else []
    compute = hbm = flops = 0.0
    by_part: dict[str, float] = {}
    for op in work:
        mine, moved = _op_seconds(op, machine)
        compute, hbm = (compute + mine, hbm) if mine >= moved else (compute, hbm + moved)
        by_part[op.part] = by_part.get(op.part, 0.0) + max(mine, moved)
        flops += op.flops
    messages = wires.messages(setup, width)
    messages += wires.messages(again, width) if again else []
    links, network, exposed = _wires(messages, setup.mesh, machine, by_part)
    alone = compute + hbm + exposed
    bubble = _bubble(setup, by_part)
    total = max(alone + bubble, input_seconds)
    seen = exposed / (links + network) if exposed else 0.0  # what is hidden bounds nothing
    bounds = {
        "compute": compute, "hbm": hbm, "links": seen * links, "network": seen * network,
        "bubble": bubble,
        "input": input_seconds if input_seconds > alone + bubble else 0.0,
    }  # fmt: skip
    model = model_flops(setup)
    peak = machine.chip.peak_flops * machine.devices
    images = setup.rows * setup.pictures
    return StepTime(
        compute, hbm, links, network, bubble, input_seconds, exposed, total, model,
        flops * machine.devices,
        model / (total * peak) if peak and total else 0.0,
        flops * machine.devices / (total * peak) if peak and total else 0.0,
        setup.rows * setup.length / total if total else 0.0,
        images / total if total else 0.0,
        max(bounds, key=lambda k: bounds[k]), by_part, machine.missing,
    )  # fmt: skip


def _check(setup: Setup, machine: Machine) -> None:
    if isinstance(setup.config, DualConfig) and setup.mesh.stage > 1:
        raise ConfigError(
            f"config.mesh.stage={setup.mesh.stage}: the step time of a dual encoder on stages "
            "can't be planned yet"
        )
    size = math.prod(dataclasses.astuple(setup.mesh))
    if size != machine.devices:
        raise ConfigError(
            f"config.mesh has {size} devices, and {machine.name} is planned with {machine.devices}"
        )


def model_flops(setup: Setup) -> float:
    """FLOPs of a step over all devices, as MFU counts them: rows full, causal halves, no remat."""
    rows, images = setup.rows, setup.rows * setup.pictures
    found = parts.learned_of(setup)
    trained = {tower: x.own for tower, x in found.items()}
    adapted = [tower for tower, x in found.items() if x.adapted]
    patches = setup.patches / setup.pictures if setup.config.vision.packed and images else 0
    if isinstance(setup.config, DualConfig):
        factor = {t: 3 if trained.get(t) else 2 if t in adapted else 1 for t in ("vision", "text")}
        images = images if "vision" in setup.config.towers else 0
        tokens = rows * setup.length if "text" in setup.config.towers else 0
        sizes = (images, patches, tokens, float(tokens * setup.length))
        return count.towers(setup.config, factor, *sizes).total
    forward = count.forward(setup.config, rows * setup.length, setup.length, images, patches)
    return count.step(forward, trained, adapted).total


def _op_seconds(op: parts.Op, machine: Machine) -> tuple[float, float]:
    """(by FLOPs, by bytes); a rate that is not known is taken as endless."""
    if machine.rates is not None:
        return _measured(op, machine.rates, machine)
    is_attention = op.kind in calibrate.SCORES
    share = machine.shares.scores if is_attention else machine.shares.matmul
    rate = machine.chip.peak_flops * share
    band = machine.chip.hbm_bandwidth * machine.shares.hbm
    return op.flops / rate if rate else 0.0, op.bytes / band if band else 0.0


def _measured(op: parts.Op, rates: Rates, machine: Machine) -> tuple[float, float]:
    """Likewise, by rates that were measured."""
    # A CPU's matmuls were measured at rows and sizes like a step's, its memory's share with them.
    # A GPU's thin ones are bound by memory, which the measured ones, with many rows, are not.
    moved = 0.0 if machine.platform == "cpu" else op.bytes / rates.moved(op.bytes)
    if op.kind in calibrate.PRODUCTS:
        return op.flops / rates.product(machine.dtype, op.kind, op.size), moved
    if op.kind in calibrate.SCORES:
        return op.flops / rates.score(machine.dtype, op.kind, op.size), moved
    if op.kind == "softmax":
        return 0.0, op.numbers / rates.softmax
    if op.kind == "activation":
        return 0.0, op.numbers / rates.activation
    return 0.0, op.bytes / rates.moved(op.size)


def _fused(setup: Setup) -> bool:
    """Attention is a kernel that keeps no scores."""
    backend = setup.config.attention
    return setup.platform != "cpu" if backend == "auto" else backend != "xla"


def _update(setup: Setup, c: int) -> list[parts.Op]:
    """Weights cast, gradients added up, and the optimizer."""
    mesh, strategy, found = setup.mesh, setup.strategy, []
    for tower, w in parts.weights(setup.config).items():
        ways = parts.passes(setup)[tower]
        over = mesh.tensor * (mesh.stage if tower == "decoder" else 1)
        size = (w.blocks + w.other + w.experts / mesh.expert) / over
        learned = w.blocks * ways.learns + w.other * ways.other
        learned = (learned + w.experts * ways.experts / mesh.expert) / over
        split = 1 if tower in strategy.whole else _over(mesh, strategy.optimizer)
        held = learned / (1 if tower in strategy.whole else _over(mesh, strategy.gradients))
        # A layer's weights are cut out of the stack, and cast, each time they are read: a device's
        # share of them, where they are split; what is gathered is written once more.
        parted = 1 if tower in strategy.whole else _over(mesh, strategy.gathered)
        read = size * (4 + c) / parted + (c * size if parted > 1 else 0.0)
        moved = setup.microbatches * (1 + ways.back) * read
        moved += _UPDATE * learned / split
        moved += 12 * held * (setup.microbatches if setup.microbatches > 1 else 0)
        found.append(parts.Op("update", "move", 0.0, moved, 4 * size / max(1, w.layers)))
    return found


def _over(mesh: object, axes: tuple[str, ...]) -> int:
    return math.prod(getattr(mesh, axis) for axis in axes)


def _wires(
    messages: Sequence[wires.Message],
    mesh: MeshConfig,
    machine: Machine,
    by_part: Mapping[str, float],
) -> tuple[float, float, float]:
    """(over links, over the network, what of both is waited for)."""
    links = network = waited = 0.0
    behind: dict[str, float] = {}
    for message in messages:
        fast, slow = wires.seconds(message, mesh, machine)
        links, network = links + fast, network + slow
        takes = max(fast, slow)
        if message.hidden:
            behind[message.part] = behind.get(message.part, 0.0) + takes
        else:
            waited += takes
    for part, takes in behind.items():
        waited += max(0.0, takes - by_part.get(part, 0.0))
    return links, network, waited


def _bubble(setup: Setup, by_part: dict[str, float]) -> float:
    """Seconds in which a stage waits for others."""
    stages, strategy = setup.mesh.stage, setup.strategy
    if stages == 1:
        return 0.0
    busy = timetable(strategy.schedule, stages, setup.microbatches, strategy.chunks).busy
    return by_part["decoder"] * (1 / float(busy) - 1)
