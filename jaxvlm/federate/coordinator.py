"""The coordinator as a pure state machine: offers versions, judges updates, applies buffers.

Nothing here reads a clock, a file, a network or a model. A *version* counts outer updates. A site
trains from a version and sends what it made of it; an update is accepted unless it is late, bad, a
duplicate, or of another model; once a buffer of accepted updates is full it makes the next version.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import FederateConfig, OuterConfig
from jaxvlm.federate import adapters, aggregate, codec, messages, privacy
from jaxvlm.federate.messages import Update
from jaxvlm.optim import outer

_MOST = 1e15
"""Tokens or steps of an update above which they are no count of anything."""
Shared = dict[str, np.ndarray]
"""The shared parameters, f32 by path."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What stays the same in a federation."""

    federate: FederateConfig
    outer: OuterConfig
    stacked: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Path of a linear map with adapters -> its leading dims of layers."""
    token_bounds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Site -> the largest lag at which its visual-token cache may read tokens."""

    @property
    def buffer(self) -> int:
        """Updates in an outer update."""
        return self.federate.buffer or self.federate.sites


@dataclasses.dataclass(frozen=True)
class SiteRecord:
    """What the coordinator knows of a site."""

    held: int = -1
    """The version that it was given last; -1: none."""
    number: int = 0
    """The highest number of an update that was judged."""
    accepted: int = 0
    late: int = 0
    bad: int = 0
    duplicates: int = 0
    tokens: float = 0.0
    """Tokens of its accepted updates."""
    steps: int = 0
    """Steps of its accepted updates."""
    loss: float = math.nan
    """Of its last accepted update."""
    lag: int = 0
    """Of its last accepted update."""


class Buffered(NamedTuple):
    """An accepted update that waits for its outer update."""

    update: Update
    lag: int
    """Outer updates between its base and its acceptance."""


class State(NamedTuple):
    """Everything that the coordinator's decisions depend on."""

    version: int
    params: Shared
    """Parameters of the version."""
    outer: Any
    """State of the outer optimizer."""
    buffer: tuple[Buffered, ...]
    sites: dict[str, SiteRecord]


class Verdict(NamedTuple):
    """What the coordinator says of an update."""

    kind: str
    """accepted | late | bad | duplicate."""
    why: str = ""
    """For people."""


class Applied(NamedTuple):
    """An outer update, for the log."""

    version: int
    """The version that it made; the one before it, where ``finite`` is False."""
    finite: bool
    """Whether the new parameters are finite; else the updates are dropped, and nothing changes."""
    sites: list[str]
    """Of its updates, in the order in which they were summed."""
    weights: list[float]
    """Of those in ``chosen``, with a sum of 1."""
    lags: list[int]
    loss: float
    """Mean of the losses of the updates that were used, by their weights."""
    norms: list[float]
    """L2 norms of the changes, before they were clipped."""
    clipped: int
    """How many were scaled down."""
    chosen: list[str]
    """Sites whose updates were used; a robust rule may use some only."""
    lora_lost: float
    """The largest part of an averaged adapter's squared norm that its rank can't hold."""


def init(plan: Plan, params: Shared) -> State:
    """The state of version 0."""
    tx = outer.make_outer_optimizer(plan.outer)
    return State(0, params, jax.device_get(tx.init(params)), (), {})


def offer(state: State, site: str) -> State:
    """The state after the current version was given to a site."""
    record = state.sites.get(site, SiteRecord())
    return _with(state, site, dataclasses.replace(record, held=state.version))


def judge(plan: Plan, state: State, update: Update) -> Verdict:
    """Judge an update, without changing anything."""
    record = state.sites.get(update.site, SiteRecord())
    if update.number <= record.number:
        return Verdict("duplicate", f"update {update.number} of {update.site} was judged before")
    waits = any(x.update.site == update.site for x in state.buffer)
    if waits and plan.buffer == plan.federate.sites:
        return Verdict("duplicate", f"{update.site} has an update in this round already")
    if not 0 <= update.base <= record.held:
        return Verdict(
            "bad",
            f"it says it started from version {update.base}, and {update.site} was given "
            + (f"none after {record.held}" if record.held >= 0 else "none"),
        )
    bound = plan.token_bounds.get(update.site, 0)
    if update.token_lag > bound:
        return Verdict(
            "bad",
            f"it was trained on visual tokens {update.token_lag} updates old, and the bound of "
            f"{update.site}'s cache is {bound}",
        )
    if why := _damage(plan, state.params, update):
        return Verdict("bad", why)
    lag = state.version - update.base
    if lag > plan.federate.max_staleness:
        return Verdict(
            "late",
            f"it started from version {update.base}, {lag} outer updates ago; "
            f"config.federate.max_staleness={plan.federate.max_staleness}",
        )
    return Verdict("accepted")


def receive(plan: Plan, state: State, update: Update) -> tuple[State, Verdict]:
    """Judge an update, and put it into the buffer where it is accepted."""
    verdict = judge(plan, state, update)
    record = state.sites.get(update.site, SiteRecord())
    if verdict.kind == "duplicate":
        record = dataclasses.replace(record, duplicates=record.duplicates + 1)
        return _with(state, update.site, record), verdict
    record = dataclasses.replace(record, number=update.number)
    if verdict.kind != "accepted":
        count = {verdict.kind: getattr(record, verdict.kind) + 1}
        return _with(state, update.site, dataclasses.replace(record, **count)), verdict
    lag = state.version - update.base
    record = dataclasses.replace(
        record,
        accepted=record.accepted + 1,
        tokens=record.tokens + update.tokens,
        steps=record.steps + update.steps,
        loss=update.loss,
        lag=lag,
    )
    # In a fixed order, whatever order updates arrive in, so that sums repeat to the bit.
    buffer = sorted((*state.buffer, Buffered(update, lag)), key=_order)
    return _with(state._replace(buffer=tuple(buffer)), update.site, record), verdict


def is_due(plan: Plan, state: State, waited_s: float = 0.0) -> bool:
    """Whether the buffer makes the next version.

    Args:
        plan: of the federation.
        state: the coordinator's.
        waited_s: seconds since the first update of the buffer came.
    """
    if is_over(plan, state):
        return False
    federate, count = plan.federate, len(state.buffer)
    late = federate.deadline_s > 0 and waited_s >= federate.deadline_s
    return count >= plan.buffer or (late and count >= (federate.min_sites or plan.buffer))


def is_over(plan: Plan, state: State) -> bool:
    """Whether the last version is reached."""
    return state.version >= plan.federate.rounds


def left_out(state: State) -> list[str]:
    """Sites that have no update in the buffer: those that a deadline does not wait for."""
    return sorted(set(state.sites) - {x.update.site for x in state.buffer})


def apply(plan: Plan, state: State, secret: bytes = b"") -> tuple[State, Applied]:
    """Make the next version of the buffer; if it is not finite, drop the buffer instead.

    Args:
        plan: of the federation.
        state: whose buffer is not empty.
        secret: seeds the noise of differential privacy, with the version.
    """
    federate = plan.federate
    updates = [x.update for x in state.buffer]
    deltas = [_deltas(plan, state.params, update) for update in updates]
    norms = [aggregate.norm_of(delta) for delta in deltas]
    most = federate.max_delta_norm
    scales = [min(1.0, most / norm) if most and norm else 1.0 for norm in norms]
    used = aggregate.chosen(federate, deltas)
    weights = [_weight(federate, state.buffer[i]) for i in used]
    mean = {
        path: aggregate.combine(
            federate, shared, [deltas[i][path] for i in used], weights, [scales[i] for i in used]
        )
        for path, shared in state.params.items()
    }
    lost = 0.0
    if maps := adapters.maps_of(state.params):
        paths = [path + part for path in maps for part in (adapters.A, adapters.B)]
        own = [{p: aggregate.became(state.params[p], deltas[i][p]) for p in paths} for i in used]
        averaged, lost = adapters.combine_adapters(own, weights, plan.stacked)
        mean |= averaged
    if federate.noise_multiplier:
        deviation = federate.noise_multiplier * most / len(used)
        about = [state.version, *(messages.digest_of(update.parts) for update in updates)]
        mean = privacy.with_noise(mean, deviation, secret, repr(about).encode())
    tx = outer.make_outer_optimizer(plan.outer)
    with np.errstate(over="ignore"):  # what overflows is looked at below
        params, outer_state = outer.outer_update(plan.outer, tx, state.params, mean, state.outer)
        params = {path: np.asarray(x) for path, x in jax.device_get(params).items()}
    finite = all(np.isfinite(x).all() for x in params.values())
    total = sum(weights)
    applied = Applied(
        state.version + finite,
        finite,
        [update.site for update in updates],
        [weight / total for weight in weights],
        [x.lag for x in state.buffer],
        sum(w * updates[i].loss for i, w in zip(used, weights)) / total,
        norms,
        sum(scale < 1 for scale in scales),
        [updates[i].site for i in used],
        lost,
    )
    if not finite:
        return state._replace(buffer=()), applied
    outer_state = jax.device_get(outer_state)
    return State(state.version + 1, params, outer_state, (), state.sites), applied


def _order(buffered: Buffered) -> tuple[str, int]:
    return buffered.update.site, buffered.update.number


def _with(state: State, site: str, record: SiteRecord) -> State:
    return state._replace(sites=state.sites | {site: record})


def _weight(federate: FederateConfig, buffered: Buffered) -> float:
    update = buffered.update
    size = {"tokens": update.tokens, "steps": float(update.steps), "uniform": 1.0}
    return size[federate.weighting] * (1 + buffered.lag) ** -federate.staleness_exponent


def _deltas(plan: Plan, params: Shared, update: Update) -> aggregate.Deltas:
    dtype = plan.outer.delta_dtype
    return {path: codec.decode(path, update.parts, x.shape, dtype) for path, x in params.items()}


def _damage(plan: Plan, params: Shared, update: Update) -> str:
    """Why an update can't be used, or ""."""
    dtype = plan.outer.delta_dtype
    known = {name for path in params for name in codec.names_of(path, dtype)}
    if missing := sorted(set(params) - set(update.parts)):
        return f"{missing[0]} is missing; it is an update of another model"
    if extra := sorted(set(update.parts) - known):
        return f"{extra[0]} is no part of this model's updates in {dtype}"
    for path, shared in params.items():
        try:
            change, rest = codec.decode(path, update.parts, shared.shape, dtype)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            return f"{path} does not fit: {error}"
        for part in (change, rest):
            if part is not None and not np.isfinite(part).all():
                return f"{path} has a value that is not finite"
    if not (math.isfinite(update.loss) and math.isfinite(update.tokens)):
        return f"its loss {update.loss:g} or number of tokens {update.tokens:g} is not finite"
    if not (0 < update.tokens <= _MOST and 0 < update.steps <= _MOST):
        return f"it was trained on {update.tokens:g} tokens in {update.steps} steps"
    return ""
