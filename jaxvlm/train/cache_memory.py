"""Device memory of a cache whose contents can be recomputed, so it may be freed at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.train.program_memory import is_out_of_memory
from jaxvlm.types import TrainState


class CacheMemory:
    """Evicts a cache to free device memory, and allocates an empty one when a step needs it.

    Args:
        empty: functions that allocate an empty cache: of full size, of half the size, and so on;
            ``()``: there is no cache that may be evicted.
        log: takes a line for the log whenever the cache's size changes.

    Attributes:
        halved: how many times the cache is halved, from the next allocation on.
        on_evict: called whenever the cache is evicted.
    """

    def __init__(
        self,
        empty: Sequence[Callable[[], Any]] = (),
        log: Callable[[str], None] = lambda line: None,
    ):
        self.empty, self.log, self.halved = empty, log, 0
        self.on_evict: Callable[[], None] = lambda: None

    def evict(self, state: TrainState) -> bool:
        """Free the device memory of a state's cache.

        The state can be used for anything but a train step then; before one, see :meth:`restored`.

        Returns:
            False where there is no cache that may be evicted, or it is evicted already.
        """
        arrays = [x for x in jax.tree.leaves(state.cache) if x.ndim and not x.is_deleted()]
        if not self.empty or not arrays:
            return False
        for x in arrays:
            x.delete()
        self.on_evict()
        return True

    def restored(self, state: TrainState) -> TrainState:
        """Return the state with an empty cache where it was evicted; the cache's scalars stay."""
        if not any(x.is_deleted() for x in jax.tree.leaves(state.cache)):
            return state
        empty = self.empty[self.halved]()
        cache = jax.tree.map(lambda x, new: new if x.is_deleted() else x, state.cache, empty)
        return state._replace(cache=cache)

    def grow(self, state: TrainState) -> None:
        """Double the cache for the next step, where it was halved."""
        if self.halved:
            self.evict(state)
            self.halved -= 1
            self.log("visual-token cache: trying twice the pages again")

    def retry_smaller(self, state: TrainState, error: Exception) -> TrainState:
        """Halve the cache after a step that ran out of memory.

        Args:
            state: that the step was given.
            error: that the step raised.

        Returns:
            The state to repeat the step with.

        Raises:
            Exception: ``error``, where it is not out of memory, where the cache can't be halved
                further, where the state was consumed, or where there are several processes.
        """
        is_intact = not any(x.is_deleted() for x in jax.tree.leaves(state))
        can_halve = self.halved + 1 < len(self.empty)
        if not (is_out_of_memory(error) and is_intact and can_halve and jax.process_count() == 1):
            raise error
        self.halved += 1
        self.log(
            f"a step is short of memory: the visual-token cache is cut to 1/{2**self.halved} of "
            "its pages, and its tokens are recomputed"
        )
        self.evict(state)
        return self.restored(state)
