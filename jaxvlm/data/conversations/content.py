"""What a data set of conversations holds: records, their tokens, and pieces to pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import DataConfig, PairDataConfig
from jaxvlm.data import errors, image_placeholders
from jaxvlm.data.conversations import packing, tokenize
from jaxvlm.data.errors import DataError, Part, Problem
from jaxvlm.data.image_placeholders import ImageSpans
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.sources import remote_files
from jaxvlm.data.sources.conversation_formats import Record
from jaxvlm.data.sources.member_names import is_remote, is_video, local_path
from jaxvlm.data.sources.tables import PACKED
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer

PACKED_TOKENIZER = "tokenizer"
"""Folder in that of a packed set."""


class ModelInputs(NamedTuple):
    """Properties of the model and the run that the data depends on."""

    image_size: int
    """Height and width of an image in pixels."""
    prepare: image_files.Preparation
    """Preprocessing of an image to pixels."""
    num_patches: ImageSpans
    """Token span of an image."""
    seed: int = 0
    visual_mask: str = "causal"
    """causal | prefix | prompt; see ``DecoderConfig``."""
    patching: Patching | None = None
    """How images of any size are cut into patches; ``None`` if all have the same size."""


class Facts(NamedTuple):
    """What holds for all records of a data set, so that no step looks at all of them."""

    digest: str
    """Hash of the tokens, the loss masks and the images' names and sizes."""
    tiles: int
    """Tiles of an image, at most."""
    slots: int
    """Image slots of a piece, at most."""
    patches: int
    """Patches of a sequence, at most."""
    density: float
    """Tiles for each token of a record, at most."""
    taps: int
    """Features that a visual token holds, at most."""
    position_rows: int
    """R: rotary positions of a token."""
    has_parents: bool
    """Whether records share a prefix."""
    has_images: bool
    """Whether a piece has an image."""
    unknown: int
    """Trained tokens that are ``<unk>``, each conversation counted once."""
    has_videos: bool = False
    """Whether a record has a video."""


class Content(NamedTuple):
    """What a data set holds: built from records, or opened where it was packed."""

    records: Sequence[Record]
    """All records read; of a packed set they have an id and nothing else."""
    corpus: tokenize.Corpus
    pieces: packing.Pieces
    facts: Facts
    tokens: int
    """Of all pieces."""
    parts: list[Part]
    """Which records are skipped from the start, by source."""
    sequences: packing.Sequences | None = None
    """Result of :func:`packing.plan`; ``None``: not known yet."""
    check: Callable[[int], None] | None = None
    """Of a packed set: raises DataError where a piece is not as it was packed."""
    each: Callable[..., Any] = map
    """Calls a function of each piece of a batch: of several at a time where a store is waited
    for."""
    sources: tuple[Content, ...] = ()
    """Of a mixture: what each source holds."""


def build(
    name: str,
    records: Sequence[Record],
    problems: Sequence[Problem],
    config: DataConfig,
    tokenizer: ChatTokenizer,
    settings: ModelInputs,
) -> Content:
    """Tokenize records and group them into pieces.

    Args:
        name: of the data, for messages.
        records: conversations.
        problems: what could not be read.
        config: data settings.
        tokenizer: tokenizer with a chat template.
        settings: what the data depend on besides.

    Raises:
        DataError: too many records can't be used, or none can.
    """
    records = tokenize.split_turns(records, config.loss_turns)
    corpus, pieces, bad, too_long = select(records, config, tokenizer, settings)
    part = errors.enforce_limits(name, config, len(records), problems, bad, too_long)
    if not len(pieces.num_tokens):
        raise DataError(f"{name}: no usable record is left; `{part.check}` lists the reasons")
    has_videos = any(map(is_video, corpus.paths))
    different = {id(span): span for span in corpus.spans}.values()
    tiles = [packing.count_tiles(corpus, images) for images in corpus.images]
    facts = Facts(
        digest=tokenize.digest(corpus),
        tiles=max((len(span.starts) for span in different), default=1),
        slots=int(pieces.num_images.max()),
        patches=_max_patches(corpus, pieces, config, settings.patching),
        density=float(np.max(tiles / corpus.length, initial=0.0)),
        taps=image_placeholders.max_taps(different),
        position_rows=max((len(span.positions) for span in corpus.spans[:1]), default=1),
        has_parents=bool((pieces.record < 0).any()),
        has_images=any(pieces.images),
        unknown=int(np.sum(corpus.loss & (corpus.tokens == tokenizer.unk_id))),
        has_videos=has_videos,
    )
    return Content(records, corpus, pieces, facts, int(pieces.num_tokens.sum()), [part])


def _max_patches(
    corpus: tokenize.Corpus, pieces: packing.Pieces, config: DataConfig, patching: Patching | None
) -> int:
    """Maximum patches of a sequence: the setting, or what its tokens and images allow."""
    if patching is None or not config.packing:
        return int(pieces.num_patches.max())
    limits = packing.limits_of(config, patching)
    used = {image for images in pieces.images for image in images}
    tiles = {p: packing.count_tiles(corpus, (p,)) or 1 for p in used}
    largest = max((limits.patches(corpus, (p,)) // tiles[p] for p in used), default=0)
    most = min(patching.per_token * config.max_length, config.max_images_per_sequence * largest)
    return min(most, config.max_patches_per_sequence or most)


def is_packed(spec: str, config: DataConfig) -> bool:
    """Whether a data file's name is the folder, or the URL, of a packed set.

    With a format of the user's own, a URL is whatever that format takes.
    """
    if is_remote(spec):
        return not config.format.target and not remote_files.is_files(spec)
    return bool(spec) and (local_path(spec) / PACKED).is_file()


def packed_data(config: DataConfig) -> list[str]:
    """The packed sets among the training data: folders and URLs."""
    specs = [config.train, *(source.train for source in config.mixture.values())]
    return [spec for spec in specs if is_packed(spec, config)]


def validate_settings(config: DataConfig, settings: ModelInputs) -> None:
    """Raise DataError for a setting with an invalid value."""
    choices = {
        "data.on_too_long": (config.on_too_long, ("refuse", "skip")),
        "data.on_bad_record": (config.on_bad_record, ("refuse", "skip")),
        "data.resize": (config.resize, image_files.RESIZE),
        "model.decoder.visual_mask": (
            settings.visual_mask,
            ("causal", "prefix", "prompt"),
        ),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise DataError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")
    if config.pairs != PairDataConfig():
        raise DataError(
            "data.pairs is set, but this run trains on conversations, not on pairs; leave it out"
        )
    for name in ("batch_size", "max_length"):
        if getattr(config, name) < 1:
            raise DataError(f"data.{name}={getattr(config, name)} must be at least 1")


class Selected(NamedTuple):
    """The records that a run can use, and the problems of the others."""

    corpus: tokenize.Corpus
    pieces: packing.Pieces
    """Pieces of the usable records."""
    bad: list[Problem]
    """Records that ``data.on_bad_record`` is about."""
    too_long: list[Problem]
    """Records that ``data.on_too_long`` is about."""


def select(
    records: Sequence[Record], config: DataConfig, tokenizer: ChatTokenizer, settings: ModelInputs
) -> Selected:
    """Tokenize records and select those that can be used: in a run, and in `jaxvlm data check`.

    Every image's header is read, and no image is decoded.
    """
    corpus, unfit = tokenize.encode(records, tokenizer, settings.num_patches)
    corpus, broken = tokenize.with_readable_images(corpus, records, config.max_pixels)
    pieces, long = make_pieces(corpus, config, tokenizer, settings)
    too_long = [Problem(records[int(corpus.source[i])].id, *reason) for i, *reason in long]
    return Selected(corpus, pieces, [*unfit, *broken], too_long)


def make_pieces(
    corpus: tokenize.Corpus,
    config: DataConfig,
    tokenizer: ChatTokenizer,
    settings: ModelInputs,
) -> tuple[packing.Pieces, list[tuple[int, str, str]]]:
    """Group a corpus into pieces as the settings say; see :func:`packing.build_pieces`."""
    # With one record a sequence nothing can be shared; nor can an image that attends to its
    # question.
    share = config.share_images and config.packing and settings.visual_mask != "prompt"
    limits = packing.limits_of(config, settings.patching)
    return packing.build_pieces(corpus, tokenizer.image_id, limits, share)
