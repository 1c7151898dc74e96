"""Tokens/s, bytes and the cost of reading prompts, with whole and with compressed KV caches.

    PYTHONPATH=. python benchmarks/kv_cache_speed.py [--length 2048] [--repeats 3]
    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 PYTHONPATH=. python benchmarks/kv_cache_speed.py \\
        --chips h200:1 v6e:1x1
    XLA_FLAGS=--xla_force_host_platform_device_count=8 PYTHONPATH=. \\
        python benchmarks/kv_cache_speed.py --meshes

Without ``--chips`` a decoder of eight layers (float32, random weights) reads prompts whose tokens
but the last 32 are visual, then generates 64 tokens, at batch 1 and 8: all in turns, in one run,
by the same kernels. With ``--chips`` Qwen2.5-VL 3B (bfloat16, all its layers) is compiled for chips
that need not be here. Bytes are the compiler's: what is passed from reading to generating less
parameters (the KV cache), temporaries, and what a token moves in memory and sends. ``--ways``
leaves out others, and ``h200:2`` are two devices of one model. With ``--meshes`` the
small decoder is compiled for meshes of eight devices, and what its programs send is read from them,
per token where they generate. Writes results/kv_cache_speed_{cpu,aot}.json or
results/kv_cache_traffic_cpu.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import hlo_costs
from benchmarks.common import RESULTS, environment, write
from jaxvlm.config import MeshConfig, ModelConfig
from jaxvlm.inference.generate import Compression, Sampling, decode, prefill
from jaxvlm.inference.kv_policy import KVPolicy, preset
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import Model, build_model
from jaxvlm.train import program_memory
from jaxvlm.types import Batch

NEW, TEXT, IMAGE = 64, 32, 3
WAYS: dict[str, KVPolicy | None] = {
    "none": None,
    "vl_cache 50 %": preset("vl_cache", budget=0.5),
    "vl_cache 10 %": preset("vl_cache", budget=0.1),
    "vl_cache 5 %": preset("vl_cache", budget=0.05),
    "snapkv 10 %": preset("snapkv", budget=0.1, queries=TEXT),
    "window 10 %": preset("window", budget=0.1),
}
"""What is compared; ``window`` reads no attention weights: the cost of storing alone."""


def small_model() -> ModelConfig:
    base = ModelConfig()
    decoder = dataclasses.replace(
        base.decoder, vocab_size=4096, width=512, depth=8, num_heads=8, num_kv_heads=4,
        head_dim=64, mlp_dim=1536,
    )  # fmt: skip
    return dataclasses.replace(base, decoder=decoder, dtype="float32")


def prompts(rows: int, length: int, position_rows: int = 1) -> Batch:
    """Prompts of one length; visual tokens are embedded as others, so no encoder takes part."""
    tokens = np.random.default_rng(0).integers(4, 4096, (rows, length)).astype(np.int32)
    tokens[:, : length - TEXT] = IMAGE
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, position_rows, 1))
    ids = np.arange(rows, dtype=np.int32)
    return Batch(tokens, None, positions, np.ones_like(tokens), example_id=ids)


def programs(model: Model, policy: KVPolicy | None) -> tuple[Any, Any]:
    """The jitted reading and generating."""
    d, stages = model.config.decoder, model.mesh.shape["pipeline"]
    compression = policy and Compression(policy, IMAGE, stages)
    shape = (d.depth, d.num_kv_heads, d.head_dim)

    def read(params: Any, batch: Batch) -> Any:
        module, key = model.module(params), jax.random.key(0)
        return prefill(module, batch, Sampling(), NEW, shape, key, compression)

    def generate(params: Any, state: Any) -> Any:
        return decode(model.module(params), state, Sampling(), NEW)

    # All parameters are arguments of both, the encoder's too: the rest is the KV cache.
    keep = functools.partial(jax.jit, keep_unused=True)
    return keep(read), keep(generate, donate_argnums=1)


def bytes_of(reading: Any, generating: Any, params: int) -> dict[str, int]:
    """Bytes of the compiled programs."""
    read, wrote = reading.memory_analysis(), generating.memory_analysis()
    return {
        "kv_bytes": wrote.argument_size_in_bytes - params,
        "generate_temporaries": wrote.temp_size_in_bytes,
        "read_temporaries": read.temp_size_in_bytes,
    }


def measured(
    config: ModelConfig, batch_sizes: tuple[int, ...], length: int, repeats: int,
    ways: dict[str, KVPolicy | None], position_rows: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Times on this machine's first device, weights random and of the model's dtype."""
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    model = build_model(config, mesh)
    model = model.holding(dict.fromkeys(model.shapes, jnp.dtype(config.dtype)))
    params = model.init(0)
    own = sum(x.nbytes for x in params.values())
    for batch_size in batch_sizes:
        batch = jax.tree.map(jnp.asarray, prompts(batch_size, length, position_rows))
        built: dict[str, Any] = {}
        for way, policy in ways.items():
            read, generate = programs(model, policy)
            reading = read.lower(params, batch).compile()
            state = reading(params, batch)
            generating = generate.lower(params, state).compile()
            jax.block_until_ready(generating(params, state))
            built[way] = reading, generating
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, (reading, generating) in built.items():
                start = time.perf_counter()
                state = jax.block_until_ready(reading(params, batch))
                middle = time.perf_counter()
                jax.block_until_ready(generating(params, state))
                seconds[way].append((middle - start, time.perf_counter() - middle))
        base = [statistics.median(x) for x in zip(*seconds["none"], strict=True)]
        for way, (reading, generating) in built.items():
            read_s, generate_s = (statistics.median(x) for x in zip(*seconds[way], strict=True))
            row = {"way": way, "batch": batch_size, "length": length, "new_tokens": NEW}
            row |= {
                "read_s": round(read_s, 4),
                "tokens_per_s": round(batch_size * NEW / generate_s, 1),
            }
            row |= {
                "read_ratio": round(read_s / base[0], 3),
                "speedup": round(base[1] / generate_s, 3),
            }
            yield row | bytes_of(reading, generating, own)


def published(chips: str, length: int) -> ModelConfig:
    """Qwen2.5-VL 3B as it is served, in bfloat16.

    Args:
        chips: name of a chip that the settings are made for.
        length: tokens of a row.
    """
    from jaxvlm.planner.hardware import machine
    from jaxvlm.planner.request import request

    flags = request.RequestFlags(batch=8, length=length)
    asked = request.plan_request("qwen2.5-vl-3b", None, machine.parse(chips), flags)
    return dataclasses.replace(asked.config.model, dtype="bfloat16")


def compiled(chips: str, length: int, ways: list[str]) -> list[dict[str, Any]]:
    """Bytes of a published model's programs on a device; several devices are a tensor axis."""
    from jaxvlm.planner.compiled import collectives, topology
    from jaxvlm.planner.hardware import machine

    config = published(chips.split(":")[0], length)
    devices = topology.devices(chips)
    model = build_model(config, make_mesh(MeshConfig(data=1, tensor=len(devices)), devices))
    model = model.holding(dict.fromkeys(model.shapes, jnp.bfloat16))
    params, rows = model.abstract(), []
    own = sum(program_memory.bytes_of(x) for x in params.values())
    here = NamedSharding(model.mesh, PartitionSpec())
    for batch_size in (1, 8):
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            prompts(batch_size, length, 3),
        )
        for way in ways:
            policy = WAYS[way]
            read, generate = programs(model, policy)
            reading = read.lower(params, batch).compile()
            state = jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                *(jax.eval_shape(read, params, batch), reading.output_shardings),
            )
            generating = generate.lower(params, state).compile()
            row = {"chips": chips, "way": way, "batch": batch_size, "length": length}
            row |= {"parameters": own} | bytes_of(reading, generating, own)
            # A compressed cache's layers choose one of several programs; and libtpu's text does not
            # say how often a loop over layers runs.
            if policy is None and machine.parse(chips).platform == "gpu":
                text = _one_token(generating)
                row["token_moved"] = round(sum(x.times * x.moved for x in hlo_costs.read(text)))
                found = collectives.read(text, dict(model.mesh.shape))
                row["token_sent"] = collectives.total(found)
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


def _one_token(program: Any) -> str:
    """A program's text; of its loop over new tokens, which alone has no known number of trips, one.

    Its cost is then that of one token, and of what a call does around the loop.
    """
    once = ', backend_config={"known_trip_count":{"n":"1"}}'
    lines = str(program.as_text()).splitlines()
    loops = [" while(" in x and "known_trip_count" not in x for x in lines]
    return "\n".join(x + once * loop for x, loop in zip(lines, loops, strict=True))


def traffic(length: int = 256) -> list[dict[str, Any]]:
    """Bytes that a device sends to read eight prompts, and to generate one token of each."""
    from jaxvlm.parallel.sharding import batch_sharding
    from jaxvlm.planner.compiled import collectives

    rows = []
    for sizes in ({"data": 8}, {"data": 2, "tensor": 4}, {"data": 2, "context": 4},
                  {"data": 4, "pipeline": 2}):  # fmt: skip
        model = build_model(small_model(), make_mesh(MeshConfig(**sizes), jax.devices()))
        params = jax.device_put(model.init(0), model.shardings)
        batch = jax.tree.map(jnp.asarray, prompts(8, length))
        batch = jax.device_put(batch, batch_sharding(model.mesh))
        for way in ("none", "vl_cache 10 %"):
            read, generate = programs(model, WAYS[way])
            reading = read.lower(params, batch).compile()
            generating = generate.lower(params, reading(params, batch)).compile()
            row: dict[str, Any] = {"mesh": sizes, "way": way, "prompts": 8, "length": length}
            for name, program in (("read", reading), ("token", generating)):
                found = collectives.read(_one_token(program), dict(model.mesh.shape))
                row[f"{name}_bytes"] = collectives.total(found)
                row[f"{name}_collectives"] = [
                    f"{x.count} {x.kind} over {' x '.join(x.axes)}: {x.wire_bytes} B of {x.dtype}"
                    for x in found
                ]
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="Tokens of a prompt.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chips", nargs="+", default=[], help="Chips to compile for.")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--meshes", action="store_true", help="Compile for meshes of 8 devices.")
    args = parser.parse_args()
    if args.meshes:
        found = {"rows": traffic(), "environment": environment()}
        write("kv_cache_traffic_cpu.json", found, RESULTS)
        return
    rows: list[dict[str, Any]] = []
    for chips in args.chips:
        rows += compiled(chips, args.length, args.ways)
    if not args.chips:
        for row in measured(small_model(), (1, 8), args.length, args.repeats, WAYS):
            print(row, flush=True)
            rows.append(row)
    name = f"kv_cache_speed_{'aot' if args.chips else 'cpu'}.json"
    write(name, {"rows": rows, "environment": environment()}, RESULTS)


if __name__ == "__main__":
    main()
