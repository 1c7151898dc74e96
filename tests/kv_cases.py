"""Attention weights that the golden numbers of compressed KV caches are made of, from seeds."""

from __future__ import annotations

import json
import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"
B, N, K, S, H = 2, 4, 2, 48, 8
"""Prompts, query and kv heads, places and head dim of what kvpress compresses."""
WINDOW = 8
"""SnapKV's window there."""
LAYERS, QUERIES, PLACES = 5, 9, 150
"""Layers, observed queries and places of what EffiVLM-Bench compresses; the heads are the same."""


def golden(name):
    """The numbers of a file in tests/golden."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def queries_and_keys():
    """f32[B, S, N, H] and f32[B, S, K, H]."""
    random = np.random.RandomState(0)
    shapes = (B, S, N, H), (B, S, K, H)
    return [s * random.standard_normal(x).astype(np.float32) for s, x in zip((1, 2), shapes)]


def softmax(score, allowed):
    """Softmax over the last dim, of allowed numbers alone."""
    score = np.where(allowed, score, -np.inf)
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def weights_of_layers():
    """f32[LAYERS, N, QUERIES, PLACES] of the last queries; later layers attend to fewer keys."""
    random = np.random.RandomState(0)
    score = random.standard_normal((LAYERS, N, QUERIES, PLACES))
    score *= np.array([1, 2, 4, 6, 12])[:, None, None, None]
    causal = np.arange(PLACES) <= np.arange(PLACES - QUERIES, PLACES)[:, None]
    return softmax(score, causal).astype(np.float32)
