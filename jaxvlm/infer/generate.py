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
    """How the next token is chosen; static."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Only the so many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; 1 is all."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a row."""


class Decoding(NamedTuple):
    """Rows on their way; S places in all, the prompt's T first."""

    start: Any
    """i32[]: T."""
    index: Any
    """i32[]: new tokens so far."""
    token: Any
    """i32[B]: the next one, not yet given out."""
    done: Any
    """bool[B]."""
    kv: Any
    segment: Any
    """i32[B, S]: 0 where a prompt's padding lies."""
    group: Any
    """i32[B, S]: bidirectional groups, or ``None``."""
    position: Any
    """i32[B, S]: row 0 of the positions."""
    next_position: Any
    """i32[B, 1, 1]: of the first new token."""
    keys: Any
    """Keys of the rows' draws."""


def prefill(
    model: Decodes,
    batch: Batch,
    sampling: Sampling,
    capacity: int,
    kv_shape: tuple[int, int, int],
    key: jax.Array,
) -> Decoding:
    """Read prompts, and choose each row's first new token.

    Args:
        model: with its parameters in it.
        batch: prompts, padded on the left (segment 0) to one length T; one segment a row.
        sampling: static.
        capacity: new tokens that there shall be room for; static.
        kv_shape: (layers, kv heads, head dim) of the decoder.
        key: for temperatures above 0; row r of ``example_id`` draws from its own key.
    """
    B, T = batch.tokens.shape
    L, K, H = kv_shape
    first = model.pre(batch)
    # Every new token counts on from the prompt's last position, whichever row holds it.
    next_position = jnp.max(batch.positions, axis=(1, 2), keepdims=True) + 1
    following = next_position[:, 0] + jnp.arange(capacity, dtype=jnp.int32)
    new = jnp.ones((B, capacity), batch.segment.dtype)
    group = batch.bidirectional
    state = Decoding(
        start=jnp.int32(T),
        index=jnp.int32(0),
        token=None,
        done=~jnp.any(batch.segment > 0, axis=1),
        kv=kv_cache.init((L, B, T + capacity, K, H), first.x.dtype),
        segment=jnp.concatenate([batch.segment, new], axis=1),
        group=None if group is None else jnp.pad(group, ((0, 0), (0, capacity))),
        position=jnp.concatenate([batch.positions[:, 0], following], axis=1),
        next_position=next_position,
        keys=jax.vmap(lambda i: jax.random.fold_in(key, i))(batch.example_id),
    )
    places = jnp.arange(T, dtype=jnp.int32)[None]
    mask = _mask(state, places, batch.segment, group, batch.positions[:, 0])
    stream = model.blocks(first._replace(kv=state.kv, length=jnp.int32(0), mask=mask))
    last = model.post(stream._replace(x=stream.x[:, -1:], kv=None))
    token = _pick(last, sampling, state.keys, state.index)
    return state._replace(token=token, kv=stream.kv)


def decode(
    model: Decodes, state: Decoding, sampling: Sampling, count: int
) -> tuple[Decoding, jax.Array]:
    """The next tokens of each row; stops early where every row has ended.

    Args:
        model: with its parameters in it.
        state: there is room for ``count`` tokens more.
        sampling: static.
        count: static.

    Returns:
        The state after them, and i32[B, count]; behind a stop token all are -1.
    """
    stops = jnp.asarray(sampling.stop_ids, jnp.int32)
    ones = jnp.ones((len(state.token), 1), state.segment.dtype)
    begin = state.index

    def go_on(loop: tuple[Decoding, jax.Array]) -> jax.Array:
        s, _ = loop
        return (s.index < begin + count) & ~jnp.all(s.done)

    def turn(loop: tuple[Decoding, jax.Array]) -> tuple[Decoding, jax.Array]:
        s, out = loop
        out = out.at[:, s.index - begin].set(jnp.where(s.done, -1, s.token))
        done = s.done | jnp.any(s.token[:, None] == stops, axis=1)
        position, at = s.next_position + s.index, s.start + s.index
        new = Batch(s.token[:, None], None, position, ones)
        q_group = None if s.group is None else jnp.zeros_like(ones)
        mask = _mask(s, at[None, None].astype(jnp.int32), ones, q_group, position[:, 0])
        stream = model.blocks(model.pre(new)._replace(kv=s.kv, length=at, mask=mask))
        token = _pick(model.post(stream), sampling, s.keys, s.index + 1)
        return s._replace(index=s.index + 1, token=token, done=done, kv=stream.kv), out

    out = jnp.full((len(state.token), count), -1, jnp.int32)
    return jax.lax.while_loop(go_on, turn, (state, out))


def generate(
    model: Decodes,
    batch: Batch,
    sampling: Sampling,
    max_new: int,
    kv_shape: tuple[int, int, int],
    key: jax.Array,
) -> jax.Array:
    """i32[B, max_new]: :func:`prefill` and :func:`decode` in one program."""
    state = prefill(model, batch, sampling, max_new, kv_shape, key)
    return decode(model, state, sampling, max_new)[1]


def _mask(
    state: Decoding, q_index: jax.Array, q_segment: jax.Array, q_group: Any, q_position: jax.Array
) -> Mask:
    # Keys that are not written yet lie after every query, so the causal rule hides them.
    k_index = jnp.arange(state.segment.shape[1], dtype=jnp.int32)[None]
    parts = (q_index, k_index, q_segment, state.segment, None, q_group, state.group)
    return Mask(*parts, q_position=q_position, k_position=state.position)


def _pick(out: Out, sampling: Sampling, keys: jax.Array, index: jax.Array) -> jax.Array:
    """i32[B]: the token after the last hidden state of each row."""
    logits = out.logits(out.hidden[:, -1])
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draws = jax.vmap(lambda k: jax.random.fold_in(k, index))(keys)
    kept = restrict(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    return jax.vmap(jax.random.categorical)(draws, kept).astype(jnp.int32)


def restrict(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """``logits`` f32[B, V] with -inf where a token may not be drawn.

    Args:
        logits: divided by the temperature.
        top_k: tokens kept; 0 is all.
        top_p: probability kept, of what ``top_k`` leaves; the token that reaches it stays
            (arXiv 1904.09751).
    """
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p < 1:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        share = jax.nn.softmax(ordered, axis=-1)
        reached = jnp.cumsum(share, axis=-1) - share  # by the tokens before
        least = jnp.min(jnp.where(reached < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
