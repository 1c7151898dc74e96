"""A key for each row of a batch, of which masks are drawn (see ``jaxvlm.nn.dropout``)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.types import KEYS, Batch, Pairs

Noise = Callable[[Any, Any], Any]
"""(i32[] step, Batch or Pairs) -> it, with ``noise`` where something is dropped."""
_STREAM = zlib.crc32(b"dropout")


def none(step: Any, batch: Any) -> Any:
    """The batch as it is: nothing is dropped."""
    return batch


def seeded(seed: int) -> Noise:
    """Keys that are a function of the seed, the step, and the row's place in the global batch.

    The row of a step is one of the run, whatever devices and hosts there are. Of pairs it is the
    example, and in it the query or the number of the document.

    Args:
        seed: of the run.
    """

    def marked(step: Any, batch: Batch | Pairs) -> Batch | Pairs:
        key = jax.random.fold_in(jax.random.key(seed, impl=KEYS), _STREAM)
        key = jax.random.fold_in(key, step)
        if isinstance(batch, Batch):
            return batch._replace(noise=_data(_each(key, len(batch.tokens))))
        b, K = batch.there.shape
        items = jax.vmap(lambda example: _each(example, 1 + K))(_each(key, b))
        query = batch.query._replace(noise=_data(items[:, 0]))
        return batch._replace(
            query=query, document=batch.document._replace(noise=_data(items[:, 1:]))
        )

    return marked


def _each(key: Any, count: int) -> Any:
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))


def _data(keys: Any) -> jax.Array:
    return jax.random.key_data(keys)
