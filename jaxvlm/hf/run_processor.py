"""A run's tokenizer and image format, of its checkpoint or its recipe, and the vocabulary size."""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
from collections.abc import Callable, Iterable

from jaxvlm.checkpoint import run_folder, run_record
from jaxvlm.config import Config, ConfigError, ModelConfig, TokenizerConfig, json_text
from jaxvlm.data.conversations.content import PACKED_TOKENIZER, packed_data
from jaxvlm.data.images import image_files
from jaxvlm.data.packed import packed_files
from jaxvlm.data.pairs import packed_pairs
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf import pretrained
from jaxvlm.hf.families import anyres
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.types import ChatStyle, Span

_log = logging.getLogger(__name__)
_MULTIPLE = 64
"""Vocabulary sizes are rounded up to a multiple of it, so that mesh axes divide them."""


def make_tokenizer(
    config: Config,
    saved: pathlib.Path | None,
    texts: Callable[[], Iterable[str]],
    source: pretrained.Source | None = None,
) -> chat_tokenizer.ChatTokenizer:
    """Load the run's tokenizer, or train one.

    The first that there is of: the run's own (:func:`has_own_tokenizer`),
    ``config.tokenizer.path``, its checkpoint's, ``config.init_from``'s, that of packed data, one
    trained on ``texts``.

    Args:
        config: settings of the run.
        saved: the run's tokenizer folder.
        texts: returns the texts of the training data.
        source: the checkpoint that the run starts from.

    Raises:
        ConfigError: the run's tokenizer is missing, or its checkpoint has another one than
            ``config.tokenizer.path``.
    """
    style = _chat_style(source) if source is not None else chat_tokenizer.PLAIN
    folder = tokenizer_folder(config, saved, source)
    if folder is not None:
        return chat_tokenizer.load(folder, style)
    return chat_tokenizer.build(texts(), config.tokenizer.kind, config.tokenizer.vocab_size)


def tokenizer_folder(
    config: Config, saved: pathlib.Path | None, source: pretrained.Source | None = None
) -> pathlib.Path | None:
    """The folder of a run's tokenizer, in the order of :func:`make_tokenizer`; ``None``: build one.

    A line says which settings of a tokenizer that is built are then not read.

    Args:
        config: settings of the run.
        saved: the run's tokenizer folder.
        source: the checkpoint that the run starts from.

    Raises:
        ConfigError: as for :func:`make_tokenizer`.
    """
    if saved is not None and has_own_tokenizer(saved):
        return saved
    folder = None
    if config.tokenizer.path and source is not None:
        raise ConfigError(
            f"config.tokenizer.path={config.tokenizer.path}, but {source.files} has its own "
            "tokenizer, which its weights belong to; leave it out"
        )
    if config.tokenizer.path:
        folder = pathlib.Path(config.tokenizer.path).expanduser()
    elif source is not None:
        folder = source.files
    elif config.init_from:  # its weights belong to its tokens
        folder = run_folder.local_to_read(config.init_from, "config.init_from") / "tokenizer"
    elif packed := packed_data(config.data):
        return _packed_tokenizer(config, packed[0])
    for name in ("kind", "vocab_size") if folder else ():
        if (value := getattr(config.tokenizer, name)) != getattr(TokenizerConfig(), name):
            _log.info("config.tokenizer.%s=%r is not read: %s has a tokenizer", name, value, folder)
    return folder


_KINDS = {"WordLevel": "word", "BPE": "bpe"}
"""Type of a tokenizer's model -> the setting that builds such a one."""


def _packed_tokenizer(config: Config, spec: str) -> pathlib.Path:
    """The tokenizer of a packed set, which was built by the recipe that packed it."""
    kind = packed_files.PAIRS if trains_embeddings(config) else packed_files.CONVERSATIONS
    found, made = packed_files.opened(spec, config.data, kind), config.tokenizer
    if kind == packed_files.PAIRS:
        packed_pairs.check_embedder(spec, found.facts, config.embedder)
    folder = found.folder / PACKED_TOKENIZER
    try:
        tokenizer = json_text.read(folder / "tokenizer.json")
        own, size = _KINDS[tokenizer["model"]["type"]], len(tokenizer["model"]["vocab"])
    except (OSError, ValueError, LookupError, TypeError):
        return folder  # whoever loads it says what is wrong
    usual = TokenizerConfig()
    if made.kind not in (own, usual.kind) or size > made.vocab_size != usual.vocab_size:
        text = "config.tokenizer.kind=%r and vocab_size=%d are not read: %s has one of %r with %d"
        _log.info(f"{text} tokens", made.kind, made.vocab_size, spec, own, size)
    return folder


def _chat_style(source: pretrained.Source) -> ChatStyle:
    """How the family of a checkpoint writes images and videos in a conversation."""
    from jaxvlm.hf.video_families import with_videos  # not loaded by runs from scratch

    return with_videos(source.family.chat_style(source.hf_config), source.hf_config)


def has_own_tokenizer(saved: pathlib.Path) -> bool:
    """Whether a run has weights, which belong to the tokenizer that it saved.

    Without checkpoints there are none: a tokenizer is then of a start that was stopped early,
    perhaps on other data, and is made again.

    Args:
        saved: the run's tokenizer folder.

    Raises:
        ConfigError: the run has checkpoints, and its tokenizer is missing.
    """
    if not run_record.has_checkpoint(saved.parent):
        return False
    if not saved.is_dir():
        raise ConfigError(
            f"{saved} is missing, but its run has checkpoints, whose weights belong to its tokens; "
            "put it back, or start in another workdir"
        )
    return True


def image_format_of(
    config: Config, source: pretrained.Source | None, tokenizer: chat_tokenizer.ChatTokenizer
) -> image_files.ImageFormat:
    """Return how images are prepared for the run's model, from its checkpoint or its recipe.

    Raises:
        ConfigError: a setting of images that does not fit the model.
    """
    data, vision = config.data, config.model.vision
    if data.max_patches_per_sequence and not vision.packed:
        raise ConfigError(
            f"config.data.max_patches_per_sequence={data.max_patches_per_sequence}: this model "
            "takes images of one size; leave it out"
        )
    if source is not None:
        images = pretrained.image_format(config, source, tokenizer)
    else:
        images = _own_images(config, tokenizer)

    def videos() -> image_files.Videos:
        from jaxvlm.hf import run_videos  # not loaded by runs without videos

        return run_videos.of_run(images, config, tokenizer, source)

    return images.with_videos(videos)


def _own_images(config: Config, tokenizer: chat_tokenizer.ChatTokenizer) -> image_files.ImageFormat:
    """Images of a model that starts from no checkpoint; raises ConfigError."""
    data, vision = config.data, config.model.vision
    if vision.packed:
        raise ConfigError(
            "config.model.vision.packed=True: models for images of any size must start from a "
            "checkpoint, config.model.checkpoint"
        )
    if any(data.image_pixels_range):
        raise ConfigError(
            f"config.data.image_pixels_range={data.image_pixels_range}: this model takes "
            "images of one size, config.model.vision.image_size; leave it out"
        )
    if config.model.connector.video_pool:
        raise ConfigError(
            f"config.model.connector.video_pool={config.model.connector.video_pool}: videos' "
            "frames are images in models that start from no checkpoint; leave it out"
        )
    count = num_visual_tokens(config.model)
    span = Span.of(tokenizer.image_id, count)
    if config.model.connector.newline:
        span = anyres.whole(tokenizer.image_id, math.isqrt(count))
    prepare = image_files.squares(vision.image_size, data.resize)
    return image_files.ImageFormat(prepare, vision.image_size, lambda _width, _height: span)


def with_vocab(model: ModelConfig, vocab_size: int) -> ModelConfig:
    """Fill in the model's vocabulary size, or check it.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    set_size = model.decoder.vocab_size
    check_vocab(model.checkpoint, "config.model.decoder.vocab_size", set_size, vocab_size)
    size = set_size or -(-vocab_size // _MULTIPLE) * _MULTIPLE
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, vocab_size=size))


def check_vocab(checkpoint: str, setting: str, rows: int, tokens: int) -> None:
    """Check that a model's embedding table has a row for each token.

    Args:
        checkpoint: the folder that the table is from; "": it is made by ``setting``.
        setting: name of the setting.
        rows: of the table; 0: not known yet.
        tokens: of the tokenizer.

    Raises:
        ConfigError: it has fewer; the message says how to add some.
    """
    if not rows or rows >= tokens:
        return
    if not checkpoint:
        raise ConfigError(
            f"{setting}={rows} is less than the tokenizer's {tokens} tokens; set it to 0 to take "
            "the tokenizer's"
        )
    raise ConfigError(
        f"{checkpoint}: its tokenizer has {tokens} tokens, but its embedding table has rows for "
        f"{rows}; load the model with transformers, call resize_token_embeddings({tokens}) and "
        "save_pretrained, which adds rows near the mean of the others, or take the added tokens "
        "out of the tokenizer"
    )
