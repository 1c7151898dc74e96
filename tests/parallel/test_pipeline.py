"""Pipelines: what a stage holds, what an idle one does, adapters, and what is refused."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest
from builders import assert_gradients_close, recorded, stepped_from
from numerics import close_in_norm
from zoo import KINDS, ROWS, on_stages

from jaxvlm.config import ConfigError, LoraConfig, MeshConfig, StrategyConfig
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble

LORA = LoraConfig(rank=2, targets=("decoder/stack/*",))


def stepper(kind, mesh, parts, strategy=None, change=lambda config: config, devices=8):
    """(step, abstract state, what makes the first state, mesh, model)."""
    config, loss, _ = KINDS[kind]
    here = make_mesh(mesh, jax.devices()[:devices])
    model = build_model(change(on_stages(config)), here, strategy or StrategyConfig())
    tx = optax.chain(recorded(), optax.sgd(1e-2))
    return *assemble(model, loss, tx, parts), here, model


def rows(batch, count):
    """``batch`` again and again."""
    return jax.tree.map(lambda x: np.concatenate([x] * -(-count // len(x)))[:count], batch)


def temporaries(schedule, parts):
    mesh = MeshConfig(data=1, pipeline=4)
    split = StrategyConfig(schedule=schedule)
    step, abstract, _, here, _ = stepper("llava", mesh, parts, split, devices=4)
    batch = to_global(here, rows(KINDS["llava"].batch(0, True), 4 * parts), 4 * parts)
    compiled = step.lower(abstract, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_memory_is_flat_in_microbatches_with_1f1b_and_grows_with_gpipe():
    few, many = (temporaries("1f1b", parts) for parts in (8, 24))
    assert many <= 1.1 * few
    few, many = (temporaries("zero_bubble", parts) for parts in (8, 24))
    assert many <= 1.1 * few
    few, many = (temporaries("gpipe", parts) for parts in (8, 24))
    assert many >= 1.8 * few


def test_no_matmul_is_done_twice_for_a_smaller_bubble():
    mesh, counts = MeshConfig(data=1, pipeline=4), []
    for schedule in ("1f1b", "zero_bubble"):
        step, abstract, _, here, _ = stepper(
            "qwen3", mesh, 4, StrategyConfig(schedule=schedule), devices=4
        )
        batch = to_global(here, rows(KINDS["qwen3"].batch(0, True), 16), 16)
        counts.append(step.lower(abstract, batch).as_text().count("stablehlo.dot_general"))
    assert counts[0] == counts[1]


def branches(text):
    """Of each conditional, its branches' lines with those of all that they call."""
    bodies, name = {}, ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[1]
        bodies[name] = bodies.get(name, "") + line + "\n"

    def whole(name, seen):
        if name in seen or name not in bodies:
            return ""
        seen.add(name)
        called = re.findall(r"%([\w.\-]+)", bodies[name])
        return bodies[name] + "".join(whole(other, seen) for other in called)

    found = re.findall(r" conditional\(.*", text)
    names = [re.findall(r"computations?=\{?([^},]+(?:, ?%[^},]+)*)", line) for line in found]
    return [
        [whole(one.strip(" %"), set()) for part in parts for one in part.split(",")]
        for parts in names
    ]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("qwen3", MeshConfig(2, pipeline=2, tensor=2)),
        ("moe", MeshConfig(4, pipeline=2)),
        ("gemma3", MeshConfig(4, pipeline=2)),
    ],
)
def test_stages_in_turn_give_one_devices_output(kind, mesh):
    """DeepStack, experts and sliding windows; without gradients no batch is split."""
    batch, found = KINDS[kind].batch(0, True), []
    for on in (MeshConfig(1), mesh):
        here = make_mesh(on, jax.devices()[: here_devices(on)])
        model = build_model(on_stages(KINDS[kind].config), here)
        out = jax.jit(model.apply)(model.init(0), to_global(here, batch, ROWS))
        found.append((out.hidden, out.aux))
    for one, many in zip(*map(jax.tree.leaves, found), strict=True):
        close_in_norm(np.asarray(many), np.asarray(one), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "parts", "virtual_stages"),
    [
        pytest.param("1f1b", 8, 1, marks=pytest.mark.exhaustive),
        ("interleaved", 4, 2),
        ("zero_bubble", 8, 1),
    ],
)
def test_idle_ticks_take_an_empty_branch(schedule, parts, virtual_stages):
    """Stages count in the branch that works: the share is the lock-step formula's."""
    mesh = MeshConfig(data=4, pipeline=2)
    split = StrategyConfig(schedule=schedule, virtual_stages=virtual_stages)
    step, abstract, init, here, model = stepper("llava", mesh, parts, split)
    batch = to_global(here, rows(KINDS["llava"].batch(0, True), 32), 32)
    program = step.lower(abstract, batch).compile()
    units = [found for found in branches(program.as_text()) if any(" dot(" in b for b in found)]
    assert len(units) >= 2  # forward and backward at least
    for found in units:
        idle = [b for b in found if " dot(" not in b]
        assert len(idle) == 1 and not re.search(r" (while|all-\w+|collective-\w+)\(", idle[0])
    _, metrics = program(init(model.init(0)), batch)
    units, kinds = parts * virtual_stages, 3 if schedule == "zero_bubble" else 2
    assert float(metrics["busy_stages"]) == pytest.approx(kinds * units / (kinds * units + 2))


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.exhaustive), "zero_bubble"]
)
def test_adapters_on_stages(schedule):
    found = {}
    for name, mesh, parts in (("one", MeshConfig(1), 1), ("many", MeshConfig(4, pipeline=2), 2)):
        step, _, init, here, model = stepper(
            "llava",
            mesh,
            parts,
            StrategyConfig(schedule=schedule if mesh.pipeline > 1 else "1f1b"),
            change=lambda config: dataclasses.replace(config, lora=LORA),
            devices=here_devices(mesh),
        )
        params = jax.tree.map(np.asarray, stepped_from(found.setdefault("first", {}), model))
        state = init({path: jax.device_put(x, model.shardings[path]) for path, x in params.items()})
        before = jax.device_get(state.frozen)
        state, metrics = step(state, to_global(here, KINDS["llava"].batch(0, True), ROWS))
        found[name] = float(metrics["loss"]), jax.device_get(state.opt_state[0])
        assert all(np.array_equal(x, before[p]) for p, x in jax.device_get(state.frozen).items())
    assert found["many"][0] == pytest.approx(found["one"][0], rel=1e-5)
    assert_gradients_close(found["many"][1], found["one"][1])


def here_devices(mesh):
    return 8 if mesh.pipeline > 1 else 1


@pytest.mark.parametrize(
    ("kind", "mesh", "strategy", "message"),
    [
        (
            "llava",
            {"pipeline": 8},
            {},
            r"mesh\.pipeline=8 does not divide the decoder's 4 layers; .* 2, 4",
        ),
        (
            "llava",
            {"pipeline": 4, "data": 2},
            {"schedule": "interleaved", "virtual_stages": 2},
            r"pipeline=4 x config\.strategy\.virtual_stages=2 does not divide .* that do: 2",
        ),
        (
            "dual",
            {"pipeline": 2, "data": 4},
            {},
            "splits a decoder's layers, and this model has none",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(kind, mesh, strategy, message):
    here = make_mesh(MeshConfig(**{"data": 1, **mesh}))
    with pytest.raises(ConfigError, match=message):
        build_model(on_stages(KINDS[kind].config), here, StrategyConfig(**strategy))


@pytest.mark.parametrize("remat", ["none", "offload"])
def test_copies_of_weights_are_not_kept(remat):
    config = on_stages(KINDS["llava"].config)
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, remat=remat))
    with pytest.raises(ConfigError, match=rf"decoder\.remat='{remat}' with config\.mesh\.pipe"):
        build_model(config, make_mesh(MeshConfig(data=4, pipeline=2)))


@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.exhaustive), "zero_bubble"]
)
def test_bfloat16_goes_through_stages(schedule):
    mesh = MeshConfig(data=4, pipeline=2)
    step, _, init, here, model = stepper(
        "llava",
        mesh,
        4,
        StrategyConfig(schedule=schedule),
        change=lambda config: dataclasses.replace(config, dtype="bfloat16"),
    )
    assert not any(
        "vision" in path or "decoder" in path
        for path, x in model.shapes.items()
        if x.dtype != np.float32
    )
    state, losses = init(model.init(0)), []
    for _ in range(3):
        state, metrics = step(state, to_global(here, KINDS["llava"].batch(0, True), ROWS))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
