"""Searches: quick memory compared with the exact one, and overrides that a run takes."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from absl import flags
from builders import TINY
from runs import HERE, losses, recipe, write_data
from safetensors.numpy import save_file

from jaxvlm.cli import train
from jaxvlm.cli.main import run
from jaxvlm.config import (
    Config,
    ConfigError,
    LoraConfig,
    MeshConfig,
    StrategyConfig,
    from_config_dict,
)
from jaxvlm.hf import model_zoo
from jaxvlm.parallel.strategies import PRESETS, resolve
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.memory.quick_memory import QuickMemory
from jaxvlm.planner.request import abstract_devices, request
from jaxvlm.planner.search import candidate_memory, candidates, price, scaling, search
from jaxvlm.spmd.model import build_model

MESHES = {
    "ddp": MeshConfig(data=8),
    "zero1": MeshConfig(data=1, fsdp=8),
    "fsdp": MeshConfig(data=1, fsdp=4, tensor=2),
    "fsdp_no_reshard": MeshConfig(data=1, fsdp=8),
    "hybrid_shard": MeshConfig(data=2, fsdp=4),
    "hpz": MeshConfig(data=2, fsdp=4),
}


@pytest.mark.parametrize("trained", ["all", "frozen", "adapters"])
def test_quick_states_are_the_exact_ones(trained):
    lora = LoraConfig(rank=4) if trained == "adapters" else LoraConfig()
    config = dataclasses.replace(TINY, lora=lora)
    frozen = ("vision/*",) if trained == "frozen" else ()
    one = build_model(config, abstract_devices.mesh(MeshConfig(data=1), "gpu"))
    rough = QuickMemory(one, frozen, 64, 16, "gpu")
    for preset, sizes in MESHES.items():
        mesh, strategy = resolve(
            StrategyConfig(preset), sizes, abstract_devices.devices("gpu", 8, 4)
        )
        setup = step_memory.StepSetup(config, mesh, strategy, "gpu", 16, 64, 1, frozen=frozen)
        exact = step_memory.states(
            setup,
            dataclasses.replace(
                one,
                mesh=abstract_devices.mesh(mesh, "gpu"),
                strategies=dict.fromkeys(one.strategies, strategy),
            ),
        )
        found = rough.states(mesh, strategy)
        for name in ("parameters", "frozen", "moments"):
            assert found[name] == exact[name], (preset, name)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The tests' tiny recipe on eight H200."""
    data = write_data(tmp_path_factory.mktemp("data"), images=8)
    config = dataclasses.replace(from_config_dict(recipe(data)))
    return request.plan_request("recipe.py", config, machine.parse("h200:8"))


@pytest.fixture(scope="module")
def found(asked):
    return search.search(asked, 3)


def test_the_fastest_candidates_come_first_one_per_mesh(found):
    times = [plan.time.total for plan in found.best]
    assert len(times) == 3 and times == sorted(times) and times[0] > 0
    assert len({(plan.candidate.preset, plan.candidate.mesh) for plan in found.best}) == 3
    assert all(plan.peak <= search.capacity(found.request) for plan in found.best)
    first = found.best[0]
    assert first.traced
    estimate = step_memory.estimate(candidates.setup_of(found.request, first.candidate))
    assert first.peak == pytest.approx(estimate.peak)


def test_every_rejected_family_has_a_reason(found):
    won = {plan.candidate.family for plan in found.best}
    lost = {one.family: one for one in found.rejected}
    for preset, mesh in candidates.meshes(found.request):
        family = candidates.Candidate(preset, mesh, StrategyConfig(), "none").family
        assert family in won or lost[family].text
    assert not won & set(lost)


@pytest.mark.parametrize("where_", ["h200:8", "v5p:2x2x2"])
def test_a_margin_of_memory_is_left_free(where_):
    there = machine.parse(where_)
    asked = request.plan_request("qwen3-vl-2b", None, there)
    assert search.capacity(asked) == pytest.approx(0.92 * there.chip.hbm_bytes)


def test_if_nothing_fits_the_nearest_candidate_is_named(asked):
    small = asked.machine.chip._replace(hbm_bytes=2**20)
    found = search.search(asked._replace(machine=asked.machine._replace(chip=small)), 3)
    assert not found.best and found.nearest.peak > 2**20
    lost = {one.family: one for one in found.rejected}
    assert lost["fsdp"].why == "memory" and "does not fit by" in lost["fsdp"].text
    assert {one.why for one in found.rejected} <= {"memory", "dims", "batch"}


def test_machines_of_other_sizes_have_the_run_s_dtype():
    like = machine.parse("h200:8", "float32")
    there = scaling.of_size(like, 16)
    assert there.devices == 16 and there.dtype == "float32"
    assert there.chip.peak_flops == like.chip.peak_flops < machine.parse("h200:8").chip.peak_flops
    assert price._of_size("h200", 4, "float32").chip == like.chip


def test_untraceable_candidates_leave_traces_to_the_others(asked):
    sizes = {"fsdp": 4, "context": 2}
    cut = candidates.Candidate(
        "fsdp", MeshConfig(data=1, **sizes), resolved("fsdp", **sizes), "full"
    )
    plain = candidates.Candidate(
        "fsdp", MeshConfig(data=1, fsdp=8), resolved("fsdp", fsdp=8), "full"
    )
    found = search.search(asked, 8, among=[cut, plain])
    assert {plan.candidate: plan.traced for plan in found.best} == {cut: False, plain: True}
    assert any("config.mesh.context can't be planned yet" in note for note in found.notes)


def test_a_candidate_by_formula_needs_a_margin(found):
    plan = found.best[0]
    about = plan._replace(traced=False)
    assert plan.within(plan.peak) and not plan.within(plan.peak - 1)
    assert not about.within(1.1 * plan.peak) and about.within(1.2 * plan.peak)
    assert about.within(0)


def test_two_traces_fit_slope_and_offset():
    learned = candidate_memory._Correction().corrected("mesh", 8.0, 24.0 + 40.0)
    assert learned[:2] == (8.0, 0.0)
    assert learned.corrected("mesh", 4.0, 12.0 + 40.0)[:2] == (3.0, 40.0)
    assert learned.corrected("other", 4.0, 52.0)[:2] == (13.0, 0.0)


def test_quick_memory_depends_on_dtype_vision_remat_and_replicated_towers(asked):
    known = search.Memory(asked)
    way = candidates.Candidate("fsdp", MeshConfig(data=1, fsdp=8), resolved("fsdp", fsdp=8), "none")
    step = candidate_memory._step(asked, way)
    rough = known.quick_memory
    assert rough.work(step) > rough.work(step._replace(vision="full"))
    assert rough.work(step._replace(remat="full")) > rough.work(step._replace(remat="offload"))
    half = dataclasses.replace(asked.config.model, dtype="bfloat16")
    config = dataclasses.replace(asked.config, model=half)
    less = search.Memory(asked._replace(config=config)).quick_memory
    block = (16, 16, 32, 64, 0)
    assert 2 * less._saved("dots", *block) == rough._saved("dots", *block)
    assert less.work(step) < rough.work(step)
    whole = resolved("fsdp", fsdp=8, whole=("vision",))
    setup = candidates.setup_of(asked, way._replace(strategy=whole))
    exact = step_memory.states(setup, step_memory.model_of(setup))
    assert rough.states(way.mesh, whole)["parameters"] == exact["parameters"]
    assert exact["parameters"] > rough.states(way.mesh, way.strategy)["parameters"]


def resolved(name, whole=(), **sizes):
    mesh = MeshConfig(data=1, **sizes)
    return resolve(
        StrategyConfig(name, replicated=whole), mesh, abstract_devices.devices("gpu", 8, 8)
    )[1]


def test_caching_needs_the_number_of_samples(asked):
    optim = dataclasses.replace(asked.config.optim, frozen=("vision/*",))
    frozen = asked._replace(config=dataclasses.replace(asked.config, optim=optim))
    known = search.Memory(frozen)

    def ddp(way):
        return way.preset == "ddp"

    assert {way.cache for way in search.possible(known, {}, ddp)} == {"off"}
    counted = known.of(frozen._replace(samples=1000))
    assert {way.cache for way in search.possible(counted, {}, ddp)} == {"off", "strict"}
    way = next(w for w in search.possible(counted, {}, ddp) if w.cache == "strict")
    plan = counted.plan(way, counted.time(way))
    assert plan.states["visual tokens"] == candidate_memory.cached_bytes(counted.request, way)


def test_tokens_of_a_frozen_encoder_may_be_cached(asked):
    optim = dataclasses.replace(asked.config.optim, frozen=("vision/*",))
    config = dataclasses.replace(asked.config, optim=optim)
    kept = asked._replace(config=config, samples=1000)
    both = {way.cache: way for way in candidates.candidates(kept) if way.preset == "ddp"}
    off, strict = (
        candidate_memory.time_of(kept, both[c]._replace(remat="full")) for c in ("off", "strict")
    )
    assert strict.total == pytest.approx(off.total - off.parts["vision"])
    peak = kept.machine.chip.peak_flops * kept.machine.devices
    assert 0 < strict.model_flops < off.model_flops
    assert strict.mfu == pytest.approx(strict.model_flops / strict.total / peak)
    assert strict.hfu == pytest.approx(strict.hardware_flops / strict.total / peak)
    assert (
        candidate_memory.cached_bytes(kept, both["strict"]) == 1000 * 2 * 4 * 16 * 4
    )  # images x patches x D x 4, on one shard


def test_overrides_make_the_same_mesh(found, tmp_path):
    data = write_data(tmp_path, images=8)
    for plan in found.best:
        argv = [
            f"--config={HERE / 'recipe.py'}:{data}",
            *candidates.overrides(found.request, plan.candidate),
        ]
        values = flags.FlagValues()
        train.define(values, argv)
        values(["jaxvlm", *argv])
        made = from_config_dict(values.config)
        mesh, strategy = resolve(made.strategy, made.mesh, jax.devices())
        assert (mesh, strategy.optimizer) == (
            plan.candidate.mesh,
            plan.candidate.strategy.optimizer,
        )
        assert made.microbatches == plan.candidate.microbatches
        assert made.model.decoder.remat == plan.candidate.remat


def test_overrides_name_all_differences_from_the_recipe(asked):
    """A recipe's own strategy, images and adapters, and those of the command line."""
    given = dataclasses.replace(
        asked.given,
        strategy=StrategyConfig("ddp", grad_reduce_dtype="int8", error_feedback=True),
        model=dataclasses.replace(
            asked.given.model, lora=LoraConfig(rank=4, targets=("decoder/*/wq",))
        ),
    )
    there, wanted = (
        machine.parse("h200:8"),
        request.RequestFlags(images=1, train="full", batch=16),
    )
    made = request.plan_request("recipe.py", given, there, wanted)
    for way in itertools.islice(candidates.candidates(made), 3):
        lines = set(candidates.overrides(made, way))
        assert {
            *("--config.data.max_images_per_sequence=1", "--config.data.batch_size=16"),
            *(
                "--config.strategy.grad_reduce_dtype=float32",
                "--config.strategy.error_feedback=False",
            ),
            *("--config.model.lora.rank=0", "--config.model.lora.targets=('all-linear',)"),
        } <= lines
        assert not [x for x in lines if "vocab_size" in x or "loss" in x or "strategy.params" in x]


def test_a_recipes_own_microbatches_are_among_the_candidates(asked):
    data = dataclasses.replace(asked.given.data, batch_size=24)
    given = dataclasses.replace(asked.given, microbatches=3, data=data)
    made = request.plan_request("recipe.py", given, machine.parse("h200:8"))
    assert {way.microbatches for way in candidates.candidates(made) if way.preset == "ddp"} >= {
        1,
        3,
    }


def test_a_folders_overrides_name_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(model_zoo.published_config("qwen3-vl-2b")))
    made = request.plan_request(str(tmp_path), None, machine.parse("h200:8"))
    way = next(iter(candidates.candidates(made)))
    lines = candidates.overrides(made, way)
    assert f"--config.model.checkpoint={tmp_path}" in lines
    assert f"--config.data.max_patches_per_sequence={made.patches}" in lines
    assert f"--config.data.max_images_per_sequence={made.images}" in lines


def test_adapters_of_a_folder_are_those_of_a_run(asked, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    (base / "config.json").write_text(json.dumps(model_zoo.published_config("qwen3-vl-2b")))
    lora = LoraConfig(checkpoint=str(folder))
    model = dataclasses.replace(Config().model, lora=lora, checkpoint=str(base))
    config = dataclasses.replace(Config(), model=model)
    there = machine.parse("h200:8")
    with pytest.raises(ConfigError, match=r"adapter_config.json is missing"):
        request.plan_request("recipe.py", config, there)
    group = {"peft_type": "LORA", "r": 6, "lora_alpha": 12, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(group))
    stem = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_"
    shapes = {"A": (6, 2048), "B": (2048, 6)}
    arrays = {f"{stem}{x}.weight": np.zeros(shape, np.float32) for x, shape in shapes.items()}
    save_file(arrays, folder / "adapter_model.safetensors")
    found = request.plan_request("recipe.py", config, there).config.model.lora
    assert (found.rank, found.alpha) == (6, 12) and "wq" in found.targets[0]
    alone = dataclasses.replace(config, model=dataclasses.replace(model, checkpoint=""))
    with pytest.raises(ConfigError, match=r"set config.model.checkpoint to its folder"):
        request.plan_request("recipe.py", alone, there)


@pytest.mark.long
def test_a_run_takes_the_winner_unchanged(asked, tmp_path):
    found = search.search(asked, 5, lambda way: way.mesh.fsdp * way.mesh.tensor > 1)
    data = write_data(tmp_path, images=8)
    best = next(plan for plan in found.best if plan.candidate.mesh.fsdp > 1)
    argv = ["train", f"--config={HERE / 'recipe.py'}:{data}", f"--workdir={tmp_path / 'run'}"]
    more = ["--config.steps=2", "--config.checkpoint.every=0", "--config.optim.warmup_steps=0"]
    assert run([*argv, *candidates.overrides(found.request, best.candidate), *more]) == 0
    assert sorted(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize(
    ("device", "expert", "tensor", "remat"),
    [("h100:64", 8, 2, "dots"), ("v6e:8x8", 8, 1, "none"), ("h100:64", 1, 1, "full")],
)
def test_quick_memory_of_experts_is_close_to_the_trace(device, expert, tensor, remat):
    wanted = request.RequestFlags(batch=128, length=2048)
    asked = request.plan_request("qwen3-vl-30b-a3b", None, machine.parse(device), wanted)
    mesh = MeshConfig(data=1, fsdp=64 // expert // tensor, expert=expert, tensor=tensor)
    way = candidates.Candidate("fsdp", mesh, PRESETS["fsdp"], remat)
    real = step_memory.estimate(candidates.setup_of(asked, way)).peak
    assert search.Memory(asked).bytes_by_formula(way) == pytest.approx(real, rel=0.2)
