"""What a search finds, its quick memory beside the exact one, and overrides that a run takes."""

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

from jaxvlm.build import published
from jaxvlm.build.model import build_model
from jaxvlm.cli import train
from jaxvlm.cli.main import run
from jaxvlm.config import (
    ConfigError,
    LoraConfig,
    MeshConfig,
    StrategyConfig,
    TrainConfig,
    from_config_dict,
)
from jaxvlm.parallel.strategies import PRESETS, resolve
from jaxvlm.plan import absent, machine, memory, question, scaling, search, ways, where
from jaxvlm.plan.rough import Rough

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
    one = build_model(config, absent.mesh(MeshConfig(data=1), "gpu"))
    rough = Rough(one, frozen, 64, 16, "gpu")
    for preset, sizes in MESHES.items():
        mesh, strategy = resolve(StrategyConfig(preset), sizes, absent.devices("gpu", 8, 4))
        setup = memory.Setup(config, mesh, strategy, "gpu", 16, 64, 1, frozen=frozen)
        exact = memory.states(
            setup,
            dataclasses.replace(
                one,
                mesh=absent.mesh(mesh, "gpu"),
                strategies=dict.fromkeys(one.strategies, strategy),
            ),
        )
        found = rough.states(mesh, strategy)
        for name in ("parameters", "frozen", "moments"):
            assert found[name] == exact[name], (preset, name)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The tests' tiny recipe on eight H200."""
    data = write_data(tmp_path_factory.mktemp("data"), pictures=8)
    config = dataclasses.replace(from_config_dict(recipe(data)))
    return question.ask("recipe.py", config, machine.parse("h200:8"))


@pytest.fixture(scope="module")
def found(asked):
    return search.search(asked, 3)


def test_the_fastest_that_fit_come_first_each_mesh_once(found):
    times = [plan.time.total for plan in found.best]
    assert len(times) == 3 and times == sorted(times) and times[0] > 0
    assert len({(plan.way.preset, plan.way.mesh) for plan in found.best}) == 3
    assert all(plan.peak <= search.capacity(found.question) for plan in found.best)
    first = found.best[0]
    assert first.traced
    estimate = memory.estimate(ways.setup_of(found.question, first.way))
    assert first.peak == pytest.approx(estimate.peak)
    assert any("XLA's attention" in note for note in found.notes)


def test_every_family_that_lost_has_a_reason(found):
    won = {plan.way.family for plan in found.best}
    lost = {one.family: one for one in found.lost}
    for preset, mesh in ways.meshes(found.question):
        family = ways.Way(preset, mesh, StrategyConfig(), "none").family
        assert family in won or lost[family].text
    assert not won & set(lost)


@pytest.mark.parametrize("where_", ["h200:8", "v5p:2x2x2"])
def test_a_part_of_a_devices_memory_is_left_free(where_):
    there = machine.parse(where_)
    asked = question.ask("qwen3-vl-2b", None, there)
    assert search.capacity(asked) == pytest.approx(0.92 * there.chip.hbm_bytes)


def test_where_nothing_fits_the_nearest_is_named(asked):
    small = asked.machine.chip._replace(hbm_bytes=2**20)
    found = search.search(asked._replace(machine=asked.machine._replace(chip=small)), 3)
    assert not found.best and found.nearest.peak > 2**20
    lost = {one.family: one for one in found.lost}
    assert lost["fsdp"].why == "memory" and "does not fit by" in lost["fsdp"].text
    assert {one.why for one in found.lost} <= {"memory", "dims", "batch"}


def test_machines_of_other_sizes_have_the_run_s_dtype():
    like = machine.parse("h200:8", "float32")
    there = scaling.of_size(like, 16)
    assert there.devices == 16 and there.dtype == "float32"
    assert there.chip.peak_flops == like.chip.peak_flops < machine.parse("h200:8").chip.peak_flops
    assert where._of_size("h200", 4, "float32").chip == like.chip


def test_ways_that_can_not_be_traced_leave_tracing_to_the_others(asked):
    sizes = {"fsdp": 4, "context": 2}
    cut = ways.Way("fsdp", MeshConfig(data=1, **sizes), resolved("fsdp", **sizes), "full")
    plain = ways.Way("fsdp", MeshConfig(data=1, fsdp=8), resolved("fsdp", fsdp=8), "full")
    found = search.search(asked, 8, among=[cut, plain])
    assert {plan.way: plan.traced for plan in found.best} == {cut: False, plain: True}
    assert any("config.mesh.context can't be planned yet" in note for note in found.notes)


def test_a_way_by_formula_alone_needs_room_besides(found):
    plan = found.best[0]
    about = plan._replace(traced=False)
    assert plan.within(plan.peak) and not plan.within(plan.peak - 1)
    assert not about.within(1.1 * plan.peak) and about.within(1.2 * plan.peak)
    assert about.within(0)


def test_what_grows_with_rows_is_told_from_what_does_not():
    learned = search._Learned().corrected("mesh", 8.0, 24.0 + 40.0)
    assert learned[:2] == (8.0, 0.0)
    assert learned.corrected("mesh", 4.0, 12.0 + 40.0)[:2] == (3.0, 40.0)
    assert learned.corrected("other", 4.0, 52.0)[:2] == (13.0, 0.0)


def test_quick_work_knows_the_dtype_the_tower_s_remat_and_whole_towers(asked):
    known = search.Memory(asked)
    way = ways.Way("fsdp", MeshConfig(data=1, fsdp=8), resolved("fsdp", fsdp=8), "none")
    step = search._step(asked, way)
    rough = known.rough
    assert rough.work(step) > rough.work(step._replace(vision="full"))
    assert rough.work(step._replace(remat="full")) > rough.work(step._replace(remat="offload"))
    half = dataclasses.replace(asked.config.model, dtype="bfloat16")
    config = dataclasses.replace(asked.config, model=half)
    less = search.Memory(asked._replace(config=config)).rough
    block = (16, 16, 32, 64, 0)
    assert 2 * less._saved("dots", *block) == rough._saved("dots", *block)
    assert less.work(step) < rough.work(step)
    whole = resolved("fsdp", fsdp=8, whole=("vision",))
    setup = ways.setup_of(asked, way._replace(strategy=whole))
    exact = memory.states(setup, memory.model_of(setup))
    assert rough.states(way.mesh, whole)["parameters"] == exact["parameters"]
    assert exact["parameters"] > rough.states(way.mesh, way.strategy)["parameters"]


def resolved(name, whole=(), **sizes):
    mesh = MeshConfig(data=1, **sizes)
    return resolve(StrategyConfig(name, whole=whole), mesh, absent.devices("gpu", 8, 8))[1]


def test_tokens_are_kept_only_where_it_is_known_how_many(asked):
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
    assert plan.states["visual tokens"] == search.kept(counted.question, way)


def test_a_frozen_tower_may_be_kept(asked):
    optim = dataclasses.replace(asked.config.optim, frozen=("vision/*",))
    config = dataclasses.replace(asked.config, optim=optim)
    kept = asked._replace(config=config, samples=1000)
    both = {way.cache: way for way in ways.ways(kept) if way.preset == "ddp"}
    off, strict = (search.time_of(kept, both[c]._replace(remat="full")) for c in ("off", "strict"))
    assert strict.total == pytest.approx(off.total - off.parts["vision"])
    peak = kept.machine.chip.peak_flops * kept.machine.devices
    assert 0 < strict.model_flops < off.model_flops
    assert strict.mfu == pytest.approx(strict.model_flops / strict.total / peak)
    assert strict.hfu == pytest.approx(strict.hardware_flops / strict.total / peak)
    assert (
        search.kept(kept, both["strict"]) == 1000 * 2 * 4 * 16 * 4
    )  # pictures x patches x D x 4, on one shard


def test_overrides_are_settings_that_make_the_same_mesh(found, tmp_path):
    data = write_data(tmp_path, pictures=8)
    for plan in found.best:
        argv = [f"--config={HERE / 'recipe.py'}:{data}", *ways.overrides(found.question, plan.way)]
        values = flags.FlagValues()
        train.define(values, argv)
        values(["jaxvlm", *argv])
        made = from_config_dict(values.config)
        mesh, strategy = resolve(made.strategy, made.mesh, jax.devices())
        assert (mesh, strategy.optimizer) == (plan.way.mesh, plan.way.strategy.optimizer)
        assert made.microbatches == plan.way.microbatches
        assert made.model.decoder.remat == plan.way.remat


def test_overrides_name_all_that_the_plan_is_not_the_recipe_in(asked):
    """A recipe's own strategy, pictures and adapters, and those that the command line asks for."""
    given = dataclasses.replace(
        asked.given,
        strategy=StrategyConfig("ddp", reduce_bits=8, error_feedback=True),
        model=dataclasses.replace(
            asked.given.model, lora=LoraConfig(rank=4, targets=("decoder/*/wq",))
        ),
    )
    there, wanted = machine.parse("h200:8"), question.Asked(pictures=1, train="full", batch=16)
    made = question.ask("recipe.py", given, there, wanted)
    for way in itertools.islice(ways.ways(made), 3):
        lines = set(ways.overrides(made, way))
        assert {
            *("--config.data.max_images=1", "--config.data.batch_size=16"),
            *("--config.strategy.reduce_bits=32", "--config.strategy.error_feedback=False"),
            *("--config.model.lora.rank=0", "--config.model.lora.targets=('all-linear',)"),
        } <= lines
        assert not [x for x in lines if "vocab_size" in x or "loss" in x or "strategy.params" in x]


def test_a_recipes_own_microbatches_are_among_the_ways(asked):
    data = dataclasses.replace(asked.given.data, batch_size=24)
    given = dataclasses.replace(asked.given, microbatches=3, data=data)
    made = question.ask("recipe.py", given, machine.parse("h200:8"))
    assert {way.microbatches for way in ways.ways(made) if way.preset == "ddp"} >= {1, 3}


def test_a_folders_overrides_name_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published.published("qwen3-vl-2b")))
    made = question.ask(str(tmp_path), None, machine.parse("h200:8"))
    way = next(iter(ways.ways(made)))
    lines = ways.overrides(made, way)
    assert f"--config.model.checkpoint={tmp_path}" in lines
    assert f"--config.data.max_patches={made.patches}" in lines
    assert f"--config.data.max_images={made.pictures}" in lines


def test_adapters_of_a_folder_are_those_of_a_run(asked, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    folder.mkdir()
    (base / "config.json").write_text(json.dumps(published.published("qwen3-vl-2b")))
    lora = LoraConfig(checkpoint=str(folder))
    model = dataclasses.replace(TrainConfig().model, lora=lora, checkpoint=str(base))
    config = dataclasses.replace(TrainConfig(), model=model)
    there = machine.parse("h200:8")
    with pytest.raises(ConfigError, match=r"adapter_config.json is missing"):
        question.ask("recipe.py", config, there)
    group = {"peft_type": "LORA", "r": 6, "lora_alpha": 12, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(group))
    stem = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_"
    shapes = {"A": (6, 2048), "B": (2048, 6)}
    arrays = {f"{stem}{x}.weight": np.zeros(shape, np.float32) for x, shape in shapes.items()}
    save_file(arrays, folder / "adapter_model.safetensors")
    found = question.ask("recipe.py", config, there).config.model.lora
    assert (found.rank, found.alpha) == (6, 12) and "wq" in found.targets[0]
    alone = dataclasses.replace(config, model=dataclasses.replace(model, checkpoint=""))
    with pytest.raises(ConfigError, match=r"set config.model.checkpoint to its folder"):
        question.ask("recipe.py", alone, there)


@pytest.mark.long
def test_a_run_takes_the_winner_unchanged(asked, tmp_path):
    found = search.search(asked, 5, lambda way: way.mesh.fsdp * way.mesh.tensor > 1)
    data = write_data(tmp_path, pictures=8)
    best = next(plan for plan in found.best if plan.way.mesh.fsdp > 1)
    argv = ["train", f"--config={HERE / 'recipe.py'}:{data}", f"--workdir={tmp_path / 'run'}"]
    more = ["--config.steps=2", "--config.checkpoint.every=0", "--config.optim.warmup_steps=0"]
    assert run([*argv, *ways.overrides(found.question, best.way), *more]) == 0
    assert sorted(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize(
    ("device", "expert", "tensor", "remat"),
    [("h100:64", 8, 2, "dots"), ("v6e:8x8", 8, 1, "none"), ("h100:64", 1, 1, "full")],
)
def test_quick_work_of_experts_is_near_the_trace_s(device, expert, tensor, remat):
    wanted = question.Asked(batch=128, length=2048)
    asked = question.ask("qwen3-vl-30b-a3b", None, machine.parse(device), wanted)
    mesh = MeshConfig(data=1, fsdp=64 // expert // tensor, expert=expert, tensor=tensor)
    way = ways.Way("fsdp", mesh, PRESETS["fsdp"], remat)
    real = memory.estimate(ways.setup_of(asked, way)).peak
    assert search.Memory(asked).about(way) == pytest.approx(real, rel=0.2)
