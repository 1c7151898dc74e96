"""Runs that train embeddings: from scratch and from checkpoints, resumed, evaluated, used."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError, default_config, from_config_dict
from jaxvlm.data.errors import DataError
from jaxvlm.inference import embedding_evaluator
from jaxvlm.trainer import embedding_run

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def scratch(path, encoder="dual"):
    config = default_config()
    config.loss.name, config.embedder = "info_nce", encoder
    config.data.train = config.data.eval = str(path)
    config.data.batch_size, config.data.max_length, config.data.buckets = 8, 32, 1
    config.optim.warmup_steps, config.optim.learning_rate = 2, 3e-3
    config.steps, config.log_every, config.checkpoint.every = 6, 1, 3
    config.tensorboard = False
    if encoder == "dual":
        config.dual.embed_dim = 16
        vision, text = config.dual.vision, config.dual.text
        text.width, text.depth, text.num_heads, text.mlp_dim, text.max_length = 16, 1, 2, 32, 16
        config.pair_loss.temperature = 0.0
    else:
        vision, decoder = config.model.vision, config.model.decoder
        decoder.width, decoder.depth, decoder.mlp_dim = 16, 1, 32
        decoder.num_heads, decoder.num_kv_heads, decoder.head_dim = 2, 2, 8
        config.pair_loss.matryoshka_dims = (8, 16)
    vision.image_size, vision.patch_size = 16, 8
    vision.width, vision.depth, vision.num_heads, vision.mlp_dim = 16, 1, 2, 32
    return config


def steps_of(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


@pytest.fixture(scope="module")
def trained(captions, tmp_path_factory):
    """A run of a dual encoder, and its result."""
    config = scratch(captions)
    config.grad_cache.query_mini_batch, config.grad_cache.document_mini_batch = 2, 3
    config.pair_loss.precisions = ("float32", "binary")
    workdir = tmp_path_factory.mktemp("run")
    return workdir, jaxvlm.Trainer(config, workdir, jax.devices()[:1]).fit()


def test_a_dual_encoder_from_scratch_is_trained_and_used(captions, trained, capsys):
    workdir, result = trained
    losses = steps_of(workdir)
    assert list(losses) == list(range(1, 7)) and losses[6] < losses[1]
    assert result["recall@10"] > result["random/recall@10"] and result["reverse/recall@1"] > 0
    assert result["binary/recall@10"] > result["random/recall@10"] < result["reverse/binary/hit@10"]
    model = jaxvlm.load(workdir)
    texts = model.encode_text(["a red image", "a blue image"])
    images = model.encode_image([str(captions.parent / f"{i}.png") for i in range(3)])
    assert texts.shape == (2, 16) and images.shape == (3, 16)
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1, atol=1e-5)
    with Image.open(workdir / "predictions.png") as grid:
        assert grid.size == (6 * 190 + 8, 12 * 212 + 8)
    again = workdir / "again.png"
    seen = embedding_evaluator.evaluate(model, prediction_grid=str(again)).metrics
    assert again.is_file()
    assert seen["recall@10"] == pytest.approx(result["recall@10"])
    assert cli(["generate", f"--checkpoint={workdir}", "--prompt=x"]) == 2
    assert "computes embeddings" in capsys.readouterr().err
    assert cli(["eval", f"--checkpoint={workdir}", "--dims=8"]) == 2
    assert "--retrieval" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_starts_from_another_runs_vision_encoder(captions, trained, tmp_path):
    """The weights are unchanged; once begun, the run no longer needs the other one."""
    config, first = scratch(captions), tmp_path / "first"
    shutil.copytree(trained[0], first)
    config.dual.vision_checkpoint, config.optim.frozen = str(first), ("vision/*",)
    defaults = default_config().dual.vision
    for name in ("image_size", "patch_size", "width", "depth", "num_heads", "mlp_dim"):
        config.dual.vision[name] = defaults[name]  # the run says
    config.steps, config.seed, config.optim.warmup_steps = 2, 3, 0
    made = jaxvlm.Trainer(config, tmp_path / "second", jax.devices()[:1])
    assert made.config.dual.vision.width == 16
    made.fit()
    source = jaxvlm.load(first, which="latest").params
    for path, x in made.state.frozen.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(source[path]))
    assert made.state.frozen
    shutil.rmtree(first)
    model, seen = jaxvlm.load(tmp_path / "second"), [str(captions.parent / "0.png")]
    np.testing.assert_allclose(model.encode_image(seen), made.loaded().encode_image(seen))
    config.dual.text_checkpoint, config.dual.vision_checkpoint = str(trained[0]), ""
    with pytest.raises(ConfigError, match=r"is a run; use config\.init_from"):
        jaxvlm.Trainer(config, tmp_path / "third", jax.devices()[:1])
    config.dual.vision_checkpoint, config.dual.text_checkpoint = str(trained[0]), ""
    config.dual.vision.width = 32
    with pytest.raises(ConfigError, match="width=32, but the checkpoint says 16"):
        jaxvlm.Trainer(config, tmp_path / "third", jax.devices()[:1])


def test_data_check_says_what_a_run_refuses(captions, tmp_path):
    lines = captions.read_text().splitlines()[:9]
    (captions.parent / "cut.png").write_bytes((captions.parent / "0.png").read_bytes()[:-60])
    lines += ['{"query": "a", "id": "x"}', '{"query_image": "cut.png", "positive": "b"}']
    path = captions.parent / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    report = embedding_run.validate_file(from_config_dict(scratch(captions)), str(path))
    assert (report.total, report.good) == (11, 9) and report.images == 9
    assert sum(map(len, report.problems.values())) == 2 and ["x"] in report.problems.values()


def test_a_dry_run_shows_pairs(captions, capsys):
    config = scratch(captions)
    config.grad_cache.query_mini_batch, config.grad_cache.document_mini_batch = 2, 3
    seen = jaxvlm.Trainer(config, devices=jax.devices()[:1]).dry_run()
    said = capsys.readouterr().out
    assert (
        "shard's 8 queries in 4 mini-batches; a data shard's 16 documents and 2 of padding in 6"
        in said
    )
    assert "positive a " in said and "negative a " in said and "label " in said
    assert seen["tokens"] > 0 and seen["memory"]["peak"] > 0


@pytest.mark.long
def test_another_mini_batch_mesh_and_a_resume_give_the_same_run(captions, trained, tmp_path):
    config = scratch(captions)
    config.mesh.update(MESH)
    config.pair_loss.precisions = ("float32", "binary")
    config.optim.schedule = "constant"
    whole, half = tmp_path / "whole", tmp_path / "half"
    jaxvlm.Trainer(config, whole).fit()
    config.steps = 3
    jaxvlm.Trainer(config, half).fit()
    config.steps, config.grad_cache.max_tokens = 6, 16
    jaxvlm.Trainer(config, half).fit()
    losses, same = steps_of(half), steps_of(whole)
    assert list(losses) == list(range(1, 7))
    assert losses[1] == pytest.approx(steps_of(trained[0])[1], rel=1e-5)
    np.testing.assert_allclose(list(losses.values()), list(same.values()), rtol=1e-4)


def embedder(captions):
    config = scratch(captions, "vlm")
    config.model.decoder.depth, config.grad_cache.document_mini_batch = 2, 3
    return config


@pytest.fixture(scope="module")
def embeds(captions, tmp_path_factory):
    """A run of a vision-language model, and its result."""
    workdir = tmp_path_factory.mktemp("embeds")
    return workdir, jaxvlm.Trainer(embedder(captions), workdir, jax.devices()[:1]).fit()


@pytest.mark.long
def test_a_vision_language_model_is_trained_to_embed(captions, embeds):
    workdir, result = embeds
    assert {"recall@1", "dims8/recall@1", "reverse/recall@1"} <= result.keys()
    model = jaxvlm.load(workdir)
    found = model.embed([([], "a red image"), ([str(captions.parent / "0.png")], "")], "", 8)
    assert found.shape == (2, 8)
    with pytest.raises(ConfigError, match="trained for embeddings"):
        model.generate([], "a red image")
    seen = embedding_evaluator.evaluate(model).metrics
    assert seen["dims8/recall@10"] == pytest.approx(result["dims8/recall@10"])


@pytest.mark.long
def test_a_run_on_a_pipeline_is_the_same_run(captions, embeds, tmp_path, capsys):
    config = embedder(captions)
    config.mesh.data, config.mesh.pipeline, config.grad_cache.query_mini_batch = 1, 2, 2
    config.model.vision.remat = config.model.decoder.remat = "dots"
    config.eval_every = 3
    run = jaxvlm.Trainer(config, tmp_path / "run", jax.devices()[:2])
    assert run.dry_run()["memory"]["peak"] > 0
    said = capsys.readouterr().out
    assert "8 queries in 4 mini-batches, pipeline 1f1b: 2 stages, 4 microbatches at once" in said
    assert "2 of padding in 6 mini-batches" in said and "stages are busy 86%" in said
    result = run.fit()
    losses, same = (list(steps_of(folder).values()) for folder in (tmp_path / "run", embeds[0]))
    np.testing.assert_allclose(losses, same, rtol=1e-4)
    text = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, text) if "eval/recall@1" in row] == [3, 6]
    for name in ("recall@10", "mrr@10", "dims8/recall@10", "reverse/recall@10"):
        assert result[name] == pytest.approx(embeds[1][name], abs=1e-3)
    seen = embedding_evaluator.evaluate(jaxvlm.load(tmp_path / "run")).metrics
    assert seen["recall@10"] == pytest.approx(result["recall@10"], abs=1e-3)


def test_a_dual_encoder_has_no_stages(captions):
    config = scratch(captions)
    config.mesh.pipeline = 2
    with pytest.raises(ConfigError, match="none; put these devices on"):
        jaxvlm.Trainer(config, devices=jax.devices()[:2])


@pytest.mark.parametrize(
    "setting, value, says",
    [
        ("embedder", "tower", "known: vlm, dual"),
        ("microbatches", 2, "set config.grad_cache.query_mini_batch"),
        ("eval_records", 5, "searched whole"),
        ("loss_chunk", 5, "config.pair_loss.tile_size"),
        ("moe_aux_loss_weight", 0.1, "router"),
        ("embedding.dim", 8, "not read with config.embedder='dual'"),
        ("pair_loss.teacher_temperature", 2.0, "not read by config.loss.name='info_nce'"),
        ("pair_loss.matryoshka_weights", (1.0,), "without config.pair_loss.matryoshka_dims"),
        ("pair_loss.matryoshka_dims", (8, 99), "99 is more than the embeddings' width of 16"),
        ("pair_loss.directions", ("document_to_query",), "has the positives; add it"),
        ("pair_loss.precisions", ("int4",), "config.pair_loss.precisions='int4'; known: float32"),
        (
            "dual.vision.frozen_blocks",
            1,
            "config.dual.vision.frozen_blocks=1 works for vision-language models only",
        ),
        ("grad_cache.max_tokens", -1, "at least 0"),
        ("cache.policy", "strict", "not on the devices"),
        ("checkpoint.metric", "exact_match", "is not evaluated; known: hit@1"),
        ("dual.text_checkpoint", "nowhere", "no such folder"),
        ("data.batch_size", 64, "fewer than data.batch_size=64"),
    ],
)
def test_bad_settings_are_one_line(setting, value, says, captions, tmp_path):
    config = scratch(captions)
    *groups, name = setting.split(".")
    group = config
    for part in groups:
        group = group[part]
    group[name] = value
    with pytest.raises((ConfigError, DataError), match=says):
        jaxvlm.Trainer(config, tmp_path / "run", jax.devices()[:1]).fit()
