"""Memory and step time of a search's candidates: by formula, or from a trace of their step."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import ConfigError, DualConfig, MeshConfig
from jaxvlm.models import model_flops
from jaxvlm.models.vlm import DTYPES
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.memory.quick_memory import QuickMemory, QuickStep
from jaxvlm.planner.request.request import PlanRequest
from jaxvlm.planner.search.candidates import Candidate, outer_config, pair_mini_batches, setup_of
from jaxvlm.planner.time.step_time import StepTime, step_time, without_vision

MARGIN = 0.08
"""Fraction of a device's memory left free, for fragmentation, the driver and the compiler."""
_TRACES = 6
"""Maximum number of traced steps; no new trace is made once a candidate fits. Candidates that
differ only in their mesh share a trace.
"""
_LOOKS = 12
CARE = 1.15
"""A candidate whose memory is by formula alone must fit with this factor."""


class Plan(NamedTuple):
    """A candidate with its memory and time."""

    candidate: Candidate
    states: dict[str, float]
    """Bytes stored on a device between steps."""
    work: dict[str, float]
    """Bytes needed in addition at a step's peak."""
    time: StepTime
    traced: bool
    """Whether ``work`` is from the step's trace rather than from the formula."""

    @property
    def peak(self) -> float:
        """Bytes on a device."""
        return sum(self.states.values()) + sum(self.work.values())

    def within(self, limit: float | int) -> bool:
        """Whether it fits; a limit of 0 means that none is known."""
        return not limit or self.peak * (1.0 if self.traced else CARE) <= limit


class Memory:
    """Memory of one model's candidates: by formula, or on request from a trace.

    Args:
        request: the planning request.
    """

    def __init__(self, request: PlanRequest):
        self.request, config = request, request.config
        alone = Candidate("single", MeshConfig(data=1), PRESETS["single"], "none")
        self.single_device_model = step_memory.model_of(setup_of(request, alone))
        self.quick_memory = QuickMemory(
            self.single_device_model, config.optim.frozen, request.length,
            _patches(request), request.machine.platform,
        )  # fmt: skip
        self.corrections: dict[tuple[Any, ...], _Correction] = {}
        self.traces: set[tuple[Any, ...]] = set()
        self.num_estimates, self.has_fit = 0, False
        self.unknown: dict[str, None] = {}  # why candidates were not traced, in order
        self.times: dict[Candidate, StepTime] = {}

    def of(self, request: PlanRequest) -> Memory:
        """The same model and trained parameters, with another machine or batch."""
        other = copy.copy(self)
        other.request, other.num_estimates, other.times = request, _LOOKS, {}
        other.unknown = {}
        return other

    def time(self, candidate: Candidate) -> StepTime:
        """Memoized :func:`time_of`."""
        if candidate not in self.times:
            self.times[candidate] = time_of(self.request, candidate)
        return self.times[candidate]

    def bytes_by_formula(self, candidate: Candidate) -> float:
        """Bytes by formula."""
        correction = self.corrections.get(kind(candidate), _Correction())
        step = _step(self.request, candidate)
        total = self.quick_memory.total(step, correction.factor, correction.more)
        return total + cached_bytes(self.request, candidate)

    def may_trace(self, candidate: Candidate) -> bool:
        """Whether the candidate may still be traced."""
        more = not self.has_fit and len(self.traces) < _TRACES
        return self.num_estimates < _LOOKS and (more or self._trace(candidate) in self.traces)

    def _trace(self, candidate: Candidate) -> tuple[Any, ...]:
        """Key shared by candidates that share a trace."""
        c = candidate
        key: tuple[Any, ...] = (c.remat, c.vision, c.microbatches, c.mesh.expert)
        if self.request.pairs:  # traced with a device's own examples
            key = *key, c.mini_batches, self.request.rows // c.shards
        return key

    def plan(self, candidate: Candidate, time: StepTime, always: bool = False) -> Plan:
        """The candidate's plan, with its memory from a trace if still allowed, or if ``always``.

        Raises:
            ConfigError: dims that the mesh does not divide.
        """
        setup, extra = setup_of(self.request, candidate), cached_bytes(self.request, candidate)
        if always or self.may_trace(candidate):
            if why := _untraceable(setup):
                self.unknown[why] = None
            else:
                estimate = step_memory.estimate(setup)
                self.traces.add(self._trace(candidate))
                self.num_estimates += 1
                self._learn(candidate, estimate.peak)
                states = {name: float(size) for name, size in estimate.states.items()}
                return Plan(candidate, _with_tokens(states, extra), dict(estimate.work), time, True)
        sizes = step_memory.states(setup, step_memory.model_of(setup))
        states = {name: float(size) for name, size in sizes.items()}
        between = sum(n for name, n in states.items() if name != "batch")
        work = self.bytes_by_formula(candidate) - extra - between
        return Plan(candidate, _with_tokens(states, extra), {"work": max(0.0, work)}, time, False)

    def _learn(self, candidate: Candidate, peak: float) -> None:
        """Correct the formula for candidates of the same kind by a traced peak."""
        step = _step(self.request, candidate)
        work, rest = self.quick_memory.work(step), self.quick_memory.total(step, 0.0)
        correction = self.corrections.get(kind(candidate), _Correction())
        corrected = correction.corrected((candidate.preset, candidate.mesh), work, peak - rest)
        self.corrections[kind(candidate)] = corrected


class _Correction(NamedTuple):
    """Correction of the formula's work by traces: a factor and an offset."""

    factor: float = 1.0
    more: float = 0.0
    """Bytes that do not grow with the batch."""
    last: tuple[Any, float, float] | None = None
    """Mesh, the formula's work there, and the trace's."""

    def corrected(self, mesh: Any, work: float, real: float) -> _Correction:
        """The correction after another trace."""
        factor, more = max(0.05, (real - self.more) / work), self.more
        if self.last is not None and self.last[0] == mesh and abs(self.last[1] / work - 1) > 0.01:
            # Two traces of one mesh differ only in batch size: fit slope and offset.
            line = (real - self.last[2]) / (work - self.last[1])
            if line > 0 and real > line * work:
                factor, more = line, real - line * work
        return _Correction(factor, more, (mesh, work, real))


def kind(candidate: Candidate) -> tuple[Any, ...]:
    """Key of candidates for which the formula errs alike: with experts it errs differently."""
    mesh = candidate.mesh
    return candidate.remat, mesh.expert > 1, mesh.tensor > 1, any(candidate.mini_batches)


def _step(request: PlanRequest, candidate: Candidate) -> QuickStep:
    return QuickStep(
        candidate.mesh, candidate.strategy, candidate.remat, candidate.microbatches,
        request.rows, candidate.vision,
        pair_mini_batches(request, candidate), outer_config(request, candidate.mesh),
    )  # fmt: skip


def _with_tokens(states: dict[str, float], tokens: float) -> dict[str, float]:
    return states | ({"visual tokens": tokens} if tokens else {})


def _untraceable(setup: step_memory.StepSetup) -> str:
    """Why a candidate's step can't be traced; "" if it can."""
    if _too_many(setup):
        return "a trace with this many token copies for experts overflows 32-bit indices"
    try:
        step_memory.check(setup)
    except ConfigError as error:
        return str(error).split(":")[0]
    return ""


def _too_many(setup: step_memory.StepSetup) -> bool:
    """Whether the token copies that a trace sends to experts overflow 32-bit indices."""
    if isinstance(setup.config, DualConfig):
        return False
    chosen = setup.config.decoder.experts_per_token * setup.length
    return 101 * setup.mesh.expert * chosen >= 2**31


def _patches(request: PlanRequest) -> int:
    vision = request.config.network.vision
    if not request.images:
        return 0
    each = (vision.image_size // vision.patch_size) ** 2
    return request.patches if vision.packed else request.images * each


def cached_bytes(request: PlanRequest, candidate: Candidate) -> float:
    """Bytes of cached visual tokens on a device."""
    if candidate.cache == "off":
        return 0.0
    vision = request.config.model.vision
    features = _patches(request) * vision.width * max(1, len(vision.feature_layers))
    size = np.dtype(DTYPES[request.config.model.dtype]).itemsize
    return float(request.samples * features * size / candidate.shards)


def capacity(request: PlanRequest) -> float:
    """Bytes of a device that a plan may use; 0: unknown."""
    return request.machine.chip.hbm_bytes * (1 - MARGIN)


def time_of(request: PlanRequest, candidate: Candidate) -> StepTime:
    """Step time of a candidate; a vision encoder whose tokens are cached takes none."""
    setup = setup_of(request, candidate)
    time = step_time(setup, request.machine)
    spared = time.parts.get("vision", 0.0) if candidate.cache != "off" else 0.0
    if not spared or isinstance(setup.config, DualConfig):
        return time
    images = setup.rows * setup.images
    each = setup.patches / setup.images if setup.config.vision.packed else 0
    tokens = setup.rows * setup.length
    once = model_flops.forward(setup.config, tokens, setup.length, images, each)
    return without_vision(time, spared, once.vision)
