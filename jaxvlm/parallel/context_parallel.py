"""Ring attention: each device keeps its queries; keys and values are passed around a ring.

Source: Ring Attention, arXiv 2310.01889; the online softmax, arXiv 1805.02867.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxvlm.parallel.per_device import free_axes
from jaxvlm.parallel.rules import Axes

AXIS = "context"
HIDDEN = -0.7 * float(np.finfo(np.float32).max)
"""The score of a masked key: finite, so that a query without any key gets no NaN."""
_QUERY = ("batch", "seq", "heads", "head_dim")
_KEY = ("batch", "seq", "kv_heads", "head_dim")
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Ring(NamedTuple):
    """Static arguments of a pass around the ring."""

    size: int
    """Devices in the ring."""
    factor: float
    """Scale of the products of queries and keys."""
    cap: float
    """Logit soft cap: scores become ``cap * tanh(score / cap)``; 0: off."""
    allowed: Callable[[Any, Any], jax.Array | None]
    """Mask: metadata of queries and of keys -> bool[b, t, s]; ``None``: no mask."""


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    of_queries: dict[str, jax.Array],
    of_keys: dict[str, jax.Array],
    allowed: Callable[[Any, Any], jax.Array | None],
    axes: Axes,
    factor: float,
    cap: float = 0.0,
) -> jax.Array:
    """Attention over sequences split over the mesh axis ``context``.

    A device holds the keys and values of one other device at a time, in the backward pass too.

    Args:
        q: [B, T, N, H].
        k: [B, T, K, H], K divides N.
        v: [B, T, K, H].
        of_queries: metadata of queries for the mask, name -> i32[1 or B, T].
        of_keys: metadata of keys, in the same form; it is passed around with the keys.
        allowed: see :class:`Ring`.
        axes: mesh and rules of activations; ``context`` divides T.
        factor: scale of the scores.
        cap: logit soft cap; 0: off.

    Returns:
        [B, T, N, H] in ``q``'s dtype; the softmax is in float32.
    """
    ring = Ring(axes.mesh.shape[AXIS], factor, cap, allowed)
    spec_q, spec_k = (axes.activation(w, x.shape).spec for w, x in ((_QUERY, q), (_KEY, k)))
    rows = spec_q[0] if len(spec_q) else None

    def of(side: dict[str, jax.Array]) -> dict[str, PartitionSpec]:
        return {n: PartitionSpec(rows if x.shape[0] > 1 else None, AXIS) for n, x in side.items()}

    run = jax.shard_map(
        functools.partial(_attend, ring),
        in_specs=(spec_q, spec_k, spec_k, of(of_queries), of(of_keys)),
        out_specs=spec_q,
        check_vma=False,
        **free_axes(axes.mesh),
    )
    return run(q, k, v, of_queries, of_keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any
) -> jax.Array:
    return _forward(ring, q, k, v, of_queries, of_keys)[0]


def _forward(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, of_queries: Any, of_keys: Any
) -> tuple[jax.Array, Any]:
    heads = _by_key_head(q, k.shape[2])
    B, K, rows, H = heads.shape
    most = jnp.full((B, K, rows), HIDDEN, jnp.float32)
    total, out = jnp.zeros_like(most), jnp.zeros((B, K, rows, H), jnp.float32)

    def step(carry: Any, _: Any) -> tuple[Any, None]:
        most, total, out, (k, v, of_keys) = carry
        score, _ = _scores(ring, heads, k, of_queries, of_keys)
        new = jnp.maximum(most, jnp.max(score, axis=-1))
        shrink, weight = jnp.exp(most - new), jnp.exp(score - new[..., None])
        total = total * shrink + jnp.sum(weight, axis=-1)
        more = _einsum("bkrs,bskh->bkrh", weight.astype(v.dtype), v)
        out = out * shrink[..., None] + more
        return (new, total, out, _pass_on(ring, (k, v, of_keys))), None

    carry = (most, total, out, (k, v, of_keys))
    last, _ = jax.lax.scan(step, carry, None, length=ring.size)
    most, total, out = last[:3]
    out = _by_token(out / total[..., None], q.shape).astype(q.dtype)
    return out, (q, k, v, of_queries, of_keys, out, most, total)


def _backward(ring: Ring, kept: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, of_queries, of_keys, out, most, total = kept
    heads, d_heads = _by_key_head(q, k.shape[2]), _by_key_head(d_out, k.shape[2])
    product = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    delta = jnp.sum(_by_key_head(product, k.shape[2]), axis=-1)

    def step(carry: Any, _: Any) -> tuple[Any, None]:
        d_q, (k, v, of_keys, d_k, d_v) = carry
        score, slope = _scores(ring, heads, k, of_queries, of_keys)
        weight = jnp.exp(score - most[..., None]) / total[..., None]
        d_v += _einsum("bkrs,bkrh->bskh", weight.astype(v.dtype), d_heads)
        d_weight = _einsum("bkrh,bskh->bkrs", d_heads, v)
        d_score = (weight * (d_weight - delta[..., None]) * slope * ring.factor).astype(k.dtype)
        d_q += _einsum("bkrs,bskh->bkrh", d_score, k)
        d_k += _einsum("bkrs,bkrh->bskh", d_score, heads)
        return (d_q, _pass_on(ring, (k, v, of_keys, d_k, d_v))), None

    nothing = [jnp.zeros(x.shape, jnp.float32) for x in (heads, k, v)]
    carry = (nothing[0], (k, v, of_keys, nothing[1], nothing[2]))
    (d_q, home), _ = jax.lax.scan(step, carry, None, length=ring.size)
    d_k, d_v = home[3:]
    d_q = _by_token(d_q, q.shape).astype(q.dtype)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


def _scores(
    ring: Ring, heads: jax.Array, k: jax.Array, of_queries: Any, of_keys: Any
) -> tuple[jax.Array, jax.Array]:
    """Return scores f32[b, K, G * t, s], and their derivatives by the scaled products."""
    score = ring.factor * _einsum("bkrh,bskh->bkrs", heads, k)
    slope = jnp.ones((), jnp.float32)
    if ring.cap:
        turned = jnp.tanh(score / ring.cap)
        score, slope = ring.cap * turned, 1 - jnp.square(turned)
    seen = ring.allowed(of_queries, of_keys)
    if seen is None:
        return score, slope
    seen = jnp.tile(seen, (1, score.shape[2] // seen.shape[1], 1))[:, None]
    return jnp.where(seen, score, HIDDEN), jnp.where(seen, slope, 0.0)


def _pass_on(ring: Ring, tree: Any) -> Any:
    pairs = [(i, (i + 1) % ring.size) for i in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _by_key_head(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[b, t, N, H] -> [b, K, G * t, H]: the queries of each key/value head, group by group."""
    B, T, N, H = x.shape
    grouped = x.reshape(B, T, num_kv_heads, N // num_kv_heads, H).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(B, num_kv_heads, -1, H)


def _by_token(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of :func:`_by_key_head`."""
    B, T, N, H = shape
    return x.reshape(B, x.shape[1], -1, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
