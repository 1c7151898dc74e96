"""Pipeline schedules: which stage works on which microbatch in each tick."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import divisors

Unit = tuple[int, int]
"""(microbatch, virtual stage)."""
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zero_bubble")


class Schedule(NamedTuple):
    """A pipeline schedule as a table of ticks; -1 is idle. Sending to a stage takes one tick.

    In a tick all stages do their forward unit, then the loss of what leaves the last stage is
    taken, then all do their backward unit (B), then, with a split backward, their unit of weights'
    gradients (W). S stages have V virtual stages each; virtual stage v of stage s has the
    (v * S + s)-th group of the model's layers; there are M microbatches.
    """

    forward: np.ndarray
    """i32[ticks, S]: microbatch of the forward unit."""
    forward_virtual_stage: np.ndarray
    """i32[ticks, S]: its virtual stage, 0..V-1."""
    forward_slot: np.ndarray
    """i32[ticks, S]: buffer slot for the residuals that the backward unit needs."""
    backward: np.ndarray
    backward_virtual_stage: np.ndarray
    backward_slot: np.ndarray
    begin: np.ndarray
    """i32[ticks]: microbatch that enters the first stage."""
    begin_slot: np.ndarray
    end: np.ndarray
    """i32[ticks]: microbatch that leaves the last stage: its loss is taken."""
    end_slot: np.ndarray
    """i32[ticks]: slot in which the loss's gradient waits for the last stage's backward unit."""
    end_back_slot: np.ndarray
    begin_back: np.ndarray
    """i32[ticks]: microbatch whose gradient leaves the first stage."""
    begin_back_slot: np.ndarray
    weights: np.ndarray
    """i32[ticks]: microbatch of all stages' unit of weights' gradients (W); -1 throughout where
    these are a part of the backward unit."""
    weights_virtual_stage: np.ndarray
    weights_slot: np.ndarray
    """i32[ticks, S]: slot of the forward unit's residuals."""
    rest_slot: np.ndarray
    """i32[ticks, S]: slot in which the backward unit leaves further residuals for the W unit."""
    rest_back_slot: np.ndarray
    kept: int
    """Residual slots of a stage: microbatches in flight, times virtual stages."""
    kept_begin: int
    kept_end: int
    kept_rest: int
    """0 where the backward pass is not split."""

    @property
    def units(self) -> int:
        """Units that a stage works on: M * V of each kind."""
        columns = (self.forward[:, 0], self.backward[:, 0], self.weights)
        return int(sum((x >= 0).sum() for x in columns))

    @property
    def span(self) -> int:
        """Duration of the schedule in units; in each tick a stage waits for the others.

        M * V + S - 1 forward units, as many backward, and M * V W units, which have no bubble.
        """
        columns = (self.forward, self.backward)
        return int(sum((x >= 0).any(1).sum() for x in columns) + (self.weights >= 0).sum())

    @property
    def busy(self) -> float:
        """Fraction of its time that a stage works, for units of equal cost; the rest is bubble."""
        return self.units / self.span


def timetable(name: str, stages: int, parts: int, virtual_stages: int = 1) -> Schedule:
    """Build the table of a schedule.

    Args:
        name: one of :data:`SCHEDULES`. ``gpipe`` (arXiv 1811.06965) keeps the activations of all
            microbatches; ``1f1b`` (arXiv 2006.09503) of at most 2 S - 1; ``interleaved`` (arXiv
            2104.04473) is ``1f1b`` with V virtual stages a stage, a bubble 1/V as long, and at
            most (V + 1) S - 1 virtual stages' inputs in flight; ``zero_bubble`` is ``1f1b`` with a
            split backward, the weights' gradients being W units for which no stage waits: for
            units of equal cost, a third of the bubble goes (two thirds in H1 of arXiv 2401.10241,
            where that idea is from: its stages do W units while others wait, ours all in one
            tick).
        stages: S, the size of the mesh axis ``pipeline``.
        parts: M, the number of microbatches.
        virtual_stages: V, virtual stages of each stage.

    Raises:
        ConfigError: ``interleaved`` with a number of microbatches that is no multiple of S.
    """
    S, M, V = stages, parts, virtual_stages
    if V > 1 and M % S:
        raise ConfigError(
            f"config.strategy.schedule='interleaved' takes microbatches in groups of "
            f"config.mesh.pipeline={S}: config.microbatches={M} is not a multiple of it"
        )
    # Stage 0's order: S microbatches through one virtual stage, then through the next. Stage s is
    # s ticks later, so that what goes around the ring arrives when it is needed.
    order = [(g * S + i, v) for g in range(-(-M // S)) for v in range(V) for i in range(S)]
    forward_order = [(m, v) for m, v in order if m < M]
    backward_order = [(m, V - 1 - v) for m, v in forward_order]
    wait = M * V + S - 1 if name == "gpipe" else V * S - 1
    ticks = wait + M * V + S - 1
    forward, backward = np.full((2, ticks, S, 2), -1)
    for k, (f, b) in enumerate(zip(forward_order, backward_order)):
        for s in range(S):
            forward[s + k, s], backward[wait + S - 1 - s + k, s] = f, b
    # All stages do a microbatch's W unit in the tick in which the first stage, the last to finish
    # its backward unit, can: that work leaves no stage waiting, however uneven stages are.
    split = name == "zero_bubble"
    weights = backward[:, 0] if split else np.full((ticks, 2), -1)
    end, end_back = (_only(x[:, S - 1], V - 1) for x in (forward, backward))
    begin, begin_back = (_only(x[:, 0], 0) for x in (forward, backward))
    of_begin, of_end = _slots(begin, begin_back), _slots(end, end_back)
    of = [_slots(forward[:, s], weights if split else backward[:, s]) for s in range(S)]
    of_rest = [_slots(backward[:, s], weights) if split else {} for s in range(S)]

    def column(units: np.ndarray, slots: Sequence[dict[Unit, int]]) -> np.ndarray:
        """i32[ticks, S]; units i32[ticks, 2] or i32[ticks, S, 2]."""
        whole = np.broadcast_to(units if units.ndim == 3 else units[:, None], (ticks, S, 2))
        return np.stack([_at(whole[:, s], slots[s]) for s in range(S)], 1)

    def most(*slots: dict[Unit, int]) -> int:
        return 1 + max(max(slot.values(), default=-1) for slot in slots)

    return Schedule(
        forward[..., 0], forward[..., 1], column(forward, of),
        backward[..., 0], backward[..., 1], column(backward, of),
        begin[:, 0], _at(begin, of_begin), end[:, 0], _at(end, of_end), _at(end_back, of_end),
        begin_back[:, 0], _at(begin_back, of_begin),
        weights[:, 0], weights[:, 1], column(weights, of),
        column(backward, of_rest), column(weights, of_rest),
        most(*of), most(of_begin), most(of_end), most(*of_rest),
    )  # fmt: skip


def one_way(schedule: Schedule) -> Schedule:
    """Return the forward units alone, for outputs without gradients: no residuals are kept."""
    ticks = 1 + int(np.flatnonzero(schedule.end >= 0)[-1])
    columns = {n: x[:ticks] for n, x in schedule._asdict().items() if isinstance(x, np.ndarray)}
    idle = {n: np.full_like(columns[n], -1) for n in ("backward", "begin_back", "weights")}
    return schedule._replace(**columns | idle, kept=0, kept_begin=0, kept_end=0, kept_rest=0)


def best_microbatches_in_flight(stages: int, parts: int, virtual_stages: int = 1) -> int:
    """Choose how many microbatches enter a pipeline together after an encoder on another mesh.

    The encoder's mesh works on one group of microbatches while the stages work on the group
    before. Where both have as much work, a step of M microbatches takes as long as
    M + g + M / g * (S - 1) / V of them, with g microbatches in a group: the first group's
    encoding, and each group's bubble.

    Args:
        stages: S, the size of the mesh axis ``pipeline``.
        parts: M, the number of microbatches.
        virtual_stages: V, virtual stages of each stage.

    Returns:
        The divisor of ``parts`` for which that is least; 1 without a pipeline.
    """
    fit = [g for g in divisors(parts) if virtual_stages == 1 or g % stages == 0]
    return min(fit or [parts], key=lambda g: g + parts / g * (stages - 1) / virtual_stages)


def _only(units: np.ndarray, virtual: int) -> np.ndarray:
    """Keep the units of one virtual stage; set the others to -1."""
    return np.where(units[:, 1:] == virtual, units, -1)


def _at(units: np.ndarray, slots: dict[Unit, int]) -> np.ndarray:
    """Return each unit's slot, i32[ticks]; 0 where there is none."""
    return np.array([slots.get((m, v), 0) for m, v in units.tolist()])


def _slots(made: np.ndarray, used: np.ndarray) -> dict[Unit, int]:
    """Assign as few buffer slots as possible to values written in one tick and last read later.

    Args:
        made: i32[ticks, 2], the unit that writes in each tick.
        used: i32[ticks, 2], the same units in the ticks of their last read.
    """
    until = {(m, v): t for t, (m, v) in enumerate(used.tolist())}
    slots: dict[Unit, int] = {}
    held: list[tuple[int, int]] = []
    for t, (m, v) in enumerate(made.tolist()):
        held = [(end, slot) for end, slot in held if end >= t]
        if m >= 0:
            taken = {slot for _, slot in held}
            slots[m, v] = next(i for i in itertools.count() if i not in taken)
            held.append((until[m, v], slots[m, v]))
    return slots


def virtual_stage_moves(stages: int, virtual_stages: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Map virtual stages to where their layers are stored; layers are stored in order.

    Returns:
        (stage, virtual stage) in the schedule's order -> (stage, position) in storage order.
    """
    return {
        (g % stages, g // stages): (g // virtual_stages, g % virtual_stages)
        for g in range(stages * virtual_stages)
    }


def rounds(
    moves: dict[tuple[int, int], tuple[int, int]], stages: int
) -> Iterable[tuple[int, Sequence[int], Sequence[int]]]:
    """Group ``moves`` into collective permutes, in each of which a stage sends at most once.

    Yields:
        The distance in stages; the virtual stage that each sends; the slot in which each stage puts
        what it receives, -1 for none.
    """
    for far in range(stages):
        queues: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        for (to, slot), (source, virtual) in moves.items():
            if (to - source) % stages == far:
                queues[source].append((virtual, slot))
        for k in range(max(map(len, queues))):
            sent, put = [0] * stages, [-1] * stages
            for source, queue in enumerate(queues):
                if k < len(queue):
                    sent[source], put[(source + far) % stages] = queue[k]
            yield far, sent, put
