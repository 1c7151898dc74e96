"""A plan as one JSON object: the output of ``--json``, and the input of reports and pages."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from jaxvlm.config import ConfigError, json_text
from jaxvlm.parallel.mesh import AXES
from jaxvlm.planner.request.request import PlanRequest
from jaxvlm.planner.search import candidates
from jaxvlm.planner.search.candidate_memory import Plan, capacity
from jaxvlm.planner.search.search import SearchResult

VERSION = 1
"""Schema version: it changes when a field changes its meaning or is removed."""
_TIMES = ("compute", "hbm", "links", "network", "bubble", "input", "exposed", "total")
_RATES = ("tokens_per_s", "images_per_s", "mfu", "hfu")


def of(result: SearchResult, tree: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Convert a search result to plain values. Bytes are per device, seconds per step.

    Args:
        result: from :func:`jaxvlm.planner.search.search.search`.
        tree: from :func:`jaxvlm.planner.search.decision_tree.branches`.
    """
    request = result.request
    machine, config = request.machine, request.config
    return {
        "jaxvlm_plan": VERSION,
        "model": request.name,
        "machine": {
            "name": machine.name,
            "devices": machine.devices,
            "hosts": machine.hosts,
            "topology": machine.topology,
            "slices": machine.slices,
            "memory": machine.chip.hbm_bytes or None,
            "usable": capacity(request) or None,
        },
        "batch": {
            "rows": request.rows,
            "length": request.length,
            "images": request.images,
            "patches": request.patches,
            **_pairs(request),
        },
        "loss": config.loss.target or config.loss.name,
        "frozen": list(config.optim.frozen),
        "lora_rank": config.network.lora.rank,
        "samples": request.samples or None,
        "price": request.price or None,
        "plans": [of_plan(request, plan) for plan in result.best],
        "nearest": of_plan(request, result.nearest) if result.nearest else None,
        "rejected": [rejected._asdict() for rejected in result.rejected],
        "compared": len(result.considered),
        "notes": result.notes,
        "tree": tree or [],
        "scaling": [],
        "verified": [],
    }


def _pairs(request: PlanRequest) -> dict[str, Any]:
    """Shapes of an example, when training on pairs."""
    if not (shapes := request.pairs):
        return {}
    sides = {"query": shapes.query._asdict(), "document": shapes.document._asdict()}
    return sides | {"documents": shapes.documents}


def of_plan(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """One candidate as plain values; unknown figures are ``None``."""
    candidate, time, has_rates = plan.candidate, plan.time, bool(plan.time.total)
    return {
        "family": candidate.family,
        "text": candidate.text(),
        "strategy": candidate.preset,
        "mesh": {axis: getattr(candidate.mesh, axis) for axis in AXES},
        "remat": candidate.remat,
        "microbatches": 1 if request.pairs else candidate.microbatches,
        "grad_cache": dict(zip(("query", "document"), candidate.mini_batches)),
        "cache": candidate.cache,
        "replicated": list(candidate.strategy.replicated),
        "memory": {
            "states": {name: round(size) for name, size in plan.states.items()},
            "work": {name: round(size) for name, size in plan.work.items()},
            "peak": round(plan.peak),
            "from": "trace" if plan.traced else "formula",
        },
        "time": {name: getattr(time, name) if has_rates else None for name in _TIMES}
        | {"bound": time.bound if has_rates else None},
        "parts": dict(time.parts) if has_rates else {},
        **{name: getattr(time, name) if has_rates else None for name in _RATES},
        "epoch": epoch(request, time.total),
        "overrides": candidates.overrides(request, candidate),
    }


def epoch(request: PlanRequest, seconds: float | int) -> dict[str, float | None] | None:
    """Hours and price of an epoch on the machine; ``None`` without ``--samples``."""
    if not request.samples:
        return None
    hours = math.ceil(request.samples / request.rows) * seconds / 3600 or None
    cost = (hours or 0) * request.machine.devices * request.price or None
    return {"hours": hours, "cost": cost}


def read(path: str) -> dict[str, Any]:
    """Read a plan that ``--save`` wrote.

    Raises:
        ConfigError: no such file, no plan, or a plan of another version.
    """
    file = pathlib.Path(path)
    try:
        plan = json_text.parse(file.read_text(encoding="utf-8").strip().splitlines()[-1])
    except OSError:
        raise ConfigError(f"{path}: no such file; jaxvlm plan --save=FILE writes one") from None
    except (ValueError, IndexError):
        raise ConfigError(f"{path} is no plan; jaxvlm plan --save=FILE writes one") from None
    version = plan.get("jaxvlm_plan") if isinstance(plan, dict) else None
    if version != VERSION:
        what = "no plan" if version is None else f"a plan of version {version}"
        raise ConfigError(f"{path} is {what}, not one of version {VERSION}")
    return dict(plan)


def write(path: str, plan: dict[str, Any]) -> None:
    """Write a plan for :func:`read`.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        pathlib.Path(path).write_text(json.dumps(plan) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save={path}: {error.strerror}") from None
