"""Zero-shot classification of a file's images with any embedding model."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxvlm.config import ConfigError, DataConfig
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.sources import tables
from jaxvlm.data.sources.fields import Allowed, BadItem, Splits, name_of
from jaxvlm.evals import zero_shot
from jaxvlm.inference.embed_corpus import EmbedConfig, in_memory
from jaxvlm.inference.encoder import Encoder
from jaxvlm.inference.items import refuse
from jaxvlm.inference.vlm import VLM

IN_FILE = "labels"
"""Value of ``--classes`` that takes the class names from the labels of the file's images."""
_LISTS = (".txt", ".lst")


@dataclasses.dataclass(frozen=True)
class ZeroShotReport:
    """The metrics of a zero-shot evaluation."""

    metrics: dict[str, float]
    """The result of :func:`jaxvlm.evals.zero_shot.evaluate`, and ``classes``, their number."""
    ks: tuple[int, ...]
    """Cut-offs of the metrics."""
    seconds: float
    """Duration of the evaluation."""

    def lines(self) -> list[str]:
        """Formats the metrics as a table for people."""
        metrics = self.metrics
        lines = [
            f"evaluated in {self.seconds:.1f} s",
            f"{int(metrics['images'])} images, {int(metrics['classes'])} classes; per cent",
            f"  {'':<10}{'model':>10}{'majority':>10}{'chance':>10}",
        ]
        for k in self.ks:
            shares = (metrics[f"{prefix}top{k}"] for prefix in ("", *zero_shot.CONTROLS))
            lines.append(f"  top {k:<6}" + "".join(f"{100 * x:10.2f}" for x in shares))
        return lines


def read(name: str, config: DataConfig = tables.DEFAULT) -> tuple[list[Item], list[str]]:
    """Reads images and their classes from a file.

    Args:
        name: file that :func:`jaxvlm.data.sources.tables.each` reads; a record has ``image``, a
            path relative to the file's folder, and ``label``, the name of its class.
        config: data settings that say how the file is read.

    Returns:
        The images as items, and the label of each.

    Raises:
        DataError: the file, or a record of it, can't be read.
    """
    unread, problems = list[Problem](), list[Problem]()
    allowed = Allowed.of(config.ignored_fields)
    items, labels, splits = [], [], Splits(name, config)
    for record in tables.each(name, config):
        if isinstance(record, Problem):
            unread.append(record)
            continue
        try:
            fields = record.fields if isinstance(record.fields, dict) else {}
            splits.add(fields)
            fields = allowed.fields_of("record", fields, {"id", "image", "label"})
            image, label = fields.get("image"), name_of(fields.get("label"))
            if not isinstance(image, str) or not image:
                raise BadItem("no image: give its path as 'image'")
            if not label or isinstance(fields["label"], bool):
                raise BadItem("no class: give its name as 'label'")
            items.append(Item.of("", record.locate(image)))
            labels.append(label)
        except BadItem as bad:
            problems.append(Problem(record.where, bad.reason, bad.detail))
    refuse(name, [*unread, *problems])
    splits.check()
    if not items:
        raise DataError(f"{name}: the file has no images")
    return items, labels


def classes_of(spec: str, labels: Sequence[str]) -> list[str]:
    """Lists the class names.

    Args:
        spec: ``a,b,c``; a text file with one name per line; or :data:`IN_FILE`.
        labels: labels of the images.

    Returns:
        The names, in order.

    Raises:
        ConfigError: there are fewer than two names, a name occurs twice, a label is not among
            them, or the file can't be read.
    """
    path = pathlib.Path(spec).expanduser()
    if spec == IN_FILE:
        names = sorted(set(labels))
    elif path.is_file() or path.suffix in _LISTS:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            names = [line for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"--classes={spec} can't be read: {error}") from None
    else:
        names = spec.split(",")
    names = [name_of(name.strip()) or "" for name in names]
    if len(names) < 2 or not all(names):
        raise ConfigError(
            f"--classes={spec}: give at least two names, none empty, as A,B,C or as a file with "
            "one name per line"
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"--classes={spec}: {twice[0]!r} occurs twice")
    if unknown := sorted(set(labels) - set(names)):
        raise ConfigError(
            f"--classes={spec}: {unknown[0]!r}, the label of an image, is not among them"
        )
    return names


def evaluate(
    model: Encoder | VLM,
    images: tuple[Sequence[Item], Sequence[str]],
    names: Sequence[str],
    templates: Sequence[str] = zero_shot.TEMPLATES,
    ks: tuple[int, ...] = (),
    image: EmbedConfig | None = None,
    prompt: EmbedConfig | None = None,
) -> ZeroShotReport:
    """Classifies images by the class whose prompts are nearest, and measures top-k accuracy.

    Args:
        model: model that embeds images and texts.
        images: items and labels from :func:`read`.
        names: class names from :func:`classes_of`.
        templates: prompts with ``{}`` for a name; a class is the mean of its prompts.
        ks: cut-offs below the number of classes; () means 1, and 5 if there are more classes.
        image: settings of how images are embedded.
        prompt: settings of how prompts are embedded.

    Raises:
        ConfigError: a template has no ``{}``, a cut-off is out of range, or the model takes no
            images.
        DataError: an image can't be read.
    """
    begun = time.monotonic()
    items, labels = images
    if ks and max(ks) >= len(names):
        raise ConfigError(
            f"ks={max(ks)}: with {len(names)} classes the label is always among the first "
            f"{max(ks)}; give cut-offs below {len(names)}"
        )
    ks = ks or tuple(k for k in (1, 5) if k < len(names))
    number = {name: i for i, name in enumerate(names)}

    def encode(texts: list[str]) -> np.ndarray:
        return in_memory(model, [Item.of(t) for t in texts], prompt or EmbedConfig(), "prompts")

    classes = zero_shot.class_embeddings(encode, names, templates)
    embeddings = in_memory(model, items, image or EmbedConfig(), "images")
    wanted = [number[label] for label in labels]
    metrics = zero_shot.evaluate(embeddings, classes, wanted, model.model.mesh, ks)
    return ZeroShotReport(metrics | {"classes": float(len(names))}, ks, time.monotonic() - begun)
