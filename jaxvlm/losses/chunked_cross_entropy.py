"""Chunked cross-entropy: logits exist for one chunk of the vocabulary at a time.

The loop goes over the vocabulary and not over tokens: a chunk's gradient of the output matrix is
then complete when it is computed, over all tokens: it is all-reduced once, and never read again.
The idea of Cut Cross-Entropy, arXiv 2411.09009; the online softmax is arXiv 1805.02867's.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class VocabularyChunks(NamedTuple):
    """How the columns of an output matrix are chunked: chunk c has every ``parts``-th, from c on.

    Where columns are split over devices, each device has a share of every chunk.
    """

    parts: int
    columns: int
    """Columns of a chunk; the last ones may be padding past the vocabulary's end."""
    vocabulary: int

    @staticmethod
    def of(vocabulary: int, columns: int) -> VocabularyChunks:
        """Chunk a vocabulary into chunks of about ``columns`` columns.

        A number of chunks that is a power of two, divides the vocabulary and leaves a factor of 8
        (for the devices that split it) needs no padding; where that makes chunks eight times as
        wide as requested, the vocabulary is padded.
        """
        most = math.floor(math.log2(vocabulary))  # so that no chunk is empty
        wanted = 2 ** min(most, math.ceil(math.log2(max(1.0, vocabulary / columns))))
        even = math.gcd(vocabulary // 8 if vocabulary % 8 == 0 else vocabulary, wanted)
        parts = even if 8 * even > wanted else wanted
        count = -(-vocabulary // parts)
        return VocabularyChunks(parts, count if parts == even else count + -count % 8, vocabulary)


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
    low = jnp.full(labels.shape, -jnp.inf, jnp.float32)
    start = (low, jnp.zeros_like(low), jnp.zeros_like(low), jnp.zeros_like(labels))

    def part(carry: Any, x: Any) -> tuple[Any, None]:
        most, total, picked, best = carry
        logits, index = _logits(cut, hidden, x, cap)[:2]
        top = jnp.max(logits, axis=-1)
        first = jnp.min(jnp.where(logits == top[..., None], index, cut.vocabulary), axis=-1)
        # Ties go to the lowest index; the indices of chunks are interleaved.
        better = (top > most) | ((top == most) & (first < best))
        new = jnp.maximum(most, top)
        total = total * jnp.exp(most - new) + jnp.sum(jnp.exp(logits - new[..., None]), axis=-1)
        picked = picked + jnp.sum(jnp.where(index == labels[..., None], logits, 0.0), axis=-1)
        return (new, total, picked, jnp.where(better, first, best)), None

    (most, total, picked, best), _ = jax.lax.scan(part, start, _parts(cut, head, hidden.dtype))
    norm = most + jnp.log(total)
    hit = (best == labels).astype(jnp.float32)
    return (norm - picked, hit), (hidden, head, labels, cap, norm)


def _backward(cut: VocabularyChunks, kept: Any, grads: Any) -> tuple[Any, ...]:
    hidden, head, labels, cap, norm = kept
    d_nll = grads[0][..., None]

    def part(d_hidden: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
        logits, index, slope = _logits(cut, hidden, x, cap)
        d = (jnp.exp(logits - norm[..., None]) - (index == labels[..., None])) * d_nll * slope
        d = d.astype(hidden.dtype)
        d_hidden = d_hidden + jnp.matmul(d, x[0].T, preferred_element_type=jnp.float32)
        return d_hidden, jnp.einsum("...d,...v->dv", hidden, d)

    parts = _parts(cut, head, hidden.dtype)
    d_hidden, d_parts = jax.lax.scan(part, jnp.zeros(hidden.shape, jnp.float32), parts)
    d_head = jnp.moveaxis(d_parts, 0, 2).reshape(len(head), -1)[:, : cut.vocabulary]
    none = None if cap is None else jnp.zeros_like(cap)
    labels_have_none = jnp.zeros(labels.shape, jax.dtypes.float0)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), labels_have_none, none


chunked_scores.defvjp(_forward, _backward)


def _parts(cut: VocabularyChunks, head: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the matrix in chunks [parts, D, columns], and each one's first column i32[parts]."""
    pad = cut.parts * cut.columns - cut.vocabulary
    head = head.astype(dtype)
    head = jnp.pad(head, ((0, 0), (0, pad))) if pad else head
    cut_up = jnp.moveaxis(head.reshape(len(head), cut.columns, cut.parts), 2, 0)
    return cut_up, jnp.arange(cut.parts, dtype=jnp.int32)


def _logits(
    cut: VocabularyChunks, hidden: jax.Array, x: tuple[jax.Array, jax.Array], cap: Any
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Return logits f32[..., columns], their vocabulary ids i32[columns], the cap's derivative."""
    weights, first = x
    logits = jnp.matmul(hidden, weights, preferred_element_type=jnp.float32)
    slope: jax.Array | float = 1.0
    if cap is not None:
        turned = jnp.tanh(logits / cap)
        logits, slope = cap * turned, 1.0 - jnp.square(turned)
    index = jnp.arange(cut.columns, dtype=jnp.int32) * cut.parts + first
    if cut.parts * cut.columns > cut.vocabulary:
        logits = jnp.where(index < cut.vocabulary, logits, -jnp.inf)
    return logits, index, slope
