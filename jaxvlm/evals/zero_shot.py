"""Zero-shot classification: an image belongs to the class with the nearest prompt embeddings.

Source: CLIP, arXiv 2103.00020, section 3.1.4 (ensembles of prompts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.parallel.exact_search import Search, nearest
from jaxvlm.types import Array

TEMPLATES = ("a photo of a {}.",)
"""CLIP's prompt, the default."""
CONTROLS = ("majority/", "chance/")
"""Prefixes of the metrics of two guesses: the labels' most frequent classes, and random classes."""


def class_embeddings(
    encode: Callable[[list[str]], np.ndarray],
    names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
) -> np.ndarray:
    """Embeds each class as the normalized mean of its prompts' unit embeddings.

    Args:
        encode: function that embeds texts: list of n texts -> f32[n, E].
        names: names of the classes.
        templates: prompts, each with one ``{}`` for the name.

    Returns:
        f32[len(names), E].

    Raises:
        ConfigError: there is no class or no template, or a template has no ``{}``.
    """
    if bad := [t for t in templates if t.count("{}") != 1]:
        raise ConfigError(
            f"zero-shot template {bad[0]!r}: write {{}} exactly once, where the name goes"
        )
    if not names or not templates:
        raise ConfigError("zero-shot classification needs class names and a template")
    prompts = [template.replace("{}", name) for name in names for template in templates]
    embeddings = unit(np.asarray(encode(prompts), np.float32))
    return unit(embeddings.reshape(len(names), len(templates), -1).mean(axis=1))


def evaluate(
    images: Array,
    classes: np.ndarray,
    labels: Sequence[int],
    mesh: Mesh,
    ks: Sequence[int] = (1, 5),
    dims: int = 0,
) -> dict[str, float]:
    """Measures top-k accuracy: how often an image's class is among the k nearest.

    Args:
        images: [N, E] embeddings.
        classes: f32[C, E] from :func:`class_embeddings`.
        labels: class index of each image, below C.
        mesh: mesh to search on.
        ks: cut-offs; one of C or more gives an accuracy of 1.
        dims: number of dims to truncate embeddings to; 0 keeps all.

    Returns:
        ``top1`` and ``top5`` (by ``ks``) in 0..1, the same with the prefixes of :data:`CONTROLS`,
        and ``images``, their number.

    Raises:
        ConfigError: a label is out of range, or there is not exactly one label per image.
    """
    wanted, count = np.asarray(labels, np.int64), len(classes)
    if wanted.shape != (len(images),) or not len(wanted):
        raise ConfigError(
            f"zero-shot: {len(wanted)} labels for {len(images)} images; give one per image"
        )
    if wanted.min() < 0 or wanted.max() >= count:
        raise ConfigError(f"zero-shot: labels are 0..{count - 1}, and one is {wanted.max()}")
    if not ks or min(ks) < 1:
        raise ConfigError(f"ks={tuple(ks)}: use cut-offs of at least 1")
    ranked = nearest(images, classes, min(max(ks), count), mesh, Search(dims=dims)).document
    right = ranked == wanted[:, None]
    shares = {f"top{k}": float(np.mean(right[:, :k].any(axis=1))) for k in ks}
    most = np.sort(np.bincount(wanted, minlength=count))[::-1] / len(wanted)
    majority = {f"majority/top{k}": float(most[:k].sum()) for k in ks}
    chance = {f"chance/top{k}": min(k / count, 1.0) for k in ks}
    return shares | majority | chance | {"images": float(len(wanted))}


def unit(x: np.ndarray) -> np.ndarray:
    """Normalizes embeddings to length 1 along the last dim; zeros stay zero."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
