"""Int8 quantization of frozen linear maps, with one scale per output column.

The quantized ``…/wq`` is int8, and the parameter ``…/wq/int8_scale`` is added. As with adapters,
layers do not know of it: :func:`attach` replaces the array by an :class:`Int8Weight`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxvlm.nn.param import Weight, contract
from jaxvlm.types import Logical, Params

SCALE = "int8_scale"
_MOST = 127.0


class Dims(NamedTuple):
    """Split of a linear map's dims into layers, inputs and outputs."""

    lead: int
    """1 if the first dim is the layers, else 0."""
    cut: int
    """Index of the first output dim."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight(Weight):
    """The weight ``q * scale``; the matmul reads the bytes, and its result is scaled."""

    q: Any
    """i8[*in, *out]."""
    scale: Any
    """f32[*out]."""

    def contract(self, x: jax.Array, num_in: int, split: bool) -> jax.Array:
        """Compute ``[..., in] x [in, out]``; integers up to 127 are exact in bfloat16."""
        return contract(x, self.q, num_in, split) * self.scale.astype(x.dtype)

    def dense(self) -> jax.Array:
        """Dequantize to f32[*in, *out]."""
        return self.q.astype(jnp.float32) * self.scale


def dense(params: Params, path: str, dims: Dims) -> jax.Array:
    """Return a linear map (with its dim of layers) in float32, however it is stored."""
    weight = params[path].astype(jnp.float32)
    if f"{path}/{SCALE}" not in params:
        return weight
    return weight * jnp.expand_dims(params[f"{path}/{SCALE}"], tuple(range(dims.lead, dims.cut)))


def parameters(
    maps: Mapping[str, Dims], shapes: Params, logical: Mapping[str, Logical]
) -> tuple[Params, dict[str, Logical]]:
    """Return shapes of quantized maps and their scales, and logical axes of the scales.

    Args:
        maps: the quantized maps.
        shapes: path -> shape in the unquantized model.
        logical: path -> logical axes.
    """
    result: Params = {}
    scale_axes: dict[str, Logical] = {}
    for path, (lead, cut) in maps.items():
        shape, axes = shapes[path].shape, logical[path]
        result[path] = jax.ShapeDtypeStruct(shape, jnp.int8)
        result[f"{path}/{SCALE}"] = jax.ShapeDtypeStruct((*shape[:lead], *shape[cut:]), jnp.float32)
        scale_axes[f"{path}/{SCALE}"] = (*axes[:lead], *axes[cut:])
    return result, scale_axes


def quantize(w: jax.Array, dims: Dims) -> tuple[jax.Array, jax.Array]:
    """Quantize to ``(q, scale)``; each output column's largest absolute weight becomes 127.

    Args:
        w: a linear map, with its dim of layers if it has one.
        dims: split of its dims.
    """
    inner, w = tuple(range(dims.lead, dims.cut)), w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(w), axis=inner, keepdims=True) / _MOST
    q = jnp.round(w / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return q, jnp.squeeze(scale, inner)


def attach(params: Params) -> Params:
    """Replace each quantized map and its scale in ``params`` by one :class:`Int8Weight`."""
    result = {path: x for path, x in params.items() if not path.endswith("/" + SCALE)}
    for path, scale in params.items():
        if path.endswith("/" + SCALE):
            target = path.removesuffix("/" + SCALE)
            result[target] = Int8Weight(params[target], scale)
    return result
