"""Planned memory compared with real states and with XLA's compiler."""

from __future__ import annotations

import dataclasses

import jax
import optax
import pytest
from builders import TINY

from benchmarks.batches import abstract_batch
from jaxvlm.config import ConfigError, LoraConfig, MeshConfig, OuterConfig, StrategyConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import abstract_devices
from jaxvlm.planner.time import communication
from jaxvlm.spmd.islands import outer_of
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train import program_memory

PRESETS = {
    "ddp": MeshConfig(data=8),
    "zero1": MeshConfig(data=1, fsdp=8),
    "zero2": MeshConfig(data=1, fsdp=8),
    "fsdp": MeshConfig(data=1, fsdp=8),
    "fsdp_no_reshard": MeshConfig(data=1, fsdp=8),
    "hybrid_shard": MeshConfig(data=2, fsdp=4),
    "hpz": MeshConfig(data=2, fsdp=4),
}
ROWS, LENGTH = 16, 64


def _setup(config, preset, sizes, **more):
    mesh, strategy = resolve(StrategyConfig(preset), sizes, abstract_devices.devices("cpu", 8))
    return step_memory.StepSetup(config, mesh, strategy, "cpu", ROWS, LENGTH, 1, **more)


def _step(setup):
    """The real step, its state and batch, on eight devices."""
    mesh = make_mesh(setup.mesh, jax.devices())
    model = build_model(setup.config, mesh, setup.strategy).holding(dict(setup.held))
    step, state, _ = assemble(
        model, NextToken(), optax.adamw(1e-3), setup.microbatches, setup.frozen
    )
    return step, state, abstract_batch(setup.config, mesh, ROWS, LENGTH, 1)


@pytest.mark.parametrize("trained", ["all", "frozen", "adapters", "bfloat16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_states_between_steps_are_exact(preset, trained):
    lora = LoraConfig(rank=4) if trained == "adapters" else LoraConfig()
    config = dataclasses.replace(TINY, lora=lora)
    frozen = ("vision/*",) if trained in ("frozen", "bfloat16") else ()
    setup = _setup(config, preset, PRESETS[preset], frozen=frozen)
    if trained == "bfloat16":
        paths = (p for p in step_memory.model_of(setup).shapes if p.startswith("vision/"))
        setup = setup._replace(held=tuple((path, "bfloat16") for path in sorted(paths)))
    _, state, batch = _step(setup)
    found = step_memory.states(setup, step_memory.model_of(setup))
    real = {
        "parameters": state.params,
        "frozen": state.frozen,
        "moments": state.opt_state,
        "batch": batch,
    }
    theirs = {n: sum(map(program_memory.bytes_of, jax.tree.leaves(x))) for n, x in real.items()}
    theirs["moments"] -= 4 * sum(not x.shape for x in jax.tree.leaves(state.opt_state))  # counts
    assert found == theirs


def test_tensor_parallel_states_are_exact():
    setup = _setup(TINY, "fsdp", MeshConfig(data=1, fsdp=4, tensor=2))
    _, state, _ = _step(setup)
    theirs = sum(map(program_memory.bytes_of, state.params.values()))
    assert step_memory.states(setup, step_memory.model_of(setup))["parameters"] == theirs


@pytest.mark.parametrize(
    "outer",
    [
        OuterConfig(),
        OuterConfig(optimizer="nesterov", momentum=0.9, delta_dtype="int8", fragments=2),
        OuterConfig(optimizer="adam", delta_dtype="int8", error_feedback=False),
    ],
    ids=["mean", "nesterov in 8 bits", "adam"],
)
def test_states_of_islands_are_exact(outer):
    setup = _setup(TINY, "fsdp", MeshConfig(data=2, fsdp=2, island=2), outer=outer)
    mesh = make_mesh(setup.mesh, jax.devices())
    model = build_model(setup.config, mesh, setup.strategy)
    islands = outer_of(model, outer, model.shapes)
    _, state, _ = assemble(model, NextToken(), optax.adamw(1e-3), outer=islands)
    real = {
        "parameters": state.islands.params,
        "moments": state.islands.opt_state,
        "shared": (state.params, state.opt_state, state.comm),
        "batch": abstract_batch(setup.config, mesh, ROWS, LENGTH, 1),
    }
    theirs = {
        name: sum(program_memory.bytes_of(x) for x in jax.tree.leaves(part) if x.size > 4)
        for name, part in real.items()
    }
    assert step_memory.states(setup, step_memory.model_of(setup)) == theirs | {"frozen": 0}


def test_islands_send_changes_of_parameters_now_and_then():
    outer = OuterConfig(steps=50, delta_dtype="bfloat16")
    setup = _setup(TINY, "ddp", MeshConfig(data=4, island=2), outer=outer)
    each = communication.messages(setup, 4)
    across = [m for m in each if "island" in m.axes]
    count = sum(x.size for x in step_memory.model_of(setup).shapes.values())
    sent = sum(m.sent(setup.mesh) for m in across)
    assert {m.axes for m in across} == {("island",)}
    assert sent == pytest.approx(2 * count / 50, rel=0.02)  # norms and biases are not counted
    assert {m.axes for m in each} - {("island",)} == {("data",)}


WIDE = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, width=128, depth=4, mlp_dim=512),
    decoder=dataclasses.replace(
        TINY.decoder, width=256, depth=6, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=768,
        vocab_size=2048,
    ),
)  # fmt: skip
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "mlp_dim": 256}


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "sizes", "remat", "more", "parts", "newline"),
    [
        ("ddp", MeshConfig(data=8), "none", {}, 1, False),
        ("fsdp", MeshConfig(data=1, fsdp=8), "full", {"width": 512, "mlp_dim": 1536}, 4, False),
        ("fsdp", MeshConfig(data=1, fsdp=4, tensor=2), "full", EXPERTS, 1, False),
        ("ddp", MeshConfig(data=8), "none", {}, 1, True),  # as LLaVA-NeXT and OneVision
    ],
)
def test_the_peak_is_close_to_the_compilers(preset, sizes, remat, more, parts, newline):
    config = dataclasses.replace(
        WIDE,
        vision=dataclasses.replace(WIDE.vision, remat=remat),
        connector=dataclasses.replace(WIDE.connector, newline=newline),
        decoder=dataclasses.replace(WIDE.decoder, remat=remat, **more),
    )
    mesh, strategy = resolve(StrategyConfig(preset), sizes, abstract_devices.devices("cpu", 8))
    setup = step_memory.StepSetup(config, mesh, strategy, "cpu", 64, 512, 1, microbatches=parts)
    real = make_mesh(mesh, jax.devices())
    model = build_model(config, real, strategy)
    step, state, _ = assemble(model, NextToken(), optax.adamw(1e-3), parts)
    compiled = step.lower(state, abstract_batch(config, real, 64, 512, 1)).compile()
    assert step_memory.estimate(setup).peak == pytest.approx(
        program_memory.memory(compiled)["peak"], rel=0.15
    )


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="a batch of 12 is"):
        step_memory.estimate(_setup(TINY, "ddp", PRESETS["ddp"])._replace(rows=12))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_absent_hardware_is_planned(platform):
    config = dataclasses.replace(TINY, dtype="bfloat16")
    mesh, strategy = resolve(StrategyConfig("fsdp"), MeshConfig(data=1, fsdp=512), _pod(platform))
    with pytest.raises(ConfigError, match="not divisible by the 512 devices"):
        step_memory.estimate(
            step_memory.StepSetup(config, mesh, strategy, platform, 512, LENGTH, 1)
        )
    mesh, strategy = resolve(
        StrategyConfig("hybrid_shard"), MeshConfig(data=64, fsdp=8), _pod(platform)
    )
    found = step_memory.estimate(
        step_memory.StepSetup(config, mesh, strategy, platform, 512, LENGTH, 1)
    )
    assert found.peak > sum(found.states.values()) > 0


def _pod(platform):
    return abstract_devices.devices(platform, 512, devices_per_host=8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mesh": MeshConfig(data=1, pipeline=8)}, "config.mesh.pipeline"),
        ({"decoder": {"dropout": 0.1}}, "config.model.decoder.dropout"),
        ({"decoder": {"remat": "offload"}}, "remat='offload'"),
    ],
)
def test_unsupported_settings_are_refused(change, named):
    decoder = dataclasses.replace(TINY.decoder, **change.get("decoder", {}))
    config = dataclasses.replace(TINY, decoder=decoder)
    setup = _setup(config, "ddp", PRESETS["ddp"])
    setup = setup._replace(mesh=change.get("mesh", setup.mesh))
    with pytest.raises(ConfigError, match=f"{named}.*can't be planned yet: .*--dry_run"):
        step_memory.estimate(setup)


def test_experts_are_planned_on_any_mesh_from_one_trace():
    config = dataclasses.replace(TINY, decoder=dataclasses.replace(TINY.decoder, **EXPERTS))
    sizes = {"whole": MeshConfig(data=1, fsdp=8), "split": MeshConfig(data=1, fsdp=4, expert=2)}
    whole, split = (_setup(config, "fsdp", size)._replace(length=512) for size in sizes.values())
    one, two = step_memory.estimate(whole), step_memory.estimate(split)
    # A device holds its own experts, unsharded in matmuls: it receives the others' tokens.
    assert two.states["parameters"] < 1.5 * one.states["parameters"]
    before = step_memory._trace.cache_info().misses
    more = step_memory.estimate(whole._replace(rows=8 * ROWS))
    assert step_memory._trace.cache_info().misses == before
    assert 7 < more.work["work"] / one.work["work"] < 8.5


def test_tokens_are_copied_per_expert_only_where_xla_does():
    def work(**more):
        decoder = dataclasses.replace(TINY.decoder, **EXPERTS, **more)
        mesh, strategy = resolve(StrategyConfig("ddp"), MeshConfig(data=1), _pod("gpu")[:1])
        config = dataclasses.replace(TINY, decoder=decoder)
        setup = step_memory.StepSetup(config, mesh, strategy, "gpu", 8, 512, 1)
        return step_memory.estimate(setup).work["work"]

    rows = 8 * 512 * EXPERTS["experts_per_token"] * TINY.decoder.width * 4
    assert work(expert_matmul="xla") - work() > (EXPERTS["num_experts"] - 1) * rows


def test_microbatches_need_less_memory():
    setup = _setup(TINY, "fsdp", PRESETS["fsdp"])._replace(rows=64, length=256)
    whole, parts = (step_memory.estimate(setup._replace(microbatches=n)) for n in (1, 4))
    saved = [sum(v for k, v in x.work.items() if k.endswith("saved")) for x in (whole, parts)]
    assert saved[1] < saved[0] / 3
    assert whole.states == parts.states
