"""What the planner says of a run: what it will need, and what to change where memory is short."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxvlm.build.choice import first_line, unknown
from jaxvlm.build.pairs import chunks_of
from jaxvlm.config import ConfigError, DecoderConfig, DualConfig, TextConfig, TrainConfig
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.plan import memory, search, ways
from jaxvlm.plan.absent import Rows
from jaxvlm.plan.here import machine_of
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.memory import Setup
from jaxvlm.plan.pairs import Pairing, how
from jaxvlm.plan.question import Question
from jaxvlm.plan.rough import Rough, Step
from jaxvlm.plan.time import StepTime, step_time
from jaxvlm.plan.units import gib, seconds
from jaxvlm.plan.ways import Way
from jaxvlm.types import Batch, Pairs

if TYPE_CHECKING:
    from jaxvlm.build.run import Run

_SMALL = 50_000_000
"""Parameters below which a CPU's run is counted by formula: a trace would take as long as steps."""


class Foreseen(NamedTuple):
    """What a run's step will need, said before it."""

    setup: Setup
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
        text = f"planned: {about}{gib(self.peak)} a device ({shown})"
        if self.time is None:
            return f"{text}; no step time: this machine's rates are not known (plan --calibrate)"
        mfu = f", MFU {self.time.mfu:.0%}" if self.time.mfu else ""
        return f"{text}; {seconds(self.time.total)} a step{mfu}, bound by {self.time.bound}"


def foresee(run: Run, local: Batch | Pairs) -> Foreseen | str:
    """What a run's step will need, or why that is not known.

    Args:
        run: built.
        local: rows of a batch.
    """
    if why := unknown(run.config):
        return f"not planned: {why}: only training on one mesh is known yet"
    try:
        return _counted(run, _setup(run, local))
    except ConfigError as error:
        return f"not planned: {error}"
    except Exception as error:  # a figure that can't be told must not end the run that it is of
        return f"not planned: {first_line(error)}"


def _setup(run: Run, local: Batch | Pairs) -> Setup:
    """The run's step, with the largest rows that its batches may have."""
    config, platform = run.config, run.mesh.devices.flat[0].platform
    of_pairs, rows = isinstance(local, Pairs), config.data.batch_size
    batches = [local.query, local.document] if isinstance(local, Pairs) else [local]
    shapes = run.dataset.row_shapes if of_pairs else (run.dataset.row_shapes,)
    sides = [
        Rows(max(n for n, _ in shape), _pictures(x), max(n for _, n in shape))
        for shape, x in zip(shapes, batches, strict=True)
    ]
    whole = Rows(*(max(sizes) for sizes in zip(*sides)))
    setup = Setup(
        config.network, config.mesh, config.strategy, platform, rows, *whole,
        config.optim.frozen, config.microbatches,
    )  # fmt: skip
    if not isinstance(local, Pairs):
        return setup
    documents, chunks = local.there.shape[1], chunks_of(config.grad_cache)
    pairs = Pairing(sides[0], sides[1], how(config), documents, chunks)
    return setup._replace(pairs=pairs, microbatches=pairs.parts(rows // batch_shards(run.mesh)))


def _pictures(batch: Batch) -> int:
    """Of a row."""
    return 0 if batch.image_start is None else int(batch.image_start.shape[-1])


def _counted(run: Run, setup: Setup) -> Foreseen:
    there = machine_of(list(run.mesh.devices.flat), setup.config.dtype)
    takes = step_time(setup, there)
    time = takes if takes.total and not there.missing else None
    size = sum(math.prod(x.shape) for x in run.model.shapes.values())
    if setup.platform != "cpu" or size > _SMALL:
        found = memory.estimate(setup)
        states = {name: float(n) for name, n in found.states.items()}
        return Foreseen(setup, states, dict(found.work), True, time)
    vision = setup.config.vision
    patches = setup.patches or setup.pictures * (vision.image_size // vision.patch_size) ** 2
    remat = _behind(setup).remat
    rough = Rough(run.model, setup.frozen, setup.length, patches, setup.platform)
    states = {name: float(n) for name, n in memory.states(setup, run.model).items()}
    step = Step(setup.mesh, setup.strategy, remat, setup.microbatches, setup.rows,
                vision=setup.config.vision.remat, pairs=setup.pairs)  # fmt: skip
    known = sum(n for name, n in states.items() if name != "batch")
    return Foreseen(setup, states, {"work": rough.total(step) - known}, False, time)


def _behind(setup: Setup) -> DecoderConfig | TextConfig:
    """The decoder, or a dual encoder's text tower."""
    return setup.config.text if isinstance(setup.config, DualConfig) else setup.config.decoder


def beside(foreseen: Foreseen | str, memory_peak: int, step_ms: list[float]) -> dict[str, Any]:
    """Planned figures beside those of the run: bytes of a device, seconds of a step.

    Args:
        foreseen: by :func:`foresee`.
        memory_peak: the compiler's; 0: not known.
        step_ms: of the run's lines; the first is left out, for its steps may have waited.
    """
    if isinstance(foreseen, str):
        return {}
    real = sorted(step_ms[1:] or step_ms)
    measured = real[len(real) // 2] / 1e3 if real else 0.0
    planned = foreseen.time.total if foreseen.time else 0.0
    return {
        "planned_bytes": round(foreseen.peak),
        "compiled_bytes": memory_peak,
        "planned_seconds": planned,
        "measured_seconds": measured,
    }


def beside_line(found: dict[str, Any]) -> str:
    """:func:`beside` for people."""
    sizes = [gib(found[name]) for name in ("planned_bytes", "compiled_bytes")]
    times = [seconds(found[name]) for name in ("planned_seconds", "measured_seconds")]
    sizes[1] = sizes[1] if found["compiled_bytes"] else "not known"
    times = [
        text if found[name] else "not known"
        for name, text in zip(("planned_seconds", "measured_seconds"), times)
    ]
    return (
        f"planned and real: {sizes[0]} and {sizes[1]} a device (the compiler's), "
        f"{times[0]} and {times[1]} a step"
    )


def instead(run: Run, foreseen: Foreseen | str) -> str:
    """:func:`cheapest` for a run; "" where it can't be said."""
    try:
        there = machine_of(list(run.mesh.devices.flat), run.config.network.dtype)
        return cheapest(foreseen, run.config, there)
    except Exception:  # it is told of an error, which it must not hide behind one of its own
        return ""


def cheapest(foreseen: Foreseen | str, config: TrainConfig, there: Machine) -> str:
    """What fills a device's memory, and the change that costs least time and makes room.

    Args:
        foreseen: of the run that was short of memory.
        config: of it.
        there: its machine.

    Returns:
        "" where the planner does not know the run, or the device's memory.
    """
    if isinstance(foreseen, str) or not there.chip.hbm_bytes:
        return ""
    setup = foreseen.setup
    data = dataclasses.replace(config.data, batch_size=setup.rows, max_length=setup.length)
    asked = Question(
        "this run", dataclasses.replace(config, data=data), there, setup.pictures, setup.patches,
        given=config, pairs=setup.pairs,
    )  # fmt: skip
    now = Way(
        setup.strategy.name, setup.mesh, setup.strategy, _behind(setup).remat,
        setup.microbatches, "off", setup.config.vision.remat,
    )  # fmt: skip
    if asked.pairs:
        now = now._replace(chunk=ways.chunk_of(asked.pairs, config, setup.rows // now.shards)[1])
    parts = sorted(foreseen.work.items(), key=lambda item: -item[1])[:4]
    shown = ", ".join(f"{name} {gib(n)}" for name, n in [*foreseen.states.items(), *parts])
    text = f"planned: {gib(foreseen.peak)} of {gib(there.chip.hbm_bytes)}: {shown}"
    if plan := _smaller(asked, now, foreseen.peak):
        return f"{text}. The cheapest change: {_change(asked, now, plan)}"
    if foreseen.peak <= search.capacity(asked):
        return f"{text}: planned too low. Nothing that needs less is known: {_MORE}"
    return f"{text}. Nothing else fits: {_MORE}"


_MORE = "more devices, a smaller batch or length"


def _smaller(asked: Question, now: Way, peak: float) -> search.Plan | None:
    """The fastest that fits and needs clearly less than ``peak``, on the same mesh if there is one.

    Where the plan was too low for the run, what needs as much would not do either, however fast.
    """
    known = search.Memory(asked)
    for among in (list(ways.of_mesh(asked, now.mesh, now.strategy)), None):
        for share in _LESS:

            def less(way: Way, share: float = share) -> bool:
                if way.cache != "off" or set(way.strategy.whole) - set(now.strategy.whole):
                    return False  # what is short is memory
                return known.about(way) < share * known.about(now)

            found = search.search(asked, 1, less, known, among)
            if found.best and found.best[0].peak < _LESS[0] * peak:
                return found.best[0]
    return None


_LESS = (0.95, 0.75, 0.5)
"""Shares of a run's memory, of which formulas say that a way needs less."""


def _change(asked: Question, now: Way, plan: search.Plan) -> str:
    before = set(ways.overrides(asked, now))
    changed = [line for line in ways.overrides(asked, plan.way) if line not in before]
    was = search.time_of(asked, now).total
    slower = f", {plan.time.total / was - 1:+.0%} time" if was else ""
    return f"{' '.join(changed)} ({gib(plan.peak)}{slower})"
