"""What a run is made of before its model is built: checkpoint, tokenizer, images, data."""

from __future__ import annotations

import pathlib

from jaxvlm.config import Config
from jaxvlm.losses.registry import trains_embeddings
from jaxvlm.trainer import embedding_run, inputs
from jaxvlm.trainer.inputs import Prepared


def prepare(config: Config, workdir: pathlib.Path | None) -> Prepared:
    """Read the checkpoint's settings, the tokenizer and the training data.

    Args:
        config: the run's settings.
        workdir: the run's folder; what it has kept comes first.

    Raises:
        ConfigError: settings that can't be used.
        DataError: data that can't be used.
    """
    of_kind = embedding_run if trains_embeddings(config) else inputs
    return of_kind.prepare(config, workdir)
