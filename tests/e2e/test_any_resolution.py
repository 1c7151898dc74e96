"""A LLaVA-NeXT folder, whose images are cut in tiles, through the ordinary commands."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import PATCH, write_llava_next
from numerics import close_in_norm
from PIL import Image
from runs import HERE

import jaxvlm
from jaxvlm.cli.main import run as cli
from jaxvlm.config import MeshConfig
from jaxvlm.inference import prompts

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

# What the recipe says of its own model, put back: the checkpoint's counts.
DIMS = [
    f"--config.model.{tower}.{name}={value}"
    for tower, dims in {
        "vision": {"stem": "linear", "width": 32, "depth": 2, "mlp_dim": 48},
        "decoder": {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 4},
    }.items()
    for name, value in dims.items()
]


def torch_logits(folder, images, prompt):
    """What transformers alone makes of a folder: its processor, its tokenizer, its model."""
    processor = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessorPil.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    text = f"<user>{prompt}<assistant>"
    inputs = processor(text=text, images=[Image.open(p) for p in images], return_tensors="pt")
    model = transformers.LlavaNextForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(**inputs).logits[0]
        new = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    new = new[0, inputs["input_ids"].shape[1] :]
    return logits.numpy(), processor.tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.long
def test_trains_answers_and_comes_out(data, tmp_path, capsys):
    folder = write_llava_next(tmp_path / "hf", data)
    workdir, out = tmp_path / "run", tmp_path / "out"
    train = ["train", f"--config={HERE / 'recipe.py'}:{data}", f"--workdir={workdir}"]
    train += [f"--config.model.checkpoint={folder}", "--config.steps=2"]
    train += [
        "--config.data.flip=False",
        "--config.data.max_shift=0",
        "--config.optim.warmup_steps=0",
    ]
    train += ["--config.data.max_images_per_sequence=10", "--config.data.max_length=128"]
    assert cli([*train, *DIMS]) == 0
    assert cli(["export", f"--workdir={workdir}", f"--output={out}"]) == 0
    paths = []
    for i, (width, height) in enumerate(((40, 23), (17, 60))):
        drawn = np.random.default_rng(i).integers(0, 255, (height, width, 3), np.uint8)
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(drawn).save(paths[-1])
    prompt = "<image> is it red? <image>"
    logits, answer = torch_logits(out, paths, prompt)
    before, _ = torch_logits(folder, paths, prompt)
    assert np.linalg.norm(before - logits) > 1e-2 * np.linalg.norm(logits), "training changed it"
    model = jaxvlm.load(out, mesh=MeshConfig(data=1, fsdp=4, tensor=2))
    batch = prompts.to_answer(
        [(paths, prompt)], model.model, model.tokenizer, model.image_format, 10**6
    ).batch
    assert batch.pixels.shape[1] == (1 + 2 * 2) + (1 + 2), "tiles"
    made = model.model.apply(model.params, batch)
    ours = np.asarray(made.hidden @ made.head)[0][np.asarray(batch.segment)[0] > 0]
    close_in_norm(ours, logits, 1e-4)
    capsys.readouterr()
    ask = ["generate", f"--checkpoint={workdir}", f"--image={paths[0]}", f"--image={paths[1]}"]
    assert cli([*ask, f"--prompt={prompt}", "--max_new_tokens=8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answer"] == answer
    for counts in ("0 images read, 8 encoded", "8 images read, 0 encoded"):
        cached = [*ask, f"--prompt={prompt}", "--max_new_tokens=8", f"--cache_store={tmp_path}/s"]
        assert cli(cached) == 0
        found = capsys.readouterr().out
        assert answer in found and counts in found
