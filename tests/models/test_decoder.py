"""All variants of the decoder at once: on a mesh, with remat, with each method of a runner."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import MESHES, ROWS, TINY, assert_gradients_close, devices_of, random_batch

from jaxvlm.config import Config, RopeScaling, from_config_dict, to_config_dict
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.train.grad_accum import PlainRunner, scales, total

EVERYTHING = dataclasses.replace(
    TINY.decoder,
    depth=3,
    rope_scaling=RopeScaling("dynamic", 2.0, 12),
    norm="rms_plus_one",
    qk_norm=True,
    post_norms=True,
    qkv_bias=True,
    out_bias=True,
    query_scale=0.3,
    attention_cap=5.0,
    logit_cap=8.0,
    embed_scale=2.0,
    window=6,
    window_pattern=(True, True, False),
    local_rope_theta=100.0,
    num_experts=4,
    experts_per_token=2,
)


def test_settings_survive_the_command_lines_form():
    config = Config(model=dataclasses.replace(TINY, decoder=EVERYTHING))
    assert from_config_dict(to_config_dict(config)) == config
    assert from_config_dict(json.loads(to_config_dict(config).to_json())) == config


def loss_and_gradients(mesh="one", remat="none"):
    decoder = dataclasses.replace(EVERYTHING, remat=remat)
    place = make_mesh(MESHES[mesh], devices_of(MESHES[mesh]))
    model = build_model(dataclasses.replace(TINY, decoder=decoder), place)
    batch = to_global(place, random_batch(), ROWS)
    runner, loss = PlainRunner(model.apply), NextToken(moe_aux_weight=0.1)

    def run(params, batch):
        scale = scales(loss, batch)
        sums, grads = runner.loss_grad(params, {}, batch, loss, scale)
        return total(sums, scale), grads

    value, grads = jax.jit(run, out_shardings=(None, model.shardings))(model.init(0), batch)
    return float(value), decoders(jax.device_get(grads))


def decoders(grads):
    """The decoder's leaves: a ViT's key bias has no gradient but rounding's."""
    return {path: g for path, g in grads.items() if path.startswith("decoder")}


@pytest.fixture(scope="module")
def reference():
    return loss_and_gradients()


@pytest.mark.parametrize(
    ("mesh", "remat"),
    [
        pytest.param("data2_fsdp2_tensor2", "none", marks=pytest.mark.long),
        pytest.param("one", "dots", marks=pytest.mark.long),
        ("one", "full"),
    ],
)
def test_neither_mesh_nor_remat_changes_loss_or_gradients(mesh, remat, reference):
    value, grads = loss_and_gradients(mesh, remat)
    np.testing.assert_allclose(value, reference[0], rtol=1e-5)
    assert_gradients_close(grads, reference[1])
    assert all(np.any(g) for g in grads.values())


@pytest.mark.long
def test_a_cotangent_of_every_output_goes_back():
    """``vjp`` of what the forward pass gives, the soft cap and the router's terms included."""
    place = make_mesh(MESHES["one"], devices_of(MESHES["one"]))
    model = build_model(dataclasses.replace(TINY, decoder=EVERYTHING), place)
    params, batch = model.init(0), jax.tree.map(jnp.asarray, random_batch())
    runner, loss = PlainRunner(model.apply), NextToken(moe_aux_weight=0.1)
    scale = scales(loss, batch)

    def back(params, batch):
        out = runner.fwd(params, {}, batch)
        d_out = jax.grad(lambda out: total(loss(out, batch), scale))(out)
        whole = runner.loss_grad(params, {}, batch, loss, scale)[1]
        return runner.vjp(params, {}, batch, d_out), whole

    grads, expected = jax.jit(back)(params, batch)
    assert_gradients_close(decoders(grads), decoders(expected))
