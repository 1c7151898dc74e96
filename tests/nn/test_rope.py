"""Rotary frequencies against transformers', number by number; sections against their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.hf.families.positions import read_rotary
from jaxvlm.nn.rope import SCALINGS, rope, rotate, section_rows

H, LENGTH = 16, 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
GROUPS = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 3.5, "rope_theta": 1e3},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 0.5},
    LLAMA3 | {"high_freq_factor": 9.0, "original_max_position_embeddings": 8192},
    {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    YARN,
    YARN | {"original_max_position_embeddings": 2048, "rope_theta": 1e6},
    YARN | {"factor": None, "original_max_position_embeddings": 16},
    YARN | {"beta_fast": 4.0, "beta_slow": 2.0},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 0.7},
    YARN | {"mscale": 0.8, "mscale_all_dim": 0.3},
    YARN | {"factor": 0.5},
]


@pytest.mark.parametrize("longest", [20, 200])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_frequencies_are_transformers(group, longest):
    torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
    transformers = pytest.importorskip("transformers", reason="the oracle")
    rope_utils = transformers.modeling_rope_utils
    config = transformers.LlamaConfig(
        hidden_size=2 * H,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        rope_parameters=dict(group),
    )
    kind = group["rope_type"]
    if kind == "default":
        model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        expected, magnitude = model.compute_default_rope_parameters(config)
    else:
        make = rope_utils.ROPE_INIT_FUNCTIONS[kind]
        expected, magnitude = make(config, seq_len=torch.tensor(longest))
    ours = read_rotary({"max_position_embeddings": LENGTH, "rope_parameters": group}, "", 1e4)
    positions = jnp.asarray([[[3, longest - 1, 0]]], jnp.int32)
    exponent = jnp.arange(0, H, 2, dtype=jnp.float32) / H
    frequencies = SCALINGS[kind](ours.theta, exponent, ours.scaling, positions)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2e-6)
    np.testing.assert_allclose(ours.scaling.magnitude, magnitude, rtol=1e-6)


def test_a_section_follows_its_row_of_positions():
    sections = (3, 2, 3)
    np.testing.assert_array_equal(section_rows(8, sections, False), [0, 0, 0, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(section_rows(8, (4, 2, 2), True), [0, 1, 2, 0, 1, 2, 0, 0])
    positions = jax.random.randint(jax.random.key(0), (2, 3, 5), 0, 50)
    for interleaved in (False, True):
        turn = rope(positions, H, 1e4, sections=sections, interleaved=interleaved)
        each = [rope(positions[:, i : i + 1], H, 1e4).cos for i in range(3)]
        for wavelength, row in enumerate(section_rows(8, sections, interleaved)):
            np.testing.assert_array_equal(turn.cos[..., wavelength], each[row][..., wavelength])
    text = jnp.broadcast_to(positions[:, :1], (2, 3, 5))
    np.testing.assert_array_equal(
        rope(text, H, 1e4, sections=sections).sin, rope(positions[:, :1], H, 1e4).sin
    )


def test_rows_that_the_sections_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"3 rows; this decoder takes 1$"):
        rope(jnp.zeros((1, 3, 4), jnp.int32), H, 1e4)
    with pytest.raises(ValueError, match="2 rows; this decoder takes 1 or 3"):
        rope(jnp.zeros((1, 2, 4), jnp.int32), H, 1e4, sections=(4, 2, 2))


def test_scores_depend_on_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, H))

    def score(at, to):
        turned = [
            rotate(x, rope(jnp.full((1, 1, 1), p, jnp.int32), H, 1e4))[0, 0, 0]
            for x, p in ((q, at), (k, to))
        ]
        return jnp.dot(*turned)

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
