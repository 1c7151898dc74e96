"""Settings of a mixture: several sources of training data, and how much of each is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from jaxvlm.config.convert import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Configures one source of a mixture, ``config.data.mixture.NAME`` (docs/data.md).

    A recipe adds sources by name: ``config.data.mixture = {'chat': {'train': 'chat.jsonl',
    'weight': 2.0}}``. A source has either a ``weight`` or a budget (``epochs``, ``tokens``), and
    all sources have one of the same kind; without either, the weights follow from the sizes, see
    ``config.data.mixture_temperature``.
    """

    train: str = ""
    """Names the source's data, in the same form as ``config.data.train``."""
    weight: float = 0.0
    """Sets the source's share of the sequences, in proportion to the weights of the others."""
    epochs: float = 0.0
    """Sets how often the source is read in one epoch of the mixture, fractions included."""
    tokens: float = 0.0
    """Sets how many tokens of the source one epoch of the mixture has."""
    max_epochs: float = 0.0
    """Ends the source after so many passes over it, fractions included; the others then take its
    share. The default 0 reads it to the end of the run."""
    max_records: int = 0
    """Limits the source to so many records, a random choice that is the same in every run;
    the default 0 reads all of them."""
    image_root: str = ""
    """Names the folder that this source's image paths are relative to, or its gs:// or s3:// URL;
    the default "" takes ``config.data.image_root``."""
    column_mapping: tuple[tuple[str, str], ...] = ()
    """Lists pairs of a column's name in this source's files and the name of the field that it is
    read as; the default () takes ``config.data.column_mapping``."""
    ignored_fields: tuple[str, ...] = ()
    """Lists the fields of this source that are ignored; the default () takes
    ``config.data.ignored_fields``."""

    @property
    def budget(self) -> str:
        """The setting that says how much of the source one epoch of the mixture has; "" if none."""
        return next((name for name in ("epochs", "tokens") if getattr(self, name)), "")


def check_mixture(sources: Mapping[str, SourceConfig], path: str) -> None:
    """Refuse a mixture whose settings contradict each other.

    Args:
        sources: name of each source -> its settings.
        path: path of the mixture in error messages.

    Raises:
        ConfigError: the message names the source, the setting, and what to do.
    """
    for name, source in sources.items():
        where = f"{path}.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: a source's name has letters, digits, '_' and '-', as it is part of names"
                " of metrics"
            )
        if not source.train:
            raise ConfigError(f"{where}.train names no data: a file, a pattern or a folder")
        given = [s for s in ("weight", "epochs", "tokens") if getattr(source, s)]
        if len(given) > 1:
            raise ConfigError(f"{where} has {' and '.join(given)}; leave all but one out")
        if source.max_epochs and source.budget:
            raise ConfigError(
                f"{where} has {source.budget} and max_epochs; a budget ends it, so leave max_epochs"
                " out"
            )
    kinds = {_kind(source): name for name, source in sources.items()}
    if len(kinds) > 1:
        said = ", ".join(f"{name} has {kind}" for kind, name in kinds.items())
        raise ConfigError(
            f"{path}: {said}; give all sources a weight, or all a budget, or none (0 is none; a "
            "source that is not to be read is left out)"
        )
    if sources and all(source.max_epochs for source in sources.values()):
        raise ConfigError(
            f"{path}: every source has max_epochs, so that nothing would be left to read; leave it "
            "out for one, or set epochs instead"
        )


def _kind(source: SourceConfig) -> str:
    """What says how much of a source is read."""
    if source.budget:
        return "epochs or tokens"
    return "weight" if source.weight else "neither"
