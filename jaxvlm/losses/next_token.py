"""Next-token cross-entropy, its logits made a chunk at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.losses.router import busiest, load_balance
from jaxvlm.losses.vocabulary import Cut, chunked_scores
from jaxvlm.types import Batch, Out, Sums

_AUTO_LOGITS = 8 * 2**20
"""Logits of a row that may exist where the chunk is chosen: 32 MiB of float32."""


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of each token given the ones before it in its segment.

    ``-log softmax(hidden[t] @ head)[tokens[t + 1]]``, weighted by ``loss_weight[t + 1]``
    where t and t + 1 lie in one segment; the denominator is the sum of those weights.

    Args:
        chunk: columns of the vocabulary whose logits exist at once, about; 0 chooses from the
            row's length.
        router: factor of the load-balancing term of a mixture of experts; 0 has none.
    """

    chunk: int = 0
    router: float = 0.0
    additive: bool = True

    def __post_init__(self) -> None:
        if self.router:  # the balance of loads is one of the whole batch
            object.__setattr__(self, "additive", False)

    def coefficients(self) -> Mapping[str, float]:
        """The cross-entropy, and the router's balance where it has a factor."""
        return {"loss": 1.0, **({"router": self.router} if self.router else {})}

    def weights(self, batch: Batch) -> dict[str, Any]:
        """``loss``: the sum of the weights of predicted tokens; ``router``: 1."""
        weights = {"loss": jnp.sum(targets(batch)[1])}
        return weights | ({"router": jnp.float32(1)} if self.router else {})

    def __call__(self, out: Out, batch: Batch) -> Sums:
        """Sums over ``batch``: the loss, ``accuracy`` of the argmax, and how experts are used."""
        labels, weight = targets(batch)
        nll, hit = token_scores(out, labels, self.chunk)
        total = jnp.sum(weight)
        terms = {"loss": jnp.sum(nll * weight)}
        metrics = {"accuracy": (jnp.sum(hit * weight), total)}
        if self.router:
            terms["router"] = load_balance(out.aux)
        if out.aux and "router_load" in out.aux:
            metrics["busiest_expert"] = (busiest(out.aux), jnp.float32(1))
        return Sums(terms, metrics)


def targets(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """``(labels i32[B, T], weight f32[B, T])``: what place t predicts, and how much it counts."""
    labels = jnp.roll(batch.tokens, -1, axis=1)
    same = (jnp.roll(batch.segment, -1, axis=1) == batch.segment) & (batch.segment > 0)
    weight = jnp.where(same, jnp.roll(batch.loss_weight, -1, axis=1), 0.0)
    return labels, weight.at[:, -1].set(0.0)  # the roll wraps around the row's end


def token_scores(out: Out, labels: jax.Array, chunk: int = 0) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of each label, and whether it is the argmax.

    Logits are float32 and exist for ``chunk`` columns of the vocabulary at a time, in the backward
    pass too, where they are made again.

    Args:
        out: hidden [B, T, D] and head [D, V].
        labels: i32[B, T].
        chunk: columns; 0 chooses.

    Returns:
        ``(nll f32[B, T], hit f32[B, T])``.
    """
    if out.head is None:
        raise ValueError("this model has no output matrix (config.model.decoder.head=False)")
    V = out.head.shape[1]
    cut = Cut.of(V, min(V, chunk or max(256, _AUTO_LOGITS // labels.shape[1])))
    if cut.parts > 1:
        return chunked_scores(cut, out.hidden, out.head, labels, out.logit_cap)
    logits = out.logits(out.hidden)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - picked
    return nll, (_argmax(logits) == labels).astype(jnp.float32)


def _argmax(logits: jax.Array) -> jax.Array:
    """``jnp.argmax(logits, -1)`` as two plain reductions: XLA's own is five times slower on CPU."""
    logits = jax.lax.stop_gradient(logits)
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.min(jnp.where(logits == best, index, logits.shape[-1]), axis=-1)
