"""Memory of what islands share: parameters, the outer optimizer's state, error feedback."""

from __future__ import annotations

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
    if outer is None:
        return {}
    one = {"": jax.ShapeDtypeStruct((1,), np.float32)}
    state = jax.eval_shape(make_outer_optimizer(outer).init, one)
    copies = 1 + sum(bool(x.shape) for x in jax.tree.leaves(state))
    copies += outer.error_feedback and outer.delta_dtype != "float32"
    return {"shared": copies * sum(stored[path] for path in trained)}
