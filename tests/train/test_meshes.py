"""Every mesh gives one device's loss and gradients, and places what the golden table says."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest
from builders import (
    MESHES,
    ROWS,
    assert_gradients_close,
    devices_of,
    random_batch,
    train_config,
)
from numerics import close

from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.train.grad_accum import PlainRunner, scales
from jaxvlm.trainer.training import build_training

MIXED = "data2_fsdp2_tensor2"
GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "specs.json"


def built(name, **optim):
    config = train_config(MESHES[name], **optim)
    mesh = make_mesh(config.mesh, devices_of(config.mesh))
    model = build_model(config.model, mesh)
    return config, mesh, model, build_training(config, model, config.steps, lambda line: None)


@pytest.fixture(scope="module")
def reference():
    return loss_and_gradients("one")


def loss_and_gradients(name):
    _, mesh, model, _ = built(name)
    batch = to_global(mesh, random_batch(), ROWS)
    params = model.init(0)
    runner, loss = PlainRunner(model.apply), NextToken()

    def run(params, batch):
        scale = scales(loss, batch)
        sums, grads = runner.loss_grad(params, {}, batch, loss, scale)
        return sums.terms["loss"] * scale["loss"], grads

    value, grads = jax.jit(run, out_shardings=(None, model.shardings))(params, batch)
    return float(value), jax.device_get(grads)


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.long) for n in ("data8", "fsdp8", "tensor8")), MIXED],
)
def test_loss_and_gradients_equal_one_device(name, reference):
    value, grads = loss_and_gradients(name)
    expected, expected_grads = reference
    close(value, expected, 1e-5)
    assert_gradients_close(grads, expected_grads)


@pytest.mark.parametrize("name", list(MESHES))
def test_specs_match_the_golden_table(name, request):
    _, mesh, _, made = built(name)
    table = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(made.abstract):
        table[jax.tree_util.keystr(path, simple=True, separator="/")] = str(leaf.sharding.spec)
    batch = to_global(mesh, random_batch(), ROWS)
    table |= {
        f"batch/{n}": str(x.sharding.spec) for n, x in batch._asdict().items() if x is not None
    }
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(json.dumps(golden | {name: table}, indent=1, sort_keys=True) + "\n")
        return
    assert table == golden[name]


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.long) for n in ("fsdp8", "tensor8")), MIXED]
)
def test_no_sharded_leaf_is_replicated_after_a_step(name):
    _, mesh, model, made = built(name)
    batch = to_global(mesh, random_batch(), ROWS)
    state = made.init(model.init(0))
    state, _ = made.step.get(state, batch)(state, batch)
    found = jax.tree_util.tree_leaves_with_path(state)
    wanted = jax.tree.leaves(made.abstract)
    for (path, leaf), want in zip(found, wanted, strict=True):
        where = jax.tree_util.keystr(path)
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), where
        if any(want.sharding.spec):
            assert not leaf.sharding.is_fully_replicated, where
            assert leaf.addressable_shards[0].data.size < leaf.size, where


def test_a_mesh_that_does_not_divide_is_named():
    from jaxvlm.config import ConfigError, MeshConfig

    with pytest.raises(ConfigError, match=r"config\.mesh \(data=3.*does not fit 8 devices"):
        make_mesh(MeshConfig(3, 1, 1))
    mesh = make_mesh(MeshConfig(1, 2, 4))
    config = train_config()
    import dataclasses

    odd = dataclasses.replace(config.model.decoder, num_heads=6, num_kv_heads=2)
    with pytest.raises(ConfigError, match=r"decoder.*: heads=6 is not divisible by the 4"):
        build_model(dataclasses.replace(config.model, decoder=odd), mesh)


def test_islands_cross_slices_before_data_does():
    from jaxvlm.config import ConfigError, MeshConfig
    from jaxvlm.parallel.mesh import _across_slices

    assert _across_slices(MeshConfig(4), 2)[:2] == (1, 2)
    assert _across_slices(MeshConfig(2, island=4), 2)[:2] == (2, 1)
    assert _across_slices(MeshConfig(2, island=2), 4)[:2] == (2, 2)
    with pytest.raises(ConfigError, match=r"data=1 and config.mesh.island=2 .* 4 TPU slices"):
        _across_slices(MeshConfig(1, island=2), 4)
