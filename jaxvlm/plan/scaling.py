"""The same run on one device to thousands: how its rate grows."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.plan import machine
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.question import Question
from jaxvlm.plan.search import Found, capacity, search

SIZES = tuple(2**i for i in range(13))
"""Devices, 1 to 4,096."""


def curve(found: Found) -> list[dict[str, Any]]:
    """The best way on so many devices of the same kind, as many rows a device as were asked for.

    Memory is by formula. Sizes that can't be rented, or on which nothing fits, say so.
    """
    asked, points = found.question, []
    each = max(1, asked.rows // asked.machine.devices)
    for size in SIZES:
        point: dict[str, Any] = {"devices": size, "fits": False}
        there = of_size(asked.machine, size)
        if there is None:
            points.append(point | {"text": "no such machine can be rented"})
            continue
        question = with_rows(asked, each * size)._replace(machine=there)
        here = search(question, 1, known=found.known.of(question))
        if not here.best:
            points.append(point | {"text": "nothing fits"})
            continue
        best, known = here.best[0], here.best[0].time.total > 0
        points.append(
            {
                "devices": size,
                "fits": True if capacity(question) else None,
                "text": best.way.text(),
                "seconds": best.time.total if known else None,
                "tokens_per_s": best.time.tokens_per_s if known else None,
                "mfu": best.time.mfu if known else None,
                "peak": round(best.peak),
            }
        )
    return points


def with_rows(question: Question, rows: int) -> Question:
    """The question with another batch."""
    data = dataclasses.replace(question.config.data, batch_size=rows)
    return question._replace(config=dataclasses.replace(question.config, data=data))


def of_size(like: Machine, size: int) -> Machine | None:
    """A machine of so many devices of a kind: one slice, or the fewest slices that there are."""
    slices = 1
    while slices <= size:
        try:
            many = f"{slices}x" if slices > 1 else ""
            made = machine.parse(f"{many}{like.name}:{size // slices}", like.dtype, like.rates)
        except ConfigError:
            slices *= 2
            if like.platform != "tpu":
                return None
            continue
        return made._replace(chip=like.chip, shares=like.shares)
    return None
