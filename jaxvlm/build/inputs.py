"""Tokenizer and data sets of a run."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

from jaxvlm.build import adapters, caching, pretrained
from jaxvlm.build.words import make_tokenizer, with_vocab
from jaxvlm.config import ConfigError, TrainConfig
from jaxvlm.data import chat
from jaxvlm.data.run_data import make_dataset, read_records
from jaxvlm.models.families import sentences


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
