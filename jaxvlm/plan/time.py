"""How long a train step takes, before anything is compiled: a roofline, part by part.

A matmul takes as long as its FLOPs or its bytes do, whichever is more; all else takes its bytes.
What a device does runs one after the other, so these add up. Collectives that a layer's matmuls
can hide behind cost what is left over; the others are waited for. No tracing, no devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxvlm.config import ConfigError, DualConfig, MeshConfig
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.parallel.schedule import timetable
from jaxvlm.plan import calibrate, count, parts, wires
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


class _Run(NamedTuple):
    """Rows that go through a model together, and what of it they go through."""

    setup: Setup
    """Of these rows alone."""
    towers: tuple[str, ...] = ()
    """(): all."""

    def within(self, part: str) -> bool:
        """Whether a part is gone through."""
        return not self.towers or part in self.towers


def step_time(setup: Setup, machine: Machine, input_seconds: float | int = 0.0) -> StepTime:
    """How long a step takes.

    Args:
        setup: model, mesh, strategy and batch.
        machine: of as many devices as the mesh.
        input_seconds: that a host takes to make its part of a batch, where that is known.

    Raises:
        ConfigError: a mesh of another size, or a model that can't be planned yet.
    """
    _check(setup, machine)
    width = 4 if setup.config.dtype == "float32" else 2
    work, messages = _step(setup, width)
    compute = hbm = flops = 0.0
    by_part: dict[str, float] = {}
    for op in work:
        mine, moved = _op_seconds(op, machine)
        compute, hbm = (compute + mine, hbm) if mine >= moved else (compute, hbm + moved)
        by_part[op.part] = by_part.get(op.part, 0.0) + max(mine, moved)
        flops += op.flops
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
    own = [run.setup for run in _sides(setup)]
    tokens, images = (sum(x.rows * getattr(x, n) for x in own) for n in ("length", "pictures"))
    return StepTime(
        compute, hbm, links, network, bubble, input_seconds, exposed, total, model,
        flops * machine.devices,
        model / (total * peak) if peak and total else 0.0,
        flops * machine.devices / (total * peak) if peak and total else 0.0,
        tokens / total if total else 0.0,
        images / total if total else 0.0,
        max(bounds, key=lambda k: bounds[k]), by_part, machine.missing,
    )  # fmt: skip


def shorter(found: StepTime, seconds: float, flops: float) -> StepTime:
    """A step without a frozen tower: so many seconds of work and FLOPs of all devices less."""
    total = found.total - seconds
    more = found.total / total if total else 1.0
    share = {k: getattr(found, k) * more for k in ("mfu", "hfu", "tokens_per_s", "pictures_per_s")}
    model, hardware = (max(0.0, n - flops) for n in (found.model_flops, found.hardware_flops))
    share["mfu"] *= model / found.model_flops
    share["hfu"] *= hardware / found.hardware_flops
    compute = max(0.0, found.compute - seconds)
    hbm = found.hbm - max(0.0, seconds - found.compute)
    parts = {name: size for name, size in found.parts.items() if name != "vision"}
    return found._replace(
        total=total, compute=compute, hbm=hbm, parts=parts, model_flops=model,
        hardware_flops=hardware, **share,
    )  # fmt: skip


def _step(setup: Setup, width: int) -> tuple[list[parts.Op], list[wires.Message]]:
    """What a device does in a step, and what it sends."""
    work, messages = _optimizer(setup), list[wires.Message]()
    sent: set[str] = set()
    for run in _runs(setup):
        ops = [*parts.ops(run.setup, width, _fused(run.setup)), *_weights(run.setup, width)]
        work += [op for op in ops if run.within(op.part.removeprefix("update "))]
        new = [m for m in wires.messages(run.setup, width) if run.within(m.part)]
        messages += [m for m in new if not (m.once and m.part in sent)]
        sent.update(run.towers)
    if pairing := setup.pairs:
        own, size = setup.rows // _over(setup.mesh, BATCH_AXES), pairing.width(setup.config)
        work += parts.likeness(own * setup.rows * pairing.documents, size, pairing.products())
        tokens = pairing.document.length if pairing.products() > 1 else 1
        message = wires.rounds(setup, own * pairing.documents * size * tokens)
        messages += [message] if message.axes else []
    return [op._replace(part=op.part.split()[0]) for op in work], messages


def _sides(setup: Setup) -> list[_Run]:
    """All rows at once; of pairs, queries and then documents."""
    if not setup.pairs:
        return [_Run(setup)]
    shards, made = _over(setup.mesh, BATCH_AXES), []
    for side in setup.pairs.sides(setup.rows // shards):
        rows = {"rows": side.number * shards, **side.rows._asdict(), "microbatches": side.parts}
        made.append(_Run(setup._replace(pairs=None, **rows), side.runs(setup.config)))
    return made


def _runs(setup: Setup) -> list[_Run]:
    """The same, and vectors of chunks, which are made once more before any gradient is.

    What is frozen is not run again, see :class:`jaxvlm.train.pairs.Paired`.
    """
    made = _sides(setup)
    for side in [side for side in made if setup.pairs and side.setup.microbatches > 1]:
        found = parts.learned_of(side.setup)
        inside = {tower for tower, x in found.items() if x.own or x.adapted}
        still = {"vision", "text"} - inside
        if towers := tuple(tower for tower in side.towers if tower not in still):
            made.append(_Run(side.setup._replace(frozen=("*",)), towers))
    return made


def _check(setup: Setup, machine: Machine) -> None:
    if (setup.pairs or isinstance(setup.config, DualConfig)) and setup.mesh.stage > 1:
        raise ConfigError(
            f"config.mesh.stage={setup.mesh.stage}: the step time of pairs on stages can't be "
            "planned yet"
        )
    size = math.prod(dataclasses.astuple(setup.mesh))
    if size != machine.devices:
        raise ConfigError(
            f"config.mesh has {size} devices, and {machine.name} is planned with {machine.devices}"
        )


def model_flops(setup: Setup) -> float:
    """FLOPs of a step over all devices, as MFU counts them: rows full, causal halves, no remat."""
    return sum(_model_flops(run.setup, head=not setup.pairs) for run in _sides(setup))


def _model_flops(setup: Setup, head: bool) -> float:
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
    made = count.step(forward, trained, adapted)
    return made.total - (0.0 if head else made.head)


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


def _weights(setup: Setup, c: int) -> list[parts.Op]:
    """Weights cast, and gradients added up; of a tower, ``update`` and its name."""
    mesh, strategy, found, gone = setup.mesh, setup.strategy, [], parts.passes(setup)
    for tower, w in parts.weights(setup.config).items():
        ways, size = gone[tower], _size(mesh, tower, w)
        held = _learned(mesh, tower, w, ways)
        held /= _over(mesh, strategy.gradients)
        # A layer's weights are cut out of the stack, and cast, each time they are read: a device's
        # share of them, where they are split; what is gathered is written once more.
        parted = 1 if tower in strategy.whole else _over(mesh, strategy.gathered)
        read = size * (4 + c) / parted + (c * size if parted > 1 else 0.0)
        moved = setup.microbatches * (1 + ways.back) * read
        moved += 12 * held * (setup.microbatches if setup.microbatches > 1 else 0)
        found.append(_moved(tower, moved, size, w))
    return found


def _optimizer(setup: Setup) -> list[parts.Op]:
    """What updates parameters, tower by tower."""
    mesh, strategy, found, gone = setup.mesh, setup.strategy, [], parts.passes(setup)
    for tower, w in parts.weights(setup.config).items():
        split = _over(mesh, strategy.optimizer)  # of whole towers too
        moved = _UPDATE * _learned(mesh, tower, w, gone[tower]) / split
        found.append(_moved(tower, moved, _size(mesh, tower, w), w))
    return found


def _moved(tower: str, moved: float, size: float, w: parts.Weights) -> parts.Op:
    return parts.Op(f"update {tower}", "move", 0.0, moved, 4 * size / max(1, w.layers))


def _size(mesh: MeshConfig, tower: str, w: parts.Weights) -> float:
    """Parameters of a tower that a device's matmuls read."""
    return (w.blocks + w.other + w.experts / mesh.expert) / _cut(mesh, tower)


def _learned(mesh: MeshConfig, tower: str, w: parts.Weights, ways: parts.Passes) -> float:
    """Those of them that learn."""
    learned = (w.blocks * ways.learns + w.other * ways.other) / _cut(mesh, tower)
    return learned + w.experts * ways.experts / mesh.expert / _cut(mesh, tower)


def _cut(mesh: MeshConfig, tower: str) -> int:
    return mesh.tensor * (mesh.stage if tower == "decoder" else 1)


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
