"""Runners of a model on its mesh: plain, gradient accumulation, or pipelined."""

from __future__ import annotations

from collections.abc import Callable

from jaxvlm.parallel.pipeline.forward import skips
from jaxvlm.parallel.sharding import constrain
from jaxvlm.spmd.model import Model
from jaxvlm.spmd.pipeline_split import pipeline_cut
from jaxvlm.train.grad_accum import GradAccumulation, PipelineRunner, PlainRunner
from jaxvlm.types import Batch, Out, Params, Runner


def forward_of(model: Model, rows: int) -> Callable[[Params, Batch], Out]:
    """Return the forward pass without gradients; ``aux`` may be left out.

    Args:
        model: a model on its mesh.
        rows: number of sequences of a batch on each batch shard. On a pipeline they go through the
            stages as microbatches if the stages divide them, else all at once.
    """
    stages = model.mesh.shape["pipeline"]
    if stages == 1 or rows % stages:
        return model.apply
    runner = runner_of(model, stages)
    return lambda params, batch: runner.fwd(params, {}, batch)


def runner_of(model: Model, parts: int, embeddings: bool = False) -> Runner:
    """Build the runner of a model for ``parts`` microbatches.

    Args:
        model: a model on its mesh.
        parts: the number of microbatches.
        embeddings: whether the output is embeddings instead of hidden states for logits.
    """

    def embed(params: Params, batch: Batch) -> Out:
        return model.module(params, batch.dropout_keys).embed(batch)

    plain = PlainRunner(embed if embeddings else model.apply)
    of_decoder = model.strategies.get("decoder")
    if model.mesh.shape["pipeline"] > 1 and of_decoder:
        how = (of_decoder.schedule, of_decoder.virtual_stages, parts, skips(model.mesh))
        return PipelineRunner(pipeline_cut(model, embeddings), model.mesh, *how)
    if parts > 1:
        return GradAccumulation(plain, parts, model.mesh, constrain(model.layout("gradients")))
    return plain
