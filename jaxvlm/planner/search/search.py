"""Search for the fastest candidate that fits a machine, and explain why the others lost.

The memory of all candidates is first estimated by formula (``quick_memory``) and their time by a
roofline (``time``), which takes microseconds; the fastest are then traced (``step_memory``), and
the traces correct the formula for the rest.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError
from jaxvlm.nn.grouped_matmul import kernel_of
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.memory.quick_memory import refused
from jaxvlm.planner.report.units import gib
from jaxvlm.planner.request.request import PlanRequest, undivided
from jaxvlm.planner.search import encoder_placement
from jaxvlm.planner.search.candidate_memory import CARE, Memory, Plan, capacity, kind
from jaxvlm.planner.search.candidates import (
    Candidate,
    can_cache,
    candidates,
    meshes,
    setup_of,
    shards_of,
)
from jaxvlm.planner.time.step_time import StepTime

_LAST = 8
"""Number of candidates, those that need least by the formula, that are traced anyway if none fits.
"""
_FAR = 1.5
"""If two traces in a row need this many times the memory there is, the remaining candidates, which
need more by the formula, are not traced: its error is smaller than that.
"""
_SLACK = 1.3
"""Factor on the limit for untraced candidates, so that none that fits is skipped. It is not used
where devices share experts: most of the memory is copies of tokens then, and the formula is closer
to a trace (from 6 % below to 10 % above) than a trace is to compilers at worst.
"""
_WORTH = 0.995
"""Highest ratio of step times at which the vision encoder's parameters are replicated."""


class Rejected(NamedTuple):
    """A strategy family, or an encoder placement, that is not among the best, and why."""

    family: str
    why: str
    """memory | slower | dims | batch | unknown"""
    text: str
    """Explanation for people."""


class SearchResult(NamedTuple):
    """Result of a search."""

    request: PlanRequest
    memory: Memory
    best: list[Plan]
    """The fastest candidates that fit, one per strategy and mesh; empty if none fits."""
    nearest: Plan | None
    """If none fits, the candidate that needs least."""
    rejected: list[Rejected]
    considered: list[Considered]
    """All candidates that were compared."""
    notes: list[str]


class Considered(NamedTuple):
    """A candidate that was compared."""

    candidate: Candidate
    quick_memory: float
    """Bytes on a device, by formula."""


def search(
    request: PlanRequest,
    top: int = 5,
    accepts: Callable[[Candidate], bool] = lambda candidate: True,
    memory: Memory | None = None,
    among: Iterable[Candidate] | None = None,
) -> SearchResult:
    """Find the fastest candidates that fit.

    Args:
        request: model, batch and machine.
        top: maximum number of candidates.
        accepts: whether a candidate may be among them.
        memory: the model's memory from an earlier search.
        among: candidates to choose from; ``None``: all that make sense.
    """
    memory = memory or Memory(request)
    limit, rejected = capacity(request), dict[str, Rejected]()
    every = possible(memory, rejected, accepts) if among is None else filter(accepts, among)
    considered = [Considered(candidate, memory.bytes_by_formula(candidate)) for candidate in every]
    near = [s for s in considered if not limit or s.quick_memory <= _SLACK * limit]
    timed = {s: memory.time(s.candidate) for s in near}
    best = _fastest(memory, timed, limit, top, rejected)
    best = best or _smallest(memory, considered, limit, top)
    nearest = _nearest(memory, considered) if considered and not best else None
    if among is None:
        plans = [_with_replicated_encoder(memory, plan, limit, accepts) for plan in best]
        best = sorted(plans, key=lambda plan: plan.time.total)
    _explain(memory, considered, timed, best, limit, rejected)
    if among is None and best and (placement := _disaggregated(memory, best[0])):
        rejected[placement.family] = placement
    why, notes = list(rejected.values()), _notes(memory, timed)
    return SearchResult(request, memory, best, nearest, why, considered, notes)


def _notes(memory: Memory, timed: Mapping[Considered, StepTime]) -> list[str]:
    """Assumptions and limits of the figures."""
    request, platform = memory.request, memory.request.machine.platform
    notes = list(request.assumed)
    missing = sorted({name for time in timed.values() for name in time.missing})
    notes += [f"unknown, counted as free: {name}" for name in missing]
    decoder = getattr(request.config.network, "decoder", None)
    if platform == "gpu" and decoder and not kernel_of(decoder.expert_matmul, platform):
        notes.append(
            "expert_matmul='xla' on GPUs: with expert parallelism, up to four times this memory is "
            "needed, since tokens are copied once per expert; check with --verify"
        )
    traced = "memory of some candidates is by formula, not from a trace"
    notes += [f"{traced}: {why}" for why in memory.unknown]
    if request.pairs:
        notes.append(
            "for pairs, context, expert and pipeline parallelism and cached visual tokens are not "
            "planned"
        )
    if can_cache(request):
        if not request.samples:
            notes.append(
                "visual tokens are recomputed each step; --samples=N compares caching them"
            )
        else:
            notes.append(
                "cache=strict: all images' visual tokens are cached on the devices; the first "
                "epoch, which computes them, is not counted"
            )
    if request.config.mesh.island > 1:
        notes.append(
            f"an outer update's time is spread over config.outer.steps={request.config.outer.steps}"
            " steps; its temporaries, up to twice the largest fragment, are not counted"
        )
    cache = request.config.cache
    for name in ("max_images", "encode_batch"):
        if getattr(cache, name):
            notes.append(f"config.cache.{name} is ignored by the plan")
    return notes


def possible(
    memory: Memory, rejected: dict[str, Rejected], accepts: Callable[[Candidate], bool]
) -> Iterable[Candidate]:
    """Candidates whose dims and batch the mesh divides; other families get a reason in
    ``rejected``.
    """
    request, divisible = memory.request, dict[tuple[Any, ...], bool]()
    families: set[str] = set()
    if why := undivided(request.config, request.machine.devices):
        rejected["islands"] = Rejected("islands", "dims", why)
    for preset, mesh in meshes(request):
        family = Candidate(preset, mesh, PRESETS[preset], "none").family
        why = refused(memory.single_device_model, mesh, PRESETS[preset].params)
        why = why or refused(memory.single_device_model, mesh, PRESETS[preset].optimizer)
        divisible[preset, mesh] = not why
        if why:
            rejected.setdefault(family, Rejected(family, "dims", f"dims do not divide: {why}"))
        elif request.rows % shards_of(mesh):
            text = f"a batch of {request.rows} is not divisible by {shards_of(mesh)} shards"
            rejected.setdefault(family, Rejected(family, "batch", text))
    for candidate in candidates(request):
        if candidate.cache != "off" and not request.samples:
            continue  # the number of cached tokens is unknown
        if divisible[candidate.preset, candidate.mesh] and accepts(candidate):
            families.add(candidate.family)
            rejected.pop(candidate.family, None)
            yield candidate


def _fastest(
    memory: Memory,
    timed: dict[Considered, StepTime],
    limit: float,
    top: int,
    rejected: dict[str, Rejected],
) -> list[Plan]:
    """The fastest candidates that fit, one per strategy and mesh."""
    best: list[Plan] = []
    done: set[tuple[Any, ...]] = set()
    for s in sorted(timed, key=lambda s: (timed[s].total, s.quick_memory)):
        key = s.candidate.preset, s.candidate.mesh
        if len(best) == top or key in done:
            continue
        is_known = kind(s.candidate) in memory.corrections or s.candidate.mesh.expert > 1
        slack = 1.0 if is_known else _SLACK
        slack = slack if memory.may_trace(s.candidate) else 1 / CARE
        if limit and memory.bytes_by_formula(s.candidate) > limit * slack:
            continue
        try:
            plan = memory.plan(s.candidate, timed[s])
        except ConfigError as error:
            family = s.candidate.family
            rejected.setdefault(family, Rejected(family, "dims", str(error)))
            continue
        if plan.within(limit):
            best.append(plan)
            memory.has_fit |= plan.traced
            done.add(key)
    return best


def _smallest(memory: Memory, considered: list[Considered], limit: float, top: int) -> list[Plan]:
    """Of the candidates that need least by the formula, those that fit by their own traces.

    Corrections of the formula are from traces of some meshes, and may be wrong for others: that
    nothing fits is not concluded from the formula alone, unless it is far off; see ``_FAR``.
    """
    best, far = [], 0
    for s in sorted(considered, key=lambda s: s.quick_memory)[:_LAST]:
        with contextlib.suppress(ConfigError):
            plan = memory.plan(s.candidate, memory.time(s.candidate), always=True)
            if plan.traced:
                far = far + 1 if plan.peak > _FAR * limit else 0
            if plan.within(limit):
                best.append(plan)
            elif far == 2:
                break
    return sorted(best, key=lambda plan: plan.time.total)[:top]


def _with_replicated_encoder(
    memory: Memory, plan: Plan, limit: float, accepts: Callable[[Candidate], bool]
) -> Plan:
    """The plan with the vision encoder's parameters replicated, if that is faster and fits."""
    candidate = encoder_placement.with_replicated_encoder(plan.candidate)
    if candidate is None or not accepts(candidate) or not plan.time.parts.get("vision"):
        return plan  # no encoder, cached tokens, or unknown rates
    time = memory.time(candidate)
    if time.total > _WORTH * plan.time.total:
        return plan
    replicated = memory.plan(candidate, time, always=plan.traced)  # they share a trace
    return replicated if replicated.within(limit) else plan


def _disaggregated(memory: Memory, first: Plan) -> Rejected | None:
    """Estimate of a disaggregated vision encoder, as a rejected placement."""
    setup = setup_of(memory.request, first.candidate)
    estimate = encoder_placement.disaggregated(setup, first.time, memory.request.machine)
    if estimate is None or first.candidate.cache != "off" or setup.outer:
        return None
    slower = estimate[1] / first.time.total
    text = (
        f"about {slower:.2f} x the step time of the first, with {estimate[0]} encoder devices "
        "(encoder.devices=-1), counting only the work of each side, by which it is never faster; "
        "memory is not counted"
    )
    return Rejected("disaggregated vision encoder", "slower", text)


def _nearest(memory: Memory, considered: list[Considered]) -> Plan | None:
    """The candidate that needs least of all."""
    for s in sorted(considered, key=lambda s: memory.bytes_by_formula(s.candidate))[:3]:
        try:
            return memory.plan(s.candidate, memory.time(s.candidate))
        except ConfigError:
            continue
    return None


def _explain(
    memory: Memory,
    considered: list[Considered],
    timed: dict[Considered, StepTime],
    best: list[Plan],
    limit: float,
    rejected: dict[str, Rejected],
) -> None:
    """Add the reason of each family that is not among the best to ``rejected``."""
    won = {plan.candidate.family for plan in best}
    families: dict[str, list[Considered]] = collections.defaultdict(list)
    for s in considered:
        families[s.candidate.family].append(s)
    for family, own in families.items():
        if family in won:
            rejected.pop(family, None)
            continue
        if family in rejected:
            continue
        sizes = {s: memory.bytes_by_formula(s.candidate) for s in own}
        fits = [s for s in own if s in timed and (not limit or sizes[s] <= limit)]
        if fits and best:
            s = min(fits, key=lambda s: timed[s].total)
            text = _slower(s, timed[s], best[0])
            rejected[family] = Rejected(family, "slower", f"{text} ({s.candidate.text()})")
        else:
            s = min(own, key=lambda s: sizes[s])
            over = sizes[s] - limit
            text = f"does not fit by {gib(over)} even" if over > 0 else "is too close to the limit"
            rejected[family] = Rejected(family, "memory", f"{text} with {s.candidate.text()}")


def _slower(s: Considered, time: StepTime, first: Plan) -> str:
    if not first.time.total:
        return f"this machine's rates are unknown, and it needs {gib(s.quick_memory)}"
    slower = time.total / first.time.total
    return f"{slower:.2f} x the step time of the first, most of it {time.bound}"
