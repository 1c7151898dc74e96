"""From visual tokens to the decoder's width."""

from __future__ import annotations

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
        vision_width: width of the visual tokens.
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
        self.axes, self.activation = axes, config.activation
        mlp = config.kind == "mlp"
        hidden = (config.hidden or width) if mlp else vision_width
        draw = fan_in(vision_width)
        self.w_in = param(init, (vision_width, hidden), ("embed", "mlp"), draw) if mlp else None
        self.b_in = param(init, (hidden,), ("mlp",), zeros) if mlp else None
        out_axes = ("mlp", "embed") if mlp else ("embed", "norm")
        self.w_out = param(init, (hidden, width), out_axes, fan_in(hidden))
        self.b_out = param(init, (width,), ("norm",), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, P, D_vision] -> [B, P, D]."""
        if self.w_in is not None and self.b_in is not None:
            x = contract(x, self.w_in[...]) + self.b_in[...].astype(x.dtype)
            x = ACTIVATIONS[self.activation](shard(self.axes, x, "batch", "seq", "mlp"))
        return contract(x, self.w_out[...]) + self.b_out[...].astype(x.dtype)
