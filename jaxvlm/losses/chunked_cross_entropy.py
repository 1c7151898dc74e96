"""Chunked cross-entropy: logits exist for one chunk of the vocabulary at a time.

The loop goes over the vocabulary and not over tokens: a chunk's gradient of the output matrix is
then complete when it is computed, over all tokens: it is all-reduced once, and never read again.
The idea of Cut Cross-Entropy, arXiv 2411.09009; the online softmax is arXiv 1805.02867's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class VocabularyChunks(NamedTuple):
    """How the columns of an output matrix are chunked.

    Each shard is chunked by itself, so that each device that the columns are split over has a share
    of every chunk. A shard's last chunk ends where the shard does: some of its columns are in the
    chunk before, too, and count there.
    """

    parts: int
    """Chunks."""
    columns: int
    """Columns of a chunk in a shard; at most those of a shard."""
    vocabulary: int
    """Columns in all."""
    shards: int = 1
    """A divisor of the vocabulary."""

    @staticmethod
    def of(vocabulary: int, columns: int, tile: int = 1, shards: int = 1) -> VocabularyChunks:
        """Chunk a vocabulary.

        Of the widths from half of ``columns`` to ``columns``, the one with the fewest columns that
        are in two chunks is taken.

        Args:
            vocabulary: entries.
            columns: most columns of a chunk, over all shards; a tile each is the least.
            tile: a chunk's columns in a shard are a multiple of it, where the shard has as many.
            shards: devices that the vocabulary is split over; 1 is taken where it is no divisor.
        """
        shards = 1 if vocabulary % shards else shards
        own = vocabulary // shards
        most = max(1, min(own, columns // shards) // tile)
        widths = [min(own, tile * n) for n in range(-(-most // 2), most + 1)]
        best = min(widths, key=lambda width: (-own % width, -width))
        return VocabularyChunks(-(-own // best), best, vocabulary, shards)

    @property
    def own(self) -> int:
        """Columns of a shard."""
        return self.vocabulary // self.shards


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_scores(
    cut: VocabularyChunks, hidden: jax.Array, head: jax.Array, labels: jax.Array, cap: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihood of each label, and whether it is the argmax.

    Args:
        cut: chunks of the vocabulary.
        hidden: [..., D]; leading dims are not flattened, as they may be split over devices.
        head: [D, V], cast to ``hidden``'s dtype; logits and sums are float32.
        labels: i32[...].
        cap: f32[], logit soft cap: logits become ``cap * tanh(logits / cap)``; it has no gradient.

    Returns:
        ``(nll, hit)``, f32[...] both; ``hit`` has no gradient.
    """
    return _forward(cut, hidden, head, labels, cap)[0]


def _forward(
    cut: VocabularyChunks, hidden: jax.Array, head: jax.Array, labels: jax.Array, cap: Any
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    matrix = _sharded(cut, head, hidden.dtype)
    low = jnp.full(labels.shape, -jnp.inf, jnp.float32)
    start = (low, jnp.zeros_like(low), jnp.zeros_like(low), jnp.zeros_like(labels))

    def part(carry: Any, x: Any) -> tuple[Any, None]:
        most, total, picked, best = carry
        logits, index = _logits(cut, hidden, _columns(cut, matrix, x), x, cap)[:2]
        top = jnp.max(logits, axis=-1)
        first = jnp.min(jnp.where(logits == top[..., None], index, cut.vocabulary), axis=-1)
        # Ties go to the lowest index; the indices of shards are interleaved.
        better = (top > most) | ((top == most) & (first < best))
        new = jnp.maximum(most, top)
        total = total * jnp.exp(most - new) + jnp.sum(jnp.exp(logits - new[..., None]), axis=-1)
        picked = picked + jnp.sum(jnp.where(index == labels[..., None], logits, 0.0), axis=-1)
        return (new, total, picked, jnp.where(better, first, best)), None

    (most, total, picked, best), _ = jax.lax.scan(
        part, start, jnp.arange(cut.parts, dtype=jnp.int32)
    )
    norm = most + jnp.log(total)
    hit = (best == labels).astype(jnp.float32)
    return (norm - picked, hit), (hidden, head, labels, cap, norm)


def _backward(cut: VocabularyChunks, kept: Any, grads: Any) -> tuple[Any, ...]:
    hidden, head, labels, cap, norm = kept
    d_nll, matrix = grads[0][..., None], _sharded(cut, head, hidden.dtype)

    def part(carry: Any, x: Any) -> tuple[Any, None]:
        d_hidden, d_matrix = carry
        weights = _columns(cut, matrix, x)
        logits, index, slope = _logits(cut, hidden, weights, x, cap)
        d = (jnp.exp(logits - norm[..., None]) - (index == labels[..., None])) * d_nll * slope
        d = d.astype(hidden.dtype)
        d_hidden = d_hidden + jnp.matmul(d, weights.T, preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("...d,...v->dv", hidden, d).reshape(*matrix.shape[:-1], -1)
        at = _start(cut, x)
        return (d_hidden, jax.lax.dynamic_update_slice_in_dim(d_matrix, d_weights, at, -1)), None

    start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(matrix))
    # The last chunk comes first: the one before writes over its columns that are in both.
    (d_hidden, d_matrix), _ = jax.lax.scan(
        part, start, jnp.arange(cut.parts, dtype=jnp.int32), reverse=True
    )
    d_head = d_matrix.reshape(head.shape).astype(head.dtype)
    none = None if cap is None else jnp.zeros_like(cap)
    return d_hidden.astype(hidden.dtype), d_head, jnp.zeros(labels.shape, jax.dtypes.float0), none


chunked_scores.defvjp(_forward, _backward)


def _sharded(cut: VocabularyChunks, head: jax.Array, dtype: Any) -> jax.Array:
    """Return the matrix as [D, shards, columns of a shard], or [D, V] if there is one shard.

    XLA for CPUs copies a reshaped matrix before a loop.
    """
    head = head.astype(dtype)
    return head if cut.shards == 1 else head.reshape(len(head), cut.shards, cut.own)


def _start(cut: VocabularyChunks, part: jax.Array) -> jax.Array:
    """Return a chunk's first column in a shard."""
    return jnp.minimum(part * cut.columns, cut.own - cut.columns)


def _columns(cut: VocabularyChunks, matrix: jax.Array, part: jax.Array) -> jax.Array:
    """Return a chunk of the matrix, [D, shards * columns]."""
    columns = jax.lax.dynamic_slice_in_dim(matrix, _start(cut, part), cut.columns, -1)
    return columns.reshape(len(matrix), -1)


def _logits(
    cut: VocabularyChunks, hidden: jax.Array, weights: jax.Array, part: jax.Array, cap: Any
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Return logits f32[..., columns], their vocabulary ids i32[columns], the cap's derivative.

    Columns that the chunk before has too have logits of -inf, and the id of no entry.
    """
    logits = jnp.matmul(hidden, weights, preferred_element_type=jnp.float32)
    slope: jax.Array | float = 1.0
    if cap is not None:
        turned = jnp.tanh(logits / cap)
        logits, slope = cap * turned, 1.0 - jnp.square(turned)
    shard, column = jnp.divmod(jnp.arange(cut.shards * cut.columns, dtype=jnp.int32), cut.columns)
    place = _start(cut, part) + column
    index = shard * cut.own + place
    if cut.own % cut.columns:
        is_new = place >= part * cut.columns
        logits = jnp.where(is_new, logits, -jnp.inf)
        index = jnp.where(is_new, index, cut.vocabulary)
    return logits, index, slope
