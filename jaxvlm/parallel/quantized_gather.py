"""All-gather parameters in eight bits: a quarter of float32's bytes on the wire.

Source: qwZ of ZeRO++, arXiv 2306.10209, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxvlm.parallel.sharding import pinned
from jaxvlm.types import Params

BLOCK = 256
"""Most values that share a quantization scale."""
LEAST = 32
"""Smallest block: below this, the scales would cost what quantization saves."""


def gather_in_bytes(
    stored: Mapping[str, NamedSharding], gathered: Mapping[str, NamedSharding]
) -> Callable[[Params], Params]:
    """Return a function from parameters as they are stored to parameters as a step uses them.

    Parameters whose sharding changes travel as int8 with one float32 scale for each block; each
    value is then off by at most half a quantization step, 1/254 of its block's largest. Parameters
    whose sharding does not change, one-dimensional ones, ones that are not floating point and ones
    without blocks of at least 32 values are sent as they are. The gradient is that of the rounded
    values.

    Args:
        stored: sharding between steps, by parameter path.
        gathered: sharding after the all-gather, by parameter path.
    """

    def one(path: str, x: jax.Array) -> jax.Array:
        before, after = stored[path], gathered[path]
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        if x.ndim < 2 or not floats or before.is_equivalent_to(after, x.ndim):
            return pinned(x, after)
        return _through_bytes(x, before, after)

    return lambda params: {path: one(path, x) for path, x in params.items()}


def _through_bytes(x: jax.Array, before: NamedSharding, after: NamedSharding) -> jax.Array:
    # Blocks lie inside of a device's shard, so that their scales need no communication.
    local = before.shard_shape(x.shape)
    dim = max(range(x.ndim), key=lambda i: local[i])
    size = max(n for n in range(1, min(BLOCK, local[dim]) + 1) if local[dim] % n == 0)
    if size < LEAST:
        return pinned(x, after)
    blocks = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    cut = x.astype(jnp.float32).reshape(blocks)
    scale = jnp.max(jnp.abs(cut), axis=dim + 1, keepdims=True) / 127.0
    values = jnp.round(cut / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    # Quantized where they are stored, then sent, then dequantized: without a sharding constraint
    # on either side and the barrier, the compiler is free to send floats.
    for layout in (before, after):
        values, scale = (_pin_blocks(a, layout, dim) for a in (values, scale))
        values, scale = jax.lax.optimization_barrier((values, scale))
    return (values.astype(jnp.float32) * scale).astype(x.dtype).reshape(x.shape)


def _pin_blocks(x: jax.Array, layout: NamedSharding, dim: int) -> jax.Array:
    """Constrain ``x``, whose dim ``dim`` was split into blocks, to the unsplit array's layout."""
    spec = [*layout.spec, *([None] * (x.ndim - 1 - len(layout.spec)))]
    spec = [*spec[: dim + 1], None, *spec[dim + 1 :]]
    return pinned(x, NamedSharding(layout.mesh, PartitionSpec(*spec)))
