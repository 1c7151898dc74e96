"""Collates prompts with images into the batch that is answered or embedded."""

from __future__ import annotations

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
from jaxvlm.data.conversations.collate import Places, PromptShape, collate_images, collate_prompts
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.image_placeholders import Expanded
from jaxvlm.data.images import image_files
from jaxvlm.data.pairs import collate_prompt_items
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Turn
from jaxvlm.data.tokenizer.chat_template import TemplateError
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.inference.generate import SharedPrefixes
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.spmd.model import Model
from jaxvlm.types import Batch, Span

_log = logging.getLogger(__name__)
ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray
"""An image: a file, a PIL image, or u8[H, W, 3]."""

_ONE = (str, os.PathLike, Image.Image, np.ndarray)

_LENGTH_STEP = 32
"""Prompts are padded to one of few multiples of it, so that few lengths are compiled."""


def batch(
    queries: Sequence[tuple[Sequence[ImageLike], str]],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    max_pixels: int,
    instruction: str,
    max_length: int = 0,
) -> Batch:
    """Builds a batch of prompts to embed, padded on the left to one length, with their images.

    Args:
        queries: (images, prompt), each a sequence; ``<image>`` marks where each image goes.
        model: model on its mesh; the batch is padded to a size that the mesh divides.
        tokenizer: tokenizer with the chat template.
        image_format: how the model takes images.
        max_pixels: maximum number of pixels of an image file.
        instruction: instruction that the model reads as the system turn.
        max_length: maximum number of tokens of a prompt: longer texts are truncated as in
            training, which is logged; 0 is no limit.

    Returns:
        The batch, sharded over the mesh.

    Raises:
        ConfigError: the numbers of marks and images differ, the text has a special token, or a
            prompt is longer than ``max_length`` without its text.
        DataError: an image can't be read.
    """
    queries = [(list(given), prompt) for given, prompt in queries]
    loaded = _loaded([given for given, _ in queries], image_format, max_pixels)
    spans = [[span for _, span in images] for images in loaded]
    ids, truncated = [], 0
    for (_, prompt), of_prompt in zip(queries, spans, strict=True):
        cut, is_cut = _ids_to_embed(of_prompt, prompt, tokenizer, instruction, max_length)
        ids.append(cut)
        truncated += is_cut
    if truncated:
        text = "%d of %d texts are longer than %d tokens and were truncated"
        _log.warning(text, truncated, len(queries), max_length)
    return _collated(
        _expanded(ids, loaded, tokenizer), range(len(ids)), model, tokenizer, image_format
    )


class Prompts(NamedTuple):
    """Prompts to answer."""

    batch: Batch
    """The prompts, or what follows their prefixes."""
    prefixes: SharedPrefixes | None = None
    """Their prefixes up to the last visual token, each of them once."""

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
) -> Prompts:
    """Builds a batch of prompts to answer.

    Args:
        queries, model, tokenizer, image_format, max_pixels: as of :func:`batch`.
        share: whether the prefix of several prompts, the same images after the same text, may be
            read once; it is where that halves the images that a device reads at least.

    Raises:
        ConfigError: the numbers of marks and images differ, or the text has a special token.
        DataError: an image can't be read.
    """
    # Each image once: what makes its items anew would give other objects each time.
    images = [list(given) for given, _ in queries]
    loaded = _loaded(images, image_format, max_pixels)
    ids = [
        ids_to_answer([span for _, span in of_prompt], prompt, tokenizer)
        for (_, prompt), of_prompt in zip(queries, loaded, strict=True)
    ]
    how = (model, tokenizer, image_format)
    return _prompts(ids, images, loaded, range(len(ids)), *how, share)


def of_ids(
    ids: Sequence[np.ndarray],
    images: Sequence[Sequence[str]],
    example_ids: Sequence[int],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    max_pixels: int,
    share: bool = False,
) -> Prompts:
    """Builds a batch of prompts that are tokens; see :func:`to_answer`.

    Args:
        ids: i32[T] of each prompt, each image one token.
        images: files of each prompt's images.
        example_ids: of each prompt, by which it draws random numbers.
        model, tokenizer, image_format, max_pixels, share: as of :func:`to_answer`.

    Raises:
        DataError: an image can't be read.
    """
    loaded = _loaded(images, image_format, max_pixels)
    return _prompts(ids, images, loaded, example_ids, model, tokenizer, image_format, share)


_Loaded = tuple[np.ndarray, Span]
"""An image as u8[tiles, H, W, 3], and the span of its tokens."""


def _loaded(
    images: Sequence[Sequence[ImageLike]], image_format: image_files.ImageFormat, max_pixels: int
) -> list[list[_Loaded]]:
    """Each prompt's images; an image of several prompts is loaded once."""
    found: dict[str | int, _Loaded] = {}
    for image in (image for of_prompt in images for image in of_prompt):
        if _name(image) not in found:
            found[_name(image)] = _load(image, image_format, max_pixels)
    return [[found[_name(image)] for image in of_prompt] for of_prompt in images]


def listed(images: ImageLike | Sequence[ImageLike]) -> list[Any]:
    """Return one image, or several, as a list."""
    return [images] if isinstance(images, _ONE) else list(images)


def _name(image: ImageLike) -> str | int:
    """What an image is known by: its file, or which object it is."""
    return str(image) if isinstance(image, (str, os.PathLike)) else id(image)


class _Sequence(NamedTuple):
    """A prompt with its images."""

    tokens: Expanded
    tiles: list[np.ndarray]


def _expanded(
    ids: Sequence[np.ndarray], loaded: Sequence[Sequence[_Loaded]], tokenizer: ChatTokenizer
) -> list[_Sequence]:
    spans = [[span for _, span in images] for images in loaded]
    taps = image_placeholders.max_taps(span for of_prompt in spans for span in of_prompt)
    return [
        _Sequence(
            image_placeholders.expand(own, tokenizer.image_id, [span for _, span in images], taps),
            [tile for pixels, _ in images for tile in pixels],
        )
        for own, images in zip(ids, loaded, strict=True)
    ]


def _prompts(
    ids: Sequence[np.ndarray],
    images: Sequence[Sequence[ImageLike]],
    loaded: Sequence[Sequence[_Loaded]],
    example_ids: Sequence[int],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    share: bool,
) -> Prompts:
    how = (model, tokenizer, image_format)
    sequences = _expanded(ids, loaded, tokenizer)
    whole = _collated(sequences, example_ids, *how)
    if not share or not _can_share(model, sequences, tokenizer.image_id):
        return Prompts(whole)
    shards = batch_shards(model.mesh)
    rows, prefixes = len(whole.tokens) // shards, list[list[_Sequence]]()
    rests, of = list[_Sequence](), np.zeros((shards, rows), np.int32)
    for shard in range(shards):  # each reads those of its own prompts
        found: dict[Any, int] = {}
        own = list[_Sequence]()
        for i in range(shard * rows, min((shard + 1) * rows, len(ids))):
            tokens, tiles = sequences[i]
            end = _end_of_images(tokens, tokenizer.image_id)
            key = (tokens.ids[:end].tobytes(), *map(_name, images[i]))
            if key not in found:
                found[key] = len(own)
                own.append(_Sequence(image_placeholders.before(tokens, end), tiles))
            of[shard, i - shard * rows] = found[key]
            rests.append(_Sequence(image_placeholders.after(tokens, end), []))
        prefixes.append(own)
    # Few numbers of prefixes are compiled.
    most = 1 << (max(map(len, prefixes)) - 1).bit_length()
    if 2 * most > rows:
        return Prompts(whole)
    filled = [x for own in prefixes for x in (own + (own or prefixes[0])[:1] * most)[:most]]
    batch = _collated(filled, range(len(filled)), *how)
    rest = _collated(rests, example_ids, *how)
    if 4 * (batch.tokens.shape[1] + rest.tokens.shape[1]) > 5 * whole.tokens.shape[1]:
        return Prompts(whole)  # padding twice would take the memory
    here = batch_sharding(model.mesh)
    return Prompts(rest, SharedPrefixes(batch, jax.device_put(of, here)))


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


def _collated(
    sequences: Sequence[_Sequence],
    example_ids: Sequence[int],
    model: Model,
    tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
) -> Batch:
    """The batch of prompts with their images, padded on the left, sharded over the mesh."""
    tokens, tiles = [x.tokens for x in sequences], [x.tiles for x in sequences]
    taps = max((0 if x.source is None else x.source.shape[1]) for x in tokens)
    shards = batch_shards(model.mesh)
    B = -(-len(sequences) // shards) * shards
    T = _bucket(max(len(x.ids) for x in tokens), _LENGTH_STEP)
    R, most = max(len(x.positions) for x in tokens), max(map(len, tiles))
    collated = collate_prompts(
        [*tokens, *[None] * (B - len(tokens))],
        PromptShape(T, most, R, taps),
        pad_id=tokenizer.pad_id,
        mask=model.config.decoder.visual_mask,
    )
    images = _images(tiles, image_format, (B, most)) if most else {}
    own = np.arange(B, dtype=np.int32)
    own[: len(tokens)] = example_ids
    collated = collated._replace(example_id=own, **images)
    sharding = batch_sharding(model.mesh)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), collated)


def _bucket(count: int, step: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16 ... times ``step`` that is at least ``count``."""
    size = -(-count // step)
    power = 1 << max(size - 1, 0).bit_length()
    return step * (power * 3 // 4 if 4 * size <= 3 * power and power > 2 else power)


def _images(
    tiles: list[list[np.ndarray]], image_format: image_files.ImageFormat, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """The fields of a batch that hold the images of each sequence."""
    row = np.repeat(np.arange(len(tiles)), [len(t) for t in tiles])
    slot = np.concatenate([np.arange(len(t)) for t in tiles])
    flat = [tile for of_prompt in tiles for tile in of_prompt]
    patching, most = image_format.patching, 0
    if patching is not None:
        counts = [sum(math.prod(patching.grid(x)) for x in found) for found in tiles]
        most = _bucket(max(counts), patching.padded_count(1))
    return collate_images(flat, Places(row, slot), shape, image_format.size, patching, most)


def _checked(images: list[Span], prompt: str, tokenizer: ChatTokenizer) -> str:
    """The prompt with a mark for each image, and without special tokens."""
    marks, count = prompt.count(PLACEHOLDER), len(images)
    if not marks and count:
        prompt = PLACEHOLDER * count + prompt
    elif marks != count:
        raise ConfigError(
            f"the prompt has {marks} {PLACEHOLDER} marks but {count} images are given; give one "
            "mark per image, or none"
        )
    if count and (foreign := image_placeholders.foreign_markers(prompt)):
        _log.warning("the prompt's %s is text: %s marks an image's place", foreign[0], PLACEHOLDER)
    prompt = conversation_formats.tidy(prompt)
    _refuse_special_tokens("prompt", prompt, tokenizer.reserved_tokens)
    return prompt


def ids_to_answer(images: list[Span], prompt: str, tokenizer: ChatTokenizer) -> np.ndarray:
    """The tokens of a prompt, up to where its answer begins: i32[T], each image one token."""
    turns = [Turn("user", _checked(images, prompt, tokenizer))]
    return tokenize.prompt_ids(turns, tokenizer, [span.lead for span in images])


def _ids_to_embed(
    images: list[Span], prompt: str, tokenizer: ChatTokenizer, instruction: str, max_length: int
) -> tuple[np.ndarray, bool]:
    """The tokens of a prompt to embed, and whether its text was truncated."""
    prompt = _checked(images, prompt, tokenizer)
    _refuse_special_tokens("instruction", instruction, tokenizer.reserved_tokens | {PLACEHOLDER})
    leads = [span.lead for span in images]
    rendered = collate_prompt_items.rendered(tokenizer, prompt, instruction, leads, {})
    if rendered.reason:
        raise TemplateError(f"{rendered.reason}: {rendered.text}")
    (encoding,) = tokenizer.encode_chats([rendered.text])
    ids = np.asarray(encoding.ids, np.int32)
    over = len(ids) + sum(len(span.ids) - 1 for span in images) - max_length
    if not max_length or over <= 0:
        return ids, False
    shorter = rendered.shortened(encoding, over, tokenizer.image_id)
    if (missing := over - len(ids) + len(shorter)) > 0:
        raise ConfigError(
            f"an item has {max_length + missing} tokens without its text, but the model embeds "
            f"items of at most {max_length}; leave it out, or use a smaller image"
        )
    return shorter, True


def _refuse_special_tokens(what: str, text: str, tokens: Collection[str]) -> None:
    if found := sorted(t for t in tokens if t in text):
        raise ConfigError(f"the {what} contains the special token {found[0]}; leave it out")


def _load(
    image: ImageLike, image_format: image_files.ImageFormat, max_pixels: int
) -> tuple[np.ndarray, Span]:
    """Loads an image as u8[tiles, H, W, 3], with the span of its tokens."""
    is_file = isinstance(image, (str, os.PathLike))
    try:
        span = (
            image_format.of_file(str(image))
            if isinstance(image, (str, os.PathLike))
            else image_format.of_size(*_upright(image).size)
        )
    except ImageError as error:
        raise DataError(f"{image if is_file else 'an image'}: {error}") from None
    pixels = load_pixels(image, image_format.prepare, max_pixels)
    return pixels[None] if pixels.ndim == 3 else pixels, span


def load_pixels(image: ImageLike, prepare: image_files.Preparation, max_pixels: int) -> np.ndarray:
    """Loads and preprocesses an image.

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
        raise DataError(f"{image if is_file else 'an image'}: {error}") from None


def _upright(image: Image.Image | np.ndarray) -> Image.Image:
    opened = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    return ImageOps.exif_transpose(opened)
