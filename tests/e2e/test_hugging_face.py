"""A Hugging Face folder goes in, trains on a mesh, and comes out as one that transformers loads."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import loopback_store
import numpy as np
import pytest
from checkpoints import write_llava
from numerics import close_in_norm
from PIL import Image
from runs import HERE, recipe, without_torch
from safetensors.numpy import load_file, save_file

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError, MeshConfig, default_config
from jaxvlm.hf import safetensors
from jaxvlm.inference import prompts
from jaxvlm.stores.object_store import RemoteFolder

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava") / "hf", data)


def settings(data, folder):
    config = default_config()
    config.update(recipe(data))
    config.model = default_config().model
    config.model.checkpoint = str(folder)
    config.data.flip, config.data.max_shift = False, 0
    return config


def torch_model(folder):
    return transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def torch_logits(folder, image, prompt, dtype=None):
    """What transformers alone makes of a folder: its processor, its tokenizer, its model."""
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    text = text.replace("<image>", "<image>" * 4)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    pixels = processor(Image.open(image), return_tensors="pt").pixel_values
    model = torch_model(folder).to(dtype)
    inputs = {"input_ids": ids, "pixel_values": pixels.to(dtype)}
    with torch.no_grad():
        logits = model(**inputs).logits[0]
        new = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    return logits.float().numpy(), tokenizer.decode(new, skip_special_tokens=True)


def our_logits(model, image, prompt):
    batch = prompts.to_answer(
        [([image], prompt)], model.model, model.tokenizer, model.image_format, 10**6
    ).batch
    out = model.model.apply(model.params, batch)
    logits = np.asarray(out.hidden @ out.head)
    return logits[0][np.asarray(batch.segment)[0] > 0]


def test_a_folder_answers_as_transformers_does(data, folder):
    image = Image.fromarray(np.random.default_rng(2).integers(0, 255, (23, 40, 3), np.uint8))
    path = str(folder.parent / "odd.png")
    image.save(path)
    logits, answer = torch_logits(folder, path, "which color is it?")
    model = jaxvlm.load(folder, mesh=MeshConfig(data=1, fsdp=4, tensor=2))
    ours = our_logits(model, path, "which color is it?")
    close_in_norm(ours, logits, 1e-4)
    assert model.generate(path, "which color is it?", max_new_tokens=8) == answer
    staged = jaxvlm.load(folder, mesh=MeshConfig(data=4, pipeline=2))
    assert staged.generate(path, "which color is it?", max_new_tokens=8) == answer
    several = [([path], "which color is it?"), ([], "what?"), ([path, path], "<image> or <image>")]
    together = model.generate_batch(several, max_new_tokens=40)
    assert together[0].startswith(answer)
    assert together == [model.generate(p, prompt, max_new_tokens=40) for p, prompt in several]
    most = 0
    for seed in range(4):
        drawn = {"max_new_tokens": 40, "temperature": 2.0, "top_k": 50, "top_p": 0.9, "seed": seed}
        pieces = list(model.stream([], "what?", **drawn))
        assert "".join(pieces).strip() == model.generate([], "what?", **drawn)
        most = max(most, len(pieces))
    assert most > 1, "an answer that came at once shows no streaming"


def test_what_is_not_trained_comes_out_bit_for_bit(data, folder, tmp_path):
    config = settings(data, folder)
    config.steps, config.optim.learning_rate, config.optim.warmup_steps = 1, 0.0, 0
    jaxvlm.Trainer(config, tmp_path / "run").fit()
    out = tmp_path / "out"
    assert cli(["export", f"--workdir={tmp_path / 'run'}", f"--output={out}"]) == 0
    assert safetensors.read_layout(out) == safetensors.read_layout(folder), (
        "names, shapes, dtypes and files"
    )
    index = json.loads((out / safetensors.INDEX).read_text())
    assert index["weight_map"] == json.loads((folder / safetensors.INDEX).read_text())["weight_map"]
    before, after = torch_model(folder).state_dict(), torch_model(out).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    same = {p.name for p in folder.iterdir() if p.suffix != ".safetensors"}
    assert {p.name for p in out.iterdir() if p.suffix != ".safetensors"} == same
    for name in same - {safetensors.INDEX}:
        assert (out / name).read_bytes() == (folder / name).read_bytes(), name
    with loopback_store.store(tmp_path / "files", loopback_store.S3):
        url = "s3://runs/exported"
        assert cli(["export", f"--workdir={tmp_path / 'run'}", f"--output={url}"]) == 0
        files = RemoteFolder(url)
        assert {name: files.read(name) for name in files.files()} == {
            path.name: path.read_bytes() for path in out.iterdir()
        }
        read = jaxvlm.load(url).params
    for name, x in jaxvlm.load(out).params.items():
        np.testing.assert_array_equal(read[name], x, err_msg=name)


@pytest.mark.long
def test_a_step_on_a_mesh_is_exported(data, folder, tmp_path, capsys):
    config = settings(data, folder)
    config.steps, config.optim.learning_rate, config.optim.warmup_steps = 1, 1e-2, 0
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, 4, 2
    config.optim.frozen = ("vision/pre_norm/*",)
    jaxvlm.Trainer(config, tmp_path / "run").fit()
    out = tmp_path / "out"
    export = ["export", f"--workdir={tmp_path / 'run'}", f"--output={out}", "--dtype=float32"]
    assert cli(export) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    before, after = torch_model(folder).state_dict(), torch_model(out).state_dict()
    # CLIP's last block and its norm come after the layer that is read, so nothing trains them.
    still = ("pre_layrnorm", "encoder.layers.2.", "post_layernorm", "position_ids")
    for name, x in before.items():
        if name.endswith("k_proj.bias"):
            continue  # its gradient is rounding alone
        assert torch.equal(x, after[name]) == any(part in name for part in still), name
    model = jaxvlm.load(tmp_path / "run", "latest")
    image = str(data.parent / "0.png")
    logits, _ = torch_logits(out, image, "is it red?")
    ours = our_logits(model, image, "is it red?")
    close_in_norm(ours, logits, 1e-4)
    capsys.readouterr()
    assert cli(export) == 2
    assert "is not empty" in capsys.readouterr().err


def test_bfloat16_is_no_further_off_than_torch_s(data, folder):
    image, prompt = str(data.parent / "0.png"), "is it red?"
    exact, _ = torch_logits(folder, image, prompt)
    theirs, _ = torch_logits(folder, image, prompt, torch.bfloat16)
    ours = our_logits(jaxvlm.load(folder, dtype="bfloat16"), image, prompt).astype(np.float32)
    off, allowed = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (ours, theirs))
    assert 1e-4 < off < 1.5 * allowed


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from jaxvlm.cli.main import run
folder, workdir, data, recipe = sys.argv[1:]
common = [f"--config={recipe}:{folder}", f"--config.data.train={data}", f"--workdir={workdir}"]
assert run(["train", *common, "--config.steps=1", "--config.epochs=0.0"]) == 0
assert run(["export", f"--workdir={workdir}", f"--output={workdir}/out"]) == 0
flags = [f"--checkpoint={workdir}/out", "--prompt=is it red?", "--max_new_tokens=2"]
assert run(["generate", *flags]) == 0
assert run(["data", "check", data, common[0]]) == 0
"""


@pytest.mark.long
def test_no_torch_is_needed(data, folder, tmp_path):
    recipe = HERE.parents[1] / "configs" / "finetune.py"
    without_torch(WITHOUT_TORCH, folder, tmp_path / "run", data, recipe, devices=1)


def copy(folder, target):
    import shutil

    shutil.copytree(folder, target)
    return target


def test_a_folder_that_does_not_fit_is_named(data, folder, tmp_path, capsys):
    config = settings(data, folder)
    config.model.decoder.width = 48
    with pytest.raises(ConfigError, match=r"decoder\.width=48, but the checkpoint says 32"):
        jaxvlm.Trainer(config)
    recipe = HERE.parents[1] / "configs" / "finetune.py"
    args = ["train", f"--config={recipe}:{folder}", f"--config.data.train={data}", "--dry_run"]
    assert cli([*args, "--config.model.decoder.width=64"]) == 2  # the default, but asked for
    assert "width=64, but the checkpoint says 32; leave it out" in capsys.readouterr().err
    broken = copy(folder, tmp_path / "a")
    text = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(text | {"model_type": "llama5"}))
    with pytest.raises(ConfigError, match="model_type='llama5' is not supported"):
        jaxvlm.load(broken)
    (broken / "config.json").write_text(json.dumps(text | {"image_token_index": 90}))
    with pytest.raises(ConfigError, match="image token has id"):
        jaxvlm.load(broken)
    (broken / "config.json").write_text(json.dumps(text))
    kinds = ("Transformer", "Pooling", "Dense")  # a folder that makes embeddings
    modules = [{"path": n, "type": f"sentence_transformers.models.{n}"} for n in kinds]
    (broken / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="Dense module computes embeddings, and a token loss"):
        jaxvlm.Trainer(settings(data, broken))
    (broken / "modules.json").unlink()
    first = sorted(broken.glob("*.safetensors"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=f"{first.name} can't be read"):
        jaxvlm.load(broken)
    first.unlink()
    (broken / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="pickles, which are never read"):
        jaxvlm.load(broken)
    with pytest.raises(ConfigError, match="no such folder"):
        config = settings(data, "/no/where")
        jaxvlm.Trainer(config)


@pytest.mark.parametrize("value, dtype", [(np.nan, "float32"), (np.inf, "bfloat16")])
def test_weights_that_are_not_finite_are_refused(folder, tmp_path, capsys, value, dtype):
    """By every command: none answers with nothing, or writes embeddings that are NaN."""
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    for path in damaged.glob("*.safetensors"):
        tensors = {k: v.astype(jnp.dtype(dtype)) for k, v in load_file(path).items()}
        name = max(tensors, key=lambda k: tensors[k].size)
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[-1] = value
        save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "texts.txt").write_text("a\n")
    output = tmp_path / "out.npy"
    for args in (
        ["generate", "--prompt=is it red?"],
        ["embed", f"--texts={tmp_path / 'texts.txt'}", f"--output={output}"],
    ):
        assert cli([*args, f"--checkpoint={damaged}"]) == 2
        assert "have values that are NaN or infinite" in capsys.readouterr().err
    assert not output.exists()
