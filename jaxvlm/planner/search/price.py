"""Where to run: machines of the kinds that have a price, from the smallest one that fits."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxvlm.config import ConfigError, json_text
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.report import text_report
from jaxvlm.planner.request.request import PlanRequest
from jaxvlm.planner.search.candidate_memory import Memory
from jaxvlm.planner.search.search import search

VERSION = 1
_SIZES = tuple(2**i for i in range(10))
"""Numbers of devices, 1 to 512."""


def read_prices(path: str) -> dict[str, float]:
    """Read prices of a device per hour, by kind of machine.

    Args:
        path: JSON file with one object, ``{"h200": 3.5, "v5e": 1.2}``.

    Raises:
        ConfigError: no such file, or it holds no prices.
    """
    try:
        prices = json_text.parse(pathlib.Path(path).read_bytes())
    except OSError:
        raise ConfigError(f"--prices={path}: no such file") from None
    except ValueError as error:
        raise ConfigError(f"--prices={path} is not JSON: {error}") from None
    example = 'expected {"h200": price of a device per hour, ...}'
    if not isinstance(prices, dict) or not prices:
        raise ConfigError(f"--prices={path}: {example}")
    for name, price in prices.items():
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not is_number or not 0 < price < math.inf:
            raise ConfigError(f"--prices={path}: {name}={price!r}; {example}")
        if name == "cpu":
            raise ConfigError(
                f"--prices={path}: cpu is the local machine, which has no price; remove it"
            )
        _of_size(name, 1)
    return {name: float(price) for name, price in prices.items()}


def _of_size(name: str, size: int, dtype: str = "bfloat16") -> Machine | None:
    """A machine with so many devices; ``None`` if it can't be rented in that size.

    Raises:
        ConfigError: the kind is unknown.
    """
    if name not in machine.names():
        machine.parse(f"{name}:1")  # the error names similar kinds
    try:
        return machine.parse(f"{name}:{size}", dtype)
    except ConfigError:
        return None


def machines_by_price(
    make_request: Callable[[Machine], PlanRequest],
    prices: Mapping[str, float],
    budget: float = 0.0,
    dtype: str = "bfloat16",
) -> list[dict[str, Any]]:
    """Machines of each kind within the budget, the cheapest per token first.

    The batch is the same on all machines; those that can't divide it are left out.

    Args:
        make_request: makes the request for a machine.
        prices: of a device per hour.
        budget: per hour, all devices together; 0: no limit.
        dtype: dtype of the matmuls.

    Returns:
        One row per machine with the best candidate and the cost of a million tokens; ``smallest``
        is
        True for the fewest devices of a kind that fit.
    """
    rows: list[dict[str, Any]] = []
    for name, price in prices.items():
        memory: Memory | None = None
        smallest = True
        for size in _SIZES:
            target = _of_size(name, size, dtype)
            if target is None or (budget and size * price > budget):
                continue
            request = make_request(target)
            memory = memory.of(request) if memory else Memory(request).of(request)
            result = search(request, 1, memory=memory)
            if not result.best or not result.best[0].time.total:
                continue
            rows.append(_row(result.best[0], target, price, smallest))
            smallest = False
    rows.sort(key=lambda row: (row["per_million_tokens"], row["devices"]))
    return rows


def _row(best: Any, target: Machine, price: float, smallest: bool) -> dict[str, Any]:
    an_hour = target.devices * price
    tokens = best.time.tokens_per_s
    return {
        "machine": target.name,
        "devices": target.devices,
        "topology": target.topology,
        "an_hour": an_hour,
        "candidate": best.candidate.text(),
        "peak": round(best.peak),
        "seconds": best.time.total,
        "tokens_per_s": tokens,
        "mfu": best.time.mfu,
        "per_million_tokens": an_hour / 3600 / tokens * 1e6,
        "smallest": smallest,
    }


def text(model: str, rows: list[dict[str, Any]], top: int, width: int = 110) -> str:
    """The comparison as a table for people.

    Args:
        model: its name.
        rows: from :func:`machines_by_price`.
        top: number of rows; the smallest machine of each kind is always listed.
        width: columns.
    """
    if not rows:
        return f"{model}: fits on none of these machines within the budget"
    out, written = text_report.console(width)
    title = f"where to run {model}; the cheapest per token first, memory by formula"
    heads = ("", "", "an hour", "a million tokens", "tokens/s", "MFU", "memory", "as")
    table = text_report.table(heads, title, left=("", "as"))
    for i, row in enumerate(rows):
        if i >= top and not row["smallest"]:
            continue
        note = "smallest that fits" if row["smallest"] else ""
        table.add_row(
            f"{row['devices']} x {row['machine']} {row['topology']}".strip(), note,
            f"{row['an_hour']:,.2f}", f"{row['per_million_tokens']:,.4f}",
            f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.0%}", text_report.gib(row["peak"]),
            row["candidate"],
        )  # fmt: skip
    out.print(table)
    return written.getvalue().rstrip()
