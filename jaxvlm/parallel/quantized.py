"""Parameters gathered in eight bits: a quarter of float32's bytes on the wire.

Source: qwZ of ZeRO++, arXiv 2306.10209, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxvlm.types import Params

BLOCK = 256
"""Values that share a scale, at most."""
LEAST = 32
"""Where a block would be smaller, its scale would cost what the bytes save."""


def gather_in_bytes(
    stored: Mapping[str, NamedSharding], gathered: Mapping[str, NamedSharding]
) -> Callable[[Params], Params]:
    """A function from parameters as they are stored to parameters as a step uses them.

    What changes its layout travels as signed bytes with a float32 scale a block; each value is then
    off by at most half a step, 1/254 of its block's largest. What stays where it is, vectors,
    values that are no floats and arrays that have no blocks of 32 are sent as they are. The
    gradient is that of the rounded values.

    Args:
        stored: by path, the layout between steps.
        gathered: by path, the layout that is wanted.
    """

    def one(path: str, x: jax.Array) -> jax.Array:
        here, there = stored[path], gathered[path]
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        if x.ndim < 2 or not floats or here.is_equivalent_to(there, x.ndim):
            return jax.lax.with_sharding_constraint(x, there)
        return _through_bytes(x, here, there)

    return lambda params: {path: one(path, x) for path, x in params.items()}


def _through_bytes(x: jax.Array, here: NamedSharding, there: NamedSharding) -> jax.Array:
    # Blocks lie inside of what a device holds, so that their scales need no message.
    local = here.shard_shape(x.shape)
    dim = max(range(x.ndim), key=lambda i: local[i])
    size = max(n for n in range(1, min(BLOCK, local[dim]) + 1) if local[dim] % n == 0)
    if size < LEAST:
        return jax.lax.with_sharding_constraint(x, there)
    blocks = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    cut = x.reshape(blocks)
    scale = jnp.max(jnp.abs(cut), axis=dim + 1, keepdims=True) / 127.0
    values = jnp.round(cut / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    # Rounded where they are stored, then sent, then made floats again: without a pin on either
    # side and the barrier the compiler is free to send floats.
    for layout in (here, there):
        values, scale = (_pin_blocks(a, layout, dim) for a in (values, scale))
        values, scale = jax.lax.optimization_barrier((values, scale))
    return (values.astype(x.dtype) * scale).reshape(x.shape)


def _pin_blocks(x: jax.Array, layout: NamedSharding, dim: int) -> jax.Array:
    """``x``, whose dim ``dim`` was cut in blocks, in the layout of the whole."""
    spec = [*layout.spec, *([None] * (x.ndim - 1 - len(layout.spec)))]
    spec = [*spec[: dim + 1], None, *spec[dim + 1 :]]
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, PartitionSpec(*spec)))
