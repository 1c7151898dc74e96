"""Throughput of the same run on one device to thousands."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.request.request import PlanRequest, undivided
from jaxvlm.planner.search.candidate_memory import capacity
from jaxvlm.planner.search.search import SearchResult, search

SIZES = tuple(2**i for i in range(13))
"""Numbers of devices, 1 to 4,096."""


def curve(result: SearchResult) -> list[dict[str, Any]]:
    """The best candidate per number of devices of the same kind, at a constant batch per device.

    Memory is by formula. Points whose size can't be rented, or on which nothing fits, say so.
    """
    base, points = result.request, []
    each = max(1, base.rows // base.machine.devices)
    for size in SIZES:
        point: dict[str, Any] = {"devices": size, "fits": False}
        target = of_size(base.machine, size)
        if target is None:
            points.append(point | {"text": "this machine can't be rented in this size"})
            continue
        if why := undivided(base.config, size):
            points.append(point | {"text": why})
            continue
        request = with_batch_size(base, each * size)._replace(machine=target)
        scaled = search(request, 1, memory=result.memory.of(request))
        if not scaled.best:
            points.append(point | {"text": "nothing fits"})
            continue
        best, has_rates = scaled.best[0], scaled.best[0].time.total > 0
        points.append(
            {
                "devices": size,
                "fits": True if capacity(request) else None,
                "text": best.candidate.text(),
                "seconds": best.time.total if has_rates else None,
                "tokens_per_s": best.time.tokens_per_s if has_rates else None,
                "mfu": best.time.mfu if has_rates else None,
                "peak": round(best.peak),
            }
        )
    return points


def with_batch_size(request: PlanRequest, batch_size: int) -> PlanRequest:
    """The request with another batch size."""
    data = dataclasses.replace(request.config.data, batch_size=batch_size)
    return request._replace(config=dataclasses.replace(request.config, data=data))


def of_size(like: Machine, size: int) -> Machine | None:
    """A machine with so many devices of a kind: one slice, or the fewest slices possible."""
    slices = 1
    while slices <= size:
        try:
            many = f"{slices}x" if slices > 1 else ""
            result = machine.parse(f"{many}{like.name}:{size // slices}", like.dtype, like.rates)
        except ConfigError:
            slices *= 2
            if like.platform != "tpu":
                return None
            continue
        return result._replace(chip=like.chip, shares=like.shares)
    return None
