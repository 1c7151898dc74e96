"""Which stage of a pipeline works on which microbatch, tick by tick."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import divisors

Unit = tuple[int, int]
"""A microbatch and a chunk."""
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zero_bubble")


class Schedule(NamedTuple):
    """A table of ticks; -1 is nothing to do. A message takes one tick.

    In a tick all stages do their forward unit, then the last one's loss is taken, then all do
    their backward unit, then, where it was split off, that of weights. S stages have V chunks of
    layers each, chunk v of stage s being the (v * S + s)-th of the model; there are M microbatches.
    """

    forward: np.ndarray
    """i32[ticks, S]: microbatch."""
    forward_chunk: np.ndarray
    """i32[ticks, S]: 0..V-1."""
    forward_slot: np.ndarray
    """i32[ticks, S]: where what the backward unit needs is kept."""
    backward: np.ndarray
    backward_chunk: np.ndarray
    backward_slot: np.ndarray
    begin: np.ndarray
    """i32[ticks]: microbatch that enters the first stage."""
    begin_slot: np.ndarray
    end: np.ndarray
    """i32[ticks]: microbatch that leaves the last stage: its loss is taken."""
    end_slot: np.ndarray
    """i32[ticks]: where the loss's gradient waits for the last stage's backward unit."""
    end_back_slot: np.ndarray
    begin_back: np.ndarray
    """i32[ticks]: microbatch whose gradient leaves the first stage."""
    begin_back_slot: np.ndarray
    weights: np.ndarray
    """i32[ticks]: microbatch whose gradient of weights all stages take; -1 throughout where that
    is a part of the backward unit."""
    weights_chunk: np.ndarray
    weights_slot: np.ndarray
    """i32[ticks, S]: of what the forward unit kept."""
    rest_slot: np.ndarray
    """i32[ticks, S]: where the backward unit leaves what the unit of weights takes besides."""
    rest_back_slot: np.ndarray
    kept: int
    """Slots of a stage: microbatches in flight, times chunks."""
    kept_begin: int
    kept_end: int
    kept_rest: int
    """0 where weights have no units of their own."""

    @property
    def units(self) -> int:
        """Units that a stage works on: M V of each kind."""
        ways = (self.forward[:, 0], self.backward[:, 0], self.weights)
        return int(sum((x >= 0).sum() for x in ways))

    @property
    def span(self) -> int:
        """Times of a unit from begin to end, for a stage waits for the others in each tick.

        M V + S - 1 forward, as many backward, and M V of weights: these have no bubble.
        """
        ways = (self.forward, self.backward)
        return int(sum((x >= 0).any(1).sum() for x in ways) + (self.weights >= 0).sum())

    @property
    def busy(self) -> float:
        """The share of its time that a stage works, units being equal; the rest is the bubble."""
        return self.units / self.span


def timetable(name: str, stages: int, parts: int, chunks: int = 1) -> Schedule:
    """The table of a schedule.

    Args:
        name: of :data:`SCHEDULES`. ``gpipe`` (arXiv 1811.06965) keeps all microbatches;
            ``1f1b`` (arXiv 2006.09503) at most 2 S - 1; ``interleaved`` (arXiv 2104.04473) is
            ``1f1b`` with V chunks of layers a stage, a bubble 1/V as long, and at most
            (V + 1) S - 1 chunks' inputs in flight; ``zero_bubble`` is ``1f1b`` with the weights'
            gradients as units of their own, for which no stage waits: units being equal, a third
            of the bubble goes (two thirds in H1 of arXiv 2401.10241, where that idea is from: its
            stages do these units while others wait, ours in one tick).
        stages: S.
        parts: M.
        chunks: V.

    Raises:
        ConfigError: ``interleaved`` with microbatches that stages do not divide.
    """
    S, M, V = stages, parts, chunks
    if V > 1 and M % S:
        raise ConfigError(
            f"config.strategy.schedule='interleaved' takes microbatches by groups of "
            f"config.mesh.stage={S}: config.microbatches={M} is no multiple"
        )
    # Stage 0's order: S microbatches through one chunk, then through the next. The s-th stage is
    # s ticks later, so what goes around arrives as it is wanted.
    order = [(g * S + i, v) for g in range(-(-M // S)) for v in range(V) for i in range(S)]
    there = [(m, v) for m, v in order if m < M]
    back = [(m, V - 1 - v) for m, v in there]
    wait = M * V + S - 1 if name == "gpipe" else V * S - 1
    ticks = wait + M * V + S - 1
    forward, backward = np.full((2, ticks, S, 2), -1)
    for k, (f, b) in enumerate(zip(there, back)):
        for s in range(S):
            forward[s + k, s], backward[wait + S - 1 - s + k, s] = f, b
    # All stages take a microbatch's gradient of weights in the tick in which the first stage, the
    # last to get there, can: that work leaves no stage waiting, whatever else a stage holds.
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
    """Its units there alone, for outputs that need no gradient: nothing is kept."""
    ticks = 1 + int(np.flatnonzero(schedule.end >= 0)[-1])
    there = {n: x[:ticks] for n, x in schedule._asdict().items() if isinstance(x, np.ndarray)}
    back = {n: np.full_like(there[n], -1) for n in ("backward", "begin_back", "weights")}
    return schedule._replace(**there | back, kept=0, kept_begin=0, kept_end=0, kept_rest=0)


def wave(stages: int, parts: int, chunks: int = 1) -> int:
    """How many microbatches enter a pipeline at once where another mesh works before it.

    That mesh is at one wave of them while the stages are at the wave before. Where both have as
    much work, a step of M microbatches takes as long as M + g + M / g * (S - 1) / V of them, g
    being a wave's: a wave to begin with, and each wave's bubble.

    Returns:
        The divisor of ``parts`` for which that is least; 1 without stages.
    """
    fit = [g for g in divisors(parts) if chunks == 1 or g % stages == 0]
    return min(fit or [parts], key=lambda g: g + parts / g * (stages - 1) / chunks)


def _only(units: np.ndarray, chunk: int) -> np.ndarray:
    """Units of one chunk; the others become nothing."""
    return np.where(units[:, 1:] == chunk, units, -1)


def _at(units: np.ndarray, slots: dict[Unit, int]) -> np.ndarray:
    """i32[ticks]: each unit's slot; 0 where there is none."""
    return np.array([slots.get((m, v), 0) for m, v in units.tolist()])


def _slots(made: np.ndarray, used: np.ndarray) -> dict[Unit, int]:
    """Slots, as few as will do, for what is made in one tick and last used in a later one or it.

    Args:
        made: i32[ticks, 2] units.
        used: the same units.
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


def chunk_moves(stages: int, chunks: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Where the chunks of a stage's layers come from, layers being stored in order.

    Returns:
        (stage, chunk) in the schedule's order -> (stage, chunk) in the order of storage.
    """
    return {(g % stages, g // stages): (g // chunks, g % chunks) for g in range(stages * chunks)}


def rounds(
    moves: dict[tuple[int, int], tuple[int, int]], stages: int
) -> Iterable[tuple[int, Sequence[int], Sequence[int]]]:
    """Sends that carry out ``moves``, one chunk a stage at most in each.

    Yields:
        How many stages further; which chunk each stage sends; where each stage puts what it
        gets, -1 for nowhere.
    """
    for far in range(stages):
        queues: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        for (to, slot), (source, chunk) in moves.items():
            if (to - source) % stages == far:
                queues[source].append((chunk, slot))
        for k in range(max(map(len, queues))):
            sent, put = [0] * stages, [-1] * stages
            for source, queue in enumerate(queues):
                if k < len(queue):
                    sent[source], put[(source + far) % stages] = queue[k]
            yield far, sent, put
