"""What ``jaxvlm plan`` does, its flags apart."""

from __future__ import annotations

import math
import pathlib
from typing import Any, NamedTuple

import jax

from jaxvlm.config import ConfigError, TrainConfig
from jaxvlm.plan import calibrate as calibration
from jaxvlm.plan import compare as compare_plans
from jaxvlm.plan import document, machine, page, question, report, scaling, tree, verify, where
from jaxvlm.plan.question import Asked
from jaxvlm.plan.search import search


class Wanted(NamedTuple):
    """What is planned for, and what is made of it."""

    devices: str
    """See :func:`jaxvlm.plan.machine.parse`; or ``any``."""
    top: int = 5
    verify: bool = False
    html: str = ""
    """File; "" writes none."""
    save: str = ""
    """Likewise."""
    prices: str = ""
    """File."""
    budget: float = 0.0
    """Of an hour; 0: any."""


def plan(model: str, recipe: TrainConfig | None, asked: Asked, wanted: Wanted) -> dict[str, Any]:
    """Search, print the report and write the files that are wanted.

    Args:
        model: a folder, a published model's name, or a recipe's file.
        recipe: its settings, where it is one.
        asked: batch and what is trained.
        wanted: machine and results.

    Returns:
        The plan's document.

    Raises:
        ConfigError: what can't be planned, and why.
    """
    if wanted.top < 1:
        raise ConfigError(f"--top={wanted.top}: it must be at least 1")
    jax.config.update("jax_platforms", "cpu")  # what is planned for need not be there
    for flag, path in (("html", wanted.html), ("save", wanted.save)):  # not after the search
        if path and not pathlib.Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--{flag}={path}: there is no such folder")
    if wanted.devices == "any":
        return _where(model, recipe, asked, wanted)
    if wanted.prices or wanted.budget:
        raise ConfigError("--prices and --budget go with --devices=any; --price is of --devices")
    there = machine.parse(wanted.devices, _dtype(recipe, wanted.devices))
    devices = []
    if wanted.verify:  # before all else: a compiler that is missing is said at once
        verify.prepare(there)
        devices = verify.devices_of(there)
    found = search(question.ask(model, recipe, there, asked), wanted.top)
    made = document.of(found, tree.branches(found))
    if devices:
        made["verified"] = verify.verify(found, devices)
    if wanted.html:
        made["scaling"] = scaling.curve(found)
        page.write(wanted.html, made)
    print(report.text(made), flush=True)
    if wanted.save:
        document.write(wanted.save, made)
    return made


def _where(model: str, recipe: TrainConfig | None, asked: Asked, wanted: Wanted) -> dict[str, Any]:
    """Machines with a price, and what the run costs there."""
    if not wanted.prices:
        raise ConfigError(
            "--devices=any needs --prices=FILE, a JSON object of prices of a device for an hour: "
            '{"h200": ..., "v5e": ...}'
        )
    if not 0 <= wanted.budget < math.inf:
        raise ConfigError(f"--budget={wanted.budget:g}: it must be above 0")
    if recipe is None and not asked.batch:
        raise ConfigError("--devices=any needs --batch: the same rows are planned on all machines")
    if wanted.verify or wanted.html or wanted.save:
        raise ConfigError("--devices=any goes without --verify, --html and --save")
    prices = where.read_prices(wanted.prices)

    def ask(there: machine.Machine) -> question.Question:
        return question.ask(model, recipe, there, asked)

    rows = where.places(ask, prices, wanted.budget, _dtype(recipe, ""))
    print(where.text(model, rows, wanted.top), flush=True)
    return {"jaxvlm_where": where.VERSION, "model": model, "places": rows}


def _dtype(recipe: TrainConfig | None, devices: str) -> str:
    if recipe is not None:
        return recipe.network.dtype
    return "float32" if devices.startswith("cpu") else "bfloat16"


def calibrate() -> dict[str, Any]:
    """Measure this machine's devices, keep the rates and print them."""
    rates = calibration.measure()
    path = calibration.save(rates)
    print(f"{rates.kind}, JAX {rates.jax}: kept in {path}")
    for dtype, table in rates.matmul.items():
        best = max(max(of.values()) for of in table.values())
        print(f"  matmuls in {dtype}: up to {best / 1e12:.3g} TFLOP/s")
    print(f"  memory: up to {max(rates.memory.values()) / 1e9:.3g} GB/s", flush=True)
    if rates.links:
        print(f"  all-reduce: {rates.links / 1e9:.3g} GB/s a device", flush=True)
    return {"kind": rates.kind, "jax": rates.jax, "path": str(path), "links": rates.links}


def compare(first: str, second: str) -> dict[str, Any]:
    """Print two saved plans side by side; returns what of them differs.

    Args:
        first: file.
        second: file.

    Raises:
        ConfigError: a file that holds no plan.
    """
    found = compare_plans.compared(document.read(first), document.read(second))
    print(compare_plans.text(found), flush=True)
    return found
