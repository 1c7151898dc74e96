"""Preprocess videos as a Hugging Face checkpoint requires, from its files.

transformers' own video processors need torch and torchvision. Frames are resized by Pillow, as its
image processors do here; torchvision rounds otherwise, by 1 of 255 levels in about one value of a
hundred.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxvlm.config import json_text
from jaxvlm.config.data import VideoConfig
from jaxvlm.config.merge import write_json
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import resize
from jaxvlm.data.videos import sampling
from jaxvlm.data.videos.sampling import Asked, Sample
from jaxvlm.data.videos.video_format import asked_of

_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_DEFAULT_FRAMES = 8
"""Frames of a video where neither the settings nor the checkpoint say how many."""


class Processor(NamedTuple):
    """Video preprocessing of a checkpoint."""

    sample: Sample
    asked: Asked
    size: Callable[[int, int, int], tuple[int, int]]
    """(frames, width, height) of a video -> (height, width) of its preprocessed frames."""
    change: Callable[[np.ndarray, int], np.ndarray]
    """See :attr:`VideoFormat.change`."""
    settings: Mapping[str, Any]
    """What the pixels follow from."""
    group: int = 0
    """See :attr:`VideoFormat.group`."""
    checked: Mapping[str, Any] = {}
    """Settings of the file that have to be the model's."""


class _Kind(NamedTuple):
    """A class of transformers' video processors."""

    name: str
    sample: Sample
    defaults: Mapping[str, Any]


_QWEN = {"temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768, "fps": 2}
_SQUARE = {"size": {"height": 384, "width": 384}}
_KINDS = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"),
        _Kind(
            "Qwen2VLVideoProcessor",
            sampling.in_groups,
            _QWEN
            | {"size": {"shortest_edge": 100352, "longest_edge": 602112}, "patch_size": 14}
            | {"max_video_tokens": 128000},
        ),
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"),
        _Kind(
            "Qwen3VLVideoProcessor",
            sampling.from_first_to_last,
            _QWEN
            | {"size": {"shortest_edge": 131072, "longest_edge": 786432}, "patch_size": 16}
            | {"max_video_tokens": 768},
        ),
    ),
    "smolvlm": _Kind(
        "SmolVLMVideoProcessor",
        sampling.without_ends,
        {
            "size": {"longest_edge": 1456},
            "max_image_size": {"longest_edge": 364},
            "resample": 1,
            "fps": 1,
            "num_frames": 64,
        },
    ),
    "internvl": _Kind("InternVLVideoProcessor", sampling.middles, _SQUARE),
    "llava_onevision": _Kind("LlavaOnevisionVideoProcessor", sampling.evenly, _SQUARE),
    "llava_next_video": _Kind(
        "LlavaNextVideoVideoProcessor",
        sampling.evenly,
        {"size": {"shortest_edge": 224}, "do_center_crop": True}
        | {"crop_size": {"height": 224, "width": 224}},
    ),
}
"""``model_type`` -> its video processor, with defaults as of transformers 5."""
_BICUBIC = 3
_ON = ("do_rescale", "do_normalize", "do_resize")


def load(folder: str | os.PathLike[str], model_type: str, video: VideoConfig) -> Processor:
    """Load the video processor of a checkpoint's folder.

    Args:
        folder: holds ``processor_config.json`` with a ``video_processor`` in it, or
            ``video_preprocessor_config.json``, or the ``preprocessor_config.json`` of older ones.
        model_type: of the checkpoint, one that has a video processor.
        video: settings that take precedence.

    Raises:
        DataError: a file is damaged, or uses an option that jaxvlm does not support.
    """
    kind = _KINDS[model_type]
    path, given = _read(pathlib.Path(folder))
    names = ["image_mean", "image_std"]
    if kind.sample in (sampling.in_groups, sampling.from_first_to_last):
        names += ["patch_size", "merge_size", "temporal_patch_size"]
    checked = {name: given[name] for name in names if given.get(name) is not None}
    try:
        return _load(path, given, kind, video)._replace(checked=checked)
    except DataError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DataError(f"{path}: {type(error).__name__}: {error}") from None


def write_settings(folder: pathlib.Path, model_type: str, video: VideoConfig) -> None:
    """Write ``data.video`` into the video processor's file of a folder, for transformers.

    A folder whose videos follow from its images' file gets one for videos.

    Args:
        folder: holds a checkpoint.
        model_type: of the checkpoint; nothing is written for one that has no video processor.
        video: settings of the run.
    """
    if model_type not in _KINDS:
        return
    path, given = _read(folder)
    kind = _KINDS[model_type]
    settings = {**given, "video_processor_type": kind.name, "do_sample_frames": True}
    for name in ("image_processor_type", "processor_class"):
        settings.pop(name, None)
    if video.fps or video.num_frames:
        # transformers takes one of the two; SmolVLM's number of frames is a limit
        settings |= {"fps": video.fps or None, "num_frames": video.num_frames or None}
        if video.num_frames and kind.sample is not sampling.without_ends:
            settings["fps"] = None
    if video.max_frames and kind.sample is sampling.without_ends:
        settings["num_frames"] = video.num_frames or video.max_frames
    elif video.max_frames and "max_frames" in kind.defaults:
        settings["max_frames"] = video.max_frames
        settings["min_frames"] = min(kind.defaults["min_frames"], video.max_frames)
    if any(video.pixels_range):
        size = {**kind.defaults["size"], **settings.get("size", {})}
        names = zip(("shortest_edge", "longest_edge"), ("min_pixels", "max_pixels"), strict=True)
        for own, (key, old) in zip(video.pixels_range, names, strict=True):
            size[key] = own or settings.pop(old, None) or size[key]
            settings.pop(old, None)
        settings["size"] = size
    if path.name == "processor_config.json":
        write_json(path, {**json_text.read(path), "video_processor": settings})
    else:
        write_json(folder / _FILES[0], settings)


def _read(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    path = folder / "processor_config.json"
    try:
        if path.is_file():
            given = json_text.read(path).get("video_processor")
            if isinstance(given, dict):
                return path, given
        for path in (folder / name for name in _FILES):
            if path.is_file():
                return path, dict(json_text.read(path))
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}; fetch it again") from None
    raise DataError(f"{folder / _FILES[0]} is missing; videos can't be prepared without it")


def _load(
    path: pathlib.Path, given: Mapping[str, Any], kind: _Kind, video: VideoConfig
) -> Processor:
    named = given.get("video_processor_type", kind.name)
    if named != kind.name:
        raise DataError(
            f"{path}: video_processor_type={named!r} is not supported, only {kind.name}"
        )
    file = {name: value for name, value in given.items() if value is not None}
    settings = {**kind.defaults, **file}
    if abs(255 * float(settings.get("rescale_factor", 1 / 255)) - 1) > 1e-6:
        raise DataError(f"{path}: rescale_factor is not supported for videos, only 1/255")
    for name in _ON:
        if not settings.get(name, True):
            raise DataError(f"{path}: {name}=False is not supported for videos; set it to true")
    if kind.name.startswith("Qwen"):
        return _any_size(path, settings, kind, video)
    if any(video.pixels_range):
        raise DataError(
            f"data.video.pixels_range={video.pixels_range}: frames have one size in this model; "
            "leave it out"
        )
    own = settings.get("video_sampling") or {}
    asked = Asked(
        fps=float(own.get("fps", file.get("fps", kind.defaults.get("fps", 0)))),
        num_frames=int(own.get("max_frames", file.get("num_frames", 0))),
    )
    if kind.sample is sampling.without_ends:
        most = asked.num_frames or kind.defaults["num_frames"]
        asked = asked._replace(max_frames=most, num_frames=0)
    elif not asked.num_frames and not asked.fps:
        asked = asked._replace(num_frames=_DEFAULT_FRAMES)
    size = file.get("size") or own.get("video_size")  # as theirs, whatever is said first
    steps = _steps(settings | ({"size": size} if size else {}))
    resample = Image.Resampling(settings.get("resample", _BICUBIC))

    def change(frame: np.ndarray, count: int) -> np.ndarray:
        return _through(steps, frame, resample)

    height, width = change(np.zeros((40, 60, 3), np.uint8), 1).shape[:2]
    side = height, width
    pixels = [str(steps), int(resample)]
    sample = kind.sample
    if sample is sampling.middles and settings.get("initial_shift", True) is not True:
        sample = functools.partial(sample, shift=float(settings["initial_shift"]))
        pixels.append(f"shift {settings['initial_shift']}")
    return Processor(sample, asked_of(video, asked), lambda *_: side, change, {"pixels": pixels})


def _any_size(
    path: pathlib.Path, settings: Mapping[str, Any], kind: _Kind, video: VideoConfig
) -> Processor:
    """Qwen-VLs: frames keep their shape, and ``temporal_patch_size`` of them become one."""
    group = int(settings["temporal_patch_size"])
    side = int(settings["patch_size"]) * int(settings["merge_size"])
    size = dict(settings["size"])
    for own, key, old in zip(
        video.pixels_range, ("shortest_edge", "longest_edge"), ("min_pixels", "max_pixels"),
        strict=True,
    ):  # fmt: skip
        theirs = settings.get(old) if kind.sample is sampling.in_groups else None
        size[key] = int(own or theirs or size[key])
    least, most = size["shortest_edge"], size["longest_edge"]
    if not 0 < least <= most:
        raise DataError(
            f"data.video.pixels_range={video.pixels_range} with the limits of {path}: videos of "
            f"{least} to {most} pixels; set it to a minimum and a larger maximum"
        )
    whole = kind.sample is sampling.from_first_to_last  # limits are those of all frames together
    tokens = int(settings["max_video_tokens"]) if settings.get("cap_pixels_per_frame") else 0
    resample = Image.Resampling(settings.get("resample", _BICUBIC))
    asked = Asked(
        float(settings.get("fps") or 0),
        int(settings.get("num_frames") or 0),
        int(settings["min_frames"]),
        int(settings["max_frames"]),
        group,
    )

    def fit(frames: int, width: int, height: int) -> tuple[int, int]:
        largest, floor = most, int(least * 1.05)
        budget = video.max_tokens * side**2 * group or largest * frames  # pixels of all frames
        if whole:
            if tokens:
                largest = max(min(tokens * side**2, most // frames), floor) * frames
            largest = min(largest, budget)
            return _fit_video(frames, width, height, group, side, min(least, largest), largest)
        if tokens:
            largest = max(min(most, int(tokens * side**2 * 0.9) * group // frames), floor)
        largest = min(largest, max(budget // frames, 1))
        wide, high = resize.fit(width, height, side, min(least, largest), largest)
        return high, wide

    def change(frame: np.ndarray, count: int) -> np.ndarray:
        return _resized(frame, *fit(count, frame.shape[1], frame.shape[0]), resample)

    pixels = [kind.name, least, most, tokens, video.max_tokens, side, group, int(resample)]
    return Processor(kind.sample, asked_of(video, asked), fit, change, {"pixels": pixels}, group)


def _fit_video(
    frames: int, width: int, height: int, group: int, side: int, least: int, most: int
) -> tuple[int, int]:
    """(height, width), multiples of ``side``, so that all frames together have ``least`` to
    ``most`` pixels.

    Source: Qwen3-VL's video processor in transformers 5, ``smart_resize``.
    """
    frames = max(frames, group)
    if min(height, width) < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > 200 * min(height, width):
        raise ValueError(
            f"frames of {width} x {height} pixels: one side is over 200 times the other"
        )
    high, wide = round(height / side) * side, round(width / side) * side
    count = round(frames / group) * group
    if count * high * wide > most:
        shrink = math.sqrt(frames * height * width / most)
        high = max(side, math.floor(height / shrink / side) * side)
        wide = max(side, math.floor(width / shrink / side) * side)
    elif count * high * wide < least:
        grow = math.sqrt(least / (frames * height * width))
        high = math.ceil(height * grow / side) * side
        wide = math.ceil(width * grow / side) * side
    return high, wide


Step = tuple[str, int, int]
"""``resize`` to (height, width), ``shortest`` or ``longest`` side, or ``crop`` the middle."""


def _steps(settings: Mapping[str, Any]) -> list[Step]:
    """What is done to frames that get one size, in order."""
    size = settings["size"]
    if "height" in size:
        steps = [("resize", int(size["height"]), int(size["width"]))]
    elif "longest_edge" in size and "shortest_edge" not in size:
        steps = [("longest", int(size["longest_edge"]), 0)]
    else:
        steps = [("shortest", int(size["shortest_edge"]), 0)]
    if "max_image_size" in settings:
        side = int(settings["max_image_size"]["longest_edge"])
        steps.append(("resize", side, side))
    if settings.get("do_center_crop"):
        crop = settings["crop_size"]
        steps.append(("crop", int(crop["height"]), int(crop["width"])))
    return steps


def _through(steps: Sequence[Step], frame: np.ndarray, resample: Image.Resampling) -> np.ndarray:
    for name, height, width in steps:
        own_height, own_width = frame.shape[:2]
        if name == "crop":
            frame = _cropped(frame, height, width)
            continue
        if name == "shortest":
            short, long = sorted((own_height, own_width))
            sides = height, int(height * long / short)
            height, width = sides if own_height <= own_width else sides[::-1]
        elif name == "longest":
            height, width = _longest(own_height, own_width, height)
        frame = _resized(frame, height, width, resample)
    return frame


def _longest(height: int, width: int, side: int) -> tuple[int, int]:
    """Scale to a longest side; the other one is even. Source: SmolVLM's video processor."""
    side = min(side, 4096)
    if width >= height:
        other = int(side / (width / height))
        return max(other + other % 2, 1), side
    other = int(side * (width / height))
    return side, max(other + other % 2, 1)


def _resized(frame: np.ndarray, height: int, width: int, resample: Image.Resampling) -> np.ndarray:
    """Resize along rows and then along columns, as torchvision does and Pillow not always."""
    if frame.shape[:2] == (height, width):
        return frame
    wide = Image.fromarray(frame).resize((width, frame.shape[0]), resample)
    return np.asarray(wide.resize((width, height), resample))


def _cropped(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """The middle of a frame, with zeros around one that is smaller."""
    down, right = frame.shape[0] - height, frame.shape[1] - width
    if down < 0 or right < 0:
        pad = [(max(-d, 0) // 2, max(-d, 0) - max(-d, 0) // 2) for d in (down, right)]
        frame = np.pad(frame, (*pad, (0, 0)))
        down, right = frame.shape[0] - height, frame.shape[1] - width
    top, left = down // 2, right // 2
    return frame[top : top + height, left : left + width]
