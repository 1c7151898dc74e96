"""Questions about pictures -> the batch that generation, or an embedding, starts from."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence

import jax
import numpy as np
from PIL import Image, ImageOps

from jaxvlm.build.model import Model
from jaxvlm.config import ConfigError
from jaxvlm.data import chat, formats, images, spans
from jaxvlm.data.batch import Places, lay_pictures
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.formats import PLACEHOLDER, Turn
from jaxvlm.data.prompt_rows import PromptShape, lay_prompts
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.types import Batch, Span

Picture = str | os.PathLike[str] | Image.Image | np.ndarray
"""A file, a PIL picture, or u8[H, W, 3]."""

_LENGTH_STEP = 32
"""Prompts are padded to a rung of a ladder from it on, so that few lengths are compiled."""


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
    of_rows = [[span for _, span in found] for found in loaded]
    taps = spans.most_taps(span for found in of_rows for span in found)
    rows = [
        spans.expand(_ids(found, prompt, tokenizer, instruction), tokenizer.image_id, found, taps)
        for (_, prompt), found in zip(queries, of_rows, strict=True)
    ]
    tiles = [[tile for pixels, _ in found for tile in pixels] for found in loaded]
    parts = batch_shards(model.mesh)
    B = -(-len(rows) // parts) * parts
    T = _rung(max(len(row.ids) for row in rows), _LENGTH_STEP)
    R, most = max(len(row.positions) for row in rows), max(map(len, tiles))
    made = lay_prompts(
        [*rows, *[None] * (B - len(rows))],
        PromptShape(T, most, R, taps),
        pad_id=tokenizer.pad_id,
        mask=model.config.decoder.visual_mask,
    )
    drawn = _pictures(tiles, pictures, (B, most)) if most else {}
    made = made._replace(example_id=np.arange(B, dtype=np.int32), **drawn)
    sharding = batch_sharding(model.mesh)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), made)


def _rung(count: int, step: int) -> int:
    """At least ``count``: 1, 2, 3, 4, 6, 8, 12, 16 ... times ``step``."""
    size = -(-count // step)
    power = 1 << max(size - 1, 0).bit_length()
    return step * (power * 3 // 4 if 4 * size <= 3 * power and power > 2 else power)


def _pictures(
    tiles: list[list[np.ndarray]], pictures: images.PictureFormat, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """The fields of a batch that hold each row's pictures."""
    row = np.repeat(np.arange(len(tiles)), [len(t) for t in tiles])
    slot = np.concatenate([np.arange(len(t)) for t in tiles])
    flat = [tile for found in tiles for tile in found]
    patching, most = pictures.patching, 0
    if patching is not None:
        counts = [sum(math.prod(patching.grid(x)) for x in found) for found in tiles]
        most = _rung(max(counts), patching.room(1))
    return lay_pictures(flat, Places(row, slot), shape, pictures.size, patching, most)


def _ids(
    pictures: list[Span], prompt: str, tokenizer: ChatTokenizer, instruction: str | None
) -> np.ndarray:
    marks, count = prompt.count(PLACEHOLDER), len(pictures)
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
    return chat.prompt_ids(turns, tokenizer, [span.lead for span in pictures])


def _check_free(what: str, text: str, tokens: Collection[str]) -> None:
    if forged := sorted(t for t in tokens if t in text):
        raise ConfigError(f"the {what} holds the special token {forged[0]}; leave it out")


def _load(
    picture: Picture, pictures: images.PictureFormat, max_pixels: int
) -> tuple[np.ndarray, Span]:
    """u8[tiles, H, W, 3] and the picture's span."""
    named = isinstance(picture, (str, os.PathLike))
    try:
        span = (
            pictures.of_file(str(picture))
            if isinstance(picture, (str, os.PathLike))
            else pictures.of_size(*_upright(picture).size)
        )
    except ImageError as error:
        raise DataError(f"{picture if named else 'a picture'}: {error}") from None
    pixels = load_pixels(picture, pictures.prepare, max_pixels)
    return pixels[None] if pixels.ndim == 3 else pixels, span


def load_pixels(picture: Picture, prepare: images.Preparation, max_pixels: int) -> np.ndarray:
    """A picture as ``prepare`` makes it.

    Raises:
        DataError: a file that can't be read.
    """
    if not isinstance(picture, (str, os.PathLike)):
        return prepare.convert(_upright(picture))
    try:
        return images.load(str(picture), prepare, max_pixels)
    except ImageError as error:
        raise DataError(f"{picture}: {error}") from None


def _upright(picture: Image.Image | np.ndarray) -> Image.Image:
    made = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    return ImageOps.exif_transpose(made)
