"""Choose the frames of a video that a model is shown, as transformers' video processors do.

Each function takes a clip and how many frames are asked for, and returns places at an even rate,
see :meth:`Clip.at`. Where theirs raises because a video is shorter than what is asked for, these
take the frames that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxvlm.data.videos.video_files import Clip


class Asked(NamedTuple):
    """How many frames are asked for."""

    fps: float = 0.0
    """Frames a second; 0: ``num_frames`` says how many."""
    num_frames: int = 0
    """Frames of a video, whatever its length; 0: ``fps`` says."""
    min_frames: int = 1
    max_frames: int = 0
    """Limit of what ``fps`` asks for; 0: none."""
    group: int = 1
    """Frames that become one."""


Sample = Callable[[Clip, Asked], np.ndarray]


def evenly(clip: Clip, asked: Asked) -> np.ndarray:
    """LLaVA-OneVision and LLaVA-NeXT-Video: the first frame of each of equal parts."""
    total = len(clip.pts)
    count = _count(clip, asked)
    return np.arange(count) * total // count


def middles(clip: Clip, asked: Asked, shift: float | None = None) -> np.ndarray:
    """InternVL: the frame in the middle of each of equal parts, or ``shift`` from its beginning."""
    total, count = len(clip.pts), _count(clip, asked)
    step = total / count
    return _steps(count, step, step / 2 if shift is None else shift)


def in_groups(clip: Clip, asked: Asked) -> np.ndarray:
    """Qwen2-VL and Qwen2.5-VL: a number of frames that their temporal patches divide."""
    total, group = len(clip.pts), asked.group
    if asked.num_frames:
        count = min(round(asked.num_frames / group) * group, total)
    else:
        most = min(asked.max_frames or total, total) // group * group
        wanted = min(max(total / clip.rate * asked.fps, asked.min_frames), most, total)
        count = int(wanted // group) * group
    count = max(count, 1)
    return _steps(count, total / count)


def from_first_to_last(clip: Clip, asked: Asked) -> np.ndarray:
    """Qwen3-VL: frames at equal distances, the first and the last among them."""
    count = _count(clip, asked)
    return np.linspace(0, len(clip.pts) - 1, count).round().astype(np.int64)


_SKIPPED = 1.0
"""Seconds at a long video's ends that SmolVLM leaves out."""


def without_ends(clip: Clip, asked: Asked) -> np.ndarray:
    """SmolVLM: ``fps`` frames a second, at most ``num_frames``, without a long video's ends."""
    total = len(clip.pts)
    most = asked.num_frames or asked.max_frames or total
    count = max(min(round(asked.fps * clip.duration), most), 1)
    first, last = 0, total - 1
    if clip.duration - 2 * _SKIPPED > most * asked.fps:
        first = int(_SKIPPED * clip.rate)
        last = min(int(total - _SKIPPED * clip.rate), total - 1)
    if first >= last:
        first, last = 0, total - 1
    return np.unique(np.linspace(first, last, count, dtype=np.int64))


def _steps(count: int, step: float, first: float = 0.0) -> np.ndarray:
    """``first + i * step``, cut to whole numbers after the rounding of ``torch.arange``."""
    return (first + np.arange(count) * step).astype(np.float32).astype(np.int64)


def _count(clip: Clip, asked: Asked) -> int:
    total = len(clip.pts)
    if asked.num_frames:
        return min(asked.num_frames, total)
    count = max(int(total / clip.rate * asked.fps), asked.min_frames, 1)
    return min(count, asked.max_frames or total, total)
