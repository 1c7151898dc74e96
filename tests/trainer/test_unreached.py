"""Parameters that no record of the data, or nothing in the loss, reaches keep their bits."""

from __future__ import annotations

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import zoo
from builders import TINY, random_batch
from pair_data import dataset, text_collator

import jaxvlm
from jaxvlm.checkpoint.checkpointer import restore_params
from jaxvlm.config import (
    Config,
    ConfigError,
    DualConfig,
    EmbeddingConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    OptimConfig,
)
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.trainer import training
from jaxvlm.trainer.unreached import freeze_unreached

TEXT, BOTH = {"text"}, {"text", "vision"}
FROZEN_BLOCKS = dataclasses.replace(TINY, vision=dataclasses.replace(TINY.vision, frozen_blocks=1))
LORA = LoraConfig(rank=2, targets=("vision/*", "decoder/stack/*"))


def frozen(network, modalities, **optim):
    """The optimizer's settings of a run whose data have these modalities."""
    is_dual = isinstance(network, DualConfig)
    config = Config(
        **{"dual" if is_dual else "model": network, "embedder": "dual" if is_dual else "vlm"},
        optim=OptimConfig(**optim),
    )
    model = build_model(network, make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1]))
    data = types.SimpleNamespace(modalities=modalities, name="x.jsonl")
    return freeze_unreached(config, model, data).optim


@pytest.mark.parametrize(
    ("network", "modalities", "given", "patterns"),
    [
        (TINY, TEXT, (), ("vision/*", "connector/*")),
        (TINY, TEXT, ("vision/*",), ("vision/*", "connector/*")),
        (TINY, TEXT, ("vision/*", "connector/*"), ("vision/*", "connector/*")),
        (TINY, BOTH, ("connector/*",), ("connector/*",)),
        (FROZEN_BLOCKS, TEXT, (), ("vision_top/*", "connector/*")),
        (dataclasses.replace(TINY, lora=LORA), TEXT, (), ("vision/*",)),
        (zoo.DUAL, TEXT, (), ("vision/*", "head/vision*")),
        (zoo.DUAL, TEXT, ("vision/*",), ("vision/*", "head/vision*")),
        (zoo.DUAL, {"vision"}, (), ("text/*", "head/text*")),
        (zoo.DUAL, BOTH, (), ()),
    ],
)
def test_towers_without_an_input_are_frozen(network, modalities, given, patterns):
    assert frozen(network, modalities, frozen=given).frozen == patterns


def test_patterns_of_frozen_parameters_alone_are_left_out(capsys):
    optim = frozen(
        TINY,
        TEXT,
        lr_multipliers=(("vision/*", 0.1), ("*/norm/*", 0.5)),
        decay=("vision/position", "decoder/embed/*"),
        no_decay=("connector/*",),
    )
    assert optim.lr_multipliers == (("*/norm/*", 0.5),)
    assert optim.decay == ("decoder/embed/*",) and optim.no_decay == ()
    line = capsys.readouterr().out
    assert "no record has an image, so vision/*, connector/* (" in line and line.count("\n") == 1


def test_nothing_left_to_train_is_refused():
    with pytest.raises(ConfigError, match=r"no record has an image, and .* leave nothing else"):
        frozen(TINY, TEXT, frozen=("decoder/*",))


def test_what_pairs_hold():
    def held(*items):
        examples = [Example(f"e{i}", *items) for i in range(8)]
        return dataset(examples, text_collator(), batch_sampler="random").modalities

    assert held(Item("w1"), Item("w2")) == TEXT


def without_images(folder):
    lines = [
        {"messages": [{"role": r, "content": f"{r} {i % 3}"} for r in ("user", "assistant")]}
        for i in range(20)
    ]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_on_texts_keeps_the_vision_encoders_bits(tmp_path, capsys):
    config = runs.recipe(without_images(tmp_path))
    config.optim.weight_decay, config.optim.warmup_steps = 0.1, 0
    for steps in (2, 3):  # a run, and its resume
        config.steps = steps
        run = jaxvlm.Trainer(config, tmp_path / "run")
        assert run.fit()["step"] == steps
        said = capsys.readouterr()
        assert said.out.count("no record has an image") == 1
    assert "changed since this run began: config.optim" not in said.out + said.err
    after = restore_params(tmp_path / "run" / "checkpoints", run.model.abstract(), "latest")
    for path, before in run.model.init(run.config.seed).items():
        same = np.array_equal(np.asarray(before), np.asarray(after[path]))
        assert same == path.startswith(("vision/", "connector/")), path


EMBEDDER = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, feature_layer=-2),
    decoder=dataclasses.replace(TINY.decoder, tied_embeddings=False),
)
POOLER = dataclasses.replace(
    zoo.DUAL,
    towers=("text",),
    vision=DualConfig().vision,
    has_bias=False,
    project=("text",),
    text=dataclasses.replace(zoo.DUAL.text, pooler=True, pool="mean"),
)


def test_what_pairs_do_not_read_of_a_vision_language_model():
    config = Config(model=EMBEDDER, loss=LossConfig(name="info_nce"))
    assert training._used_layers(config) == {"vision/stack/*": 1, "decoder/embed/out*": 0}
    assert training._used_layers(Config(model=EMBEDDER)) == {"vision/stack/*": 1}


@pytest.mark.parametrize(
    "network",
    [pytest.param(EMBEDDER, marks=pytest.mark.long), POOLER],
    ids=["output_matrix", "pooler"],
)
def test_weight_decay_leaves_what_no_loss_reads(network):
    """Of a run on pairs: where a gradient is zero whatever the batch, so is the update."""
    is_dual = isinstance(network, DualConfig)
    settings = {"dual": network, "embedder": "dual"} if is_dual else {"model": network}
    config = Config(
        **settings, loss=LossConfig(name="info_nce"), optim=OptimConfig(weight_decay=0.1)
    )
    place = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    embeddings = None if is_dual else EmbeddingConfig(pool="last")
    model = build_model(network, place, embeddings=embeddings)
    batch = random_batch(rows=2)
    batch = batch._replace(parent=None, segment=(batch.segment > 0).astype(np.int32))
    batch = jax.tree.map(jnp.asarray, batch)
    batch = batch._replace(pixels=None, image_start=None) if is_dual else batch
    params = model.init(0)

    def objective(params):
        return jnp.sum(model.module(params, None).embed(batch).hidden ** 3)

    grads = jax.jit(jax.grad(objective))(params)
    tx = make_optimizer(
        config.optim, lambda step: 0.1, model.logical, training._used_layers(config)
    )
    updates = tx.update(grads, tx.init(params), params, global_norm=jnp.float32(1))[0]
    unread = {path for path, g in grads.items() if not np.any(np.asarray(g))}
    matrices = {"text/w_pool"} if is_dual else {"decoder/embed/out"}
    assert matrices <= unread
    for path in unread:
        assert not np.any(np.asarray(updates[path])), path
    if not is_dual:  # the vision encoder's last layer is not run
        wq = "vision/stack/blocks/attn/wq"
        assert np.any(np.asarray(updates[wq][0])) and not np.any(np.asarray(updates[wq][1]))
