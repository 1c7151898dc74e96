"""Planned steps of pairs: memory compared with states and XLA's compiler, time, choice, notes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from builders import TINY

from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    EmbeddingConfig,
    LossConfig,
    MeshConfig,
    StrategyConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.inference.embedding_evaluator import WHOLE
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import PRESETS, resolve
from jaxvlm.planner.compiled import verify
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.memory.quick_memory import QuickMemory, QuickStep
from jaxvlm.planner.report import document, text_report
from jaxvlm.planner.request import abstract_devices, pairs, request
from jaxvlm.planner.request.abstract_devices import BatchShape
from jaxvlm.planner.search import candidates, decision_tree, search
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train import program_memory
from jaxvlm.train.gradcache import MiniBatch

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
    "clip": (CLIP, BatchShape(0, 1), BatchShape(32)),
    "vlm": (VLM, BatchShape(32), BatchShape(96, 1)),
}
MESHES = {"ddp": MeshConfig(data=8), "fsdp": MeshConfig(data=1, fsdp=8)}


def setup_of(kind, preset, mini_batch=0, remat="none", rows=512, platform="cpu", **more):
    config, query, document = SHAPES[kind]
    towers = {
        t: dataclasses.replace(getattr(config, t), remat=remat)
        for t in ("vision", "text", "decoder")
        if hasattr(config, t)
    }
    run = Config(
        loss=LossConfig(name="info_nce"),
        embedder="dual" if kind == "clip" else "vlm",
        embedding=EmbeddingConfig(dim=64),
    )
    if kind == "clip":
        run = dataclasses.replace(run, embedding=EmbeddingConfig())
    pairing = pairs.PairShapes(
        query,
        document,
        pairs.embedding_settings(run),
        mini_batches=(MiniBatch(mini_batch), MiniBatch(mini_batch)),
    )
    mesh, strategy = resolve(
        StrategyConfig(preset), MESHES[preset], abstract_devices.devices(platform, 8)
    )
    return step_memory.StepSetup(
        dataclasses.replace(config, **towers), mesh, strategy, platform, rows,
        max(query.length, document.length), 1, pairs=pairing,
        microbatches=pairing.parts(rows // 8), **more,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "preset", "mini_batch", "remat"),
    [
        ("clip", "ddp", 8, "none"),
        ("vlm", "fsdp", 8, "none"),
    ],
)
def test_the_peak_is_close_to_the_compilers(kind, preset, mini_batch, remat):
    setup = setup_of(kind, preset, mini_batch, remat)
    found = step_memory.estimate(setup)
    real = verify.compiled(setup, jax.devices())["memory"]
    assert found.peak == pytest.approx(real["peak"], rel=0.15)


@pytest.mark.parametrize(("kind", "preset"), [("clip", "ddp"), ("clip", "fsdp"), ("vlm", "fsdp")])
def test_states_between_steps_are_exact(kind, preset):
    setup = setup_of(kind, preset, rows=16, frozen=("vision/*",))
    found = step_memory.states(setup, step_memory.model_of(setup))
    mesh = make_mesh(setup.mesh, jax.devices())
    model = build_model(setup.config, mesh, setup.strategy, embeddings=setup.pairs.embeddings)
    _, state, _ = assemble(
        model, InfoNCE(mesh=mesh), optax.adamw(1e-3), frozen=setup.frozen, mini_batches=WHOLE
    )
    for name, part in (("parameters", state.params), ("frozen", state.frozen)):
        assert found[name] == sum(map(program_memory.bytes_of, part.values())) > 0
    moments = jax.tree.leaves(state.opt_state)
    floats = [x for x in moments if x.dtype == np.float32]  # the others count steps
    assert found["moments"] == sum(map(program_memory.bytes_of, floats))


@pytest.mark.long
def test_mini_batches_need_less_memory_and_take_longer():
    whole, cut = (setup_of("clip", "fsdp", mini_batch, platform="gpu") for mini_batch in (0, 8))
    most, least = step_memory.estimate(whole), step_memory.estimate(cut)
    assert least.states == most.states and least.peak < 0.6 * most.peak
    rough = QuickMemory(step_memory.model_of(whole), (), 32, 0, "gpu")
    steps = [QuickStep(s.mesh, s.strategy, "none", s.microbatches, 512, pairs=s.pairs)
             for s in (whole, cut)]  # fmt: skip
    assert rough.work(steps[1]) < 0.6 * rough.work(steps[0])


@pytest.fixture(scope="module")
def clip():
    """A planning request for CLIP that is short of memory: 2,048 pairs per GPU."""
    asked = request.RequestFlags(batch=16384)
    return request.plan_request("clip-vit-b-32", None, machine.parse("rtx4090:8"), asked)


@pytest.mark.long
def test_gradient_caching_is_a_branch_of_the_tree(clip):
    found = search.search(clip, 3)
    best = found.best[0]
    assert best.traced and best.candidate.preset in PRESETS
    tree_of = {branch["name"]: branch for branch in decision_tree.branches(found)}
    assert "DDP, in microbatches" not in tree_of
    cached, plain = tree_of["DDP + GradCache"], tree_of["DDP"]
    assert cached["fits"] and "grad_cache=" in cached["text"] and cached["seconds"] > 0
    assert "grad_cache" not in plain["text"] and cached["seconds"] > plain["seconds"]
    made = document.of(found)
    assert made["batch"]["query"] == {"length": 0, "images": 1, "patches": 0}
    assert made["batch"]["document"]["length"] == 77 and made["loss"] == "info_nce"
    assert "16384 queries, 16384 documents" in text_report.text(made)


def test_overrides_of_pairs_set_grad_cache(clip):
    mesh, strategy = resolve(
        StrategyConfig("ddp"), MESHES["ddp"], abstract_devices.devices("gpu", 8, 8)
    )
    every = list(candidates.of_mesh(clip, mesh, strategy))
    assert {way.mini_batches for way in every} >= {(0, 0), (1024, 1024), (8, 8)}
    assert not any(
        "context" in way.text() or "pipeline" in way.text() for way in candidates.candidates(clip)
    )
    way = next(way for way in every if way.mini_batches == (64, 64) and way.remat == "dots")
    assert way.text() == "ddp data=8 remat=dots grad_cache=64" and way.microbatches == 32
    lines = candidates.overrides(clip, way)
    for line in (
        "embedder=dual",
        "loss.name=info_nce",
        "grad_cache.query_mini_batch=64",
        "grad_cache.document_mini_batch=64",
        "dual.text.remat=dots",
        "data.batch_size=16384",
    ):
        assert f"--config.{line}" in lines
    assert not any(".model." in line or "microbatches" in line for line in lines)


def test_the_assumed_example_is_noted():
    clip = request.plan_request("clip-vit-l-14", None, machine.parse("h200:8"))
    assert "queries of 1 image, documents of 77 tokens" in clip.assumed
    siglip = request.plan_request("siglip2-so400m", None, machine.parse("h200:8"))
    assert siglip.config.loss.name == "sigmoid"
    asked = request.RequestFlags(length=1024, images=1, patches=1024, objective="contrastive")
    vlm = request.plan_request("qwen3-vl-2b", None, machine.parse("h200:8"), asked)
    assert vlm.pairs.query == BatchShape(1024) and vlm.pairs.document == BatchShape(1024, 1, 1024)
    texts = request.plan_request(
        "clip-vit-l-14", None, machine.parse("h200:8"), request.RequestFlags(images=0)
    )
    assert texts.pairs.query == texts.pairs.document == BatchShape(77)


def test_pairs_on_stages_or_experts_are_refused():
    for axis in ("pipeline", "expert", "context"):
        setup = setup_of("vlm", "ddp")._replace(mesh=MeshConfig(data=4, **{axis: 2}))
        with pytest.raises(ConfigError, match=rf"config\.mesh\.{axis}.* can't be planned yet"):
            step_memory.check(setup)
    with pytest.raises(ConfigError, match=r"microbatches=4 can't be combined with config\.loss"):
        run = Config(embedder="dual", dual=CLIP, loss=LossConfig(name="sigmoid"), microbatches=4)
        request.plan_request("r.py", run, machine.parse("h200:8"))
