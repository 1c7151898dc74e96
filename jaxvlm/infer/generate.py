"""Autoregressive generation with a KV cache, one jitted program a shape."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxvlm.nn import kv as kv_cache
from jaxvlm.nn.mask import Mask
from jaxvlm.types import Batch, Out


@runtime_checkable
class Decodes(Protocol):
    """The parts of a model that generation uses."""

    def pre(self, batch: Batch) -> Any:
        """Batch -> stream with the fields ``mask``, ``kv`` and ``length``."""
        ...

    def blocks(self, stream: Any) -> Any:
        """Stream -> stream."""
        ...

    def post(self, stream: Any) -> Out:
        """Stream -> Out."""
        ...


class Sampling(NamedTuple):
    """How the next token is chosen."""

    max_new: int = 32
    """Tokens at most."""
    temperature: float = 0.0
    """0 is greedy."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a row."""


class _Loop(NamedTuple):
    """One turn of the decoding loop."""

    index: Any
    token: Any
    done: Any
    kv: Any
    out: Any


def generate(
    model: Decodes, batch: Batch, sampling: Sampling, kv_shape: tuple[int, int, int], key: jax.Array
) -> jax.Array:
    """Continue each row of ``batch``.

    Args:
        model: with its parameters in it.
        batch: prompts, padded on the left (segment 0) to one length T; one segment a row.
        sampling: static.
        kv_shape: (layers, kv heads, head dim) of the decoder.
        key: for temperatures above 0; row r of ``example_id`` draws from its own key.

    Returns:
        i32[B, max_new]: new tokens; behind a stop token all are -1.
    """
    stops = jnp.asarray(sampling.stop_ids, jnp.int32)
    B, T = batch.tokens.shape
    L, K, H = kv_shape
    size = T + sampling.max_new
    first = model.pre(batch)
    k_index = jnp.arange(size, dtype=jnp.int32)[None]
    real = jnp.concatenate(
        [batch.segment, jnp.ones((B, sampling.max_new), batch.segment.dtype)], axis=1
    )
    group = batch.bidirectional
    if group is not None:
        group = jnp.pad(group, ((0, 0), (0, sampling.max_new)))

    # Every new token counts on from the prompt's last position, whichever row holds it.
    next_position = jnp.max(batch.positions, axis=(1, 2), keepdims=True) + 1
    new_positions = next_position[:, 0] + jnp.arange(sampling.max_new, dtype=jnp.int32)
    k_position = jnp.concatenate([batch.positions[:, 0], new_positions], axis=1)

    def mask(q_index: jax.Array, q_segment: jax.Array, q_group: Any, q_position: jax.Array) -> Mask:
        # Keys that are not written yet lie after every query, so the causal rule hides them.
        parts = (q_index, k_index, q_segment, real, None, q_group, group)
        return Mask(*parts, q_position=q_position, k_position=k_position)

    cache = kv_cache.init((L, B, size, K, H), first.x.dtype)
    places = jnp.arange(T, dtype=jnp.int32)[None]
    prompt_mask = mask(places, batch.segment, batch.bidirectional, batch.positions[:, 0])
    stream = model.blocks(first._replace(kv=cache, length=jnp.int32(0), mask=prompt_mask))
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(batch.example_id)
    last = stream._replace(x=stream.x[:, -1:], kv=None)
    token = _pick(model.post(last), sampling, keys, jnp.int32(0))
    ones = jnp.ones((B, 1), batch.segment.dtype)

    def go_on(s: _Loop) -> jax.Array:
        return (s.index < sampling.max_new) & ~jnp.all(s.done)

    def turn(s: _Loop) -> _Loop:
        out = s.out.at[:, s.index].set(jnp.where(s.done, -1, s.token))
        done = s.done | jnp.any(s.token[:, None] == stops, axis=1)
        position = next_position + s.index
        new = Batch(s.token[:, None], None, position, ones)
        at = T + s.index
        q_group = None if group is None else jnp.zeros_like(ones)
        step_mask = mask(at[None, None].astype(jnp.int32), ones, q_group, position[:, 0])
        stream = model.pre(new)._replace(kv=s.kv, length=at, mask=step_mask)
        stream = model.blocks(stream)
        following = _pick(model.post(stream), sampling, keys, s.index + 1)
        return _Loop(s.index + 1, following, done, stream.kv, out)

    out = jnp.full((B, sampling.max_new), -1, jnp.int32)
    start = _Loop(jnp.int32(0), token, ~jnp.any(batch.segment > 0, axis=1), stream.kv, out)
    return jax.lax.while_loop(go_on, turn, start).out


def _pick(out: Out, sampling: Sampling, keys: jax.Array, index: jax.Array) -> jax.Array:
    """i32[B]: the token after the last hidden state of each row."""
    logits = out.logits(out.hidden[:, -1])
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draws = jax.vmap(lambda k: jax.random.fold_in(k, index))(keys)
    scaled = logits / sampling.temperature
    return jax.vmap(jax.random.categorical)(draws, scaled).astype(jnp.int32)
