"""Quantized embeddings are byte for byte those of sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest

from jaxvlm.config import ConfigError
from jaxvlm.inference.quantize import KINDS, dequantized, quantize, ranges_of


@pytest.fixture(scope="module")
def embeddings():
    x = np.random.default_rng(0).normal(size=(130, 21)).astype(np.float32)
    x[:, 4] = 0.25  # a dim without a range
    x[3, :5] = 0
    return x


def test_bytes_are_sentence_transformers(embeddings):
    pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    theirs = pytest.importorskip("sentence_transformers.quantization", reason="the oracle")
    corpus, queries = embeddings[:110], 1.5 * embeddings[110:]  # some out of range
    ranges = ranges_of([corpus[:40], corpus[40:40], corpus[40:]])
    for kind in KINDS:
        for x, given in ((corpus, {}), (queries, {"calibration_embeddings": corpus})):
            ours, expected = quantize(x, kind, ranges), theirs.quantize_embeddings(x, kind, **given)
            assert ours.dtype == expected.dtype
            np.testing.assert_array_equal(ours, expected)
    assert {-128, 127} <= set(quantize(queries, "int8", ranges).ravel().tolist())


def test_int8_is_within_a_step(embeddings):
    ranges = ranges_of([embeddings])
    step = (ranges[1] - ranges[0]) / 255
    back = dequantized(embeddings, "int8", ranges)
    assert np.all(np.abs(back - embeddings) <= 0.5001 * step + 1e-6)


def test_bad_input_is_named(embeddings):
    with pytest.raises(ConfigError, match="from 1 embedding; give those of a corpus"):
        ranges_of([embeddings[:1]])
    with pytest.raises(ConfigError, match=r"ranges of \[2, 21\] are needed, not none"):
        quantize(embeddings, "int8")
    with pytest.raises(ConfigError, match=r"not \[2, 3\]"):
        quantize(embeddings, "int8", np.zeros((2, 3), np.float32))
    with pytest.raises(ConfigError, match="quantize='int4': choose from int8, binary, ubinary"):
        quantize(embeddings, "int4")
