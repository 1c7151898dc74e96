"""Videos: frames, their pixels and texts as transformers' processors have them; and odd files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from jaxvlm.config import ConnectorConfig, ModelConfig, VisionConfig
from jaxvlm.config.data import VideoConfig
from jaxvlm.data.errors import ImageError
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.videos import video_files, video_processor
from jaxvlm.data.videos.video_files import Clip
from jaxvlm.data.videos.video_format import Shown, VideoFormat
from jaxvlm.hf import video_families
from tests.data.video_cases import KINDS, PIXELS, frames, write

OTHERS = pathlib.Path(__file__).with_name("written_by_others")
GIVEN = json.loads((OTHERS / "videos.json").read_text())
FOLDERS = {
    "smolvlm": {"num_frames": 64, "fps": 1},
    "qwen2_5_vl": {"fps": 2},
}


def clip_of(total, fps):
    index = np.arange(total)
    return Clip(index, index == 0, index / fps, fps, 64, 48)


def load(folder, kind, settings=(), **video):
    name = KINDS[kind].video_processor
    content = {"video_processor_type": name, **FOLDERS.get(kind, {}), **dict(settings)}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(content))
    return video_processor.load(folder, kind, VideoConfig(**video))


@pytest.mark.parametrize("kind", KINDS)
def test_the_frames_are_those_that_transformers_samples(kind, tmp_path):
    compared = 0
    for total, fps, asked, theirs in GIVEN["sampled"][kind]:
        own = dict(asked)
        limit = {"max_frames": own.pop("num_frames")} if {"fps", "num_frames"} <= own.keys() else {}
        if kind == "smolvlm" and asked["fps"] == 1:  # theirs are both a rate and a limit
            own, limit = {"num_frames": asked["num_frames"]}, {}
        processor = load(tmp_path, kind, **own, **limit)
        found = clip_of(total, fps).at(processor.sample(clip_of(total, fps), processor.asked))
        assert len(found) and (np.diff(found) > 0).all() and found[-1] < total
        if theirs is None or len(theirs) > len(set(theirs)) or theirs[-1] >= total:
            continue  # fewer frames than they were asked for; a frame after the last
        assert found.tolist() == theirs, (total, fps, asked)
        compared += 1
    assert compared > 60


@pytest.mark.parametrize("name", PIXELS)
def test_pixels_are_those_of_transformers(name, tmp_path):
    """torchvision rounds as Pillow does not, by 1 of 255 levels a resize, here and there."""
    kind, settings, (count, width, height) = PIXELS[name]
    theirs = np.load(OTHERS / "videos.npz")
    processor = load(tmp_path, kind, settings)
    shown = VideoFormat(None, None, processor.change, None, "", group=processor.group)
    ours = shown.joined([processor.change(x, count) for x in frames(count, width, height)])
    if ours.ndim == 5:
        patching = Patching(settings["patch_size"], 2, 2)
        grid = (len(ours), *patching.grid(ours[0])[1:])
        assert [list(grid)] == theirs[f"{name} grid"].tolist()
        ours = np.concatenate([patching.cut(tile) for tile in ours])
        wanted = theirs[name]
    else:
        wanted = np.moveaxis(theirs[name][0], 1, -1)
    assert ours.shape == wanted.shape
    apart = np.abs(ours.astype(int) - wanted)
    assert apart.max() <= (2 if kind == "smolvlm" else 1) and apart.mean() < 0.03


SAID = {
    "any": [{"fps": 1.5}, {"num_frames": 5}],
    "limited": [{"fps": 3.0, "max_frames": 6}, {"max_frames": 3}],
    "of any size": [{"pixels_range": (0, 900)}, {"pixels_range": (300, 0), "fps": 1.0}],
}
QWENS = ("qwen2_5_vl", "qwen3_vl")
EXPORTED = [
    *((kind, video) for kind in KINDS for video in SAID["any"]),
    *((kind, video) for kind in (*QWENS, "smolvlm") for video in SAID["limited"]),
    *((kind, video) for kind in QWENS for video in SAID["of any size"]),
]
"""What transformers' processors can be told."""


@pytest.mark.parametrize(("kind", "video"), EXPORTED)
@pytest.mark.parametrize("file", ["video_preprocessor_config.json", "processor_config.json"])
def test_an_export_says_what_the_run_showed(kind, video, file, tmp_path):
    given = {"video_processor_type": KINDS[kind].video_processor, "patch_size": 4}
    given |= FOLDERS.get(kind, {}) | {"merge_size": 2}
    given |= {"size": {"shortest_edge": 64, "longest_edge": 2048}} if kind[:4] == "qwen" else {}
    if file == "processor_config.json":
        given = {"video_processor": given, "processor_class": "Any"}
    (tmp_path / file).write_text(json.dumps(given))
    wanted = video_processor.load(tmp_path, kind, VideoConfig(**video))
    video_processor.write_settings(tmp_path, kind, VideoConfig(**video))
    found = video_processor.load(tmp_path, kind, VideoConfig())
    for total in (2, 9, 60, 700):
        clip = clip_of(total, 8.0)
        frames_of = (p.sample(clip, p.asked).tolist() for p in (wanted, found))
        assert next(frames_of) == next(frames_of)
    for shape in ((4, 90, 60), (9, 20, 50)):
        assert wanted.size(*shape) == found.size(*shape)


SPECIAL = ("<image>", "<IMG_CONTEXT>", "<img>", "</img>", "<|vision_start|>", "<|vision_end|>")
SPECIAL += ("<fake_token_around_image>", "<global-img>")
MARKS = ("<image>", "<IMG_CONTEXT>")


def encode(text):
    """A token for each character, and for each special token."""
    parts = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text)
    out = []
    for part in parts:
        out += [10**6 + SPECIAL.index(part)] if part in SPECIAL else list(map(ord, part))
    return [10**6 if i - 10**6 in map(SPECIAL.index, MARKS) else i for i in out]


def decode(ids):
    known = {10**6 + i: name for i, name in enumerate(SPECIAL)} | {10**6: "V"}
    return "".join(known.get(i) or chr(i) for i in ids)


def test_the_helpers_agree():
    assert decode(encode("a<img><IMG_CONTEXT></img>\n")) == "a<img>V</img>\n"


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_video_is_that_of_transformers(kind):
    packed = kind.startswith("qwen")
    side = 20 if kind == "llava_onevision" else 16
    vision = VisionConfig(image_size=side, patch_size=4, frames=2 if packed else 1)
    if packed:
        vision = dataclasses.replace(vision, packed=True, merge_block=2)
    connector = ConnectorConfig(merge=2 if kind in ("smolvlm", "internvl") else 1)
    if kind == "llava_next_video":
        connector = ConnectorConfig(newline=True, video_pool=2)
    hf_config = {"model_type": kind, "image_token_id": 10**6, "vision_config": {}}
    given = video_families.Given(
        ModelConfig(vision=vision, connector=connector), hf_config, encode, lambda *_: (8, 16)
    )
    for indices, fps, total, theirs in GIVEN["texts"][kind]:
        shown = Shown(np.asarray(indices) / fps, total / fps, 64, 48)
        span = video_families.FORMS[kind].span(given)(shown)
        assert span.lead + decode(span.ids.tolist()) + span.trail == theirs
        assert len(span.starts) == (-(-len(indices) // 2) if packed else len(indices))
        assert (np.diff(span.positions[0]) >= 0).all()


CODECS = ("mp4", "webm", "mkv", "avi", "mov", "gif", "ts")


@pytest.fixture(scope="module")
def bright():
    """Frames by which they are told apart: each is one grey."""
    return np.broadcast_to(4 * np.arange(40, dtype=np.uint8)[:, None, None, None], (40, 48, 64, 3))


@pytest.mark.parametrize("kind", CODECS)
def test_any_frame_is_found_in_any_order(kind, bright, tmp_path):
    path = write(str(tmp_path / f"a.{kind}"), bright)
    clip = video_files.read_clip(path, 10**6)
    assert (len(clip.pts), clip.rate, clip.width, clip.height) == (40, 25.0, 64, 48)
    np.testing.assert_allclose(clip.times, np.arange(40) / 25, atol=1e-9)
    for chosen in ([0], [39], [5, 6, 7], [38, 3, 20, 3], list(range(40))):
        found = video_files.read_frames(path, clip, chosen)
        assert [x.shape for x in found] == [(48, 64, 3)] * len(chosen)
        greys = np.asarray([x.mean() for x in found])
        # Codecs lose some: MPEG-4 as much as from one of these frames to the next.
        np.testing.assert_allclose(greys, 4 * np.asarray(chosen), atol=6 if kind == "avi" else 2)


def test_a_variable_rate_is_sampled_by_time(bright, tmp_path):
    times = np.asarray([0, 0.04, 0.08, 0.5, 0.54, 0.58, 2.0, 2.04, 2.08, 3.0])
    path = write(str(tmp_path / "a.mp4"), bright[:10], times=times)
    clip = video_files.read_clip(path, 10**6)
    np.testing.assert_allclose(clip.times, times, atol=1e-3)
    assert clip.rate == pytest.approx(3.0, rel=0.01)
    shown = [int(np.flatnonzero(times <= i / 3 + 1e-3)[-1]) for i in range(10)]
    assert clip.at(np.arange(10)).tolist() == shown


def bad(tmp_path, content, name="bad.mp4"):
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "webm", "avi"])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.3, 0.7])
def test_a_truncated_file_is_refused(kind, part, bright, tmp_path):
    path = write(str(tmp_path / f"a.{kind}"), bright)
    whole = pathlib.Path(path).read_bytes()
    cut = bad(tmp_path, whole[: int(len(whole) * part)], f"cut.{kind}")
    with pytest.raises(ImageError, match=r"^(0-byte|truncated|not a video|can't be decoded)"):
        clip = video_files.read_clip(cut, 10**6)
        video_files.read_frames(cut, clip, range(len(clip.pts)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0-byte file"),
        (b"hello" * 99, "not a video that FFmpeg can read: Invalid data"),
        (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/hosts\n", "not a video that FFmpeg can read"),
        (b"ffconcat version 1.0\nfile /etc/hosts\n", "not a video that FFmpeg can read"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 99, "not a video that FFmpeg can read"),
    ],
)
def test_what_is_no_video_is_refused(content, reason, tmp_path):
    with pytest.raises(ImageError, match=reason):
        video_files.read_clip(bad(tmp_path, content), 10**6)


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    with pytest.raises(ImageError, match="missing file"):
        video_files.read_clip(str(tmp_path / "none.mp4"), 10**6)
    with pytest.raises(ImageError, match="not a regular file"):
        video_files.read_clip(str(tmp_path), 10**6)


def test_a_file_with_sound_alone_is_no_video(tmp_path):
    import av

    path = str(tmp_path / "a.mp4")
    with av.open(path, "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ImageError, match=r"^a file without a video"):
        video_files.read_clip(path, 10**6)


def test_large_frames_are_refused_by_the_setting(bright, tmp_path):
    path = write(str(tmp_path / "a.mp4"), bright[:3])
    with pytest.raises(ImageError, match=r"data\.max_pixels=3000"):
        video_files.read_clip(path, 3000)


def test_what_follows_a_whole_file_is_no_damage(bright, tmp_path):
    path = write(str(tmp_path / "a.mp4"), bright)
    with open(path, "ab") as file:
        file.write(b"appended by somebody")
    assert len(video_files.read_clip(path, 10**6).pts) == 40
