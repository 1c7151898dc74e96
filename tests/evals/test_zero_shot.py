"""Zero-shot classification compared with CLIP's recipe in torch and scikit-learn's accuracy."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.evals.zero_shot import class_embeddings, evaluate
from jaxvlm.parallel.mesh import make_mesh

NAMES = ["cat", "dog", "red ball", "tree", "house", "boat", "cup", "{} of tea"]
TEMPLATES = ["a photo of a {}.", "{}", "a drawing of one {}"]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=8))


def encode(texts):
    """Embeddings not of unit length, so that it matters when prompts are normalized."""
    seeds = [zlib.crc32(text.encode()) for text in texts]
    drawn = [np.random.default_rng(seed).normal(size=10) * (1 + seed % 5) for seed in seeds]
    return np.asarray(drawn, np.float32)


def test_classes_and_accuracy_are_clips(mesh):
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    metrics = pytest.importorskip("sklearn.metrics", reason="the oracle")
    weights = []
    for name in NAMES:  # as in CLIP's Prompt_Engineering_for_ImageNet.ipynb
        embeddings = torch.from_numpy(encode([t.replace("{}", name) for t in TEMPLATES]))
        embeddings /= embeddings.norm(dim=-1, keepdim=True)
        mean = embeddings.mean(dim=0)
        weights.append(mean / mean.norm())
    weights = torch.stack(weights)
    ours = class_embeddings(encode, NAMES, TEMPLATES)
    np.testing.assert_allclose(ours, weights.numpy(), atol=1e-6)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, len(NAMES), 70)
    images = (ours[labels] + 1.0 * rng.normal(size=(70, 10))).astype(np.float32)
    report = evaluate(images, ours, labels.tolist(), mesh, (1, 3, 20))
    logits = torch.nn.functional.normalize(torch.from_numpy(images)) @ weights.T
    for k in (1, 3):
        expected = metrics.top_k_accuracy_score(labels, logits.numpy(), k=k)
        assert report[f"top{k}"] == pytest.approx(expected) and 0.3 < expected < 1
        assert report[f"chance/top{k}"] == k / len(NAMES)
        often = sorted(np.unique(labels, return_counts=True)[1])[-k:]
        assert report[f"majority/top{k}"] == pytest.approx(sum(often) / 70)
    assert report["top20"] == report["chance/top20"] == 1 and report["images"] == 70


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": [0, 1]}, "2 labels for 3 images"),
        ({"labels": [0, 1, 2]}, "labels are 0..1, and one is 2"),
        ({"ks": (0,)}, r"ks=\(0,\)"),
    ],
)
def test_bad_input_is_named(mesh, change, said):
    given = {"labels": [0, 1, 0]} | change
    with pytest.raises(ConfigError, match=said):
        evaluate(np.eye(3, dtype=np.float32), np.eye(2, 3, dtype=np.float32), mesh=mesh, **given)


def test_templates_have_one_placeholder(mesh):
    with pytest.raises(ConfigError, match="template 'a photo'"):
        class_embeddings(encode, ["cat"], ["a photo"])
    with pytest.raises(ConfigError, match="needs class names"):
        class_embeddings(encode, [])
