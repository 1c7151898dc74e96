"""Where to run: machines of the kinds that have a price, from the smallest that fits on."""

from __future__ import annotations

import io
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxvlm.config import ConfigError
from jaxvlm.plan import machine, report
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.question import Question
from jaxvlm.plan.search import Memory, search

VERSION = 1
_SIZES = tuple(2**i for i in range(10))
"""Devices, 1 to 512."""


def read_prices(path: str) -> dict[str, float]:
    """Prices of a device for an hour, by kind of machine.

    Args:
        path: of a JSON object, ``{"h200": 3.5, "v5e": 1.2}``.

    Raises:
        ConfigError: no such file, or it holds none.
    """
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"--prices={path}: no such file") from None
    except ValueError as error:
        raise ConfigError(f"--prices={path} is not JSON: {error}") from None
    example = 'it holds {"h200": price of a device for an hour, ...}'
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"--prices={path}: {example}")
    for name, price in found.items():
        if (
            not isinstance(price, int | float)
            or isinstance(price, bool)
            or not 0 < price < math.inf
        ):
            raise ConfigError(f"--prices={path}: {name}={price!r}; {example}")
        if name == "cpu":
            raise ConfigError(f"--prices={path}: cpu is this machine, which is not rented")
        _of_size(name, 1)
    return {name: float(price) for name, price in found.items()}


def _of_size(name: str, size: int, dtype: str = "bfloat16") -> Machine | None:
    """A machine of so many devices, or ``None`` where it can't be rented so.

    Raises:
        ConfigError: the kind is not known.
    """
    if name not in machine.names():
        machine.parse(f"{name}:1")  # says which are near
    try:
        return machine.parse(f"{name}:{size}", dtype)
    except ConfigError:
        return None


def places(
    ask: Callable[[Machine], Question],
    prices: Mapping[str, float],
    budget: float = 0.0,
    dtype: str = "bfloat16",
) -> list[dict[str, Any]]:
    """Of each kind the machines within the budget, the cheapest per token first.

    The batch is the same on all: machines that it can't be divided over are left out.

    Args:
        ask: the question for a machine.
        prices: of a device for an hour.
        budget: of an hour, all devices together; 0: any.
        dtype: of matmuls.

    Returns:
        Rows with what fits and what a million tokens cost; ``smallest`` is True for the fewest
        devices of a kind that fit.
    """
    rows: list[dict[str, Any]] = []
    for name, price in prices.items():
        known: Memory | None = None
        smallest = True
        for size in _SIZES:
            there = _of_size(name, size, dtype)
            if there is None or (budget and size * price > budget):
                continue
            question = ask(there)
            known = known.of(question) if known else Memory(question).of(question)
            found = search(question, 1, known=known)
            if not found.best or not found.best[0].time.total:
                continue
            rows.append(_row(found.best[0], there, price, smallest))
            smallest = False
    rows.sort(key=lambda row: (row["per_million_tokens"], row["devices"]))
    return rows


def _row(best: Any, there: Machine, price: float, smallest: bool) -> dict[str, Any]:
    an_hour = there.devices * price
    tokens = best.time.tokens_per_s
    return {
        "machine": there.name,
        "devices": there.devices,
        "topology": there.topology,
        "an_hour": an_hour,
        "way": best.way.text(),
        "peak": round(best.peak),
        "seconds": best.time.total,
        "tokens_per_s": tokens,
        "mfu": best.time.mfu,
        "per_million_tokens": an_hour / 3600 / tokens * 1e6,
        "smallest": smallest,
    }


def text(model: str, rows: list[dict[str, Any]], top: int, width: int = 110) -> str:
    """For people.

    Args:
        model: its name.
        rows: by :func:`places`.
        top: how many, and the smallest of each kind besides.
        width: columns.
    """
    written = io.StringIO()
    out = Console(file=written, width=width, highlight=False)
    if not rows:
        return f"{model}: fits on none of these machines within the budget"
    table = Table(
        title=f"where to run {model}; the cheapest per token first, memory by formula",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    heads = ("", "", "an hour", "a million tokens", "tokens/s", "MFU", "memory", "as")
    for name in heads:
        table.add_column(name, justify="left" if name in ("", "as") else "right")
    for i, row in enumerate(rows):
        if i >= top and not row["smallest"]:
            continue
        note = "smallest that fits" if row["smallest"] else ""
        table.add_row(
            f"{row['devices']} x {row['machine']} {row['topology']}".strip(), note,
            f"{row['an_hour']:,.2f}", f"{row['per_million_tokens']:,.4f}",
            f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.0%}", report.gib(row["peak"]), row["way"],
        )  # fmt: skip
    out.print(table)
    return written.getvalue().rstrip()
