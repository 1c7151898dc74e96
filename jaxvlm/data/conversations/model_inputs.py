"""Settings that a data set of conversations takes from the model, and their validation."""

from __future__ import annotations

from typing import NamedTuple

from jaxvlm.config import DataConfig, PairDataConfig
from jaxvlm.data.conversations import packing, tokenize
from jaxvlm.data.errors import DataError
from jaxvlm.data.image_placeholders import ImageSpans
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer


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
    for name in ("batch_size", "max_length", "virtual_shards"):
        if getattr(config, name) < 1:
            raise DataError(f"data.{name}={getattr(config, name)} must be at least 1")


def make_pieces(
    corpus: tokenize.Corpus, config: DataConfig, tokenizer: ChatTokenizer, settings: ModelInputs
) -> tuple[packing.Pieces, list[tuple[int, str, str]]]:
    """Group a corpus into pieces as the settings say; see :func:`packing.build_pieces`."""
    # With one record a sequence nothing can be shared; nor can an image that attends to its
    # question.
    share = config.share_images and config.packing and settings.visual_mask != "prompt"
    limits = packing.limits_of(config, settings.patching)
    return packing.build_pieces(corpus, tokenizer.image_id, limits, share)
