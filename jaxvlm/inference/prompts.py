"""Collates prompts with images into the batch that is answered or embedded."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image, ImageOps

from jaxvlm.config import ConfigError
from jaxvlm.data import image_placeholders
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.collate import (
    Places,
    PromptShape,
    collate_inputs,
    collate_prompts,
)
from jaxvlm.data.conversations.packing import bucket
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.image_inputs import ImageCache, ImageInput, ImageInputs
from jaxvlm.data.image_placeholders import BOTH_MARKS, VIDEO_MARK, Expanded, Lead
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import conversation_formats, fields, visuals
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Turn
from jaxvlm.data.sources.member_names import as_video, shown
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.inference.generate import SharedPrefixes
from jaxvlm.inference.visual_tokens import VisualTokens
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding, local_rows, to_global
from jaxvlm.spmd.model import Model
from jaxvlm.types import Batch, Span

_log = logging.getLogger(__name__)
ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray
"""An image: a file, a PIL image, or u8[H, W, 3]."""

_ONE = (str, os.PathLike, Image.Image, np.ndarray)


def video(path: str | os.PathLike[str]) -> str:
    """The name of a video file, for use in a list of images: ``model.generate(video(f), "...")``.

    Args:
        path: video file.
    """
    return as_video(os.fspath(path))


def in_order(
    prompt: str, images: Sequence[str], videos: Sequence[str]
) -> tuple[list[ImageLike], str]:
    """Find which image or video stands at which mark of a prompt; without marks, images are first.

    Args:
        prompt: may have an ``<image>`` or ``<video>`` mark for each.
        images: image files.
        videos: video files.

    Returns:
        Images and videos by their marks, and the prompt.

    Raises:
        ConfigError: their numbers differ.
    """
    named = [list(images), list(map(video, videos))]
    if not videos:
        return [*images], prompt
    try:
        (text,), names = visuals.in_order([prompt], (), named[0], named[1], fields.DEFAULT)
    except fields.BadItem as bad:
        raise ConfigError(f"the prompt: {bad.reason}: {bad.detail}") from None
    return [*names], text


_LENGTH_STEP = 32
"""Prompts are padded to one of few multiples of it, so that few lengths are compiled."""


class LoadedImage(NamedTuple):
    """An image of a prompt."""

    tiles: list[ImageInput]
    span: Span
    """Of its tokens."""


def listed(images: ImageLike | Sequence[ImageLike]) -> list[ImageLike]:
    """Return one image, or several, as a list."""
    return [images] if isinstance(images, _ONE) else list(images)


def name_of(image: ImageLike) -> str | int:
    """What an image is known by: its file, or which object it is."""
    return str(image) if isinstance(image, (str, os.PathLike)) else id(image)


class Prompts(NamedTuple):
    """Prompts to answer."""

    batch: Batch
    """The prompts, or what follows their prefixes."""
    prefixes: SharedPrefixes | None = None
    """Their prefixes up to the last visual token, each of them once."""
    longest: int = 0
    """Tokens of the longest of them, prefix included."""

    @property
    def length(self) -> int:
        """Tokens of a prompt, padding included."""
        before = 0 if self.prefixes is None else self.prefixes.batch.tokens.shape[1]
        return before + self.batch.tokens.shape[1]


def to_answer(
    queries: Sequence[tuple[Sequence[ImageLike], str]],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    max_pixels: int,
    share: bool = False,
    cache: VisualTokens | None = None,
) -> Prompts:
    """Builds a batch of prompts to answer.

    Args:
        queries, model, tokenizer, image_format, max_pixels, cache: as of :func:`batch`.
        share: whether the prefix of several prompts, the same images after the same text, may be
            read once; it is where that halves the images that a device reads at least.

    Raises:
        ConfigError: the numbers of marks and images differ, or the text has a special token.
        DataError: an image can't be read.
    """
    # Each image once: what makes its items anew would give other objects each time.
    images = [list(given) for given, _ in queries]
    loaded = load_images(images, image_format, max_pixels, cache)
    ids = [
        ids_to_answer([image.span for image in of_prompt], prompt, tokenizer)
        for (_, prompt), of_prompt in zip(queries, loaded, strict=True)
    ]
    how = (model, tokenizer, image_format, cache)
    return _prompts(ids, images, loaded, range(len(ids)), share, *how)


def of_ids(
    ids: Sequence[np.ndarray],
    images: Sequence[Sequence[str]],
    example_ids: Sequence[int],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    max_pixels: int,
    share: bool = False,
    cache: VisualTokens | None = None,
) -> Prompts:
    """Builds a batch of prompts that are tokens; see :func:`to_answer`.

    Args:
        ids: i32[T] of each prompt, each image one token.
        images: files of each prompt's images.
        example_ids: of each prompt, by which it draws random numbers.
        model, tokenizer, image_format, max_pixels, share, cache: as of :func:`to_answer`.

    Raises:
        DataError: an image can't be read.
    """
    loaded = load_images(images, image_format, max_pixels, cache)
    how = (model, tokenizer, image_format, cache)
    return _prompts(ids, images, loaded, example_ids, share, *how)


class _Sequence(NamedTuple):
    """A prompt with its images."""

    tokens: Expanded
    tiles: list[ImageInput]


def expanded(
    ids: Sequence[np.ndarray], loaded: Sequence[Sequence[LoadedImage]], tokenizer: ChatTokenizer
) -> list[_Sequence]:
    """Expand each prompt's images to their tokens."""
    spans = [[image.span for image in images] for images in loaded]
    taps = image_placeholders.max_taps(span for of_prompt in spans for span in of_prompt)
    return [
        _Sequence(
            image_placeholders.expand(own, tokenizer.image_id, own_spans, taps),
            [tile for image in images for tile in image.tiles],
        )
        for own, own_spans, images in zip(ids, spans, loaded, strict=True)
    ]


def _prompts(
    ids: Sequence[np.ndarray],
    images: Sequence[Sequence[ImageLike]],
    loaded: Sequence[Sequence[LoadedImage]],
    example_ids: Sequence[int],
    share: bool,
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    cache: VisualTokens | None,
) -> Prompts:
    how = (model, tokenizer, image_format, cache)
    sequences = expanded(ids, loaded, tokenizer)
    longest = max(len(tokens.ids) for tokens, _ in sequences)
    if not share or not _can_share(model, sequences, tokenizer.image_id):
        return Prompts(collated(sequences, example_ids, *how), longest=longest)
    shards = batch_shards(model.mesh)
    rows, prefixes = -(-len(ids) // shards), list[list[_Sequence]]()
    rests, of = list[_Sequence](), np.zeros((shards, rows), np.int32)
    for shard in range(shards):  # each reads those of its own prompts
        found: dict[Any, int] = {}
        own = list[_Sequence]()
        for i in range(shard * rows, min((shard + 1) * rows, len(ids))):
            tokens, tiles = sequences[i]
            end = _end_of_images(tokens, tokenizer.image_id)
            key = (tokens.ids[:end].tobytes(), *map(name_of, images[i]))
            if key not in found:
                found[key] = len(own)
                own.append(_Sequence(image_placeholders.before(tokens, end), tiles))
            of[shard, i - shard * rows] = found[key]
            rests.append(_Sequence(image_placeholders.after(tokens, end), []))
        prefixes.append(own)
    largest = max(map(len, prefixes))
    most = min(1 << (largest - 1).bit_length(), rows)  # few numbers of prefixes are compiled
    filled = [x for own in prefixes for x in (own + (own or prefixes[0])[:1] * most)[:most]]
    # Padding twice would take the memory.
    pads = 4 * (_length(filled) + _length(rests)) > 5 * _length(sequences)
    if 2 * largest > rows or pads:
        return Prompts(collated(sequences, example_ids, *how), longest=longest)
    batch = collated(filled, range(len(filled)), *how)
    rest = collated(rests, example_ids, *how)
    here = batch_sharding(model.mesh)
    return Prompts(rest, SharedPrefixes(batch, jax.device_put(of, here)), longest)


def _can_share(model: Model, sequences: Sequence[_Sequence], image_id: int) -> bool:
    """Whether prompts can be read as prefixes and what follows: no token looks ahead."""
    relevance = model.config.connector.relevance
    if model.config.decoder.visual_mask != "causal" or (relevance.budget and relevance.query):
        return False
    for tokens, _ in sequences:
        end = _end_of_images(tokens, image_id)
        of_image = tokens.tile[end:].any() or (
            tokens.source is not None and (tokens.source[end:] != -1).any()
        )
        if not end or end == len(tokens.ids) or of_image:
            return False
    return True


def _end_of_images(tokens: Expanded, image_id: int) -> int:
    """The number of tokens up to the last visual token; 0 without images."""
    return int(np.flatnonzero(tokens.ids == image_id).max(initial=-1)) + 1


def collated(
    sequences: Sequence[_Sequence],
    example_ids: Sequence[int],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    cache: VisualTokens | None,
) -> Batch:
    """The batch of prompts with their images, padded on the left, sharded over the mesh."""
    tokens, tiles = [x.tokens for x in sequences], [x.tiles for x in sequences]
    taps = max((0 if x.source is None else x.source.shape[1]) for x in tokens)
    shards = batch_shards(model.mesh)
    B = -(-len(sequences) // shards) * shards
    T = _length(sequences)
    R, most = max(len(x.positions) for x in tokens), max(map(len, tiles))
    collated = collate_prompts(
        [*tokens, *[None] * (B - len(tokens))],
        PromptShape(T, most, R, taps),
        pad_id=tokenizer.pad_id,
        mask=model.config.decoder.visual_mask,
    )
    images = collate_tiles(tiles, image_format, (B, most), cache) if most else {}
    own = np.arange(B, dtype=np.int32)
    own[: len(tokens)] = example_ids
    collated = collated._replace(example_id=own, **images)
    if cache is not None:
        rows = local_rows(model.mesh, B)
        local = jax.tree.map(lambda x: x[rows], collated)
        return to_global(model.mesh, cache.complete(local), B)
    collated = collated._replace(image_key=None)
    sharding = batch_sharding(model.mesh)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), collated)


def _length(sequences: Sequence[_Sequence]) -> int:
    """The number of tokens that prompts are padded to."""
    return bucket(max(len(x.tokens.ids) for x in sequences), _LENGTH_STEP)


def checked(images: list[Span], prompt: str, tokenizer: ChatTokenizer) -> str:
    """The prompt with a mark for each image, and without special tokens."""
    has_video, count = any(span.is_video for span in images), len(images)
    # Without a video its mark is a text, such as HTML's.
    marks = [x for x in BOTH_MARKS.findall(prompt) if has_video or x == PLACEHOLDER]
    if not marks and count:
        prompt = PLACEHOLDER * count + prompt
    elif len(marks) != count:
        kinds = " and ".join(dict.fromkeys(marks))
        raise ConfigError(
            f"the prompt has {len(marks)} {kinds or PLACEHOLDER} marks but {count} images are "
            "given; give one mark per image, or none"
        )
    elif VIDEO_MARK in marks:
        if [mark == VIDEO_MARK for mark in marks] != [span.is_video for span in images]:
            raise ConfigError(
                f"the prompt's {PLACEHOLDER} and {VIDEO_MARK} marks stand in another order than "
                "the images and videos that are given"
            )
        prompt = prompt.replace(VIDEO_MARK, PLACEHOLDER)
    if count and (foreign := image_placeholders.foreign_markers(prompt)):
        _log.warning("the prompt's %s is text: %s marks an image's place", foreign[0], PLACEHOLDER)
    prompt = conversation_formats.tidy(prompt)
    refuse_special_tokens("prompt", prompt, tokenizer.reserved_tokens)
    return prompt


def ids_to_answer(images: list[Span], prompt: str, tokenizer: ChatTokenizer) -> np.ndarray:
    """The tokens of a prompt, up to where its answer begins: i32[T], each image one token."""
    turns = [Turn("user", checked(images, prompt, tokenizer))]
    return tokenize.prompt_ids(turns, tokenizer, list(map(Lead.of, images)))


def refuse_special_tokens(what: str, text: str, tokens: Collection[str]) -> None:
    """Raise ConfigError if a text has one of these tokens."""
    if found := sorted(t for t in tokens if t in text):
        raise ConfigError(f"the {what} contains the special token {found[0]}; leave it out")


def load_images(
    images: Sequence[Sequence[ImageLike]],
    image_format: image_files.ImageFormat,
    max_pixels: int,
    cache: VisualTokens | None = None,
) -> list[list[LoadedImage]]:
    """Load each prompt's images; an image of several prompts is loaded once.

    Args:
        images: of each prompt.
        image_format: how the model takes images.
        max_pixels: maximum number of pixels of an image file.
        cache: has visual tokens of images, whose files are then not decoded.

    Raises:
        DataError: an image can't be read.
    """
    found: dict[str | int, LoadedImage] = {}
    for image in (image for of_prompt in images for image in of_prompt):
        if name_of(image) not in found:
            found[name_of(image)] = _load(image, image_format, max_pixels, cache)
    return [[found[name_of(image)] for image in of_prompt] for of_prompt in images]


def _load(
    image: ImageLike,
    image_format: image_files.ImageFormat,
    max_pixels: int,
    cache: VisualTokens | None,
) -> LoadedImage:
    is_file = isinstance(image, (str, os.PathLike))
    if isinstance(image, (str, os.PathLike)) and not os.fspath(image):
        raise DataError("an image's file name is empty")
    images: ImageCache = ImageCache(image_format.prepare, max_pixels, 0)
    try:
        if isinstance(image, (str, os.PathLike)):
            span = image_format.of_file(str(image))
        else:
            span = image_format.of_size(*_upright(image).size)
            images = _OpenImage(image, image_format.prepare)
        inputs = ImageInputs([str(image) if is_file else ""], [span], images, image_format.patching)
        inputs.lookup = cache.lookup if cache else None
        return LoadedImage(inputs.get(0, use_cached=cache is not None), span)
    except ImageError as error:
        raise DataError(f"{shown(str(image)) if is_file else 'an image'}: {error}") from None


class _OpenImage(ImageCache):
    """Stands for the file of an image that is in memory."""

    def __init__(self, image: Image.Image | np.ndarray, prepare: image_files.Preparation):
        super().__init__(prepare, 0, 0)
        pixels = prepare.convert(_upright(image))
        # Other bytes than a file's are hashed, so the person keeps the two kinds of keys apart.
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16, person=b"pixels")
        digest.update(repr(pixels.shape).encode())
        self._decoded = image_files.Decoded(pixels, digest.digest())

    def get(self, path: str) -> image_files.Decoded:
        return self._decoded

    def digest(self, path: str) -> bytes:
        return self._decoded.digest


def load_pixels(image: ImageLike, prepare: image_files.Preparation, max_pixels: int) -> np.ndarray:
    """Load and preprocess an image.

    Args:
        image: a file, a PIL image, or u8[H, W, 3].
        prepare: preprocessing of the model.
        max_pixels: maximum number of pixels of an image file.

    Returns:
        u8[H, W, 3], or u8[tiles, H, W, 3] where ``prepare`` splits images into tiles.

    Raises:
        DataError: the image can't be read or converted.
    """
    is_file = isinstance(image, (str, os.PathLike))
    try:
        if isinstance(image, (str, os.PathLike)):
            return image_files.load(str(image), prepare, max_pixels)
        return prepare.convert(_upright(image))
    except ImageError as error:
        raise DataError(f"{shown(str(image)) if is_file else 'an image'}: {error}") from None


def _upright(image: Image.Image | np.ndarray) -> Image.Image:
    try:
        opened = Image.fromarray(image) if isinstance(image, np.ndarray) else image
        upright = ImageOps.exif_transpose(opened)
    except (AttributeError, TypeError, ValueError) as error:
        what = "not an image: give a file, a PIL image or u8[H, W, 3]"
        raise ImageError(f"{what} ({error})") from None
    if 0 in upright.size:
        raise ImageError("it has no pixels")
    return upright


def collate_tiles(
    tiles: Sequence[Sequence[ImageInput]],
    image_format: image_files.ImageFormat,
    shape: tuple[int, int],
    cache: VisualTokens | None = None,
) -> dict[str, np.ndarray]:
    """Collate the tiles of each prompt into the batch's fields.

    Args:
        tiles: of each prompt.
        image_format: how the model takes images.
        shape: (B, I).
        cache: of the tiles that come as tokens.
    """
    row = np.repeat(np.arange(len(tiles)), [len(t) for t in tiles])
    slot = np.concatenate([np.arange(len(t)) for t in tiles])
    flat = [tile for of_prompt in tiles for tile in of_prompt]
    patching, most = image_format.patching, 0
    if patching is not None:
        counts = [sum(_patches(x, image_format) for x in found) for found in tiles]
        most = bucket(max(counts), patching.padded_count(1))
    cached = (cache.shape, cache.tokens) if cache else None
    places = Places(row, slot)
    return collate_inputs(flat, places, shape, image_format.size, patching, most, cached)


def _patches(tile: ImageInput, image_format: image_files.ImageFormat) -> int:
    """The number of patches of an image of any size."""
    assert image_format.patching is not None
    grid = tile.grid if tile.pixels is None else image_format.patching.grid(tile.pixels)
    assert grid is not None
    return math.prod(grid)
