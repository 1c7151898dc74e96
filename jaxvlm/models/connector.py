"""From visual tokens to the decoder's width."""

from __future__ import annotations

import math

import jax
from flax import nnx

from jaxvlm.config import ConfigError, ConnectorConfig
from jaxvlm.nn.mlp import ACTIVATIONS
from jaxvlm.nn.param import Init, contract, fan_in, param, zeros
from jaxvlm.parallel.rules import Axes, shard


class Connector(nnx.Module):
    """Linear, activation, linear; or one linear map.

    Args:
        init: source of parameters.
        axes: mesh and rules.
        config: variant.
        vision_width: width of the ViT's tokens.
        width: D of the decoder.
    """

    def __init__(
        self, init: Init, axes: Axes, config: ConnectorConfig, vision_width: int, width: int
    ):
        if config.kind not in ("mlp", "linear"):
            raise ConfigError(f"config.model.connector.kind={config.kind!r}; known: mlp, linear")
        if config.activation not in ACTIVATIONS:
            raise ConfigError(
                f"config.model.connector.activation={config.activation!r}; "
                f"known: {', '.join(ACTIVATIONS)}"
            )
        self.axes, self.activation, self.merge = axes, config.activation, config.merge
        vision_width *= config.merge**2
        mlp = config.kind == "mlp"
        hidden = (config.hidden or width) if mlp else vision_width
        draw = fan_in(vision_width)
        self.w_in = param(init, (vision_width, hidden), ("embed", "mlp"), draw) if mlp else None
        self.b_in = param(init, (hidden,), ("mlp",), zeros) if mlp else None
        out_axes = ("mlp", "embed") if mlp else ("embed", "norm")
        self.w_out = param(init, (hidden, width), out_axes, fan_in(hidden))
        self.b_out = param(init, (width,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, P, D_vision] -> [B, P / merge^2, D]."""
        x = merge_patches(x, self.merge)
        if self.w_in is not None and self.b_in is not None:
            x = contract(x, self.w_in[...]) + self.b_in[...].astype(x.dtype)
            x = ACTIVATIONS[self.activation](shard(self.axes, x, "batch", "seq", "mlp"))
        return contract(x, self.w_out[...]) + self.b_out[...].astype(x.dtype)


def merge_patches(x: jax.Array, merge: int) -> jax.Array:
    """Join ``merge`` x ``merge`` neighbours of a square grid, row by row (pixel shuffle).

    Args:
        x: [B, P, D], P a square whose side ``merge`` divides.
        merge: neighbours a side.

    Returns:
        [B, P / merge^2, merge^2 * D].
    """
    if merge == 1:
        return x
    B, P, D = x.shape
    side = math.isqrt(P) // merge
    x = x.reshape(B, side, merge, side, merge, D).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(B, side * side, merge * merge * D)
