"""Real models' train steps, compiled for pods that are not there: do they fit, what do they send?

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.pods

A row of LENGTH tokens and its images a device, bfloat16, full remat, AdamW with float32
parameters and moments. Where a step does not fit, adapters on a base in bytes are tried, and a row
of their own says so; ``--fsdp`` tries another split where the compiler itself fails. Bounds are
what a step cannot be faster than: model FLOPs at the chip's peak, wire bytes (ring algorithm) at
the rate of a chip's links. A compilation takes minutes: rows that a
result of the same name has are kept, so that it goes on where it was stopped.

    python -m benchmarks.pods --models qwen3-vl-8b --targets v5p:2x2x2 v5p:2x4x4 v5p:4x4x8 \\
        v5p:8x8x8 v5p:16x16x16 --name pods_growth --plot

draws how the compilation's CPU time and what a device sends grow with the chips.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import Any

import jax
import optax

from benchmarks.batches import abstract_batch
from benchmarks.common import ROOT, environment, kept, write
from jaxvlm.config import LoraConfig, MeshConfig, ModelConfig, StrategyConfig
from jaxvlm.hf import model_zoo
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models import model_flops
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives, topology
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train import chips, program_memory

LENGTH, PATCHES, IMAGES = 4096, 4096, 4
MODELS = ("qwen3-vl-8b", "llava-1.5-13b", "qwen3-vl-235b-a22b")
TARGETS = ("v5e:16x16", "v5p:8x8x8", "v6e:16x16", "2 v5e:16x16", "h200:8", "h200:64", "h200:256")
LORA = LoraConfig(rank=16, base="int8")


def model_config(name: str, target: str) -> ModelConfig:
    """A published model as it is trained."""
    config = model_zoo.config_of(name)
    assert isinstance(config, ModelConfig)
    return dataclasses.replace(
        config,
        vision=dataclasses.replace(config.vision, remat="full"),
        decoder=dataclasses.replace(config.decoder, remat="full"),
        dtype="bfloat16",
        attention="xla" if target.startswith("h200") else "auto",
    )


def mesh_of(config: ModelConfig, devices: int, slices: int, most: int) -> MeshConfig:
    """FSDP over as many devices of a slice as divide widths, copies across; experts over 16."""
    experts = math.gcd(config.decoder.num_experts or 1, devices, 16)
    fsdp = math.gcd(devices // slices // experts, config.vision.width, config.decoder.width)
    fsdp = math.gcd(fsdp, most) if most else fsdp
    return MeshConfig(data=devices // fsdp // experts, fsdp=fsdp, expert=experts)


def one(name: str, target: str, frozen: bool, lora: bool, fsdp: int) -> dict[str, Any]:
    """One step, compiled, or why not."""
    slices, _, where = target.rpartition(" ")
    devices = topology.devices(where, int(slices or 1))
    config = model_config(name, target)
    config = dataclasses.replace(config, lora=LORA) if lora else config
    sizes = mesh_of(config, len(devices), int(slices or 1), fsdp)
    preset = "hybrid_shard" if sizes.data > 1 else "fsdp"
    mesh, split = resolve(StrategyConfig(preset), sizes, devices)
    here = make_mesh(mesh, devices)
    model = build_model(config, here, split)
    still = ("vision/*",) if frozen else ()
    step, abstract, _ = assemble(model, NextToken(), optax.adamw(1e-4), frozen=still)
    chip = chips.lookup(devices[0].device_kind, "bfloat16")
    patches = PATCHES / IMAGES if config.vision.packed else 0
    if not patches:
        assert num_visual_tokens(config) * IMAGES < LENGTH
    forward = model_flops.forward(config, LENGTH, LENGTH, IMAGES, patches)
    trained = {"vision": not (frozen or lora), "connector": not lora, "decoder": not lora}
    adapted = ("vision", "connector", "decoder") if lora else ()
    row: dict[str, Any] = {
        "model": name,
        "target": target,
        "chip": chip.name if chip else devices[0].device_kind,
        "devices": len(devices),
        "mesh": {axis: size for axis, size in here.shape.items() if size > 1},
        "strategy": preset,
        "trained": "adapters, base in bytes" if lora else "decoder" if frozen else "all",
        "frozen": frozen,
        "parameters": sum(math.prod(x.shape) for x in model.shapes.values()),
        "tokens_a_device": LENGTH,
        "flops_a_device": model_flops.step(forward, trained, adapted).total,
    }
    batch = abstract_batch(config, here, len(devices), LENGTH, IMAGES, PATCHES)
    cpu = time.process_time()
    try:
        program = step.lower(abstract, batch).compile()
    except jax.errors.JaxRuntimeError as error:  # it does not fit, or the compiler has a bug
        return row | {"fits": False, "why": str(error).strip().splitlines()[0][:200]}
    spent = time.process_time() - cpu
    memory = program_memory.memory(program)
    found = collectives.read(program.as_text(), dict(here.shape))
    wire = collectives.total(found)
    row |= {
        "compile_cpu_seconds": round(spent, 1),
        "peak_gib": round(memory["peak"] / 2**30, 2),
        "wire_bytes": wire,
        "sent": {f"{c.kind} {c.dtype} {'x'.join(c.axes)}": c.wire_bytes for c in found[:6]},
    }
    if chip:
        row["fits"] = memory["peak"] < 0.95 * chip.hbm_bytes
        row["compute_bound_ms"] = round(1e3 * row["flops_a_device"] / chip.peak_flops, 1)
        inside = chips.links(chip.name)
        row["wire_bound_ms"] = round(1e3 * wire / inside, 1)
    return row


def plot(rows: list[dict[str, Any]]) -> None:
    """docs/pods_growth.svg: by chips, a compilation's CPU time, and what a device sends."""
    import matplotlib  # not among what compiling needs

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    drawn = {"compile_cpu_seconds": (1, "CPU seconds"), "wire_bytes": (2**30, "GiB a step")}
    titles = ("Compilation", "What a device sends")
    for panel, title, (field, (unit, label)) in zip(panels, titles, drawn.items()):
        for trained in dict.fromkeys(row["trained"] for row in rows):
            mine = [row for row in rows if row["trained"] == trained and field in row]
            mine.sort(key=lambda row: row["devices"])
            x = [row["devices"] for row in mine]
            panel.plot(x, [row[field] / unit for row in mine], "o-", label=f"{trained} trained")
        panel.set(title=title, xlabel="chips", ylabel=label, xscale="log", ylim=(0, None))
        panel.set_xticks(x, [str(n) for n in x])
        panel.minorticks_off()
        panel.legend()
    figure.savefig(ROOT / "docs" / "pods_growth.svg", metadata={"Date": None})


def main() -> None:
    """Compile all, print a line each, write the result after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--name", default="pods_aot", help="of the result")
    parser.add_argument("--fsdp", type=int, default=0, help="at most; 0: as many as fit")
    parser.add_argument("--plot", action="store_true", help="draw docs/pods_growth.svg")
    args = parser.parse_args()
    rows = kept(args.name)
    done = {(row["target"], row["model"], row["frozen"]) for row in rows}
    here = environment()
    for target in args.targets:
        for name in args.models:
            for frozen in (True, False) if name == "qwen3-vl-8b" else (False,):
                if (target, name, frozen) in done:
                    continue
                rows.append(
                    row := one(name, target, frozen, False, args.fsdp) | {"environment": here}
                )
                print(row, flush=True)
                if not row["fits"] and "RESOURCE" in row.get("why", "RESOURCE"):  # not a bug
                    row = one(name, target, frozen, True, args.fsdp) | {"environment": here}
                    rows.append(row)
                    print(row, flush=True)
                write(f"{args.name}.json", {"rows": rows})
    if args.plot:
        plot(rows)


if __name__ == "__main__":
    main()
