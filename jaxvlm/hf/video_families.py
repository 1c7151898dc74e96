"""Videos of the families that have a form for them: the tokens of the frames that are shown.

They are those of transformers' processors.

A video's visual tokens have the id of the image token, whatever the family's own: they are replaced
by features, so that their id changes nothing. A tile is a frame, or in Qwen-VLs the frames that one
temporal patch holds.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import ModelConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.videos.video_format import Shown
from jaxvlm.hf.families import anyres
from jaxvlm.hf.families.config_reader import image_token_id
from jaxvlm.hf.families.qwen_vl import grid_span
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import NEWLINE, ChatStyle, Sources, Span

VideoSpan = Callable[[Shown], Span]


class Given(NamedTuple):
    """What the tokens of a video follow from, besides the video."""

    config: ModelConfig
    hf_config: Mapping[str, Any]
    """Content of ``config.json``."""
    encode: Callable[[str], Sequence[int]]
    """Token ids of a text."""
    size: Callable[[int, int, int], tuple[int, int]]
    """(frames, width, height) of a video -> (height, width) of its preprocessed frames."""

    @property
    def image_id(self) -> int:
        """Id of the image token."""
        return image_token_id(self.hf_config)

    def grid(self, shown: Shown) -> tuple[int, int, int]:
        """(tiles, rows, columns) of visual tokens of a video of packed patches."""
        vision = self.config.vision
        side = vision.patch_size * vision.merge_block
        count = len(shown.times)
        height, width = self.size(count, shown.width, shown.height)
        return -(-count // vision.frames), height // side, width // side


def as_images(
    of_image: Callable[[int, int], Span],
    encode: Callable[[str], Sequence[int]],
    style: ChatStyle,
    mark: str,
) -> VideoSpan:
    """Spans of families without a form of their own for videos: their frames as images.

    Args:
        of_image: (width, height) of an image -> its tokens.
        encode: token ids of a text.
        style: how the family writes images.
        mark: the image token.
    """
    before, _, after = style.seen.partition(mark)

    def text(content: str) -> list[Span]:
        return [Span.of(-1, 0, encode(content))] if content else []

    def of_video(shown: Shown) -> Span:
        frame = of_image(shown.width, shown.height)
        between = text(after + frame.lead + before)
        rest = [part for _ in shown.times[1:] for part in (*between, frame)]
        if not style.video:  # what the model reads for an image is around all of them
            return concatenate([frame, *rest])._replace(lead=frame.lead)
        return concatenate([*text(before), frame, *rest, *text(after)])._replace(lead=frame.lead)

    return of_video


def concatenate(parts: Sequence[Span]) -> Span:
    """Return the span of images one after another; their leads are left out."""
    positions, tiles, features, place, count = [], [], [], 0, 0
    for part in parts:
        positions.append(part.positions + place)
        tiles.append(np.where(part.tile > 0, part.tile + count * (part.sources is None), 0))
        if part.sources is not None:
            own = part.sources.feature
            features.append(np.where(own >= 0, own + count * part.sources.per_tile, own))
        place, count = place + part.advance, count + len(part.starts)
    ids = np.concatenate([part.ids for part in parts])
    tile = np.concatenate(tiles).astype(np.int32)
    sources = parts[0].sources
    if sources is not None:
        joined = np.concatenate(features).astype(np.int32)
        sources = sources._replace(feature=joined, tiles=count)
    return Span(ids, tile, np.concatenate(positions, axis=1).astype(np.int32), place, sources)


def _qwen2(given: Given) -> VideoSpan:
    """Consecutive tokens, whose temporal positions are those of time in Qwen2.5-VL."""
    timed = given.hf_config["model_type"] == "qwen2_5_vl"
    rate = (given.hf_config.get("vision_config") or {}).get("tokens_per_second", 4)

    def of_video(shown: Shown) -> Span:
        interval = given.config.vision.frames * shown.duration / len(shown.times)
        grid = given.grid(shown)
        span = grid_span(given.image_id, grid, rate * interval if timed else 1.0)
        return span._replace(
            tile=np.repeat(np.arange(grid[0], dtype=np.int32) + 1, grid[1] * grid[2])
        )

    return of_video


def _qwen3(given: Given) -> VideoSpan:
    """Each tile as an image, between start and end tokens, after its time."""
    group = given.config.vision.frames

    def of_video(shown: Shown) -> Span:
        tiles, rows, columns = given.grid(shown)
        times = [*shown.times, *shown.times[-1:].repeat(tiles * group - len(shown.times))]
        means = [(times[i] + times[i + group - 1]) / 2 for i in range(0, len(times), group)]
        said = [f"<{mean:.1f} seconds>" for mean in means]
        frame = grid_span(given.image_id, (1, rows, columns))
        parts = []
        for i, text in enumerate(said):
            before = given.encode((text if i else "") + "<|vision_start|>")
            parts += [_text(before), frame, _text(given.encode("<|vision_end|>"))]
        return concatenate(parts)._replace(lead=said[0])

    return of_video


def _text(ids: Sequence[int]) -> Span:
    """Return the span of a text, with the positions of a model of three rows."""
    at = np.arange(len(ids), dtype=np.int32)
    zeros = np.zeros(len(ids), np.int32)
    return Span(np.asarray(ids, np.int32), zeros, np.stack([at] * 3), len(ids))


def _internvl(given: Given) -> VideoSpan:
    """Frames by their number."""
    count = num_visual_tokens(given.config)

    @functools.cache
    def of(frames: int) -> Span:
        said = [f"\nFrame{i + 1}: <img><IMG_CONTEXT></img>" for i in range(frames)]
        lead, text = said[0][1:].split("<", 1)[0], "".join(said).split("<", 1)[1]
        return Span.of_tiles(given.encode(f"<{text}"), given.image_id, count)._replace(lead=lead)

    return lambda shown: of(len(shown.times))


_IMAGE = "<fake_token_around_image><global-img><image><fake_token_around_image>"


def _smolvlm(given: Given) -> VideoSpan:
    """Frames by minutes and seconds, after how many they are and how long the video is."""
    count = num_visual_tokens(given.config)

    def of_video(shown: Shown) -> Span:
        length = datetime.timedelta(seconds=int(shown.duration))
        seconds = [int(time) for time in shown.times]
        said = [f"\nFrame from {s // 60:02d}:{s % 60:02d}:" for s in seconds]
        lead = (
            f"You are provided the following series of {_words(len(seconds))} frames from a "
            f"{length} [H:MM:SS] video.\n{said[0]}"
        )
        text = _IMAGE + "".join(time + _IMAGE for time in said[1:])
        span = Span.of_tiles(given.encode(text), given.image_id, count)
        return span._replace(lead=lead, trail="\n\n")

    return of_video


def _words(number: int) -> str:
    try:
        from num2words import num2words
    except ImportError:
        raise DataError(
            "SmolVLM reads the number of a video's frames in words; install num2words: "
            "pip install 'jaxvlm[video]'"
        ) from None
    return str(num2words(number))


def _onevision(given: Given) -> VideoSpan:
    """Features of each frame, interpolated to about a quarter of them, and one newline."""
    vision = given.config.vision
    side = vision.image_size // vision.patch_size
    index, weight = anyres.bilinear(
        np.arange(side * side).reshape(side, side), (-(-side // 2), -(-side // 2))
    )

    @functools.cache
    def of(frames: int) -> Span:
        feature = np.arange(frames)[:, None, None, None] * side * side + index
        feature = np.concatenate([feature.reshape(-1, 4), np.full((1, 4), NEWLINE)])
        share = np.concatenate([np.tile(weight.reshape(-1, 4), (frames, 1)), np.zeros((1, 4))])
        sources = Sources(feature.astype(np.int32), share.astype(np.float32), frames, side * side)
        return Span.of(given.image_id, len(feature))._replace(sources=sources)

    return lambda shown: of(len(shown.times))


def _next_video(given: Given) -> VideoSpan:
    """Features of each frame's pooled patches, which come after those of its patches."""
    vision = given.config.vision
    side = vision.image_size // vision.patch_size
    pooled = (side // given.config.connector.video_pool) ** 2
    per_tile = side * side + pooled

    @functools.cache
    def of(frames: int) -> Span:
        feature = np.arange(frames)[:, None] * per_tile + side * side + np.arange(pooled)
        sources = Sources(feature.reshape(-1, 1).astype(np.int32), None, frames, per_tile)
        return Span.of(given.image_id, frames * pooled)._replace(sources=sources)

    return lambda shown: of(len(shown.times))


class Form(NamedTuple):
    """How a family's videos are written."""

    written: str
    """Text that its chat template writes for a video."""
    span: Callable[[Given], VideoSpan]


_QWEN3 = Form("<|vision_start|><|video_pad|><|vision_end|>", _qwen3)
FORMS = {
    "qwen2_vl": Form("<|video_pad|>", _qwen2),
    "qwen2_5_vl": Form("<|video_pad|>", _qwen2),
    "qwen3_vl": _QWEN3,  # these tokens are around each frame
    "qwen3_vl_moe": _QWEN3,
    "internvl": Form("<video>", _internvl),
    "smolvlm": Form("<video>", _smolvlm),
    "llava_onevision": Form("<video>", _onevision),
    "llava_next_video": Form("<video>", _next_video),
}
"""``model_type`` -> the form of its videos."""


def with_videos(style: ChatStyle, hf_config: Mapping[str, Any]) -> ChatStyle:
    """How a family writes images, and videos if it has a form for them."""
    form = FORMS.get(str(hf_config.get("model_type")))
    return style if form is None else style._replace(video=form.written)
