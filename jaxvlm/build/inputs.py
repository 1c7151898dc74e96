"""Tokenizer and data sets of a run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxvlm.build import adapters, caching, pretrained
from jaxvlm.config import ConfigError, DataConfig, ModelConfig, TrainConfig
from jaxvlm.data import chat, formats, images, tokenizer
from jaxvlm.data.loader import Dataset
from jaxvlm.models.families import sentences

_MULTIPLE = 64
"""Vocabularies are rounded up to it, so that mesh axes divide them on every mesh alike."""


class Prepared(NamedTuple):
    """What a run is made of, before its model is built."""

    config: TrainConfig
    """With what checkpoint and data say filled in."""
    source: pretrained.Source | None
    """The checkpoint that it starts from."""
    tokenizer: Any
    """A ChatTokenizer; of a dual encoder a TextTokenizer, or ``None`` where it reads no texts."""
    pictures: Any
    """A PictureFormat; of a dual encoder a Processor, or ``None`` where it takes none."""
    dataset: Any
    """A Dataset, or a PairDataset."""
    dual: Any = None
    """The dual encoder, see :mod:`jaxvlm.build.dual`."""


def prepare(given: TrainConfig, workdir: pathlib.Path | None) -> Prepared:
    """What a run that trains tokens is made of.

    Args:
        given: its settings.
        workdir: its folder; what it has kept comes first.

    Raises:
        ConfigError: settings that can't be used.
        DataError: data that can't be used.
    """
    source = pretrained.find(given.model.checkpoint, workdir)
    if source is not None:
        sentences.check_tokens(pretrained.modules(source.files))
    given = pretrained.with_source(given, source)
    given = adapters.with_adapter(given, source, workdir)
    read = read_records(given.data, given.data.train)
    saved = workdir / "tokenizer" if workdir else None
    made = make_tokenizer(given, saved, lambda: chat.texts(read[0]), source)
    pretrained.check_tokens(source, made)
    pictures = pretrained.pictures(given, source, made)
    config = dataclasses.replace(given, model=with_vocab(given.model, made.vocab_size))
    caching.check(config)
    check_questions(config)
    dataset = make_dataset(config, given.data.train, made, pictures, read)
    return Prepared(config, source, made, pictures, dataset)


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


def check_questions(config: TrainConfig) -> None:
    """Refuse tokens chosen by a question where no one question has its pictures, or none at all.

    Raises:
        ConfigError: which setting, and what would do.
    """
    asks, data = config.model.connector.relevance, config.data
    where = f"config.model.connector.relevance.budget={asks.budget}"
    if not asks.budget:
        return
    if config.model.checkpoint:
        raise ConfigError(
            f"{where} with config.model.checkpoint={config.model.checkpoint}: no family's files "
            "have such weights, so what is trained could not be read elsewhere; leave one out"
        )
    alone = not data.packing or config.model.decoder.visual_mask == "prompt"
    if asks.query and data.share_pictures and not alone:
        raise ConfigError(
            f"{where} with config.data.share_pictures=True: questions that share a picture would "
            "need other tokens each; set --config.data.share_pictures=False, or "
            "--config.model.connector.relevance.query=False"
        )


def read_records(config: DataConfig, spec: str) -> Any:
    """What a data file or named source holds: (records, problems)."""
    return formats.read(spec, config.image_root)


def make_dataset(
    config: TrainConfig,
    spec: str,
    chat_tokenizer: tokenizer.ChatTokenizer,
    pictures: images.PictureFormat,
    read: Any = None,
) -> Dataset:
    """The data set ``spec``, encoded for the run's model."""
    return Dataset.from_config(
        config.data,
        chat_tokenizer,
        image_size=pictures.size,
        num_patches=pictures.of_file,
        seed=config.seed,
        visual_mask=config.model.decoder.visual_mask,
        prepare=pictures.prepare,
        patching=pictures.patching,
        spec=spec,
        read=read,
    )
