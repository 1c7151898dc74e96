"""The data sets of a run of conversations, from its settings."""

from __future__ import annotations

from typing import Any

from jaxvlm.config import DataConfig, TrainConfig
from jaxvlm.data import formats, images, tokenizer
from jaxvlm.data.loader import Dataset


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
