"""Which way to train a model on a machine is fastest among those that fit, and why others lost.

All ways are counted roughly (``rough``) and timed (``time``), which takes microseconds; the fastest
are then counted from their step's trace (``memory``), and what is found corrects what was thought
of the rest.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import ConfigError, DualConfig, MeshConfig
from jaxvlm.models.vlm import DTYPES
from jaxvlm.nn.grouped import has_kernel
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.plan import count, memory, placement
from jaxvlm.plan.question import Question
from jaxvlm.plan.rough import Rough, Step, refused
from jaxvlm.plan.time import StepTime, shorter, step_time
from jaxvlm.plan.units import gib
from jaxvlm.plan.ways import Way, can_keep, meshes, pairs_of, setup_of, ways

MARGIN = 0.08
"""Of a device's memory that is left free: fragments, the driver's and the compiler's own."""
_TRACES = 6
"""Of steps, at most; none is made once a way fits. Ways that differ in mesh share one."""
_LOOKS = 12
_LAST = 8
"""Traced all the same where none fits by then: those that need least by the formula."""
_FAR = 1.5
"""Where two traces, one behind the other, say that ways need so many times what there is, those
that the formula puts behind them are not traced: it is not so far off."""
_SLACK = 1.3
"""Of what is thought of a way's memory before a trace, so that none that fits is passed over. Not
where devices share experts: most of the memory is copies of tokens then, and the formula nearer to
a trace (from 6 % below to 10 % above) than that is to compilers at worst."""
_WORTH = 0.995
"""Of a step's time, at most, that a way takes with the tower's parameters whole for these to be."""
CARE = 1.15
"""A way whose memory is by formula alone fits if so many times as much does."""


class Plan(NamedTuple):
    """A way to train, and what it needs."""

    way: Way
    states: dict[str, float]
    """Bytes of a device between steps."""
    work: dict[str, float]
    """Besides, at a step's worst moment."""
    time: StepTime
    traced: bool
    """``work`` is from the step's trace; else from formulas."""

    @property
    def peak(self) -> float:
        """Bytes of a device."""
        return sum(self.states.values()) + sum(self.work.values())

    def within(self, limit: float | int) -> bool:
        """Whether it fits; 0: no limit is known."""
        return not limit or self.peak * (1.0 if self.traced else CARE) <= limit


class Lost(NamedTuple):
    """A family of strategies, or a tower's placement, that is not among the best, and why."""

    family: str
    why: str
    """memory | slower | dims | batch | unknown"""
    text: str
    """For people."""


class Found(NamedTuple):
    """What a search came to."""

    question: Question
    known: Memory
    best: list[Plan]
    """The fastest that fit, a mesh of a strategy once; none where none fits."""
    nearest: Plan | None
    """Of those that don't fit, the one that needs least; where none fits."""
    lost: list[Lost]
    seen: list[Seen]
    """All that were compared."""
    notes: list[str]


class Seen(NamedTuple):
    """A way that was compared."""

    way: Way
    rough: float
    """Bytes of a device, by formula."""


class Memory:
    """Bytes of ways to train one model: rough at once, from a trace where it is asked for.

    Args:
        question: what is planned.
    """

    def __init__(self, question: Question):
        self.question, config = question, question.config
        alone = Way("single", MeshConfig(data=1), PRESETS["single"], "none")
        self.one = memory.model_of(setup_of(question, alone))
        self.rough = Rough(
            self.one, config.optim.frozen, question.length,
            _patches(question), question.machine.platform,
        )  # fmt: skip
        self.learned: dict[tuple[Any, ...], _Learned] = {}
        self.traces: set[tuple[Any, ...]] = set()
        self.looks, self.settled = 0, False
        self.unknown: dict[str, None] = {}  # why ways were not traced, in order
        self.times: dict[Way, StepTime] = {}

    def of(self, question: Question) -> Memory:
        """Of the same model and what is trained of it, on another machine or batch."""
        other = copy.copy(self)
        other.question, other.looks, other.times = question, _LOOKS, {}
        other.unknown = {}
        return other

    def time(self, way: Way) -> StepTime:
        """:func:`time_of`, made once."""
        if way not in self.times:
            self.times[way] = time_of(self.question, way)
        return self.times[way]

    def about(self, way: Way) -> float:
        """Bytes, by formula."""
        found = self.learned.get(_kind(way), _Learned())
        total = self.rough.total(_step(self.question, way), found.factor, found.more)
        return total + kept(self.question, way)

    def allows(self, way: Way) -> bool:
        """Whether the way may still be traced."""
        more = not self.settled and len(self.traces) < _TRACES
        return self.looks < _LOOKS and (more or self._trace(way) in self.traces)

    def _trace(self, way: Way) -> tuple[Any, ...]:
        """What ways that share a trace have in common."""
        key: tuple[Any, ...] = way.remat, way.vision, way.microbatches, way.mesh.expert
        if self.question.pairs:  # these are traced with a device's own rows
            key = *key, way.chunk, self.question.rows // way.shards
        return key

    def plan(self, way: Way, time: StepTime, always: bool = False) -> Plan:
        """The way's memory, traced where that is still allowed, or ``always``.

        Raises:
            ConfigError: dims that the mesh does not divide.
        """
        setup, extra = setup_of(self.question, way), kept(self.question, way)
        if always or self.allows(way):
            if why := _untraceable(setup):
                self.unknown[why] = None
            else:
                made = memory.estimate(setup)
                self.traces.add(self._trace(way))
                self.looks += 1
                self._learn(way, made.peak)
                states = {name: float(size) for name, size in made.states.items()}
                return Plan(way, _with_tokens(states, extra), dict(made.work), time, True)
        found = memory.states(setup, memory.model_of(setup))
        states = {name: float(size) for name, size in found.items()}
        work = self.about(way) - extra - sum(n for name, n in states.items() if name != "batch")
        return Plan(way, _with_tokens(states, extra), {"work": max(0.0, work)}, time, False)

    def _learn(self, way: Way, peak: float) -> None:
        """Correct what is thought of the same remat's work."""
        step = _step(self.question, way)
        work, rest = self.rough.work(step), self.rough.total(step, 0.0)
        known = self.learned.get(_kind(way), _Learned())
        self.learned[_kind(way)] = known.corrected((way.preset, way.mesh), work, peak - rest)


class _Learned(NamedTuple):
    """What traces said of a remat's work: the formula's, times and plus."""

    factor: float = 1.0
    more: float = 0.0
    """Bytes that do not grow with the rows."""
    last: tuple[Any, float, float] | None = None
    """Mesh, the formula's work there, and the trace's."""

    def corrected(self, mesh: Any, work: float, real: float) -> _Learned:
        """With another trace's word."""
        factor, more = max(0.05, (real - self.more) / work), self.more
        if self.last is not None and self.last[0] == mesh and abs(self.last[1] / work - 1) > 0.01:
            # Two of one mesh, whose rows alone differ: what grows with them is told from the rest.
            line = (real - self.last[2]) / (work - self.last[1])
            if line > 0 and real > line * work:
                factor, more = line, real - line * work
        return _Learned(factor, more, (mesh, work, real))


def _kind(way: Way) -> tuple[Any, ...]:
    """What the formula errs in alike: of experts it need not err as of others."""
    return way.remat, way.mesh.expert > 1, way.mesh.tensor > 1, any(way.chunk)


def _step(question: Question, way: Way) -> Step:
    return Step(
        way.mesh, way.strategy, way.remat, way.microbatches, question.rows, way.vision,
        pairs_of(question, way),
    )  # fmt: skip


def _with_tokens(states: dict[str, float], kept: float) -> dict[str, float]:
    return states | ({"visual tokens": kept} if kept else {})


def _untraceable(setup: memory.Setup) -> str:
    """Why a way's step can't be traced; "" where it can."""
    if _too_many(setup):
        return "a trace with this many tokens' experts overflows indices"
    try:
        memory.check(setup)
    except ConfigError as error:
        return str(error).split(":")[0]
    return ""


def _too_many(setup: memory.Setup) -> bool:
    """Whether the copies of tokens that a trace sends to experts can't be numbered in 32 bits."""
    if isinstance(setup.config, DualConfig):
        return False
    chosen = setup.config.decoder.experts_per_token * setup.length
    return 101 * setup.mesh.expert * chosen >= 2**31


def _patches(question: Question) -> int:
    vision = question.config.network.vision
    if not question.pictures:
        return 0
    each = (vision.image_size // vision.patch_size) ** 2
    return question.patches if vision.packed else question.pictures * each


def kept(question: Question, way: Way) -> float:
    """Bytes of a device of the visual tokens that a cache keeps."""
    if way.cache == "off":
        return 0.0
    vision = question.config.model.vision
    features = _patches(question) * vision.width * max(1, len(vision.feature_layers))
    size = np.dtype(DTYPES[question.config.model.dtype]).itemsize
    return float(question.samples * features * size / way.shards)


def capacity(question: Question) -> float:
    """Bytes of a device that a plan may use; 0: not known."""
    return question.machine.chip.hbm_bytes * (1 - MARGIN)


def time_of(question: Question, way: Way) -> StepTime:
    """How long the way's step takes; a tower whose tokens are kept takes none."""
    setup = setup_of(question, way)
    found = step_time(setup, question.machine)
    spared = found.parts.get("vision", 0.0) if way.cache != "off" else 0.0
    if not spared or isinstance(setup.config, DualConfig):
        return found
    pictures = setup.rows * setup.pictures
    each = setup.patches / setup.pictures if setup.config.vision.packed else 0
    tokens = setup.rows * setup.length
    once = count.forward(setup.config, tokens, setup.length, pictures, each)
    return shorter(found, spared, once.vision)


def search(
    question: Question,
    top: int = 5,
    asked: Callable[[Way], bool] = lambda way: True,
    known: Memory | None = None,
    among: Iterable[Way] | None = None,
) -> Found:
    """The fastest ways that fit.

    Args:
        question: model, batch and machine.
        top: how many, at most.
        asked: whether a way may be among them.
        known: what is known of the model's memory already.
        among: ways; ``None``: all that make sense.
    """
    known = known or Memory(question)
    limit, lost = capacity(question), dict[str, Lost]()
    every = possible(known, lost, asked) if among is None else filter(asked, among)
    seen = [Seen(way, known.about(way)) for way in every]
    timed = {s: known.time(s.way) for s in seen if not limit or s.rough <= _SLACK * limit}
    best = _walk(known, timed, limit, top, lost) or _least(known, seen, limit, top)
    nearest = _nearest(known, seen) if seen and not best else None
    if among is None:
        placed = [_placed(known, plan, limit, asked) for plan in best]
        best = sorted(placed, key=lambda plan: plan.time.total)
    _explain(known, seen, timed, best, limit, lost)
    if among is None and best and (found := _apart(known, best[0])):
        lost[found.family] = found
    return Found(question, known, best, nearest, list(lost.values()), seen, _notes(known, timed))


def _notes(known: Memory, timed: Mapping[Seen, StepTime]) -> list[str]:
    """What nobody said, and what the figures are not."""
    question, platform = known.question, known.question.machine.platform
    notes = list(question.assumed)
    missing = sorted({name for time in timed.values() for name in time.missing})
    notes += [f"not known, taken as free: {name}" for name in missing]
    if platform == "gpu":
        notes.append(
            "memory is with XLA's attention, which keeps scores; with cuDNN's, long rows need less"
        )
    decoder = getattr(question.config.network, "decoder", None)
    if platform == "gpu" and decoder and not has_kernel(decoder.expert_matmul, platform):
        notes.append(
            "expert_matmul='xla' on GPUs: experts over an axis need up to four times what is said, "
            "for their rows are written once for each; --verify"
        )
    notes += [f"some ways' work by formula, not by its trace: {why}" for why in known.unknown]
    if question.pairs:
        notes.append(
            "of pairs, ways over context, experts or stages are not planned, nor kept tokens"
        )
    if can_keep(question):
        if not question.samples:
            notes.append("visual tokens are made each step; --samples=N says what keeping them is")
        else:
            notes.append(
                "cache=strict: all pictures' tokens, on the devices; the first epoch, which makes "
                "them, is in no figure"
            )
    cache = question.config.cache
    for name in ("pictures", "chunk"):
        if getattr(cache, name):
            notes.append(f"config.cache.{name} is planned as if it were not set")
    return notes


def possible(known: Memory, lost: dict[str, Lost], asked: Callable[[Way], bool]) -> Iterable[Way]:
    """Ways whose dims and batch the mesh divides; the others' families get a reason."""
    question, good = known.question, dict[tuple[Any, ...], bool]()
    seen: set[str] = set()
    for preset, mesh in meshes(question):
        family = Way(preset, mesh, PRESETS[preset], "none").family
        why = refused(known.one, mesh, PRESETS[preset].params)
        why = why or refused(known.one, mesh, PRESETS[preset].optimizer)
        shards = mesh.data * mesh.fsdp * mesh.expert
        good[preset, mesh] = not why
        if why:
            lost.setdefault(family, Lost(family, "dims", f"dims do not divide: {why}"))
        elif question.rows % shards:
            text = f"{question.rows} rows are not divisible by {shards} shards"
            lost.setdefault(family, Lost(family, "batch", text))
    for way in ways(question):
        if way.cache != "off" and not question.samples:
            continue  # nobody knows how many tokens there would be
        if good[way.preset, way.mesh] and asked(way):
            seen.add(way.family)
            lost.pop(way.family, None)
            yield way


def _walk(
    known: Memory,
    timed: dict[Seen, StepTime],
    limit: float,
    top: int,
    lost: dict[str, Lost],
) -> list[Plan]:
    """The first that fit, each strategy on a mesh once."""
    best: list[Plan] = []
    done: set[tuple[Any, ...]] = set()
    for s in sorted(timed, key=lambda s: (timed[s].total, s.rough)):
        key = s.way.preset, s.way.mesh
        if len(best) == top or key in done:
            continue
        is_known = _kind(s.way) in known.learned or s.way.mesh.expert > 1
        slack = 1.0 if is_known else _SLACK
        slack = slack if known.allows(s.way) else 1 / CARE
        if limit and known.about(s.way) > limit * slack:
            continue
        try:
            plan = known.plan(s.way, timed[s])
        except ConfigError as error:
            lost.setdefault(s.way.family, Lost(s.way.family, "dims", str(error)))
            continue
        if plan.within(limit):
            best.append(plan)
            known.settled |= plan.traced
            done.add(key)
    return best


def _least(known: Memory, seen: list[Seen], limit: float, top: int) -> list[Plan]:
    """Of the ways that need least by the formula, those that fit by their own traces.

    What traces correct in the formula is of their meshes, and may be wrong for others: that nothing
    fits is not said by it alone, but where they are far off; see ``_FAR``.
    """
    best, far = [], 0
    for s in sorted(seen, key=lambda s: s.rough)[:_LAST]:
        with contextlib.suppress(ConfigError):
            plan = known.plan(s.way, known.time(s.way), always=True)
            if plan.traced:
                far = far + 1 if plan.peak > _FAR * limit else 0
            if plan.within(limit):
                best.append(plan)
            elif far == 2:
                break
    return sorted(best, key=lambda plan: plan.time.total)[:top]


def _placed(known: Memory, plan: Plan, limit: float, asked: Callable[[Way], bool]) -> Plan:
    """The plan with its tower's parameters whole on every device, where that is faster and fits."""
    way = placement.with_whole_tower(plan.way)
    if way is None or not asked(way) or not plan.time.parts.get("vision"):
        return plan  # it does not run, its tokens are kept, or rates are not known
    time = known.time(way)
    if time.total > _WORTH * plan.time.total:
        return plan
    made = known.plan(way, time, always=plan.traced)  # they share a trace
    return made if made.within(limit) else plan


def _apart(known: Memory, first: Plan) -> Lost | None:
    """What a tower on devices of its own would take."""
    setup = setup_of(known.question, first.way)
    found = placement.apart(setup, first.time, known.question.machine)
    if found is None or first.way.cache != "off":
        return None
    slower = found[1] / first.time.total
    text = (
        f"about {slower:.2f} x the step time of the first, with {found[0]} of them "
        "(tower.devices=-1), by the work of each side alone: by that it is never ahead; memory is "
        "not counted"
    )
    return Lost("tower on devices of its own", "slower", text)


def _nearest(known: Memory, seen: list[Seen]) -> Plan | None:
    """What needs least of all."""
    for s in sorted(seen, key=lambda s: known.about(s.way))[:3]:
        try:
            return known.plan(s.way, known.time(s.way))
        except ConfigError:
            continue
    return None


def _explain(
    known: Memory,
    seen: list[Seen],
    timed: dict[Seen, StepTime],
    best: list[Plan],
    limit: float,
    lost: dict[str, Lost],
) -> None:
    """Why each family that is not among the best is not."""
    won = {plan.way.family for plan in best}
    families: dict[str, list[Seen]] = collections.defaultdict(list)
    for s in seen:
        families[s.way.family].append(s)
    for family, own in families.items():
        if family in won:
            lost.pop(family, None)
            continue
        if family in lost:
            continue
        fits = [s for s in own if s in timed and (not limit or known.about(s.way) <= limit)]
        if fits and best:
            s = min(fits, key=lambda s: timed[s].total)
            text = _slower(s, timed[s], best[0])
            lost[family] = Lost(family, "slower", f"{text} ({s.way.text()})")
        else:
            s = min(own, key=lambda s: known.about(s.way))
            over = known.about(s.way) - limit
            text = f"does not fit by {gib(over)} even" if over > 0 else "is too near to the limit"
            lost[family] = Lost(family, "memory", f"{text} with {s.way.text()}")


def _slower(s: Seen, time: StepTime, first: Plan) -> str:
    if not first.time.total:
        return f"this machine's rates are not known, and it needs {gib(s.rough)}"
    slower = time.total / first.time.total
    return f"{slower:.2f} x the step time of the first, most of it {time.bound}"
