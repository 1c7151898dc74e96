"""Disaggregated vision encoder: two of eight devices, the rest on the other six."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from numerics import close_in_norm
from zoo import KINDS, on_stages

from jaxvlm.config import (
    ConfigError,
    EncoderConfig,
    LoraConfig,
    MeshConfig,
    OptimConfig,
    StrategyConfig,
)
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.spmd.disaggregated_encoder import (
    assemble_disaggregated,
    divide_devices,
    encoder_on_devices,
)
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble_with_cache
from jaxvlm.train import program_memory
from jaxvlm.train.disaggregated import ENCODER_PROGRAMS

ROWS, STEPS = 12, 3
TWO, ALL, FSDP = EncoderConfig(2), MeshConfig(), StrategyConfig()
NO_LORA, TOWERS = LoraConfig(), ("vision", "decoder")


def rows_of(batch):
    return jax.tree.map(lambda x: x[:ROWS], batch)


def run(kind, tower=None, mesh=ALL, split=FSDP, frozen=(), parts=1, lora=NO_LORA):
    """Losses, norms and parameters of three steps; the last program and state."""
    _, loss, batch = KINDS[kind]
    config = dataclasses.replace(KINDS[kind].config, lora=lora)
    if lora.dropout:  # and of both towers' streams
        drops = {n: dataclasses.replace(getattr(config, n), dropout=0.1) for n in TOWERS}
        config = dataclasses.replace(config, **drops)
    own, devices = divide_devices(tower, jax.devices()) if tower else ([], jax.devices()[:1])
    mesh, split = resolve(split, mesh, devices)
    config = on_stages(config) if mesh.pipeline > 1 else config
    model = build_model(config, make_mesh(mesh, devices), split)
    # Clipped in each step, so that a norm of one side alone would show.
    optim = OptimConfig(eps=1e-2, max_grad_norm=0.05, weight_decay=0.1)
    tx = make_optimizer(optim, lambda step: 1e-2, model.logical)
    how = (loss, tx, parts, frozen)
    if tower:
        made = assemble_disaggregated(
            model, encoder_on_devices(model, tower, own), *how, tower.microbatches_in_flight
        )
    else:
        made = assemble_with_cache(model, *how)
    params = {p: jax.device_put(x, model.shardings[p]) for p, x in first_params(kind, lora).items()}
    state = made.init(params)
    seen, program = [], None
    for seed in range(STEPS):
        placed = made.place(rows_of(batch(seed, True)), ROWS)
        program = program or made.build(state, placed)
        state, metrics = program(state, placed)
        jax.block_until_ready((state, metrics))
        seen.append({name: float(x) for name, x in metrics.items()})
    return seen, jax.device_get(made.params(state)), made, program, state


@functools.cache
def one_device(kind, frozen=(), lora=NO_LORA):
    return run(kind, frozen=frozen, lora=lora)[:2]


@functools.cache
def first_params(kind, lora):
    here = make_mesh(MeshConfig(1), jax.devices()[:1])
    config = dataclasses.replace(KINDS[kind].config, lora=lora)
    params = build_model(config, here).init(0)
    return {path: np.asarray(x) for path, x in params.items()}


def assert_equal(ours, theirs, least=0.05):
    for mine, other in zip(ours[0], theirs[0]):
        for name in (mine.keys() & other.keys()) - {"busiest_expert"}:  # a mean over microbatches
            np.testing.assert_allclose(mine[name], other[name], rtol=1e-4, err_msg=name)
        assert other["grad_norm"] > least
    for path, x in theirs[1].items():
        close_in_norm(ours[1][path], x, 1e-4, path, least=0.1)


def devices_with(state):
    """Ids of the devices that hold the encoder's parameters and moments, and all others'."""
    tower, rest = set(), set()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        (tower if "'vision/" in name else rest).update(d.id for d in x.sharding.device_set)
    return tower, rest


def bytes_of(state, device):
    """What of a state lies on a device."""
    return sum(
        shard.data.nbytes
        for x in jax.tree.leaves(state)
        for shard in x.addressable_shards
        if shard.device.id == device
    )


def assert_they_meet(program, parts):
    """Features have as many shards on both sides, or JAX blocks and copies through the host."""
    assert [way.shard_shape((ROWS,)) for way in program.between] == [(ROWS // parts,)] * 2
    memory = program_memory.memory(program)
    for side in ("encoder", "rest"):
        assert memory[f"{side}, peak"] > memory[f"{side}, state and batch"] > 0


def assert_memory_counts_what_waits(program, state):
    """Gradients are there while a program adds to them or encodes the next group."""
    memory = program_memory.memory(program)
    for side, mine in (("encoder", True), ("rest", False)):
        params = {p: x for p, x in state.params.items() if p.startswith("vision/") == mine}
        held = sum(bytes_on(x) for x in jax.tree.leaves(params))
        moments = 2 * held
        assert memory[f"{side}, state and batch"] >= held + moments
        ran = {n: p for n, p in program.programs.items() if (n in ENCODER_PROGRAMS) == mine}
        adds = ran["backward" if mine else "gradients"].memory_analysis()
        work = adds.temp_size_in_bytes + adds.output_size_in_bytes - adds.alias_size_in_bytes
        assert memory[f"{side}, work"] >= held + work


def bytes_on(x):
    return x.addressable_shards[0].data.nbytes


SIDES = [
    (ALL, TWO, 1),
    (MeshConfig(3, fsdp=2), EncoderConfig(2, MeshConfig(1, fsdp=2)), 2),
    (MeshConfig(3, tensor=2), EncoderConfig(2, MeshConfig(1, tensor=2)), 4),
    (
        MeshConfig(3, pipeline=2),
        EncoderConfig(2, MeshConfig(1, tensor=2), microbatches_in_flight=2),
        4,
    ),
]
BYTES = StrategyConfig("fsdp_no_reshard", param_gather_dtype="int8")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        ("llava", 1),
        ("qwen3", 0),
        ("qwen3", 2),
        ("moe", 2),
        ("gemma3", 0),
        ("llava", 3),
        ("qwen3", 3),
        ("moe", 3),
    ],
)
def test_a_trained_disaggregated_encoder_equals_one_device(kind, sides):
    """Every step is clipped by the norm of both sides' gradients."""
    mesh, tower, parts = SIDES[sides]
    *ours, _, program, state = run(kind, tower, mesh, parts=parts)
    assert_equal(ours, one_device(kind))
    assert_they_meet(program, {2: 1, 3: 1}.get(sides, 2))
    assert_memory_counts_what_waits(program, state)
    assert devices_with(state) == ({0, 1}, {2, 3, 4, 5, 6, 7})
    if sides == 1:  # parameters and both moments, halved by fsdp
        whole = sum(x.nbytes for path, x in state.params.items() if path.startswith("vision/"))
        assert 1.5 * whole <= bytes_of(state, 0) <= 1.1 * 1.5 * whole


@pytest.mark.parametrize(
    ("kind", "mesh", "split"),
    [
        pytest.param("llava", MeshConfig(3, pipeline=2), FSDP, marks=pytest.mark.long),
        pytest.param(
            "qwen3", ALL, StrategyConfig("ddp", grad_reduce_dtype="int8"), marks=pytest.mark.long
        ),
        ("qwen3", MeshConfig(3, context=2), FSDP),
    ],
)
def test_a_frozen_disaggregated_encoder(kind, mesh, split):
    """All that one mesh supports works after it, pipelines and quantized gradients too."""
    several = mesh.pipeline == 1 and split.grad_reduce_dtype == "float32"
    frozen, parts = ("vision/*",), 2 if several else 1
    parts = 4 if mesh.pipeline > 1 else parts
    *ours, made, program, state = run(kind, TWO, mesh, split, frozen, parts)
    if split.grad_reduce_dtype == "float32":
        assert_equal(ours, one_device(kind, frozen))
    else:
        np.testing.assert_allclose(ours[0][0]["loss"], one_device(kind, frozen)[0][0]["loss"], 1e-5)
    assert devices_with(state) == ({0, 1}, {2, 3, 4, 5, 6, 7})
    assert set(program.programs) == {"encode", "step"}
    # The tower's program takes the same arrays in each step: it waits for none of another's.
    before = {path: x for path, x in state.frozen.items() if path.startswith("vision/")}
    after = program(state, made.place(rows_of(KINDS[kind].batch(0, True)), ROWS))[0]
    assert before and all(after.frozen[path] is x for path, x in before.items())
    assert_they_meet(program, 1 if mesh.data == 3 else 2)


@pytest.mark.long
def test_an_encoder_gathered_in_int8_trains_on_rounded_weights():
    tower = EncoderConfig(2, MeshConfig(1, fsdp=2), BYTES)
    (seen, *_), (exact, _) = run("llava", tower, parts=2), one_device("llava")
    np.testing.assert_allclose(seen[0]["loss"], exact[0]["loss"], rtol=1e-2)
    assert abs(seen[0]["loss"] / exact[0]["loss"] - 1) > 1e-5  # it is rounded
    np.testing.assert_allclose(seen[0]["grad_norm"], exact[0]["grad_norm"], rtol=2e-2)


@pytest.fixture(scope="module")
def halves():
    """(how a batch is placed, the step, its state in host memory, where that belongs)."""
    *_, made, program, state = run("llava", SIDES[1][1], SIDES[1][0], parts=2)
    return made.place, program, jax.device_get(state), jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.parametrize("side", ["vision", "decoder"])
def test_what_is_not_finite_on_one_side_is_skipped_on_both(side, halves):
    place, program, kept, shardings = halves
    state = jax.device_put(kept, shardings)
    names = sorted(state.params)
    path = next(p for p in names if p.startswith(side))
    bad = state._replace(params={**state.params, path: state.params[path] * np.nan})
    before = jax.device_get(bad)
    batch = place(rows_of(KINDS["llava"].batch(0, True)), ROWS)
    after, metrics = program(bad, batch)
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["loss"])
    assert names[int(metrics["bad_leaf"])] <= path
    after = jax.device_get(after)
    assert after.guard.in_a_row == 1
    for old, new in zip(
        jax.tree.leaves((before.params, before.opt_state)),
        jax.tree.leaves((after.params, after.opt_state)),
    ):
        np.testing.assert_array_equal(old, new)


@pytest.mark.long
def test_images_in_few_rows_or_none():
    """A batch without an image gives the tower no gradient, and trains the rest."""
    *_, made, _, state = run("llava", TWO)
    batch = rows_of(KINDS["llava"].batch(0, True))
    batch = batch._replace(pixels=None, image_start=None)
    placed = made.place(batch, ROWS)
    before = jax.device_get(state.params)
    after, metrics = made.build(state, placed)(state, placed)
    assert np.isfinite(metrics["loss"]) and metrics["images"] == 0
    moved = {p for p, x in after.params.items() if np.any(np.asarray(x) != before[p])}
    assert any(p.startswith("decoder/") for p in moved)


@pytest.mark.long
@pytest.mark.parametrize("targets", ["vision/stack/*", "decoder/stack/*", "all-linear"])
def test_adapters_here_and_there(targets):
    """Where one side has none, all of it is frozen all the same; where both learn, both drop."""
    lora = LoraConfig(rank=2, targets=(targets,), base="int8")
    if targets == "all-linear":
        lora = dataclasses.replace(lora, base="", dropout=0.2)
    *ours, _, _, state = run("llava", TWO, lora=lora)
    assert_equal(ours, one_device("llava", lora=lora), least=0.0)
    if lora.dropout:  # new adapters change nothing: what is dropped does
        plain = one_device("llava")[0][0]["loss"]
        assert abs(ours[0][0]["loss"] / plain - 1) > 1e-4
    trained = {path.split("/")[0] for path in state.params}
    assert trained >= {"all-linear": {"vision", "connector", "decoder"}}.get(
        targets, {targets.split("/")[0]}
    )


@pytest.mark.parametrize(
    ("tower", "mesh", "split", "says"),
    [
        (EncoderConfig(8), ALL, FSDP, "encoder.devices=8 of 8 devices"),
        (
            EncoderConfig(0, MeshConfig(2)), ALL, FSDP,
            "encoder.mesh.data=2 is not read without devices",
        ),
        (
            EncoderConfig(2, MeshConfig(1, pipeline=2)), ALL, FSDP,
            "encoder.mesh.pipeline=2 splits a decoder's",
        ),
        (EncoderConfig(2, MeshConfig(3)), ALL, FSDP, r"config\.encoder\.mesh .* 2 devices"),
        (
            EncoderConfig(2, ALL, StrategyConfig(grad_reduce_dtype="int8")), ALL, FSDP,
            "encoder.strategy.grad_reduce_dtype",
        ),
        (
            EncoderConfig(2, MeshConfig(1, expert=-1)), ALL, FSDP,
            r"encoder.mesh.expert=\d splits a decoder",
        ),
        (EncoderConfig(3, MeshConfig(1, tensor=3)), ALL, FSDP, r"heads=8 .* config\.encoder\.mesh"),
        (
            EncoderConfig(2, MeshConfig(1, context=2), StrategyConfig(context="ring")), ALL, FSDP,
            "encoder.strategy.context='ring' is not read",
        ),
        (
            EncoderConfig(2, strategy=StrategyConfig("single")), ALL, FSDP,
            "name='single' runs on one",
        ),
        (
            TWO, ALL, StrategyConfig(replicated=("vision",)),
            "replicated names 'vision', which config.encoder",
        ),
        (
            TWO, ALL, StrategyConfig("ddp", grad_reduce_dtype="int8"),
            "grad_reduce_dtype='int8' with config.encoder",
        ),
        (
            EncoderConfig(2, microbatches_in_flight=1), ALL, FSDP,
            "encoder.microbatches_in_flight=1 is not read with config.mesh.pipeline=1",
        ),
        (
            EncoderConfig(2, microbatches_in_flight=2), MeshConfig(3, pipeline=2), FSDP,
            "microbatches_in_flight=2 does not divide .*; 1 w",
        ),
    ],
)  # fmt: skip
def test_unsupported_disaggregated_settings_are_refused(tower, mesh, split, says):
    with pytest.raises(ConfigError, match=says):
        run("llava", tower, mesh, split)
