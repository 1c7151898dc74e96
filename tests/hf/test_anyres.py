"""Any-resolution spans: the features that tokens hold, and refused configs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.config import ConfigError
from jaxvlm.hf.families import FAMILIES, anyres
from jaxvlm.nn import embed
from jaxvlm.types import NEWLINE

PINS = [[16, 32], [32, 16]]
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
NEXT = {
    "model_type": "llava_next",
    "image_token_index": 9,
    "image_grid_pinpoints": PINS,
    "vision_config": VISION,
    "text_config": {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 1},
}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
ONE = NEXT | {"model_type": "llava_onevision", "vision_config": SIGLIP}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEXT | {"mystery": 1}, "mystery=1 is unknown to this family"),
        (NEXT | {"vision_aspect_ratio": "anyres_max_9"}, "vision_aspect_ratio='anyres_max_9' is"),
        (NEXT | {"vision_feature_select_strategy": "full"}, "only 'default'"),
        (NEXT | {"image_grid_pinpoints": [[16, 40]]}, r"\[16, 40\], which tiles of 16 pixels"),
        (NEXT | {"use_image_newline_parameter": False}, "use_image_newline_parameter=False"),
        (ONE | {"vision_aspect_ratio": "anyres"}, "only anyres_max_N"),
        (ONE | {"vision_feature_select_strategy": "default"}, "would drop a patch"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        FAMILIES[config["model_type"]].config_from_hf(config)


def test_the_rest_is_taken():
    for config in (NEXT, ONE):
        assert FAMILIES[config["model_type"]].config_from_hf(config).connector.newline


def test_unpadding_and_newlines():
    """40 x 10 pixels on 1 x 2 tiles of 4 x 4 patches: 2 rows of 8 are the image's."""
    rows, columns = anyres.unpadded(40, 10, 4, 8)
    assert (rows, columns) == ((1, 3), (0, 8))
    span = anyres.span(9, 4, (1, 2), rows, columns)
    found = span.sources.feature[:, 0].tolist()
    second = [16 + 4, 16 + 5, 16 + 6, 16 + 7, 32 + 4, 32 + 5, 32 + 6, 32 + 7]
    assert found == [*range(16), *second, NEWLINE, *(i + 4 for i in second), NEWLINE]
    assert span.starts.tolist() == [0, 0, 0] and span.ids.tolist() == [9] * len(found)


def test_an_image_of_nothing_but_padding_has_its_whole_view():
    rows, columns = anyres.unpadded(1000, 1, 4, 12)
    span = anyres.span(9, 4, (1, 3), rows, columns)
    assert span.sources.feature[:, 0].tolist() == list(range(16)) and span.sources.tiles == 4


@pytest.mark.parametrize("size", [(12, 12), (4, 12), (9, 7)])
def test_features_above_the_bound_are_mixed_as_torch_does(size):
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    span = anyres.span(9, 4, (3, 3), (0, size[0]), (0, size[1]), 1)
    features = np.random.default_rng(0).standard_normal((10 * 16, 5)).astype(np.float32)
    index, weight = span.sources.feature, span.sources.weight
    ours = np.einsum("nkd,nk->nd", features[np.maximum(index, 0)], weight)
    grid = features[16:].reshape(3, 3, 4, 4, 5).transpose(4, 0, 2, 1, 3).reshape(5, 12, 12)
    ratio = np.sqrt(size[0] * size[1] / 16)
    new = [int(n // ratio) for n in size]
    cut = torch.from_numpy(grid[None, :, : size[0], : size[1]].copy())
    want = torch.nn.functional.interpolate(cut, new, mode="bilinear")[0].numpy()
    np.testing.assert_array_equal(ours[:16], features[:16])
    rest = ours[16:].reshape(new[0], new[1] + 1, 5)
    np.testing.assert_allclose(rest[:, :-1], want.transpose(1, 2, 0), atol=1e-6)
    assert (index[16:, 0].reshape(new[0], -1)[:, -1] == NEWLINE).all()


def test_one_feature_a_token_has_no_scatter_add_in_its_gradient():
    source = jnp.asarray([[-1, 3, NEWLINE, 0, 5, -1]])
    x, visual = jnp.zeros((1, 6, 2)), jnp.arange(14.0).reshape(1, 7, 2)

    def placed(visual):
        return embed.place_tokens(x, visual, embed.token_places(source, 7))

    np.testing.assert_array_equal(placed(visual)[0, :, 0], [0, 6, 0, 0, 10, 0])
    mixed = embed.mix_tokens(x, visual, source[..., None], jnp.ones((1, 6, 1)))
    np.testing.assert_array_equal(mixed, placed(visual))
    backward = jax.make_jaxpr(jax.grad(lambda v: jnp.sum(placed(v) ** 2)))(visual)
    assert "scatter-add" not in str(backward) and "scatter_add" not in str(backward)
