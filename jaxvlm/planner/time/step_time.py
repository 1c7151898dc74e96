"""Step time by a roofline model, part by part, before anything is compiled.

A matmul takes the longer of its FLOPs' and its bytes' time; all other work takes its bytes' time.
A device's operations run one after the other, so their times add up. Collectives that overlap with
a layer's matmuls cost what is not hidden; the step waits for the others. Nothing is traced, and no
devices are needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxvlm.config import ConfigError, DualConfig, MeshConfig
from jaxvlm.models import model_flops as count
from jaxvlm.nn.attention_backends import stores_scores
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.parallel.pipeline.schedule import timetable
from jaxvlm.planner.hardware import calibrate
from jaxvlm.planner.hardware.calibrate import Rates
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.request.per_object import per_object
from jaxvlm.planner.time import communication, workload

_UPDATE = 36.0
"""Bytes per parameter of AdamW and clipping: gradient read for the norm; parameter, gradient and
two moments read and three of them written; and the gradient's sum written before that.
"""


class StepTime(NamedTuple):
    """Seconds of a step on one device; tokens/s and images/s are of all devices."""

    compute: float
    """Matmuls, as far as FLOPs bound them."""
    hbm: float
    """Memory-bound work: all but matmuls, the optimizer's update, and thin matmuls."""
    links: float
    """Collectives over fast links, overlapped or not."""
    network: float
    """Collectives between hosts (GPU) or slices (TPU)."""
    bubble: float
    """Idle time of a pipeline."""
    input: float
    """Loading of batches, in parallel with the step."""
    exposed: float
    """Part of ``links`` and ``network`` that nothing hides."""
    total: float
    model_flops: float
    """Per step, all devices: see ``jaxvlm.models.model_flops``."""
    hardware_flops: float
    """FLOPs that all devices compute, recomputation and masked halves included."""
    mfu: float
    """model_flops / (total x peak); 0 if the peak is unknown."""
    hfu: float
    tokens_per_s: float
    images_per_s: float
    bound: str
    """compute | hbm | links | network | bubble | input: what takes longest."""
    parts: dict[str, float]
    """Seconds of compute and memory by part; ``update`` is the optimizer's."""
    missing: tuple[str, ...]
    """Unknown figures, which were counted as free: the real step takes longer."""


class _Run(NamedTuple):
    """A batch that goes through some of a model's towers."""

    setup: StepSetup
    """The step of this batch alone."""
    towers: tuple[str, ...] = ()
    """Towers that it goes through; () means all."""

    def within(self, part: str) -> bool:
        """Whether the batch goes through a part."""
        return not self.towers or part in self.towers


def step_time(setup: StepSetup, machine: Machine, input_seconds: float | int = 0.0) -> StepTime:
    """Estimate a step's time.

    Args:
        setup: model, mesh, strategy and batch.
        machine: with as many devices as the mesh.
        input_seconds: time in which a host loads its part of a batch, if known.

    Raises:
        ConfigError: a mesh of another size, or a model that can't be planned yet.
    """
    _check(setup, machine)
    width = 4 if setup.config.dtype == "float32" else 2
    work, messages = _step(setup, width)
    compute = hbm = flops = 0.0
    by_part: dict[str, float] = {}
    for op in work:
        busy, moved = _op_seconds(op, machine)
        compute, hbm = (compute + busy, hbm) if busy >= moved else (compute, hbm + moved)
        by_part[op.part] = by_part.get(op.part, 0.0) + max(busy, moved)
        flops += op.flops
    links, network, exposed = _communication_seconds(messages, setup.mesh, machine, by_part)
    alone = compute + hbm + exposed
    bubble = _bubble(setup, by_part)
    total = max(alone + bubble, input_seconds)
    # Hidden collectives bound nothing.
    exposed_share = exposed / (links + network) if exposed else 0.0
    bounds = {
        "compute": compute, "hbm": hbm, "links": exposed_share * links,
        "network": exposed_share * network,
        "bubble": bubble,
        "input": input_seconds if input_seconds > alone + bubble else 0.0,
    }  # fmt: skip
    model = model_flops(setup)
    peak = machine.chip.peak_flops * machine.devices
    own = [run.setup for run in _sides(setup)]
    tokens, images = (sum(x.rows * getattr(x, n) for x in own) for n in ("length", "images"))
    return StepTime(
        compute, hbm, links, network, bubble, input_seconds, exposed, total, model,
        flops * machine.devices,
        model / (total * peak) if peak and total else 0.0,
        flops * machine.devices / (total * peak) if peak and total else 0.0,
        tokens / total if total else 0.0,
        images / total if total else 0.0,
        max(bounds, key=lambda k: bounds[k]), by_part, machine.missing,
    )  # fmt: skip


def without_vision(time: StepTime, seconds: float, flops: float) -> StepTime:
    """The step without a frozen tower: less work (seconds) and fewer FLOPs of all devices."""
    total = time.total - seconds
    more = time.total / total if total else 1.0
    share = {k: getattr(time, k) * more for k in ("mfu", "hfu", "tokens_per_s", "images_per_s")}
    model, hardware = (max(0.0, n - flops) for n in (time.model_flops, time.hardware_flops))
    share["mfu"] *= model / time.model_flops
    share["hfu"] *= hardware / time.hardware_flops
    compute = max(0.0, time.compute - seconds)
    hbm = time.hbm - max(0.0, seconds - time.compute)
    parts = {name: size for name, size in time.parts.items() if name != "vision"}
    return time._replace(
        total=total, compute=compute, hbm=hbm, parts=parts, model_flops=model,
        hardware_flops=hardware, **share,
    )  # fmt: skip


def _step(
    setup: StepSetup, width: int
) -> tuple[list[workload.WorkItem], list[communication.Message]]:
    """Work and messages of one device in a step."""
    work, messages = _optimizer(setup), list[communication.Message]()
    sent: set[str] = set()
    for run in _runs(setup):
        stored = stores_scores(run.setup.config.attention, run.setup.platform)
        ops = workload.work_items(run.setup, width, not stored) + _weights(run.setup, width)
        work += [op for op in ops if run.within(op.part.removeprefix("update "))]
        new = [m for m in communication.messages(run.setup, width) if run.within(m.part)]
        messages += [m for m in new if not (m.once and m.part in sent)]
        sent.update(run.towers)
    if pairing := setup.pairs:
        own, size = setup.rows // _over(setup.mesh, BATCH_AXES), pairing.width(setup.config)
        work += workload.similarity(own * setup.rows * pairing.documents, size, pairing.products())
        tokens = pairing.document.length if pairing.products() > 1 else 1
        message = communication.ring_exchange(setup, own * pairing.documents * size * tokens)
        messages += [message] if message.axes else []
    return [_named(op) for op in work], messages


def _named(op: workload.WorkItem) -> workload.WorkItem:
    """The work without its tower's name, which that of ``update`` has."""
    return op._replace(part=op.part.split()[0]) if " " in op.part else op


def _sides(setup: StepSetup) -> list[_Run]:
    """The full batch; for pairs, queries and then documents."""
    if not setup.pairs:
        return [_Run(setup)]
    shards, runs = _over(setup.mesh, BATCH_AXES), []
    for side in setup.pairs.sides(setup.rows // shards):
        rows = {"rows": side.number * shards, **side.rows._asdict(), "microbatches": side.parts}
        runs.append(_Run(setup._replace(pairs=None, **rows), side.runs(setup.config)))
    return runs


def _runs(setup: StepSetup) -> list[_Run]:
    """The batches of a step, and for GradCache the forward passes that only make embeddings.

    Frozen towers do not run twice, see :class:`jaxvlm.train.gradcache.GradCache`.
    """
    runs = _sides(setup)
    for side in [side for side in runs if setup.pairs and side.setup.microbatches > 1]:
        trainable = workload.trainable_of(side.setup)
        inside = {tower for tower, x in trainable.items() if x.own or x.adapted}
        frozen = {"vision", "text"} - inside
        if towers := tuple(tower for tower in side.towers if tower not in frozen):
            runs.append(_Run(side.setup._replace(frozen=("*",)), towers))
    return runs


def _check(setup: StepSetup, machine: Machine) -> None:
    if (setup.pairs or isinstance(setup.config, DualConfig)) and setup.mesh.pipeline > 1:
        raise ConfigError(
            f"config.mesh.pipeline={setup.mesh.pipeline}: the step time of pairs with pipeline "
            "parallelism can't be planned yet; set it to 1"
        )
    size = math.prod(dataclasses.astuple(setup.mesh))
    if size != machine.devices:
        raise ConfigError(
            f"config.mesh has {size} devices, but the planned {machine.name} machine has "
            f"{machine.devices}"
        )


def model_flops(setup: StepSetup) -> float:
    """FLOPs of a step over all devices as MFU counts them: no padding, causal halves, no remat."""
    return sum(_model_flops(run.setup, head=not setup.pairs) for run in _sides(setup))


def _model_flops(setup: StepSetup, head: bool) -> float:
    sizes = (setup.rows, setup.length, setup.images, setup.patches)
    return _flops_of_rows(setup.config, setup.frozen, *sizes, head)


@per_object
def _flops_of_rows(
    config: workload.Network,
    frozen: tuple[str, ...],
    rows: int,
    length: int,
    images: int,
    patches: int,
    head: bool,
) -> float:
    each = patches / images if config.vision.packed and images else 0
    images = rows * images
    trainable = workload.trainable(config, frozen)
    trained = {tower: x.own for tower, x in trainable.items()}
    adapted = [tower for tower, x in trainable.items() if x.adapted]
    if isinstance(config, DualConfig):
        factor = {t: 3 if trained.get(t) else 2 if t in adapted else 1 for t in ("vision", "text")}
        images = images if "vision" in config.towers else 0
        tokens = rows * length if "text" in config.towers else 0
        sizes = (images, each, tokens, float(tokens * length))
        return count.towers(config, factor, *sizes).total
    forward = count.forward(config, rows * length, length, images, each)
    flops = count.step(forward, trained, adapted)
    return flops.total - (0.0 if head else flops.head)


def _op_seconds(op: workload.WorkItem, machine: Machine) -> tuple[float, float]:
    """Seconds by FLOPs and by bytes; an unknown rate counts as infinite."""
    if machine.rates is not None:
        return _measured(op, machine.rates, machine)
    is_attention = op.kind in calibrate.SCORES
    share = machine.shares.scores if is_attention else machine.shares.matmul
    rate = machine.chip.peak_flops * share
    band = machine.chip.hbm_bandwidth * machine.shares.hbm
    return op.flops / rate if rate else 0.0, op.bytes / band if band else 0.0


def _measured(op: workload.WorkItem, rates: Rates, machine: Machine) -> tuple[float, float]:
    """Seconds by FLOPs and by bytes, from measured rates."""
    # CPU matmuls were measured at a step's sizes, so their rates include memory traffic. Thin
    # matmuls on a GPU are memory-bound, which the measured ones, with many rows, are not.
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


def _weights(setup: StepSetup, c: int) -> list[workload.WorkItem]:
    """Work of casting weights and accumulating gradients; the part is ``update`` and the tower's
    name.
    """
    mesh, strategy, items, by_tower = setup.mesh, setup.strategy, [], workload.passes(setup)
    stored = workload.stored_bytes(setup)
    for tower, w in workload.weights(setup.config).items():
        fwd_bwd, size = by_tower[tower], _size(mesh, tower, w)
        trained = _trained_size(mesh, tower, w, fwd_bwd)
        trained /= _over(mesh, strategy.gradients)
        # A layer's weights are sliced out of the stack, and cast, each time they are read: a
        # device's shard of them, if sharded; the all-gathered ones are written once more.
        parted = 1 if tower in strategy.replicated else _over(mesh, strategy.all_gathered)
        read = size * (stored[tower] + c) / parted + (c * size if parted > 1 else 0.0)
        moved = setup.microbatches * (1 + fwd_bwd.backward) * read
        moved += 12 * trained * (setup.microbatches if setup.microbatches > 1 else 0)
        items.append(_moved(tower, moved, size, w))
    return items


def _optimizer(setup: StepSetup) -> list[workload.WorkItem]:
    """Work of the parameter updates, tower by tower."""
    mesh, strategy, items, by_tower = setup.mesh, setup.strategy, [], workload.passes(setup)
    for tower, w in workload.weights(setup.config).items():
        split = _over(mesh, strategy.optimizer)  # also of replicated towers
        moved = _UPDATE * _trained_size(mesh, tower, w, by_tower[tower]) / split
        items.append(_moved(tower, moved, _size(mesh, tower, w), w))
    return items


def _moved(tower: str, moved: float, size: float, w: workload.Weights) -> workload.WorkItem:
    return workload.WorkItem(f"update {tower}", "move", 0.0, moved, 4 * size / max(1, w.layers))


def _size(mesh: MeshConfig, tower: str, w: workload.Weights) -> float:
    """Parameters of a tower that a device's matmuls read."""
    return (w.blocks + w.other + w.experts / mesh.expert) / _cut(mesh, tower)


def _trained_size(
    mesh: MeshConfig, tower: str, w: workload.Weights, fwd_bwd: workload.ForwardBackward
) -> float:
    """Those of these parameters that are trained."""
    trained = (w.blocks * fwd_bwd.trained + w.other * fwd_bwd.other) / _cut(mesh, tower)
    return trained + w.experts * fwd_bwd.experts / mesh.expert / _cut(mesh, tower)


def _cut(mesh: MeshConfig, tower: str) -> int:
    return mesh.tensor * (mesh.pipeline if tower == "decoder" else 1)


def _over(mesh: object, axes: tuple[str, ...]) -> int:
    return math.prod(getattr(mesh, axis) for axis in axes)


def _communication_seconds(
    messages: Sequence[communication.Message],
    mesh: MeshConfig,
    machine: Machine,
    by_part: Mapping[str, float],
) -> tuple[float, float, float]:
    """Seconds over links and over the network, and the seconds of both that are not hidden."""
    links = network = waited = 0.0
    hidden: dict[str, float] = {}
    for message in messages:
        fast, slow = communication.seconds(message, mesh, machine)
        links, network = links + fast, network + slow
        longest = max(fast, slow)
        if message.hidden:
            hidden[message.part] = hidden.get(message.part, 0.0) + longest
        else:
            waited += longest
    for part, longest in hidden.items():
        waited += max(0.0, longest - by_part.get(part, 0.0))
    return links, network, waited


def _bubble(setup: StepSetup, by_part: dict[str, float]) -> float:
    """Seconds in which a pipeline stage is idle."""
    stages, strategy = setup.mesh.pipeline, setup.strategy
    if stages == 1:
        return 0.0
    busy = timetable(strategy.schedule, stages, setup.microbatches, strategy.virtual_stages).busy
    return by_part["decoder"] * (1 / float(busy) - 1)
