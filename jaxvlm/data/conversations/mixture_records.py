"""Read the sources of a mixture, and open those that are packed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from jaxvlm.config import DataConfig, SourceConfig
from jaxvlm.data.conversations import joined, packed_set
from jaxvlm.data.conversations.content import Content, ModelInputs, build, is_packed
from jaxvlm.data.errors import MIXTURE, DataError, Problem
from jaxvlm.data.packed.checks import OF_READING
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.conversation_formats import Record
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer

SOURCE_SETTINGS = ("image_root", "column_mapping", "ignored_fields")
"""Settings of how a source is read; those that it leaves out are ``config.data``'s."""
_CHOICE = 0x3C  # tag of a random stream
Read = dict[str, tuple[Sequence[Record], list[Problem]]]
"""Source -> its records and problems; packed sources are not in it."""


def of_source(config: DataConfig, source: SourceConfig) -> DataConfig:
    """The settings by which a source is read: its own, and those of all data that it leaves out."""
    own = {name: value for name in SOURCE_SETTINGS if (value := getattr(source, name))}
    return dataclasses.replace(config, train=source.train, mixture={}, **own)


def of_file(config: DataConfig, spec: str) -> DataConfig:
    """The settings by which a file is read that may be a source of the mixture."""
    whole = os.path.abspath(spec)
    same = (x for x in config.mixture.values() if os.path.abspath(x.train) == whole)
    source = next(same, None)
    return of_source(config, source) if source else dataclasses.replace(config, mixture={})


def read(config: DataConfig) -> Read:
    """Read all sources of ``config.mixture`` but those that are packed.

    Raises:
        DataError: a source can't be used as a whole.
    """
    found: Read = {}
    for name, source in config.mixture.items():
        if is_packed(source.train, config):
            continue
        try:
            own, bad = conversation_formats.read(source.train, of_source(config, source))
        except DataError as error:
            raise DataError(f"{MIXTURE}.{name}: {error}") from None
        total = len(own) + len(bad)
        if 0 < source.max_records < total:  # of bad ones as many as of all
            order = np.random.default_rng([0, _CHOICE]).permutation(total)
            chosen = np.sort(order[: source.max_records]).tolist()
            few = conversation_formats.record_spool()
            for i in chosen:
                if i < len(own):
                    few.add(own[i])
            own, bad = few.items(), [bad[i - len(own)] for i in chosen if i >= len(own)]
        found[name] = own, bad
    return found


def load(
    config: DataConfig, tokenizer: ChatTokenizer, settings: ModelInputs, found: Read
) -> Content:
    """Build what each source holds, or open it where it is packed, and join them.

    Args:
        config: data settings with a mixture.
        tokenizer: the run's.
        settings: what else the data depend on.
        found: result of :func:`read`.

    Raises:
        DataError: a source can't be used.
        StoreError: a store does not give a packed source's files.
    """
    contents: dict[str, Content] = {}
    for name, source in config.mixture.items():
        what, given = f"{MIXTURE}.{name}: {source.train}", (tokenizer, settings)
        if name in found:
            own = of_source(config, source)
            contents[name] = build(what, *found[name], own, *given)
            continue
        try:
            packed = packed_set.open_set(source.train, packed_source(config, source), *given)
        except DataError as error:
            raise DataError(f"{MIXTURE}.{name}: {error}") from None
        parts = [part._replace(what=what) for part in packed.parts]
        contents[name] = packed._replace(parts=parts)
    return joined.join(contents)


def packed_source(config: DataConfig, source: SourceConfig) -> DataConfig:
    """The settings by which a packed source is opened: none of how files are read."""
    default = DataConfig()
    unset = {name: getattr(default, name) for name in OF_READING}
    return dataclasses.replace(config, train=source.train, mixture={}, **unset)


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
