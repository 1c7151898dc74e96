"""A run's tokenizer, and the size of the vocabulary that its model has for it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable

from jaxvlm.build import pretrained
from jaxvlm.config import ConfigError, ModelConfig, TrainConfig
from jaxvlm.data import tokenizer

_MULTIPLE = 64
"""Vocabularies are rounded up to it, so that mesh axes divide them on every mesh alike."""


def make_tokenizer(
    config: TrainConfig,
    saved: pathlib.Path | None,
    said: Callable[[], Iterable[str]],
    source: pretrained.Source | None = None,
) -> tokenizer.ChatTokenizer:
    """The run's tokenizer: its own, the one it names, its checkpoint's, ``init_from``'s, or new.

    Args:
        config: of the run.
        saved: the run's tokenizer folder; used where it exists.
        said: the texts of the training file.
        source: the checkpoint that it starts from.
    """
    style = source.family.chat_style(source.hf_config) if source is not None else tokenizer.PLAIN
    if saved is not None and saved.is_dir():
        return tokenizer.load(saved, style)
    if saved is not None and (saved.parent / "checkpoints").is_dir():
        raise ConfigError(
            f"{saved} is gone, but its run has checkpoints: their weights mean its tokens. Put it "
            "back, or start in another folder"
        )
    if config.tokenizer.path and source is not None:
        raise ConfigError(
            f"config.tokenizer.path={config.tokenizer.path}, but {source.files} has a tokenizer of "
            "its own, which its weights mean; leave it out"
        )
    if config.tokenizer.path:
        return tokenizer.load(config.tokenizer.path, style)
    if source is not None:
        return tokenizer.load(source.files, style)
    if config.init_from:  # its weights mean its tokens
        return tokenizer.load(pathlib.Path(config.init_from) / "tokenizer")
    return tokenizer.build(said(), config.tokenizer.kind, config.tokenizer.vocab_size)


def with_vocab(model: ModelConfig, vocab_size: int) -> ModelConfig:
    """``model`` with its vocabulary's size filled in, or checked.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    set_size = model.decoder.vocab_size
    if set_size and set_size < vocab_size:
        raise ConfigError(
            f"config.model.decoder.vocab_size={set_size} is less than the tokenizer's "
            f"{vocab_size} tokens; set it to 0 to take the tokenizer's"
        )
    size = set_size or -(-vocab_size // _MULTIPLE) * _MULTIPLE
    return dataclasses.replace(model, decoder=dataclasses.replace(model.decoder, vocab_size=size))
