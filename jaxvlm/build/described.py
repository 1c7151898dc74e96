"""What the files of an encoder's folder say: of Hugging Face or of sentence-transformers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxvlm.build import pretrained
from jaxvlm.config import ConfigError, DualConfig
from jaxvlm.data import processor, texts
from jaxvlm.data.errors import DataError
from jaxvlm.models.families import bert, sentences


class Described(NamedTuple):
    """What the files of an encoder's folder say beside its weights."""

    config: DualConfig
    tokenizer: texts.TextTokenizer
    pictures: processor.Processor | None


def described(source: pretrained.Source) -> Described:
    """The model of a Hugging Face or sentence-transformers folder, its texts and its pictures.

    Args:
        source: with an ``EncoderFamily``.

    Raises:
        ConfigError: a field of one of its files that is not understood, or files that do not fit.
        DataError: a tokenizer or processor that can't be read.
    """
    config, files = source.family.config_from_hf(source.hf_config), source.files
    tokenizer_config = files / "tokenizer_config.json"
    named = pretrained.json_object(tokenizer_config) if tokenizer_config.is_file() else {}
    style = source.family.text_style(config, named)
    if found := pretrained.modules(files):
        config, style = _sentences(source, found, config, style)
    pictures = processor.load(files) if "vision" in config.towers else None
    if pictures is not None:
        vision = config.vision
        if pictures.size != (0 if vision.packed else vision.image_size):
            raise ConfigError(
                f"{files}: the processor makes pictures of {pictures.size or 'any'} pixels, but "
                f"the model takes {'any' if vision.packed else vision.image_size}"
            )
        vision = dataclasses.replace(vision, pixel_mean=pictures.mean, pixel_std=pictures.std)
        config = dataclasses.replace(config, vision=vision)
    tokenizer = texts.load(files, style)
    if (size := tokenizer.backend.get_vocab_size()) > config.text.vocab_size:
        raise DataError(
            f"{files}: the tokenizer has {size} tokens, the model {config.text.vocab_size}"
        )
    return Described(config, tokenizer, pictures)


def _sentences(
    source: pretrained.Source, modules: list[dict[str, Any]], config: DualConfig, style: Any
) -> tuple[DualConfig, Any]:
    """Config and style with what a sentence-transformers folder says besides."""
    if source.family is not bert:  # texts and pictures as transformers has them
        sentences.check_whole(modules)
        return config, style
    said = (
        pretrained.module_config(source.files, modules, x) for x in ("Pooling", sentences.DENSE)
    )
    config = sentences.with_modules(config, modules, *said)
    names = ("sentence_bert_config.json", "config_sentence_transformers.json")
    first, whole = (pretrained.optional(source.files / name) for name in names)
    return config, sentences.with_settings(style, first, whole)
