"""Planned steps of pairs: memory against states and XLA's compiler, time, choice, what is said."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from builders import TINY

from jaxvlm.build.assemble import assemble
from jaxvlm.build.model import build_model
from jaxvlm.build.pair_run import WHOLE
from jaxvlm.config import (
    ConfigError,
    DualConfig,
    MeshConfig,
    StrategyConfig,
    TextConfig,
    TrainConfig,
    VectorConfig,
    VisionConfig,
)
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import PRESETS, resolve
from jaxvlm.plan import (
    absent,
    document,
    machine,
    memory,
    pairs,
    question,
    report,
    search,
    tree,
    verify,
    ways,
)
from jaxvlm.plan.absent import Rows
from jaxvlm.plan.rough import Rough, Step
from jaxvlm.train import programs
from jaxvlm.train.pairs import Chunk

CLIP = DualConfig(
    vision=VisionConfig(
        image_size=64, patch_size=8, width=128, depth=4, num_heads=4, mlp_dim=512, pool="class",
        class_token=True,
    ),
    text=TextConfig(
        vocab_size=2048, width=128, depth=4, num_heads=4, mlp_dim=512, max_length=32, causal=True
    ),
)  # fmt: skip
VLM = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, image_size=64, width=64, depth=2, mlp_dim=256),
    decoder=dataclasses.replace(
        TINY.decoder, width=128, depth=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384,
        vocab_size=2048,
    ),
)  # fmt: skip
SHAPES = {
    "clip": (CLIP, Rows(0, 1), Rows(32)),
    "vlm": (VLM, Rows(32), Rows(96, 1)),
}
MESHES = {"ddp": MeshConfig(data=8), "fsdp": MeshConfig(data=1, fsdp=8)}


def setup_of(kind, preset, chunk=0, remat="none", rows=512, platform="cpu", **more):
    config, query, document = SHAPES[kind]
    towers = {
        t: dataclasses.replace(getattr(config, t), remat=remat)
        for t in ("vision", "text", "decoder")
        if hasattr(config, t)
    }
    run = TrainConfig(
        loss="info_nce", encoder="dual" if kind == "clip" else "vlm", vectors=VectorConfig(dim=64)
    )
    if kind == "clip":
        run = dataclasses.replace(run, vectors=VectorConfig())
    pairing = pairs.Pairing(query, document, pairs.how(run), chunks=(Chunk(chunk), Chunk(chunk)))
    mesh, strategy = resolve(StrategyConfig(preset), MESHES[preset], absent.devices(platform, 8))
    return memory.Setup(
        dataclasses.replace(config, **towers), mesh, strategy, platform, rows,
        max(query.length, document.length), 1, pairs=pairing,
        microbatches=pairing.parts(rows // 8), **more,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "preset", "chunk", "remat"),
    [
        ("clip", "ddp", 8, "none"),
        ("vlm", "fsdp", 8, "none"),
    ],
)
def test_the_whole_is_near_what_the_compiler_says(kind, preset, chunk, remat):
    setup = setup_of(kind, preset, chunk, remat)
    found = memory.estimate(setup)
    real = verify.compiled(setup, jax.devices())["memory"]
    assert found.peak == pytest.approx(real["peak"], rel=0.15)


@pytest.mark.parametrize(("kind", "preset"), [("clip", "ddp"), ("clip", "fsdp"), ("vlm", "fsdp")])
def test_what_lies_there_between_steps_is_exact(kind, preset):
    setup = setup_of(kind, preset, rows=16, frozen=("vision/*",))
    found = memory.states(setup, memory.model_of(setup))
    mesh = make_mesh(setup.mesh, jax.devices())
    model = build_model(setup.config, mesh, setup.strategy, vectors=setup.pairs.vectors)
    _, state, _ = assemble(
        model, InfoNCE(mesh=mesh), optax.adamw(1e-3), frozen=setup.frozen, chunks=WHOLE
    )
    for name, part in (("parameters", state.params), ("frozen", state.frozen)):
        assert found[name] == sum(map(programs.bytes_of, part.values())) > 0
    moments = jax.tree.leaves(state.opt_state)
    floats = [x for x in moments if x.dtype == np.float32]  # the others count steps
    assert found["moments"] == sum(map(programs.bytes_of, floats))


@pytest.mark.long
def test_chunks_need_less_and_take_longer():
    whole, cut = (setup_of("clip", "fsdp", chunk, platform="gpu") for chunk in (0, 8))
    most, least = memory.estimate(whole), memory.estimate(cut)
    assert least.states == most.states and least.peak < 0.6 * most.peak
    rough = Rough(memory.model_of(whole), (), 32, 0, "gpu")
    steps = [Step(s.mesh, s.strategy, "none", s.microbatches, 512, pairs=s.pairs)
             for s in (whole, cut)]  # fmt: skip
    assert rough.work(steps[1]) < 0.6 * rough.work(steps[0])


@pytest.fixture(scope="module")
def clip():
    """CLIP's question, pressed for memory: 2,048 pairs a GPU."""
    asked = question.Asked(batch=16384)
    return question.ask("clip-vit-b-32", None, machine.parse("rtx4090:8"), asked)


@pytest.mark.long
def test_gradient_caching_is_a_branch_of_the_tree(clip):
    found = search.search(clip, 3)
    best = found.best[0]
    assert best.traced and best.way.preset in PRESETS
    tree_of = {branch["name"]: branch for branch in tree.branches(found)}
    assert "DDP, in microbatches" not in tree_of
    cached, plain = tree_of["DDP + GradCache"], tree_of["DDP"]
    assert cached["fits"] and "grad_cache=" in cached["text"] and cached["seconds"] > 0
    assert "grad_cache" not in plain["text"] and cached["seconds"] > plain["seconds"]
    made = document.of(found)
    assert made["batch"]["query"] == {"length": 0, "pictures": 1, "patches": 0}
    assert made["batch"]["document"]["length"] == 77 and made["loss"] == "info_nce"
    assert "16384 queries, 16384 documents" in report.text(made)


def test_overrides_of_pairs_are_gradient_cachings(clip):
    mesh, strategy = resolve(StrategyConfig("ddp"), MESHES["ddp"], absent.devices("gpu", 8, 8))
    every = list(ways.of_mesh(clip, mesh, strategy))
    assert {way.chunk for way in every} >= {(0, 0), (1024, 1024), (8, 8)}
    assert not any("context" in way.text() or "stage" in way.text() for way in ways.ways(clip))
    way = next(way for way in every if way.chunk == (64, 64) and way.remat == "dots")
    assert way.text() == "ddp data=8 remat=dots grad_cache=64" and way.microbatches == 32
    lines = ways.overrides(clip, way)
    for line in ("encoder=dual", "loss=info_nce", "grad_cache.query=64", "grad_cache.document=64",
                 "dual.text.remat=dots", "data.batch_size=16384"):  # fmt: skip
        assert f"--config.{line}" in lines
    assert not any(".model." in line or "microbatches" in line for line in lines)


def test_what_an_example_is_is_said():
    clip = question.ask("clip-vit-l-14", None, machine.parse("h200:8"))
    assert "queries of 1 picture, documents of 77 tokens" in clip.assumed
    siglip = question.ask("siglip2-so400m", None, machine.parse("h200:8"))
    assert siglip.config.loss == "sigmoid"
    asked = question.Asked(length=1024, pictures=1, patches=1024, objective="contrastive")
    vlm = question.ask("qwen3-vl-2b", None, machine.parse("h200:8"), asked)
    assert vlm.pairs.query == Rows(1024) and vlm.pairs.document == Rows(1024, 1, 1024)
    texts = question.ask("clip-vit-l-14", None, machine.parse("h200:8"), question.Asked(pictures=0))
    assert texts.pairs.query == texts.pairs.document == Rows(77)


def test_pairs_on_stages_or_experts_are_refused():
    for axis in ("stage", "expert", "context"):
        setup = setup_of("vlm", "ddp")._replace(mesh=MeshConfig(data=4, **{axis: 2}))
        with pytest.raises(ConfigError, match=rf"config\.mesh\.{axis}.* can't be planned yet"):
            memory.check(setup)
    with pytest.raises(ConfigError, match=r"microbatches=4 does not go with config\.loss"):
        run = TrainConfig(encoder="dual", dual=CLIP, loss="sigmoid", microbatches=4)
        question.ask("r.py", run, machine.parse("h200:8"))
