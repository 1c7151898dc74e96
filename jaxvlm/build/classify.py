"""Zero-shot classification of a file's pictures, by any model that makes vectors."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxvlm.build.embedding import Embedding, in_memory
from jaxvlm.build.encoder import Encoder
from jaxvlm.build.items import refuse
from jaxvlm.build.loaded import Loaded
from jaxvlm.config import ConfigError
from jaxvlm.data import tables
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.examples import Item
from jaxvlm.data.formats import BadItem
from jaxvlm.evals import zero_shot

IN_FILE = "labels"
"""Instead of a list: the classes are those that the file's pictures have."""
_LISTS = (".txt", ".lst")


@dataclasses.dataclass(frozen=True)
class Report:
    """An evaluation's figures."""

    metrics: dict[str, float]
    """See :func:`jaxvlm.evals.zero_shot.evaluate`; and ``classes``."""
    ks: tuple[int, ...]
    seconds: float

    def lines(self) -> list[str]:
        """For people."""
        found = self.metrics
        lines = [
            f"evaluated in {self.seconds:.1f} s",
            f"{int(found['pictures'])} pictures, {int(found['classes'])} classes; per cent",
            f"  {'':<10}{'model':>10}{'majority':>10}{'chance':>10}",
        ]
        for k in self.ks:
            shares = (found[f"{part}top{k}"] for part in ("", *zero_shot.CONTROLS))
            lines.append(f"  top {k:<6}" + "".join(f"{100 * x:10.2f}" for x in shares))
        return lines


def read(name: str) -> tuple[list[Item], list[str]]:
    """Pictures of a file, and the class of each.

    Args:
        name: what :func:`jaxvlm.data.tables.read` reads; a record has ``image``, a path relative to
            the file's folder, and ``label``.

    Raises:
        DataError: the file, or a record of it, can't be read.
    """
    raw, problems = tables.read(name)
    refuse(name, problems)
    items, labels = [], []
    for record in raw:
        try:
            fields = record.fields if isinstance(record.fields, dict) else {}
            image, label = fields.get("image"), fields.get("label")
            if not isinstance(image, str) or not image:
                raise BadItem("no picture: 'image' is its path")
            if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
                raise BadItem("no class: 'label' is its name")
            items.append(Item.of("", record.locate(image)))
            labels.append(str(label))
        except BadItem as bad:
            problems.append(Problem(record.where, bad.reason, bad.detail))
    refuse(name, problems)
    if not items:
        raise DataError(f"{name}: no pictures in it")
    return items, labels


def classes_of(asked: str, labels: Sequence[str]) -> list[str]:
    """Names of classes.

    Args:
        asked: ``a,b,c``; a text file of a name a line; or :data:`IN_FILE`.
        labels: of the pictures.

    Raises:
        ConfigError: fewer than two, one twice, a picture's that is not among them, or a file that
            can't be read.
    """
    path = pathlib.Path(asked).expanduser()
    if asked == IN_FILE:
        names = sorted(set(labels))
    elif path.is_file() or path.suffix in _LISTS:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            names = [line for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"--classes={asked} can't be read: {error}") from None
    else:
        names = asked.split(",")
    names = [name.strip() for name in names]
    if len(names) < 2 or not all(names):
        raise ConfigError(
            f"--classes={asked}: give two names or more, A,B,C or a file of one a line, none empty"
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"--classes={asked}: {twice[0]!r} is named twice")
    if strange := sorted(set(labels) - set(names)):
        raise ConfigError(
            f"--classes={asked}: {strange[0]!r}, which is a picture's label, is not among them"
        )
    return names


def evaluate(
    model: Encoder | Loaded,
    pictures: tuple[Sequence[Item], Sequence[str]],
    names: Sequence[str],
    templates: Sequence[str] = zero_shot.TEMPLATES,
    ks: tuple[int, ...] = (),
    picture: Embedding | None = None,
    prompt: Embedding | None = None,
) -> Report:
    """How often a picture's class is among those whose prompts are nearest to it.

    Args:
        model: what makes vectors, of pictures and of texts.
        pictures: of :func:`read`.
        names: of the classes, see :func:`classes_of`.
        templates: prompts with ``{}`` for a name; a class is their mean.
        ks: cut-offs, of fewer than there are classes; (): 1, and 5 where there are more.
        picture: how pictures become vectors.
        prompt: how prompts do.

    Raises:
        ConfigError: a template without ``{}``, a cut-off that is none, or a model without pictures.
        DataError: a picture can't be read.
    """
    begun = time.monotonic()
    items, labels = pictures
    if ks and max(ks) >= len(names):
        raise ConfigError(
            f"ks: any class is among the first {max(ks)} of {len(names)}; give cut-offs below "
            f"{len(names)}"
        )
    ks = ks or tuple(k for k in (1, 5) if k < len(names))
    number = {name: i for i, name in enumerate(names)}

    def encode(texts: list[str]) -> np.ndarray:
        return in_memory(model, [Item.of(t) for t in texts], prompt or Embedding(), "prompts")

    classes = zero_shot.class_vectors(encode, names, templates)
    seen = in_memory(model, items, picture or Embedding(), "pictures")
    wanted = [number[label] for label in labels]
    metrics = zero_shot.evaluate(seen, classes, wanted, model.model.mesh, ks)
    return Report(metrics | {"classes": float(len(names))}, ks, time.monotonic() - begun)
