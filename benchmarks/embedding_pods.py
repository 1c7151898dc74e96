"""The steps of configs/embedding.py, compiled for pods that are not there: do 8,192 pairs fit?

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.embedding_pods

Queries of CLIP and SigLIP are images, documents texts; of Qwen3-VL-Embedding queries are texts of
128 tokens, documents pages of 3,072 patches in rows of 1,024 tokens. A compilation takes minutes:
rows that the result has are kept, so that it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import runpy
import time
from typing import Any

# With no GPU there is nothing to tune by, and XLA's Triton matmuls find no tiles for width 1,152.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_triton_gemm=false"

import jax
import numpy as np

from benchmarks.batches import abstract_batch
from benchmarks.common import ROOT, environment, kept, write
from jaxvlm.config import Config, DualConfig, LoraConfig, ModelConfig, from_config_dict
from jaxvlm.hf import model_zoo
from jaxvlm.hf.families import any_family, peft_adapters
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives, topology
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import split
from jaxvlm.train import chips, program_memory
from jaxvlm.trainer.training import build_training
from jaxvlm.types import Batch, Pairs

RECIPES = {
    "clip-b32": "clip-vit-b-32",
    "siglip2-so400m": "siglip2-so400m",
    "qwen3-2b": "qwen3-vl-2b",
    "qwen3-8b": "qwen3-vl-8b",
}
"""Argument of the recipe -> the published sizes: an embedding model has those of its base."""
TARGETS = ("h200:8", "v5p:2x2x4")


def settings(recipe: str, target: str) -> Config:
    """A recipe's run, with the dims that its checkpoint would say."""
    get_config = runpy.run_path(str(ROOT / "configs" / "embedding.py"))["get_config"]
    config = from_config_dict(get_config(recipe))
    hf_config = model_zoo.published_config(RECIPES[recipe])
    family = any_family(hf_config, recipe)
    found = family.config_from_hf(hf_config)
    asked: Any = config.network
    how = {"dtype": asked.dtype, "attention": "xla" if target.startswith("h200") else "auto"}
    towers = ("vision", "text") if isinstance(found, DualConfig) else ("vision", "decoder")
    remat = {
        t: dataclasses.replace(getattr(found, t), remat=getattr(asked, t).remat) for t in towers
    }
    if isinstance(found, DualConfig):
        return dataclasses.replace(config, dual=dataclasses.replace(found, **remat, **how))
    assert isinstance(found, ModelConfig)
    remat["decoder"] = dataclasses.replace(remat["decoder"], head=found.decoder.tied_embeddings)
    made = dataclasses.replace(found, **remat, **how)
    lora = _layers(asked.lora, family.weights(made))
    return dataclasses.replace(config, model=dataclasses.replace(made, lora=lora))


def _layers(lora: LoraConfig, base: Any) -> LoraConfig:
    """As a run that starts from the checkpoint has them."""
    without = tuple("-" + path for path in peft_adapters.not_layers(base))
    return dataclasses.replace(lora, targets=lora.targets + without)


def pairs(config: Config, mesh: jax.sharding.Mesh) -> Pairs:
    """Shapes of a batch."""
    count, where = config.data.batch_size, batch_sharding(mesh)

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=where)

    def text(length: int, rows: int = 1) -> Batch:
        kind = [(np.int32, length), (np.float32, length), (np.int32, rows, length)]
        return Batch(*(of(*x) for x in kind), segment=of(np.int32, length))

    if config.embedder == "dual":
        side = config.dual.vision.image_size
        query = text(0)._replace(pixels=of(np.uint8, 1, side, side, 3), image_start=of(np.int32, 1))
        document = text(config.data.max_length)
    else:
        rows = max(1, len(config.model.decoder.rope_sections))
        query = text(config.data.pairs.max_query_length, rows)
        page = (config.data.max_length, 1, config.data.max_patches_per_sequence)
        document = abstract_batch(config.model, mesh, count, *page)
    document = jax.tree.map(lambda x: of(x.dtype, 1, *x.shape[1:]), document)
    number = of(np.int32)
    return Pairs(query, document, of(np.bool_, 1), number, of(np.int32, 1))


def one(recipe: str, target: str) -> dict[str, Any]:
    """One step, compiled, or why not."""
    devices = topology.devices(target)
    config = settings(recipe, target)
    sizes, strategy = resolve(config.strategy, config.mesh, devices)
    config = dataclasses.replace(config, mesh=sizes, strategy=strategy)
    mesh = make_mesh(sizes, devices)
    embeddings = None if config.embedder == "dual" else config.embedding
    model = build_model(config.network, mesh, strategy, embeddings=embeddings)
    made = build_training(config, model, 1000, print)
    own, _ = split(model, model.shapes, config.optim.frozen)
    chip = chips.lookup(devices[0].device_kind, "bfloat16")
    network: Any = config.network
    row: dict[str, Any] = {
        "recipe": recipe,
        "target": target,
        "chip": chip.name if chip else devices[0].device_kind,
        "devices": len(devices),
        "strategy": strategy.name,
        "parameters": sum(math.prod(x.shape) for x in model.shapes.values()),
        "trained": sum(math.prod(x.shape) for x in own.values()),
        "lora_rank": network.lora.rank,
        "batch": config.data.batch_size,
        "chunk": [config.grad_cache.query_mini_batch, config.grad_cache.document_mini_batch],
        "remat": network.vision.remat,
    }
    cpu = time.process_time()
    try:
        program = made.step.get(made.abstract, pairs(config, mesh))
    except jax.errors.JaxRuntimeError as error:  # it does not fit, or the compiler has a bug
        return row | {"fits": False, "why": str(error).strip().splitlines()[0][:200]}
    row["compile_cpu_seconds"] = round(time.process_time() - cpu, 1)
    for name, size in program_memory.memory(program).items():
        row[f"{name}_gib"] = round(size / 2**30, 2)
    sent = collectives.read(program.as_text(), dict(mesh.shape))
    row["wire_bytes"] = collectives.total(sent)
    row["sent"] = {f"{c.kind} {c.dtype} {'x'.join(c.axes)}": c.wire_bytes for c in sent[:6]}
    if chip:
        row["fits"] = row["peak_gib"] * 2**30 < 0.95 * chip.hbm_bytes
        row["wire_bound_ms"] = round(1e3 * row["wire_bytes"] / chips.links(chip.name), 1)
    return row


def main() -> None:
    """Compile all, print a line each, write the result after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--recipes", nargs="*", default=tuple(RECIPES))
    parser.add_argument("--name", default="embedding_pods_aot", help="of the result")
    args = parser.parse_args()
    rows = kept(args.name)
    done = {(row["recipe"], row["target"]) for row in rows}
    for recipe in args.recipes:
        for target in args.targets:
            if (recipe, target) not in done:
                rows.append(one(recipe, target) | {"environment": environment()})
                print(rows[-1], flush=True)
                write(f"{args.name}.json", {"rows": rows})


if __name__ == "__main__":
    main()
