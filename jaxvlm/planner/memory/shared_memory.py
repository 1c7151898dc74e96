"""Memory of what islands share: parameters, the outer optimizer's state, error feedback."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from jaxvlm.config import OuterConfig
from jaxvlm.optim.outer import make_outer_optimizer


def shared(
    outer: OuterConfig | None, stored: Mapping[str, int], trained: Iterable[str]
) -> dict[str, int]:
    """Return ``shared``, the bytes on a device between steps; {} without islands.

    Args:
        outer: of outer updates; ``None``: there are no islands.
        stored: bytes of each parameter on a device, by path.
        trained: paths of the trained parameters.
    """
    return {"shared": copies(outer) * sum(stored[path] for path in trained)} if outer else {}


@functools.cache
def copies(outer: OuterConfig | None) -> int:
    """How often what islands share has the size of the trained parameters; 0 without islands."""
    if outer is None:
        return 0
    one = {"": jax.ShapeDtypeStruct((1,), np.float32)}
    state = jax.eval_shape(make_outer_optimizer(outer).init, one)
    of_optimizer = sum(bool(x.shape) for x in jax.tree.leaves(state))
    return 1 + of_optimizer + (outer.error_feedback and outer.delta_dtype != "float32")
