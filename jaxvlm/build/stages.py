"""Where a vision-language model may be cut for a pipeline."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxvlm.build.model import Model
from jaxvlm.config import ModelConfig
from jaxvlm.models.vlm import Stream
from jaxvlm.nn.mask import batch_mask
from jaxvlm.nn.moe import Routed
from jaxvlm.parallel.pipeline import AXIS, Cut, Flow
from jaxvlm.types import Batch, Out, Params

_BLOCKS, _TABLE = "decoder/stack/blocks/", "decoder/embed/table"


def cut(model: Model[ModelConfig], vectors: bool = False) -> Cut:
    """The decoder's layers, what comes before them, and what comes behind.

    Flow: ``x`` [B, T, D], the residual stream; ``deep`` [K, B, T, D] where the model has
    DeepStack, sent on where the first stage has fewer than K layers; ``load`` and ``probability``
    f32[L, E] of experts, filled in layer by layer.

    Args:
        model: on a mesh whose ``stage`` divides its decoder's layers.
        vectors: whether rows become vectors, by what stands behind the decoder.
    """
    decoder, tied = model.config.decoder, model.config.decoder.tied_embeddings
    stages = model.mesh.shape[AXIS] * model.strategies["decoder"].chunks
    go_on = model.config.connector.levels > decoder.depth // stages

    def where(path: str) -> str:
        if path.startswith(_BLOCKS):
            return "blocks"
        if path.startswith(_TABLE):
            return "both" if tied else "pre"
        return "post" if path.startswith(("decoder/", "head/")) else "pre"

    def module(params: Params, batch: Batch, first: jax.Array | None = None):
        # The other pieces' are only shapes.
        return model.module({**model.shapes, **params}, batch.noise, first)

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
            flow["x"], batch.positions, batch_mask(batch), deep=flow.get("deep"), noise=batch.noise
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
        made = module(params, batch)
        out = made.post(stream)
        return made.pooled(out, batch) if vectors else out

    return Cut(pre, blocks, post, where)


def skips(mesh: Mesh) -> bool:
    """Whether a stage without work may do nothing while the others work.

    Not where a stage is split further: the compiler moves shards between a stage's own devices by
    collective permutes, and on CPU these wait for all devices (elsewhere that was not tried).
    """
    return all(mesh.shape[axis] == 1 for axis in ("fsdp", "expert", "context", "tensor"))
