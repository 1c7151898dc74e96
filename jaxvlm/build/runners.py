"""What runs a model: at once, in microbatches, or through a pipeline's stages."""

from __future__ import annotations

from jaxvlm.build.model import Model
from jaxvlm.build.stages import cut, skips
from jaxvlm.parallel.sharding import constrain
from jaxvlm.train.runner import Microbatched, Pipelined, PlainRunner
from jaxvlm.types import Batch, Out, Params, Runner


def runner_of(model: Model, parts: int, vectors: bool = False) -> Runner:
    """What runs a model, and takes its gradient, in ``parts`` microbatches.

    Args:
        model: on its mesh.
        parts: one behind the other.
        vectors: whether rows become vectors.
    """

    def embed(params: Params, batch: Batch) -> Out:
        return model.module(params, batch.noise).embed(batch)

    plain = PlainRunner(embed if vectors else model.apply)
    of_decoder = model.strategies.get("decoder")
    if model.mesh.shape["stage"] > 1 and of_decoder:
        how = (of_decoder.schedule, of_decoder.chunks, parts, skips(model.mesh))
        return Pipelined(cut(model, vectors), model.mesh, *how)
    if parts > 1:
        return Microbatched(plain, parts, model.mesh, constrain(model.layout("gradients")))
    return plain
