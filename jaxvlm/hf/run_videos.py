"""How a run's model takes videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from jaxvlm.config import Config
from jaxvlm.data.errors import DataError
from jaxvlm.data.images.image_files import ImageFormat, Pixels, Preparation
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
    encode: Callable[[str], Sequence[int]],
    source: Source | None,
) -> VideoFormat:
    """Return how videos are prepared for a run's model.

    Families without a form of their own for videos take their frames as images.

    Args:
        images: how it takes images.
        config: of the run.
        encode: token ids of a text.
        source: the checkpoint that the model starts from.

    Raises:
        DataError: the checkpoint's files, or settings of videos that do not fit the model.
    """
    data = config.data
    kind = str(source.hf_config["model_type"]) if source else ""
    if source is None or kind not in video_families.FORMS or data.resize != "auto":
        return _as_images(images, config, encode)
    processor = video_processor.load(source.files, kind, data.video)
    given = video_families.Given(config.model, source.hf_config, encode, processor.size)
    side = config.model.vision.image_size
    if not config.model.vision.packed and (found := processor.size(1, 60, 40)) != (side, side):
        raise DataError(
            f"{source.files}: the video processor returns frames of {found[1]} x {found[0]} "
            f"pixels, but the model takes {side} x {side}"
        )
    return VideoFormat(
        processor.sample,
        processor.asked,
        processor.convert,
        video_families.FORMS[kind].span(given),
        fingerprint(kind, processor.asked, processor.settings, data.video.max_tokens),
        data.video.max_tokens,
    )


def _as_images(
    images: ImageFormat, config: Config, encode: Callable[[str], Sequence[int]]
) -> VideoFormat:
    video, asked = config.data.video, asked_of(config.data.video, _FRAMES)
    if any(video.pixels_range):
        raise DataError(
            f"data.video.pixels_range={video.pixels_range}: frames are images in this model; "
            "leave it out"
        )
    prepare = images.prepare
    return VideoFormat(
        sampling.evenly,
        asked,
        lambda frames: _converted(prepare, frames),
        video_families.as_images(images.of_size, encode),
        fingerprint(prepare.fingerprint, asked, video.max_tokens),
        video.max_tokens,
    )


def _converted(prepare: Preparation, frames: Sequence[np.ndarray]) -> Pixels:
    """The tiles of all frames, one frame after another."""
    done = [prepare.convert(Image.fromarray(frame)) for frame in frames]
    return np.concatenate([x[None] if x.ndim == 3 else x for x in done])
