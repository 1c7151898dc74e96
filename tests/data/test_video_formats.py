"""What a model is shown of a video: settings, budgets, rotation, long files, and records' marks."""

from __future__ import annotations

import io
import json
import pathlib
import tarfile

import numpy as np
import pytest

from jaxvlm.config import ConfigError, DataConfig
from jaxvlm.config.data import VideoConfig
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.member_names import as_video, bare, is_video, parse, with_file
from jaxvlm.data.videos import sampling, video_files
from jaxvlm.data.videos.sampling import Asked
from jaxvlm.data.videos.video_format import Shown, VideoFormat, asked_of
from jaxvlm.hf import video_families
from jaxvlm.types import ChatStyle, Span
from tests.data.video_cases import frames, write


def format_of(max_tokens=0, group=1, **asked):
    """Videos whose frames are 3 tokens each, a group of frames one frame's."""

    def span(shown):
        return Span.of_tiles([7] * -(-len(shown.times) // group), 7, 3)

    sample = sampling.in_groups if group > 1 else sampling.evenly
    own = (lambda frame, count: frame, span, "x", max_tokens)
    return VideoFormat(sample, Asked(group=group, **asked), *own, group if group > 1 else 0)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Three seconds of 8 frames."""
    path = tmp_path_factory.mktemp("clip") / "a.mp4"
    return as_video(write(str(path), frames(24, 48, 32), rate=8))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 6),  # the checkpoint's 2 a second
        ({"fps": 4.0}, 12),
        ({"fps": 100.0}, 24),
        ({"num_frames": 5}, 5),
        ({"num_frames": 5, "max_frames": 3}, 3),
        ({"num_frames": 100}, 24),
        ({"fps": 8.0, "max_frames": 10}, 10),
        ({"max_frames": 2}, 2),
    ],
)
def test_settings_say_how_many_frames(settings, count, clip):
    asked = asked_of(VideoConfig(**settings), Asked(fps=2.0, min_frames=1, max_frames=64))
    shown = format_of()._replace(asked=asked)
    assert len(shown.of_file(clip).starts) == count
    assert shown.decode(clip, 10**6).shape == (count, 32, 48, 3)
    assert len(shown.times(clip)) == count


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("budget", [3, 4, 7, 11, 29, 30, 1000])
def test_frames_are_left_out_until_a_video_fits(budget, group, clip):
    shown = format_of(budget, group, num_frames=20)
    tokens = len(shown.of_file(clip).ids)
    assert tokens <= budget and tokens == min(budget // 3 * 3, 3 * 20 // group)
    assert len(shown.decode(clip, 10**6)) == tokens // 3 == len(shown.times(clip)) // group


@pytest.mark.parametrize("settings", [
    {"fps": -1.0}, {"fps": float("nan")}, {"fps": float("inf")}, {"num_frames": -3},
    {"fps": 2.0, "num_frames": 4},
])  # fmt: skip
def test_settings_that_say_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match=r"fps|num_frames"):
        format_of().sampled(**{"fps": 0.0, "num_frames": 0, **settings})


def test_without_frames_to_say_how_many_max_frames_still_limits(clip):
    asked = asked_of(VideoConfig(max_frames=2), Asked(num_frames=8))
    assert len(format_of()._replace(asked=asked).times(clip)) == 2


@pytest.mark.parametrize(("group", "what"), [(1, "1 frame"), (2, "2 frames")])
def test_a_budget_below_a_frame_is_refused(group, what, clip):
    with pytest.raises(ImageError, match=rf"data\.video\.max_tokens=2 tokens in {what}"):
        format_of(2, group, num_frames=8).of_file(clip)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_rotated_video_is_upright(degrees, tmp_path):
    """A phone writes how its frames are turned into the header of the track."""
    turned = np.zeros((3, 32, 48, 3), np.uint8)
    turned[:, :16, :24] = 200  # above, on the left
    path = write(str(tmp_path / "a.mp4"), turned)
    content = pathlib.Path(path).read_bytes()
    at = content.index(b"tkhd") + 44  # after times, id, duration, layer and volume
    cos, sin = (round(65536 * f(np.deg2rad(degrees))) for f in (np.cos, np.sin))
    matrix = np.asarray([cos, sin, 0, -sin, cos, 0, 0, 0, 1 << 30], ">i4").tobytes()
    pathlib.Path(path).write_bytes(content[:at] + matrix + content[at + 36 :])
    clip = video_files.read_clip(path, 10**6)
    assert (clip.width, clip.height) == ((32, 48) if degrees % 180 else (48, 32))
    (found,) = video_files.read_frames(path, clip, [1])
    wanted = np.rot90(turned[1], -degrees // 90)  # the matrix turns clockwise
    assert found.shape == wanted.shape and np.abs(found.astype(int) - wanted).mean() < 8


def test_a_mirrored_video_is_refused(tmp_path):
    path = write(str(tmp_path / "a.mp4"), frames(3, 48, 32))
    content = pathlib.Path(path).read_bytes()
    at = content.index(b"tkhd") + 44
    matrix = np.asarray([-65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30], ">i4").tobytes()
    pathlib.Path(path).write_bytes(content[:at] + matrix + content[at + 36 :])
    clip = video_files.read_clip(path, 10**6)
    with pytest.raises(ImageError, match="shown mirrored"):
        video_files.read_frames(path, clip, [0])


def grey(count):
    """Frames that are told apart by their brightness, which B-frames keep in order."""
    return np.broadcast_to(
        4 * np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 48, 64, 3)
    )


def greys(path, clip):
    found = video_files.read_frames(path, clip, range(len(clip.pts)))
    return [x.mean() for x in found]


@pytest.mark.parametrize("kind", ["avi", "mp4", "mkv", "ts"])
def test_frames_that_are_decoded_before_others_are_in_order(kind, tmp_path):
    """An AVI with B-frames has timestamps of decoding alone."""
    options = {"bf": "3", "b-adapt": "0"}
    path = write(str(tmp_path / f"a.{kind}"), grey(40), codec="libx264", options=options)
    clip = video_files.read_clip(path, 10**6)
    np.testing.assert_allclose(greys(path, clip), 4 * np.arange(40), atol=4)


def test_open_groups_are_decoded_after_a_seek(tmp_path):
    options = {"bf": "3", "x264-params": "open-gop=1:keyint=12:min-keyint=12:scenecut=0"}
    path = write(str(tmp_path / "a.ts"), grey(48), codec="libx264", options=options)
    clip = video_files.read_clip(path, 10**6)
    for chosen in ([26], [37, 30], [47]):
        found = video_files.read_frames(path, clip, chosen)
        np.testing.assert_allclose([x.mean() for x in found], [4 * i for i in chosen], atol=4)


def test_a_recording_that_begins_anywhere_begins_at_its_first_key_frame(tmp_path):
    path = write(str(tmp_path / "a.ts"), grey(48), codec="libx264", options={"bf": "0"})
    content = pathlib.Path(path).read_bytes()
    (tmp_path / "b.ts").write_bytes(content[len(content) // 5 // 188 * 188 :])
    clip = video_files.read_clip(str(tmp_path / "b.ts"), 10**6)
    seen = greys(str(tmp_path / "b.ts"), clip)
    assert 24 <= len(seen) < 48
    np.testing.assert_allclose(seen, 4 * np.arange(48 - len(seen), 48), atol=4)


def test_a_trimmed_video_is_read_from_its_cut(tmp_path):
    """Cut without encoding it again: an edit list leaves frames out."""
    import av

    path = write(str(tmp_path / "a.mp4"), grey(48), options={"bf": "0"})
    with av.open(path) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.pts -= 5 * 512
                packet.dts -= 5 * 512
                packet.stream = stream
                target.mux(packet)
    clip = video_files.read_clip(str(tmp_path / "b.mp4"), 10**6)
    seen = greys(str(tmp_path / "b.mp4"), clip)
    np.testing.assert_allclose(seen, 4 * np.arange(48 - len(seen), 48), atol=4)


def test_an_hour_is_read_by_its_key_frames(tmp_path, monkeypatch):
    greys_of = np.zeros((3600, 16, 16, 3), np.uint8)
    greys_of[:] = (np.arange(3600) // 16)[:, None, None, None]
    path = write(str(tmp_path / "a.mp4"), greys_of, rate=1, gop=30)
    clip = video_files.read_clip(path, 10**6)
    assert clip.duration == 3600
    decoded = 0
    upright = video_files._by_seeking

    def counting(container, stream, *given):
        class Counting:
            def seek(self, *x, **y):
                return container.seek(*x, **y)

            def decode(self, which):
                nonlocal decoded
                for frame in container.decode(which):
                    decoded += 1
                    yield frame

        return upright(Counting(), stream, *given)

    monkeypatch.setattr(video_files, "_by_seeking", counting)
    chosen = [5, 1700, 1701, 3599]
    found = video_files.read_frames(path, clip, chosen)
    np.testing.assert_allclose([x.mean() for x in found], [i // 16 for i in chosen], atol=2)
    assert decoded < 200, "and not 3,600"


def read(tmp_path, record, **config):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return conversation_formats.read(str(path), DataConfig(**config))


ANSWER = {"role": "assistant", "content": "yes"}


def said(content, **more):
    return {"messages": [{"role": "user", "content": content}, ANSWER], **more}


V, W, PNG = "v.mp4::video", "w.mp4::video", "i.png"


@pytest.mark.parametrize(
    ("record", "text", "names"),
    [
        (said("is it?", videos=["v.mp4"]), "<image>is it?", [V]),
        (said("is <video>it?", video="v.mp4"), "is <image>it?", [V]),
        (said("<video>\n<image>\nis it?", videos=["v.mp4"], images=["i.png"]),
         "<image><image>is it?", [V, PNG]),
        (said("<video><image><video>?", videos=["v.mp4", "w.mp4"], image="i.png"),
         "<image><image><image>?", [V, PNG, W]),
        (said("<image>is it?", video="v.mp4"), "<image>is it?", [V]),  # LLaVA-Video
        (said([{"type": "video", "video": "v.mp4"}, {"type": "text", "text": "?"},
               {"type": "image", "image": "i.png"}]), "<image>?<image>", [V, PNG]),
        (said([{"type": "video_url", "video_url": {"url": "v.mp4"}}]), "<image>", [V]),
        (said([{"type": "video"}, {"type": "image"}], videos=["v.mp4"], images=["i.png"]),
         "<image><image>", [V, PNG]),
        (said("<video>is it?", videos=[{"path": "v.mp4"}]), "<image>is it?", [V]),
        ({"conversations": [{"from": "human", "value": "<video>\n?"},
                            {"from": "gpt", "value": "a"}], "video": "v.mp4"}, "<image>?", [V]),
        ({"question": "is it?", "answer": "yes", "video": "v.mp4"}, "<image>is it?", [V]),
    ],
)  # fmt: skip
def test_records_with_videos(record, text, names, tmp_path):
    (found,), problems = read(tmp_path, record)
    assert not problems and found.turns[0].content == text
    assert list(found.images) == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (said("<video>?"), "placeholders and videos differ in number"),
        (said("<video><video>?", videos=["v.mp4"]), "placeholders and videos differ in number"),
        (said("<image><video>?", videos=["v.mp4"]), "placeholders and images differ in number"),
        (said("<image><image>?", videos=["v.mp4"]), "placeholders and images differ in number"),
        (said("?", videos=["https://a.b/v.mp4"]), "a video that is not a file"),
        (said("?", videos=[["a.png", "b.png"]]), "a video's name is not text"),
        (said("?", videos=["v.mp4"], video="v.mp4"), "both 'video' and 'videos'"),
        (said([{"type": "video", "video": "v.mp4"}], videos=["w.mp4"]), "named both in the"),
        (said([{"type": "text", "text": "<video>"}]), "'<video>' written inside a content list's"),
    ],
)
def test_marks_that_do_not_fit_are_named(record, reason, tmp_path):
    found, (problem,) = read(tmp_path, record)
    assert not found and reason in problem.reason


def test_the_mark_may_be_a_text(tmp_path):
    words = {"literal_markers": ("<video>",)}
    (record,), problems = read(tmp_path, said("what is <video> in HTML?"), **words)
    assert not problems and record.turns[0].content == "what is <video> in HTML?"
    (record,), problems = read(tmp_path, said("is <video> in <image>?", images=["i.png"]), **words)
    assert not problems and record.turns[0].content == "is <video> in <image>?"
    _, (problem,) = read(tmp_path, said("<video>?", videos=["v.mp4"]), **words)
    assert problem.reason == "a video, and '<video>' in data.literal_markers"


@pytest.mark.parametrize("name", ["a.mp4", "/d/s.tar::512+10::x.mp4", "data:video/mp4;base64,AA=="])
def test_a_videos_name_is_its_files(name):
    video = as_video(name)
    assert is_video(video) and as_video(video) == video and bare(video) == name
    assert not is_video(name) and parse(video) == parse(name)
    moved = with_file(video, lambda file: f"/new{file}")
    assert is_video(moved) and bare(moved) == with_file(name, lambda file: f"/new{file}")


def test_a_tars_videos_are_found_from_any_folder(tmp_path, monkeypatch):
    path = write(str(tmp_path / "a.mp4"), frames(4, 48, 32))
    (tmp_path / "d").mkdir()
    with tarfile.open(tmp_path / "d" / "s.tar", "w") as tar:
        for i in range(2):
            tar.add(path, f"{i}.mp4")
            text = json.dumps({"question": "is it?", "answer": "yes"} if i else {"caption": "a"})
            info = tarfile.TarInfo(f"{i}.json")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    monkeypatch.chdir(tmp_path)
    records, problems = conversation_formats.read("d/s.tar")
    assert not problems and len(records) == 2
    for record in records:
        assert is_video(record.images[0])
        assert len(video_files.read_clip(record.images[0], 10**6).pts) == 4


@pytest.mark.parametrize("own_form", [False, True])
def test_frames_as_images_are_written_as_images(own_form):
    """What a family writes around an image is around each frame."""
    style = ChatStyle("<W>", "(<image>)", video="<video>" if own_form else "")
    span = video_families.as_images(
        lambda width, height: Span.of(7, 2), lambda text: list(map(ord, text)), style, "<image>"
    )(Shown(np.arange(3.0), 3.0, 8, 8))
    text = "".join("V" if i == 7 else chr(i) for i in span.ids.tolist())
    assert text == ("(VV)(VV)(VV)" if own_form else "VV)(VV)(VV")
    assert np.flatnonzero(np.diff(span.tile) > 0).size + (span.tile[0] > 0) == 3
    assert span.positions[0].tolist() == list(range(len(text))) and span.advance == len(text)


def test_settings_of_videos_without_a_video_are_refused(word_tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(said("is it?")) + "\n")
    config = DataConfig(train=str(path), video=VideoConfig(num_frames=3))
    with pytest.raises(DataError, match=r"data\.video is set, but no record has a video"):
        load_dataset(config, word_tokenizer, image_size=8, num_patches=4)
