"""Dropout keys: one device's loss and gradients on any mesh, for any microbatches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import VOCAB, assert_gradients_close, devices_of, random_batch, recorded, train_config
from gradcache_cases import EMBEDDINGS, Softmax, mixed_pairs, pairs_of
from gradcache_cases import MESHES as PAIR_MESHES
from gradcache_cases import ROWS as PAIRS
from numerics import close
from zoo import text_and_images

from jaxvlm.config import (
    ConfigError,
    DecoderConfig,
    DualConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    StrategyConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models import lora
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.dropout import check_cached, without_frozen_dropout
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.trainer.training import build_training

ROWS, STEP = 8, 3
ONE = MeshConfig(1)
DDP = StrategyConfig(params=(), all_gathered=(), gradients=(), optimizer=())
SEEN = VisionConfig(
    image_size=16, patch_size=8, width=16, depth=1, num_heads=2, mlp_dim=16, dropout=0.1
)
VLM = ModelConfig(
    vision=SEEN,
    decoder=DecoderConfig(
        vocab_size=VOCAB, width=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=16,
        dropout=0.2,
    ),
)  # fmt: skip
LORA = LoraConfig(rank=2, alpha=2.0, dropout=0.3, targets=("*/attn/w[qo]", "*/w_out"))
TEXT = DualConfig(
    towers=("text",),
    text=TextConfig(
        vocab_size=VOCAB, width=16, num_heads=2, mlp_dim=16, norm_after=True, dropout=0.1,
        attention_dropout=0.2,
    ),
    embed_dim=16,
    project=(),
    vision=DualConfig().vision,
)  # fmt: skip


def towers_of(config, **towers):
    """``config`` with other settings of its towers."""
    made = {n: dataclasses.replace(getattr(config, n), **rates) for n, rates in towers.items()}
    return dataclasses.replace(config, **made)


def shaken(model):
    """First parameters, with adapters that do something."""
    rng = np.random.default_rng(0)

    def move(path, x):
        return 0.3 * rng.standard_normal(x.shape).astype(np.float32) if path.endswith(lora.B) else x

    drawn = {p: move(p, np.asarray(x)) for p, x in sorted(model.init(0).items())}
    return jax.device_put(drawn, model.shardings)


def stepped(
    config, mesh=ONE, strategy=DDP, parts=1, mini_batches=None, batch=None, rows=ROWS, loss=None
):
    """Loss and gradients of a step that is the run's fourth."""
    embeddings = (
        EMBEDDINGS if mini_batches is not None and isinstance(config, ModelConfig) else None
    )
    model = build_model(config, make_mesh(mesh, devices_of(mesh)), strategy, embeddings=embeddings)
    step, _, init = assemble(
        model, loss or NextToken(chunk=8), recorded(), parts, mini_batches=mini_batches, seed=5
    )
    state = init(shaken(model))
    # Placed as a state's count lies: the mesh's own.
    state = state._replace(step=state.step + STEP)
    batch = random_batch(0, rows) if batch is None else batch
    state, metrics = step(state, to_global(model.mesh, batch, rows))
    return float(metrics["loss"]), jax.device_get(state.opt_state)


def same(found, expected):
    close(found[0], expected[0], 1e-5)
    assert_gradients_close(found[1], expected[1])


@pytest.fixture(scope="module")
def whole():
    """One device, all rows at once; of the same name one answer."""
    seen = {}

    def of(name, *args, **kwargs):
        if name not in seen:
            seen[name] = stepped(*args, **kwargs)
        return seen[name]

    return of


ADAPTED = dataclasses.replace(VLM, lora=LORA)
CASES = {
    "fsdp8, full remat": (MeshConfig(1, 8), StrategyConfig(), 1, "full"),
    # One: XLA's partitioner aborts over microbatches on data x context x tensor (jaxlib 0.10.2).
    "data2_context2_tensor2": (MeshConfig(2, context=2, tensor=2), StrategyConfig(), 1, "none"),
    "stage2": (MeshConfig(1, pipeline=2), StrategyConfig(schedule="zero_bubble"), 2, "dots"),
}
"""Mesh, strategy, microbatches, remat."""


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_or_microbatches_change_no_mask(case, whole):
    """Of adapters and of both towers' streams."""
    config, (mesh, strategy, parts, remat) = ADAPTED, CASES[case]
    expected = whole("adapters", config)
    config = towers_of(config, vision={"remat": remat}, decoder={"remat": remat})
    same(stepped(config, mesh, strategy, parts), expected)


MIXED = dataclasses.replace(
    TEXT,
    towers=("vision", "text"),
    has_bias=True,
    vision=dataclasses.replace(SEEN, pool="attention"),
    lora=dataclasses.replace(LORA, targets=("*/stack/*/w[qo]",)),
)
STAGED = towers_of(ADAPTED, vision={"remat": "dots"}, decoder={"remat": "dots"})
PAIR_CASES = {
    "text, uneven": (TEXT, "one", (3, 5), DDP),
    "dual, uneven": (MIXED, "data4", (3, 5), DDP),
    "vlm, uneven": (VLM, "data2_fsdp2_tensor2", (1, 3), StrategyConfig()),
    "vlm, stages": (STAGED, "stage2", (1, 3), DDP),
}


def text_pairs():
    """Queries and documents that are texts alone."""
    made = mixed_pairs()
    return made._replace(document=made.document._replace(pixels=None, image_start=None))


def vlm_pairs():
    """Queries and documents that are texts with images."""
    query, *documents = (text_and_images(VLM, seed, packed=False) for seed in range(3))
    return pairs_of(
        query, jax.tree.map(lambda *x: np.stack(x, 1).reshape(-1, *x[0].shape[1:]), *documents)
    )


class Plain(Softmax):
    """Of a model without a scale of its own."""

    def __call__(self, out, batch):
        return super().__call__(out._replace(scale=jnp.float32(1), bias=jnp.float32(0)), batch)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.exhaustive] * (c == "vlm, uneven")) for c in PAIR_CASES],
)
def test_a_mini_batch_that_is_run_again_drops_the_same(case, whole):
    config, mesh, mini_batches, strategy = PAIR_CASES[case]
    made, loss = mixed_pairs, Softmax()
    if config is TEXT:
        made, loss = text_pairs, Plain()
    elif isinstance(config, ModelConfig):
        made = vlm_pairs
    asked = {"batch": made(), "rows": PAIRS, "loss": loss}
    expected = whole(str(config), config, mini_batches=(MiniBatch(), MiniBatch()), **asked)
    cut = tuple(MiniBatch(rows) for rows in mini_batches)
    same(
        stepped(
            config,
            {**PAIR_MESHES, "stage2": MeshConfig(1, pipeline=2)}[mesh],
            strategy,
            mini_batches=cut,
            **asked,
        ),
        expected,
    )


def test_at_zero_the_program_is_as_if_there_were_no_dropout():
    """No key is made, and one that is there is not read."""
    config = towers_of(ADAPTED, vision={"dropout": 0.0}, decoder={"dropout": 0.0})
    still = dataclasses.replace(config, lora=dataclasses.replace(config.lora, dropout=0.0))
    batch = random_batch()
    marked = batch._replace(dropout_keys=np.ones((ROWS, 2), np.uint32))
    traced = {}
    for name, of in (("off", still), ("on", ADAPTED)):
        model = build_model(of, make_mesh(ONE, devices_of(ONE)))
        step, abstract, _ = assemble(model, NextToken(chunk=8), recorded())
        shapes = model.abstract()
        plain = str(jax.make_jaxpr(model.apply)(shapes, batch))
        with_key = jax.make_jaxpr(lambda p, b, m=model: m.apply(p, b))(shapes, marked)
        traced[name] = (
            plain,
            str(with_key).count("random_bits"),
            str(step.trace(abstract, batch).jaxpr),
        )
    assert traced["off"][0] == traced["on"][0]  # without a key, as in evaluations
    assert traced["off"][1] == 0 < traced["on"][1]
    assert "random" not in traced["off"][2] and "random_bits" in traced["on"][2]


@functools.cache
def model_of(config):
    return build_model(config, make_mesh(ONE, devices_of(ONE)))


def training(model, **optim):
    name = "dual" if isinstance(model.config, DualConfig) else "model"
    config = dataclasses.replace(train_config(ONE, **optim), **{name: model.config})
    return build_training(config, model, config.steps, lambda line: None)


def test_what_is_frozen_drops_nothing():
    with pytest.raises(ConfigError, match=r"model.vision.dropout=0.1: this part is frozen, and"):
        training(model_of(VLM), frozen=("vision/*",))
    quiet = towers_of(VLM, vision={"dropout": 0.0})
    model = model_of(dataclasses.replace(quiet, lora=LORA))
    with pytest.raises(ConfigError, match=r"model.lora.dropout=0.3: no adapter is trainable; set"):
        without_frozen_dropout(model, ["connector/w_in"])
    own = [p for p in model.shapes if lora.is_adapter(p) and not p.startswith("vision/")]
    found, is_on = without_frozen_dropout(model, own)
    assert (
        is_on
        and found.has_dropout
        == {p for p in model.has_dropout if not p.startswith("vision/")}
        != set()
    )
    with pytest.raises(ConfigError, match=r"vision.dropout=0.1 in a vision encoder whose tok"):
        check_cached(model_of(VLM))
    with pytest.raises(ConfigError, match=r"lora.dropout=0.3 in a vision encoder whose tok"):
        check_cached(model)
    check_cached(found)


@pytest.mark.parametrize(
    "config, says",
    [
        (
            towers_of(VLM, decoder={"dropout": 1.0}),
            "model.decoder.dropout=1: a dropout rate is at least 0",
        ),
        (
            towers_of(VLM, vision={"dropout": -1.0}),
            "model.vision.dropout=-1: a dropout rate is at least 0",
        ),
        (
            towers_of(TEXT, text={"attention_dropout": 2.0}),
            "text.attention_dropout=2: a dropout rate",
        ),
        (dataclasses.replace(VLM, lora=LoraConfig(dropout=0.1)), "lora.dropout is set, but"),
        (
            dataclasses.replace(VLM, lora=LoraConfig(2, dropout=1.5)),
            "lora.dropout=1.5: a dropout rate",
        ),
        (towers_of(TEXT, vision={"dropout": 0.1}), "vision is set, but config.dual.towers="),
    ],
)
def test_what_is_no_share_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        model_of(config)
