"""Reads an encoder's folder, of Hugging Face or of sentence-transformers, except its weights."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.data.images import processor
from jaxvlm.data.tokenizer import text_tokenizer
from jaxvlm.hf import pretrained, run_processor
from jaxvlm.hf.families import bert, config_reader, sentences


class Described(NamedTuple):
    """Contents of an encoder's folder, except its weights."""

    config: DualConfig
    tokenizer: text_tokenizer.TextTokenizer
    image_processor: processor.Processor | None


def described(source: pretrained.Source) -> Described:
    """Read config, tokenizer and image processor of a Hugging Face or sentence-transformers folder.

    Args:
        source: a checkpoint of an ``EncoderFamily``.

    Raises:
        ConfigError: an unknown field in one of its files, or files that contradict each other.
        DataError: a tokenizer or processor that can't be read.
    """
    config, files = config_reader.model_of(source.family, source.hf_config), source.files
    fields = pretrained.optional(files / "tokenizer_config.json")
    modules = pretrained.modules(files)
    with config_reader.refusing(str(files)):
        style = source.family.text_style(config, fields)
        if modules:
            config, style = _sentences(source, modules, config, style)
    images = processor.load(files) if "vision" in config.towers else None
    if images is not None:
        vision = config.vision
        if images.size != (0 if vision.packed else vision.image_size):
            raise ConfigError(
                f"{files}: the image processor returns images of {images.size or 'any'} pixels, "
                f"but the model takes {'any' if vision.packed else vision.image_size}"
            )
        vision = dataclasses.replace(vision, pixel_mean=images.mean, pixel_std=images.std)
        config = dataclasses.replace(config, vision=vision)
    tokenizer = text_tokenizer.load(files, style)
    tokens = tokenizer.backend.get_vocab_size()
    run_processor.check_vocab(str(files), "vocab_size", config.text.vocab_size, tokens)
    return Described(config, tokenizer, images)


def _sentences(
    source: pretrained.Source, modules: list[dict[str, Any]], config: DualConfig, style: Any
) -> tuple[DualConfig, Any]:
    """Add the settings of a sentence-transformers folder's own files to config and text style."""
    if source.family is not bert:  # inputs and embeddings are transformers'
        sentences.check_whole(modules)
        return config, style
    kinds = ("Pooling", sentences.DENSE)
    module_configs = (pretrained.module_config(source.files, modules, x) for x in kinds)
    config = sentences.with_modules(config, modules, *module_configs)
    names = ("sentence_bert_config.json", "config_sentence_transformers.json")
    first, whole = (pretrained.optional(source.files / name) for name in names)
    return config, sentences.with_settings(style, first, whole)
