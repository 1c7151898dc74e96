"""The work of ``jaxvlm plan``, without its command-line flags."""

from __future__ import annotations

import math
import pathlib
from typing import Any, NamedTuple

import jax

from jaxvlm.config import Config, ConfigError
from jaxvlm.planner.hardware import calibrate as calibration
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.report import compare as compare_plans
from jaxvlm.planner.report import document, page, text_report
from jaxvlm.planner.request import request
from jaxvlm.planner.request.request import RequestFlags
from jaxvlm.planner.search import decision_tree, price, scaling
from jaxvlm.planner.search.search import search


class PlanFlags(NamedTuple):
    """The machine to plan for, and which outputs to write."""

    devices: str
    """A machine, see :func:`jaxvlm.planner.hardware.machine.parse`; or ``any``."""
    top: int = 5
    verify: bool = False
    html: str = ""
    """File for the HTML page; "" writes none."""
    save: str = ""
    """File for the plan's JSON object; "" writes none."""
    prices: str = ""
    """JSON file with prices of a device per hour."""
    budget: float = 0.0
    """Highest price per hour of all devices together; 0 sets no limit."""


def plan(
    model: str, recipe: Config | None, request_flags: RequestFlags, plan_flags: PlanFlags
) -> dict[str, Any]:
    """Search for the best configurations, print the report and write the requested files.

    Args:
        model: a Hugging Face folder, a published model's name, or a recipe's file.
        recipe: the recipe's settings; ``None`` if ``model`` is no recipe.
        request_flags: batch size, sequence length and what is trained.
        plan_flags: machine and outputs.

    Returns:
        The plan's JSON document.

    Raises:
        ConfigError: a run that can't be planned, with the reason.
    """
    if plan_flags.top < 1:
        raise ConfigError(f"--top={plan_flags.top}: it must be at least 1")
    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator
    for flag, path in (("html", plan_flags.html), ("save", plan_flags.save)):  # before the search
        if path and not pathlib.Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--{flag}={path}: its folder does not exist; create it first")
    if plan_flags.devices == "any":
        return _machines_by_price(model, recipe, request_flags, plan_flags)
    if plan_flags.prices or plan_flags.budget:
        raise ConfigError(
            "--prices and --budget need --devices=any; --price is for one --devices=MACHINE"
        )
    target = machine.parse(plan_flags.devices, _dtype(recipe, plan_flags.devices))
    devices = []
    if plan_flags.verify:  # first, so that a missing compiler is reported at once
        from jaxvlm.planner.compiled import verify  # imports what only a run needs

        verify.prepare(target)
        devices = verify.devices_of(target)
    asked = request.plan_request(model, recipe, target, request_flags)
    if why := request.undivided(asked.config, target.devices):
        raise ConfigError(why)
    result = search(asked, plan_flags.top)
    plan_document = document.of(result, decision_tree.branches(result))
    if devices:
        plan_document["verified"] = verify.verify(result, devices)
    if plan_flags.html:
        plan_document["scaling"] = scaling.curve(result)
        page.write(plan_flags.html, plan_document)
    print(text_report.text(plan_document), flush=True)
    if plan_flags.save:
        document.write(plan_flags.save, plan_document)
    return plan_document


def _machines_by_price(
    model: str, recipe: Config | None, request_flags: RequestFlags, plan_flags: PlanFlags
) -> dict[str, Any]:
    """Machines that have a price, and what the run costs on each."""
    if not plan_flags.prices:
        raise ConfigError(
            "--devices=any needs --prices=FILE, a JSON object with each device's price per hour: "
            '{"h200": ..., "v5e": ...}'
        )
    if not 0 <= plan_flags.budget < math.inf:
        raise ConfigError(f"--budget={plan_flags.budget:g}: it must be above 0")
    if recipe is None and not request_flags.batch:
        raise ConfigError("--devices=any needs --batch: the same batch is planned on every machine")
    if plan_flags.verify or plan_flags.html or plan_flags.save:
        raise ConfigError("--devices=any can't be combined with --verify, --html or --save")
    prices = price.read_prices(plan_flags.prices)

    def ask(target: machine.Machine) -> request.PlanRequest:
        return request.plan_request(model, recipe, target, request_flags)

    rows = price.machines_by_price(ask, prices, plan_flags.budget, _dtype(recipe, ""))
    print(price.text(model, rows, plan_flags.top), flush=True)
    return {"jaxvlm_where": price.VERSION, "model": model, "places": rows}


def _dtype(recipe: Config | None, devices: str) -> str:
    if recipe is not None:
        return recipe.network.dtype
    return "float32" if devices.startswith("cpu") else "bfloat16"


def calibrate() -> dict[str, Any]:
    """Measure the rates of this machine's devices, save them to the user's file and print them."""
    rates = calibration.measure()
    path = calibration.save(rates)
    print(f"{rates.kind}, JAX {rates.jax}: saved in {path}")
    for dtype, table in rates.matmul.items():
        best = max(max(rates_by_size.values()) for rates_by_size in table.values())
        print(f"  matmuls in {dtype}: up to {best / 1e12:.3g} TFLOP/s")
    print(f"  memory: up to {max(rates.memory.values()) / 1e9:.3g} GB/s", flush=True)
    if rates.links:
        print(f"  all-reduce: {rates.links / 1e9:.3g} GB/s a device", flush=True)
    return {"kind": rates.kind, "jax": rates.jax, "path": str(path), "links": rates.links}


def compare(first: str, second: str) -> dict[str, Any]:
    """Print two saved plans side by side and return their differences.

    Args:
        first: file written by ``--save``.
        second: file written by ``--save``.

    Raises:
        ConfigError: a file that holds no plan.
    """
    comparison = compare_plans.compared(document.read(first), document.read(second))
    print(compare_plans.text(comparison), flush=True)
    return comparison
