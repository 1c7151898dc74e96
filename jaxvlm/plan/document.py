"""A plan as one JSON object: what ``--json`` prints, and what reports and pages are made of."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from jaxvlm.config import ConfigError
from jaxvlm.parallel.mesh import AXES
from jaxvlm.plan import search, ways
from jaxvlm.plan.question import Question
from jaxvlm.plan.search import Found, Plan

VERSION = 1
"""Of the schema: it changes when a field's meaning does, or one goes."""
_TIMES = ("compute", "hbm", "links", "network", "bubble", "input", "exposed", "total")
_RATES = ("tokens_per_s", "pictures_per_s", "mfu", "hfu")


def of(found: Found, tree: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What a search came to, as plain values. Bytes are of a device, seconds of a step.

    Args:
        found: by :func:`jaxvlm.plan.search.search`.
        tree: by :func:`jaxvlm.plan.tree.branches`.
    """
    question = found.question
    machine, config = question.machine, question.config
    return {
        "jaxvlm_plan": VERSION,
        "model": question.name,
        "machine": {
            "name": machine.name,
            "devices": machine.devices,
            "hosts": machine.hosts,
            "topology": machine.topology,
            "slices": machine.slices,
            "memory": machine.chip.hbm_bytes or None,
            "usable": search.capacity(question) or None,
        },
        "batch": {
            "rows": question.rows,
            "length": question.length,
            "pictures": question.pictures,
            "patches": question.patches,
            **_pairs(question),
        },
        "loss": config.loss,
        "frozen": list(config.optim.frozen),
        "lora_rank": config.network.lora.rank,
        "samples": question.samples or None,
        "price": question.price or None,
        "plans": [of_plan(question, plan) for plan in found.best],
        "nearest": of_plan(question, found.nearest) if found.nearest else None,
        "lost": [lost._asdict() for lost in found.lost],
        "compared": len(found.seen),
        "notes": found.notes,
        "tree": tree or [],
        "scaling": [],
        "verified": [],
    }


def _pairs(question: Question) -> dict[str, Any]:
    """What an example is, where pairs are trained on."""
    if not (found := question.pairs):
        return {}
    sides = {"query": found.query._asdict(), "document": found.document._asdict()}
    return sides | {"documents": found.documents}


def of_plan(question: Question, plan: Plan) -> dict[str, Any]:
    """One way to train; figures that are not known are ``None``."""
    way, time, known = plan.way, plan.time, bool(plan.time.total)
    return {
        "family": way.family,
        "text": way.text(),
        "strategy": way.preset,
        "mesh": {axis: getattr(way.mesh, axis) for axis in AXES},
        "remat": way.remat,
        "microbatches": 1 if question.pairs else way.microbatches,
        "grad_cache": dict(zip(("query", "document"), way.chunk)),
        "cache": way.cache,
        "whole": list(way.strategy.whole),
        "memory": {
            "states": {name: round(size) for name, size in plan.states.items()},
            "work": {name: round(size) for name, size in plan.work.items()},
            "peak": round(plan.peak),
            "from": "trace" if plan.traced else "formula",
        },
        "time": {name: getattr(time, name) if known else None for name in _TIMES}
        | {"bound": time.bound if known else None},
        "parts": dict(time.parts) if known else {},
        **{name: getattr(time, name) if known else None for name in _RATES},
        "epoch": epoch(question, time.total),
        "overrides": ways.overrides(question, way),
    }


def epoch(question: Question, seconds: float | int) -> dict[str, float | None] | None:
    """Hours of an epoch on the machine, and their price; ``None``: nobody said how many rows."""
    if not question.samples:
        return None
    hours = math.ceil(question.samples / question.rows) * seconds / 3600 or None
    cost = (hours or 0) * question.machine.devices * question.price or None
    return {"hours": hours, "cost": cost}


def read(path: str) -> dict[str, Any]:
    """A plan that ``--save`` wrote.

    Raises:
        ConfigError: no such file, no plan, or one of another version.
    """
    file = pathlib.Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8").strip().splitlines()[-1])
    except OSError:
        raise ConfigError(f"{path}: no such file; jaxvlm plan --save=FILE writes one") from None
    except (ValueError, IndexError):
        raise ConfigError(f"{path} is no plan; jaxvlm plan --save=FILE writes one") from None
    version = found.get("jaxvlm_plan") if isinstance(found, dict) else None
    if version != VERSION:
        what = "no plan" if version is None else f"a plan of version {version}"
        raise ConfigError(f"{path} is {what}, not one of version {VERSION}")
    return dict(found)


def write(path: str, plan: dict[str, Any]) -> None:
    """Write a plan where :func:`read` finds it.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        pathlib.Path(path).write_text(json.dumps(plan) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save={path}: {error.strerror}") from None
