"""How a model of vectors is run on pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jaxvlm.build.model import Model
from jaxvlm.build.runners import runner_of
from jaxvlm.config import ConfigError, DualConfig, GradCacheConfig
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.train.pairs import Chunk, Paired, Side
from jaxvlm.train.runner import OnOwnRows
from jaxvlm.types import Batch, Params, Runner

Chunks = tuple[Chunk, Chunk]
"""Of queries and of documents."""
CHOSEN = -1
"""``config.grad_cache.query``: the planner's choice, of documents too."""
_TOWERS = ("vision", "text")


def chunks_of(config: GradCacheConfig) -> Chunks:
    """Of queries and of documents.

    Raises:
        ConfigError: a number that has no meaning.
    """
    for name, value in dataclasses.asdict(config).items():
        if value < 0:
            raise ConfigError(
                f"config.grad_cache.{name}={value}: at least 0, which is all; query={CHOSEN} alone "
                "leaves all three to the planner"
            )
    return Chunk(config.query, config.tokens), Chunk(config.document, config.tokens)


def group_of(model: Model) -> int:
    """What divides the number of a side's chunks.

    Interleaved chunks of layers take microbatches by as many as there are stages.
    """
    stages = model.mesh.shape["stage"]
    return stages if stages > 1 and model.strategies["decoder"].chunks > 1 else 1


def pair_runner(
    model: Model, trained: Collection[str], chunks: Chunks, axes: tuple[str, ...] = ()
) -> Paired:
    """What takes the gradient of a loss over vectors.

    Args:
        model: of vectors.
        trained: paths of its trainable parameters.
        chunks: rows that are run at once.
        axes: batch axes over which gradients are not added up: see :class:`OnOwnRows`. (): the
            compiler adds each chunk's.
    """
    dual = isinstance(model.config, DualConfig)

    def any_of(*parts: str) -> bool:
        return any(path.startswith(parts) for path in trained)

    def learns(batch: Batch) -> bool:
        pictures = any(x is not None for x in (batch.pixels, batch.patches, batch.features))
        if not dual:
            return any_of("decoder/", "head/project", *["vision/", "top/", "connector/"] * pictures)
        seen = {"vision": pictures, "text": batch.tokens.shape[1] > 0}
        return any(any_of(f"{t}/", f"head/{t}") for t in _TOWERS if seen[t])

    def behind(params: Params, batch: Batch) -> Batch:
        return model.module(params).towers(batch, still)  # what is frozen drops nothing

    # A tower that is elsewhere has made its features.
    has = [t for t in (model.config.towers if dual else ("vision",)) if t in model.strategies]
    still = [tower for tower in has if not any_of(f"{tower}/")]
    query, document = (Side(chunk, behind if still else None, learns) for chunk in chunks)

    def runner(parts: int) -> Runner:
        made = runner_of(model, parts, vectors=True)
        return OnOwnRows(made, model.mesh, axes) if axes else made

    shards, group = batch_shards(model.mesh), group_of(model)
    again = bool(axes) or model.mesh.shape["stage"] > 1
    return Paired(runner, query, document, shards, again, group)
