"""Connector (projector): maps the vision encoder's tokens to the decoder's width."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxvlm.config import ConnectorConfig, check_choice, refuse_unread
from jaxvlm.models.relevance import Relevance
from jaxvlm.models.texture import CHANNELS
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.norm import NORMS
from jaxvlm.nn.param import Init, affine, fan_in, normal, param, zeros
from jaxvlm.parallel.rules import Axes, shard


class Connector(nnx.Module):
    """Norm and merge of neighbouring patches, then an MLP with one hidden layer or a linear map.

    With ``relevance``, which patches are merged depends on the image and the question.

    Args:
        init: parameter initialization.
        axes: mesh and sharding rules.
        config: variant.
        vision_width: width of the vision encoder's tokens, all feature layers together.
        width: D of the decoder.
    """

    def __init__(
        self, init: Init, axes: Axes, config: ConnectorConfig, vision_width: int, width: int
    ):
        check(config)
        vision_width //= 1 + config.deepstack_levels
        self.axes, self.config, self.vision_width = axes, config, vision_width
        merged = vision_width * (config.merge**2 if config.pool == "concat" else 1)
        normed = merged if config.norm_merged else vision_width
        has_norm = config.norm != "none"
        self.norm: Any = NORMS[config.norm](init, normed, config.norm_eps) if has_norm else None
        mlp, bias = config.kind == "mlp", config.bias
        hidden = (config.hidden or width) if mlp else merged
        draw = fan_in(merged)
        self.w_in = param(init, (merged, hidden), ("embed", "mlp"), draw, 1) if mlp else None
        self.b_in = param(init, (hidden,), ("mlp",), zeros) if mlp and bias else None
        out_axes = ("mlp", "embed") if mlp else ("embed", "norm")
        self.w_out = param(init, (hidden, width), out_axes, fan_in(hidden), 1)
        self.b_out = param(init, (width,), ("norm",), zeros) if bias else None
        draw = normal(width**-0.5)
        self.newline = param(init, (width,), ("norm",), draw) if config.newline else None
        chosen = config.relevance.budget > 0
        self.relevance = Relevance(init, config.relevance, vision_width, width) if chosen else None
        level = dataclasses.replace(config, deepstack_levels=0, newline=False, norm_merged=has_norm)
        count, of_level = config.deepstack_levels, (axes, level, vision_width, width)
        self.levels: Any = Connector(init.stacked(count), *of_level) if count else None

    def __call__(
        self, x: jax.Array, blocks: bool = False, query: jax.Array | None = None
    ) -> jax.Array:
        """Compute visual tokens for the decoder's first layer.

        Args:
            x: [B, P, D_vision], patches of a square image in row-major order, or packed patches.
                With ``deepstack_levels`` D_vision is a concatenation of feature layers, of which
                this method reads the first. With ``relevance`` patches are in Morton order, and
                D_vision ends with their texture.
            blocks: patches to merge are consecutive (packed), instead of in row-major order.
            query: [B, D] question embedding, for ``relevance``.

        Returns:
            [B, P / merge^2, D], or [B, budget, D], or with ``video_pool`` [B, P + P / pool^2, D]:
            tokens of images, then of videos.
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
        if config.video_pool:
            x = jnp.concatenate([x, merge_patches(x, config.video_pool, "mean")], axis=1)
        if self.norm is not None and config.norm_merged:
            x = self.norm(x)
        split = self.axes.splits_rows(x.shape[1])
        if self.w_in is not None:
            x = affine(x, self.w_in, self.b_in, split=split)
            x = ACTIVATIONS[config.activation](shard(self.axes, x, "batch", "seq", "mlp"))
        x = affine(x, self.w_out, self.b_out, split=split)
        return x if place is None else x + place

    def deep(self, x: jax.Array, blocks: bool = False) -> jax.Array:
        """Compute what DeepStack adds to visual tokens after the decoder's first layers.

        Args:
            x: [B, P, (1 + deepstack_levels) * D_vision], as for :meth:`__call__`.
            blocks: as for :meth:`__call__`.

        Returns:
            [deepstack_levels, B, P / merge^2, D].

        Source: DeepStack, arXiv 2406.04334; Qwen3-VL, arXiv 2511.21631.
        """
        graph, params = nnx.split(self.levels)
        parts = jnp.split(x, 1 + self.config.deepstack_levels, axis=-1)[1:]
        levels = [
            nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], params)) for i in range(len(parts))
        ]
        return jnp.stack([level(part, blocks) for level, part in zip(levels, parts)])


def check(config: ConnectorConfig) -> None:
    """Check the connector's settings.

    Raises:
        ConfigError: a setting has an unknown value, or is not read by the chosen variant.
    """
    for field, known in _KNOWN.items():
        check_choice(f"config.model.connector.{field}", getattr(config, field), known)
    refuse_unread(config, "config.model.connector")


_KNOWN: dict[str, Collection[str]] = {
    "kind": ("mlp", "linear"),
    "activation": ACTIVATIONS,
    "pool": ("concat", "mean"),
    "norm": ("none", *NORMS),
}
"""Setting -> its known values."""


def merge_patches(
    x: jax.Array, merge: int, pool: str = "concat", blocks: bool = False
) -> jax.Array:
    """Merge blocks of ``merge`` x ``merge`` neighbouring patches (pixel shuffle).

    Args:
        x: [B, P, D]; a square grid whose side ``merge`` divides, or any grid with ``blocks``.
        merge: side of a block in patches.
        pool: ``concat`` or ``mean``.
        blocks: the patches of a block are consecutive already.

    Returns:
        [B, P / merge^2, merge^2 * D], or [B, P / merge^2, D] for ``mean``.
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
