"""Order in which cached tokens are stored; it is part of their key, so orders are never mixed up.

The orders themselves are defined in :mod:`jaxvlm.grid_order`, which models use too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

from jaxvlm.grid_order import (
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
    "Order",
    "TokenLayout",
    "convert",
    "inverse",
    "key_with_order",
    "parse",
    "permutation",
    "pool",
    "tiled",
]


def key_with_order(key: UInt32[np.ndarray, "4"], order: Order) -> UInt32[np.ndarray, "4"]:
    """Return the key of an image's tokens stored in an order; applied twice, it gives ``key``.

    Args:
        key: of the image.
        order: of its tokens; row-major leaves the key unchanged.

    Returns:
        u32[4].
    """
    if order == ROW_MAJOR:
        return key
    # Keys are hashes, so a key changed by this constant is not that of another image.
    digest = hashlib.blake2b(order.code.to_bytes(2, "little"), digest_size=16, person=b"order")
    return key ^ np.frombuffer(digest.digest(), "<u4").astype(np.uint32)


class TokenLayout(NamedTuple):
    """Order of an image's tokens in the cache, and the order that the model computes them in."""

    order: Order
    """Of tokens in the cache."""
    model_order: Order
    """Of the tokens that the model computes and reads."""
    side: int
    """Patches along an image's side; 0: images of any size, or embeddings of whole images."""

    def to_cache(self, tokens: Array) -> Any:
        """Reorder the model's tokens [..., P, D] for the cache: the same array, or one gather."""
        return self._convert(tokens, self.model_order, self.order)

    def from_cache(self, tokens: Array) -> Any:
        """Reorder cached tokens [..., P, D] for the model; the inverse of :meth:`to_cache`."""
        return self._convert(tokens, self.order, self.model_order)

    def cache_key(self, key: UInt32[np.ndarray, "4"]) -> UInt32[np.ndarray, "4"]:
        """Return the key that an image's tokens are cached under."""
        return key_with_order(key, self.order)

    def find(self, get: Callable[[bytes], np.ndarray | None], key: bytes) -> np.ndarray | None:
        """Look up an image's tokens, also where they were stored in another order.

        Args:
            get: returns the tokens cached under a key, or ``None``.
            key: from :meth:`cache_key`, as bytes.

        Returns:
            [P, D] in this layout's order, or ``None``.
        """
        tokens = get(key)
        if tokens is not None or not self.side:
            return tokens
        image = self.cache_key(np.frombuffer(key, np.uint32))
        blocks = (m for m in range(1, self.side + 1) if self.side % m == 0)
        for other in (MORTON, *map(tiled, blocks)):
            if other == self.order:
                continue
            tokens = get(key_with_order(image, other).tobytes())
            if tokens is not None:
                return self._convert(tokens, other, self.order)
        return None

    def _convert(self, tokens: Array, source: Order, target: Order) -> Any:
        """Reorder tokens. A class token, which is no patch of the image, stays first."""
        if source == target:
            return tokens
        index = inverse(source, self.side, self.side)[permutation(target, self.side, self.side)]
        first = tokens.shape[-2] - len(index)
        return tokens[..., np.concatenate([np.arange(first), first + index]), :]
