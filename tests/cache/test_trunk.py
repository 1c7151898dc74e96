"""A tower whose first blocks are frozen: the others learn as they would in the whole tower."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import numpy as np
import optax
import pytest
from builders import ROWS, TINY, assert_gradients_close, devices_of
from test_recompute import MESHES, MODELS, Made, turns
from zoo import on_stages

from jaxvlm.build.apart import assemble_apart, tower_of
from jaxvlm.build.apart import devices_of as sides_of
from jaxvlm.build.model import build_model
from jaxvlm.build.trunk import onto, recut, shapes
from jaxvlm.config import ConfigError, LoraConfig, MeshConfig, OptimConfig, TowerConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.lora import is_adapter
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh


def without(config):
    """The same model, its tower whole."""
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, trunk=0))


def moments(made, params, batch):
    """Parameters' gradients of one step, a tenth of them."""
    params = {path: jax.device_put(x, made.model.shardings[path]) for path, x in params.items()}
    state, _ = made.step(made.init(params), made.place(batch))
    return {p: np.asarray(x) for p, x in optax.tree.get(state.opt_state, "mu").items()}


@pytest.fixture(scope="module")
def whole():
    """kind -> the whole tower's first parameters, and gradients with it, of one device."""
    found = {}

    def of(kind):
        if kind not in found:
            MODELS[f"{kind}, whole"] = without(MODELS[kind])
            made = Made("one", "", (), f"{kind}, whole", clip=0.0)
            params = {p: np.asarray(x) for p, x in made.model.init(0).items()}
            found[kind] = params, moments(made, params, turns(1, False, kind)[0])
        return found[kind]

    return of


@pytest.mark.parametrize(
    "kind, mesh, policy",
    [
        ("trunk", "data4_tensor2", "strict"),
        ("trunk", "fsdp8", ""),
        ("trunk_deep", "data8", "strict"),
        ("trunk_deep", "one", ""),
        ("trunk_qwen", "one", ""),
        ("trunk_qwen", "fsdp8", "strict"),
        ("trunk_staged", "data4_stage2", "strict"),
        ("trunk_staged", "data4_stage2", ""),
    ],
)
@pytest.mark.long
def test_gradients_are_those_of_the_whole_tower(whole, kind, mesh, policy):
    """Of one device and no cache."""
    MODELS["trunk_staged"] = on_stages(MODELS["trunk"])
    params, expected = whole(kind)
    trunk = MODELS[kind].vision.trunk
    parts = 2 if "stage" in mesh else 1
    made = Made(mesh, policy, (), kind, clip=0.0, parts=parts, chunk=2)
    grads = moments(made, recut(params, trunk), turns(1, model=kind)[0])
    assert not any(path.startswith("vision/") for path in grads)
    assert any(np.any(x) for path, x in grads.items() if path.startswith("top/stack/"))
    wanted = recut(expected, trunk)
    assert_gradients_close(grads, {path: wanted[path] for path in grads})


def test_a_trunk_costs_no_backward_pass_and_no_moments():
    """Without a cache too, from the compiled programs; and the whole tower's does."""

    def backward(kind):
        made = Made("one", "", (), kind)
        text = made.step.lower(made.abstract, made.place(turns(1)[0])).compile().as_text()
        names = re.findall(r'op_name="([^"]*transpose\(jvp[^"]*)"', text)
        return made, {part for part in ("vision", "top") if any(part in name for name in names)}

    MODELS["trunk, whole"] = without(MODELS["trunk"])
    made, seen = backward("trunk")
    assert seen == {"top"}
    kept = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(made.abstract.opt_state)]
    assert any("top/stack" in path for path in kept) and not any("vision/" in p for p in kept)
    assert backward("trunk, whole")[1] == {"vision"}


@pytest.mark.long
def test_where_all_is_found_the_trunk_does_not_run():
    """From the compiled program: it is behind a condition, and the top is not."""
    made = Made("data8", "strict", (), "trunk")
    text = (
        made.step.lower(made.abstract, made.place(turns(1, model="trunk")[0])).compile().as_text()
    )
    names = re.findall(r'op_name="([^"]*)"', text)
    trunk = [name for name in names if "/vision/" in name]
    assert trunk and all("/cond/branch_1_fun/" in name for name in trunk)
    top = [name for name in names if "(top)" in name or "/top/" in name]
    assert top and not any("/cond/branch_1_fun/" in name for name in top)


def test_where_a_tower_is_cut_is_no_part_of_its_weights():
    """From a whole tower to one with a trunk, to one with another, and back: the same bits."""
    mesh = make_mesh(MESHES["data4_tensor2"], devices_of(MESHES["data4_tensor2"]))
    models = [build_model(dataclasses.replace(TINY, vision=v), mesh) for v in cuts(0, 2, 1)]
    params = models[0].init(0)
    before = {path: np.asarray(x) for path, x in params.items()}
    for old, new in itertools.pairwise((*models, models[0])):
        lies = shapes(new.base(), old.config.vision.trunk)
        assert lies.keys() == params.keys()
        for path, x in params.items():
            assert (x.shape, x.dtype) == (lies[path].shape, lies[path].dtype)
            assert x.sharding.is_equivalent_to(lies[path].sharding, x.ndim), path
        params = onto(new.base(), params, new.config.vision.trunk)
        assert {p: x.shape for p, x in params.items()} == {
            p: x.shape for p, x in new.shapes.items()
        }
    assert params.keys() == before.keys()
    for path, x in params.items():
        np.testing.assert_array_equal(np.asarray(x), before[path])


def cuts(*trunks):
    return [dataclasses.replace(TINY.vision, depth=3, trunk=n) for n in trunks]


def test_adapters_stay_above_the_trunk():
    lora = LoraConfig(rank=2, targets=("all-linear", "-decoder/*"), base="int8")
    config = dataclasses.replace(MODELS["trunk"], lora=lora)
    model = build_model(config, make_mesh(MeshConfig(1), jax.devices()[:1]))
    where = {path.split("/")[0] for path in model.shapes if is_adapter(path)}
    assert where == {"top", "connector"}
    assert any(path.startswith("vision/stack/") for path in model.packed)
    below = dataclasses.replace(config, lora=LoraConfig(rank=2, targets=("vision/*/wq",)))
    with pytest.raises(ConfigError, match="lies in a trunk"):
        build_model(below, model.mesh)


@pytest.mark.parametrize("trunk", [-1, 2, 3])
def test_a_trunk_leaves_a_block_to_train(trunk):
    vision = dataclasses.replace(TINY.vision, depth=3, feature_layer=-2, trunk=trunk)
    with pytest.raises(ConfigError, match=rf"vision\.trunk={trunk}: .* 2 of 3"):
        build_model(
            dataclasses.replace(TINY, vision=vision), make_mesh(MeshConfig(1), jax.devices()[:1])
        )


@pytest.mark.long
def test_a_trunk_on_devices_of_its_own(whole):
    """It is a batch ahead there, as a frozen tower is; the rest learns beside it."""
    params, expected = whole("trunk")
    config, trunk = MODELS["trunk"], MODELS["trunk"].vision.trunk
    tower = TowerConfig(4)
    own, devices = sides_of(tower, jax.devices())
    model = build_model(config, make_mesh(MeshConfig(4), devices))
    tx = make_optimizer(OptimConfig(clip_norm=0.0), lambda step: 1e-2, model.logical)
    made = assemble_apart(model, tower_of(model, tower, own), NextToken(), tx)
    cut = recut(params, trunk)
    state = made.init({p: jax.device_put(x, model.shardings[p]) for p, x in cut.items()})
    assert {d for p, x in state.frozen.items() for d in x.sharding.device_set} == set(own)
    batch = made.place(turns(1, False)[0]._replace(image_key=None, image_pages=None), ROWS)
    state, _ = made.build(state, batch)(state, batch)
    grads = {p: np.asarray(x) for p, x in optax.tree.get(state.opt_state, "mu").items()}
    wanted = recut(expected, trunk)
    assert_gradients_close(grads, {path: wanted[path] for path in grads})
    assert any(path.startswith("top/") for path in grads)
