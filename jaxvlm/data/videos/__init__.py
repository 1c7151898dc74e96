"""Videos: which frames of a file a model is shown, and their pixels."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxvlm.data.images.patches import Pixels
from jaxvlm.types import Span


@runtime_checkable
class Videos(Protocol):
    """How a model takes videos; see ``jaxvlm.data.videos.video_format``."""

    @property
    def fingerprint(self) -> str:
        """Formats with equal fingerprints show the same pixels."""

    def of_file(self, path: str) -> Span:
        """Compute the token span of a video file; raises ImageError."""

    def decode(self, path: str, max_pixels: int) -> Pixels:
        """Decode and preprocess a video's frames; raises ImageError."""

    def sampled(self, fps: float, num_frames: int) -> Videos:
        """The format with another number of frames."""
