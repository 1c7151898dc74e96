"""Collate prompts, with their image placeholders expanded, into a padded batch of one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.data.image_placeholders import Expanded
from jaxvlm.types import Batch


class PromptShape(NamedTuple):
    """Static shape of a batch of prompts."""

    tokens: int
    """T, tokens of a prompt, padding included."""
    images: int
    """I: images, or their tiles; 0 leaves the batch's image fields None."""
    position_rows: int = 1
    """R: rotary positions of a token."""
    taps: int = 0
    """K, see ``Batch.image_source``."""


def collate_prompts(
    prompts: Sequence[Expanded | None],
    shape: PromptShape,
    *,
    pad_id: int,
    mask: str = "causal",
    padding: str = "left",
) -> Batch:
    """Collate prompts, one a sequence; the caller fills in pixels and keys of the images.

    Args:
        prompts: prompt of each sequence; ``None`` is a sequence of padding.
        shape: static shape of the batch.
        pad_id: id of the padding token.
        mask: which tokens attend to each other bidirectionally, see ``DecoderConfig.visual_mask``.
        padding: side on which prompts are padded: left | right.

    Returns:
        A batch without images; its loss weights are all 0.

    Raises:
        ValueError: ``padding`` is neither left nor right.
    """
    if padding not in ("left", "right"):
        raise ValueError(f"padding={padding!r} is unknown; use left or right")
    B, (T, images, R, taps) = len(prompts), shape
    tokens = np.full((B, T), pad_id, np.int32)
    segment, group = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    positions = np.zeros((B, R, T), np.int32)
    start = np.full((B, images), -1, np.int32)
    source = np.full((B, T, taps), -1, np.int32)
    weight = np.zeros((B, T, taps), np.float32)
    for i, prompt in enumerate(prompts):
        if prompt is None:
            continue
        first = T - len(prompt.ids) if padding == "left" else 0
        span = slice(first, first + len(prompt.ids))
        tokens[i, span], segment[i, span] = prompt.ids, 1
        positions[i, :, span], group[i, span] = prompt.positions, prompt.tile
        start[i, : len(prompt.starts)] = [first + at for at in prompt.starts]
        if prompt.source is not None:
            source[i, span], weight[i, span] = prompt.source, prompt.weight
    bidirectional = mask == "prompt" or (mask == "prefix" and images > 0)
    return Batch(
        tokens,
        np.zeros((B, T), np.float32),
        positions,
        segment,
        bidirectional=(segment if mask == "prompt" else group) if bidirectional else None,
        image_start=start if images else None,
        image_source=source if taps else None,
        image_weight=weight if taps > 1 else None,
    )
