"""ViT stems and the patch merge against torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvlm.config import ConfigError, ModelConfig, VisionConfig
from jaxvlm.models.connector import merge_patches
from jaxvlm.models.stem import ConvStem, LinearStem
from jaxvlm.models.vit import check, sincos2d
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.nn.param import Init

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)


def init():
    return Init(nnx.Rngs(params=jax.random.key(0)))


def nchw(x):
    return torch.tensor(np.asarray(x).transpose(0, 3, 1, 2))


def test_linear_stem_is_a_strided_convolution(pixels):
    stem = LinearStem(init(), VisionConfig(image_size=32, patch_size=8, width=24))
    kernel = torch.tensor(np.asarray(stem.w[...]).transpose(3, 2, 0, 1))
    expected = torch.nn.functional.conv2d(nchw(pixels), kernel, stride=8).flatten(2).mT
    np.testing.assert_allclose(stem(jnp.asarray(pixels)), expected, rtol=1e-4, atol=1e-5)


def test_conv_stem_is_torchs_convolutions(pixels):
    config = VisionConfig(image_size=32, patch_size=8, width=32, stem="conv", activation="relu")
    stem = ConvStem(init(), config)
    x = nchw(pixels)
    for i, w in enumerate(stem.convs):
        kernel = torch.tensor(np.asarray(w[...]).transpose(3, 2, 0, 1))
        x = torch.nn.functional.conv2d(x, kernel, stride=2, padding=1)
        x = torch.relu(x) if i + 1 < len(stem.convs) else x
    assert x.shape == (2, 32, 4, 4)
    np.testing.assert_allclose(stem(jnp.asarray(pixels)), x.flatten(2).mT, rtol=1e-4, atol=1e-5)


def test_merge_joins_neighbours():
    x = jnp.arange(16.0).reshape(1, 16, 1)
    merged = np.asarray(merge_patches(x, 2))
    assert merged.shape == (1, 4, 4)
    np.testing.assert_array_equal(merged[0, 0], [0, 1, 4, 5])
    np.testing.assert_array_equal(merged[0, 3], [10, 11, 14, 15])
    folded = torch.nn.functional.pixel_unshuffle(torch.arange(16.0).reshape(1, 1, 4, 4), 2)
    np.testing.assert_array_equal(merged[0].T.reshape(4, 2, 2), folded[0])


def test_sincos_rows_are_distinct_and_bounded():
    table = sincos2d(VisionConfig(image_size=32, patch_size=8, width=16))
    assert table.shape == (16, 16) and np.abs(table).max() <= 1
    assert len(np.unique(table.round(5), axis=0)) == 16


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"image_size": 30}, "not a multiple of patch_size"),
        ({"width": 66}, "not a multiple of num_heads"),
        ({"stem": "cnov"}, "known: linear, conv"),
        ({"position": "rope"}, "known: learned, sincos2d, none"),
        ({"position": "sincos2d", "class_token": True}, "no class token"),
        ({"feature_layer": 0}, "counts from the end"),
        ({"feature_layer": -4}, "counts from the end"),
        ({"stem": "conv", "patch_bias": False}, "no meaning"),
        ({"feature_layers": (-1, -5)}, "counts from the end"),
        ({"keep_class_token": True}, "without class_token"),
        ({"norm": "batch"}, "known: rms"),
        ({"window": 32}, "without packed"),
        ({"rope_theta": 1e4}, "without packed"),
        ({"packed": True, "stem": "conv"}, "takes stem='linear'"),
        ({"packed": True, "merge_block": 2, "window": 48}, "patch_size x merge_block = 32"),
        ({"packed": True, "rope_theta": 1e4, "width": 24}, "heads of 4n dims, not 6"),
        ({"packed": True, "frames": 2}, "patch_layout='cthw'"),
        ({"packed": True, "window": 32, "full_layers": (2,)}, "not all in 0..1"),
    ],
)
def test_dims_that_do_not_fit_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        check(VisionConfig(**fields))


def test_merge_must_divide_the_grid():
    import dataclasses

    config = ModelConfig()
    assert num_visual_tokens(config) == 16
    with pytest.raises(ConfigError, match="merge=3 does not divide the 4 x 4"):
        num_visual_tokens(
            dataclasses.replace(config, connector=dataclasses.replace(config.connector, merge=3))
        )
