"""Compresses the KV cache of prompts: observes them as they are read, and stores the kept places.

A prompt is read whole. Each layer then keeps as many places as the policy allots it, and those of
all layers lie in one array without gaps (:class:`jaxvlm.nn.kv_cache.Kept`), so that the memory is
the budget's. Nothing more is dropped while tokens are generated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import ConfigError, DecoderConfig, layer_windows
from jaxvlm.inference import kv_selection
from jaxvlm.inference.kv_budget import LEAST, fraction_of
from jaxvlm.inference.kv_policy import KVPolicy, allocate, most_of_layer, recent_places
from jaxvlm.inference.kv_selection import Observed
from jaxvlm.nn.attention_backends import Scores
from jaxvlm.nn.attention_rows import attention_rows, densities
from jaxvlm.nn.kv_cache import Kept, KVCache, Part, read_sizes
from jaxvlm.types import Batch


class Observation(NamedTuple):
    """What a layer shows while it reads prompts; those of a stack have a leading dim L."""

    priority: Any
    """f32[B, K, T], or ``None``: the scorer reads no attention weights."""
    density: Any
    """f32[B], or ``None``: the allocator reads none."""


class KVMemory(NamedTuple):
    """Bytes of prompts' keys and values, of all layers and rows of a batch."""

    stored: int
    """Bytes that are stored."""
    whole: int
    """Bytes of whole prompts, padded to one length."""

    def text(self) -> str:
        """Format it for people."""
        share = self.stored / max(self.whole, 1)
        return (
            f"KV cache of the prompts: {self.stored / 1e6:.3g} MB instead of "
            f"{self.whole / 1e6:.3g} MB ({share:.1%})"
        )


def memory(kv: KVCache, kept: Kept, length: int) -> KVMemory:
    """Return what is kept of prompts of ``length`` tokens, padding included.

    Args:
        kv: the KV cache of new tokens, which has as many bytes for each as a prompt's had.
        kept: the kept places.
        length: T.
    """
    place = 2 * kv.k.nbytes // kv.k.shape[2]  # in all layers and rows
    return KVMemory(kept.k.nbytes + kept.v.nbytes, place * length)


def check_model(decoder: DecoderConfig) -> None:
    """Refuse models whose prompts can't be compressed.

    Raises:
        ConfigError: the message names why.
    """
    why = ""
    if any(layer_windows(decoder)):
        why = f"layers with sliding windows (config.model.decoder.window={decoder.window})"
    if decoder.visual_mask != "causal":
        why = (
            "tokens that attend to later ones "
            f"(config.model.decoder.visual_mask={decoder.visual_mask!r})"
        )
    if why:
        raise ConfigError(f"kv: this model has {why}, whose KV cache can't be compressed; kv=none")


def observer(
    policy: KVPolicy, batch: Batch, image_id: int, queries: int
) -> Callable[[jax.Array, KVCache, Scores], Observation] | None:
    """Return what looks at the attention of a layer while it reads prompts.

    Args:
        policy: settings; static.
        batch: the prompts, padded on the left.
        image_id: token of visual tokens.
        queries: number of the last tokens that have queries: those after a part that was read
            before. Static.
    """
    scores, weighs = policy.scores_rows, policy.reads_density
    if not scores and not weighs:
        return None
    valid = batch.segment > 0
    T, R = valid.shape[1], min(policy.queries, queries)
    last, after = kv_selection.observed_queries(valid, batch.tokens == image_id, R)
    causal = jnp.arange(T - R, T)[:, None] >= jnp.arange(T)
    allowed = causal & valid[:, None] & last[:, :, None]

    def observe(q: jax.Array, cache: KVCache, how: Scores) -> Observation:
        k, _ = cache.of_layer
        rows = attention_rows(q[:, -R:], k[:, :T], allowed, how)
        seen = Observed(valid, k.shape[2], rows, last, after)
        return Observation(
            kv_selection.priorities(policy.scorer, seen) if scores else None,
            densities(rows, after, allowed, policy.threshold) if weighs else None,
        )

    return observe


def capacity(policy: KVPolicy, num_layers: int, length: int, stages: int = 1) -> int:
    """Return the places that a pipeline's stage stores of a prompt of at most ``length`` tokens.

    Args:
        policy: settings.
        num_layers: layers of all stages.
        length: T.
        stages: number of stages, which divides the layers; with one, it holds all layers.
    """
    every = num_layers * length
    most = math.ceil(fraction_of(policy.budget) * every) + 1
    if policy.clip:  # VL-Cache's own formula gives each layer a hundredth of the prompt at least
        most += num_layers * (-(-length // LEAST) + 1)
    most = min(every, max(num_layers, most))
    layers = num_layers // stages
    # By density, one stage's layers may take the whole budget.
    of_layer = min(length, most_of_layer(policy.allocator, most, num_layers))
    return min(most, layers * of_layer)


def compress(
    policy: KVPolicy,
    kv: KVCache,
    batch: Batch,
    key: jax.Array,
    stages: int = 1,
    with_places: bool = False,
) -> tuple[Part, Kept]:
    """Store the places that each layer keeps.

    Args:
        policy: settings; static.
        kv: of the prompts, [L, B, T, K, H], with :class:`Observation` in ``observed``.
        batch: the prompts.
        key: seeds the scorer ``random``.
        stages: number of a pipeline's stages, each of which stores its layers' places; static.
        with_places: whether to return the places' indices too; static.

    Returns:
        Which of the kept places are a layer's, i32[L, B], and these; with several stages they have
        a leading dim of stages.
    """
    L, B, T, K, _ = kv.k.shape
    seen = kv.observed or Observation(None, None)
    valid = batch.segment > 0
    size = jnp.sum(valid, axis=1, dtype=jnp.int32)
    density = jnp.zeros((L, B)) if seen.density is None else seen.density
    count = allocate(policy, size, density)
    recent = recent_places(policy, count)

    def of_layer(of: Any) -> jax.Array:
        layer, priority, count, recent = of
        if priority is None:
            keys = kv_selection.selection_keys(key, batch.example_id, layer)
            priority = kv_selection.priorities(policy.scorer, Observed(valid, K, keys=keys))
        return kv_selection.keep(priority, count, valid, recent)

    def of_stage(k: jax.Array, v: jax.Array, chosen: Any) -> tuple[Part, Kept]:
        order = jax.lax.map(of_layer, chosen)  # [L, B, K, T]
        return _store(k, v, order, chosen[2], capacity(policy, L, T, stages))

    layers = (kv.k, kv.v, (jnp.arange(L), seen.priority, count, recent))
    if stages == 1:
        part, kept = of_stage(*layers)
        return part, kept if with_places else kept._replace(place=None)
    split = jax.tree.map(lambda x: x.reshape(stages, -1, *x.shape[1:]), layers)
    part, kept = jax.vmap(of_stage)(*split)
    kept = kept if with_places else kept._replace(place=None)
    return Part(part.start.reshape(L, B), part.count.reshape(L, B), part.size.reshape(L)), kept


def _store(
    k: jax.Array, v: jax.Array, order: jax.Array, count: jax.Array, N: int
) -> tuple[Part, Kept]:
    """Store the first ``count`` i32[L, B] places of ``order`` i32[L, B, K, T] in rows of N."""
    L, T = order.shape[0], order.shape[3]
    end = jnp.cumsum(count, axis=0)
    start = end - count
    slot = jnp.arange(N, dtype=jnp.int32)

    def of_head(k: jax.Array, v: jax.Array, order: jax.Array, start: Any, end: Any) -> Kept:
        """[L, T, H] twice, i32[L, T], i32[L] twice -> [N, H] twice, i32[N]."""
        layer = jnp.minimum(jnp.searchsorted(end, slot, side="right"), L - 1)
        place = order[layer, jnp.clip(slot - start[layer], 0, T - 1)]
        return Kept(k[layer, place], v[layer, place], place)

    # Each row and each head by itself, wherever they are: nothing is sent.
    of_row = jax.vmap(of_head, in_axes=(2, 2, 1, None, None), out_axes=1)
    kept = jax.vmap(of_row, in_axes=1)(k, v, order, start, end)
    sizes = jnp.asarray(read_sizes(N), jnp.int32)
    size = jnp.searchsorted(sizes, jnp.max(count, axis=1)).astype(jnp.int32)
    return Part(start, count, size), kept


def places(part: Part, kept: Kept, length: int) -> np.ndarray:
    """Return which places of prompts are kept, as bool[L, B, K, T] with T = ``length``."""
    start, count, place = (np.asarray(x) for x in (part.start, part.count, kept.place))
    by_stage = place if place.ndim == 4 else place[None]  # [S, B, N, K]
    (L, B), K = start.shape, place.shape[-1]
    found = np.zeros((L, B, K, length), bool)
    for layer, row, head in np.ndindex(L, B, K):
        own = slice(start[layer, row], start[layer, row] + count[layer, row])
        found[layer, row, head, by_stage[layer * len(by_stage) // L, row, own, head]] = True
    return found
