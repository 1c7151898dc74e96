"""Which places of its prompt a decoder layer keeps in a compressed KV cache.

A scorer gives each place of each KV head a priority, and :func:`keep` takes the highest. A prompt's
places are chosen without looking at its neighbours in the batch or at its padding.

Sources: VL-Cache, arXiv 2410.23317; SnapKV, arXiv 2404.14469; StreamingLLM, arXiv 2309.17453.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.nn.attention_rows import snapkv_scores, vl_cache_scores

SINKS = 4
"""First places of a prompt that the scorer ``window`` keeps: attention sinks, StreamingLLM."""


class Observed(NamedTuple):
    """What scorers of a layer may read; R queries are observed of prompts with S places."""

    valid: Any
    """bool[B, S]: the place holds a token of the prompt, and not padding."""
    num_kv_heads: int
    """K; static."""
    rows: Any = None
    """f32[B, K, G, R, S]: see :func:`jaxvlm.nn.attention_rows.attention_rows`; may be ``None`` for
    scorers that are not in :data:`READ_ROWS`."""
    last: Any = None
    """bool[B, R]: the row's query is one of the prompt's last tokens, and not padding."""
    after_vision: Any = None
    """bool[B, R]: the same, of the tokens after the last visual token: :func:`observed_queries`."""
    keys: Any = None
    """Random key of each prompt and layer, [B]: see :func:`selection_keys`; read by ``random``."""


def observed_queries(
    valid: jax.Array, visual: jax.Array, queries: int
) -> tuple[jax.Array, jax.Array]:
    """Tell which of the last tokens of prompts are observed.

    Args:
        valid: bool[B, T], prompts padded on the left.
        visual: bool[B, T]: the token is a visual token.
        queries: number of last tokens to look at; static.

    Returns:
        bool[B, R] twice, R being the smaller of T and ``queries``: tokens of the prompt; and those
        of them after the last visual token, with the prompt's last token in any case. Without
        images the two are equal.
    """
    after = jnp.flip(jnp.cumsum(jnp.flip(visual & valid, 1), axis=1), 1) == 0
    last_token = jnp.arange(valid.shape[1]) == valid.shape[1] - 1
    R = min(queries, valid.shape[1])
    return valid[:, -R:], (valid & (after | last_token))[:, -R:]


def selection_keys(key: jax.Array, example_id: jax.Array, layer: jax.Array) -> jax.Array:
    """Return the random key of each prompt in a layer.

    Args:
        key: random key of the seed.
        example_id: i32[B].
        layer: i32[].

    Returns:
        Keys, [B].
    """
    of_layer = jax.random.fold_in(key, layer)
    return jax.vmap(lambda i: jax.random.fold_in(of_layer, i))(example_id)


def priorities(scorer: str, seen: Observed) -> jax.Array:
    """Compute the priority of each place: f32[B, K, S], the higher, the sooner kept.

    Args:
        scorer: in :data:`PRIORITIES`; static.
        seen: what the layer's prefill shows.
    """
    return PRIORITIES[scorer](seen)


def keep(scores: jax.Array, count: jax.Array, valid: jax.Array, recent: jax.Array) -> jax.Array:
    """Choose the places that are kept.

    Args:
        scores: f32[B, K, S] priorities. Of equal ones the later place is kept; NaN comes last.
        count: i32[B], how many are kept; at most the valid ones.
        valid: bool[B, S]: the place holds a token of the prompt; padding is never kept.
        recent: i32[B]: so many of the most recent places are kept before all others.

    Returns:
        i32[B, K, S], the kept places in rising order, and after ``count`` of them the others, in
        rising order too.
    """
    place = jnp.broadcast_to(jnp.arange(scores.shape[2], dtype=jnp.int32), scores.shape)
    is_recent = valid & (_places_after(valid) < recent[:, None])
    group = jnp.where(is_recent, 0, jnp.where(valid, 1, 2)).astype(jnp.int32)
    group = jnp.broadcast_to(group[:, None], scores.shape)
    best = -jax.lax.sort((group, -scores, -place), dimension=2, num_keys=3)[2]
    is_kept = place < count[:, None, None]
    return jax.lax.sort((~is_kept, best), dimension=2, num_keys=2)[1]


def _places_after(valid: jax.Array) -> jax.Array:
    """i32[B, S]: places of the prompt that come after each."""
    until = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    return until[:, -1:] - until


def _places_before(valid: jax.Array) -> jax.Array:
    return jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid


def _vl_cache(seen: Observed) -> jax.Array:
    return vl_cache_scores(seen.rows, seen.after_vision)


def _snapkv(seen: Observed) -> jax.Array:
    window = seen.valid & (_places_after(seen.valid) < jnp.sum(seen.last, axis=1, keepdims=True))
    return snapkv_scores(seen.rows, seen.last, window)


def _window(seen: Observed) -> jax.Array:
    before = _places_before(seen.valid)
    # Above all others, the first one first: it gets the most attention.
    score = jnp.where(before < SINKS, 2.0 * before.shape[1] - before, before.astype(jnp.float32))
    return _of_heads(score, seen)


def _random(seen: Observed) -> jax.Array:
    # A key for each place of the prompt, so that its numbers depend on no shape.
    def of_place(key: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, place), (seen.num_kv_heads,))

    of_prompt = jax.vmap(of_place, in_axes=(None, 0))
    score = jax.vmap(of_prompt)(seen.keys, _places_before(seen.valid))
    return score.transpose(0, 2, 1)


def _of_heads(score: jax.Array, seen: Observed) -> jax.Array:
    B, S = score.shape
    return jnp.broadcast_to(score[:, None], (B, seen.num_kv_heads, S))


PRIORITIES: dict[str, Callable[[Observed], jax.Array]] = {
    "vl_cache": _vl_cache,
    "snapkv": _snapkv,
    "window": _window,
    "random": _random,
}
READ_ROWS = ("vl_cache", "snapkv")
"""Scorers that need attention weights; so does the allocator ``density``."""
