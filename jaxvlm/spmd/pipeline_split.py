"""Split a vision-language model into the pieces of a pipeline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxvlm.config import ModelConfig
from jaxvlm.models.vlm import Stream
from jaxvlm.nn.mask import batch_mask
from jaxvlm.nn.moe import Routed
from jaxvlm.parallel.pipeline.forward import AXIS, Flow, StageCut
from jaxvlm.spmd.model import Model
from jaxvlm.types import Batch, Out, Params

_BLOCKS, _TABLE = "decoder/stack/blocks/", "decoder/embed/table"


def pipeline_cut(model: Model[ModelConfig], embeddings: bool = False) -> StageCut:
    """Split a model into the decoder's layers, what comes before them, and what comes after.

    Flow between stages: ``x`` [B, T, D], the residual stream; ``deep`` [K, B, T, D] where the model
    has DeepStack, sent on where the first stage has fewer than K layers; ``load`` and
    ``probability`` f32[L, E] of experts, filled in layer by layer.

    Args:
        model: a model on a mesh whose ``pipeline`` axis divides its decoder's layers.
        embeddings: whether the output is embeddings, pooled after the decoder.
    """
    decoder, tied = model.config.decoder, model.config.decoder.tied_embeddings
    stages = model.mesh.shape[AXIS] * model.strategies["decoder"].virtual_stages
    go_on = model.config.connector.deepstack_levels > decoder.depth // stages

    def where(path: str) -> str:
        if path.startswith(_BLOCKS):
            return "blocks"
        if path.startswith(_TABLE):
            return "both" if tied else "pre"
        return "post" if path.startswith(("decoder/", "head/")) else "pre"

    def module(params: Params, batch: Batch, first: jax.Array | None = None):
        # The other pieces' parameters are shapes only.
        return model.module({**model.shapes, **params}, batch.dropout_keys, first)

    def pre(params: Params, batch: Batch) -> Flow:
        stream = module(params, batch).pre(batch)
        flow = {"x": stream.x}
        if stream.deep is not None:
            flow["deep"] = stream.deep
        if decoder.num_experts:
            none = jnp.zeros((decoder.depth, decoder.num_experts), jnp.float32)
            flow |= {"load": none, "probability": none}
        return flow

    def blocks(params: Params, flow: Flow, batch: Batch, first: jax.Array) -> Flow:
        stream = Stream(
            flow["x"],
            batch.positions,
            batch_mask(batch),
            deep=flow.get("deep"),
            dropout_keys=batch.dropout_keys,
        )
        stream = module(params, batch, first).blocks(stream, first)
        out = {"x": stream.x}
        if go_on and "deep" in flow:
            out["deep"] = flow["deep"]
        if stream.routed is not None:
            for name, rows in stream.routed._asdict().items():
                out[name] = jax.lax.dynamic_update_slice_in_dim(flow[name], rows, first, 0)
        return out

    def post(params: Params, flow: Flow, batch: Batch) -> Out:
        routed = None
        if decoder.num_experts:
            routed = Routed(flow["load"], flow["probability"])
        stream = Stream(flow["x"], batch.positions, batch_mask(batch), routed=routed)
        model_piece = module(params, batch)
        out = model_piece.post(stream)
        return model_piece.pooled(out, batch) if embeddings else out

    return StageCut(pre, blocks, post, where)
