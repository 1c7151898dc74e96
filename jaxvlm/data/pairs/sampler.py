"""Batch sampler of pairs: a function of (seed, step) and nothing else; random access by step.

No two examples of a batch share a query or a positive: a document that is also relevant to another
example's query would be taken for an in-batch negative of it. So a pass over the examples of a
task is dealt like cards: examples that share a content are adjacent in the order, and example k of
the order goes to batch k mod m, so that up to m such examples are in m different batches.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from jaxvlm.data.errors import DataError, TooFewRecords

_ORDER, _TASKS = 0x5A1, 0x5A2  # tags that keep the random streams of one seed apart
_TRIES = 2000  # swap partners tried for one clashing example
_ATTEMPTS = 8  # orders tried for one pass


class Drawn(NamedTuple):
    """The examples of a batch."""

    example: Int32[np.ndarray, " B"]
    """Index of the example in each row of the batch."""
    pass_: int
    """Number of complete passes over the examples' task before this one."""


class Sampler:
    """An endless order of batches of examples.

    Args:
        contents: for each example, the contents that no other example of its batch may have: its
            query and its positive, i[N, n], from 0.
        tasks: task of each example, i[N]; all 0 mixes all tasks.
        names: descriptions of contents, for error messages.
        task_names: names of tasks, for error messages; () if all are mixed.
        groups: result of :func:`groups_of`; ``None``: not known yet.
        batch_size: B, examples in a batch.
        seed: seed of the run.
        alpha: a task's share of the batches is proportional to its number of examples to this
            power.
        duplicates: whether a batch may have a content twice.

    Attributes:
        steps_per_epoch: number of batches that contain every example once, if alpha is 1. A few
            examples occur twice, so that the last batch of each task is full.

    Raises:
        DataError: the examples can't fill batches under these conditions.
    """

    def __init__(
        self,
        contents: Int[np.ndarray, "N n"],
        tasks: Int64[np.ndarray, " N"],
        names: Sequence[str],
        batch_size: int,
        seed: int,
        alpha: float = 1.0,
        duplicates: bool = False,
        task_names: Sequence[str] = (),
        groups: np.ndarray | None = None,
    ):
        self.batch_size, self.seed, self._lock = batch_size, seed, threading.Lock()
        self._contents, self._duplicates = contents, duplicates
        self._members = [np.flatnonzero(tasks == t) for t in range(int(tasks.max()) + 1)]
        labels = [f" of task {name!r}" for name in task_names] or [""]
        for members, of_task in zip(self._members, labels, strict=True):
            _check(contents[members], names, batch_size, duplicates, of_task)
        groups = groups_of(contents, tasks) if groups is None else groups
        self._groups = [
            _split(groups[members], contents[members], batch_size) for members in self._members
        ]
        lengths = np.asarray([_batches(len(m), batch_size) for m in self._members])
        self.steps_per_epoch = int(lengths.sum())
        share = np.asarray([float(len(m)) for m in self._members]) ** alpha
        exact = lengths if alpha == 1 else self.steps_per_epoch * share / share.sum()
        self._lengths, self._visits = lengths, _rounded(np.asarray(exact), self.steps_per_epoch)
        if not self._visits.all():
            missing = int(np.argmin(self._visits))
            raise DataError(
                f"data.pairs.task_alpha={alpha:g} leaves the {len(self._members[missing])} examples"
                f"{labels[missing]} without a batch in an epoch; lower it"
            )
        # Two passes of each task: prefetching crosses from one to the next.
        self._pass = functools.lru_cache(maxsize=2 * len(lengths))(self._deal)
        self._schedule = functools.lru_cache(maxsize=2)(self._draw_tasks)

    def batch(self, step: int) -> Drawn:
        """Look up the examples of a step, from 0; all are of one task if there are several."""
        epoch, at = divmod(step, self.steps_per_epoch)
        with self._lock:  # prefetching threads would otherwise all compute the same pass
            task, before = self._schedule(epoch)[at].tolist()
            visit = epoch * int(self._visits[task]) + before
            pass_, index = divmod(visit, int(self._lengths[task]))
            return Drawn(self._pass(task, pass_)[index], pass_)

    def _draw_tasks(self, epoch: int) -> np.ndarray:
        """i64[steps, 2]: each step's task, and the number of earlier steps of it in the epoch."""
        order = np.repeat(np.arange(len(self._visits)), self._visits)
        order = np.random.default_rng([self.seed, _TASKS, epoch]).permutation(order)
        before = np.zeros(len(order), np.int64)
        for task, count in enumerate(self._visits.tolist()):
            before[order == task] = np.arange(count)
        return np.stack([order, before], axis=1)

    def _deal(self, task: int, pass_: int) -> np.ndarray:
        """i32[m, B]: the batches of one pass over a task."""
        members, group = self._members[task], self._groups[task]
        count, size = int(self._lengths[task]), self.batch_size
        for attempt in range(_ATTEMPTS):
            rng = np.random.default_rng([self.seed, _ORDER, task, pass_, attempt])
            order = rng.permutation(len(members))
            if self._duplicates:  # the last batch is filled up with examples of the first
                return members[np.resize(order, (count, size))].astype(np.int32)
            order = np.concatenate([order, fill(order, group, count * size - len(order), count)])
            # Members of a group are adjacent; groups are in a random order.
            place = rng.permutation(int(group.max()) + 1)[group[order]]
            order = order[np.argsort(place, kind="stable")]
            rows = rng.permutation(order.reshape(size, count).T)
            # Members of groups with more than m examples may still be in one batch.
            if _repair(rows, self._contents[members], rng):
                return members[rows].astype(np.int32)
        raise DataError(
            f"data: could not form batches without duplicate queries or positives in pass {pass_}; "
            "lower data.batch_size, or set data.pairs.batch_sampler=random"
        )


def _batches(examples: int, batch_size: int) -> int:
    return -(-examples // batch_size)


def _rounded(exact: np.ndarray, total: int) -> np.ndarray:
    """Round ``exact`` to integers that add up to ``total``, by the largest-remainder method."""
    floor = np.floor(exact).astype(np.int64)
    rest = np.argsort(floor - exact, kind="stable")[: total - int(floor.sum())]
    floor[rest] += 1
    return floor


def _check(
    contents: np.ndarray, names: Sequence[str], batch_size: int, duplicates: bool, of_task: str
) -> None:
    """Refuse examples that are too few, or share one content more often than there are batches."""
    count, mixed = len(contents), ", or set data.pairs.tasks=mixed" if of_task else ""
    if count < batch_size:
        found = f"data: the {count} examples{of_task} are fewer than data.batch_size={batch_size}"
        raise TooFewRecords(found, count, f"lower it to {count}{mixed}")
    if duplicates:
        return
    times = np.bincount(_per_example(contents))
    most = int(np.argmax(times))
    often, batches = int(times[most]), _batches(count, batch_size)
    if often > batches:
        enough = -(-count // (often - 1)) - 1
        lower = f"lower data.batch_size to {enough}, or " if enough > 1 else ""
        raise DataError(
            f"data: {names[most]!r} is a query or positive of {often} of the {count} "
            f"examples{of_task}, but an epoch has {batches} batches, which may each hold it once; "
            f"{lower}set data.pairs.batch_sampler=random"
        )


def _per_example(contents: np.ndarray) -> np.ndarray:
    """Concatenate the contents of all examples, each once per example."""
    ordered = np.sort(contents, axis=1)
    new = np.concatenate([np.ones((len(ordered), 1), bool), np.diff(ordered, axis=1) != 0], axis=1)
    return ordered[new]


def groups_of(contents: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """Group examples that share a content, directly or through others of their task.

    Args:
        contents: i[N, n], see :class:`Sampler`.
        tasks: i[N], see there.

    Returns:
        i64[N], equal for the examples of a group of one task.
    """
    found = np.zeros(len(contents), np.int64)
    for task in range(int(tasks.max(initial=-1)) + 1):
        members = np.flatnonzero(tasks == task)
        found[members] = _connected(contents[members])
    return found


def _connected(contents: np.ndarray) -> list[int]:
    parent = list(range(int(contents.max(initial=-1)) + 1))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for first, *rest in contents.tolist():
        for other in rest:
            parent[root(other)] = root(first)
    return [root(i) for i in contents[:, 0].tolist()]


def _split(group: np.ndarray, contents: np.ndarray, batch_size: int) -> np.ndarray:
    """i64[N]: group number of each example, from 0.

    If a group has more examples than there are batches, it is split by positive.
    """
    group, size = _numbered(group)
    large = size[group] > _batches(len(contents), batch_size)
    if not large.any():
        return group
    return _numbered(np.where(large, contents[:, -1] + len(size), group))[0]


def _numbered(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number groups from 0, in their order; and the size of each."""
    size = np.bincount(group)
    is_one = size > 0
    return (np.cumsum(is_one) - 1)[group], size[is_one]


def fill(order: np.ndarray, group: np.ndarray, missing: int, batches: int) -> np.ndarray:
    """Choose the examples that occur twice, so that batches are full: of small groups first.

    Args:
        order: i64[N], examples.
        group: i64[N], group number of each example.
        missing: number of examples to choose.
        batches: of a pass; a group of as many examples has no room for another.
    """
    if not missing:
        return order[:0]
    size = np.bincount(group)[group[order]]
    roomy = order[size < batches]
    few = 2 * missing  # looking at all takes seconds, and most groups are of one example
    if len(first := np.unique(group[roomy[:few]], return_index=True)[1]) >= missing:
        return roomy[np.sort(first)[:missing]]
    first = np.unique(group[roomy], return_index=True)[1]  # one of each group
    every = [roomy[np.sort(first)], np.setdiff1d(roomy, roomy[first]), order]
    return np.concatenate(every)[:missing]


def _repair(rows: np.ndarray, shared: np.ndarray, rng: np.random.Generator) -> bool:
    """Swap examples between batches until none has a content twice; False if that fails."""
    contents = shared[rows]  # [m, B, n]
    for batch, at in _clashing(contents):
        if not _clashes(contents[batch], at, contents[batch, at]):
            continue  # the other example of the clash was moved
        others, places = (rng.integers(n, size=_TRIES).tolist() for n in rows.shape)
        for other, where in zip(others, places, strict=True):
            if other != batch and _fits(contents, (batch, at), (other, where)):
                for x in (rows, contents):
                    x[batch, at], x[other, where] = x[other, where].copy(), x[batch, at].copy()
                break
        else:
            return False
    return True


def _clashing(contents: np.ndarray) -> list[list[int]]:
    """List [batch, place] of the examples that share a content with another one of their batch."""
    ordered = np.sort(contents.reshape(len(contents), -1), axis=1)
    batches = np.flatnonzero((np.diff(ordered, axis=1) == 0).any(axis=1))  # few, if any
    contents = contents[batches]
    count, size, n = contents.shape
    example = np.repeat(np.arange(count * size), n)
    content = contents.reshape(-1)
    order = np.lexsort((example, content, example // size))
    batch, content, example = (x[order] for x in (example // size, content, example))
    same = (np.diff(batch) == 0) & (np.diff(content) == 0) & (np.diff(example) != 0)
    clashing = np.unique(np.concatenate([example[:-1][same], example[1:][same]]))
    return np.stack([batches[clashing // size], clashing % size], axis=1).tolist()


def _clashes(batch: np.ndarray, at: int, content: np.ndarray) -> bool:
    """Whether any of ``content``, at place ``at`` of a batch, also occurs at other places."""
    same = np.asarray(np.isin(batch, content).any(axis=1))
    same[at] = False
    return bool(same.any())


def _fits(contents: np.ndarray, one: tuple[int, int], two: tuple[int, int]) -> bool:
    """Whether two examples can be swapped without a clash."""
    (a, i), (b, j) = one, two
    moved = (contents[a], i, contents[b, j]), (contents[b], j, contents[a, i])
    return not any(_clashes(*each) for each in moved)
