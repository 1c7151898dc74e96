"""Read the sources of a mixture, and hold each to the limits of what may be skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.config import DataConfig, SourceConfig
from jaxvlm.data.errors import Problem, enforce
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
        DataError: a source can't be used, or too many of its records can't.
    """
    records: list[Record] = []
    problems: list[Problem] = []
    for name, source in config.mixture.items():
        own, bad = conversation_formats.read(source.train, of_source(config, source))
        if 0 < source.max_records < len(own):
            order = np.random.default_rng([0, _CHOICE]).permutation(len(own))
            own = [own[i] for i in np.sort(order[: source.max_records]).tolist()]
        records += [x._replace(id=f"{name}/{x.id}") for x in own]
        problems += [x._replace(id=f"{name}/{x.id}") for x in bad]
    return records, problems


def sources_of(config: DataConfig, ids: Sequence[str]) -> list[int]:
    """Index of the source of each record of a mixture, by its id."""
    numbers = {name: i for i, name in enumerate(config.mixture)}
    return [numbers[identifier.partition("/")[0]] for identifier in ids]


def sources(config: DataConfig, records: Sequence[Record], chosen: np.ndarray) -> list[int]:
    """Index of the source of each chosen record; 0 where the data are no mixture."""
    if not config.mixture:
        return [0] * len(chosen)
    return sources_of(config, [records[i].id for i in chosen.tolist()])


class _Part(NamedTuple):
    what: str
    total: int
    bad: list[Problem]
    too_long: list[Problem]


def enforce_limits(
    name: str,
    config: DataConfig,
    records: Sequence[Record],
    unread: Sequence[Problem],
    bad: Sequence[Problem],
    too_long: Sequence[Problem],
) -> list[Problem]:
    """Stop the run if too many records of the data, or of one source of a mixture, are skipped.

    Args:
        name: of the data, for messages.
        config: data settings.
        records: all records that were read.
        unread: items that are no record.
        bad: records that ``data.on_bad_record`` is about.
        too_long: records that ``data.on_too_long`` is about.

    Returns:
        All problems.

    Raises:
        DataError: one line with the count, the share and the first reasons.
    """
    whole = _Part(name, len(records) + len(unread), [*unread, *bad], list(too_long))
    for what, total, own, long in _parts(whole, config, records, unread):
        enforce(own, total, config.on_bad_record, config.max_skip_fraction, what)
        enforce(long, total, config.on_too_long, 1.0, what)
        enforce(own + long, total, "skip", config.max_skip_fraction, what)
    return whole.bad + whole.too_long


def _parts(
    whole: _Part, config: DataConfig, records: Sequence[Record], unread: Sequence[Problem]
) -> Iterator[_Part]:
    if not config.mixture:
        yield whole
        return
    ids = [*(x.id for x in records), *(x.id for x in unread)]
    totals = np.bincount(sources_of(config, ids), minlength=len(config.mixture))
    bad, too_long = (sources_of(config, [x.id for x in xs]) for xs in (whole.bad, whole.too_long))
    for i, source in enumerate(config.mixture.values()):
        yield _Part(
            source.train,
            int(totals[i]),
            [x for x, of in zip(whole.bad, bad, strict=True) if of == i],
            [x for x, of in zip(whole.too_long, too_long, strict=True) if of == i],
        )
