"""Compile train steps for chips that are not here, and hold them to what attention may cost.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.compiled_steps [--only TEXT]

Three tables, for the same sources as ``benchmarks.lowering``, whose digests the result has:

* steps: a covering set of models at their real widths, with few layers, on one chip with full
  remat: kernels, arrays of all queries and all keys, memory, bytes moved;
* attention: one call, forward and backward, at a model's shapes, beside our kernel without a mask;
* jobs: whole models on typical rows: executed over useful FLOPs, and a roofline of the program.

Rows that are in the result are kept if these are the same. ``--docs`` prints the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import executed_flops, hlo_costs, lowering
from benchmarks.common import RESULTS, environment, write
from jaxvlm.config import MeshConfig, ModelConfig, StrategyConfig
from jaxvlm.nn.attention_backends import Scores, attend
from jaxvlm.nn.kernels.flash import SHARED
from jaxvlm.nn.mask import Mask, batch_mask, segment_mask
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives, topology, verify
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.request import abstract_devices
from jaxvlm.train import program_memory
from jaxvlm.types import Batch

NAME = "compiled_steps_aot"
CHIPS = {"h200:8": "h200:1", "v5p:2x2x2": "v5p:1x1x1", "v6e:2x4": "v6e:1x1"}
"""The chips of ``benchmarks.lowering``, and one of each."""
MODELS = {
    "qwen3-vl-2b": ("packed", "shared images"),
    "paligemma2-3b": ("packed",),
    "gemma-3-4b": ("packed",),
    "llava-1.5-7b": ("packed",),
}
"""The covering set: packed patches; soft cap and prompts read both ways; windows and images read
both ways; whole rows in the tower. Its batches, by model.
"""
ROWS = 4
"""Typical rows on a device, in jobs."""


class Job(NamedTuple):
    """A full fine-tune."""

    chip: str
    model: str
    remat: str
    options: str = ""
    """Of :data:`OPTIONS`."""
    rows: int = ROWS
    """Rows on a device."""


OPTIONS = {
    "": {},
    "whole matmuls": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}
"""Options of the compiler. ``whole matmuls``: weights are gathered before they are multiplied; of
itself libtpu sends them around a ring, and adds each shard's product to a sum in memory.
"""
JOBS = (
    Job("h200:1", "qwen3-vl-2b", "none"),
    Job("h200:1", "qwen3-vl-2b", "dots"),
    Job("h200:1", "qwen3-vl-2b", "full"),
    Job("h200:1", "paligemma2-3b", "none"),
    Job("h200:1", "paligemma2-3b", "dots"),
    Job("h200:1", "paligemma2-3b", "full"),
    Job("v6e:2x4", "qwen3-vl-2b", "full"),
    Job("v6e:2x4", "qwen3-vl-2b", "full", "whole matmuls"),
    Job("v6e:2x4", "qwen3-vl-2b", "dots", "whole matmuls", 2),
    Job("v6e:2x4", "paligemma2-3b", "full", "whole matmuls"),
)


class Call(NamedTuple):
    """One call of attention."""

    length: int
    heads: int
    kv_heads: int
    dim: int
    cap: float
    mask: Callable[[Batch], Mask]


def _windowed(batch: Batch) -> Mask:
    return batch_mask(batch).windowed(1024, False)


def _without(*fields: str) -> Callable[[Batch], Mask]:
    return lambda batch: batch_mask(batch._replace(**dict.fromkeys(fields)))


CALLS = {
    "Qwen3-VL-2B's tower": Call(8192, 16, 16, 64, 0.0, lambda x: segment_mask(x.segment)),
    "Qwen3-VL-2B, packed": Call(4096, 16, 8, 128, 0.0, _without("parent", "bidirectional")),
    "Qwen3-VL-2B, shared images": Call(4096, 16, 8, 128, 0.0, _without("bidirectional")),
    "PaliGemma 2 3B, shared images": Call(4096, 8, 4, 256, 50.0, batch_mask),
    "Gemma 3 4B, a window": Call(4096, 8, 4, 256, 0.0, _windowed),
}


def step(case: lowering.Case) -> dict[str, Any]:
    """Compile a step of the covering set."""
    setup = lowering.setup_of(case, _layout(1))
    setup = setup._replace(config=shallow(setup.config))
    start, devices = time.process_time(), topology.devices(CHIPS[case.chip])
    program = verify.lowered(setup, devices, batch=lowering.batch_of(case, setup)).compile()
    text = str(program.as_text())
    ops, memory = hlo_costs.read(text), program_memory.memory(program)
    return {
        "calls": hlo_costs.custom_calls(ops),
        "squares": squares(text, setup),
        "temporary": memory["temporary"],
        "peak": memory["peak"],
        "moved": round(sum(op.times * op.moved for op in ops)),
        "seconds": round(time.process_time() - start, 1),
    }


def shallow(config: Any) -> ModelConfig:
    """The model with few layers, each kind of them once at least."""
    levels = len(config.vision.feature_layers)
    tower = {"depth": max(2, levels)}
    if levels:  # DeepStack reads the last layer, and others
        tower["feature_layers"] = (-1, *range(-levels, -1))
    deep = config.connector.deepstack_levels
    decoder = {"depth": max(2, deep, len(config.decoder.window_pattern))}
    return dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, **tower),
        decoder=dataclasses.replace(config.decoder, **decoder),
    )


def squares(text: str, setup: StepSetup) -> list[str]:
    """Arrays of a compiled program that have all queries and all keys as dims.

    Of 2,048 tokens and fewer, they are not looked for.
    """
    sizes = {n for n in (setup.length, setup.patches) if n > 2048}
    found = {dims for _, dims, _ in hlo_costs.arrays(text)}
    return sorted("x".join(map(str, d)) for d in found if any(d.count(n) > 1 for n in sizes))


def attention(chip: str, call: Call) -> dict[str, Any]:
    """Compile one call of attention with its mask, and our kernel without one."""
    found = {}
    for name in ("masked", "unmasked"):
        program = _attention(CHIPS[chip], call, name == "masked").compile()
        ops = hlo_costs.read(str(program.as_text()))
        found[name] = {
            "calls": hlo_costs.custom_calls(ops),
            "temporary": program_memory.memory(program)["temporary"],
            "moved": round(sum(op.times * op.moved for op in ops)),
        }
    return found


def _attention(chip: str, call: Call, masked: bool) -> jax.stages.Lowered:
    mesh = make_mesh(MeshConfig(data=1), topology.devices(chip))
    axes, scores = Axes(mesh), Scores(cap=call.cap)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    q = of(jnp.bfloat16, 1, call.length, call.heads, call.dim)
    k = of(jnp.bfloat16, 1, call.length, call.kv_heads, call.dim)
    ids = of(np.int32, 1, call.length)
    batch = Batch(ids, ids, of(np.int32, 1, 1, call.length), ids, ids, ids)

    def run(q: Any, k: Any, v: Any, d_out: Any, batch: Batch) -> Any:
        mask = call.mask(batch)
        if not masked:  # the causal half is no mask: both kernels have it
            mask = Mask(mask.q_index, mask.k_index)
        backend = "auto" if masked else "flash"
        out, back = jax.vjp(lambda *x: attend(*x, mask, axes, backend, scores), q, k, v)
        return out, back(d_out)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(run).lower(q, k, k, q, batch)


def _layout(devices: int) -> lowering.Layout:
    """Weights split over all devices."""
    strategy, mesh = StrategyConfig("fsdp" if devices > 1 else ""), MeshConfig(fsdp=devices)
    return lowering.Layout(*resolve(strategy, mesh, abstract_devices.devices("cpu", devices)))


def job_setup(job: Job) -> StepSetup:
    """A job's step: typical rows, all weights trained."""
    own = machine.parse(job.chip)
    case, layout = lowering.Case(job.chip, job.model, "full", "packed"), _layout(own.devices)
    setup = lowering.setup_of(case, layout)
    assert isinstance(setup.config, ModelConfig)
    towers = {
        x: dataclasses.replace(getattr(setup.config, x), remat=job.remat)
        for x in ("vision", "decoder")
    }
    patches = executed_flops.PATCHES if setup.patches else 0
    rows = job.rows * own.devices
    return setup._replace(
        config=dataclasses.replace(setup.config, **towers),
        rows=rows,
        length=executed_flops.LENGTH,
        images=len(executed_flops.GRIDS),
        patches=patches,
    )


def run_job(job: Job) -> dict[str, Any]:
    """Compile a job's step, count its FLOPs, and bound its time."""
    setup, devices = job_setup(job), topology.devices(job.chip)
    lowered = verify.lowered(setup, devices)
    text = str(lowered.compile(compiler_options=OPTIONS[job.options]).as_text())
    return job_costs(job, setup, devices, text)


def job_costs(job: Job, setup: StepSetup, devices: list[Any], text: str) -> dict[str, Any]:
    """FLOPs of a job's compiled program on one device, and the bounds of its time."""
    assert isinstance(setup.config, ModelConfig)
    own, masks = machine.parse(job.chip), executed_flops.typical_row(setup.config).masks
    shared = getattr(devices[0], "shared_memory_per_block_optin", SHARED)
    ops = executed_flops.with_attention(hlo_costs.read(text), masks, own, shared)
    sent = collectives.total(collectives.read(text, dict(make_mesh(setup.mesh, devices).shape)))
    useful = executed_flops.useful(setup.config, setup.rows) / own.devices
    executed, bounds = executed_flops.executed(ops), {}
    for name, shares in (("peak", False), ("planner", True)):
        bound = executed_flops.roofline(ops, own, sent, shares)
        share = useful / (own.chip.peak_flops * bound.total)
        bounds[name] = bound._asdict() | {"total": bound.total, "useful share": share}
    ratio = sum(executed.values()) / useful
    return {"useful": useful, "executed": executed, "ratio": ratio, "bounds": bounds}


def work() -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Table, name of a row, and what makes it."""
    for chip in CHIPS:
        for name, call in CALLS.items():
            yield (
                "attention",
                f"{chip.split(':')[0]}, {name}",
                lambda c=chip, x=call: attention(c, x),
            )
    for chip, model in itertools.product(CHIPS, MODELS):
        for batch in MODELS[model]:
            case = lowering.Case(chip, model, "full", batch)
            yield "steps", ", ".join(case), lambda c=case: step(c)
    for job in JOBS:
        rows = f"{job.rows} rows" if job.rows != ROWS else ""
        yield "jobs", ", ".join(filter(None, (*job[:4], rows))), lambda j=job: run_job(j)


def tables(result: dict[str, Any]) -> str:
    """The tables of docs/attention.md, in Markdown."""
    found = [
        "| chip, call | kernels | temporaries, MiB | without mask | moved, MiB | without mask |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in _rows(result, "attention"):
        pair = row["masked"], row["unmasked"]
        sizes = [f"{x[key] / 2**20:.1f}" for key in ("temporary", "moved") for x in pair]
        found.append(f"| {name} | {_calls(pair[0]['calls'])} | {' | '.join(sizes)} |")
    found += [
        "",
        "| chip, model, trained, batch | kernels | temporaries, GiB | moved, GiB |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in _rows(result, "steps"):
        sizes = f"{row['temporary'] / 2**30:.1f} | {row['moved'] / 2**30:.0f}"
        found.append(f"| {name} | {_calls(row['calls'])} | {sizes} |")
    found += [
        "",
        "| chip, model, remat | useful, TFLOP | executed | of it attention | executed / useful "
        "| bound at peak, ms | useful share | bound at the planner's rates, ms | useful share |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    before = result.get("before", {}).get("jobs", {})
    for name, row in _rows(result, "jobs"):
        found.append(_job_line(name, row))
        if name in before:
            found.append(_job_line(f"{name}, before", before[name]))
    return "\n".join(found)


def _rows(result: dict[str, Any], table: str) -> list[tuple[str, dict[str, Any]]]:
    names = [name for of, name, _ in work() if of == table]
    return [(name, result[table][name]) for name in names if name in result[table]]


def _calls(calls: dict[str, int]) -> str:
    kernels = {name: n for name, n in calls.items() if "cublas" not in name}
    return ", ".join(f"{n} {name.strip('_')}" for name, n in kernels.items())


def _job_line(name: str, row: dict[str, Any]) -> str:
    if "why" in row:
        return f"| {name} | {row['why']} |" + " |" * 7
    executed, useful = row["executed"], row["useful"]
    tera = [useful, sum(executed.values()), executed["attention"]]
    cells = [f"{x / 1e12:.1f}" for x in tera] + [f"{row['ratio']:.2f}"]
    for bound in row["bounds"].values():
        cells += [f"{1e3 * bound['total']:.0f}", f"{bound['useful share']:.0%}"]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Compile what is not in the result yet, and write it after each row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose table and name contain this text")
    parser.add_argument("--docs", action="store_true", help="print the tables of the result")
    args = parser.parse_args()
    if args.docs:
        print(tables(json.loads((RESULTS / f"{NAME}.json").read_text())))
        return
    verify.prepare(machine.parse("h200:1"))
    path, here = RESULTS / f"{NAME}.json", environment()
    now: dict[str, Any] = {"digest": lowering.digest(), "models": lowering.digests(MODELS)}
    before = json.loads(path.read_text()) if path.exists() else {}
    result = now | {"environment": here, "attention": {}, "steps": {}, "jobs": {}}
    result["before"] = before.get("before", {})
    if now.items() <= before.items():
        result |= {k: v for k, v in before.items() if k != "environment"}
    for table, name, make in work():
        if name in result[table] or args.only not in f"{table}: {name}":
            continue
        try:
            result[table][name] = make()
        except jax.errors.JaxRuntimeError as error:  # it does not fit, or the compiler has a bug
            result[table][name] = {"why": str(error).strip().splitlines()[0][:300]}
        print(name, result[table][name], flush=True)
        jax.clear_caches()
        write(f"{NAME}.json", result)


if __name__ == "__main__":
    main()
