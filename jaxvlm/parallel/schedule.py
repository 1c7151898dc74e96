"""Which stage of a pipeline works on which microbatch, tick by tick."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.config import ConfigError

SCHEDULES = ("1f1b", "interleaved", "gpipe")


class Schedule(NamedTuple):
    """A table of ticks; -1 is nothing to do. A message takes one tick.

    In a tick all stages do their forward unit, then the last one's loss is taken, then all do
    their backward unit. S stages have V chunks of layers each, chunk v of stage s being the
    (v * S + s)-th of the model; there are M microbatches.
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
    kept: int
    """Slots of a stage: microbatches in flight, times chunks."""
    kept_begin: int
    kept_end: int

    @property
    def units(self) -> int:
        """Units of one direction that a stage works on."""
        return int((self.forward[:, 0] >= 0).sum())

    @property
    def span(self) -> int:
        """Ticks in which some stage works in one direction: M V + S - 1 of each."""
        return int((self.forward >= 0).any(1).sum())

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
            (V + 1) S - 1 chunks' inputs in flight.
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
    slots = [_slots(forward[:, s], backward[:, s]) for s in range(S)]
    end, end_back = (_only(x[:, S - 1], V - 1) for x in (forward, backward))
    begin, begin_back = (_only(x[:, 0], 0) for x in (forward, backward))
    of_begin, of_end = _slots(begin, begin_back), _slots(end, end_back)

    def column(i: int) -> np.ndarray:
        return np.stack([slot[i] for slot in slots], 1)

    return Schedule(
        forward[..., 0], forward[..., 1], column(0),
        backward[..., 0], backward[..., 1], column(1),
        begin[:, 0], of_begin[0], end[:, 0], of_end[0], of_end[1], begin_back[:, 0], of_begin[1],
        max(slot[2] for slot in slots), of_begin[2], of_end[2],
    )  # fmt: skip


def _only(units: np.ndarray, chunk: int) -> np.ndarray:
    """Units of one chunk; the others become nothing."""
    return np.where(units[:, 1:] == chunk, units, -1)


def _slots(made: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Slots for what is made in one tick and used in the same or a later one.

    Args:
        made: i32[ticks, 2] units.
        used: the same units.

    Returns:
        i32[ticks] where it is written, i32[ticks] where it is read (0 where nothing is), and how
        many slots there are.
    """
    until = {tuple(unit): t for t, unit in enumerate(used.tolist()) if unit[0] >= 0}
    write, read = np.zeros((2, len(made)), int)
    free: list[int] = []
    held: list[tuple[int, int]] = []
    count = 0
    for t, unit in enumerate(made.tolist()):
        free += [slot for end, slot in held if end < t]
        held = [(end, slot) for end, slot in held if end >= t]
        if unit[0] < 0:
            continue
        if not free:
            free, count = [count], count + 1
        slot, end = free.pop(), until[tuple(unit)]
        held.append((end, slot))
        write[t] = read[end] = slot
    return write, read, max(count, 1)


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
