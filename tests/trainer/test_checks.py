"""Settings that are named and would have no effect are refused, or said not to be read."""

from __future__ import annotations

import dataclasses
import logging
import re

import jax
import pytest
import runs

import jaxvlm
from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    DecoderConfig,
    DualConfig,
    EmbeddingConfig,
    LossConfig,
    ModelConfig,
    PairLossConfig,
    TokenizerConfig,
    VisionConfig,
)
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf import run_processor
from jaxvlm.losses.registry import make_loss
from jaxvlm.parallel.distributed import processes
from jaxvlm.trainer import checks, embedding_run
from jaxvlm.trainer.training import total_steps

WIDE = ModelConfig(decoder=DecoderConfig(width=32))
NOISY = DualConfig(vision=VisionConfig(pool="attention", dropout=0.1))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"embedder": "dual", "model": WIDE}, "config.model.decoder.width=32 is not read with"),
        ({"dual": NOISY}, "config.dual.vision.dropout=0.1 is not read with config.embedder='vlm'"),
    ],
)
def test_settings_of_another_model_are_refused(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        embedding_run.prepare_pairs(Config(loss=LossConfig(name="info_nce"), **settings), None)


@pytest.mark.parametrize(
    ("loss", "pair_loss", "reads"),
    [
        ("info_nce", {}, ""),
        ("info_nce", {"temperature": 0.0}, "learn_scale"),
        ("sigmoid", {}, "learn_scale learn_bias"),
        ("triplet", {"margin": 0.1}, ""),
        ("cosine", {}, ""),
        ("cosent", {}, ""),
        ("distill", {}, ""),
    ],
)
@pytest.mark.parametrize("field", ["learn_scale", "learn_bias"])
def test_a_scale_that_no_loss_reads_is_refused(loss, pair_loss, reads, field):
    config = Config(
        loss=LossConfig(name=loss),
        pair_loss=PairLossConfig(**pair_loss),
        embedding=EmbeddingConfig(**{field: True}),
    )
    if field in reads:
        make_loss(config)
        return
    with pytest.raises(ConfigError, match=f"config.embedding.{field}=True is not read by config.l"):
        make_loss(config)


def test_a_limit_of_a_scale_that_is_not_learned_is_refused():
    pair_loss = PairLossConfig(max_scale=50.0)
    with pytest.raises(ConfigError, match=r"max_scale=50.0 is not read with temperature=0.05"):
        make_loss(Config(loss=LossConfig(name="info_nce"), pair_loss=pair_loss))


@pytest.mark.parametrize(
    ("window", "steps", "traces"),
    [
        ((0, 0), 5, True),
        ((2, 4), 5, True),
        ((5, 9), 5, True),
        ((6, 9), 5, False),
        ((4, 4), 5, False),
        ((4, 2), 5, False),
        ((0, 1), 5, False),
    ],
)
def test_a_profiler_that_traces_no_step_is_refused(window, steps, traces):
    config = Config(steps=steps, profile_steps=window)
    if traces:
        assert total_steps(config, lambda: 1) == steps
        return
    with pytest.raises(
        ConfigError, match=r"config.profile_steps=\(\d, \d\) traces no step: steps 1"
    ):
        total_steps(config, lambda: 1)


@pytest.mark.long
def test_steps_before_a_resume_are_said_not_to_be_traced(tmp_path, capfd):
    config = runs.recipe(runs.write_data(tmp_path))
    config.profile_steps, config.data.eval, config.optim.warmup_steps = (2, 3), "", 0
    for config.steps in (2, 3):
        jaxvlm.Trainer(config, tmp_path / "run", jax.devices()[:1]).fit()
    assert "config.profile_steps=(2, 3) traces no step: steps 3 to 3" in "".join(capfd.readouterr())
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1


@pytest.mark.parametrize("given", ["path", "init_from"])
def test_settings_of_a_tokenizer_that_is_not_built_are_said_not_to_be_read(given, tmp_path, caplog):
    folder = tmp_path / "tokenizer"
    chat_tokenizer.build(["a red one"], "word", 64).save(folder)
    caplog.set_level(logging.INFO, logger="jaxvlm")
    settings = TokenizerConfig(str(folder) if given == "path" else "", "bpe", 300)
    config = Config(tokenizer=settings, init_from=str(tmp_path) if given != "path" else "")
    made = run_processor.make_tokenizer(config, None, tuple)
    assert made.vocab_size < 64
    for setting in ("kind='bpe'", "vocab_size=300"):
        assert f"config.tokenizer.{setting} is not read: {folder} has a tokenizer" in caplog.text
    caplog.clear()
    plain = dataclasses.replace(
        config, tokenizer=dataclasses.replace(settings, kind="word", vocab_size=8192)
    )
    run_processor.make_tokenizer(plain, None, tuple)
    assert not caplog.text


def test_a_named_folder_of_compiled_programs_that_can_not_be_made_is_refused(tmp_path, monkeypatch):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    try:
        with pytest.raises(ConfigError, match=r"compile_cache=.*file/programs: Not a directory"):
            processes.use_compile_cache(str(tmp_path / "file" / "programs"))
        processes.use_compile_cache("auto")  # slower, not wrong
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_what_is_not_read_is_refused_before_the_data():
    for data, says in (
        (DataConfig("gone.jsonl", buckets=2), "buckets=2 is not read without packing=False"),
        (DataConfig("gone.jsonl"), "eval_records=3 is not read without config.data.eval"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            checks.checked(Config(data=data, eval_records=3), "")


def test_settings_of_a_record_are_those_of_its_run():
    """The default metric is filled in before a run is recorded, also without evaluation data."""
    recorded = checks.checked(Config(data=DataConfig("gone.jsonl")), "")
    assert recorded.checkpoint.metric == "exact_match" and checks.checked(recorded, "") == recorded
