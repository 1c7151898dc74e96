"""Settings of extensions: a user's own losses, data formats, model families and cache policies."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxvlm.config.options import NO_OPTIONS, Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """Describes a class, function or module of the user's own (docs/extend.md)."""

    target: str = ""
    """Names the object as MODULE:NAME, or as path/to/FILE.py:NAME, whose path is made absolute; the
    default "" uses what jaxvlm has built in."""
    options: Mapping[str, Any] = NO_OPTIONS
    """Sets the fields of the frozen dataclass that ``target`` names; a key that the dataclass has
    no field for, or a value of another type, is refused."""

    def __post_init__(self) -> None:
        source, colon, name = self.target.partition(":")
        if source.endswith(".py"):
            source = str(pathlib.Path(source).expanduser().absolute())
        object.__setattr__(self, "target", f"{source}{colon}{name}")
        object.__setattr__(self, "options", Options(self.options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Extension):
    """Chooses the training loss: a built-in one by its name, or the user's own by its target."""

    name: str = "next_token"
    """Chooses a built-in loss, where ``target`` is empty: 'next_token' trains a language model and
    the others train embeddings. Allowed values: 'next_token', 'info_nce', 'sigmoid', 'triplet',
    'cosine', 'cosent', 'margin_mse', 'distill'."""
