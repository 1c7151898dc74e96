"""LoRA and DoRA adapters: their outputs, their gradients, frozen weights, shardings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import (
    MESHES,
    ROWS,
    TINY,
    assert_gradients_close,
    devices_of,
    random_batch,
    train_config,
)
from numerics import close

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, LoraConfig, MeshConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models import int8_weights, lora
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.train.grad_accum import GradAccumulation, PlainRunner, scales
from jaxvlm.trainer.callbacks import checkpoint
from jaxvlm.trainer.training import build_training

ONE, MANY = MESHES["one"], MeshConfig(data=1, fsdp=4, tensor=2)
SOME = ("decoder/*/w[qo]", "decoder/*/w_out", "vision/*/w_in", "connector/w_out")
DORA = LoraConfig(rank=2, alpha=3.0, dora=True, targets=SOME)


def built(mesh=ONE, **settings):
    made = make_mesh(mesh, devices_of(mesh))
    config = dataclasses.replace(TINY, lora=dataclasses.replace(DORA, **settings))
    return build_model(config, made)


def shaken(model, seed=0):
    """Parameters whose adapters do something."""
    rng = np.random.default_rng(seed)

    def move(path, x):
        if path.endswith(lora.B):
            return 0.3 * rng.standard_normal(x.shape).astype(np.float32)
        return x * (1 + 0.2 * rng.random(x.shape, np.float32)) if "magnitude" in path else x

    params = {p: move(p, np.asarray(x)) for p, x in sorted(model.init(0).items())}
    return jax.device_put(params, model.shardings)


def split(params):
    trained = {p: x for p, x in params.items() if lora.is_adapter(p)}
    return trained, {p: x for p, x in params.items() if p not in trained}


def gradients(model, parts=1):
    """Hidden states' loss and the adapters' gradients."""
    plain, loss = PlainRunner(model.apply), NextToken()
    runner = GradAccumulation(plain, parts) if parts > 1 else plain
    batch = to_global(model.mesh, random_batch(), ROWS)

    def run(trained, frozen, batch):
        scale = scales(loss, batch)
        sums, grads = runner.loss_grad(trained, frozen, batch, loss, scale)
        return sums.terms["loss"] * scale["loss"], grads

    value, grads = jax.jit(run)(*split(shaken(model)), batch)
    return float(value), jax.device_get(grads)


@pytest.fixture(scope="module")
def reference():
    return gradients(built())


@pytest.mark.parametrize("mesh, parts", [(MANY, 1), pytest.param(ONE, 4, marks=pytest.mark.long)])
def test_a_mesh_and_parts_of_a_batch_give_the_same_gradients(mesh, parts, reference):
    value, grads = gradients(built(mesh), parts)
    close(value, reference[0], 1e-5)
    assert_gradients_close(grads, reference[1])


def test_adapters_lie_as_their_weights_do():
    model = built(MANY)
    specs = {path: tuple(s.spec) for path, s in model.shardings.items()}
    wo, wq = "decoder/stack/blocks/attn/wo", "decoder/stack/blocks/attn/wq"
    assert specs[wq] == (None, "fsdp", "tensor", None)
    assert specs[wq + "/lora_a"] == (None, "fsdp", None)
    assert specs[wq + "/lora_b"] == (None, None, "tensor", None)
    assert specs[wq + "/magnitude"] == (None, "tensor", None)
    assert specs[wo + "/lora_a"] == (None, "tensor", None, None)
    assert specs[wo + "/lora_b"] == (None, None, "fsdp")
    eight = built(MANY, base="int8").shardings
    assert tuple(eight[wq].spec) == specs[wq]
    assert tuple(eight[wq + "/int8_scale"].spec) == specs[wq + "/magnitude"]


def test_new_adapters_change_nothing_and_merged_ones_the_same():
    model, batch = built(), random_batch()
    plain = build_model(TINY, model.mesh)
    params = model.init(0)
    base = plain.init(0)
    assert all(np.array_equal(params[path], x) for path, x in base.items())
    apply = jax.jit(lambda p, b: model.apply(p, b).hidden)
    apply_plain = jax.jit(lambda p, b: plain.apply(p, b).hidden)
    before = apply_plain(base, batch)
    np.testing.assert_allclose(apply(params, batch), before, rtol=0, atol=2e-5)
    params = shaken(model)
    after = apply(params, batch)
    assert np.abs(np.asarray(after - before)).max() > 0.1
    merged = model.merged(params)
    assert merged.keys() == base.keys()
    np.testing.assert_allclose(apply_plain(merged, batch), after, rtol=0, atol=2e-5)


def test_columns_are_as_long_as_their_sum():
    rng = np.random.default_rng(0)
    w, a, b = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 4), (3, 5, 2), (2, 4)))
    whole = w.reshape(15, 4) + 0.7 * a.reshape(15, 2) @ b
    np.testing.assert_allclose(
        lora.column_norms(*map(jnp.asarray, (w, a, b)), 0.7), np.linalg.norm(whole, axis=0), 1e-6
    )


def test_all_else_is_frozen():
    model = built()
    config = train_config(ONE, weight_decay=0.1)
    config = dataclasses.replace(config, model=model.config)
    made = build_training(config, model, config.steps, lambda line: None)
    state = made.abstract
    assert all(lora.is_adapter(path) for path in state.params)
    assert state.frozen.keys() == model.base().keys()
    adapters = sum(x.size for x in state.params.values())
    # Two moments a trained number, and a few counts: nothing for what is frozen.
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * adapters
    both = dataclasses.replace(config.optim, frozen=("vision/*",))
    half = build_training(
        dataclasses.replace(config, optim=both), model, config.steps, lambda line: None
    )
    assert half.abstract.params.keys() == {p for p in state.params if not p.startswith("vision/")}


def test_targets_are_patterns_taken_in_turn():
    def chosen(*targets):
        return set(built(targets=targets).adapted)

    everything = chosen("all-linear")
    assert len(everything) == 7 + 6 + 2
    assert chosen("*/attn/w[qv]") == {p for p in everything if p.endswith(("wq", "wv"))}
    assert chosen("all-linear", "-vision/*") == chosen("decoder/*", "connector/*")
    with pytest.raises(ConfigError, match=r"'\*/q_proj' matches no linear map .nor any.*attn/wq"):
        chosen("*/q_proj")
    with pytest.raises(ConfigError, match="embed/table, but experts, embeddings"):
        chosen("decoder/embed/*")
    with pytest.raises(ConfigError, match="'-decoder/w' matches no parameter to exclude"):
        chosen("all-linear", "-decoder/w")
    with pytest.raises(ConfigError, match="leave no linear map"):
        chosen("vision/*", "-vision/*")
    with pytest.raises(ConfigError, match="rank=-1 must be"):
        built(rank=-1)
    with pytest.raises(ConfigError, match="init='zero'; known: uniform, gaussian"):
        built(init="zero")


def test_experts_take_none():
    experts = dataclasses.replace(TINY.decoder, num_experts=4, experts_per_token=2)
    config = dataclasses.replace(TINY, decoder=experts, lora=LoraConfig(rank=2))
    mesh = make_mesh(ONE, devices_of(ONE))
    model = build_model(config, mesh)
    assert not any("decoder" in path and "mlp" in path for path in model.adapted)
    targets = dataclasses.replace(config.lora, targets=("decoder/*/mlp/w_in",))
    with pytest.raises(ConfigError, match="mlp/w_in, but experts"):
        build_model(dataclasses.replace(config, lora=targets), mesh)


@pytest.mark.parametrize("init, spread", [("uniform", 1 / np.sqrt(3 * 32)), ("gaussian", 1 / 16)])
def test_a_is_drawn_as_peft_draws_it(init, spread):
    model = built(rank=16, init=init, dora=False, targets=("*/w[qk]",))
    params = model.init(0)
    a = np.asarray(params["decoder/stack/blocks/attn/wk/lora_a"])
    assert a.shape == (2, 32, 16) and abs(a.std() / spread - 1) < 0.1
    # An adapter's draw does not depend on the other targets.
    alone = built(rank=16, init=init, dora=False, targets=("*/wk",)).init(0)
    assert np.array_equal(alone["decoder/stack/blocks/attn/wk/lora_a"], a)


def nbytes(arrays):
    return sum(x.size * x.dtype.itemsize for x in arrays)


def test_eight_bits_are_a_quarter_and_close():
    floats, eight = built(), built(base="int8")
    base, kept = floats.init(0), eight.init(0)
    maps = list(eight.packed)
    assert len(maps) == 15
    before = nbytes(base[path] for path in maps)
    after = nbytes(kept[name] for path in maps for name in (path, f"{path}/int8_scale"))
    assert 0.25 < after / before < 0.33, "a byte a weight, and a scale a column"
    whole = eight.merged(kept)
    for path in maps:
        scale = np.asarray(kept[f"{path}/int8_scale"])
        lead, cut = eight.packed[path]
        dense = int8_weights.dense(kept, path, eight.packed[path])
        apart = np.abs(np.asarray(dense - base[path]))
        assert np.all(apart.max(axis=tuple(range(lead, cut))) <= 0.501 * scale), path
        np.testing.assert_allclose(whole[path], dense, rtol=0, atol=1e-5)
    batch = random_batch()
    apply = jax.jit(lambda p, b: floats.apply(p, b).hidden)
    apply_eight = jax.jit(lambda p, b: eight.apply(p, b).hidden)
    exact, rough = apply(base, batch), apply_eight(kept, batch)
    error = float(jnp.linalg.norm(rough - exact) / jnp.linalg.norm(exact))
    assert 1e-4 < error < 0.03, "0.020 when this was written"
    # The same function as the float model's with the dequantised weights.
    params = shaken(eight)
    unpacked = {p: x for p, x in params.items() if not p.endswith("int8_scale")}
    unpacked |= {p: int8_weights.dense(params, p, d) for p, d in eight.packed.items()}
    np.testing.assert_allclose(
        apply_eight(params, batch), apply(unpacked, batch), rtol=0, atol=5e-5
    )


@pytest.mark.long
def test_adapters_train_beside_eight_bits():
    model = built(base="int8")
    config = dataclasses.replace(train_config(ONE), model=model.config)
    made = build_training(config, model, config.steps, lambda line: None)
    params = model.init(0)
    before = {p: np.asarray(x) for p, x in params.items() if not lora.is_adapter(p)}
    state, batch, losses = made.init(params), to_global(model.mesh, random_batch(), ROWS), []
    for _ in range(12):
        state, metrics = made.step.get(state, batch)(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    assert all(np.array_equal(state.frozen[path], x) for path, x in before.items())
    assert {x.dtype.name for x in state.frozen.values()} == {"int8", "float32"}
    with pytest.raises(ConfigError, match="base='int8' needs adapters"):
        build_model(dataclasses.replace(TINY, lora=LoraConfig(base="int8")), model.mesh)
    with pytest.raises(ConfigError, match="base='int3': set 'int8', or leave it out"):
        built(base="int3")


def test_a_run_starts_from_one_without_adapters(tmp_path):
    run_record.write_config(tmp_path, Config(model=TINY), "")
    new = dataclasses.replace(TINY, lora=DORA)
    assert checkpoint.check_same_model(tmp_path, Config(model=new)) == TINY
    run_record.write_config(tmp_path, Config(model=new), "")
    assert checkpoint.check_same_model(tmp_path, Config(model=new)) == new
    other = dataclasses.replace(new, lora=dataclasses.replace(DORA, rank=7))
    with pytest.raises(ConfigError, match=r"lora\.rank: 2 -> 7"):
        checkpoint.check_same_model(tmp_path, Config(model=other))
    scaled = dataclasses.replace(new, lora=dataclasses.replace(DORA, alpha=DORA.alpha + 1))
    with pytest.raises(ConfigError, match=r"lora\.alpha: .* -> "):  # the arrays are the same
        checkpoint.check_resumed_model(tmp_path, Config(model=scaled))
    dropped = dataclasses.replace(new, lora=dataclasses.replace(DORA, dropout=0.1))
    checkpoint.check_resumed_model(tmp_path, Config(model=dropped))
