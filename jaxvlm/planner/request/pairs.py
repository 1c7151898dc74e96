"""Pairs of queries and documents in plans: shapes of their batches, and their step's gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from jaxvlm.config import Config, DualConfig, EmbeddingConfig, MeshConfig, ModelConfig
from jaxvlm.losses.registry import make_loss
from jaxvlm.parallel.rules import quiet
from jaxvlm.planner.request import abstract_devices
from jaxvlm.planner.request.abstract_devices import BatchShape
from jaxvlm.planner.request.held_dtypes import Held
from jaxvlm.spmd.gradcache import MiniBatches, pair_runner
from jaxvlm.spmd.model import Model, build_model
from jaxvlm.spmd.train_step import split
from jaxvlm.train.grad_accum import scales
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Pairs, Params

TOWERS = {"images": ("vision", "vision_top", "connector"), "texts": ("text",)}
"""Towers that images, and texts, go through before or instead of a decoder."""

WHOLE: MiniBatches = (MiniBatch(), MiniBatch())
_SCORED = ("cosine", "cosent", "margin_mse", "distill")
"""Losses that need a teacher's scores."""


class PairShapes(NamedTuple):
    """Shapes of an example, and what is done with its embeddings."""

    query: BatchShape
    document: BatchShape
    run: Config
    """Settings with the loss and pooling; see :func:`embedding_settings`."""
    documents: int = 1
    """Documents per example: its positive and its negatives."""
    mini_batches: MiniBatches = WHOLE
    """GradCache mini-batches of queries and of documents, see ``config.grad_cache``."""

    @property
    def embeddings(self) -> EmbeddingConfig | None:
        """How a vision-language model pools embeddings; ``None``: a dual encoder makes them."""
        return None if self.run.embedder == "dual" else self.run.embedding

    def sides(self, examples: int) -> list[PairColumn]:
        """Queries and documents of a batch shard with so many examples."""
        counts = (examples, examples * self.documents)
        sides = zip((self.query, self.document), counts, self.mini_batches, strict=True)
        return [
            PairColumn(rows, n, mini_batch.parts(rows.length, n)) for rows, n, mini_batch in sides
        ]

    def parts(self, examples: int) -> int:
        """GradCache mini-batches of the side that has more of them."""
        return max(side.parts for side in self.sides(examples))

    def width(self, config: ModelConfig | DualConfig) -> int:
        """Dims of an embedding."""
        if isinstance(config, DualConfig):
            return config.embed_dim
        return self.run.embedding.dim or config.decoder.width

    def products(self) -> float:
        """Cosines of a query with a document: one, or with late interaction one per pair of
        tokens.
        """
        late = self.embeddings is not None and self.embeddings.pool == "tokens"
        return float(self.query.length * self.document.length) if late else 1.0


class PairColumn(NamedTuple):
    """The queries, or the documents, of a batch shard."""

    rows: BatchShape
    number: int
    """Number of them in the batch shard."""
    parts: int
    """Number of GradCache mini-batches."""

    def runs(self, config: ModelConfig | DualConfig) -> tuple[str, ...]:
        """Towers that they go through."""
        images = TOWERS["images"] if self.rows.images else ()
        if not isinstance(config, DualConfig):
            return (*images, "decoder")
        return (*images, *(TOWERS["texts"] if self.rows.length else ()))


def embedding_settings(config: Config) -> Config:
    """Settings of a run that determine its embeddings and their loss; all others are defaults."""
    names = ("loss", "pair_loss", "embedder", "embedding")
    return Config(**{name: getattr(config, name) for name in names})


def shapes(
    config: ModelConfig | DualConfig,
    pairing: PairShapes,
    examples: int,
    sharding: jax.sharding.Sharding | None = None,
) -> Pairs:
    """Abstract batch of so many examples, on ``sharding``."""
    sides = (pairing.query, pairing.document, pairing.documents)
    result = abstract_devices.pairs(config, *sides, examples, sharding)
    if pairing.run.loss.name not in _SCORED:
        return result
    return result._replace(teacher=result.document_key.update(dtype="float32"))


def model_of(
    config: ModelConfig | DualConfig, mesh: jax.sharding.Mesh, pairing: PairShapes
) -> Model:
    """The embedding model, on ``mesh``."""
    model: Any = build_model(config, mesh, embeddings=pairing.embeddings)
    return model


def traced(
    config: ModelConfig | DualConfig,
    platform: str,
    pairing: PairShapes,
    frozen: tuple[str, ...],
    held: Held,
    examples: int,
    recompute: bool,
) -> tuple[Any, int]:
    """Trace the gradient of a device's examples: its jaxpr, and how many outputs are no gradients.

    Documents of other devices arrive in tiles, of which one exists at a time, so a device's own
    documents stand for all.

    Args:
        config: dims.
        platform: cpu | gpu | tpu.
        pairing: shapes of the examples.
        frozen: path patterns.
        held: dtypes of frozen parameters that are not float32.
        examples: examples of the device.
        recompute: run even a single mini-batch's forward pass twice, see
            :class:`jaxvlm.train.gradcache.GradCache`.
    """
    mesh = abstract_devices.mesh(MeshConfig(data=1), platform)
    model = model_of(config, mesh, pairing)
    trained, fixed = split(model, model.holding(dict(held)).shapes, frozen)
    loss = make_loss(pairing.run, mesh)
    runner = dataclasses.replace(
        pair_runner(model, trained, pairing.mini_batches), recompute=recompute
    )

    def grads(params: Params, frozen: Params, batch: Pairs) -> Any:
        return runner.loss_grad(params, frozen, batch, loss, scales(loss, batch))

    with quiet():
        batch = shapes(config, pairing, examples)
        jaxpr, out = jax.make_jaxpr(grads, return_shape=True)(trained, fixed, batch)
    return jaxpr.jaxpr, len(jax.tree.leaves(out[0]))
