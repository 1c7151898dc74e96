"""Runs that train the blocks above frozen ones: checkpoints in and out, a store of tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from checkpoints import write_llava
from numerics import close, close_in_norm
from runs import losses, recipe
from test_cache import assert_same_run, metric, weights

import jaxvlm
from jaxvlm.cache.store import maintenance
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError, default_config
from jaxvlm.models.frozen_blocks import recut

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava") / "hf", data, "float32")


def settings(data, folder, frozen_blocks=1, **cache):
    """A LLaVA of three blocks, of which two are run."""
    config = default_config()
    config.update(recipe(data))
    config.model = default_config().model
    config.model.checkpoint = str(folder)
    config.model.vision.frozen_blocks = frozen_blocks
    config.data.flip, config.data.max_shift = False, 0
    config.optim.learning_rate, config.optim.warmup_steps = 1e-2, 0
    for name, value in cache.items():
        config.cache[name] = value
    return config


def fit(config, workdir, devices=1):
    run = jaxvlm.Trainer(config, workdir, devices=jax.devices()[:devices])
    run.fit()
    return run


@pytest.fixture(scope="module")
def first(data, folder, tmp_path_factory):
    """A run that fills a store."""
    where = tmp_path_factory.mktemp("first")
    config = settings(data, folder, policy="strict", encode_batch=2, store=str(where / "store"))
    return fit(config, where / "run"), where / "store"


def tensors(folder):
    return transformers.LlavaForConditionalGeneration.from_pretrained(folder).state_dict()


@pytest.mark.long
def test_the_cache_changes_no_bit_and_the_top_learns(data, folder, tmp_path):
    runs = [
        fit(settings(data, folder, policy=policy, encode_batch=2), tmp_path / policy)
        for policy in ("off", "strict")
    ]
    assert_same_run(*runs)
    assert metric(runs[1], "train/cache/hit_rate")[-1] == 1
    assert not metric(runs[1], "train/cache/encoded")[-1]
    # MFU counts the frozen blocks where they run, and the blocks above always.
    counted = runs[1].training.flops_per_step(next(runs[1].dataset.train(runs[1].rows))[0], 1.0)
    assert counted.vision_top > counted.vision > 0


@pytest.mark.long
def test_what_is_trained_above_invalidates_no_store(data, folder, first, tmp_path):
    """A second run, of other weights above those blocks and at another rate, encodes nothing."""
    done, store = first
    config = settings(data, folder, policy="strict", encode_batch=2, store=str(store))
    config.init_from, config.optim.learning_rate, config.steps = str(done.workdir), 3e-3, 6
    again = fit(config, tmp_path / "again")
    assert set(metric(again, "train/cache/from_store")) == {1.0}
    assert set(metric(again, "train/cache/encoded")) == {0.0}
    before, after = weights(done), weights(again)
    moved = {path for path in before if not np.array_equal(before[path], after[path])}
    assert any(path.startswith("vision_top/stack/") for path in moved)
    assert not any(path.startswith("vision/") for path in moved)
    assert len(list(maintenance.stat(store))) == 1
    other = settings(data, folder, 1, policy="strict", encode_batch=2, store=str(store))
    other.optim.frozen, other.model.vision.frozen_blocks, other.steps = ("vision/*",), 0, 2
    assert metric(fit(other, tmp_path / "other"), "train/cache/from_store") == [
        0,
        0,
    ]  # other tokens


@pytest.mark.long
def test_it_comes_out_as_it_went_in(data, folder, first, tmp_path):
    done, _ = first
    out = tmp_path / "out"
    assert cli(["export", f"--workdir={done.workdir}", "--which=latest", f"--output={out}"]) == 0
    before, after = tensors(folder), tensors(out)
    assert before.keys() == after.keys()
    same = {name for name, x in before.items() if torch.equal(x, after[name])}
    tower = {name for name in before if "vision_tower" in name}
    above = {name for name in tower if "encoder.layers.1." in name}
    # The last block and its norm come after the layer that is read.
    assert tower - above <= same
    assert above & same <= {name for name in above if "k_proj.bias" in name} and len(above) > 10
    loaded, given = jaxvlm.load(done.workdir, "latest"), jaxvlm.load(out)
    found = recut({p: np.asarray(x) for p, x in loaded.params.items()}, 0)
    for path, x in given.params.items():
        np.testing.assert_array_equal(found[path], np.asarray(x), err_msg=path)
    image = str(data.parent / "0.png")
    assert loaded.generate(image, "is it red?", max_new_tokens=4) == given.generate(
        image, "is it red?", max_new_tokens=4
    )


@pytest.mark.long
def test_a_run_starts_from_one_with_other_frozen_blocks(data, folder, tmp_path):
    """First all but the vision encoder, then its top too, from the checkpoint of the first run."""
    config = settings(data, folder, 0, policy="strict")
    config.optim.frozen, config.steps = ("vision/*",), 3
    stage1 = fit(config, tmp_path / "one", 4)
    config = settings(data, folder, 1, policy="strict")
    config.init_from, config.steps, config.optim.learning_rate = str(stage1.workdir), 1, 0.0
    stage2 = fit(config, tmp_path / "two", 8)
    kept, found = weights(stage1), recut(weights(stage2), 0)
    assert kept.keys() == found.keys()
    for path, x in kept.items():
        np.testing.assert_array_equal(x, found[path], err_msg=path)


@pytest.mark.long
# Raised where peft looks at transformers' models.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_above_frozen_blocks_are_pefts(data, folder, tmp_path):
    peft = pytest.importorskip("peft", reason="the oracle")
    config = settings(data, folder, policy="strict")
    config.model.lora.rank, config.model.lora.targets = 2, ("all-linear", "-decoder/*")
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, 4, 2
    run = fit(config, tmp_path / "run", 8)
    first, *_, last = losses(run.workdir).values()
    assert last < first and metric(run, "train/cache/hit_rate")[-1] == 1
    out = tmp_path / "adapter"
    assert cli(["export", f"--workdir={run.workdir}", "--which=latest", f"--output={out}"]) == 0
    base = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    assert (
        cli(
            ["export", f"--workdir={run.workdir}", "--which=latest", "--merged", f"--output={out}2"]
        )
        == 0
    )
    before, ours = tensors(folder), tensors(f"{out}2")
    for name, x in ours.items():
        close_in_norm(theirs[name], x, 1e-5, name, least=0.1)  # some biases are 0
    changed = {name for name, x in ours.items() if not torch.equal(x, before[name])}
    assert {name for name in changed if "layers.1." in name and "vision_tower" in name}
    assert not {name for name in changed if "layers.0." in name or "layers.2." in name}


def test_refused(data, folder):
    with pytest.raises(
        ConfigError, match=r"frozen_blocks=2 must leave at least one block.* 2 of 3"
    ):
        jaxvlm.Trainer(settings(data, folder, 2), devices=jax.devices()[:1])
    config = settings(data, folder)
    config.optim.frozen = ("vision_top/*", "connector/*", "decoder/*")
    with pytest.raises(ConfigError, match="freezes every parameter"):
        jaxvlm.Trainer(config, devices=jax.devices()[:1])
    lossy = {"policy": "strict", "store": "tokens", "codec": "int8"}
    with pytest.raises(ConfigError, match="codec='int8' with trained blocks above frozen_blocks"):
        jaxvlm.Trainer(settings(data, folder, **lossy), devices=jax.devices()[:1])
    config = settings(data, folder, **lossy)
    config.optim.frozen = ("vision/*", "vision_top/*")  # as the message says
    jaxvlm.Trainer(config, devices=jax.devices()[:1])


@pytest.mark.long
def test_on_a_mesh(data, folder, first, tmp_path):
    done, _ = first
    config = settings(data, folder, policy="strict", encode_batch=2)
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 2, 2, 2
    wide = fit(config, tmp_path / "wide", 8)
    for step, value in losses(done.workdir).items():
        close(losses(wide.workdir)[step], value, 1e-4)
