"""Read, check and build the data sets of a run on conversations from its settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxvlm.config import Config, DataConfig, PairDataConfig
from jaxvlm.data.conversations import mixture_records
from jaxvlm.data.conversations.dataset import Dataset, ModelInputs
from jaxvlm.data.errors import MIXTURE, DataError, Problem
from jaxvlm.data.image_placeholders import ImageSpans
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.conversation_formats import Record
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer


def read_records(config: DataConfig, spec: str) -> Any:
    """Read a data file or a named source; returns (records, problems).

    Args:
        config: data settings.
        spec: what to read; "" is the run's mixture.
    """
    return conversation_formats.read(spec, config) if spec else mixture_records.read(config)


def make_dataset(
    config: Config,
    spec: str,
    chat_tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    read: Any = None,
) -> Dataset:
    """Build the data set ``spec``, tokenized for the run's model."""
    return load_dataset(
        config.data,
        chat_tokenizer,
        image_size=image_format.size,
        num_patches=image_format.of_file,
        seed=config.seed,
        visual_mask=config.model.decoder.visual_mask,
        prepare=image_format.prepare,
        patching=image_format.patching,
        spec=spec,
        read=read,
    )


def load_dataset(
    config: DataConfig,
    tokenizer: ChatTokenizer,
    *,
    image_size: int,
    num_patches: ImageSpans,
    seed: int = 0,
    visual_mask: str = "causal",
    prepare: image_files.Preparation | None = None,
    patching: Patching | None = None,
    spec: str = "",
    read: tuple[list[Record], list[Problem]] | None = None,
) -> Dataset:
    """Read, validate and tokenize a data file.

    The header of every image is read; no image is decoded.

    Args:
        config: settings of what to read and how to pack it.
        tokenizer: tokenizer with a chat template.
        image_size: height and width of the model's images in pixels.
        num_patches: token span of an image: a number of tokens, or a function of its file.
        seed: seed of the run.
        visual_mask: causal | prefix | prompt: which tokens attend bidirectionally.
        prepare: preprocessing of images; ``None`` follows ``config.resize``.
        patching: how images of any size are cut into patches; ``None`` if all have the same
            size.
        spec: file or named source to read; "" is ``config.train`` or ``config.mixture``.
        read: result of :func:`read_records` for ``spec``, if it was read before.

    Raises:
        DataError: the file, or too many of its records, can't be used.
    """
    spec = spec or config.train
    if spec:
        config = dataclasses.replace(config, mixture={})
    name = spec or MIXTURE
    records, problems = read or read_records(config, spec)
    prepare = prepare or image_files.squares(image_size, config.resize)
    settings = ModelInputs(image_size, prepare, num_patches, seed, visual_mask, patching)
    validate_settings(config, settings)
    return Dataset(name, records, problems, config, tokenizer, settings)


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
