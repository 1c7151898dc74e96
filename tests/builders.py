"""Small models, batches and meshes that many tests share."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from numerics import FAULT, WATCHERS, moved, plain

from jaxvlm.config import Config, DecoderConfig, MeshConfig, ModelConfig, OptimConfig, VisionConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.lora import is_adapter
from jaxvlm.train.grad_accum import scales, total
from jaxvlm.types import Batch

VOCAB, ROWS, LENGTH, PATCHES = 64, 8, 32, 4

TINY = ModelConfig(
    vision=VisionConfig(
        image_size=16, patch_size=8, width=16, depth=2, num_heads=8, mlp_dim=32, stem="conv"
    ),
    decoder=DecoderConfig(
        vocab_size=VOCAB, width=32, depth=2, num_heads=8, num_kv_heads=8, head_dim=8, mlp_dim=64
    ),
)

MESHES = {
    "one": MeshConfig(1, 1, 1),
    "data8": MeshConfig(8, 1, 1),
    "fsdp8": MeshConfig(1, 8, 1),
    "tensor8": MeshConfig(1, 1, 8),
    "data2_fsdp2_tensor2": MeshConfig(2, 2, 2),
}


def train_config(mesh: MeshConfig = MESHES["one"], **optim: object) -> Config:
    """A run of the tiny model; ``optim`` overrides OptimConfig's fields."""
    return Config(
        model=TINY,
        mesh=mesh,
        steps=20,
        optim=dataclasses.replace(OptimConfig(warmup_steps=2, learning_rate=1e-2), **optim),
    )


def devices_of(mesh: MeshConfig) -> list[jax.Device]:
    """As many devices as the mesh has places."""
    return jax.devices()[: math.prod(dataclasses.asdict(mesh).values())]


def random_batch(seed: int = 0, rows: int = ROWS) -> Batch:
    """Packed rows: a shared image with two questions, then text alone, then padding.

    The images of rows differ in how many tokens follow, so that a mean of means would show.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, VOCAB, (rows, LENGTH)).astype(np.int32)
    segment, parent = np.zeros_like(tokens), np.zeros_like(tokens)
    weight = np.zeros(tokens.shape, np.float32)
    positions = np.zeros((rows, 1, LENGTH), np.int32)
    start = np.full((rows, 2), -1, np.int32)
    for row in range(rows):
        first = PATCHES + 1
        a, b = 4 + row % 3, 5 + row % 2
        spans = [
            (0, first, 0, 0),
            (first, a, 1, first),
            (first + a, b, 1, first),
            (first + a + b, 6, 0, 0),
        ]
        for number, (begin, size, of, offset) in enumerate(spans, start=1):
            part = slice(begin, begin + size)
            segment[row, part], parent[row, part] = number, of
            positions[row, 0, part] = offset + np.arange(size)
            if number > 1:
                weight[row, begin + 2 : begin + size] = 1.0
        if row % 4 != 3:
            start[row, row % 2] = 1
    pixels = rng.integers(0, 256, (rows, 2, 16, 16, 3)).astype(np.uint8)
    return Batch(
        tokens=tokens,
        loss_weight=weight,
        positions=positions,
        segment=segment,
        parent=parent,
        pixels=pixels,
        image_start=start,
        example_id=np.arange(rows, dtype=np.int32),
    )


def recorded():
    """Keeps the last gradients in the optimizer's state, where moments lie."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params=None: (grads, grads),
    )


ROUNDING = 2.0**-19
"""What float32 leaves of a sum that cancels to nothing, as a share of its terms: 32 roundings.

In float64 these sums are 1e-15 of their terms, and any two programs agree on each leaf to 3e-14 of
the measure below; in float32 they are 1e-7 to 4e-7 of their terms, whatever the model, the mesh and
the processor (AVX2, SSE4.2). So it is rounding, and goes with the terms, not with the whole
model's gradient.
"""
_TERMS = {"/bk": "/wk", "/norm/bias": "/norm/scale"}
"""Biases whose terms may cancel -> the leaf that adds up the same terms, each times an input that
a norm brought to about 1, which shows how large they are. Keys all moved by one embedding change no
softmax, unless the keys are rotated; nor does a shift change scores that are standardised."""


def norm_of(x) -> float:
    """Of all numbers in it, added up in float64."""
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def rounding_of(path: str, grads) -> float:
    """The bound on a leaf's norm if its terms cancel to nothing; 0 where they are not known to."""
    for name, other in _TERMS.items():
        terms = grads.get(path.removesuffix(name) + other) if path.endswith(name) else None
        if terms is not None:
            return ROUNDING * norm_of(terms) * math.sqrt(grads[path].size / terms.size)
    return 0.0


def worst_gradient(grads, expected, tolerance=1e-3) -> float:
    """The largest error of a leaf by DESIGN's measure, which no leaf may have above ``tolerance``.

    A leaf's error is against its own norm, or against its share of the whole's. An expected
    gradient below the bar itself, or below what rounding leaves of terms that cancel (a key bias
    has none, but for that), is taken as the zero it stands for: the bar is for what is tested, not
    for the sum of two roundings. What was found is held to the same two bounds.
    """
    whole = math.sqrt(sum(norm_of(g) ** 2 for g in expected.values()))
    count, worst = sum(g.size for g in expected.values()), 0.0
    for path, g in expected.items():
        size, found = norm_of(g), plain(grads[path])
        against = max(size, 1e-2 * whole * math.sqrt(g.size / count))
        nothing = max(tolerance * against, rounding_of(path, expected))
        wanted, bar = (0.0, nothing) if size <= nothing else (plain(g), tolerance * against)
        off = norm_of(found - wanted)
        assert off <= bar, (path, off, bar, against)
        worst = max(worst, tolerance * off / bar if bar else 0.0)
        for watch in WATCHERS:
            caught = norm_of(moved(found, FAULT * bar) - wanted) > bar or not bar
            share = off / bar if bar else 0.0
            watch(grads[path], g, f"{tolerance:.2g} of the norm", share, caught)
    return worst


def assert_gradients_close(grads, expected) -> None:
    """Of one device against many, both in float32.

    A way through TINY and back is of 3,200 additions. Each rounds by 2⁻²⁴/√3 in the mean square, on
    either side, which leaves 2.8e-6 in norm: the bar is 3.6 times that.
    """
    worst_gradient(grads, expected, 1e-5)


def stepped_from(first, model):
    """The first model's parameters, its adapters away from zero."""
    if not first:
        rng = np.random.default_rng(0)
        for path, x in jax.device_get(model.init(0)).items():
            shaken = rng.normal(size=x.shape).astype(x.dtype) * 0.1
            first[path] = shaken if is_adapter(path) else x
    return first


def loss_and_gradient(model):
    """(params, batch) -> ((mean loss, logits), gradients) of next-token prediction, compiled."""

    def objective(params, batch):
        loss, result = NextToken(), model.apply(params, batch)
        value = total(loss(result, batch), scales(loss, batch))
        return value, result.logits(result.hidden)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


@functools.cache
def _compiles_float8() -> bool:
    try:
        jax.numpy.arange(4).astype("float8_e4m3fn").astype("float32").block_until_ready()
    except jax.errors.JaxRuntimeError as e:
        if "Failed to materialize symbols" not in str(e):
            raise
        return False
    return True


def skip_without_float8() -> None:
    """Below F16C (SSE4.2) XLA's compiler knows no conversion to eight bits."""
    if not _compiles_float8():
        pytest.skip("XLA compiles no float8 for this instruction set")
