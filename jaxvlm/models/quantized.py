"""Frozen linear maps in eight bits: a signed byte a weight, a scale an output column.

Beside ``…/wq``, int8 then, stands ``…/wq/int8_scale``. As with adapters no layer knows of it:
:func:`attach` puts a :class:`Quantized` where the array was.
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
    """Which dims of a linear map, its layers' included, are which."""

    lead: int
    """1 if its first dim is the layers, else 0."""
    cut: int
    """Where the output's dims begin."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(Weight):
    """``q * scale``; the product is taken with the bytes, the scale with its result."""

    q: Any
    """i8[*in, *out]."""
    scale: Any
    """f32[*out]."""

    def contract(self, x: jax.Array, num_in: int, split: bool) -> jax.Array:
        """``[..., in] x [in, out] -> [..., out]``; whole numbers to 127 are exact in bfloat16."""
        return contract(x, self.q, num_in, split) * self.scale.astype(x.dtype)

    def dense(self) -> jax.Array:
        """f32[*in, *out]."""
        return self.q.astype(jnp.float32) * self.scale


def dense(params: Params, path: str, dims: Dims) -> jax.Array:
    """A linear map as floats, its layers first if it has any, quantised or not."""
    if f"{path}/{SCALE}" not in params:
        return params[path]
    scale = jnp.expand_dims(params[f"{path}/{SCALE}"], tuple(range(dims.lead, dims.cut)))
    return params[path].astype(jnp.float32) * scale


def parameters(
    maps: Mapping[str, Dims], shapes: Params, logical: Mapping[str, Logical]
) -> tuple[Params, dict[str, Logical]]:
    """Shapes and words of the quantised maps and their scales.

    Args:
        maps: those that are quantised.
        shapes: path -> shape of the model as it is.
        logical: path -> words.
    """
    made: Params = {}
    words: dict[str, Logical] = {}
    for path, (lead, cut) in maps.items():
        shape, meaning = shapes[path].shape, logical[path]
        made[path] = jax.ShapeDtypeStruct(shape, jnp.int8)
        made[f"{path}/{SCALE}"] = jax.ShapeDtypeStruct((*shape[:lead], *shape[cut:]), jnp.float32)
        words[f"{path}/{SCALE}"] = (*meaning[:lead], *meaning[cut:])
    return made, words


def quantize(w: jax.Array, dims: Dims) -> tuple[jax.Array, jax.Array]:
    """``(q, scale)``: each output column's largest weight becomes 127.

    Args:
        w: a linear map, its layers first if it has any.
        dims: which of its dims are which.
    """
    inner = tuple(range(dims.lead, dims.cut))
    scale = jnp.max(jnp.abs(w), axis=inner, keepdims=True) / _MOST
    q = jnp.round(w / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return q, jnp.squeeze(scale, inner)


def attach(params: Params) -> Params:
    """``params`` with each quantised map and its scale as one :class:`Quantized`."""
    made = {path: x for path, x in params.items() if not path.endswith("/" + SCALE)}
    for path, scale in params.items():
        if path.endswith("/" + SCALE):
            target = path.removesuffix("/" + SCALE)
            made[target] = Quantized(params[target], scale)
    return made
