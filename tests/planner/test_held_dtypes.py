"""Plans count frozen weights in the dtypes in which a run holds them."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest
from builders import TINY
from checkpoints import write_llava
from runs import recipe, write_data

import jaxvlm
from jaxvlm.config import ConfigError, LoraConfig, MeshConfig, StrategyConfig, default_config
from jaxvlm.config.train import from_config_dict
from jaxvlm.hf import model_zoo
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import verify
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.memory.quick_memory import QuickMemory
from jaxvlm.planner.request import abstract_devices, request
from jaxvlm.planner.search import candidates
from jaxvlm.planner.time.step_time import step_time

THERE = machine.parse("h200:8")


def planned(made):
    """The first candidate's setup, and bytes of its states on a device."""
    setup = candidates.setup_of(made, next(iter(candidates.candidates(made))))
    return setup, step_memory.states(setup, step_memory.model_of(setup))


def test_adapters_of_a_published_model_leave_its_weights_in_bfloat16():
    flags = request.RequestFlags(train="lora")
    made = request.plan_request("qwen3-vl-2b", None, THERE, flags)
    assert "a checkpoint in bfloat16, which frozen weights keep" in made.assumed
    setup, states = planned(made)
    optim = dataclasses.replace(made.config.optim, frozen_dtype="float32")
    config = dataclasses.replace(made.config, optim=optim)
    wide, states_wide = planned(made._replace(config=config))
    assert dict(setup.held).keys() == step_memory.model_of(setup).base().keys()
    assert not wide.held and 2 * states["frozen"] == states_wide["frozen"]
    assert states["parameters"] == states_wide["parameters"]
    times = [step_time(each, THERE).total for each in (setup, wide)]
    assert times[0] < times[1]
    full = request.plan_request("qwen3-vl-2b", None, THERE)
    assert not planned(full)[0].held and not any("frozen" in line for line in full.assumed)


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_a_folder_without_weights_has_the_dtype_of_its_config(tmp_path, dtype, size):
    hf_config = model_zoo.published_config("smolvlm-256m") | {"torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    flags = request.RequestFlags(train="connector")
    setup, states = planned(request.plan_request(str(tmp_path), None, THERE, flags))
    model = step_memory.model_of(setup)
    towers = {p: x for p, x in model.shapes.items() if not p.startswith("connector/")}
    whole = {path: str(x.dtype) for path, x in towers.items()}
    assert set(whole.values()) == {dtype}
    shards = (model.shardings[p].shard_shape(x.shape) for p, x in towers.items())
    assert states["frozen"] == sum(size * _count(shape) for shape in shards)


def _count(shape):
    return int(jax.numpy.prod(jax.numpy.array(shape)))


def test_a_plan_holds_what_the_run_holds(tmp_path):
    pytest.importorskip("torch", reason="writes the checkpoint; Python 3.11 only")
    data = write_data(tmp_path)
    given = default_config()
    given.update(recipe(data))
    given.model = default_config().model
    given.model.checkpoint = str(write_llava(tmp_path / "hf", data))
    for frozen, rank, setting in (
        (("vision/*",), 0, "checkpoint"),
        (("vision/*", "decoder/embed/*"), 0, "float32"),
        ((), 2, "checkpoint"),
        ((), 0, "checkpoint"),
    ):
        given.optim.frozen, given.optim.frozen_dtype = frozen, setting
        given.model.lora.rank = rank
        run = jaxvlm.Trainer(given)
        made = request.plan_request("recipe.py", from_config_dict(given), THERE)
        assert dict(planned(made)[0].held) == run.model.held
        assert bool(run.model.held) == (setting == "checkpoint" and bool(frozen or rank))
    given.optim.frozen_dtype = "bfloat16"
    made = request.plan_request("recipe.py", from_config_dict(given), THERE)
    with pytest.raises(ConfigError, match="frozen_dtype='bfloat16' is not read"):
        planned(made)


@pytest.mark.long
def test_the_compiled_step_and_the_formula_count_them_too():
    config = dataclasses.replace(TINY, lora=LoraConfig(rank=2), dtype="bfloat16")
    mesh, strategy = resolve(
        StrategyConfig("single"), MeshConfig(1), abstract_devices.devices("cpu", 1)
    )
    wide = step_memory.StepSetup(config, mesh, strategy, "cpu", 2, 64, 1)
    base = step_memory.model_of(wide).base()
    narrow = wide._replace(held=tuple((path, "bfloat16") for path in sorted(base)))
    saved = sum(2 * x.size for x in base.values())
    arguments, between, peaks = [], [], []
    for setup in (wide, narrow):
        real = verify.compiled(setup, jax.devices()[:1])["memory"]
        arguments.append(real["arguments"])
        rough = QuickMemory(step_memory.model_of(setup), (), 64, 4, "cpu")
        between.append(rough.states(mesh, strategy)["frozen"])
        peaks.append((step_memory.estimate(setup).peak, real["peak"]))
    assert arguments[0] - arguments[1] == saved
    assert between[0] - between[1] == saved
    assert peaks[1][0] <= peaks[0][0] - saved
