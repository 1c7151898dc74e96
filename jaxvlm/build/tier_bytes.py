"""Bytes of visual tokens that a process keeps, by tier."""

from __future__ import annotations

from jaxvlm.build.tokens import Keeper
from jaxvlm.build.warm import Warm


def tiers(device: int, keeper: Keeper | None, warm: Warm | None) -> dict[str, int]:
    """Bytes of what this process keeps: of a device, in host memory, on disk.

    Args:
        device: of what is kept on one.
        keeper: of a tower that rests.
        warm: of one that learns.
    """
    found = {"device": device} if device else {}
    if warm is not None:
        found["host"] = warm.nbytes
    if keeper is not None:
        found["host"] = keeper.tiers.nbytes
        if keeper.tiers.store:
            found["disk"] = keeper.tiers.store.counts().bytes
    return found
