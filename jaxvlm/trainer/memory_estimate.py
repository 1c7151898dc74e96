"""What the planner says of a run: what it will need, and what to change where memory is short."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from jaxvlm.config import Config, ConfigError, DecoderConfig, DualConfig, TextConfig
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.planner.hardware.local_machine import machine_of
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.memory.quick_memory import QuickMemory, QuickStep
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.report.units import gib, seconds
from jaxvlm.planner.request.abstract_devices import BatchShape
from jaxvlm.planner.request.pairs import PairShapes, embedding_settings
from jaxvlm.planner.request.request import PlanRequest
from jaxvlm.planner.search import candidate_memory, candidates, search
from jaxvlm.planner.search.candidates import Candidate
from jaxvlm.planner.time.step_time import StepTime, step_time
from jaxvlm.spmd.gradcache import grad_cache_mini_batches
from jaxvlm.stores.errors import error_line
from jaxvlm.trainer.auto_parallel import unsupported
from jaxvlm.trainer.run import Run
from jaxvlm.types import Batch, Pairs

_SMALL = 50_000_000
"""Parameters below which a CPU's run is counted by formula: a trace would take as long as steps."""


class MemoryEstimate(NamedTuple):
    """What a run's step will need, said before it."""

    setup: StepSetup
    states: dict[str, float]
    """Bytes of a device."""
    work: dict[str, float]
    exact: bool
    """Memory is from the step's trace."""
    time: StepTime | None
    """``None``: rates of this machine are not known."""

    @property
    def peak(self) -> float:
        """Bytes of a device."""
        return sum(self.states.values()) + sum(self.work.values())

    def line(self) -> str:
        """For people."""
        parts = {**self.states, "work": sum(self.work.values())}
        shown = ", ".join(f"{name} {gib(n)}" for name, n in parts.items() if n)
        about = "" if self.exact else "about "
        basis = "from the step's trace" if self.exact else "by formula, up to twice off"
        text = (
            f"planned: {about}{gib(self.peak)} a device ({shown}), {basis}, for the largest "
            f"batches that the data can make ({_largest(self.setup)})"
        )
        if self.time is None:
            return f"{text}; no step time: this machine's rates are not known (plan --calibrate)"
        mfu = f", MFU {self.time.mfu:.0%}" if self.time.mfu else ""
        return f"{text}; {seconds(self.time.total)} a step{mfu}, bound by {self.time.bound}"


def _shapes(setup: StepSetup) -> list[BatchShape]:
    """The largest sequences: those of a batch, or of queries and of documents."""
    if setup.pairs:
        return [setup.pairs.query, setup.pairs.document]
    return [BatchShape(setup.length, setup.images, setup.patches)]


def _largest(setup: StepSetup) -> str:
    """The sequences that are planned for, for people."""
    each = [
        f"{shape.length} tokens" + (f" and {shape.patches} patches" if shape.patches else "")
        for shape in _shapes(setup)
    ]
    names = ("queries", "documents") if setup.pairs else (f"{setup.rows} sequences",)
    return ", ".join(f"{name} of {size}" for name, size in zip(names, each, strict=True))


def is_largest(setup: StepSetup, local: Batch | Pairs) -> bool:
    """Whether a batch is as large as those that ``setup`` plans for; smaller ones need less.

    Args:
        setup: of an estimate.
        local: rows of the batch.
    """
    batches = [local.query, local.document] if isinstance(local, Pairs) else [local]
    return all(
        batch.tokens.shape[-1] >= shape.length
        and (0 if batch.patches is None else batch.patches.shape[-2]) >= shape.patches
        for batch, shape in zip(batches, _shapes(setup), strict=True)
    )


def estimate(run: Run, local: Batch | Pairs) -> MemoryEstimate | str:
    """What a run's step will need, or why that is not known.

    Args:
        run: built.
        local: rows of a batch.
    """
    if why := unsupported(run.config):
        return f"not planned: {why} can't be planned yet"
    try:
        return _counted(run, _setup(run, local))
    except ConfigError as error:
        return f"not planned: {error}"
    except Exception as error:  # a figure that can't be told must not end the run that it is of
        return f"not planned: {error_line(error)}"


def _setup(run: Run, local: Batch | Pairs) -> StepSetup:
    """The run's step, with the largest rows that its batches may have."""
    config, platform = run.config, run.mesh.devices.flat[0].platform
    of_pairs, rows = isinstance(local, Pairs), config.data.batch_size
    batches = [local.query, local.document] if isinstance(local, Pairs) else [local]
    shapes = run.dataset.sequence_shapes if of_pairs else (run.dataset.sequence_shapes,)
    sides = [
        BatchShape(max(n for n, _ in shape), _images(x), max(n for _, n in shape))
        for shape, x in zip(shapes, batches, strict=True)
    ]
    whole = BatchShape(*(max(sizes) for sizes in zip(*sides)))
    setup = StepSetup(
        config.network, config.mesh, config.strategy, platform, rows, *whole,
        config.optim.frozen, config.microbatches, held=tuple(sorted(run.model.held.items())),
        outer=config.outer if run.training.outer else None,
    )  # fmt: skip
    if not isinstance(local, Pairs):
        return setup
    documents, mini_batches = local.valid.shape[1], grad_cache_mini_batches(config.grad_cache)
    pairs = PairShapes(sides[0], sides[1], embedding_settings(config), documents, mini_batches)
    return setup._replace(pairs=pairs, microbatches=pairs.parts(rows // batch_shards(run.mesh)))


def _images(batch: Batch) -> int:
    """Of a row."""
    return 0 if batch.image_start is None else int(batch.image_start.shape[-1])


def _counted(run: Run, setup: StepSetup) -> MemoryEstimate:
    machine = machine_of(list(run.mesh.devices.flat), setup.config.dtype)
    estimated = step_time(setup, machine)
    time = estimated if estimated.total and not machine.missing else None
    size = sum(math.prod(x.shape) for x in run.model.shapes.values())
    if setup.platform != "cpu" or size > _SMALL:
        figures = step_memory.estimate(setup)
        states = {name: float(n) for name, n in figures.states.items()}
        return MemoryEstimate(setup, states, dict(figures.work), True, time)
    vision = setup.config.vision
    patches = setup.patches or setup.images * (vision.image_size // vision.patch_size) ** 2
    remat = _decoder_or_text(setup).remat
    rough = QuickMemory(run.model, setup.frozen, setup.length, patches, setup.platform)
    states = {name: float(n) for name, n in step_memory.states(setup, run.model).items()}
    step = QuickStep(setup.mesh, setup.strategy, remat, setup.microbatches, setup.rows,
                vision=setup.config.vision.remat, pairs=setup.pairs, outer=setup.outer)  # fmt: skip
    without_batch = sum(n for name, n in states.items() if name != "batch")
    work = rough.total(step) - without_batch
    return MemoryEstimate(setup, states, {"work": work}, False, time)


def _decoder_or_text(setup: StepSetup) -> DecoderConfig | TextConfig:
    """The decoder, or a dual encoder's text tower."""
    return setup.config.text if isinstance(setup.config, DualConfig) else setup.config.decoder


def compare(
    predicted: MemoryEstimate | str, memory_peak: int, step_ms: list[float], as_large: bool = True
) -> dict[str, Any]:
    """Planned figures beside those of the run: bytes of a device, seconds of a step.

    Args:
        predicted: by :func:`estimate`.
        memory_peak: the compiler's; 0: not known.
        step_ms: of the run's lines; the first is left out, for its steps may have waited.
        as_large: whether a batch was as large as planned for.
    """
    if isinstance(predicted, str):
        return {}
    real = sorted(step_ms[1:] or step_ms)
    measured = real[len(real) // 2] / 1e3 if real else 0.0
    planned = predicted.time.total if predicted.time else 0.0
    return {
        "planned_bytes": round(predicted.peak),
        "compiled_bytes": memory_peak,
        "planned_seconds": planned,
        "measured_seconds": measured,
        "as_large": as_large,
    }


def compare_line(figures: dict[str, Any]) -> str:
    """:func:`compare` for people."""
    sizes = [gib(figures[name]) for name in ("planned_bytes", "compiled_bytes")]
    times = [seconds(figures[name]) for name in ("planned_seconds", "measured_seconds")]
    sizes[1] = sizes[1] if figures["compiled_bytes"] else "not known"
    times = [
        text if figures[name] else "not known"
        for name, text in zip(("planned_seconds", "measured_seconds"), times)
    ]
    return (
        f"planned and real: {sizes[0]} and {sizes[1]} a device (the compiler's), "
        f"{times[0]} and {times[1]} a step"
        + ("" if figures["as_large"] else "; no batch was as large as planned for")
    )


def advice(run: Run, local: Batch | Pairs) -> str:
    """:func:`cheapest` for a run that is short of memory; "" where it can't be said.

    Args:
        run: built.
        local: rows of a batch.
    """
    try:
        machine = machine_of(list(run.mesh.devices.flat), run.config.network.dtype)
        return cheapest(estimate(run, local), run.config, machine)
    except Exception:  # it explains an error, which it must not hide behind one of its own
        return ""


def cheapest(predicted: MemoryEstimate | str, config: Config, machine: Machine) -> str:
    """What fills a device's memory, and the change that costs least time and makes room.

    Args:
        predicted: of the run that was short of memory.
        config: of it.
        machine: its machine.

    Returns:
        "" where the planner does not know the run, or the device's memory.
    """
    if isinstance(predicted, str) or not machine.chip.hbm_bytes:
        return ""
    setup = predicted.setup
    data = dataclasses.replace(config.data, batch_size=setup.rows, max_length=setup.length)
    request = PlanRequest(
        "this run", dataclasses.replace(config, data=data), machine, setup.images, setup.patches,
        given=config, pairs=setup.pairs, file_dtypes=setup.held,
    )  # fmt: skip
    current = Candidate(
        setup.strategy.name, setup.mesh, setup.strategy, _decoder_or_text(setup).remat,
        setup.microbatches, "off", setup.config.vision.remat,
    )  # fmt: skip
    if request.pairs:
        local = setup.rows // current.shards
        _, sizes = candidates.mini_batches_of(request.pairs, config, local)
        current = current._replace(mini_batches=sizes)
    parts = sorted(predicted.work.items(), key=lambda item: -item[1])[:4]
    shown = ", ".join(f"{name} {gib(n)}" for name, n in [*predicted.states.items(), *parts])
    text = f"planned: {gib(predicted.peak)} of {gib(machine.chip.hbm_bytes)}: {shown}"
    if plan := _smaller(request, current, predicted.peak):
        return f"{text}. The cheapest change: {_change(request, current, plan)}"
    if predicted.peak <= search.capacity(request):
        return f"{text}: planned too low. Nothing that needs less is known: {_MORE}"
    return f"{text}. Nothing else fits: {_MORE}"


_MORE = "more devices, a smaller batch or length"


def _smaller(request: PlanRequest, current: Candidate, peak: float) -> search.Plan | None:
    """The fastest that fits and needs clearly less than ``peak``, on the same mesh if there is one.

    Where the plan was too low for the run, what needs as much would not do either, however fast.
    """
    memory = search.Memory(request)
    on_its_mesh = list(candidates.of_mesh(request, current.mesh, current.strategy))
    for of_mesh in (on_its_mesh, None):
        for share in _LESS:

            def needs_less(candidate: Candidate, share: float = share) -> bool:
                if candidate.cache != "off" or set(candidate.strategy.replicated) - set(
                    current.strategy.replicated
                ):
                    return False  # what is short is memory
                return memory.bytes_by_formula(candidate) < share * memory.bytes_by_formula(current)

            result = search.search(request, 1, needs_less, memory, of_mesh)
            if result.best and result.best[0].peak < _LESS[0] * peak:
                return result.best[0]
    return None


_LESS = (0.95, 0.75, 0.5)
"""Shares of a run's memory, of which formulas say that a candidate needs less."""


def _change(request: PlanRequest, current: Candidate, plan: search.Plan) -> str:
    before = set(candidates.overrides(request, current))
    changed = [line for line in candidates.overrides(request, plan.candidate) if line not in before]
    before_seconds = candidate_memory.time_of(request, current).total
    slower = f", {plan.time.total / before_seconds - 1:+.0%} time" if before_seconds else ""
    return f"{' '.join(changed)} ({gib(plan.peak)}{slower})"
