"""Device memory that a run can do without for a while: a cache that holds nothing but what can be
made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxvlm.train.programs import is_out_of_memory
from jaxvlm.types import TrainState


class Room:
    """Gives a cache's memory back, all of it at once, and makes an empty one when it is asked for.

    Args:
        empty: makes an empty cache, as large as it may be, half as large, and so on; ``()``: there
            is none whose memory may be given back.
        say: takes a line whenever its size changes.

    Attributes:
        halved: how often it is, from now on.
        gone: called whenever its memory is given back.
    """

    def __init__(
        self,
        empty: Sequence[Callable[[], Any]] = (),
        say: Callable[[str], None] = lambda line: None,
    ):
        self.empty, self.say, self.halved = empty, say, 0
        self.gone: Callable[[], None] = lambda: None

    def give_back(self, state: TrainState) -> bool:
        """Free the memory of a state's cache; False where none may be, or none is left.

        The state is good for all but a step then; for that see :meth:`mended`.
        """
        arrays = [x for x in jax.tree.leaves(state.cache) if x.ndim and not x.is_deleted()]
        if not self.empty or not arrays:
            return False
        for x in arrays:
            x.delete()
        self.gone()
        return True

    def mended(self, state: TrainState) -> TrainState:
        """The state, with an empty cache where its memory was given back; its scalars go on."""
        if not any(x.is_deleted() for x in jax.tree.leaves(state.cache)):
            return state
        empty = self.empty[self.halved]()
        cache = jax.tree.map(lambda x, new: new if x.is_deleted() else x, state.cache, empty)
        return state._replace(cache=cache)

    def grow(self, state: TrainState) -> None:
        """Let the next step have twice the cache, where it was halved."""
        if self.halved:
            self.give_back(state)
            self.halved -= 1
            self.say("visual tokens: trying twice the pages again")

    def instead(self, state: TrainState, error: Exception) -> TrainState:
        """What to take the step with that ``error`` has stopped.

        Raises:
            Exception: the error, where memory was not the reason, or no less of it would do.
        """
        whole = not any(x.is_deleted() for x in jax.tree.leaves(state))
        more = self.halved + 1 < len(self.empty)
        if not (is_out_of_memory(error) and whole and more and jax.process_count() == 1):
            raise error
        self.halved += 1
        self.say(
            f"a step is short of memory: visual tokens have 1/{2**self.halved} of their pages now, "
            "and are made anew"
        )
        self.give_back(state)
        return self.mended(state)
