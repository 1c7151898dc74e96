"""A run's weights belong to its tokens: no start reads, trains or makes up other ones unsaid."""

from __future__ import annotations

import json
import shutil

import jax
import pytest
import runs
from test_embedding_runs import scratch

import jaxvlm
from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError, LoraConfig, ModelConfig
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf import peft_folder, pretrained
from jaxvlm.trainer import run_files
from jaxvlm.trainer.callbacks import metrics
from tests.bad_input import folders, values

TEXTS = {"fruit": ("apple", "pear", "plum", "fig"), "animals": ("zebra", "yak", "wolf", "cow")}


def recipe(kind, name, folder):
    """A run on eight texts of a subject, on conversations or on pairs."""
    words = [f"{word} {size}" for word in TEXTS[name] for size in ("one", "two")]
    path = folder / f"{name}.jsonl"
    if kind == "conversations":
        turns = [[("user", f"say {w}"), ("assistant", w)] for w in words]
        rows = [{"messages": [{"role": r, "content": c} for r, c in one]} for one in turns]
    else:
        rows = [{"query": w, "positive": f"the {w}"} for w in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = runs.recipe(path) if kind == "conversations" else scratch(path)
    config.data.eval, config.data.batch_size = "", 2
    if kind == "pairs":
        config.pair_loss.temperature = 0.05
    return config


def made(config, workdir):
    return jaxvlm.Trainer(config, workdir, jax.devices()[:1])


def tokens(run):
    return run.tokenizer.backend.get_vocab(with_added_tokens=True)


def begun(run, workdir, checkpoint):
    """What a start leaves behind; ``checkpoint``: as if it had saved a step."""
    run_files.write_run_files(run, workdir)
    if checkpoint:
        (workdir / "checkpoints" / "1").mkdir(parents=True)
    return workdir


@pytest.mark.parametrize("kind", ["conversations", "pairs"])
def test_a_start_that_saved_no_weights_leaves_no_tokens(kind, tmp_path):
    workdir = begun(
        made(recipe(kind, "fruit", tmp_path), tmp_path / "run"), tmp_path / "run", False
    )
    run = made(recipe(kind, "animals", tmp_path), workdir)
    assert "zebra" in tokens(run) and "apple" not in tokens(run)
    begun(run, workdir, checkpoint=True)
    again = made(recipe(kind, "fruit", tmp_path), workdir)
    assert tokens(again) == tokens(run), "the weights' own tokens, whatever the data"
    saved = workdir / "tokenizer" / "tokenizer.json"
    before = saved.read_bytes()
    run_files.write_run_files(again, workdir)
    assert saved.read_bytes() == before


def test_a_kill_leaves_no_half_of_a_tokenizer(tmp_path, monkeypatch):
    """The folder gets its name once it is whole, also where one of an earlier start is there."""
    workdir, run = tmp_path / "run", made(recipe("pairs", "fruit", tmp_path), "")

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{")
        raise KeyboardInterrupt

    for started in (False, True):
        if started:
            run_files.write_run_files(run, workdir)
        before = files_of(workdir / "tokenizer")
        assert (before is not None) == started
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(run.tokenizer), "save", save)
            run_files.write_run_files(run, workdir)
        assert files_of(workdir / "tokenizer") == before
    run_files.write_run_files(run, workdir)
    assert files_of(workdir / "tokenizer") == before and not (workdir / "tokenizer.tmp").exists()


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()} if folder.exists() else None


def test_a_start_that_saved_no_weights_leaves_no_files_of_its_checkpoint(tmp_path, monkeypatch):
    """Another checkpoint of the hub, with other weights, has other files."""
    hub, workdir = tmp_path / "hub", tmp_path / "run"
    monkeypatch.setattr(pretrained, "_fetch", lambda name: hub / name)
    for folder, eps in ((hub / "org/a", 1e-5), (hub / "org/b", 1e-6)):
        folder.mkdir(parents=True)
        hf_config = values.replaced(folders.LLAVA, ("vision_config", "layer_norm_eps"), eps)
        (folder / "config.json").write_text(json.dumps(hf_config))
    parts = [workdir, workdir / "vision", workdir / "text"]
    for part in parts:
        shutil.copytree(hub / "org/a", part / "source")

    def found(name, part):
        tower = "" if part == workdir else part.name
        return pretrained.find(name, workdir, tower=tower).files

    assert all(found("org/b", part) == hub / "org/b" for part in parts)
    (workdir / "checkpoints" / "1").mkdir(parents=True)
    assert all(found("org/b", part) == part / "source" for part in parts), "the weights' own"
    run = made(recipe("conversations", "fruit", tmp_path), "")
    run_files.write_run_files(run, workdir)
    assert all((part / "source").is_dir() for part in parts)
    (workdir / "checkpoints" / "1").rmdir()
    run_files.write_run_files(run, workdir)
    assert not any((part / "source").exists() for part in parts)


def test_a_start_that_saved_no_weights_leaves_no_settings_of_its_adapter(tmp_path):
    adapted = LoraConfig(rank=2, alpha=8.0, checkpoint="peft")
    run_record.write_config(tmp_path, Config(model=ModelConfig(lora=adapted)), "1 x cpu")
    assert peft_folder._recorded(tmp_path, "peft") is None
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    assert peft_folder._recorded(tmp_path, "peft") == adapted


@pytest.mark.parametrize("kind", ["conversations", "pairs"])
def test_a_run_that_lost_its_tokenizer_is_refused(kind, tmp_path):
    config = recipe(kind, "fruit", tmp_path)
    workdir = begun(made(config, tmp_path / "run"), tmp_path / "run", checkpoint=True)
    shutil.rmtree(workdir / "tokenizer")
    for use in (lambda: made(config, workdir), lambda: jaxvlm.load(workdir)):
        with pytest.raises(ConfigError, match="tokenizer is missing, but its run has checkpoints"):
            use()


@pytest.mark.parametrize("kind, unknown", [("conversations", 8), ("pairs", 16)])
def test_weights_of_another_run_bring_their_tokens(kind, unknown, tmp_path):
    first = made(recipe(kind, "fruit", tmp_path), tmp_path / "first")
    begun(first, tmp_path / "first", checkpoint=True)
    config = recipe(kind, "animals", tmp_path)
    config.init_from = str(tmp_path / "first")
    run, lines = made(config, tmp_path / "second"), []
    assert tokens(run) == tokens(first)
    metrics.log_unknown(run, lines.append)
    assert len(lines) == 1 and lines[0].startswith(f"{unknown} trained tokens"), "every animal"
    metrics.log_unknown(first, lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("kind", ["conversations", "pairs"])
def test_weights_of_another_run_are_not_read_by_other_tokens(kind, tmp_path):
    begun(made(recipe(kind, "fruit", tmp_path), tmp_path / "first"), tmp_path / "first", True)
    config = recipe(kind, "animals", tmp_path)
    chat_tokenizer.build(TEXTS["animals"]).save(tmp_path / "other")
    config.init_from, config.tokenizer.path = str(tmp_path / "first"), str(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"init_from=.*first: .* tokens .* another id or none"):
        made(config, tmp_path / "second").fit()
