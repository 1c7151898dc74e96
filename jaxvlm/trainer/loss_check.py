"""Whether a loss of the user's own adds up, asked once before the first file is written."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvlm.config import Config, MeshConfig
from jaxvlm.losses import custom_loss, registry
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import Model
from jaxvlm.types import Batch, Embeddings, Out, Pairs

_ROWS, _WIDTH, _LOGITS = 8, 8, 2**24
"""Most examples, hidden width, and most logits of a sequence: a check takes 128 MiB at most."""


def check(config: Config, model: Model, dataset: Any, rows: np.ndarray) -> None:
    """Check the loss of the user's own on examples of the first batch, with random embeddings.

    Args:
        config: of the run, with ``loss.target``.
        model: on its mesh.
        dataset: that the run trains on.
        rows: rows of the global batch that this process holds.

    Raises:
        ConfigError: what the loss gives can't be used; see ``jaxvlm.losses.custom_loss``.
    """
    with contextlib.closing(dataset.train(rows, 0)) as batches:
        batch: Any = next(batches)[0]
    one = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.local_devices()[:1])
    loss, what = registry.make_loss(config, one), registry.loss_setting(config)
    draws = np.random.default_rng(0)
    out: Out | Embeddings
    if isinstance(batch, Pairs):
        batch = _rows(batch, np.sum(batch.valid, axis=1))
        out = _embeddings(config, model, batch, draws)
    else:
        batch = _rows(batch, np.sum(batch.loss_weight, axis=1))
        batch = _window(batch, max(16, _LOGITS // config.model.decoder.vocab_size))
        out = _hidden(config, batch, draws)
    custom_loss.check_sums(loss, what, out, jax.tree.map(jnp.asarray, batch))


def _rows(batch: Any, weight: np.ndarray) -> Any:
    """The examples with most to train on, at least two."""
    best = np.argsort(-weight, kind="stable")[:_ROWS]
    best = np.resize(best, len(best) + len(best) % 2)  # two halves of a size; one alone twice
    return jax.tree.map(lambda x: x[best], batch)


def _window(batch: Batch, length: int) -> Batch:
    """At most ``length`` tokens of each sequence, around its first token with a weight."""
    if (total := batch.tokens.shape[1]) <= length:
        return batch
    first = np.argmax(batch.loss_weight > 0, axis=1)
    start = np.clip(first - length // 2, 0, total - length)
    places = start[:, None] + np.arange(length)

    def taken(x: np.ndarray | None, axis: int = 1) -> np.ndarray | None:
        if x is None:
            return None
        index = np.expand_dims(places, [n for n in range(1, x.ndim) if n != axis])
        return np.take_along_axis(x, index, axis)

    names = ("tokens", "loss_weight", "segment", "parent", "bidirectional")
    cut = {name: taken(getattr(batch, name)) for name in (*names, "image_source", "image_weight")}
    if batch.image_start is not None:  # an image before the window is none
        cut["image_start"] = np.maximum(batch.image_start - start[:, None], -1)
    return batch._replace(**cut, positions=taken(batch.positions, 2))


def _hidden(config: Config, batch: Batch, draws: np.random.Generator) -> Out:
    """An output of random hidden states, with what a model of these settings has."""
    decoder, aux = config.model.decoder, None
    if decoder.num_experts:
        shape = decoder.depth, decoder.num_experts
        aux = {
            name: jnp.asarray(draws.uniform(0.5, 1.5, shape), jnp.float32)
            for name in ("router_load", "router_probability")
        }
    return Out(
        hidden=_normal(draws, (*batch.tokens.shape, _WIDTH)),
        head=_normal(draws, (_WIDTH, decoder.vocab_size)),
        aux=aux,
        logit_cap=decoder.logit_cap or None,
    )


def _embeddings(config: Config, model: Model, pairs: Pairs, draws: np.random.Generator) -> Any:
    """Random embeddings of unit length, with what a model of these settings has."""
    dual = config.embedder == "dual"
    width = config.dual.embed_dim if dual else config.embedding.dim or config.model.decoder.width
    per_token = not dual and config.embedding.pool == "tokens"

    def column(side: Batch) -> tuple[Any, Any]:
        shape = side.tokens.shape if per_token else side.tokens.shape[:-1]
        x = _normal(draws, (*shape, width))
        mask = jnp.asarray(side.segment > 0) if per_token else None
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True), mask

    (query, query_mask), (document, document_mask) = column(pairs.query), column(pairs.document)
    start = config.dual if dual else config.embedding
    scale = jnp.float32(start.scale) if "head/scale" in model.shapes else None
    bias = jnp.float32(start.bias) if "head/bias" in model.shapes else None
    return Embeddings(query, document, query_mask, document_mask, scale, bias)


def _normal(draws: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(draws.standard_normal(shape, np.float32))
