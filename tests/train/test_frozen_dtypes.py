"""Frozen weights that are held in bfloat16 give the bits of the same values in float32."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import MESHES, devices_of
from zoo import DUAL, GEMMA3, KINDS, LLAVA, MOE, QWEN3, ROWS

from jaxvlm.config import LoraConfig, StrategyConfig
from jaxvlm.models.lora import is_adapter
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble, split

BERT = dataclasses.replace(
    DUAL,
    text=dataclasses.replace(DUAL.text, num_types=2, norm_after=True, pooler=True, pool="pooler"),
)
MODELS = {"llava": LLAVA, "qwen3": QWEN3, "moe": MOE, "gemma3": GEMMA3, "dual": BERT}


class Case(NamedTuple):
    """A model with frozen weights, on a mesh."""

    kind: str
    frozen: tuple[str, ...]
    mesh: str = "fsdp8"
    lora: LoraConfig = LoraConfig()


CASES = {
    "vlm, frozen encoder": Case("llava", ("vision/*",)),
    "vlm, frozen decoder": Case("gemma3", ("decoder/*",), "one"),
    "vlm, frozen embeddings": Case("llava", ("*embed*",), "data2_fsdp2_tensor2"),
    "LoRA": Case("qwen3", (), "fsdp8", LoraConfig(rank=2)),
    "DoRA of experts": Case("moe", (), "one", LoraConfig(rank=2, dora=True)),
    "dual encoder, frozen tower": Case("dual", ("vision/*", "head/*")),
    "dual encoder, frozen texts": Case("dual", ("text/*",), "one"),
}
LONG = ("vlm, frozen embeddings", "LoRA", "DoRA of experts", "dual encoder, frozen texts")


def model_of(case: Case, dtype: str = "bfloat16"):
    mesh = MESHES[case.mesh]
    config = dataclasses.replace(MODELS[case.kind], dtype=dtype, lora=case.lora)
    return build_model(config, make_mesh(mesh, devices_of(mesh)), StrategyConfig())


def rounded(model, fixed):
    """Parameters whose frozen ones are bfloat16's numbers, in float32; adapters away from zero."""
    rng = np.random.default_rng(0)
    result = {}
    for path, x in jax.device_get(model.init(0)).items():
        x = np.asarray(0.1 * rng.normal(size=x.shape) if is_adapter(path) else x, np.float32)
        if path in fixed:
            x = np.asarray(x + 0.02 * rng.normal(size=x.shape), jnp.bfloat16).astype(np.float32)
        result[path] = x
    return result


def trained(model, case, values):
    """Losses of two steps, the state, and the step's StableHLO."""
    loss, batch = KINDS[case.kind].loss, KINDS[case.kind].batch
    step, _, init = assemble(model, loss, optax.adamw(1e-2), frozen=case.frozen)
    dtypes = {path: x.dtype for path, x in model.shapes.items()}
    put = {p: jax.device_put(x.astype(dtypes[p]), model.shardings[p]) for p, x in values.items()}
    state, losses = init(put), []
    rows = [to_global(model.mesh, batch(seed, True), ROWS) for seed in range(2)]
    text = step.lower(state, rows[0]).as_text()
    for one in rows:
        state, metrics = step(state, one)
        losses.append(float(metrics["loss"]))
    return losses, state, text


def frozen_weights(model, case):
    fixed = split(model, model.shapes, case.frozen)[1]
    return {p: jnp.bfloat16 for p in fixed if not is_adapter(p)}


def casts(text, model, paths):
    """Casts from float32 to bfloat16 in a program, of each shape that matrices of paths have."""
    shapes = matrices(model, paths)
    names = {shape: "x".join(map(str, shape)) for shape in shapes}
    return {s: text.count(f"(tensor<{n}xf32>) -> tensor<{n}xbf16>") for s, n in names.items()}


def matrices(model, paths):
    """Shapes of the matrices at paths, as blocks use them."""
    shapes = (model.shapes[p].shape[model.logical[p][:1] == ("layers",) :] for p in paths)
    return {shape for shape in shapes if len(shape) > 1}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in CASES]
)
def test_bfloat16_gives_the_bits_of_float32_and_is_not_cast(name):
    case = CASES[name]
    wide = model_of(case)
    paths = frozen_weights(wide, case)
    narrow, values = wide.holding(paths), rounded(wide, paths)
    expected, found = (trained(model, case, values) for model in (wide, narrow))
    assert found[0] == expected[0]
    assert len(set(found[0])) > 1, "nothing is trained"
    for path, x in jax.device_get(expected[1].params).items():
        np.testing.assert_array_equal(found[1].params[path], x, path)
    for path, x in found[1].frozen.items():
        assert (x.dtype == jnp.bfloat16) == (path in paths), path
        assert x.sharding == wide.shardings[path]
        np.testing.assert_array_equal(np.asarray(x, np.float32), values[path])
    assert all(x.dtype == jnp.float32 for x in found[1].params.values())
    wide_casts, narrow_casts = (casts(run[2], wide, paths) for run in (expected, found))
    others = matrices(wide, wide.shapes.keys() - paths.keys())
    assert any(wide_casts.values())
    for shape, count in narrow_casts.items():  # what is trained may have a frozen matrix's shape
        assert count == 0 or (shape in others and count <= wide_casts[shape]), shape
    assert sum(narrow_casts.values()) < sum(wide_casts.values())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_have_the_same_bits(kind, dtype):
    model = model_of(Case(kind, (), "one"), dtype)
    values = rounded(model, model.shapes)

    def run(params, batch):
        out = model.apply(params, batch)
        logits = out.hidden if out.head is None else out.logits(out.hidden)
        return out.hidden, logits, out.scale, out.bias

    batch = KINDS[kind].batch(0, True)
    # Otherwise XLA on CPU may leave out a rounding that other devices do.
    run = jax.jit(run, compiler_options={"xla_allow_excess_precision": False})
    found, expected = (
        run({path: jnp.asarray(x, held) for path, x in values.items()}, batch)
        for held in (jnp.bfloat16, jnp.float32)
    )
    for narrow, wide in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert narrow.dtype == wide.dtype
        np.testing.assert_array_equal(narrow, wide)
