"""Memory: each strategy keeps on a device what its name says, read from compiled programs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import optax
import pytest
from zoo import LLAVA, QWEN3, text_and_images

from jaxvlm.config import MeshConfig, StrategyConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.parallel.strategies import resolve
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

WIDE = dataclasses.replace(
    LLAVA,
    decoder=dataclasses.replace(LLAVA.decoder, width=256, mlp_dim=1024, vocab_size=2048, depth=3),
)
# Bytes of float32 parameters, and of both moments; the share of each that a device holds.
SHARES = {
    "ddp": (1, 1, 1),
    "zero1": (1, 1, 1 / 8),
    "zero2": (1, 1 / 8, 1 / 8),
    "zero3": (1 / 8, 1 / 8, 1 / 8),
    "hybrid_shard": (1 / 4, 1 / 4, 1 / 4),
    "hpz": (1 / 8, 1 / 8, 1 / 8),
}


def compiled(strategy):
    wanted = MeshConfig(data=2, fsdp=4) if SHARES[strategy][0] == 1 / 4 else MeshConfig()
    wanted = MeshConfig(data=2, fsdp=4) if strategy == "hpz" else wanted
    mesh, split = resolve(StrategyConfig(strategy), wanted, jax.devices())
    here = make_mesh(mesh)
    model = build_model(WIDE, here, split)
    step, abstract, _ = assemble(model, NextToken(), optax.adamw(1e-3), microbatches=2)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(here)),
        text_and_images(WIDE, 0, True),
    )
    return model, step.lower(abstract, batch).compile(), batch


def step_of(preset, wanted, kind=WIDE, **fields):
    """Compiled for all devices, or for one, with fewer key heads than query heads."""
    devices = jax.devices()[: 1 if preset == "single" else 8]
    mesh, split = resolve(StrategyConfig(preset, **fields), wanted, devices)
    here = make_mesh(mesh, devices)
    config = dataclasses.replace(kind, decoder=dataclasses.replace(kind.decoder, num_kv_heads=4))
    model = build_model(config, here, split)
    step, abstract, _ = assemble(model, NextToken(), optax.sgd(1e-3))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(here)),
        text_and_images(config, 0, True),
    )
    return step.lower(abstract, batch).compile()


@functools.cache
def flops_of_one_device(kind):
    return step_of("single", MeshConfig(), kind).cost_analysis()["flops"]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("preset", "wanted", "fields"),
    [
        pytest.param("ddp", MeshConfig(), {}, marks=LONG),
        pytest.param("fsdp", MeshConfig(), {}, marks=LONG),
        pytest.param("ddp", MeshConfig(2, tensor=4), {}, marks=LONG),
        pytest.param(
            "fsdp", MeshConfig(2, fsdp=2, tensor=2), {"sequence_parallel": True}, marks=LONG
        ),
        ("ddp", MeshConfig(2, context=4), {}),
        pytest.param("ddp", MeshConfig(2, context=4), {"context": "ring"}, marks=LONG),
        pytest.param("ddp", MeshConfig(4, context=2), {"context": "ulysses"}, marks=LONG),
    ],
)
def test_no_work_is_done_twice(preset, wanted, fields):
    """A dim that cannot stay split is gathered by the compiler, which says nothing of it."""
    all_of_them = 8 * step_of(preset, wanted, **fields).cost_analysis()["flops"]
    assert all_of_them <= 1.15 * flops_of_one_device(WIDE)


@pytest.mark.long
def test_no_work_on_packed_patches_is_done_twice():
    vision = dataclasses.replace(QWEN3.vision, width=128, mlp_dim=512, depth=6)
    kind = dataclasses.replace(QWEN3, vision=vision)
    all_of_them = 8 * step_of("ddp", MeshConfig(2, context=4), kind).cost_analysis()["flops"]
    assert all_of_them <= 1.25 * flops_of_one_device(kind)


@pytest.mark.long
@pytest.mark.parametrize("strategy", SHARES)
def test_a_device_holds_its_share(strategy):
    model, program, batch = compiled(strategy)
    of_params, of_gradients, of_moments = SHARES[strategy]
    count = sum(math.prod(x.shape) for x in model.shapes.values())
    rows = sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(batch)) / 8
    held = program.memory_analysis().argument_size_in_bytes - rows
    assert held == pytest.approx(4 * count * (of_params + 2 * of_moments), rel=0.02)
    # The sum of gradients over two microbatches, in the carry of the loop over them.
    path = "decoder/stack/blocks/mlp/w_in"
    layers, width, hidden = model.shapes[path].shape
    carried = [
        line.split(" while(")[0]
        for line in program.as_text().splitlines()
        if " while(" in line and re.search(r'known_trip_count[^0-9]*"?n"?\D*2\b', line)
    ]
    own = f"f32[{layers},{round(width * of_gradients)},{hidden}]"
    # w_in and w_gate have this shape: their gradients, and they too where they are split alike.
    in_step = {"hpz": 1 / 4}.get(strategy, of_params)
    assert max(one.count(own) for one in carried) == (4 if in_step == of_gradients else 2)
