"""How a model takes videos: the frames that it is shown, their pixels, and their tokens."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.config.data import VideoConfig
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.images.patches import Pixels
from jaxvlm.data.videos import video_files
from jaxvlm.data.videos.sampling import Asked, Sample
from jaxvlm.data.videos.video_files import Clip
from jaxvlm.types import Span


class Shown(NamedTuple):
    """What a model is shown of a video."""

    times: np.ndarray
    """f64[k]: seconds at which the frames are shown in the video."""
    duration: float
    """Of the video, in seconds."""
    width: int
    """Of the video's upright frames, in pixels."""
    height: int


class VideoFormat(NamedTuple):
    """Video input of a model."""

    sample: Sample
    """Chooses frames."""
    asked: Asked
    """How many."""
    change: Callable[[np.ndarray, int], np.ndarray]
    """(u8[H, W, 3], number of frames) -> a frame preprocessed, u8[H', W', 3], or its tiles."""
    span: Callable[[Shown], Span]
    """The tokens of a video."""
    fingerprint: str
    """Formats with equal fingerprints show the same pixels."""
    max_tokens: int = 0
    """Maximum number of visual tokens of a video: frames are left out until they fit; 0: none."""
    group: int = 0
    """Frames that become one tile, u8[group, H', W', 3]; 0: each frame has tiles of its own."""
    max_pixels: int = sys.maxsize
    """Maximum of a frame's width times height."""

    def of_file(self, path: str) -> Span:
        """Compute the token span of a video file.

        Raises:
            ImageError: it can't be read, or takes too many tokens.
        """
        return self._shown(video_files.read_clip(path, self.max_pixels))[1]

    def decode(self, path: str, max_pixels: int) -> Pixels:
        """Decode and preprocess the frames of a video.

        Returns:
            u8[tiles, H', W', 3], or with a ``group`` u8[tiles, group, H', W', 3].

        Raises:
            ImageError: a frame can't be decoded; the message is the reason.
        """
        clip = video_files.read_clip(path, max_pixels)
        frames = self._shown(clip)[0].tolist()
        done = video_files.read_frames(
            path, clip, frames, lambda frame: self.change(frame, len(frames))
        )
        return self.joined(done)

    def joined(self, frames: Sequence[np.ndarray]) -> Pixels:
        """The tiles of preprocessed frames, one after another; see :meth:`decode`."""
        if not self.group:
            return np.concatenate([x[None] if x.ndim == 3 else x for x in frames])
        padded = [*frames, *[frames[-1]] * (-len(frames) % self.group)]
        return np.stack(padded).reshape(-1, self.group, *padded[0].shape)

    def sampled(self, fps: float, num_frames: int) -> VideoFormat:
        """The format with another number of frames; see ``VideoConfig``.

        Raises:
            ConfigError: a number can't be one of frames, or both are given.
        """
        if not 0 <= fps < math.inf or num_frames < 0:
            raise ConfigError(
                f"fps={fps} and num_frames={num_frames} of videos: must be 0 or more, and finite"
            )
        asked = asked_of(VideoConfig(fps=fps, num_frames=num_frames), self.asked)
        return self._replace(asked=asked, fingerprint=fingerprint(self.fingerprint, asked))

    def times(self, path: str) -> list[float]:
        """Seconds at which the frames that are shown are in the video."""
        clip = video_files.read_clip(path, self.max_pixels)
        return [float(x) for x in clip.times[self._shown(clip)[0]]]

    def _shown(self, clip: Clip) -> tuple[np.ndarray, Span]:
        """Indices of the frames, and the video's tokens."""
        asked, group, before = self.asked, self.asked.group, len(clip.pts) + 1
        while True:
            frames = clip.at(self.sample(clip, asked))
            span, count = self._span(clip, frames), len(frames)
            tokens = int((span.tile > 0).sum())
            if not self.max_tokens or tokens <= self.max_tokens:
                return frames, span
            fewer = min(count * self.max_tokens // tokens, count - 1) // group * group
            if not fewer or count >= before:
                least = (
                    f"{count} frames" if fewer else f"{group} frames" if group > 1 else "1 frame"
                )
                raise ImageError(
                    f"more than data.video.max_tokens={self.max_tokens} tokens in {least}"
                )
            asked, before = asked._replace(num_frames=fewer), count

    def _span(self, clip: Clip, frames: np.ndarray) -> Span:
        try:
            shown = Shown(clip.times[frames], clip.duration, clip.width, clip.height)
            return self.span(shown)._replace(is_video=True)
        except DataError:
            raise  # nothing of this video: a package is missing
        except ValueError as error:
            raise ImageError(str(error)) from None


def asked_of(video: VideoConfig, asked: Asked) -> Asked:
    """What the settings ask for, and where they are silent, the checkpoint."""
    if video.fps:
        asked = asked._replace(fps=video.fps, num_frames=0)
    if video.max_frames:
        least = min(asked.min_frames, video.max_frames)
        asked = asked._replace(max_frames=video.max_frames, min_frames=least)
    count = video.num_frames or asked.num_frames
    return asked._replace(num_frames=min(count, video.max_frames or count))


def fingerprint(*parts: object) -> str:
    """What the frames and pixels of a video follow from, besides its file, to be read by people."""
    return f"video {json.dumps(parts, default=str)}"
