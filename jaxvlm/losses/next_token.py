"""Next-token cross-entropy, computed over chunks of the vocabulary."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.losses.chunked_cross_entropy import VocabularyChunks, chunked_scores
from jaxvlm.losses.router import busiest, load_balance
from jaxvlm.types import Batch, Out, Sums

_AUTO_LOGITS = 8 * 2**20
"""Most logits of a sequence at once where the chunk size is automatic: 32 MiB of float32."""


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of each token given the ones before it in its segment.

    ``-log softmax(hidden[t] @ head)[tokens[t + 1]]``, weighted by ``loss_weight[t + 1]``
    where t and t + 1 are in one segment; the denominator is the sum of those weights.

    Args:
        chunk: about how many entries of the vocabulary have logits at once; 0 chooses from the
            sequence length.
        moe_aux_weight: factor of the load-balancing term of a mixture of experts; 0: no term.
            Balance is a function of the tokens that run together, so this term is the mean over
            microbatches of each one's own balance, weighted by their tokens.
        tile: columns of a chunk are a multiple of it on each device.
        shards: devices that the vocabulary is split over.
    """

    chunk: int = 0
    moe_aux_weight: float = 0.0
    tile: int = 1
    shards: int = 1
    additive: bool = True

    def __post_init__(self) -> None:
        if self.moe_aux_weight:
            object.__setattr__(self, "additive", False)

    @property
    def by_microbatch(self) -> bool:
        """Whether gradients are accumulated although a term is no sum over examples."""
        return self.moe_aux_weight > 0

    def coefficients(self) -> Mapping[str, float]:
        """Return 1 for the cross-entropy, and the load-balancing term's factor if it has one."""
        return {"loss": 1.0, **({"router": self.moe_aux_weight} if self.moe_aux_weight else {})}

    def weights(self, batch: Batch) -> dict[str, Any]:
        """Return ``loss``, the sum of predicted tokens' weights, and ``router``, the tokens."""
        weights = {"loss": jnp.sum(targets(batch)[1])}
        return weights | ({"router": num_tokens(batch)} if self.moe_aux_weight else {})

    def __call__(self, out: Out, batch: Batch) -> Sums:
        """Return sums over ``batch``: the loss, ``accuracy`` of the argmax, and experts' load."""
        labels, weight = targets(batch)
        nll, hit = token_scores(out, labels, self.chunk, self.tile, self.shards)
        total = jnp.sum(weight)
        terms = {"loss": jnp.sum(nll * weight)}
        metrics = {"accuracy": (jnp.sum(hit * weight), total)}
        if self.moe_aux_weight:
            terms["router"] = load_balance(out.aux) * num_tokens(batch)
        if out.aux and "router_load" in out.aux:
            metrics["busiest_expert"] = (busiest(out.aux), jnp.float32(1))
        return Sums(terms, metrics)


def targets(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return ``(labels i32[B, T], weight f32[B, T])``: position t's target and its weight."""
    labels = jnp.roll(batch.tokens, -1, axis=1)
    same = (jnp.roll(batch.segment, -1, axis=1) == batch.segment) & (batch.segment > 0)
    weight = jnp.where(same, jnp.roll(batch.loss_weight, -1, axis=1), 0.0)
    return labels, weight.at[:, -1].set(0.0)  # the roll wraps around the sequence's end


def num_tokens(batch: Batch) -> jax.Array:
    """Return the number of tokens that are not padding, f32[]."""
    return jnp.sum(batch.segment > 0).astype(jnp.float32)


def token_scores(
    out: Out, labels: jax.Array, chunk: int = 0, tile: int = 1, shards: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Return the negative log-likelihood of each label, and whether it is the argmax.

    Logits are float32 and exist for ``chunk`` entries of the vocabulary at a time; the backward
    pass recomputes them.

    Args:
        out: hidden [B, T, D] and head [D, V].
        labels: i32[B, T].
        chunk: entries of the vocabulary at once; 0 chooses from T.
        tile, shards: see :class:`NextToken`.

    Returns:
        ``(nll f32[B, T], hit f32[B, T])``.
    """
    if out.head is None:
        raise ValueError(
            "this model has no output matrix (config.model.decoder.head=False), and the next-token "
            "loss needs one"
        )
    V = out.head.shape[1]
    columns = chunk or max(256, _AUTO_LOGITS // labels.shape[1])
    if columns < V and (cut := VocabularyChunks.of(V, columns, tile, shards)).parts > 1:
        return chunked_scores(cut, out.hidden, out.head, labels, out.logit_cap)
    logits = out.logits(out.hidden, _product)
    # A sum and no gather: XLA's partitioner aborts on one of logits that are split by rows and by
    # columns on an island (jaxlib 0.10.2). Adding zeros changes no bit.
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    picked = jnp.sum(jnp.where(index == labels[..., None], logits, 0), axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - picked
    return nll, (_argmax(logits) == labels).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(hidden: jax.Array, head: jax.Array, preferred_element_type: Any) -> jax.Array:
    """``jnp.matmul`` with the matrix's gradient as the matmul that it is.

    Of JAX's own, a matmul and a transpose, XLA for CPUs makes a transposed copy of the logits'
    gradient, and a matmul with it at half the rate: up to half of the loss' time.
    """
    return jnp.matmul(hidden, head, preferred_element_type=preferred_element_type)


def _product_forward(hidden: jax.Array, head: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    return _product(hidden, head, dtype), (hidden, head)


def _product_backward(dtype: Any, kept: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, head = kept
    # Not the transpose, which would be all-gathered by itself.
    d_hidden = jnp.einsum("...v,dv->...d", d, head.astype(dtype))
    d_head = jnp.einsum("...d,...v->dv", hidden.astype(dtype), d)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)


_product.defvjp(_product_forward, _product_backward)


def _argmax(logits: jax.Array) -> jax.Array:
    """``jnp.argmax(logits, -1)`` as two plain reductions: XLA's argmax is 5x slower on CPU."""
    logits = jax.lax.stop_gradient(logits)
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.min(jnp.where(logits == best, index, logits.shape[-1]), axis=-1)
