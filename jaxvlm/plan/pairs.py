"""Pairs of queries and documents, for plans: what their rows are, and their step's gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from jaxvlm.build.assemble import split
from jaxvlm.build.losses import make_loss
from jaxvlm.build.model import Model, build_model
from jaxvlm.build.pairs import Chunks, pair_runner
from jaxvlm.config import DualConfig, MeshConfig, ModelConfig, TrainConfig, VectorConfig
from jaxvlm.parallel.rules import quiet
from jaxvlm.plan import absent
from jaxvlm.plan.absent import Rows
from jaxvlm.train.objective import scales
from jaxvlm.train.pairs import Chunk
from jaxvlm.types import Pairs, Params

TOWERS = {"pictures": ("vision", "top", "connector"), "texts": ("text",)}
"""What rows with pictures, and rows with texts, go through besides a decoder."""

WHOLE: Chunks = (Chunk(), Chunk())
_SCORED = ("cosine", "cosent", "margin_mse", "distill")
"""Losses from a teacher's scores."""


class Pairing(NamedTuple):
    """What an example is, and what is made of its vectors."""

    query: Rows
    document: Rows
    run: TrainConfig
    """Whose loss and pooling they are; see :func:`how`."""
    documents: int = 1
    """Of an example: its positive, and its negatives."""
    chunks: Chunks = WHOLE
    """Of queries and of documents, see ``config.grad_cache``."""

    @property
    def vectors(self) -> VectorConfig | None:
        """What a vision-language model's rows become; ``None``: a dual encoder makes vectors."""
        return None if self.run.encoder == "dual" else self.run.vectors

    def sides(self, examples: int) -> list[Side]:
        """Queries and documents of a shard's ``examples``."""
        counts = (examples, examples * self.documents)
        sides = zip((self.query, self.document), counts, self.chunks, strict=True)
        return [Side(rows, n, chunk.parts(rows.length, n)) for rows, n, chunk in sides]

    def parts(self, examples: int) -> int:
        """Chunks of that side which has more of them."""
        return max(side.parts for side in self.sides(examples))

    def width(self, config: ModelConfig | DualConfig) -> int:
        """Of a vector."""
        if isinstance(config, DualConfig):
            return config.embed_dim
        return self.run.vectors.dim or config.decoder.width

    def products(self) -> float:
        """Cosines of a query with a document: one, or one for each two of their tokens."""
        late = self.vectors is not None and self.vectors.pool == "tokens"
        return float(self.query.length * self.document.length) if late else 1.0


class Side(NamedTuple):
    """Queries, or documents."""

    rows: Rows
    number: int
    """Of a shard."""
    parts: int
    """Chunks that they are run in."""

    def runs(self, config: ModelConfig | DualConfig) -> tuple[str, ...]:
        """Towers that they go through."""
        pictures = TOWERS["pictures"] if self.rows.pictures else ()
        if not isinstance(config, DualConfig):
            return (*pictures, "decoder")
        return (*pictures, *(TOWERS["texts"] if self.rows.length else ()))


def how(config: TrainConfig) -> TrainConfig:
    """What of a run's settings says how vectors are made and what they lose; all else default."""
    names = ("loss", "pair_loss", "encoder", "vectors")
    return TrainConfig(**{name: getattr(config, name) for name in names})


def shapes(
    config: ModelConfig | DualConfig,
    pairing: Pairing,
    examples: int,
    sharding: jax.sharding.Sharding | None = None,
) -> Pairs:
    """Of so many examples, on ``sharding``."""
    sides = (pairing.query, pairing.document, pairing.documents)
    made = absent.pairs(config, *sides, examples, sharding)
    scored = pairing.run.loss in _SCORED
    return made._replace(teacher=made.document_key.update(dtype="float32")) if scored else made


def model_of(config: ModelConfig | DualConfig, mesh: jax.sharding.Mesh, pairing: Pairing) -> Model:
    """The model of vectors, on ``mesh``."""
    model: Any = build_model(config, mesh, vectors=pairing.vectors)
    return model


def traced(
    config: ModelConfig | DualConfig,
    platform: str,
    pairing: Pairing,
    frozen: tuple[str, ...],
    examples: int,
    again: bool,
) -> tuple[Any, int]:
    """The gradient of a device's examples, as a jaxpr, and how many of its outputs are none.

    Documents of other devices go by in tiles, of which one exists at a time, so a device's own
    stand for all.

    Args:
        config: dims.
        platform: cpu | gpu | tpu.
        pairing: what the examples are.
        frozen: path patterns.
        examples: of the device.
        again: rows of one chunk are run again too, see :class:`jaxvlm.train.pairs.Paired`.
    """
    mesh = absent.mesh(MeshConfig(data=1), platform)
    model = model_of(config, mesh, pairing)
    own, still = split(model, model.shapes, frozen)
    loss = make_loss(pairing.run, mesh)
    runner = dataclasses.replace(pair_runner(model, own, pairing.chunks), again=again)

    def grads(params: Params, frozen: Params, batch: Pairs) -> Any:
        return runner.loss_grad(params, frozen, batch, loss, scales(loss, batch))

    with quiet():
        batch = shapes(config, pairing, examples)
        jaxpr, out = jax.make_jaxpr(grads, return_shape=True)(own, still, batch)
    return jaxpr.jaxpr, len(jax.tree.leaves(out[0]))
