"""Adapters go in and out as PEFT's folders; peft on transformers' torch model is the oracle."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import runpy
import warnings

import jax
import numpy as np
import pytest
from checkpoints import write_llava
from numerics import close, close_in_norm, relative
from runs import losses, recipe
from safetensors.numpy import load_file

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import ConfigError, LoraConfig, MeshConfig, default_config, to_config_dict
from jaxvlm.hf import model_zoo, peft_folder
from jaxvlm.hf.families import FAMILIES
from jaxvlm.hf.families import peft_adapters as names
from jaxvlm.inference import prompts
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.lora import is_adapter
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.train.grad_accum import PlainRunner, scales, total
from jaxvlm.trainer.run_files import write_run_files

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")
peft = pytest.importorskip("peft", reason="the oracle")

# Raised where peft looks at transformers' models.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

PROMPT = "which color is it?"
VARIANTS = {
    "lora": {"target_modules": "all-linear", "lora_alpha": 12, "lora_dropout": 0.05},
    "dora": {
        "target_modules": r".*(q_proj|o_proj|out_proj|down_proj|fc1|linear_1)",
        "use_dora": True,
        "use_rslora": True,
        "lora_dropout": 0.05,
    },
}


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava") / "hf", data, "float32")


def base_model(folder):
    return transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def write_adapter(folder, target, **settings):
    """An adapter of peft's, its B no longer zero and its magnitudes moved."""
    torch.manual_seed(2)
    model = peft.get_peft_model(base_model(folder), peft.LoraConfig(r=3, **settings))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x += 0.2 * torch.randn_like(x)
            if "magnitude" in name:
                x *= 1 + 0.3 * torch.rand_like(x)
    with warnings.catch_warnings(action="ignore"):  # that the head's weights are saved too
        model.save_pretrained(target)
    return target


@pytest.fixture(scope="module", params=VARIANTS)
def adapter(request, folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("adapter") / request.param
    return write_adapter(folder, target, **VARIANTS[request.param])


def asked(model, data):
    """A prompt about an image: our batch, and transformers' inputs."""
    image = str(data.parent / "0.png")
    batch = prompts.to_answer(
        [([image], PROMPT)], model.model, model.tokenizer, model.image_format, 10**6
    ).batch
    real = np.asarray(batch.segment)[0] > 0
    pixels = np.asarray(batch.pixels, np.float32)[0] / 255
    vision = model.config.model.vision
    pixels = (pixels - np.asarray(vision.pixel_mean)) / np.asarray(vision.pixel_std)
    inputs = {
        "input_ids": torch.tensor(np.asarray(batch.tokens)[0, real][None], dtype=torch.long),
        "pixel_values": torch.tensor(pixels.transpose(0, 3, 1, 2), dtype=torch.float32),
    }
    return batch, inputs, real


def logits_of(model, theirs, data):
    """Ours, and a torch model's."""
    batch, inputs, real = asked(model, data)

    def logits(params, batch):
        out = model.model.apply(params, batch)
        return out.logits(out.hidden)

    with torch.no_grad():
        expected = theirs(**inputs).logits[0].numpy()
    return np.asarray(jax.jit(logits)(model.params, batch))[0, real], expected


def test_logits_and_gradients_of_an_adapter_are_pefts(data, folder, adapter):
    model = jaxvlm.load(folder, mesh=MeshConfig(data=1, fsdp=4, tensor=2), adapter=adapter)
    theirs = peft.PeftModel.from_pretrained(base_model(folder), adapter, is_trainable=True)
    theirs.eval()  # without its dropout
    close_in_norm(*logits_of(model, theirs, data), 1e-4)
    assert relative(*logits_of(model, base_model(folder), data)) > 1e-2, (
        "the adapter changes nothing"
    )

    batch, inputs, _ = asked(model, data)
    weight = (np.asarray(batch.segment) > 0) & (np.arange(batch.tokens.shape[1]) > 0)
    batch = batch._replace(loss_weight=weight.astype(np.float32))
    trained = {p: x for p, x in model.params.items() if is_adapter(p)}
    frozen = {p: x for p, x in model.params.items() if not is_adapter(p)}

    def run(trained, frozen, batch):
        scale = scales(NextToken(), batch)
        runner = PlainRunner(model.model.apply)
        sums, grads = runner.loss_grad(trained, frozen, batch, NextToken(), scale)
        return total(sums, scale), grads

    loss, grads = jax.jit(run)(trained, frozen, batch)
    logits = theirs(**inputs).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, 1:])
    expected.backward()
    close(loss, expected, 1e-5)

    base = names_of(model)
    ours = names.weights(model.config.model.lora, base, model.model.adapted).dump(grads)
    found = {
        n.replace("vector.default.weight", "vector").replace(".default", ""): x.grad
        for n, x in theirs.named_parameters()
    }
    checked = 0
    for name, spelled in names.spelled(ours, base).items():
        if found[spelled] is None:  # of CLIP's last block, which comes after the layer that is read
            assert "encoder.layers.2" in spelled and not ours[name].any()
            continue
        close_in_norm(ours[name], found[spelled], 1e-3, spelled)
        checked += 1
    assert checked == sum(x is not None for x in found.values()) > 20


def names_of(model):
    from jaxvlm.hf.families import llava

    return llava.weights(model.config.model)


RECIPE = pathlib.Path(__file__).parents[2] / "configs" / "lora.py"


def settings(data, folder, **lora):
    config = default_config()
    config.update(recipe(data))
    arg = ",".join([str(folder), *([lora.pop("checkpoint")] if "checkpoint" in lora else [])])
    config.model = to_config_dict(runpy.run_path(str(RECIPE))["get_config"](arg)).model
    config.model.lora.update(lora)
    config.data.flip, config.data.max_shift = False, 0
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, 4, 2
    config.optim.learning_rate, config.optim.warmup_steps = 1e-2, 0
    config.steps, config.microbatches = 6, 2
    return config


@pytest.fixture(scope="module")
def trained(data, folder, tmp_path_factory):
    """DoRA on both towers, trained on a mesh, stopped half-way and resumed."""
    workdir = tmp_path_factory.mktemp("run")
    targets = ("decoder/*/w[qo]", "decoder/*/w_out", "vision/*/mlp/*", "connector/*")
    lora = {"rank": 4, "alpha": 8.0, "dora": True, "rslora": True, "targets": targets}
    lora["dropout"] = 0.05
    config = settings(data, folder, **lora)
    config.steps = 3
    jaxvlm.Trainer(config, workdir).fit()
    config.steps = 6
    run = jaxvlm.Trainer(config, workdir)
    run.fit()
    return run, workdir


def test_a_run_trains_adapters_alone_and_resumes(data, folder, trained, tmp_path):
    run, workdir = trained
    first, *_, last = losses(workdir).values()
    assert last < 0.9 * first
    before = jaxvlm.load(folder).params
    assert run.state.frozen.keys() == before.keys()
    for path, x in run.state.frozen.items():
        assert np.array_equal(x, before[path]), path
    unbroken = jaxvlm.Trainer(run.config, tmp_path / "unbroken")
    unbroken.fit()
    for path, x in run.state.params.items():
        assert is_adapter(path) and np.array_equal(x, unbroken.state.params[path]), path
        assert not path.endswith("lora_b") or np.asarray(x).any(), path


def test_a_runs_adapter_is_pefts_and_merges(data, folder, trained, tmp_path, capsys):
    _, workdir = trained
    model = jaxvlm.load(workdir, "latest", mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    common = ["export", f"--workdir={workdir}", "--which=latest"]
    assert cli([*common, f"--output={tmp_path / 'adapter'}"]) == 0
    files = {p.name for p in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    theirs = peft.PeftModel.from_pretrained(base_model(folder), tmp_path / "adapter")
    close_in_norm(*logits_of(model, theirs, data), 1e-4)
    assert relative(*logits_of(model, base_model(folder), data)) > 1e-2, "training changed nothing"

    assert cli([*common, f"--output={tmp_path / 'merged'}", "--merged"]) == 0
    close_in_norm(*logits_of(model, base_model(tmp_path / "merged"), data), 1e-4)
    image = str(data.parent / "0.png")
    answer = model.generate(image, PROMPT, max_new_tokens=8)
    capsys.readouterr()
    ask = [f"--image={image}", f"--prompt={PROMPT}", "--max_new_tokens=8"]
    given = [f"--checkpoint={folder}", f"--adapter={tmp_path / 'adapter'}"]
    assert cli(["generate", *given, *ask]) == 0
    assert capsys.readouterr().out.split("\n")[0] == answer


def test_a_run_goes_on_from_an_adapter(data, folder, adapter, tmp_path):
    config, workdir = settings(data, folder, checkpoint=str(adapter)), tmp_path / "run"
    run = jaxvlm.Trainer(config, workdir)
    write_run_files(run, workdir)
    params = peft_folder.read_params(run.source, run.model, 0)
    peft_folder.export(workdir, tmp_path / "out", params, run.model)
    assert peft_folder.origin(run.config.model.lora).endswith(f"{adapter}, with dropout 0.05")
    folders = (adapter, tmp_path / "out")
    given, written = (load_file(f / "adapter_model.safetensors") for f in folders)
    assert given.keys() == written.keys()
    assert all(np.array_equal(given[name], written[name]) for name in given)
    before, after = (json.loads((f / "adapter_config.json").read_text()) for f in folders)
    for name in ("r", "lora_alpha", "use_dora", "use_rslora", "lora_dropout"):
        assert after[name] == before[name]
    config.model.lora.base = "int8"  # read one map at a time
    eight = jaxvlm.Trainer(config)
    kept = peft_folder.read_params(eight.source, eight.model, 0)
    assert kept.keys() == eight.model.shapes.keys()
    plain = {path: params[path] for path in eight.model.base()}
    for path, x in eight.model.stored(plain).items():
        assert np.array_equal(kept[path], x), path
    config.model.lora.base = ""
    # What a run has written down is enough to resume it, once it has weights.
    (workdir / "checkpoints" / "1").mkdir(parents=True)
    adapter.rename(adapter.with_name("away"))
    try:
        again = jaxvlm.Trainer(config, workdir)
    finally:
        adapter.with_name("away").rename(adapter)
    assert again.config.model.lora == run.config.model.lora


def test_an_adapter_that_does_not_fit_is_named(data, folder, tmp_path):
    def refused(text, where=None, **lora):
        config = settings(data, folder, **({"checkpoint": str(where)} if where else {}), **lora)
        with pytest.raises(ConfigError, match=text):
            jaxvlm.Trainer(config)

    good = write_adapter(folder, tmp_path / "good", target_modules=["q_proj"])
    refused("no such folder", tmp_path / "nowhere")
    refused(r"lora\.rank=8, but .* says 3", good, rank=8)
    config = json.loads((good / "adapter_config.json").read_text())
    for field, value, text in (
        ("rank_pattern", {"q_proj": 2}, "rank_pattern=.* is not supported here"),
        ("init_lora_weights", "pissa", "init_lora_weights='pissa' is not supported"),
        ("use_magic", True, "use_magic=True is unknown"),
        ("r", 5, "of another shape"),
    ):
        (good / "adapter_config.json").write_text(json.dumps(config | {field: value}))
        if field == "r":
            with pytest.raises(ConfigError, match=text):
                jaxvlm.load(folder, adapter=good)
        else:
            refused(text, good)
    some = write_adapter(folder, tmp_path / "some", target_modules=["layers.0.self_attn.q_proj"])
    with pytest.raises(ConfigError, match=r"missing: .*layers\.1\.self_attn\.q_proj\.lora_A"):
        jaxvlm.load(folder, adapter=some)
    head = write_adapter(folder, tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"adapt no linear map of this model: .*lm_head"):
        jaxvlm.load(folder, adapter=head)
    with pytest.raises(ConfigError, match="is a run, whose weights include its adapters"):
        jaxvlm.load(tmp_path, adapter=good)


KINDS = {}  # one published model of each kind of towers
for _name in model_zoo.names():
    _config = model_zoo.published_config(_name)
    if _config["model_type"] in FAMILIES:
        _parts = (
            _config.get(part, {}).get("model_type") for part in ("text_config", "vision_config")
        )
        KINDS.setdefault((_config["model_type"], *_parts), _name)


@pytest.mark.parametrize("name", KINDS.values())
def test_all_linear_is_what_peft_takes(name, shows):
    given = model_zoo.published_config(name)
    shows(given["model_type"], "LoRA")
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**given)
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
        theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=2, target_modules="all-linear"))
    wanted = {n.replace(".default", "") for n, _ in theirs.named_parameters() if "lora_A" in n}
    # Three maps in one tensor take no adapter here.
    wanted = {n for n in wanted if not n.endswith(".attn.qkv.lora_A.weight")}
    family = FAMILIES[given["model_type"]]
    lora = LoraConfig(rank=2)
    model_config = dataclasses.replace(family.config_from_hf(given), lora=lora)
    base = family.weights(model_config)
    without = tuple("-" + path for path in names.not_layers(base))
    lora = dataclasses.replace(lora, targets=(*lora.targets, *without))
    model = build_model(
        dataclasses.replace(model_config, lora=lora), make_mesh(MeshConfig(1), jax.devices()[:1])
    )
    ours = names.spelled(names.weights(lora, base, model.adapted).tensors(), base).values()
    assert {n for n in ours if "lora_A" in n} == wanted
