"""Checkpoints that take images of any size, through the ordinary commands.

A Qwen-VL folder goes in, trains on odd images, answers, and comes out as transformers has it.
"""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest
from builders import MESHES, assert_gradients_close, devices_of
from checkpoints import write_qwen_vl
from numerics import close, close_in_norm
from PIL import Image
from runs import without_torch

import jaxvlm
from jaxvlm.config import ConfigError, MeshConfig, default_config
from jaxvlm.inference import prompts
from jaxvlm.inference.kept_places import kept_places
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.vit import per_value
from jaxvlm.parallel.sharding import to_global
from jaxvlm.train.grad_accum import GradAccumulation, PlainRunner, scales

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

SIZES = [(23, 40), (61, 17), (9, 9), (33, 35), (5, 70)]  # width, height
KINDS = ("Qwen2_5_VL", pytest.param("Qwen3VL", marks=pytest.mark.long))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Questions about one image, and about two, of many sizes."""
    folder = tmp_path_factory.mktemp("odd")
    rng, lines = np.random.default_rng(0), []
    for i in range(20):
        width, height = SIZES[i % len(SIZES)]
        pixels = rng.integers(0, 256, (height + i % 4, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        names = [f"{i}.png"] if i % 3 else [f"{i}.png", f"{max(i - 1, 0)}.png"]
        for question in ("which color is it?", "is it red?")[: 1 + i % 2]:
            messages = [
                {"role": "user", "content": " and ".join(["<image>"] * len(names)) + question},
                {"role": "assistant", "content": "yes" if i % 4 else "it is blue"},
            ]
            lines.append(json.dumps({"id": str(i), "images": names, "messages": messages}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(odd, tmp_path_factory):
    made = tmp_path_factory.mktemp("hf")
    return functools.cache(lambda kind: write_qwen_vl(made / kind, odd, kind))


@functools.cache
def torch_model(folder):
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


def torch_inputs(folder, images, prompt):
    """What transformers' processor, tokenizer and model make of a question."""
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pad, model = "<|image_pad|>", torch_model(folder)
    words = prompt.split("<image>")
    content = [{"type": "text", "text": words[0]}] if words[0] else []
    for word in words[1:]:
        content += [{"type": "image"}, {"type": "text", "text": word}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    found = processor([Image.open(p) for p in images], return_tensors="pt")
    grid = found["image_grid_thw"]
    for count in (grid.prod(-1) // 4).tolist():
        text = text.replace(pad, "<seen>" * count, 1)
    ids = tokenizer(
        text.replace("<seen>", pad), add_special_tokens=False, return_tensors="pt"
    ).input_ids
    inputs = {"input_ids": ids, "image_grid_thw": grid}
    inputs["mm_token_type_ids"] = (ids == tokenizer.convert_tokens_to_ids(pad)).int()
    positions, _ = model.model.get_rope_index(**inputs)
    return inputs | {"pixel_values": found["pixel_values"]}, positions[:, 0].numpy()


def torch_logits(folder, images, prompt, new=8):
    inputs, _ = torch_inputs(folder, images, prompt)
    model = torch_model(folder)
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(**inputs).logits[0].numpy()
        model.model.rope_deltas = None
        length = inputs["input_ids"].shape[1]
        ids = model.generate(**inputs, max_new_tokens=new, do_sample=False)[0, length:]
    return logits, ids


def assert_same_pixels(patches, vision, expected):
    mean, std = (per_value(x, vision) for x in (vision.pixel_mean, vision.pixel_std))
    found = (patches[: len(expected)] / 255.0 - mean) / std
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def our_batch(model, images, prompt):
    asked = [(images, prompt)]
    how = (model.model, model.tokenizer, model.image_format, 10**6)
    return prompts.to_answer(asked, *how).batch


def our_logits(model, images, prompt):
    batch = our_batch(model, images, prompt)
    out = jax.jit(model.model.apply)(model.params, batch)
    return np.asarray(out.logits(out.hidden))[0][np.asarray(batch.segment)[0] > 0]


def settings(odd, folder, kind):
    config = default_config()
    config.model.checkpoint = str(folder(kind))
    config.data.train = str(odd)
    config.data.batch_size, config.data.max_length, config.data.max_images_per_sequence = 8, 64, 3
    config.optim.warmup_steps, config.optim.schedule = 0, "constant"
    config.steps, config.tensorboard, config.log_every = 2, False, 1
    return config


@pytest.fixture
def two(odd):
    return [str(odd.parent / name) for name in ("0.png", "6.png")]


PROMPT = "<image> and <image> is it red?"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_as_transformers_reads_it(kind, folder, odd, two):
    model = jaxvlm.load(folder(kind), mesh=MeshConfig(data=1, fsdp=4, tensor=2))
    theirs, positions = torch_inputs(folder(kind), two, PROMPT)
    batch = jax.tree.map(lambda x: np.asarray(x)[0], our_batch(model, two, PROMPT))
    real, vision = batch.segment > 0, model.model.config.vision
    np.testing.assert_array_equal(batch.tokens[real], theirs["input_ids"][0].numpy())
    np.testing.assert_array_equal(batch.positions[:, real], positions)
    np.testing.assert_array_equal(batch.grid, theirs["image_grid_thw"].numpy())
    assert len({tuple(g) for g in batch.grid.tolist()}) == 2, "images of two shapes"
    count = len(theirs["pixel_values"])
    assert_same_pixels(batch.patches, vision, theirs["pixel_values"])
    assert not batch.patches[count:].any()

    logits, ids = torch_logits(folder(kind), two, PROMPT)
    ours = our_logits(model, two, PROMPT)
    error = close_in_norm(ours, logits, 1e-4)
    print(f"{kind}: logits {error:.1e}, at most {np.abs(ours - logits).max():.1e}")
    answer = model.tokenizer.decode(ids.tolist())
    assert model.generate(two, PROMPT, max_new_tokens=8) == answer.strip()


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_batch_of_training_is_what_transformers_prepares(kind, folder, odd):
    config = settings(odd, folder, kind)
    config.data.share_images = False
    run = jaxvlm.Trainer(config)
    (wanted,) = (i for i, record in enumerate(run.dataset.records) if record.id == "6")
    record = run.dataset.records[wanted]
    theirs, positions = torch_inputs(folder(kind), record.images, record.turns[0].content)
    ids, grid = theirs["input_ids"][0].numpy(), theirs["image_grid_thw"].numpy()
    assert len({tuple(g) for g in grid.tolist()}) == 2, "images of two shapes"
    ((batch, _, segment),) = (
        (jax.tree.map(lambda x, row=row: x[row], batch), row, segment)
        for batch, meta in run.dataset.eval(np.arange(4), 4)
        for row, found in enumerate(meta.by_sequence())
        for segment, source in found
        if source == wanted
    )
    at = np.flatnonzero(batch.segment == segment)
    prompt, answer = at[: len(ids)], at[len(ids) :]
    np.testing.assert_array_equal(batch.tokens[prompt], ids)
    np.testing.assert_array_equal(batch.positions[:, prompt], positions)
    after = positions.max() + 1 + np.arange(len(answer))
    np.testing.assert_array_equal(batch.positions[:, answer], [after] * 3)
    np.testing.assert_array_equal(batch.loss_weight[at], np.arange(len(at)) >= len(ids))
    slots = np.flatnonzero(np.isin(batch.image_start, at))
    np.testing.assert_array_equal(batch.grid[slots], grid)
    before = batch.grid[: slots[0]].prod(-1).sum()
    assert_same_pixels(batch.patches[before:], run.config.model.vision, theirs["pixel_values"])


@pytest.mark.parametrize("kv", [{}, {"kv": "vl_cache", "kv_budget": 0.3}])
def test_questions_about_shared_images_answer_as_each_alone(folder, odd, two, kv):
    model = jaxvlm.load(folder("Qwen2_5_VL"), mesh=MeshConfig(data=2, context=4))
    large = [str(odd.parent / "3.png")]
    images = [two, large, large, two, large, two, two]
    asked = [(given, f"which color is {'it ' * (60 + i)}?") for i, given in enumerate(images)]
    how = (model.model, model.tokenizer, model.image_format, 10**6)
    shared, alone = (prompts.to_answer(asked, *how, share=share) for share in (True, False))
    assert alone.prefixes is None
    each = shared.prefixes.batch
    assert len(each.tokens) == 4 and each.patches.nbytes < alone.batch.patches.nbytes
    assert shared.batch.patches is None
    together = model.generate_batch(asked, max_new_tokens=12, **kv)
    assert len(set(together)) > 1
    assert together == [model.generate(*one, max_new_tokens=12, **kv) for one in asked]


def test_images_of_any_size_are_read_from_the_cache(folder, odd, two, tmp_path):
    model = jaxvlm.load(folder("Qwen2_5_VL"), mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    large = [str(odd.parent / "3.png")]
    asked = [(two, PROMPT), (large, "which color is it?"), (two, PROMPT), ([], "is it red?")]
    wanted = model.generate_batch(asked, max_new_tokens=12)
    embedded = model.embed(asked)
    model.use_cache(memory_mb=4, store=tmp_path)
    assert model.generate_batch(asked, max_new_tokens=12) == wanted
    assert model.cache.counts == (0, 3)
    model.cache.close()
    model.use_cache(store=tmp_path)
    np.testing.assert_allclose(model.embed(asked), embedded, atol=1e-5)
    flipped = [(two[::-1], PROMPT)]
    found = model.generate_batch(flipped, max_new_tokens=12)
    assert model.cache.counts == (5, 0)
    model.cache = None
    assert model.generate_batch(flipped, max_new_tokens=12) == found


def test_rows_of_any_images_answer_as_each_alone(folder, odd, two):
    model = jaxvlm.load(folder("Qwen2_5_VL"))
    small, large = str(odd.parent / "2.png"), str(odd.parent / "3.png")
    asked = [(two, PROMPT), ([], "is it red?"), ([small], "which color is it?"), ([large], "it?")]
    together = model.generate_batch(asked, max_new_tokens=12)
    assert together == [model.generate(p, prompt, max_new_tokens=12) for p, prompt in asked]
    assert "".join(model.stream([small], "it?", max_new_tokens=12)).strip() == model.generate(
        Image.open(small), "it?", max_new_tokens=12
    )
    shapes = {our_batch(model, [p], "it?").patches.shape for p in (small, large)}
    assert len(shapes) == 1, "one program for both sizes"
    report = model.evaluate(str(odd), limit=6)
    assert report.metrics["loss"] != report.blind["loss"], "another image, another loss"
    with pytest.raises(jaxvlm.data.errors.DataError, match="one side is over 200 times"):
        model.generate(np.zeros((1, 300, 3), np.uint8), "it?")


def loss_and_gradients(config, name, parts=1):
    mesh = MESHES[name]
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh.data, mesh.fsdp, mesh.tensor
    run = jaxvlm.Trainer(config, devices=devices_of(mesh))
    local = next(run.dataset.train(np.arange(8)))[0]
    assert len(np.unique(local.grid.prod(-1).sum(-1))) > 4, "ragged rows"
    assert local.parent is not None, "shared images"
    params = jaxvlm.hf.pretrained.read_params(run.source, run.model.config, run.model.abstract())
    batch = to_global(run.mesh, local, 8)
    runner, loss = GradAccumulation(PlainRunner(run.model.apply), parts), NextToken()

    def objective(params, batch):
        scale = scales(loss, batch)
        sums, grads = runner.loss_grad(params, {}, batch, loss, scale)
        return sums.terms["loss"] * scale["loss"], grads

    value, grads = jax.jit(objective, out_shardings=(None, run.model.shardings))(params, batch)
    assert batch.patches.addressable_shards[0].data.shape[0] == 8 // (mesh.data * mesh.fsdp)
    return float(value), jax.device_get(grads)


@pytest.mark.parametrize(
    ("kind", "name", "parts"),
    [
        pytest.param("Qwen2_5_VL", "data2_fsdp2_tensor2", 2, marks=pytest.mark.long),
        pytest.param("Qwen2_5_VL", "fsdp8", 1, marks=pytest.mark.long),
        pytest.param("Qwen3VL", "data2_fsdp2_tensor2", 1, marks=pytest.mark.long),
    ],
)
def test_a_mesh_gives_one_devices_loss_and_gradients(kind, name, parts, folder, odd):
    config = settings(odd, folder, kind)
    value, grads = loss_and_gradients(config, "one")
    assert all(np.any(grads[path]) for path in ("vision/stem/w", "connector/w_out"))
    other, other_grads = loss_and_gradients(config, name, parts)
    close(other, value, 1e-5)
    assert_gradients_close(other_grads, grads)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from jaxvlm.cli.main import run
folder, workdir, data, recipe, image = sys.argv[1:]
common = [f"--config={recipe}", f"--config.data.train={data}"]
common += [f"--config.model.checkpoint={folder}", "--config.data.max_images_per_sequence=3"]
common += ["--config.data.image_pixels_range=(0, 768)"]
assert run(["data", "check", data, *common]) == 0
mesh = ["--config.mesh.data=1", "--config.mesh.fsdp=4", "--config.mesh.tensor=2"]
assert run(["train", *common, *mesh, f"--workdir={workdir}", "--config.steps=2"]) == 0
ask = [f"--checkpoint={workdir}", "--prompt=is it red?", f"--image={image}", "--max_new_tokens=4"]
assert run(["generate", *ask]) == 0
assert run(["export", f"--workdir={workdir}", f"--output={workdir}/out"]) == 0
"""
RECIPE = """
from jaxvlm.config import default_config

def get_config():
    config = default_config()
    config.data.batch_size, config.data.max_length = 8, 64
    config.optim.warmup_steps, config.optim.schedule = 0, "constant"
    config.optim.learning_rate = 3e-3
    config.tensorboard, config.log_every = False, 1
    return config
"""


@pytest.mark.long
def test_trained_and_exported_without_torch(folder, odd, two, tmp_path):
    recipe, workdir, source = tmp_path / "recipe.py", tmp_path / "run", folder("Qwen2_5_VL")
    recipe.write_text(RECIPE)
    args = (source, workdir, odd, recipe, odd.parent / "1.png")
    said = without_torch(WITHOUT_TORCH, *args)
    assert "patches per sequence" in said, "the step was compiled once, for packed patches"
    assert "program 2" not in said
    told = json.loads((workdir / "out" / "preprocessor_config.json").read_text())
    assert told["size"]["longest_edge"] == 768  # as the run had them, and so for transformers
    logits, _ = torch_logits(workdir / "out", two, PROMPT, new=1)
    untrained, _ = torch_logits(source, two, PROMPT, new=1)
    assert len(logits) < len(untrained)  # of smaller images
    new, old = (torch_model(x).state_dict() for x in (workdir / "out", source))
    assert any((new[name] - old[name]).abs().max() > 1e-3 for name in new)
    ours = our_logits(jaxvlm.load(workdir, "latest"), two, PROMPT)
    error = close_in_norm(ours, logits, 1e-4)
    print(f"trained: logits {error:.1e}")


def test_settings_that_do_not_fit_are_named(folder, odd, tmp_path):
    config = settings(odd, folder, "Qwen2_5_VL")
    config.data.resize = "pad"
    with pytest.raises(ConfigError, match=r"data\.resize=pad resizes to squares"):
        jaxvlm.Trainer(config)
    config.data.resize, config.data.image_pixels_range = "auto", (64, 128)
    run = jaxvlm.Trainer(config)
    largest = max(len(span.ids) for span in run.dataset.corpus.spans)
    assert largest <= 9, "8 x 64 pixels is one row of tokens that can't be made shorter"
    other = tmp_path / "other"
    other.mkdir()
    for path in folder("Qwen2_5_VL").iterdir():
        (other / path.name).symlink_to(path)
    text = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").unlink()
    (other / "preprocessor_config.json").write_text(json.dumps(text | {"merge_size": 1}))
    plain = default_config()
    plain.data.train, plain.model.vision.packed, plain.steps = str(odd), True, 1
    with pytest.raises(ConfigError, match=r"vision\.packed=True: .* config\.model\.checkpoint"):
        jaxvlm.Trainer(plain)
    plain.model.vision.packed, plain.data.image_pixels_range = False, (0, 100)
    with pytest.raises(
        ConfigError, match=r"image_pixels_range=\(0, 100\): this model takes images"
    ):
        jaxvlm.Trainer(plain)
    config.model.checkpoint = str(other)
    with pytest.raises(ConfigError, match="the image processor cuts images by"):
        jaxvlm.Trainer(config)


@pytest.mark.long
def test_kept_tokens_change_no_bit(folder, odd, tmp_path):
    """A frozen tower's tokens of images of many sizes, read instead of encoded."""
    seen = {}
    for name in ("off", "strict", "first", "second"):
        config = settings(odd, folder, "Qwen2_5_VL")
        config.steps, config.optim.frozen = 10, ("vision/*",)
        config.cache.policy, config.cache.encode_batch = "off" if name == "off" else "strict", 2
        if name in ("first", "second"):  # the second reads from disk what the first made
            config.cache.store = str(tmp_path / "store")
        jaxvlm.Trainer(config, tmp_path / name, devices=jax.devices()[:2]).fit()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [m for m in map(json.loads, lines) if "train/loss" in m]
        seen[name] = [m["train/loss"] for m in rows]
        found = [m["train/cache/hit_rate"] for m in rows]
        assert found[0] == (name == "second") and found[-1] == (name != "off")
        if name == "second":
            assert {m["train/cache/from_store"] for m in rows} == {1.0}
    assert seen["off"] == seen["strict"] and len(seen["off"]) == 10
    assert seen["first"] == seen["second"]
    np.testing.assert_allclose(seen["first"], seen["off"], rtol=1e-5)


def test_kept_places_are_those_of_the_prompt(folder, odd):
    model, image = jaxvlm.load(folder("Qwen2_5_VL")), str(odd.parent / "3.png")
    found = kept_places(model, image, "which color is it?", kv="vl_cache", kv_budget=0.3)
    visual = int(found.visual.sum())
    assert found.kept.shape[2] == len(found.tokens) > visual > 1
    heads = found.kept.shape[1]
    assert found.kept.sum() == heads * round(0.3 * found.kept[:, 0].size)
    share = found.of_image(1, visual)
    np.testing.assert_allclose(share[0], found.kept.mean((0, 1))[found.visual], rtol=1e-6)
    with pytest.raises(ValueError, match=f"the prompt has {visual} visual tokens"):
        found.of_image(visual, 2)
    with pytest.raises(ConfigError, match="kv=none keeps every place"):
        kept_places(model, image, "which color is it?", kv="none")
