"""Read the sources of a mixture, and hold each to the limits of what may be skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxvlm.config import DataConfig, SourceConfig
from jaxvlm.data.errors import DataError, Part, Problem, enforce
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.conversation_formats import Record

PATH = "config.data.mixture"
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
            raise DataError(f"{PATH}.{name}: {error}") from None
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


def numbers(config: DataConfig) -> Callable[[str], int]:
    """A function of a record's id: the index of its source, 0 where the data are no mixture."""
    of = {name: i for i, name in enumerate(config.mixture)}
    return lambda identifier: of[identifier.partition("/")[0]] if of else 0


def sources(config: DataConfig, records: Sequence[Record], chosen: np.ndarray) -> list[int]:
    """Index of the source of each chosen record; 0 where the data are no mixture."""
    number = numbers(config)
    return [number(records[i].id) for i in chosen.tolist()]


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


def check_command(name: str, config: DataConfig) -> str:
    """The command that lists what is refused of some data."""
    return f"jaxvlm data check {'' if config.mixture else f'{name} '}--config=RECIPE"


def enforce_limits(
    name: str,
    config: DataConfig,
    records: Sequence[Record],
    unread: Sequence[Problem],
    bad: Sequence[Problem],
    too_long: Sequence[Problem],
) -> list[Part]:
    """Stop the run if too many records of the data, or of one source of a mixture, are skipped.

    Args:
        name: of the data, for messages.
        config: data settings.
        records: all records that were read.
        unread: items that are no record.
        bad: records that ``data.on_bad_record`` is about.
        too_long: records that ``data.on_too_long`` is about.

    Returns:
        The data's parts, with all problems: one for each source, or one alone.

    Raises:
        DataError: one line with the count, the share and the first reasons.
    """
    number, check = numbers(config), check_command(name, config)
    names = [f"{PATH}.{x}: {source.train}" for x, source in config.mixture.items()] or [name]
    ids = [*(x.id for x in records), *(x.id for x in unread)]
    parts = []
    for i, what in enumerate(names):
        total = sum(number(x) == i for x in ids)
        refused, long = (
            [x for x in problems if number(x.id) == i] for problems in ((*unread, *bad), too_long)
        )
        limit = config.max_skip_fraction
        enforce(refused, total, config.on_bad_record, limit, what, check)
        enforce(long, total, config.on_too_long, 1.0, what, check)
        enforce(refused + long, total, "skip", limit, what, check)
        parts.append(Part(what, total, refused + long, check))
    return parts
