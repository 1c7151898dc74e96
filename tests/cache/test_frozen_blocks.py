"""An encoder with frozen first blocks: the others train as they would in the whole encoder."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import numpy as np
import optax
import pytest
from builders import ROWS, TINY, assert_gradients_close, devices_of
from test_encode import MESHES, MODELS, Made, turns
from zoo import on_stages

from jaxvlm.config import ConfigError, EncoderConfig, LoraConfig, MeshConfig, OptimConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.frozen_blocks import onto, recut, shapes
from jaxvlm.models.lora import is_adapter
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.disaggregated_encoder import (
    assemble_disaggregated,
    divide_devices,
    encoder_on_devices,
)
from jaxvlm.spmd.model import build_model


def without(config):
    """The same model without a split."""
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, frozen_blocks=0))


def moments(made, params, batch):
    """Parameters' gradients of one step, a tenth of them."""
    params = {path: jax.device_put(x, made.model.shardings[path]) for path, x in params.items()}
    state, _ = made.step(made.init(params), made.place(batch))
    return {p: np.asarray(x) for p, x in optax.tree.get(state.opt_state, "mu").items()}


@pytest.fixture(scope="module")
def whole():
    """kind -> initial parameters of the unsplit encoder, and its gradients, on one device."""
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
        ("frozen", "data4_tensor2", "strict"),
        ("frozen", "fsdp8", ""),
        ("frozen_deep", "data8", "strict"),
        ("frozen_deep", "one", ""),
        ("frozen_qwen", "one", ""),
        ("frozen_qwen", "fsdp8", "strict"),
        ("frozen_staged", "data4_stage2", "strict"),
        ("frozen_staged", "data4_stage2", ""),
    ],
)
@pytest.mark.long
def test_gradients_are_those_of_the_whole_tower(whole, kind, mesh, policy):
    """Of one device and no cache."""
    MODELS["frozen_staged"] = on_stages(MODELS["frozen"])
    params, expected = whole(kind)
    frozen = MODELS[kind].vision.frozen_blocks
    parts = 2 if "pipeline" in mesh else 1
    made = Made(mesh, policy, (), kind, clip=0.0, parts=parts, encode_batch=2)
    grads = moments(made, recut(params, frozen), turns(1, model=kind)[0])
    assert not any(path.startswith("vision/") for path in grads)
    assert any(np.any(x) for path, x in grads.items() if path.startswith("vision_top/stack/"))
    wanted = recut(expected, frozen)
    assert_gradients_close(grads, {path: wanted[path] for path in grads})


def test_frozen_blocks_cost_no_backward_pass_and_no_moments():
    """Without a cache too, from the compiled programs; the whole encoder does have them."""

    def backward(kind):
        made = Made("one", "", (), kind)
        text = made.step.lower(made.abstract, made.place(turns(1)[0])).compile().as_text()
        names = re.findall(r'op_name="([^"]*transpose\(jvp[^"]*)"', text)
        scopes = {scope for name in names for scope in re.findall(r"\w+", name)}
        return made, scopes & {"vision", "vision_top"}

    MODELS["frozen, whole"] = without(MODELS["frozen"])
    made, seen = backward("frozen")
    assert seen == {"vision_top"}
    kept = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(made.abstract.opt_state)]
    assert any("vision_top/stack" in path for path in kept) and not any(
        "vision/" in p for p in kept
    )
    assert backward("frozen, whole")[1] == {"vision"}


@pytest.mark.long
def test_where_all_is_found_the_frozen_blocks_do_not_run():
    """From the compiled program: frozen blocks are inside a conditional, the upper ones are not."""
    made = Made("data8", "strict", (), "frozen")
    text = (
        made.step.lower(made.abstract, made.place(turns(1, model="frozen")[0])).compile().as_text()
    )
    names = re.findall(r'op_name="([^"]*)"', text)
    frozen = [name for name in names if "/vision/" in name]
    assert frozen and all("/cond/branch_1_fun/" in name for name in frozen)
    top = [name for name in names if "(vision_top)" in name or "/vision_top/" in name]
    assert top and not any("/cond/branch_1_fun/" in name for name in top)


def test_where_a_tower_is_cut_is_no_part_of_its_weights():
    """From an unsplit encoder to one split, to another split, and back: the same bits."""
    mesh = make_mesh(MESHES["data4_tensor2"], devices_of(MESHES["data4_tensor2"]))
    models = [build_model(dataclasses.replace(TINY, vision=v), mesh) for v in cuts(0, 2, 1)]
    params = models[0].init(0)
    before = {path: np.asarray(x) for path, x in params.items()}
    for old, new in itertools.pairwise((*models, models[0])):
        lies = shapes(new.base(), old.config.vision.frozen_blocks)
        assert lies.keys() == params.keys()
        for path, x in params.items():
            assert (x.shape, x.dtype) == (lies[path].shape, lies[path].dtype)
            assert x.sharding.is_equivalent_to(lies[path].sharding, x.ndim), path
        params = onto(new.base(), params, new.config.vision.frozen_blocks)
        assert {p: x.shape for p, x in params.items()} == {
            p: x.shape for p, x in new.shapes.items()
        }
    assert params.keys() == before.keys()
    for path, x in params.items():
        np.testing.assert_array_equal(np.asarray(x), before[path])


def cuts(*counts):
    return [dataclasses.replace(TINY.vision, depth=3, frozen_blocks=n) for n in counts]


def test_adapters_stay_above_frozen_blocks():
    lora = LoraConfig(rank=2, targets=("all-linear", "-decoder/*"), base="int8")
    config = dataclasses.replace(MODELS["frozen"], lora=lora)
    model = build_model(config, make_mesh(MeshConfig(1), jax.devices()[:1]))
    where = {path.split("/")[0] for path in model.shapes if is_adapter(path)}
    assert where == {"vision_top", "connector"}
    assert any(path.startswith("vision/stack/") for path in model.packed)
    below = dataclasses.replace(config, lora=LoraConfig(rank=2, targets=("vision/*/wq",)))
    with pytest.raises(ConfigError, match="frozen blocks take no adapter"):
        build_model(below, model.mesh)


@pytest.mark.parametrize("frozen", [-1, 2, 3])
def test_frozen_blocks_leave_a_block_to_train(frozen):
    vision = dataclasses.replace(TINY.vision, depth=3, feature_layer=-2, frozen_blocks=frozen)
    with pytest.raises(ConfigError, match=rf"vision\.frozen_blocks={frozen} .* 2 of 3"):
        build_model(
            dataclasses.replace(TINY, vision=vision), make_mesh(MeshConfig(1), jax.devices()[:1])
        )


@pytest.mark.long
def test_frozen_blocks_on_devices_of_its_own(whole):
    """They run a batch ahead, as a frozen encoder does, while the rest is trained."""
    params, expected = whole("frozen")
    config, frozen = MODELS["frozen"], MODELS["frozen"].vision.frozen_blocks
    tower = EncoderConfig(4)
    own, devices = divide_devices(tower, jax.devices())
    model = build_model(config, make_mesh(MeshConfig(4), devices))
    tx = make_optimizer(OptimConfig(max_grad_norm=0.0), lambda step: 1e-2, model.logical)
    made = assemble_disaggregated(model, encoder_on_devices(model, tower, own), NextToken(), tx)
    cut = recut(params, frozen)
    state = made.init({p: jax.device_put(x, model.shardings[p]) for p, x in cut.items()})
    assert {d for p, x in state.frozen.items() for d in x.sharding.device_set} == set(own)
    batch = made.place(turns(1, False)[0]._replace(image_key=None, image_pages=None), ROWS)
    state, _ = made.build(state, batch)(state, batch)
    grads = {p: np.asarray(x) for p, x in optax.tree.get(state.opt_state, "mu").items()}
    wanted = recut(expected, frozen)
    assert_gradients_close(grads, {path: wanted[path] for path in grads})
    assert any(path.startswith("vision_top/") for path in grads)
