"""Videos of the tests, and what is asked of transformers' processors about them."""

from __future__ import annotations

import fractions
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


def frames(count: int, width: int, height: int) -> np.ndarray:
    """u8[count, H, W, 3]: frames with detail at all scales, the same on every machine."""
    i, y, x, c = np.ogrid[:count, :height, :width, :3]
    fine = 37 * x * y + 11 * x * x + 53 * y + 91 * c
    coarse = 128 + 90 * np.sin(x / 9 + i) * np.cos(y / 7 - c)
    return ((fine % 64) + coarse.astype(np.int64) + 17 * i).astype(np.uint8)


def write(path: str, pixels: np.ndarray, rate: Any = 25, codec: str = "", **more: Any) -> str:
    """Write u8[n, H, W, 3] to a video file; returns its name.

    Args:
        path: file, whose extension says the container.
        pixels: both sides are even.
        rate: frames a second.
        codec: "" is the container's usual one.
        more: ``times``, of the frames in seconds; ``gop``, frames from a key frame to the next;
            ``options`` of the encoder.
    """
    import av

    usual = {"gif": "gif", "webm": "libvpx-vp9", "avi": "mpeg4", "ts": "mpeg2video"}
    codec = codec or usual.get(path.rpartition(".")[2], "libx264")
    times, unit = more.get("times"), fractions.Fraction(1, 1000)
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = pixels.shape[2], pixels.shape[1]
        stream.pix_fmt = "rgb8" if codec == "gif" else more.get("pix_fmt", "yuv420p")
        stream.codec_context.gop_size = more.get("gop", 12)
        stream.options = more.get("options", {})
        if times is not None:
            stream.codec_context.time_base = unit
        for i, frame in enumerate(pixels):
            own = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times is not None:
                own.pts, own.time_base = round(times[i] * 1000), unit
            container.mux(stream.encode(own))
        container.mux(stream.encode())
    return path


class Kind(NamedTuple):
    """A family whose processors are asked."""

    module: str
    video_processor: str
    processor: str
    of_text: Callable[[int], dict[str, Any]]
    """Number of frames -> attributes of a processor that writes a video's text; ``inputs`` are
    those of its call."""


def _qwen(count: int) -> dict[str, Any]:
    return {
        "inputs": {"video_grid_thw": np.asarray([[-(-count // 2), 2, 4]])},
        "video_processor": types.SimpleNamespace(merge_size=2, temporal_patch_size=2),
        "video_token": "V",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }


def _smolvlm(count: int) -> dict[str, Any]:
    return {
        "inputs": {"pixel_values": np.zeros((1, count, 3, 4, 4))},
        "image_seq_len": 4,
        "image_token": "V",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }


def _internvl(count: int) -> dict[str, Any]:
    return {
        "inputs": {"pixel_values_videos": np.zeros((1, count, 3, 4, 4))},
        "start_image_token": "<img>",
        "image_token": "V",
        "end_image_token": "</img>",
        "image_seq_length": 4,
    }


def _next_video(count: int) -> dict[str, Any]:
    return {
        "inputs": {"pixel_values_videos": np.zeros((1, count, 3, 8, 8))},
        "patch_size": 2,
        "video_token": "V",
    }


def _onevision(count: int) -> dict[str, Any]:
    return {
        "inputs": {"pixel_values_videos": np.zeros((1, count, 3, 4, 4))},
        "num_image_tokens": 25,
        "video_token": "V",
    }


KINDS = {
    "qwen2_5_vl": Kind("qwen2_vl", "Qwen2VLVideoProcessor", "Qwen2VLProcessor", _qwen),
    "qwen3_vl": Kind("qwen3_vl", "Qwen3VLVideoProcessor", "Qwen3VLProcessor", _qwen),
    "smolvlm": Kind("smolvlm", "SmolVLMVideoProcessor", "SmolVLMProcessor", _smolvlm),
    "internvl": Kind("internvl", "InternVLVideoProcessor", "InternVLProcessor", _internvl),
    "llava_onevision": Kind(
        "llava_onevision", "LlavaOnevisionVideoProcessor", "LlavaOnevisionProcessor", _onevision
    ),
    "llava_next_video": Kind(
        "llava_next_video", "LlavaNextVideoVideoProcessor", "LlavaNextVideoProcessor", _next_video
    ),
}
CLIPS = [
    *((1, 25.0), (2, 30.0), (3, 24.0), (7, 10.0), (16, 8.0), (33, 29.97), (60, 60.0)),
    *((90, 23.976), (121, 24.0), (250, 25.0), (816, 10.0), (1726, 10.0), (1896, 50.0)),
]
"""(frames, frames a second)."""
_COUNTS: list[dict[str, Any]] = [{"num_frames": n} for n in (1, 2, 5, 8, 13)]
_RATES: list[dict[str, Any]] = [{"fps": x} for x in (0.1, 0.25, 0.33)]
ROUTES = {
    **{kind: [*_COUNTS, *_RATES] for kind in KINDS},
    "smolvlm": [{"fps": 1, **x} for x in _COUNTS] + [{"num_frames": 9, **x} for x in _RATES],
}
"""Kind -> what is asked of ``sample_frames``."""
_SQUARE: dict[str, Any] = {"size": {"height": 20, "width": 20}}
PIXELS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "qwen2.5 as it is": (
        "qwen2_5_vl",
        {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}},
        (4, 48, 40),
    ),
    "qwen2.5 smaller": (
        "qwen2_5_vl",
        {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}},
        (3, 90, 62),
    ),
    "qwen2.5 capped": (
        "qwen2_5_vl",
        {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}}
        | {"cap_pixels_per_frame": True, "max_video_tokens": 40},
        (6, 90, 62),
    ),
    "qwen3": (
        "qwen3_vl",
        {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}},
        (5, 70, 50),
    ),
    "qwen3 larger": (
        "qwen3_vl",
        {"patch_size": 4, "size": {"shortest_edge": 6000, "longest_edge": 9000}},
        (2, 30, 44),
    ),
    "qwen3 tiny": (
        "qwen3_vl",
        {"patch_size": 8, "size": {"shortest_edge": 64, "longest_edge": 4096}},
        (2, 12, 40),
    ),
    "qwen3 capped": (
        "qwen3_vl",
        {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 9000}}
        | {"cap_pixels_per_frame": True, "max_video_tokens": 12},
        (4, 70, 50),
    ),
    "smolvlm": (
        "smolvlm",
        {"size": {"longest_edge": 40}, "max_image_size": {"longest_edge": 24}},
        (2, 62, 34),
    ),
    "smolvlm upright": (
        "smolvlm",
        {"size": {"longest_edge": 41}, "max_image_size": {"longest_edge": 24}},
        (1, 34, 62),
    ),
    "internvl": ("internvl", _SQUARE, (2, 62, 34)),
    "onevision": ("llava_onevision", _SQUARE, (2, 34, 62)),
    **{
        f"next video {width} x {height}": (
            "llava_next_video",
            {"size": {"shortest_edge": edge}, "crop_size": {"height": 20, "width": 20}},
            (2, width, height),
        )
        for width, height, edge in ((34, 62, 20), (61, 41, 20), (41, 30, 20), (30, 24, 17))
    },
}
"""Name -> (kind, settings of its processor, (frames, width, height))."""
TEXTS: list[tuple[list[int], float, int]] = [
    ([0], 25.0, 1),
    ([0, 12], 24.0, 20),
    ([0, 15, 31, 44, 60], 29.97, 61),
    ([30, 1830, 4000], 30.0, 120000),
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 4.0, 12),
]
"""(indices of frames, frames a second, frames)."""
