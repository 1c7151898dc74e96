"""Dropout keys: a PRNG key for each sequence of a batch (see ``jaxvlm.nn.dropout``)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.parallel.islands import first_row
from jaxvlm.types import KEY_IMPL, Batch, Pairs

DropoutKeys = Callable[[Any, Any], Any]
"""(i32[] step, Batch or Pairs) -> the batch, with ``dropout_keys``."""
_STREAM = zlib.crc32(b"dropout")


def seeded(seed: int) -> DropoutKeys:
    """Make keys that are a function of the seed, the step, and the index in the global batch.

    They do not depend on the devices and hosts of a run. In pairs a key is a function of the
    example, and in it of the query or the document's index.

    Args:
        seed: the run's seed.
    """

    def with_keys(step: Any, batch: Batch | Pairs) -> Batch | Pairs:
        key = jax.random.fold_in(jax.random.key(seed, impl=KEY_IMPL), _STREAM)
        key = jax.random.fold_in(key, step)
        if isinstance(batch, Batch):
            rows = len(batch.tokens)
            return batch._replace(dropout_keys=_data(_each(key, rows, first_row(rows))))
        b, K = batch.valid.shape
        items = jax.vmap(lambda example: _each(example, 1 + K))(_each(key, b))
        query = batch.query._replace(dropout_keys=_data(items[:, 0]))
        return batch._replace(
            query=query, document=batch.document._replace(dropout_keys=_data(items[:, 1:]))
        )

    return with_keys


def _each(key: Any, count: int, first: Any = 0) -> Any:
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(first + jnp.arange(count))


def _data(keys: Any) -> jax.Array:
    return jax.random.key_data(keys)
