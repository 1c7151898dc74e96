"""Trainable parameters of a plan are those of a run: the model's own, by the same patterns."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from builders import TINY

from jaxvlm.config import ConfigError, LoraConfig, MeshConfig, StrategyConfig
from jaxvlm.models import model_flops as count
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import abstract_devices, trainable_params
from jaxvlm.planner.time import workload
from jaxvlm.planner.time.step_time import model_flops, step_time
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import split

UNTIED = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, stem="linear"),
    decoder=dataclasses.replace(TINY.decoder, tied_embeddings=False),
    dtype="bfloat16",
)
ADAPTED = dataclasses.replace(UNTIED, lora=LoraConfig(rank=2, targets=("decoder/*",)))
FROZEN_BLOCKS = dataclasses.replace(
    UNTIED, vision=dataclasses.replace(UNTIED.vision, frozen_blocks=1)
)
EXPERTS = dataclasses.replace(
    UNTIED, decoder=dataclasses.replace(UNTIED.decoder, num_experts=4, experts_per_token=2)
)
CASES = {
    "all": (UNTIED, ()),
    "a tower": (UNTIED, ("vision/*",)),
    "all but tables and connector": (UNTIED, ("decoder/stack/*", "vision/*")),
    "one map of each block": (UNTIED, ("*/blocks/attn/wq",)),
    "only what comes after the decoder": (
        UNTIED, ("vision/*", "connector/*", "decoder/stack/*", "decoder/embed/table"),
    ),
    "adapters on the decoder": (ADAPTED, ()),
    "frozen blocks": (FROZEN_BLOCKS, ()),
    "router and attention": (EXPERTS, ("decoder/stack/blocks/mlp/w_*",)),
}  # fmt: skip


def planned(config, frozen):
    there = machine.parse("h200:8")
    devices = abstract_devices.devices("gpu", 8, devices_per_host=8)
    mesh, strategy = resolve(StrategyConfig("fsdp"), MeshConfig(data=1, fsdp=8), devices)
    return step_memory.StepSetup(config, mesh, strategy, "gpu", 8, 64, 1, frozen=frozen), there


@pytest.mark.parametrize("name", CASES)
def test_trainable_shares_match_the_runs_split(name):
    config, frozen = CASES[name]
    model = build_model(config, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    own, _ = split(model, model.shapes, frozen)
    setup, _ = planned(config, frozen)
    weights, found = workload.weights(config), workload.trainable_of(setup)

    def is_matrix(path):
        bias = path.rsplit("/", 1)[-1] in ("bq", "bk", "bv")
        return len(own[path].shape) - ("/blocks/" in path) > 1 and not bias

    for tower, w in weights.items():
        of = found.get(tower, trainable_params.NOTHING)
        taken = w.blocks * of.blocks + w.experts * of.experts + w.other * of.other
        mine = {p: x.size for p, x in own.items() if p.startswith(f"{tower}/") and "lora_" not in p}
        assert taken == pytest.approx(sum(n for p, n in mine.items() if is_matrix(p))), tower
        assert (of.own, of.adapted) == (bool(mine), any("lora_" in p for p in own if tower in p))
    trained = {path.split("/")[0] for path in own if "lora_" not in path}
    adapted = {path.split("/")[0] for path in own if "lora_" in path}
    forward = count.forward(config, 8 * 64, 64, 8, 0)
    theirs = count.step(forward, dict.fromkeys(trained, True), adapted)
    assert model_flops(setup) == pytest.approx(theirs.total)


def test_frozen_parts_before_all_trained_ones_have_no_backward_pass():
    def back(name):
        found = workload.passes(planned(*CASES[name])[0])
        return [tower for tower in ("vision", "connector", "decoder") if found[tower].backward]

    assert back("all") == ["vision", "connector", "decoder"]
    assert back("a tower") == back("all but tables and connector") == ["connector", "decoder"]
    assert back("adapters on the decoder") == ["decoder"]
    assert back("only what comes after the decoder") == []


def test_fewer_trainable_parameters_cost_less():
    def total(name):
        return step_time(*planned(*CASES[name]))

    every, tables = total("all"), total("all but tables and connector")
    assert total("only what comes after the decoder").parts["decoder"] < tables.parts["decoder"]
    assert tables.hardware_flops < total("a tower").hardware_flops < every.hardware_flops
    assert tables.parts["update"] < total("one map of each block").parts["update"]
    assert total("one map of each block").parts["update"] < every.parts["update"]


def test_a_pattern_that_freezes_nothing_is_refused_as_in_a_run():
    with pytest.raises(ConfigError, match=r"config\.optim\.frozen: no parameter matches 'visoin/"):
        step_time(*planned(UNTIED, ("visoin/*",)))
