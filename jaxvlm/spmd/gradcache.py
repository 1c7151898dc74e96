"""GradCache on a mesh: how an embedding model is run on pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jaxvlm.config import ConfigError, DualConfig, GradCacheConfig
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.runners import runner_of
from jaxvlm.train.grad_accum import LocalGradients
from jaxvlm.train.gradcache import GradCache, GradCacheColumn, MiniBatch
from jaxvlm.types import Batch, Params, Runner

MiniBatches = tuple[MiniBatch, MiniBatch]
"""Mini-batch sizes of queries and of documents."""
AUTO_MINI_BATCH = -1
"""Value of ``config.grad_cache.query_mini_batch``: the planner chooses both mini-batch sizes."""
_TOWERS = ("vision", "text")


def grad_cache_mini_batches(config: GradCacheConfig) -> MiniBatches:
    """Return the mini-batch sizes of queries and of documents that the settings ask for.

    Raises:
        ConfigError: a negative setting.
    """
    for name, value in dataclasses.asdict(config).items():
        if value < 0:
            raise ConfigError(
                f"config.grad_cache.{name}={value} must be at least 0 (0: no limit); "
                f"query_mini_batch={AUTO_MINI_BATCH} alone lets the planner choose both mini-batch "
                "sizes"
            )
    return MiniBatch(config.query_mini_batch, config.max_tokens), MiniBatch(
        config.document_mini_batch, config.max_tokens
    )


def group_of(model: Model) -> int:
    """Return what the number of mini-batches must be a multiple of.

    An interleaved pipeline schedule takes microbatches in groups of as many as there are stages.
    """
    stages = model.mesh.shape["pipeline"]
    return stages if stages > 1 and model.strategies["decoder"].virtual_stages > 1 else 1


def pair_runner(
    model: Model, trained: Collection[str], mini_batches: MiniBatches, axes: tuple[str, ...] = ()
) -> GradCache:
    """Build the runner that takes the gradient of a loss over embeddings.

    Args:
        model: an embedding model.
        trained: paths of its trainable parameters.
        mini_batches: mini-batch sizes of queries and of documents.
        axes: batch axes over which gradients are not all-reduced, see
            :class:`jaxvlm.train.grad_accum.LocalGradients`; (): the compiler reduces those of each
            mini-batch.
    """
    dual = isinstance(model.config, DualConfig)

    def any_of(*parts: str) -> bool:
        return any(path.startswith(parts) for path in trained)

    def learns(batch: Batch) -> bool:
        images = any(x is not None for x in (batch.pixels, batch.patches, batch.features))
        if not dual:
            return any_of(
                "decoder/", "head/project", *["vision/", "vision_top/", "connector/"] * images
            )
        seen = {"vision": images, "text": batch.tokens.shape[1] > 0}
        return any(any_of(f"{t}/", f"head/{t}") for t in _TOWERS if seen[t])

    def encode_frozen(params: Params, batch: Batch) -> Batch:
        return model.module(params).towers(batch, frozen)  # frozen encoders have no dropout

    # The features of an encoder on other devices are part of the batch.
    has = [t for t in (model.config.towers if dual else ("vision",)) if t in model.strategies]
    frozen = [tower for tower in has if not any_of(f"{tower}/")]
    query, document = (
        GradCacheColumn(mini_batch, encode_frozen if frozen else None, learns)
        for mini_batch in mini_batches
    )

    def runner(parts: int) -> Runner:
        plain = runner_of(model, parts, embeddings=True)
        return LocalGradients(plain, model.mesh, axes) if axes else plain

    shards, group = batch_shards(model.mesh), group_of(model)
    recompute = bool(axes) or model.mesh.shape["pipeline"] > 1
    return GradCache(runner, query, document, shards, recompute, group)
