"""Every field of a Qwen-VL's config is read or refused; sizes of images are transformers'."""

from __future__ import annotations

import numpy as np
import pytest

from jaxvlm.config import ConfigError
from jaxvlm.data.images import resize
from jaxvlm.hf.families import qwen_vl
from jaxvlm.hf.families.config_reader import METADATA

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from qwen import CASES, hf_config  # noqa: E402  # after the oracle is known to be there


@pytest.mark.parametrize(
    ("name", "group", "field", "value"),
    [
        ("qwen2-vl", "", "a_new_field", 1),
        ("qwen2-vl", "", "hidden_size", 64),  # text_config says 32
        ("qwen2-vl", "", "rope_scaling", {"type": "mrope", "mrope_section": [1, 1, 2]}),
        ("qwen2-vl", "vision_config", "hidden_size", 16),
        ("qwen2-vl", "vision_config", "in_channels", 1),
        ("qwen2-vl", "vision_config", "window_size", 8),
        ("qwen2.5-vl", "vision_config", "window_size", 3),
        ("qwen2.5-vl", "text_config", "use_sliding_window", True),
        ("qwen2.5-vl", "text_config", "model_type", "mamba"),
        ("qwen3-vl", "", "hidden_size", 32),
        ("qwen3-vl", "text_config", "rope_parameters", {"mrope_interleaved": False}),
        ("qwen3-vl", "vision_config", "deepstack_visual_indexes", [1, 0]),
        ("qwen3-vl", "vision_config", "num_position_embeddings", 15),
        ("qwen3-vl-moe", "text_config", "mlp_only_layers", [0]),
        ("qwen3-vl-moe", "text_config", "a_new_field", 1),
    ],
)
def test_a_field_that_it_cannot_do_is_named(name, group, field, value):
    config = hf_config(name).to_dict()
    (config[group] if group else config)[field] = value
    with pytest.raises(ConfigError, match=field):
        qwen_vl.config_from_hf(config)


# In torch as here these say nothing, or nothing that another field does not overrule.
MOOT = {"max_window_layers", "sliding_window", "use_sliding_window", "router_aux_loss_coef"}
MOOT |= {"video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"}
MOOT |= {"tokens_per_second"}  # of videos' positions


@pytest.mark.parametrize("name", CASES)
def test_no_field_is_overlooked(name):
    """Any field with another value makes another model, or is refused by name."""
    given = hf_config(name).to_dict()
    config = qwen_vl.config_from_hf(given)
    other = {bool: lambda v: not v, int: lambda v: 2 * v, float: lambda v: v / 2 + 0.5}
    seen = set()
    for group in ("", "text_config", "vision_config"):
        fields = given[group] if group else given
        for field, value in fields.items():
            skip = METADATA | MOOT
            if config.decoder.num_experts:  # of dense layers; there are none
                skip = skip | {"intermediate_size"} if group == "text_config" else skip
            if "Qwen3" in CASES[name][0] and group == "text_config":
                skip = skip | {"tie_word_embeddings"}  # torch reads the one above
            if field in skip or type(value) not in other:
                continue
            seen.add(field)
            changed = fields | {field: other[type(value)](value)}
            try:
                made = qwen_vl.config_from_hf(given | {group: changed} if group else changed)
            except ConfigError as error:
                said = (field, "sections", "window_size")  # or what it has to go with
                assert any(word in str(error) for word in said), (group, field, error)
            else:
                assert made != config, (group, field)
    assert len(seen) >= 16, seen


def test_an_image_is_given_transformers_size():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 200), (5, 900), (28, 28), (14, 42), (4000, 3000)]
    sizes += np.exp(rng.uniform(0, 8, (500, 2))).astype(int).tolist()
    for width, height in sizes:
        for factor, bounds in ((28, (3136, 1003520)), (32, (65536, 16777216)), (8, (64, 4096))):
            try:
                high, wide = smart_resize(height, width, factor, *bounds)
            except ValueError:
                with pytest.raises(ValueError, match="over 200 times the other"):
                    resize.fit(width, height, factor, *bounds)
            else:
                assert resize.fit(width, height, factor, *bounds) == (wide, high)
