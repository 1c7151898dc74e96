"""Videos in Qwen2-VL, Qwen2.5-VL and Qwen3-VL: their tokens and where those stand.

Sources: arXiv 2409.12191, 2502.13923, 2511.21631.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import ConfigError, ModelConfig
from jaxvlm.models.families.qwen_vl import grid_span
from jaxvlm.types import Span


def video_span(
    config: ModelConfig, hf_config: Mapping[str, Any], encode: Callable[[str], Sequence[int]]
) -> Callable[..., Span]:
    """What stands for a video: a function of its grid and its times.

    Qwen2-VL and Qwen2.5-VL see one run of tokens whose positions go on in time, as one tile; to
    Qwen3-VL each frame is a picture of its own, between marks, behind its time in words.

    Args:
        config: of :func:`config_from_hf`.
        hf_config: as there.
        encode: ids of a text.

    Returns:
        ``find(grid, interval, times=())``: ``grid`` is (frames, rows, columns) in tokens, where a
        frame is ``temporal_patch_size`` pictures; ``interval`` the seconds from a frame to the
        next; ``times`` when each is shown, in seconds; without it they follow from ``interval``.
    """
    kind, video_id = hf_config["model_type"], _id(hf_config, "video_token_id")
    apart = kind.startswith("qwen3")
    marks = [_id(hf_config, f"vision_{end}_token_id") for end in ("start", "end") if apart]
    rate = (hf_config.get("vision_config") or {}).get("tokens_per_second", 4)

    def find(grid: tuple[int, int, int], interval: float, times: Sequence[float] = ()) -> Span:
        if not apart:
            return grid_span(video_id, grid, rate * interval if kind == "qwen2_5_vl" else 1.0)
        pictures, one = config.vision.frames, grid_span(video_id, (1, *grid[1:]))
        middle = (pictures - 1) / (2 * pictures)  # of a frame's pictures, in intervals
        parts = []
        for time in times or [interval * (i + middle) for i in range(grid[0])]:
            words = [*encode(f"<{time:.1f} seconds>"), marks[0]]
            parts += [Span.of(video_id, 0, words), one, Span.of(video_id, 0, marks[1:])]
        return _joined(parts)

    return find


def _joined(parts: Sequence[Span]) -> Span:
    """Spans one after another as one."""
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
