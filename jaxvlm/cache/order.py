"""The order of kept tokens, in their key: what lies in one order is never read as another's.

The orders themselves are :mod:`jaxvlm.order`'s, which models share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

from jaxvlm.order import (
    MERGE2X2,
    MORTON,
    ROW_MAJOR,
    Order,
    convert,
    inverse,
    parse,
    permutation,
    pool,
    tiled,
)
from jaxvlm.types import Array

__all__ = [
    "MERGE2X2",
    "MORTON",
    "ROW_MAJOR",
    "Kept",
    "Order",
    "convert",
    "inverse",
    "key_with_order",
    "parse",
    "permutation",
    "pool",
    "tiled",
]


def key_with_order(key: UInt32[np.ndarray, "4"], order: Order) -> UInt32[np.ndarray, "4"]:
    """The key of a picture's tokens in an order; applied twice, the picture's again.

    Args:
        key: of the picture.
        order: of its tokens; row-major leaves the key as it is.

    Returns:
        u32[4].
    """
    if order == ROW_MAJOR:
        return key
    # Keys are hashes, so what differs from one by this is no other picture's.
    made = hashlib.blake2b(order.code.to_bytes(2, "little"), digest_size=16, person=b"order")
    return key ^ np.frombuffer(made.digest(), "<u4").astype(np.uint32)


class Kept(NamedTuple):
    """How a picture's tokens lie where they are kept, and how the model makes and reads them."""

    order: Order
    own: Order
    """The model's."""
    side: int
    """Patches of a picture's side; 0: pictures of any size, or vectors of them."""

    def keep(self, tokens: Array) -> Any:
        """The model's tokens [..., P, D] as they are kept: the same array, or one gather."""
        return self._convert(tokens, self.own, self.order)

    def give(self, tokens: Array) -> Any:
        """The inverse of :meth:`keep`."""
        return self._convert(tokens, self.order, self.own)

    def tag(self, key: UInt32[np.ndarray, "4"]) -> UInt32[np.ndarray, "4"]:
        """A picture's key as its tokens are kept by."""
        return key_with_order(key, self.order)

    def find(self, get: Callable[[bytes], np.ndarray | None], key: bytes) -> np.ndarray | None:
        """A picture's tokens as they are kept here, also where they were kept in another order.

        Args:
            get: gives what is kept by a key.
            key: that :meth:`tag` made.

        Returns:
            [P, D], or ``None``.
        """
        found = get(key)
        if found is not None or not self.side:
            return found
        picture = self.tag(np.frombuffer(key, np.uint32))
        blocks = (m for m in range(1, self.side + 1) if self.side % m == 0)
        for other in (MORTON, *map(tiled, blocks)):
            if other == self.order:
                continue
            found = get(key_with_order(picture, other).tobytes())
            if found is not None:
                return self._convert(found, other, self.order)
        return None

    def _convert(self, tokens: Array, source: Order, target: Order) -> Any:
        """A class token, which has no place in the picture, stays before the others."""
        if source == target:
            return tokens
        index = inverse(source, self.side, self.side)[permutation(target, self.side, self.side)]
        first = tokens.shape[-2] - len(index)
        return tokens[..., np.concatenate([np.arange(first), first + index]), :]
