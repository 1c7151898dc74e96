"""The order of a mixture: which source each packed sequence of a batch is from.

Whole sequences are of one source, so that shares are shares of sequences, and with packing of
tokens. A :class:`Schedule` is a periodic pattern of integers; each row of a batch follows it from a
place of its own. A source's sequences come in the order of a run on that source alone. All is a
function of the settings, the seed and the step.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations.packing import PackedSequence, Pieces, SequenceOrder, Sequences
from jaxvlm.data.errors import TooFewRecords

PERIOD = 2**16
"""The longest period of a schedule; shares that need a longer one are rounded to 1 / PERIOD."""


def whole_weights(weights: Sequence[Fraction | float]) -> tuple[int, ...]:
    """Integers in proportion to positive weights: exactly where their sum is at most ``PERIOD``.

    A float means the decimal fraction that it is written as: 0.1 is 1/10.
    """
    exact = [x if isinstance(x, Fraction) else Fraction(repr(float(x))) for x in weights]
    scale = math.lcm(*(x.denominator for x in exact))
    whole = [int(x * scale) for x in exact]
    whole = [x // math.gcd(*whole) for x in whole]
    total = sum(whole)
    if total <= PERIOD:
        return tuple(whole)
    floors = [max(1, x * PERIOD // total) for x in whole]  # a source is never left out
    rest = sorted(range(len(whole)), key=lambda i: (-(whole[i] * PERIOD % total), i))
    for i in rest[: max(0, PERIOD - sum(floors))]:
        floors[i] += 1
    return tuple(floors)


class Schedule:
    """A periodic sequence of sources, of which each has its share to within one at every place.

    The j-th place of a source of share p is one of ``floor(j / p) ... ceil((j + 1) / p) - 1``. Of
    the sources whose next place may have come, that one is taken whose place has to come first. It
    never misses: this is proportionate fairness on one processor (Baruah et al., Algorithmica
    1996).

    Args:
        weights: of each source; their sum is the period.
    """

    def __init__(self, weights: tuple[int, ...]):
        self.period = sum(weights)
        pattern = np.empty(self.period, np.int32)
        counts = [0] * len(weights)
        waiting = [(0, i) for i in range(len(weights))]  # by the first place that may be next
        ready: list[tuple[int, int]] = []  # by the last
        for place in range(self.period):
            while waiting and waiting[0][0] <= place:
                _, i = heapq.heappop(waiting)
                last = -(-(counts[i] + 1) * self.period // weights[i])
                heapq.heappush(ready, (last, i))
            _, chosen = heapq.heappop(ready)
            pattern[place] = chosen
            counts[chosen] += 1
            first = counts[chosen] * self.period // weights[chosen]
            heapq.heappush(waiting, (first, chosen))
        self.pattern = pattern
        self._places = [np.flatnonzero(pattern == i) for i in range(len(weights))]

    def source(self, place: int) -> int:
        """The source at a place, counted from 0."""
        return int(self.pattern[place % self.period])

    def before(self, place: int, source: int) -> int:
        """How many places before this one are the source's."""
        periods, rest = divmod(place, self.period)
        own = self._places[source]
        return periods * len(own) + int(np.searchsorted(own, rest))

    def after(self, place: int, source: int, count: int) -> int:
        """Places from ``place`` on until ``count`` of them were the source's; 0 for none."""
        if count <= 0:
            return 0
        own = self._places[source]
        periods, which = divmod(self.before(place, source) + count - 1, len(own))
        return periods * self.period + int(own[which]) + 1 - place


class _Span(NamedTuple):
    """Steps of one row from ``begin`` on, in which the same sources are read."""

    begin: int
    schedule: Schedule
    sources: tuple[int, ...]
    """The sources that are read; the schedule's are indices into them."""
    phase: int
    """Place of the schedule at ``begin``."""
    visits: tuple[int, ...]
    """Sequences of each source of the mixture before ``begin``."""


class MixtureOrder:
    """An endless order of packed sequences of several sources, with random access by step.

    It has what a :class:`SequenceOrder` has; a row has a part of each source. The pieces of the
    sources are numbered one source after another.

    Args:
        sources: the pieces of each source, the result of :func:`packing.plan` if it is known, and
            how many tokens they have.
        config: data settings.
        seed: of the run.

    Attributes:
        names: of the sources.
        weights: of the sources, integers.
        orders: each source's own order.

    Raises:
        TooFewRecords: a source has fewer pieces than a batch has sequences.
    """

    def __init__(
        self, sources: Sequence[tuple[Pieces, Sequences | None, int]], config: DataConfig, seed: int
    ):
        self.names = tuple(config.mixture)
        self._settings = tuple(config.mixture.values())
        self.rows = config.batch_size
        self.orders = []
        for name, (pieces, planned, _) in zip(self.names, sources, strict=True):
            try:
                self.orders.append(SequenceOrder(pieces, config, seed, planned))
            except TooFewRecords as error:
                found = f"config.data.mixture.{name}: {error.found.removeprefix('data: ')}"
                raise TooFewRecords(found, error.most, f"{error.advice}, or leave it out") from None
        self._tokens = [tokens for _, _, tokens in sources]
        counts = (len(pieces.num_tokens) for pieces, _, _ in sources)
        self._firsts = [0, *itertools.accumulate(counts)]
        self.weights = self._whole_weights(config.mixture_temperature)
        self._spans = self._make_spans()

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every source has been read once; with budgets, as often as they say."""
        each = (
            self._steps_until(row, source, visits)
            for row in range(self.rows)
            for source, visits in enumerate(self._needed[row])
        )
        return max(1, *each)

    def sequence(self, step: int, index: int) -> PackedSequence:
        """Look up the pieces of one sequence of a step; see :meth:`SequenceOrder.sequence`."""
        source, visit = self.place(step, index)
        own = self.orders[source].sequence(visit, index)
        return own._replace(pieces=own.pieces + np.int32(self._firsts[source]))

    def pieces_of_row(self, row: int) -> np.ndarray:
        """i32[n]: pieces of all sources that a row has."""
        each = zip(self._firsts, self.orders, strict=False)
        return np.concatenate([order.pieces_of_row(row) + np.int32(at) for at, order in each])

    def place(self, step: int, index: int) -> tuple[int, int]:
        """The source of a batch's sequence, and how many of that row were the source's before."""
        span = self._span(step, index)
        place = span.phase + step - span.begin
        which = span.schedule.source(place)
        return span.sources[which], self._visits(span, place, which)

    def sequences_before(self, step: int) -> tuple[int, ...]:
        """How many sequences of each source the steps before this one have."""
        rows = []
        for row in range(self.rows):
            span = self._span(step, row)
            counts = list(span.visits)
            for which, source in enumerate(span.sources):
                counts[source] = self._visits(span, span.phase + step - span.begin, which)
            rows.append(counts)
        return tuple(sum(each) for each in zip(*rows, strict=True))

    def passes_before(self, step: int) -> tuple[float, ...]:
        """How often the steps before this one have read each source, by its first pass's length."""
        whole = [sum(each) for each in zip(*self._passes, strict=True)]
        return tuple(n / of for n, of in zip(self.sequences_before(step), whole, strict=True))

    def counts_before(self, step: int) -> dict[str, float]:
        """Sequences and passes of each source before a step, by the names of metrics."""
        sequences, passes = self.sequences_before(step), self.passes_before(step)
        return {
            f"mixture/{name}/{what}": float(value)
            for i, name in enumerate(self.names)
            for what, value in (("sequences", sequences[i]), ("passes", passes[i]))
        }

    def lines(self, steps: int) -> list[str]:
        """A line for each source: its share, and what so many steps read of it."""
        sequences, passes = self.sequences_before(steps), self.passes_before(steps)
        whole, out = max(sum(sequences), 1), []
        for i, name in enumerate(self.names):
            cap = self._settings[i].max_epochs
            ends = f", where it ends (max_epochs={cap:g})" if 0 < cap <= passes[i] else ""
            out.append(
                f"mixture: {name}: {100 * sequences[i] / whole:.1f} % of the sequences, "
                f"{passes[i]:.2f} passes over {self._tokens[i]:,} tokens{ends}"
            )
        return out

    @functools.cached_property
    def _passes(self) -> list[list[int]]:
        """For each row, for each source: sequences that hold the row's part once."""
        rows = range(self.rows)
        return [[order.sequences_of_pass(row) for order in self.orders] for row in rows]

    @functools.cached_property
    def _needed(self) -> list[list[int]]:
        """For each row, for each source: its sequences in one epoch of the mixture."""
        sources = range(len(self.orders))
        return [[self._times(row, i, self._budget(i)) for i in sources] for row in range(self.rows)]

    def _times(self, row: int, source: int, passes: Fraction) -> int:
        """A row's sequences of so many passes, rounded up."""
        return math.ceil(passes * self._passes[row][source])

    def _budget(self, source: int) -> Fraction:
        """How often a source is read in one epoch of the mixture."""
        own = self._settings[source]
        if own.tokens:
            return Fraction(repr(own.tokens)) / self._tokens[source]
        return Fraction(repr(own.epochs or 1.0))

    def _whole_weights(self, temperature: float) -> tuple[int, ...]:
        if all(source.weight for source in self._settings):
            return whole_weights([source.weight for source in self._settings])
        sizes = [Fraction(sum(each)) for each in zip(*self._passes, strict=True)]
        if any(source.budget for source in self._settings):
            return whole_weights([self._budget(i) * size for i, size in enumerate(sizes)])
        if temperature == 1:
            return whole_weights(sizes)
        largest = max(sizes)
        return whole_weights([float(size / largest) ** (1 / temperature) for size in sizes])

    def _make_spans(self) -> list[list[_Span]]:
        """Each row's spans: one, and one more whenever a source with ``max_epochs`` ends.

        A source ends in all rows at the step at which the last of them has read its passes.
        """
        read, begin = list(range(len(self.orders))), 0
        visits = [[0] * len(self.orders) for _ in range(self.rows)]
        spans: list[list[_Span]] = [[] for _ in range(self.rows)]
        while True:
            own = Schedule(whole_weights([Fraction(self.weights[i]) for i in read]))
            phases = [row * own.period // self.rows for row in range(self.rows)]
            for row, phase in enumerate(phases):
                spans[row].append(_Span(begin, own, tuple(read), phase, tuple(visits[row])))
            ends = {
                source: max(
                    own.after(phase, which, self._cap(row, source) - visits[row][source])
                    for row, phase in enumerate(phases)
                )
                for which, source in enumerate(read)
                if self._settings[source].max_epochs
            }
            if not ends:
                return spans
            steps = min(ends.values())
            for row, phase in enumerate(phases):
                for which, source in enumerate(read):
                    new = own.before(phase + steps, which) - own.before(phase, which)
                    visits[row][source] += new
            begin += steps
            read = [i for i in read if ends.get(i, steps + 1) > steps]

    def _cap(self, row: int, source: int) -> int:
        """Sequences of a source that a row has at least before it ends."""
        passes = Fraction(repr(self._settings[source].max_epochs))
        return max(1, self._times(row, source, passes))

    def _span(self, step: int, row: int) -> _Span:
        return next(span for span in reversed(self._spans[row]) if span.begin <= step)

    def _visits(self, span: _Span, place: int, which: int) -> int:
        """How many sequences of a source a row has before a place of a span."""
        own = span.schedule
        new = own.before(place, which) - own.before(span.phase, which)
        return span.visits[span.sources[which]] + new

    def _steps_until(self, row: int, source: int, visits: int) -> int:
        """Steps in which a row has so many sequences of a source, or all until it ends."""
        for span, following in itertools.zip_longest(self._spans[row], self._spans[row][1:]):
            if source not in span.sources:  # it has ended
                return span.begin
            if following is None or following.visits[source] >= visits:
                which = span.sources.index(source)
                left = visits - span.visits[source]
                return span.begin + span.schedule.after(span.phase, which, left)
        raise AssertionError("the last span has no end")
