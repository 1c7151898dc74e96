"""From visual tokens to the decoder's width."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConfigError, ConnectorConfig, refuse_unread
from jaxvlm.models.relevance import Relevance
from jaxvlm.models.texture import CHANNELS
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import NORMS
from jaxvlm.nn.param import Init, affine, fan_in, normal, param, zeros
from jaxvlm.parallel.rules import Axes, shard


class Connector(nnx.Module):
    """Norm, merge of neighbours, then linear, activation, linear; or one linear map.

    With ``relevance``, which patches are merged depends on the picture and the question.

    Args:
        init: source of parameters.
        axes: mesh and rules.
        config: variant.
        vision_width: width of the ViT's tokens, all feature layers together.
        width: D of the decoder.
    """

    def __init__(
        self, init: Init, axes: Axes, config: ConnectorConfig, vision_width: int, width: int
    ):
        check(config)
        vision_width //= 1 + config.levels
        self.axes, self.config, self.vision_width = axes, config, vision_width
        merged = vision_width * (config.merge**2 if config.pool == "concat" else 1)
        normed = merged if config.norm_merged else vision_width
        self.norm: Any = (
            None if config.norm == "none" else NORMS[config.norm](init, normed, config.norm_eps)
        )
        mlp, bias = config.kind == "mlp", config.bias
        hidden = (config.hidden or width) if mlp else merged
        draw = fan_in(merged)
        self.w_in = param(init, (merged, hidden), ("embed", "mlp"), draw, 1) if mlp else None
        self.b_in = param(init, (hidden,), ("mlp",), zeros) if mlp and bias else None
        out_axes = ("mlp", "embed") if mlp else ("embed", "norm")
        self.w_out = param(init, (hidden, width), out_axes, fan_in(hidden), 1)
        self.b_out = param(init, (width,), ("norm",), zeros) if bias else None
        self.newline = (
            param(init, (width,), ("norm",), normal(width**-0.5)) if config.newline else None
        )
        chosen = config.relevance.budget > 0
        self.relevance = Relevance(init, config.relevance, vision_width, width) if chosen else None
        behind = config.norm != "none"
        level = dataclasses.replace(config, levels=0, newline=False, norm_merged=behind)
        self.levels: Any = (
            Connector(init.stacked(config.levels), axes, level, vision_width, width)
            if config.levels
            else None
        )

    def __call__(
        self, x: jax.Array, blocks: bool = False, query: jax.Array | None = None
    ) -> jax.Array:
        """Visual tokens for the decoder's first layer.

        Args:
            x: [B, P, D_vision], rows of a square picture or packed patches; with ``levels``,
                their feature layers lie side by side behind the first one, which is taken here.
                With ``relevance``, in Morton order, and their texture lies behind all.
            blocks: the patches to merge follow each other (packed), instead of plain rows.
            query: [B, D] that ``relevance`` goes by.

        Returns:
            [B, P / merge^2, D], or [B, budget, D].
        """
        config, place, texture = self.config, None, None
        if self.relevance is not None:
            x, texture = x[..., :-CHANNELS], x[..., -CHANNELS:]
        x = x[..., : self.vision_width] if self.levels is not None else x
        if self.norm is not None and not config.norm_merged:
            x = self.norm(x)
        if self.relevance is not None and texture is not None:
            x, place = self.relevance(x, texture, query)
        x = merge_patches(x, config.merge, config.pool, blocks)
        if self.norm is not None and config.norm_merged:
            x = self.norm(x)
        split = self.axes.splits_rows(x.shape[1])
        if self.w_in is not None:
            x = affine(x, self.w_in, self.b_in, split=split)
            x = ACTIVATIONS[config.activation](shard(self.axes, x, "batch", "seq", "mlp"))
        x = affine(x, self.w_out, self.b_out, split=split)
        return x if place is None else x + place

    def deep(self, x: jax.Array, blocks: bool = False) -> jax.Array:
        """What DeepStack adds to the visual tokens in the decoder's first layers.

        Args:
            x: [B, P, (1 + levels) * D_vision], as for :meth:`__call__`.
            blocks: as there.

        Returns:
            [levels, B, P / merge^2, D].

        Source: DeepStack, arXiv 2406.04334; Qwen3-VL, arXiv 2511.21631.
        """
        graph, params = nnx.split(self.levels)
        parts = jnp.split(x, 1 + self.config.levels, axis=-1)[1:]
        return jnp.stack(
            [
                nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], params))(part, blocks)
                for i, part in enumerate(parts)
            ]
        )


def check(config: ConnectorConfig) -> None:
    """Refuse words that mean nothing.

    Raises:
        ConfigError: which field, and what would do.
    """
    for field, known in _KNOWN.items():
        if getattr(config, field) not in known:
            said = f"{field}={getattr(config, field)!r}"
            raise ConfigError(f"config.model.connector.{said}; known: {', '.join(known)}")
    refuse_unread(config, "config.model.connector")


_KNOWN: dict[str, Collection[str]] = {
    "kind": ("mlp", "linear"),
    "activation": ACTIVATIONS,
    "pool": ("concat", "mean"),
    "norm": ("none", *NORMS),
}
"""Field -> the words that it may be."""


def merge_patches(
    x: jax.Array, merge: int, pool: str = "concat", blocks: bool = False
) -> jax.Array:
    """Join ``merge`` x ``merge`` neighbours, row by row (pixel shuffle).

    Args:
        x: [B, P, D]; a square grid whose side ``merge`` divides, or any with ``blocks``.
        merge: neighbours a side.
        pool: ``concat`` or ``mean``.
        blocks: the patches to merge follow each other already.

    Returns:
        [B, P / merge^2, merge^2 * D], or [B, P / merge^2, D] of their mean.
    """
    if merge == 1:
        return x
    B, P, D = x.shape
    if not blocks:
        side = math.isqrt(P) // merge
        x = x.reshape(B, side, merge, side, merge, D).transpose(0, 1, 3, 2, 4, 5)
    if pool == "mean":
        return jnp.mean(x.reshape(B, P // merge**2, merge**2, D), axis=2)
    return x.reshape(B, P // merge**2, merge**2 * D)
