"""Runs hold frozen weights in their source's dtype, and export gives back the source's bits."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_llava
from runs import losses, recipe
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_encoders import write

import jaxvlm
from jaxvlm.cache.identity import weights_digest
from jaxvlm.checkpoint.checkpointer import StructureError
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError, default_config
from jaxvlm.models.lora import is_adapter

pytest.importorskip("torch", reason="writes the checkpoint; Python 3.11 only")

FSDP = (1, 8, 1)
TOWER = ("vision/*",)
HALF, SINGLE = "multi_modal_projector.linear_1.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """A LLaVA in bfloat16, but for one tensor in float16 and one in float32."""
    folder = write_llava(tmp_path_factory.mktemp("llava") / "hf", data)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, x in tensors.items():
            noise = 1e-3 * np.random.default_rng(0).normal(size=x.shape)
            if name.endswith(HALF):
                tensors[name] = (x.astype(np.float32) + noise).astype(np.float16)
            if name.endswith(SINGLE):
                tensors[name] = (x.astype(np.float32) + noise).astype(np.float32)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def settings(data, folder, frozen=TOWER, steps=2, mesh=FSDP):
    config = default_config()
    config.update(recipe(data))
    config.model = default_config().model
    config.model.checkpoint, config.model.dtype = str(folder), "bfloat16"
    config.data.flip, config.data.max_shift = False, 0
    config.optim.frozen, config.steps, config.checkpoint.every = frozen, steps, 2
    config.optim.warmup_steps = 0
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh
    return config


def fitted(config, workdir):
    run = jaxvlm.Trainer(config, workdir)
    run.fit()
    return run


def raw(folder):
    """Tensor -> (dtype, bytes)."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is not a mapping)
                x = opened.get_tensor(name)
                found[name] = str(x.dtype), x.tobytes()
    return found


def exported(workdir, out, *more):
    assert cli(["export", f"--workdir={workdir}", f"--output={out}", "--which=latest", *more]) == 0
    return raw(out)


def is_tower(name):
    return "vision" in name


@pytest.fixture(scope="module")
def tower_run(data, folder, tmp_path_factory):
    config = settings(data, folder)
    return fitted(config, tmp_path_factory.mktemp("tower") / "run")


@pytest.fixture(scope="module")
def float32_run(data, folder, tmp_path_factory):
    config = settings(data, folder)
    config.optim.frozen_dtype = "float32"
    return fitted(config, tmp_path_factory.mktemp("float32") / "run")


def test_a_frozen_tower_is_held_and_exported_as_it_came(folder, tower_run, float32_run, tmp_path):
    frozen = tower_run.state.frozen
    assert {x.dtype for x in frozen.values()} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in float32_run.state.frozen.values()} == {jnp.dtype(jnp.float32)}
    assert losses(tower_run.workdir) == losses(float32_run.workdir)
    for path, x in float32_run.state.params.items():
        np.testing.assert_array_equal(tower_run.state.params[path], x, path)
    source = raw(folder)
    for run in (tower_run, float32_run):
        after = exported(run.workdir, tmp_path / run.workdir.parent.name)
        assert after.keys() == source.keys()
        assert all((after[name] == source[name]) or not is_tower(name) for name in source)
        assert any(after[name] != source[name] for name in source)


def test_a_run_is_loaded_as_it_trained(data, tower_run, float32_run):
    image = str(data.parent / "0.png")
    models = [jaxvlm.load(run.workdir, "latest") for run in (tower_run, float32_run)]
    assert models[0].model.held == tower_run.model.held != {}
    assert models[1].model.held == {}
    assert {str(models[0].params[path].dtype) for path in tower_run.state.frozen} == {"bfloat16"}
    answers = [m.generate(image, "which color is it?", max_new_tokens=4) for m in models]
    assert answers[0] == answers[1]


def test_a_run_is_resumed_on_another_mesh_with_the_same_bits(data, folder, tower_run, tmp_path):
    before = jax.device_get(tower_run.state.frozen)
    workdir = tmp_path / "copy"
    shutil.copytree(tower_run.workdir, workdir)
    run = fitted(settings(data, folder, steps=3, mesh=(2, 2, 2)), workdir)
    assert run.mesh.shape["tensor"] == 2
    for path, x in run.state.frozen.items():
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, before[path], path)


def test_a_run_in_float32_is_converted_if_no_value_changes(data, folder, float32_run, capsys):
    """As a run that was started when all weights were float32."""
    config = settings(data, folder, steps=3)
    before = jax.device_get(float32_run.state.frozen)
    run = fitted(config, float32_run.workdir)
    said = " ".join("".join(capsys.readouterr()).split())  # whatever the terminal's width
    assert said.count("frozen arrays are converted from float32 to bfloat16") == 1
    for path, x in run.state.frozen.items():
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(x, np.float32), before[path], path)


@pytest.mark.long
def test_each_weight_has_the_dtype_of_its_tensors(data, folder, tmp_path):
    config = settings(data, folder, ("*",))
    config.model.lora.rank, config.optim.frozen = 2, ()
    run = fitted(config, tmp_path / "run")
    half, single = "connector/w_in", "decoder/norm/scale"
    wanted = dict.fromkeys(run.model.base(), "bfloat16") | {half: "float16", single: "float32"}
    held = {p: str(x.dtype) for p, x in run.state.frozen.items() if not is_adapter(p)}
    assert held == wanted
    source, after = raw(folder), exported(run.workdir, tmp_path / "out", "--merged")
    maps = [name for name in source if after[name] != source[name]]
    assert maps and all(name.endswith(".weight") for name in maps)
    assert {after[name][0] for name in maps} == {"bfloat16", "float16"}
    for name in source:
        if any(part in name for part in ("embed", "norm", "lm_head", "bias")):
            assert after[name] == source[name], name

    config.optim.frozen_dtype = "bfloat16"
    with pytest.raises(StructureError, match=r"frozen/\S+ and 1 more would be rounded from float"):
        jaxvlm.Trainer(config, run.workdir).fit()
    asked = fitted(config, tmp_path / "asked")
    assert set(asked.model.held.values()) == {"bfloat16"}
    x = np.asarray(run.state.frozen[single]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(asked.state.frozen[single], x)


def test_stages_train_what_was_frozen_and_freeze_what_was_trained(
    data, folder, tower_run, tmp_path
):
    config = settings(data, folder, ("decoder/*", "connector/*"))
    config.init_from = str(tower_run.workdir)
    run = fitted(config, tmp_path / "second")
    # It was trained in float32, and its bits are kept: not those of the source's dtype.
    assert run.model.held == {}
    for path, x in run.state.frozen.items():
        np.testing.assert_array_equal(x, tower_run.state.params[path], path)
    for path in tower_run.state.frozen:
        assert run.state.params[path].dtype == jnp.float32
    config = settings(data, folder, ("vision/*", "connector/*"), steps=3)
    config.init_from = str(tower_run.workdir)
    third = jaxvlm.Trainer(config, tmp_path / "third")
    assert third.model.held == tower_run.model.held
    # Once a run has a checkpoint, the run that it started from is not needed.
    config.init_from = str(tmp_path / "gone")
    config.optim.frozen = ("decoder/*", "connector/*")
    assert jaxvlm.Trainer(config, run.workdir).model.held == {}


@pytest.mark.long
def test_frozen_blocks_are_cut_anew_with_their_bits(data, folder, tower_run, tmp_path):
    config = settings(data, folder, (), steps=1)
    config.model.vision.frozen_blocks, config.init_from = 1, str(tower_run.workdir)
    run = fitted(config, tmp_path / "run")
    assert run.state.frozen
    for path, x in run.state.frozen.items():
        assert x.dtype == jnp.bfloat16, path
        np.testing.assert_array_equal(x, tower_run.state.frozen[path][: len(x)], path)


def in_bfloat16(folder):
    for file in folder.glob("*.safetensors"):
        floats = (x.dtype.kind == "f" for x in load_file(file).values())
        assert all(floats)
        tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def of_pairs(captions, steps=2):
    config = default_config()
    config.loss.name, config.embedder = "info_nce", "dual"
    config.data.train = str(captions)
    config.data.batch_size, config.data.max_length, config.data.buckets = 8, 12, 1
    config.data.pairs.batch_sampler = "random"
    config.pair_loss.temperature, config.grad_cache.query_mini_batch = 0.0, 1
    config.optim.learning_rate, config.optim.warmup_steps, config.steps = 1e-2, 0, steps
    config.log_every, config.tensorboard, config.dual.dtype = 1, False, "bfloat16"
    config.mesh.data, config.mesh.fsdp = 1, 8
    return config


@pytest.mark.long
def test_a_dual_encoders_frozen_tower_is_held_as_it_came(captions, tmp_path):
    clip = in_bfloat16(write(tmp_path / "clip", "clip"))
    runs = {}
    for setting in ("checkpoint", "float32"):
        config = of_pairs(captions)
        config.dual.checkpoint = str(clip)
        config.optim.frozen, config.optim.frozen_dtype = ("vision/*", "head/*"), setting
        runs[setting] = fitted(config, tmp_path / setting)
    held, wide = runs["checkpoint"], runs["float32"]
    assert set(held.model.held) == held.state.frozen.keys() and not wide.model.held
    assert losses(held.workdir) == losses(wide.workdir)
    source, after = raw(clip), exported(held.workdir, tmp_path / "out")
    assert after == exported(wide.workdir, tmp_path / "out32")
    assert all((after[name] == source[name]) or not is_tower(name) for name in source)
    loaded = [jaxvlm.load(run.workdir, "latest") for run in (held, wide)]
    assert loaded[0].model.held == held.model.held
    images = [str(captions.parent / f"{i}.png") for i in range(3)]
    embeddings = [(m.encode_image(images), m.encode_text(["a red", "big"])) for m in loaded]
    np.testing.assert_array_equal(embeddings[0][0], embeddings[1][0])
    np.testing.assert_array_equal(*(m.similarity(*x) for m, x in zip(loaded, embeddings)))


def test_each_tower_has_the_dtype_of_its_own_checkpoint(captions, tmp_path):
    config = of_pairs(captions)
    config.dual.vision_checkpoint = str(in_bfloat16(write(tmp_path / "siglip", "siglip")))
    config.dual.text_checkpoint = str(write(tmp_path / "bert", "bert"))
    config.dual.embed_dim, config.optim.frozen = 24, ("text/*", "vision/*")
    config.dual.project = ("vision", "text")
    run = jaxvlm.Trainer(config)
    assert set(run.model.held) == {path for path in run.model.shapes if path.startswith("vision/")}
    assert set(run.model.held.values()) == {"bfloat16"}


def test_cached_tokens_of_an_encoder_do_not_depend_on_how_it_is_held(tower_run, float32_run):
    digests = {weights_digest(run.training.params(run.state)) for run in (tower_run, float32_run)}
    assert len(digests) == 1


def test_a_setting_that_nothing_reads_is_refused(data, folder):
    config = settings(data, folder, ())
    config.optim.frozen_dtype = "bfloat16"
    with pytest.raises(ConfigError, match=r"frozen_dtype='bfloat16' is not read: no weight is"):
        jaxvlm.Trainer(config)
    config.optim.frozen_dtype = "float8"
    with pytest.raises(ConfigError, match=r"known: checkpoint, bfloat16, float32"):
        jaxvlm.Trainer(config)
