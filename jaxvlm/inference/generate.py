"""Autoregressive generation with a KV cache; one compiled program per shape."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxvlm.inference import kv_compression
from jaxvlm.inference.kv_policy import KVPolicy
from jaxvlm.nn.kv_cache import KVCache, Shared, init_kv_cache
from jaxvlm.nn.mask import Mask
from jaxvlm.types import Batch, Out


@runtime_checkable
class Decodes(Protocol):
    """The methods of a model that generation calls."""

    def pre(self, batch: Batch) -> Any:
        """Embeds a batch; the returned stream has the fields ``mask``, ``kv`` and ``cached``."""
        ...

    def blocks(self, stream: Any) -> Any:
        """Runs the transformer blocks on a stream."""
        ...

    def post(self, stream: Any) -> Out:
        """Applies the final norm and the head to a stream."""
        ...


class Sampling(NamedTuple):
    """Settings of how the next token is sampled; a static argument of jitted functions."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 means all."""
    top_p: float = 1.0
    """Total probability of the most likely tokens to sample from; 1 means all tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a sequence."""


class Compression(NamedTuple):
    """How prompts are compressed; a static argument of jitted functions."""

    policy: KVPolicy
    """What is kept."""
    image_id: int
    """Token of visual tokens."""
    stages: int = 1
    """Number of a pipeline's stages, each of which stores its layers' places."""
    with_places: bool = False
    """Whether ``DecodeState.kept`` says which places they are."""


class SharedPrefixes(NamedTuple):
    """Prefixes of prompts, such as an image, that several prompts share; in S batch shards."""

    batch: Batch
    """U prefixes of P tokens, padded on the left, with all images of the prompts; U / S of them are
    those of a shard's prompts."""
    of: Any
    """i32[S, B / S]: the prefix of each prompt, among those of its shard."""


class DecodeState(NamedTuple):
    """State of B sequences being decoded; S positions each, the first T for the prompt.

    Of a compressed prompt nothing but ``kept`` is left: T is 0.
    """

    start: Any
    """i32[]: T, the length of the prompts."""
    index: Any
    """i32[]: number of new tokens so far."""
    token: Any
    """i32[B]: the next token, not yet returned."""
    done: Any
    """bool[B]: whether the sequence has ended."""
    kv: Any
    """Keys and values of all layers: see :class:`jaxvlm.nn.kv_cache.KVCache`."""
    segment: Any
    """i32[B, S]: 0 at the padding of a prompt."""
    group: Any
    """i32[B, S]: bidirectional attention groups, or ``None``."""
    position: Any
    """i32[B, S]: row 0 of the positions."""
    next_position: Any
    """i32[B, 1, 1]: position of the first new token."""
    keys: Any
    """Sampling key of each sequence."""
    kept: Any = None
    """Kept places of compressed prompts: see :class:`jaxvlm.nn.kv_cache.Kept`."""


def prefill(
    model: Decodes,
    batch: Batch,
    sampling: Sampling,
    capacity: int,
    kv_shape: tuple[int, int, int],
    key: jax.Array,
    compression: Compression | None = None,
    prefixes: SharedPrefixes | None = None,
) -> DecodeState:
    """Fills the KV cache with the prompts, and samples the first new token of each sequence.

    Args:
        model: module with its parameters.
        batch: prompts, or what follows their prefixes, padded on the left (segment 0) to one
            length; one segment per sequence.
        sampling: sampling settings; static.
        capacity: maximum number of new tokens to allocate the KV cache for; static.
        kv_shape: (layers, kv heads, head dim) of the decoder.
        key: used at temperatures above 0; each ``example_id`` samples from its own key.
        compression: static; ``None``: the KV cache keeps whole prompts.
        prefixes: are read once, whatever number of prompts shares each.

    Returns:
        The state from which :func:`decode` continues.
    """
    first = model.pre(batch)
    whole = batch if prefixes is None else _joined(prefixes, batch)
    (B, T), (L, K, H) = whole.tokens.shape, kv_shape
    begun = T - batch.tokens.shape[1]
    kv = init_kv_cache((L, B, T + capacity, K, H), first.x.dtype)
    if prefixes is not None:
        kv = _read_prefixes(kv, model, prefixes, kv_shape)
    # New positions follow the largest position of the prompt, over all its position rows.
    next_position = jnp.max(whole.positions, axis=(1, 2), keepdims=True) + 1
    following = next_position[:, 0] + jnp.arange(capacity, dtype=jnp.int32)
    new_segment = jnp.ones((B, capacity), batch.segment.dtype)
    group = whole.bidirectional
    state = DecodeState(
        start=jnp.int32(T),
        index=jnp.int32(0),
        token=None,
        done=~jnp.any(batch.segment > 0, axis=1),
        kv=kv,
        segment=jnp.concatenate([whole.segment, new_segment], axis=1),
        group=None if group is None else jnp.pad(group, ((0, 0), (0, capacity))),
        position=jnp.concatenate([whole.positions[:, 0], following], axis=1),
        next_position=next_position,
        keys=jax.vmap(lambda i: jax.random.fold_in(key, i))(batch.example_id),
    )
    q_index, observe = jnp.arange(begun, T, dtype=jnp.int32)[None], None
    if compression:
        how = (compression.policy, whole, compression.image_id, T - begun)
        observe = kv_compression.observer(*how)
    mask = _mask(state, q_index, batch.segment, batch.bidirectional, batch.positions[:, 0])
    cached = Shared(jnp.int32(begun), observe=observe)
    stream = model.blocks(first._replace(kv=state.kv, cached=cached, mask=mask))
    last = model.post(stream._replace(x=stream.x[:, -1:], kv=None))
    state = state._replace(token=_sample(last, sampling, state.keys, state.index), kv=stream.kv)
    return _compressed(state, compression, whole, key) if compression else state


def _read_prefixes(
    kv: KVCache, model: Decodes, prefixes: SharedPrefixes, kv_shape: tuple[int, int, int]
) -> KVCache:
    """Reads the prefixes, and writes each into the rows of the prompts that share it."""
    batch, (L, K, H) = prefixes.batch, kv_shape
    U, P = batch.tokens.shape
    first = model.pre(batch)
    index, position = jnp.arange(P, dtype=jnp.int32)[None], batch.positions[:, 0]
    mask = Mask(
        index, index, batch.segment, batch.segment, q_position=position, k_position=position
    )
    empty = init_kv_cache((L, U, P, K, H), kv.k.dtype)
    read = model.blocks(first._replace(kv=empty, cached=Shared(jnp.int32(0)), mask=mask)).kv

    def write(rows: jax.Array, own: jax.Array) -> jax.Array:
        own = jnp.moveaxis(_of_prompts(jnp.moveaxis(own, 1, 0), prefixes.of), 0, 1)
        return jax.lax.dynamic_update_slice_in_dim(rows, own, 0, axis=2)

    return kv._replace(k=write(kv.k, read.k), v=write(kv.v, read.v))


def _of_prompts(x: jax.Array, of: jax.Array) -> jax.Array:
    """[U, ...] of prefixes -> [B, ...] of the prompts that share them; each shard by itself."""
    shards, rows = of.shape
    own = x.reshape(shards, -1, *x.shape[1:])
    return jax.vmap(lambda x, i: x[i])(own, of).reshape(shards * rows, *x.shape[1:])


def _joined(prefixes: SharedPrefixes, rest: Batch) -> Batch:
    """The tokens of whole prompts [B, P + T], without their images; padding may lie between."""

    def join(name: str, axis: int) -> jax.Array:
        before = _of_prompts(getattr(prefixes.batch, name), prefixes.of)
        return jnp.concatenate([before, getattr(rest, name)], axis=axis)

    if prefixes.batch.bidirectional is not None:
        raise ValueError("a prefix whose tokens attend to later ones can't be shared")
    parts = {name: join(name, 1) for name in ("tokens", "segment")}
    return rest._replace(positions=join("positions", 2), **parts)


def _compressed(state: DecodeState, how: Compression, batch: Batch, key: jax.Array) -> DecodeState:
    """Leaves nothing of the prompts but the places that are kept."""
    T = batch.tokens.shape[1]

    def of_places(chosen: slice) -> KVCache:
        return KVCache(state.kv.k[:, :, chosen], state.kv.v[:, :, chosen])

    read = of_places(slice(T))._replace(observed=state.kv.observed)
    part, kept = kv_compression.compress(how.policy, read, batch, key, how.stages, how.with_places)
    return state._replace(
        start=jnp.int32(0),
        kv=of_places(slice(T, None))._replace(part=part),
        segment=state.segment[:, T:],
        position=state.position[:, T:],
        kept=kept,
    )


def decode(
    model: Decodes, state: DecodeState, sampling: Sampling, count: int
) -> tuple[DecodeState, jax.Array]:
    """Generates the next tokens of each sequence; stops early once every sequence has ended.

    Args:
        model: module with its parameters.
        state: state with capacity for ``count`` more tokens.
        sampling: sampling settings; static.
        count: number of tokens to generate; static.

    Returns:
        The new state, and i32[B, count] tokens, -1 after a stop token.
    """
    stops = jnp.asarray(sampling.stop_ids, jnp.int32)
    ones = jnp.ones((len(state.token), 1), state.segment.dtype)
    begin = state.index

    def is_unfinished(loop: tuple[DecodeState, jax.Array]) -> jax.Array:
        s, _ = loop
        return (s.index < begin + count) & ~jnp.all(s.done)

    def step(loop: tuple[DecodeState, jax.Array]) -> tuple[DecodeState, jax.Array]:
        s, out = loop
        out = out.at[:, s.index - begin].set(jnp.where(s.done, -1, s.token))
        done = s.done | jnp.any(s.token[:, None] == stops, axis=1)
        position, length = s.next_position + s.index, s.start + s.index
        batch = Batch(s.token[:, None], None, position, ones)
        q_group = None if s.group is None else jnp.zeros_like(ones)
        mask = _mask(s, length[None, None].astype(jnp.int32), ones, q_group, position[:, 0])
        cached = Shared(length, s.kept)
        stream = model.blocks(model.pre(batch)._replace(kv=s.kv, cached=cached, mask=mask))
        token = _sample(model.post(stream), sampling, s.keys, s.index + 1)
        return s._replace(index=s.index + 1, token=token, done=done, kv=stream.kv), out

    out = jnp.full((len(state.token), count), -1, jnp.int32)
    return jax.lax.while_loop(is_unfinished, step, (state, out))


def generate(
    model: Decodes,
    batch: Batch,
    sampling: Sampling,
    max_new_tokens: int,
    kv_shape: tuple[int, int, int],
    key: jax.Array,
) -> jax.Array:
    """Runs :func:`prefill` and :func:`decode` as one program; returns i32[B, max_new_tokens]."""
    state = prefill(model, batch, sampling, max_new_tokens, kv_shape, key)
    return decode(model, state, sampling, max_new_tokens)[1]


def _mask(
    state: DecodeState,
    q_index: jax.Array,
    q_segment: jax.Array,
    q_group: Any,
    q_position: jax.Array,
) -> Mask:
    # Keys that are not written yet come after every query, so the causal mask hides them.
    k_index = jnp.arange(state.segment.shape[1], dtype=jnp.int32)[None]
    parts = (q_index, k_index, q_segment, state.segment, None, q_group, state.group)
    return Mask(*parts, q_position=q_position, k_position=state.position)


def _sample(out: Out, sampling: Sampling, keys: jax.Array, index: jax.Array) -> jax.Array:
    """i32[B]: samples the token after the last hidden state of each sequence."""
    logits = out.logits(out.hidden[:, -1])
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    token_keys = jax.vmap(lambda k: jax.random.fold_in(k, index))(keys)
    filtered = filter_logits(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    return jax.vmap(jax.random.categorical)(token_keys, filtered).astype(jnp.int32)


def filter_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Sets the logits of tokens that may not be sampled to -inf.

    Args:
        logits: f32[B, V], divided by the temperature.
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: probability to keep of the tokens that ``top_k`` leaves; the token that reaches it
            is kept.

    Returns:
        f32[B, V].

    Source: nucleus sampling, arXiv 1904.09751.
    """
    if 0 < top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if top_p < 1:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        probs = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # total probability of more likely tokens
        threshold = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return logits
