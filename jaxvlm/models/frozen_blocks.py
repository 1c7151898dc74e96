"""Moves a vision encoder's parameters between the paths of frozen blocks and of those above them.

With ``config.model.vision.frozen_blocks`` = n the first n blocks are at ``vision/`` and the rest of
the encoder is at ``vision_top/``; with 0 all of it is at ``vision/``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxvlm.models.vit import ABOVE_FROZEN, BLOCKS
from jaxvlm.types import Params


def recut(params: Params, frozen_blocks: int) -> Params:
    """Split the same vision encoder's parameters at another number of frozen blocks.

    Args:
        params: parameters of a model without adapters, split at any number of frozen blocks.
        frozen_blocks: number of frozen blocks to split at; 0: none.
    """
    result: Params = {}
    for path, x in params.items():
        module, _, rest = path.partition("/")
        top, bottom = f"vision_top/{rest}", f"vision/{rest}"
        if path.startswith(BLOCKS):
            x = jnp.concatenate([x, params[top]]) if top in params else x
            result[path] = x[: frozen_blocks or None]
            if frozen_blocks:
                result[top] = x[frozen_blocks:]
        elif path.startswith(ABOVE_FROZEN) or (
            module == "vision_top" and not bottom.startswith(BLOCKS)
        ):
            result[top if frozen_blocks else bottom] = x
        elif module != "vision_top":
            result[path] = x
    return result


def shapes(
    base: dict[str, jax.ShapeDtypeStruct], frozen_blocks: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of :func:`recut`'s result, with the shardings of its parts in ``base``."""

    def like(path: str) -> Any:
        other = "vision/" if path.startswith("vision_top/") else "vision_top/"
        return base.get(path) or base[other + path.partition("/")[2]]

    result = jax.eval_shape(lambda params: recut(params, frozen_blocks), base)
    return {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like(path).sharding)
        for path, x in result.items()
    }


def onto(base: dict[str, jax.ShapeDtypeStruct], params: Params, frozen_blocks: int) -> Params:
    """Apply :func:`recut` to arrays; the result has the shardings and dtypes of ``base``."""
    vision = {path: x for path, x in params.items() if path.startswith(("vision/", "vision_top/"))}
    shardings = {p: x.sharding for p, x in base.items() if p.startswith(("vision/", "vision_top/"))}

    def run(params: Params) -> Params:
        return {p: x.astype(base[p].dtype) for p, x in recut(params, frozen_blocks).items()}

    result = jax.jit(run, out_shardings=shardings)(vision)
    return {path: x for path, x in params.items() if path not in vision} | result
