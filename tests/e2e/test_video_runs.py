"""Videos through the ordinary commands: trained, cached, packed, checked and answered."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from checkpoints import write_llava, write_qwen_vl
from numerics import close_in_norm
from PIL import Image

import jaxvlm
from jaxvlm.cli.main import run as command
from jaxvlm.config import ConfigError, MeshConfig, default_config
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.member_names import is_video
from jaxvlm.inference import prediction_grid, prompts
from jaxvlm.models.vit import per_value
from tests.data.video_cases import frames, write

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

TEMPLATE = (
    "{%- for message in messages -%}{{- '<' + message['role'] + '>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else "
    "'<|vision_start|><|video_pad|><|vision_end|>' if part['type'] == 'video' else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}{{- '<eos>' if message['role'] == 'assistant' else '' -}}"
    "{%- endfor -%}{{- '<assistant>' if add_generation_prompt else '' -}}"
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Questions about videos of several lengths and sizes, and about images."""
    folder = tmp_path_factory.mktemp("seen")
    lines = []
    for i in range(16):
        kind = ("mp4", "webm", "mkv", "avi")[i % 4]
        count, width, height = 5 + 4 * (i % 5), 48 + 16 * (i % 2), 32 + 16 * (i % 3)
        write(str(folder / f"{i}.{kind}"), frames(count, width, height) // 2 + 9 * (i % 8), rate=8)
        Image.fromarray(frames(1, 40, 24)[0] // 2 + 7 * i).save(folder / f"{i}.png")
        question = ("is it red? <video>", "<video> which color is it?")[i % 2]
        record = {"id": f"v{i}", "videos": [f"{i}.{kind}"]}
        if i % 3 == 0:
            question, record["images"] = f"<image> or {question}", [f"{i}.png"]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "blue"}]
        lines.append(json.dumps(record | {"messages": turns}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(seen, tmp_path_factory):
    made = tmp_path_factory.mktemp("hf")

    @functools.cache
    def of(kind):
        if kind == "Llava":
            return write_llava(made / kind, seen, dtype="float32")
        write_qwen_vl(made / kind, seen, kind)
        (made / kind / "chat_template.jinja").write_text(TEMPLATE)
        processor = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 2048}, "fps": 4}
        (made / kind / "video_preprocessor_config.json").write_text(json.dumps(processor))
        return made / kind

    return of


def settings(seen, folder, **more):
    config = default_config()
    config.model.checkpoint = str(folder)
    config.data.train = str(seen)
    config.data.batch_size, config.data.max_length, config.data.max_images_per_sequence = 4, 160, 12
    config.data.video.max_frames = 6
    config.optim.warmup_steps, config.optim.schedule = 0, "constant"
    config.optim.learning_rate = 1e-3
    config.steps, config.tensorboard, config.log_every = 6, False, 1
    config.update_from_flattened_dict(more)
    return config


ONE = {"devices": jax.devices()[:1]}
RECIPE = """
from tests.e2e.test_video_runs import settings

def get_config():
    return settings({seen!r}, {folder!r})
"""


def losses(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row["train/loss"] for row in map(json.loads, lines) if "train/loss" in row]


def our_batch(model, images, prompt):
    how = (model.model, model.tokenizer, model.image_format, 10**6)
    batch = prompts.to_answer([(images, prompt)], *how).batch
    return jax.tree.map(lambda x: np.asarray(x)[0], batch)


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_video_is_read_as_transformers_reads_it(kind, folder, seen, capsys):
    """Ids, positions, logits and the answer, given the same frames."""
    path = folder(kind)
    model = jaxvlm.load(path, mesh=MeshConfig(data=1, fsdp=4, tensor=2))
    name, image = str(seen.parent / "3.avi"), str(seen.parent / "3.png")
    images, prompt = [image, jaxvlm.video(name)], "<image> or is it <video> red?"
    batch = our_batch(model, images, prompt)
    real, vision = batch.segment > 0, model.config.model.vision
    grid = batch.grid[batch.grid.prod(-1) > 0]
    assert len(grid) > 2 and (grid[1:] == grid[1]).all()
    pad = model.tokenizer.image_id
    ids, others = batch.tokens[real].copy(), json.loads((path / "config.json").read_text())
    visual = np.flatnonzero(ids == pad)
    ids[visual[grid[0].prod() // 4 :]] = others["video_token_id"]

    theirs = getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(
        path, dtype=torch.float32
    )
    theirs.eval()
    mean, std = (per_value(x, vision) for x in (vision.pixel_mean, vision.pixel_std))
    pixels = torch.from_numpy(((batch.patches / 255.0 - mean) / std).astype(np.float32))
    first, last = grid[0].prod(), grid.prod(-1).sum()
    token = torch.from_numpy(ids[None]).long()
    clip = model.image_format.prepare.of_videos()
    shown = clip.times(jaxvlm.video(name))
    given = {
        "input_ids": token,
        "mm_token_type_ids": (token == pad).int() + 2 * (token == others["video_token_id"]).int(),
        "image_grid_thw": torch.from_numpy(grid[:1]).long(),
        "video_grid_thw": torch.tensor([[len(grid) - 1, *grid[1, 1:]]]),
    }
    if kind == "Qwen2_5_VL":  # 17 frames at 8 a second
        given["second_per_grid_ts"] = [2 * (17 / 8) / len(shown)]
    positions, _ = theirs.model.get_rope_index(**given)
    np.testing.assert_array_equal(batch.positions[:, real], positions[:, 0].numpy())
    given |= {"pixel_values": pixels[:first], "pixel_values_videos": pixels[first:last]}
    theirs.model.rope_deltas = None
    with torch.no_grad():
        wanted = theirs(**given).logits[0].numpy()
        theirs.model.rope_deltas = None
        answer = theirs.generate(**given, max_new_tokens=8, do_sample=False)[0, token.shape[1] :]
    whole = prompts.to_answer(
        [(images, prompt)], model.model, model.tokenizer, model.image_format, 10**6
    ).batch
    out = jax.jit(model.model.apply)(model.params, whole)
    ours = np.asarray(out.logits(out.hidden))[0][real]
    error = close_in_norm(ours, wanted, 1e-4)
    print(f"{kind}: logits {error:.1e}")
    expected = model.tokenizer.decode(answer.tolist()).strip()
    assert model.generate(images, prompt, max_new_tokens=8) == expected
    if kind == "Qwen2_5_VL":
        said = [f"--checkpoint={path}", f"--prompt={prompt}", f"--image={image}"]
        said += [f"--video={name}", "--max_new_tokens=8"]
        capsys.readouterr()
        assert command(["generate", *said]) == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Llava"])
def test_a_run_is_the_same_with_the_cache_and_from_a_packed_set(kind, folder, seen, tmp_path):
    """Frozen encoder: the losses' bits with the cache off and on, and of a packed set."""
    frozen = {"optim.frozen": ("vision/*",), "cache.encode_batch": 2}
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(seen=str(seen), folder=str(folder(kind))))
    plain = settings(seen, folder(kind), **frozen)
    jaxvlm.Trainer(plain, tmp_path / "off", **ONE).fit()
    wanted = losses(tmp_path / "off")
    assert len(wanted) == 6 and np.isfinite(wanted).all()
    cached = settings(seen, folder(kind), **frozen, **{"cache.policy": "strict"})
    trainer = jaxvlm.Trainer(cached, tmp_path / "on", **ONE)
    trainer.fit()
    assert losses(tmp_path / "on") == wanted
    hits = (tmp_path / "on" / "metrics.jsonl").read_text()
    assert '"train/cache/hit_rate": 1.0' in hits, "every frame has pages of its own"
    assert any(map(is_video, trainer.dataset.corpus.paths))
    data = pathlib.Path(tmp_path / "set")
    assert command(["data", "pack", f"--config={recipe}", f"--output={data}"]) == 0
    jaxvlm.Trainer(settings(data, folder(kind), **frozen), tmp_path / "packed", **ONE).fit()
    assert losses(tmp_path / "packed") == wanted
    fewer = settings(data, folder(kind), **frozen, **{"data.video.max_frames": 4})
    with pytest.raises(DataError, match="was packed for other settings: videos"):
        jaxvlm.Trainer(fewer, tmp_path / "fewer", **ONE)


def test_a_damaged_video_is_named_by_the_check_and_by_the_run(folder, seen, tmp_path, capsys):
    for path in seen.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / "2.mkv").read_bytes()
    (tmp_path / "2.mkv").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "4.mp4").write_bytes(b"")
    (tmp_path / "5.webm").unlink()
    config = settings(tmp_path / "data.jsonl", folder("Qwen2_5_VL"))
    config.data.max_skip_fraction = 0.5
    run = jaxvlm.Trainer(config, **ONE)
    bad = {"v2": "truncated file", "v4": "0-byte file", "v5": "missing file"}
    assert {p.id: p.reason for p in run.dataset.problems} == bad
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(seen=str(seen), folder=str(folder("Qwen2_5_VL"))))
    capsys.readouterr()
    assert command(["data", "check", config.data.train, f"--config={recipe}", "--json"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["problems"] == {reason: [name] for name, reason in bad.items()}


def test_a_videos_frames_are_read_from_the_cache(folder, seen, tmp_path):
    model = jaxvlm.load(folder("Qwen2_5_VL"), mesh=MeshConfig(data=1, fsdp=4, tensor=2))
    video = jaxvlm.video(seen.parent / "3.avi")
    wanted = model.generate(video, "is it red?", max_new_tokens=8)
    model.use_cache(memory_mb=8)
    assert [model.generate(video, "is it red?", max_new_tokens=8) for _ in range(2)] == [wanted] * 2
    hits, misses = model.cache.counts
    assert hits == misses == 4  # 17 frames at 8 a second, 4 a second, two in one: 8 in 4
    model.sample_videos(num_frames=4)
    other = model.generate(video, "is it red?", max_new_tokens=8)
    model.cache = None
    assert model.generate(video, "is it red?", max_new_tokens=8) == other


def test_a_prediction_grid_shows_frames(seen, tmp_path):
    name = jaxvlm.video(seen.parent / "3.avi")
    cells = [prediction_grid.Prediction(name, "is it red?", "yes", "no")]
    prediction_grid.draw_predictions(cells, tmp_path / "grid.png")
    drawn = prediction_grid.pixels(tmp_path / "grid.png").astype(int)
    cell = drawn[8:136, 8:136]
    assert np.abs(cell[:40, :40] - cell[80:120, 80:120]).mean() > 5, "other frames"


def test_marks_and_videos_that_do_not_fit_are_refused(folder, seen):
    model = jaxvlm.load(folder("Qwen2_5_VL"))
    image, video = str(seen.parent / "3.png"), jaxvlm.video(seen.parent / "3.avi")
    with pytest.raises(ConfigError, match="another order"):
        model.generate([image, video], "<video> or <image>?")
    with pytest.raises(ConfigError, match="2 <image> and <video> marks but 1 images"):
        model.generate([video], "<image> or <video>?")
    assert isinstance(model.generate(video, "is it red?", max_new_tokens=2), str)
