"""Read the sources of a mixture."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxvlm.config import DataConfig, SourceConfig
from jaxvlm.data.errors import MIXTURE, DataError, Problem
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.conversation_formats import Record

SOURCE_SETTINGS = ("image_root", "column_mapping", "ignored_fields")
"""Settings of how a source is read; those that it leaves out are ``config.data``'s."""
_CHOICE = 0x3C  # tag of a random stream


def of_source(config: DataConfig, source: SourceConfig) -> DataConfig:
    """The settings by which a source is read: its own, and those of all data that it leaves out."""
    own = {name: value for name in SOURCE_SETTINGS if (value := getattr(source, name))}
    return dataclasses.replace(config, train=source.train, mixture={}, **own)


def read(config: DataConfig) -> tuple[list[Record], list[Problem]]:
    """Read all sources of ``config.mixture``, one after another.

    Returns:
        Records, whose ids begin with their source's name and a slash, and problems, whose do too.

    Raises:
        DataError: a source can't be used as a whole.
    """
    records: list[Record] = []
    problems: list[Problem] = []
    for name, source in config.mixture.items():
        try:
            own, bad = conversation_formats.read(source.train, of_source(config, source))
        except DataError as error:
            raise DataError(f"{MIXTURE}.{name}: {error}") from None
        total = len(own) + len(bad)
        if 0 < source.max_records < total:  # of bad ones as many as of all
            order = np.random.default_rng([0, _CHOICE]).permutation(total)
            chosen = np.sort(order[: source.max_records]).tolist()
            own, bad = (
                [own[i] for i in chosen if i < len(own)],
                [bad[i - len(own)] for i in chosen if i >= len(own)],
            )
        records += [x._replace(id=f"{name}/{x.id}") for x in own]
        problems += [x._replace(id=f"{name}/{x.id}") for x in bad]
    return records, problems


def fingerprint(config: DataConfig) -> dict[str, float]:
    """Settings that the order of a mixture is a function of, besides its records."""
    if not config.mixture:
        return {}
    own = {
        f"data.mixture.{name}.{field}": float(getattr(source, field))
        for name, source in config.mixture.items()
        for field in ("weight", "epochs", "tokens", "max_epochs")
    }
    return {"data.mixture_temperature": config.mixture_temperature, **own}
