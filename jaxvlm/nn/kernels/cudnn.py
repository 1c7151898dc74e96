"""cuDNN's attention on NVIDIA GPUs: whole rows, or contiguous segments without a mask in memory.

JAX's public function takes no offsets, asks the running backend for its version, and refuses odd
lengths, which cuDNN takes. Its private one has wrong offsets for grouped queries (jax pull request
39521), so that they are computed here. XLA compiles without a GPU what cuDNN does not take, too:
cuDNN is asked where there is one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxvlm.nn.kernels import SAVED
from jaxvlm.parallel import compat


class Packing(NamedTuple):
    """Where segments lie in the memory of arrays [B, T, heads, H]; unused entries come last."""

    lengths: Any
    """i32[B, M]: tokens of each segment; 0 if unused."""
    offsets: Any
    """i32[B, M + 1]: each segment's first token, counted over all rows; B * T if unused."""
    held: Any
    """bool[B, T]: tokens of the segments that there is room for."""
    fill: Any
    """f32[B, T]: what other tokens get: 0, or NaN where a segment has no room."""


def packing_of(segment: jax.Array, most: int) -> Packing:
    """Find the segments.

    Args:
        segment: i32[B, T], the tokens of a segment consecutive; 0 is padding.
        most: M, room for segments per row, on the average of the rows.
    """
    batch, length = segment.shape
    real = segment > 0
    changes = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 1)), constant_values=True)
    begins, ends = ((real & x).reshape(-1) for x in (changes[:, :-1], changes[:, 1:]))
    size, tokens = batch * (most + 1), batch * length
    (first,) = jnp.nonzero(begins, size=size, fill_value=tokens)
    (last,) = jnp.nonzero(ends, size=size, fill_value=tokens - 1)
    lengths = (last + 1 - first)[: batch * most]
    fits = jnp.cumsum(begins).reshape(segment.shape) <= batch * most
    # The entry after those that there is room for is the end of the last segment, never a start.
    first = jnp.where(jnp.arange(size) < batch * most, first, tokens)
    return Packing(
        lengths.astype(jnp.int32).reshape(batch, most),
        first.astype(jnp.int32).reshape(batch, most + 1),
        real & fits,
        jnp.where(real & ~fits, jnp.nan, 0.0),
    )


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment: jax.Array | None,
    causal: bool,
    factor: float,
    most: int = 1,
) -> jax.Array:
    """Compute attention with grouped queries within segments.

    Memory for the backward pass, f32[B * most, N, T], and the number of programs go with ``most``.

    Args:
        q: [B, T, N, H] queries, in bfloat16 or float16; H is a multiple of 8 up to 128, or up to
            256 on Hopper and newer.
        k: [B, T, K, H] keys; K divides N.
        v: [B, T, K, H] values.
        segment: i32[B, T], the tokens of a segment consecutive; 0 is padding. Needs Hopper or
            newer. ``None``: each row is one segment.
        causal: a query attends to no later key.
        factor: scale of the products of queries and keys.
        most: room for segments per row, on the average of the rows.

    Returns:
        [B, T, N, H] in ``q``'s dtype, zeros for padding, NaN for segments that there is no room
        for.

    Raises:
        ValueError: packed queries of 2**31 elements or more.
    """
    if segment is not None and q.size >= 2**31:
        raise ValueError(
            f"cudnn_attention: {q.size} elements of packed queries {q.shape} are too many for "
            "cuDNN's 32-bit offsets; use fewer rows per device"
        )
    packing = None if segment is None else packing_of(segment, max(most, 2))
    return _attend(causal, factor, q, k, v, packing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(causal: bool, factor: float, q: Any, k: Any, v: Any, packing: Any) -> jax.Array:
    return _forward(causal, factor, q, k, v, packing)[0]


def _forward(causal: bool, factor: float, q: Any, k: Any, v: Any, packing: Any) -> Any:
    out, stats = compat.cudnn_forward(q, k, v, _where(packing, q, k), causal, factor)
    out, stats = checkpoint_name(_filled(out, packing), SAVED), checkpoint_name(stats, SAVED)
    return out, (q, k, v, packing, out, stats)


def _backward(causal: bool, factor: float, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, packing, out, stats = kept
    where = _where(packing, q, k)
    grads = compat.cudnn_backward(q, k, v, where, causal, factor, out, stats, d_out)
    return *(_filled(x, packing) for x in grads), None


_attend.defvjp(_forward, _backward)


def _where(packing: Packing | None, q: jax.Array, k: jax.Array) -> Any:
    """Lengths, and the offsets of queries and of keys in elements."""
    if packing is None:
        return None
    offsets = (packing.offsets * (x.shape[2] * x.shape[3]) for x in (q, k))
    return packing.lengths, *offsets


def _filled(x: jax.Array, packing: Packing | None) -> jax.Array:
    """Fill tokens that are in no listed segment, which cuDNN leaves as they are in memory."""
    if packing is None:
        return x
    held, fill = (y[..., None, None] for y in (packing.held, packing.fill.astype(x.dtype)))
    return jnp.where(held, x, fill)
