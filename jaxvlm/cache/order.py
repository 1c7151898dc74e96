"""The order of kept tokens, in their key: what lies in one order is never read as another's.

The orders themselves are :mod:`jaxvlm.order`'s, which models share.
"""

from __future__ import annotations

import hashlib

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

__all__ = [
    "MERGE2X2",
    "MORTON",
    "ROW_MAJOR",
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
    """The key of a picture's tokens in an order.

    Args:
        key: of the picture.
        order: of its tokens; row-major, which all towers give, leaves the key as it is.

    Returns:
        u32[4].
    """
    if order == ROW_MAJOR:
        return key
    made = hashlib.blake2b(
        key.astype("<u4").tobytes() + order.code.to_bytes(2, "little"),
        digest_size=16,
        person=b"order",  # so that it is no tile's key
    )
    return np.frombuffer(made.digest(), "<u4").copy()
