"""FLOPs against the XLA compiler's own count."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from builders import MESHES, TINY, devices_of
from flax import nnx

from jaxvlm.config import ConnectorConfig, DecoderConfig, ModelConfig, VisionConfig
from jaxvlm.models import model_flops
from jaxvlm.models.connector import Connector
from jaxvlm.models.vit import ViT
from jaxvlm.nn.param import Init, merge, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch


@pytest.mark.parametrize("stem, frozen_blocks", [("linear", 0), ("conv", 0), ("linear", 1)])
def test_forward_flops_match_the_compiler(stem, frozen_blocks):
    # One layer: the compiler counts a scan's body once. Elementwise work is small at large widths.
    vision = dataclasses.replace(
        TINY.vision,
        stem=stem,
        image_size=64,
        width=256,
        mlp_dim=1024,
        depth=1 + frozen_blocks,
        frozen_blocks=frozen_blocks,
    )
    decoder = dataclasses.replace(
        TINY.decoder, width=256, depth=1, head_dim=32, mlp_dim=1024, vocab_size=512
    )
    config = dataclasses.replace(TINY, vision=vision, decoder=decoder)
    mesh = make_mesh(MESHES["one"], devices_of(MESHES["one"]))
    model = build_model(config, mesh)
    rows, length = 4, 128
    batch = Batch(
        tokens=np.zeros((rows, length), np.int32),
        loss_weight=np.zeros((rows, length), np.float32),
        positions=np.zeros((rows, 1, length), np.int32),
        segment=np.ones((rows, length), np.int32),
        pixels=np.zeros((rows, 1, 64, 64, 3), np.uint8),
        image_start=np.zeros((rows, 1), np.int32),
    )

    def logits(params, batch):
        out = model.apply(params, batch)
        return out.hidden.reshape(-1, 256) @ out.head

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    compiled = jax.jit(logits).lower(model.shapes, shapes).compile()
    theirs = compiled.cost_analysis()["flops"]
    # XLA computes both halves of causal attention; ours counts the half that is needed.
    ours = model_flops.forward(config, rows * length, 2.0 * length, rows).total
    assert ours == pytest.approx(theirs, rel=0.05)


def test_flops_of_a_packed_tower_match_the_compiler():
    config = ModelConfig(
        vision=VisionConfig(
            image_size=64, patch_size=8, width=256, depth=1, num_heads=4, mlp_dim=768, gated=True,
            post_norm=False, norm="rms", packed=True, patch_layout="cthw", frames=2, merge_block=2,
            rope_theta=1e4, feature_layers=(-1, -2),
        ),
        connector=ConnectorConfig(hidden=512, merge=2, norm="rms", deepstack_levels=1),
        decoder=DecoderConfig(width=256),
    )  # fmt: skip
    axes = Axes(make_mesh(MESHES["one"], devices_of(MESHES["one"])))

    graphs = []

    def draw(key):
        init = Init(nnx.Rngs(params=key))
        modules = (
            ViT(init, axes, config.vision, "auto"),
            Connector(init, axes, config.connector, 512, 256),
        )
        graphs[:], params = zip(*map(split, modules))
        return params

    def run(params, patches, grid):
        tower, connector = map(merge, graphs, params)
        x = tower(patches, grid)
        return connector(x, True), connector.deep(x, True)

    rows, patches = 2, 320
    shapes = (
        jax.eval_shape(draw, jax.random.key(0)),
        jax.ShapeDtypeStruct((rows, patches, 3 * 2 * 64), np.float32),
        jax.ShapeDtypeStruct((rows, 1, 3), np.int32),
    )
    theirs = jax.jit(run).lower(*shapes).compile().cost_analysis()["flops"]
    both = model_flops.forward(config, 0, 0, rows, patches)
    assert both.vision + both.connector == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize("frozen_blocks", [1, 2])
def test_frozen_blocks_and_the_blocks_above_add_up_to_the_tower(frozen_blocks):
    def flops(frozen_blocks):
        vision = VisionConfig(
            image_size=64, patch_size=8, depth=4, feature_layer=-2, packed=True, window=32,
            merge_block=2, patch_layout="cthw", full_layers=(1,), frozen_blocks=frozen_blocks,
        )  # fmt: skip
        return model_flops.forward(ModelConfig(vision=vision), 10, 10, 3, 90)

    whole, cut = flops(0), flops(frozen_blocks)
    assert (
        cut.vision + cut.vision_top == pytest.approx(whole.vision)
        and cut.vision_top > 0 == whole.vision_top
    )
    assert cut.total == pytest.approx(whole.total)
    step = model_flops.step(cut, dict.fromkeys(("vision_top", "connector", "decoder"), True))
    assert step.vision == cut.vision and step.vision_top == 3 * cut.vision_top
    only = model_flops.step(cut, {"decoder": True})
    assert (
        only.vision_top == cut.vision_top
        and model_flops.step(cut, {}, {"vision_top"}).connector == 2 * cut.connector
    )


def test_step_counts_frozen_as_frozen():
    one = model_flops.Flops(1.0, 10.0, 100.0, 1000.0)
    everything = dict.fromkeys(("vision", "connector", "decoder"), True)
    assert model_flops.step(one, everything) == (3.0, 30.0, 300.0, 3000.0, 0.0)
    assert model_flops.step(one, everything | {"vision": False}) == (1.0, 30.0, 300.0, 3000.0, 0.0)
    only = {"vision": False, "connector": True, "decoder": False}
    assert model_flops.step(one, only) == (1.0, 30.0, 200.0, 2000.0, 0.0)
    none = dict.fromkeys(everything, False)
    assert model_flops.step(one, none, {"vision", "decoder"}) == (2.0, 20.0, 200.0, 2000.0, 0.0)
    assert model_flops.step(one, none, {"decoder"}) == (1.0, 10.0, 200.0, 2000.0, 0.0)


def test_reach_counts_the_keys_of_a_token():
    segment = np.array([[1, 1, 2, 2, 0]], np.int32)
    batch = Batch(segment, None, None, segment)
    assert model_flops.reach(batch) == pytest.approx(2 * (1 + 2 + 1 + 2) / 4)
    parent = np.array([[0, 0, 1, 1, 0]], np.int32)
    assert model_flops.reach(batch._replace(parent=parent)) == pytest.approx(
        2 * (1 + 2 + 3 + 4) / 4
    )


def test_a_sliding_window_counts_its_keys():
    decoder = dataclasses.replace(TINY.decoder, depth=3)
    local = dataclasses.replace(decoder, window=5, window_pattern=(True, False))
    length = 16
    place = np.arange(length)
    near = (place[:, None] >= place) & (place[:, None] - place < 5)
    whole, windowed = (
        model_flops.forward(dataclasses.replace(TINY, decoder=d), length, length, 0).decoder
        for d in (decoder, local)
    )
    heads = decoder.num_heads * decoder.head_dim
    # Two of the three layers are local; a causal row counts half its square.
    saved = 2 * 4 * heads * (length * length / 2 - near.sum())
    assert whole - windowed == pytest.approx(saved, rel=0.1)


def test_only_the_experts_that_a_token_goes_to_are_counted():
    sparse = dataclasses.replace(TINY.decoder, num_experts=16, experts_per_token=3)
    wide = dataclasses.replace(TINY.decoder, mlp_dim=3 * TINY.decoder.mlp_dim)
    of = [
        model_flops.forward(dataclasses.replace(TINY, decoder=d), 10, 8.0, 0)
        for d in (sparse, wide)
    ]
    router = 10 * wide.depth * 2 * wide.width * 16
    assert of[0].decoder == pytest.approx(of[1].decoder + router)


def test_images_of_many_sizes_count_as_their_sum():
    vision = VisionConfig(packed=True, patch_layout="cthw", frames=2, merge_block=2, rope_theta=1e4)
    decoder = DecoderConfig(vocab_size=64)
    config = ModelConfig(vision=vision, connector=ConnectorConfig(merge=2), decoder=decoder)
    grids = np.asarray([[(1, 4, 6), (1, 20, 12)], [(0, 0, 0), (1, 2, 2)]], np.int32)
    empty = Batch(None, None, None, None)
    every = model_flops.forward(config, 9, 5, *model_flops.images(empty._replace(grid=grids)))
    apart = [model_flops.forward(config, 9, 5, 1, n) for n in (24, 240, 4)]
    for tower in ("vision", "connector"):
        assert getattr(every, tower) == pytest.approx(sum(getattr(one, tower) for one in apart))
    start = np.asarray([[3, -1], [-1, 4]])
    assert model_flops.images(empty._replace(image_start=start)) == (2.0, 0.0)
    assert (
        model_flops.images(empty)
        == model_flops.images(empty._replace(grid=0 * grids))
        == (0.0, 0.0)
    )
