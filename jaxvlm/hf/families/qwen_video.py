"""Videos in Qwen2-VL, Qwen2.5-VL and Qwen3-VL: their tokens and rotary positions.

Sources: arXiv 2409.12191, 2502.13923, 2511.21631.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.hf.families.qwen_vl import grid_span
from jaxvlm.types import Span


def video_span(
    config: ModelConfig, hf_config: Mapping[str, Any], encode: Callable[[str], Sequence[int]]
) -> Callable[..., Span]:
    """Return a function from a video's grid and times to its tokens.

    In Qwen2-VL and Qwen2.5-VL a video is one tile of consecutive tokens whose temporal positions
    increase. In Qwen3-VL each frame is an image, between start and end tokens, after a text with
    its time.

    Args:
        config: settings of the model.
        hf_config: content of ``config.json``.
        encode: returns the token ids of a text.

    Returns:
        ``of_video(grid, interval, times=())``. ``grid`` is (frames, rows, columns) in tokens, where
        a frame is ``temporal_patch_size`` images; ``interval`` the seconds between frames;
        ``times`` the seconds at which each frame is shown, by default from ``interval``.
    """
    kind, video_id = hf_config["model_type"], _id(hf_config, "video_token_id")
    separate = kind.startswith("qwen3")
    marks = [_id(hf_config, f"vision_{end}_token_id") for end in ("start", "end") if separate]
    rate = (hf_config.get("vision_config") or {}).get("tokens_per_second", 4)

    def of_video(grid: tuple[int, int, int], interval: float, times: Sequence[float] = ()) -> Span:
        if not separate:
            return grid_span(video_id, grid, rate * interval if kind == "qwen2_5_vl" else 1.0)
        images, frame = config.vision.frames, grid_span(video_id, (1, *grid[1:]))
        middle = (images - 1) / (2 * images)  # mean time of a frame's images, in intervals
        parts = []
        for time in times or [interval * (i + middle) for i in range(grid[0])]:
            before = [*encode(f"<{time:.1f} seconds>"), marks[0]]
            parts += [Span.of(video_id, 0, before), frame, Span.of(video_id, 0, marks[1:])]
        return _concatenate(parts)

    return of_video


def _concatenate(parts: Sequence[Span]) -> Span:
    """Concatenate spans."""
    positions, tiles, place, count = [], [], 0, 0
    for part in parts:
        positions.append(np.broadcast_to(part.positions + place, (3, len(part.ids))))
        tiles.append(np.where(part.tile > 0, part.tile + count, 0))
        place, count = place + part.advance, count + len(part.starts)
    ids = np.concatenate([part.ids for part in parts])
    tile = np.concatenate(tiles).astype(np.int32)
    return Span(ids, tile, np.concatenate(positions, axis=1).astype(np.int32), place)


def _id(hf_config: Mapping[str, Any], name: str) -> int:
    if hf_config.get(name) is None:
        raise ConfigError(f"config.json: {name} is missing")
    return int(hf_config[name])
