"""Global batches of a run: this process's rows, placed on the mesh as they are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxvlm.cache.host_cache import HostCache
from jaxvlm.data.prefetch import TrainBatches
from jaxvlm.types import Batch, Pairs


class GlobalBatches:
    """An iterator of global batches that knows where it is.

    Args:
        source: this process's rows of each batch, numpy.
        place: puts rows on the mesh.
        host_cache: fills in the visual tokens that it holds, if there is one.

    Attributes:
        last: the global batch that was taken last.
        local: this process's rows of ``last``, numpy, visual tokens filled in.
        given: these rows as ``source`` gave them.
    """

    def __init__(
        self, source: TrainBatches, place: Callable[[Any], Any], host_cache: HostCache | None
    ):
        self.source, self.place, self._host_cache = source, place, host_cache
        self._peeked: tuple[Any, Batch | Pairs] | None = None
        self._taken = source.state()
        self.last: Batch | Pairs | None = None
        self.local: Batch | Pairs | None = None
        self.given: Any = None

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> Batch | Pairs:
        self.local = self.peek()
        assert self._peeked is not None
        self.given, _ = self._peeked
        self._peeked, self._taken = None, self.source.state()
        self.last = self.place(self.local)
        return self.last

    def peek(self) -> Batch | Pairs:
        """This process's rows of the next batch, without taking it."""
        if self._peeked is None:
            given: Any = next(self.source)[0]
            self._peeked = given, self._host_cache.fill(given) if self._host_cache else given
        return self._peeked[1]

    def state(self) -> dict[str, Any]:
        """The iterator's state after the batches that were taken."""
        return self._taken
