"""Attention rows, scores and densities against transformers, kvpress and EffiVLM-Bench."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from kv_cases import (
    LAYERS,
    QUERIES,
    WINDOW,
    B,
    K,
    N,
    S,
    golden,
    queries_and_keys,
    weights_of_layers,
)
from numerics import close

from jaxvlm.config import ConfigError
from jaxvlm.nn import attention_rows as rows_of
from jaxvlm.nn.attention_backends import Scores

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
MODELS = {
    "Llama": ({}, Scores()),
    "Qwen3": ({}, Scores()),
    "Gemma2": ({"query_pre_attn_scalar": 4, "attn_logit_softcapping": 1.5}, Scores(0.5, 1.5)),
}
T, R, PADDING = 24, 7, (0, 5)
REAL = np.arange(T) >= np.array(PADDING)[:, None]
ALLOWED = np.tril(np.ones((T, T), bool)) & REAL[:, None]
OBSERVED = np.array([[False, False, *[True] * 5], [*[False] * 4, *[True] * 3]])
EVERY = np.ones((B, WINDOW), bool)

scored = jax.jit(rows_of.attention_rows, static_argnums=3)
density_of = jax.jit(rows_of.densities, static_argnums=3)
summed = jax.jit(rows_of.vl_cache_scores)
snapkv = jax.jit(rows_of.snapkv_scores, static_argnums=3)


@functools.cache
def of_transformers(name):
    """Queries, keys and attention weights of each layer, f32[B, T, N, H] and [B, N, T, T]."""
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name][0])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    seen, eager = [], module.eager_attention_forward

    def spy(layer, q, k, *args, **kwargs):
        seen.append((q, k))
        return eager(layer, q, k, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module, "eager_attention_forward", spy)
        tokens = torch.arange(2 * T).reshape(2, T) % 60
        mask = torch.tensor(REAL).long()
        out = model(tokens, attention_mask=mask, output_attentions=True)
    assert len(seen) == len(out.attentions) == 2
    return [
        (q.transpose(1, 2).numpy(), k.transpose(1, 2).numpy(), w.numpy())
        for (q, k), w in zip(seen, out.attentions, strict=True)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_rows_scores_and_densities_are_those_of_transformers(name):
    for q, k, weights in of_transformers(name):
        allowed = ALLOWED[:, -R:]
        rows = scored(q[:, -R:], k, allowed, MODELS[name][1])
        expected = np.where(REAL[:, None, None], weights[:, :, -R:], 0).astype(np.float64)
        close(rows.reshape(expected.shape), expected, 1e-5, name)
        counted = np.where(OBSERVED[:, None, :, None], expected, 0)
        scores = counted.sum(axis=2).reshape(2, 2, 2, T).mean(axis=2)
        close(summed(rows, OBSERVED), scores, 1e-5, name)
        share = expected / expected.max(axis=-1, keepdims=True)
        for threshold in (0.01, 0.5):
            assert np.abs(share / threshold - 1).min() > 1e-4  # no weight is at the border
            density = density_of(rows, OBSERVED, allowed, threshold)
            for b in range(2):
                own = allowed[b] & OBSERVED[b][:, None]
                of_heads = [(share[b, n] >= threshold)[own].mean() for n in range(4)]
                close(density[b], np.mean(of_heads), 1e-6, name)
                assert 0.02 < density[b] < (0.99 if threshold == 0.5 else 1.01)


def test_a_query_without_keys_has_zeros_and_nothing_observed_has_none():
    q, k = queries_and_keys()
    allowed = np.zeros((B, WINDOW, S), bool)
    allowed[0, :, :3] = True
    rows = scored(q[:, -WINDOW:], k, allowed, None)
    assert np.all(np.asarray(rows[1]) == 0)
    close(jnp.sum(rows[0], axis=-1), np.ones((K, N // K, WINDOW)), 1e-6)
    assert np.all(np.asarray(rows[0, ..., 3:]) == 0)
    none = ~EVERY
    np.testing.assert_array_equal(density_of(rows, none, allowed), [0, 0])
    np.testing.assert_array_equal(density_of(rows, EVERY, allowed, 0.0), [1, 0])
    np.testing.assert_array_equal(summed(rows, none), 0)
    window = np.zeros((B, S), bool)
    np.testing.assert_array_equal(snapkv(rows, none, window, 3), 0)


def rows_for_kvpress(left):
    """Rows of the window's queries, of prompts with ``left`` places of padding before them."""
    q, k = queries_and_keys()
    k = np.pad(k, ((0, 0), (left, 0), (0, 0), (0, 0)), constant_values=3)
    place = np.arange(S + left)
    allowed = (place <= place[-WINDOW:, None]) & (place >= left)
    rows = scored(q[:, -WINDOW:], k, np.broadcast_to(allowed, (B, *allowed.shape)), None)
    return rows, np.broadcast_to(place >= left + S - WINDOW, (B, S + left))


@pytest.mark.parametrize("left", [0, 7])
def test_snapkvs_scores_are_kvpresss(left):
    rows, window = rows_for_kvpress(left)
    for case in golden("kv_kvpress")["snapkv"]:
        scores = np.asarray(snapkv(rows, EVERY, window, case["kernel"]))
        close(scores[:, :, left:-WINDOW], case["scores"], 1e-5, case["kernel"])
        assert np.all(scores[:, :, -WINDOW:] == np.inf)


def test_an_even_kernel_is_refused():
    rows, window = rows_for_kvpress(0)
    with pytest.raises(ConfigError, match="kernel=4"):
        snapkv(rows, EVERY, window, 4)


def test_a_density_that_cannot_be_counted_is_refused():
    shape = jax.ShapeDtypeStruct
    rows = shape((1, 8, 8, 2048, 2**15), jnp.float32)
    masks = shape((1, 2048), bool), shape((1, 2048, 2**15), bool)
    with pytest.raises(ConfigError, match="observe at most 2047 queries"):
        jax.eval_shape(rows_of.densities, rows, *masks)


def test_densities_and_order_are_those_of_effivlm_bench():
    expected = golden("kv_effivlm")
    weights = weights_of_layers()
    places = weights.shape[-1]
    # Its layers are prompts here.
    rows = jnp.asarray(weights).reshape(LAYERS, K, N // K, QUERIES, places)
    observed = np.ones((LAYERS, QUERIES), bool)
    causal = np.arange(places) <= np.arange(places - QUERIES, places)[:, None]
    allowed = np.broadcast_to(causal, (LAYERS, QUERIES, places))
    density = density_of(rows, observed, allowed)
    close(density, 1 - np.array(expected["sparsity"]), 1e-6)
    order = np.argsort(-summed(rows, observed), axis=-1)
    np.testing.assert_array_equal(order[..., :20], expected["order"])
