"""Zero-shot classification: a picture is of the class whose prompts its vector is nearest to.

Source: CLIP, arXiv 2103.00020, section 3.1.4 (ensembles of prompts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.parallel.topk import Search, nearest
from jaxvlm.types import Array

TEMPLATES = ("a photo of a {}.",)
"""CLIP's prompt where no other is known to be better."""
CONTROLS = ("majority/", "chance/")
"""Before names of figures: of a guess of the labels' most frequent classes, and of any class."""


def class_vectors(
    encode: Callable[[list[str]], np.ndarray],
    names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
) -> np.ndarray:
    """A vector a class: its prompts' unit vectors, averaged, of unit length again.

    Args:
        encode: texts -> f32[n, E].
        names: of the classes.
        templates: each with one ``{}`` for the name.

    Returns:
        f32[len(names), E].

    Raises:
        ConfigError: no class, no template, or one without ``{}``.
    """
    if bad := [t for t in templates if t.count("{}") != 1]:
        raise ConfigError(f"zero-shot template {bad[0]!r}: write {{}} once, where the name goes")
    if not names or not templates:
        raise ConfigError("zero-shot classification needs names of classes and a template")
    prompts = [template.replace("{}", name) for name in names for template in templates]
    vectors = unit(np.asarray(encode(prompts), np.float32))
    return unit(vectors.reshape(len(names), len(templates), -1).mean(axis=1))


def evaluate(
    pictures: Array,
    classes: np.ndarray,
    labels: Sequence[int],
    mesh: Mesh,
    ks: Sequence[int] = (1, 5),
    dims: int = 0,
) -> dict[str, float]:
    """Shares of pictures whose class is among the first k.

    Args:
        pictures: [N, E] vectors.
        classes: f32[C, E] of :func:`class_vectors`.
        labels: of each picture, 0..C.
        mesh: to search on.
        ks: cut-offs; one of C or more is always right.
        dims: compare the first so many of a vector; 0 is all.

    Returns:
        ``top1``, ``top5`` in 0..1, the same of :data:`CONTROLS`, and ``pictures``.

    Raises:
        ConfigError: labels that are no class's, or not one a picture.
    """
    wanted, count = np.asarray(labels, np.int64), len(classes)
    if wanted.shape != (len(pictures),) or not len(wanted):
        raise ConfigError(f"zero-shot: {len(wanted)} labels for {len(pictures)} pictures")
    if wanted.min() < 0 or wanted.max() >= count:
        raise ConfigError(f"zero-shot: labels are 0..{count - 1}, and one is {wanted.max()}")
    if not ks or min(ks) < 1:
        raise ConfigError(f"ks={tuple(ks)}: give cut-offs of at least 1")
    found = nearest(pictures, classes, min(max(ks), count), mesh, Search(dims=dims)).document
    right = found == wanted[:, None]
    shares = {f"top{k}": float(np.mean(right[:, :k].any(axis=1))) for k in ks}
    most = np.sort(np.bincount(wanted, minlength=count))[::-1] / len(wanted)
    majority = {f"majority/top{k}": float(most[:k].sum()) for k in ks}
    chance = {f"chance/top{k}": min(k / count, 1.0) for k in ks}
    return shares | majority | chance | {"pictures": float(len(wanted))}


def unit(x: np.ndarray) -> np.ndarray:
    """Vectors of length 1, along the last dim; 0 stays 0."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
