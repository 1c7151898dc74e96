"""Weights of a vision tower, whole or cut at a trunk, as those of one that is cut elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.models.vit import ABOVE_TRUNK, BLOCKS
from jaxvlm.types import Params


def recut(params: Params, trunk: int) -> Params:
    """Parameters of the same tower with another trunk.

    Args:
        params: of a model, its adapters left out.
        trunk: blocks of it; 0: none.
    """
    found: Params = {}
    for path, x in params.items():
        tower, _, rest = path.partition("/")
        above, whole = f"top/{rest}", f"vision/{rest}"
        if path.startswith(BLOCKS):
            x = jnp.concatenate([x, params[above]]) if above in params else x
            found |= {path: x[:trunk], above: x[trunk:]} if trunk else {path: x}
        elif path.startswith(ABOVE_TRUNK) or (tower == "top" and not whole.startswith(BLOCKS)):
            found[above if trunk else whole] = x
        elif tower != "top":
            found[path] = x
    return found


def shapes(base: dict[str, jax.ShapeDtypeStruct], trunk: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Those of :func:`recut`, on the devices where ``base`` says that blocks lie."""

    def like(path: str) -> Any:
        other = "vision/" if path.startswith("top/") else "top/"
        return base.get(path) or base[other + path.partition("/")[2]]

    made = jax.eval_shape(lambda params: recut(params, trunk), base)
    return {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like(path).sharding)
        for path, x in made.items()
    }


def onto(base: dict[str, jax.ShapeDtypeStruct], params: Params, trunk: int) -> Params:
    """:func:`recut` of parameters, which lie as ``base`` says then."""
    own = {path: x for path, x in params.items() if path.startswith(("vision/", "top/"))}
    where = {path: x.sharding for path, x in base.items() if path.startswith(("vision/", "top/"))}
    made = jax.jit(lambda own: recut(own, trunk), out_shardings=where)(own)
    return {path: x for path, x in params.items() if path not in own} | made
