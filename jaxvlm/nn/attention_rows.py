"""Rows of attention weights of a few chosen queries, and what they say of keys and layers.

They decide what a compressed KV cache keeps: scores of places (the higher, the sooner kept), and
the density of a layer. In this file R is the number of chosen queries, of which each prompt may
observe others; their product with the keys is [R, S], never [S, S].

Sources: VL-Cache, arXiv 2410.23317; SnapKV, arXiv 2404.14469, in the form of kvpress.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxvlm.config import ConfigError
from jaxvlm.nn.attention_backends import Scores, masked_scores


def attention_rows(
    q: jax.Array, k: jax.Array, allowed: jax.Array, scores: Scores | None = None
) -> jax.Array:
    """Compute the attention weights of some queries.

    Args:
        q: [B, R, N, H] chosen queries, after rotary positions and norms.
        k: [B, S, K, H] keys; K divides N.
        allowed: bool[B, R, S]: the query attends to the key.
        scores: scale and soft cap of the layer; ``None``: neither.

    Returns:
        f32[B, K, G, R, S], softmax in float32. A query with no allowed key has zeros.
    """
    score = masked_scores(q, k, allowed, scores or Scores())
    weight = jax.nn.softmax(score, axis=-1).transpose(0, 1, 3, 2, 4)
    return jnp.where(allowed[:, None, None], weight, 0)


def vl_cache_scores(rows: jax.Array, observed: jax.Array) -> jax.Array:
    """Sum the attention that places get from the observed queries; the mean of a group's heads.

    The paper leaves open how grouped query heads share one ranking. The mean ranks as the sum does,
    and its size does not depend on G.

    Args:
        rows: f32[B, K, G, R, S] attention weights.
        observed: bool[B, R]: the queries that count (VL-Cache: those after the last visual token).

    Returns:
        f32[B, K, S].
    """
    return jnp.sum(jnp.where(observed[:, None, None, :, None], rows, 0), axis=3).mean(axis=2)


def densities(
    rows: jax.Array, observed: jax.Array, allowed: jax.Array, threshold: float = 0.01
) -> jax.Array:
    """Compute the density of a layer: the share of attention weights that are not negligible.

    They are counted over all query heads as integers, so a density has the same bits wherever heads
    and keys are. It is 1 minus the paper's sparsity, the mean over the query heads.

    Args:
        rows: f32[B, K, G, R, S] attention weights.
        observed: bool[B, R]: the queries that count.
        allowed: bool[B, R, S]: the query attends to the key; the weights of which shares are taken.
        threshold: a weight counts from this share of its row's largest on, static.

    Returns:
        f32[B] in [0, 1]; 0 where nothing is observed.

    Raises:
        ConfigError: so many weights that their count does not fit into 32 bits.
    """
    K, G, R, S = rows.shape[1:]
    if K * G * R * S >= 2**32:
        raise ConfigError(
            f"{K * G} heads x {R} queries x {S} keys are 2**32 attention weights or more, which a "
            f"layer's density can't count; observe at most {(2**32 - 1) // (K * G * S)} queries"
        )
    counted = (observed[:, :, None] & allowed)[:, None, None]
    dense = counted & (rows >= threshold * jnp.max(rows, axis=-1, keepdims=True))
    count = jnp.sum(dense, axis=(1, 2, 3, 4), dtype=jnp.uint32)
    total = K * G * jnp.sum(counted, axis=(1, 2, 3, 4), dtype=jnp.uint32)
    return count.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)


def snapkv_scores(
    rows: jax.Array, observed: jax.Array, window: jax.Array, kernel: int = 5
) -> jax.Array:
    """Average the attention that places get from the last queries, over neighbouring places too.

    Args:
        rows: f32[B, K, G, R, S] attention weights.
        observed: bool[B, R]: the last queries of the prompt.
        window: bool[B, S]: the places of these queries, which are kept first.
        kernel: places that are averaged, odd; those outside of the prompt and in the window are 0.

    Returns:
        f32[B, K, S], the mean of a group's heads; infinite in the window.

    Raises:
        ConfigError: the kernel is even.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"SnapKV's kernel={kernel}; it has a middle: use an odd number")
    count = jnp.maximum(jnp.sum(observed, axis=1), 1)[:, None, None]
    mean = jnp.where(window[:, None], 0, vl_cache_scores(rows, observed) / count)
    around = jnp.pad(mean, ((0, 0), (0, 0), (kernel // 2, kernel // 2)))
    S = mean.shape[2]
    # Added up from left to right, so the sum does not depend on padding.
    pooled = sum((around[:, :, i : i + S] for i in range(1, kernel)), start=around[:, :, :S])
    return jnp.where(window[:, None], jnp.inf, pooled / kernel)
