"""Questions about pictures -> the batch that generation, or an embedding, starts from."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import jax
import numpy as np
from PIL import Image, ImageOps

from jaxvlm.build.model import Model
from jaxvlm.config import ConfigError
from jaxvlm.data import chat, formats, images, spans
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.formats import PLACEHOLDER, Turn
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.types import Batch

Picture = str | os.PathLike[str] | Image.Image | np.ndarray
"""A file, a PIL picture, or u8[H, W, 3]."""

_LENGTH_STEP = 32
"""Prompts are padded to a multiple of it, so that few lengths are compiled."""


def batch(
    queries: Sequence[tuple[Sequence[Picture], str]],
    model: Model,
    tokenizer: ChatTokenizer,
    pictures: images.PictureFormat,
    max_pixels: int,
    instruction: str | None = None,
) -> Batch:
    """Prompts padded on the left to one length, pictures in fixed places.

    Args:
        queries: (pictures, prompt), each a row; ``<image>`` marks where each picture goes.
        model: on its mesh; rows are filled up to what it divides.
        tokenizer: with its chat template.
        pictures: what the model wants of them.
        max_pixels: of a picture file, at most.
        instruction: what vectors of the prompts are for; ``None``: they are to be answered.

    Raises:
        ConfigError: marks and pictures differ in number, or a special token is in the text.
        DataError: a picture can't be read.
    """
    loaded = [[_load(p, pictures, max_pixels) for p in given] for given, _ in queries]
    rows = [
        spans.expand(
            _ids(len(given), prompt, tokenizer, instruction),
            tokenizer.image_id,
            [s for _, s in found],
        )
        for (given, prompt), found in zip(queries, loaded, strict=True)
    ]
    tiles = [[tile for pixels, _ in found for tile in pixels] for found in loaded]
    parts = batch_shards(model.mesh)
    B = -(-len(rows) // parts) * parts
    T = -(-max(len(row.ids) for row in rows) // _LENGTH_STEP) * _LENGTH_STEP
    R, most = max(len(row.positions) for row in rows), max(map(len, tiles))
    tokens = np.full((B, T), tokenizer.pad_id, np.int32)
    segment, group = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    positions = np.zeros((B, R, T), np.int32)
    pixels = np.zeros((B, most, pictures.size, pictures.size, 3), np.uint8)
    start = np.full((B, most), -1, np.int32)
    for i, row in enumerate(rows):
        first = T - len(row.ids)
        tokens[i, first:], segment[i, first:] = row.ids, 1
        positions[i, :, first:], group[i, first:] = row.positions, row.tile
        for j, tile in enumerate(tiles[i]):
            pixels[i, j] = tile
            start[i, j] = first + int(np.argmax(row.tile == j + 1))
    mask = model.config.decoder.visual_mask
    group = segment if mask == "prompt" else group
    both_ways = mask == "prompt" or (mask == "prefix" and most > 0)
    made = Batch(
        tokens,
        np.zeros((B, T), np.float32),
        positions,
        segment,
        bidirectional=group if both_ways else None,
        pixels=pixels if most else None,
        image_start=start if most else None,
        example_id=np.arange(B, dtype=np.int32),
    )
    sharding = batch_sharding(model.mesh)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), made)


def _ids(count: int, prompt: str, tokenizer: ChatTokenizer, instruction: str | None) -> np.ndarray:
    marks = prompt.count(PLACEHOLDER)
    if not marks and count:
        prompt = PLACEHOLDER * count + prompt
    elif marks != count:
        raise ConfigError(
            f"the prompt has {marks} {PLACEHOLDER} marks but {count} pictures are given"
        )
    prompt = formats.tidy(prompt)
    special = tokenizer.special_tokens - {PLACEHOLDER}
    _check_free("prompt", prompt, special)
    turns = [Turn("user", prompt)]
    if instruction is not None:
        _check_free("instruction", instruction, special | {PLACEHOLDER})
        turns = chat.to_embed(prompt, instruction)
    return chat.prompt_ids(turns, tokenizer)


def _check_free(what: str, text: str, tokens: Collection[str]) -> None:
    if forged := sorted(t for t in tokens if t in text):
        raise ConfigError(f"the {what} holds the special token {forged[0]}; leave it out")


def _load(
    picture: Picture, pictures: images.PictureFormat, max_pixels: int
) -> tuple[np.ndarray, spans.Span]:
    """u8[tiles, H, W, 3] and the picture's span."""
    if isinstance(picture, (str, os.PathLike)):
        try:
            pixels = images.load(str(picture), pictures.prepare, max_pixels)
        except ImageError as error:
            raise DataError(f"{picture}: {error}") from None
        span = pictures.of_file(str(picture))
    else:
        made = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
        upright = ImageOps.exif_transpose(made)
        pixels, span = pictures.prepare.convert(upright), pictures.span(*upright.size)
    return pixels[None] if pixels.ndim == 3 else pixels, span
