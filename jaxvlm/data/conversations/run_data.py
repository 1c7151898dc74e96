"""Build the data sets of a run on conversations from its settings."""

from __future__ import annotations

from typing import Any

from jaxvlm.config import Config, DataConfig
from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.tokenizer import chat_tokenizer as tokenizer


def read_records(config: DataConfig, spec: str) -> Any:
    """Read a data file or a named source; returns (records, problems)."""
    return conversation_formats.read(spec, config)


def make_dataset(
    config: Config,
    spec: str,
    chat_tokenizer: tokenizer.ChatTokenizer,
    image_format: image_files.ImageFormat,
    read: Any = None,
) -> Dataset:
    """Build the data set ``spec``, tokenized for the run's model."""
    return Dataset.from_config(
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
