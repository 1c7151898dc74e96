"""What the planner says of set-ups whose figures others published, beside these figures.

    python -m benchmarks.planner_published

``published_measurements.json`` has a source for each row. Where a source does not say all, what was
taken stands in the row's note. Nothing is fitted to single rows and none is left out; a program
that is not ours (another compiler, another precision) is planned as ours would be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

import numpy as np

from benchmarks.common import HERE, environment, kept, write
from jaxvlm.config import (
    ConfigError,
    ConnectorConfig,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    VisionConfig,
)
from jaxvlm.hf import model_zoo
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import abstract_devices
from jaxvlm.planner.search import candidate_memory
from jaxvlm.planner.time.step_time import step_time


def model_of(said: dict[str, Any], remat: str, dtype: str) -> ModelConfig:
    """A row's model."""
    if "published" in said:
        config = model_zoo.config_of(said["published"])
        assert isinstance(config, ModelConfig)
    else:
        config = ModelConfig(
            VisionConfig(**said.get("vision", {})),
            ConnectorConfig(**said.get("connector", {})),
            DecoderConfig(**said["decoder"]),
        )
    return dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, remat=remat),
        decoder=dataclasses.replace(config.decoder, remat=remat),
        dtype=dtype,
    )


def setup_of(
    row: dict[str, Any], models: dict[str, Any]
) -> tuple[step_memory.StepSetup, machine.Machine]:
    """What is planned, and on what."""
    dtype = row.get("dtype", "bfloat16")
    there = machine.parse(row["machine"], dtype)
    devices = abstract_devices.devices(there.platform, there.devices, there.devices_per_host)
    mesh, strategy = resolve(StrategyConfig(**row["strategy"]), MeshConfig(**row["mesh"]), devices)
    made = step_memory.StepSetup(
        model_of(models[row["model"]], row["remat"], dtype), mesh, strategy, there.platform,
        row["rows"], row["length"], row.get("images", 0), frozen=tuple(row.get("frozen", ())),
        microbatches=row["microbatches"],
    )  # fmt: skip
    return made, there


def time_row(row: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """Speed."""
    setup, there = setup_of(row, models)
    said, measured = step_time(setup, there), row["measured"]
    if "tflops_device" in measured:
        planned = said.model_flops / there.devices / said.total / 1e12
        theirs = measured["tflops_device"]
    else:
        planned, theirs = said.tokens_per_s / there.devices, measured["tokens_per_s_device"]
    return {
        "planned": round(planned, 1), "measured": theirs, "error": round(planned / theirs - 1, 3),
        "bound": said.bound, "mfu": round(said.mfu, 3), "missing": list(said.missing),
    }  # fmt: skip


def states_row(row: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """Bytes between steps, gradients with them, by the authors' bytes of a number: how many of each
    a device holds is the planner's word for a model of about that size."""
    there = machine.parse(row["machine"])
    devices = abstract_devices.devices(there.platform, there.devices, there.devices_per_host)
    mesh, strategy = resolve(StrategyConfig(row["preset"]), MeshConfig(), devices)
    config = model_of(models[row["model"]], "none", "bfloat16")
    setup = step_memory.StepSetup(config, mesh, strategy, there.platform, there.devices, 1, 0)
    model = step_memory.model_of(setup)
    states, layout = step_memory.states(setup, model), model.layout("gradients")
    held = {
        "params": states["parameters"] / 4,
        "optimizer": states["moments"] / 8,  # two of float32
        "gradients": sum(
            math.prod(layout[p].shard_shape(x.shape)) for p, x in model.shapes.items()
        ),
    }
    total = sum(math.prod(x.shape) for x in model.shapes.values())
    size = sum(row["bytes"][field] * held[field] for field in row["bytes"])
    planned, theirs = size * row["parameters"] / total / row["unit"], row["measured"]["gb"]
    return {"planned": round(planned, 2), "measured": theirs,
            "error": round(planned / theirs - 1, 3)}  # fmt: skip


def peak_row(row: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """Memory of a step."""
    setup, there = setup_of(row, models)
    try:
        peak = step_memory.estimate(setup).peak
    except ConfigError as error:
        return {"planned": None, "measured": row["measured"], "error": None, "why": str(error)}
    capacity = (1 - candidate_memory.MARGIN) * there.chip.hbm_bytes
    if row["kind"] == "fits" or row["measured"].get("oom"):
        fits = row["measured"].get("fits", False)
        return {"planned": bool(peak < capacity), "measured": fits,
                "right": bool((peak < capacity) == fits),
                "planned_gib": round(peak / 2**30, 1)}  # fmt: skip
    theirs = row["measured"]["mb"]
    planned = peak / 2**20
    return {"planned": round(planned, 1), "measured": theirs,
            "error": round(planned / theirs - 1, 3)}  # fmt: skip


def group(row: dict[str, Any]) -> str:
    """Of rows whose errors are summed up; those that a rate was taken from stand apart."""
    name, origin = f"{row['id'].split()[0]} {row['kind']}", row["id"]
    if "fitted" in row:
        on = "H100" if "A3" in origin else "TPU"
        return f"{name}, {on}, {'fitted' if row['fitted'] else 'held'}"
    if name == "torchtitan time":
        parts = "context" in origin and "context 1," not in origin
        how = "parts of rows" if parts else "float8" if "float8" in row["note"] else "bfloat16"
        return f"{name}, {how}"
    return name


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By group: how many, mean and worst error, and the median with its sign."""
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(group(row), []).append(row)
    made = {}
    for name, mine in found.items():
        signed = [r["error"] for r in mine if r.get("error") is not None]
        errors = np.abs(signed)
        right = [r["right"] for r in mine if "right" in r]
        made[name] = {"rows": len(mine)}
        if len(errors):
            made[name] |= {"mean_error": round(float(errors.mean()), 3),
                           "worst_error": round(float(errors.max()), 3),
                           "median": round(float(np.median(signed)), 3)}  # fmt: skip
        if right:
            made[name] |= {"fits_right": sum(right), "fits_asked": len(right)}
    return made


def main() -> None:
    """Plan all, print a line each, write the result."""
    parser = argparse.ArgumentParser()
    kinds = ["time", "states", "peak", "fits"]
    parser.add_argument("--kinds", nargs="*", default=kinds, help="rows of others are kept")
    args = parser.parse_args()
    known = json.loads((HERE / "published_measurements.json").read_text(encoding="utf-8"))
    stored = {row["id"]: row for row in kept("planner_published")}
    plans = {"time": time_row, "peak": peak_row, "fits": peak_row, "states": states_row}
    rows = []
    for row in known["rows"]:
        if row["kind"] not in args.kinds:
            rows += [stored[row["id"]]] if row["id"] in stored else []
            continue
        made = plans[row["kind"]](row, known["models"])
        said = {k: row[k] for k in ("source", "note", "fitted") if k in row}
        rows.append({k: row[k] for k in ("id", "kind")} | made | said)
        print({k: v for k, v in rows[-1].items() if k not in ("source", "note")}, flush=True)
    found = summary(rows)
    for name, of in found.items():
        print(name, of)
    write("planner_published.json",
          {"rows": rows, "summary": found, "environment": environment()})  # fmt: skip


if __name__ == "__main__":
    main()
