"""How a run's model takes videos."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from jaxvlm.config import Config
from jaxvlm.data.errors import DataError
from jaxvlm.data.images.image_files import ImageFormat
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.data.videos import sampling, video_processor
from jaxvlm.data.videos.sampling import Asked
from jaxvlm.data.videos.video_format import VideoFormat, asked_of, fingerprint
from jaxvlm.hf import video_families
from jaxvlm.hf.pretrained import Source

_FRAMES = Asked(num_frames=8)
"""Frames of a video in families that have no processor of their own for videos."""


def of_run(
    images: ImageFormat,
    config: Config,
    tokenizer: ChatTokenizer,
    source: Source | None,
) -> VideoFormat:
    """Return how videos are prepared for a run's model.

    Families without a form of their own for videos take their frames as images.

    Args:
        images: how it takes images.
        config: of the run.
        tokenizer: the run's.
        source: the checkpoint that the model starts from.

    Raises:
        DataError: the checkpoint's files, or settings of videos that do not fit the model.
    """
    data = config.data
    kind = str(source.hf_config["model_type"]) if source else ""
    if source is None or kind not in video_families.FORMS or data.resize != "auto":
        return _as_images(images, config, tokenizer)
    processor = video_processor.load(source.files, kind, data.video)
    given = video_families.Given(config.model, source.hf_config, tokenizer.encode, processor.size)
    side = config.model.vision.image_size
    if not config.model.vision.packed and (found := processor.size(1, 60, 40)) != (side, side):
        raise DataError(
            f"{source.files}: the video processor returns frames of {found[1]} x {found[0]} "
            f"pixels, but the model takes {side} x {side}"
        )
    _check_same(source, config, processor)
    return VideoFormat(
        processor.sample,
        processor.asked,
        processor.change,
        video_families.FORMS[kind].span(given),
        fingerprint(kind, processor.asked, processor.settings, data.video.max_tokens),
        data.video.max_tokens,
        processor.group,
        data.max_pixels,
    )


def _check_same(source: Source, config: Config, processor: video_processor.Processor) -> None:
    """Refuse videos that are prepared for another model; raises DataError."""
    vision = config.model.vision
    own: dict[str, Any] = {
        "image_mean": list(vision.pixel_mean),
        "image_std": list(vision.pixel_std),
        "patch_size": vision.patch_size,
        "merge_size": vision.merge_block,
        "temporal_patch_size": vision.frames,
    }
    for name, value in processor.checked.items():
        if not np.allclose(value, own[name], atol=1e-6):
            raise DataError(
                f"{source.files}: the video processor has {name}={value}, but the model and its "
                f"images have {own[name]}"
            )


def _as_images(images: ImageFormat, config: Config, tokenizer: ChatTokenizer) -> VideoFormat:
    video, asked = config.data.video, asked_of(config.data.video, _FRAMES)
    if any(video.pixels_range):
        raise DataError(
            f"data.video.pixels_range={video.pixels_range}: frames are images in this model; "
            "leave it out"
        )
    prepare = images.prepare
    mark = tokenizer.special["image_token"]
    return VideoFormat(
        sampling.evenly,
        asked,
        lambda frame, count: prepare.convert(Image.fromarray(frame)),
        video_families.as_images(images.of_size, tokenizer.encode, tokenizer.style, mark),
        fingerprint(prepare.fingerprint, asked, video.max_tokens),
        video.max_tokens,
        max_pixels=config.data.max_pixels,
    )
