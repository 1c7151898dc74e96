"""Experts in every layout that transformers saves: read, and written as they were."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.hf import safetensors
from jaxvlm.hf.families import FAMILIES
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from qwen import CASES, MOE  # noqa: E402  # after the oracle is known to be there
from towers import shaken  # noqa: E402
from vlm_cases import SIGLIP, TEXT  # noqa: E402

EXPERTS = {"moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2}
QWEN_VL = CASES["qwen3-vl-moe"][1]
LLAVA = {
    "vision_config": {k: v for k, v in SIGLIP.items() if k != "vision_use_head"}
    | {"model_type": "clip_vision_model"},
    "text_config": TEXT | EXPERTS | {"model_type": "qwen3_moe", "num_hidden_layers": 2},
    "image_token_index": 95,
}


def sized(hidden):
    return "Qwen3VLMoe", QWEN_VL | {"text_config": MOE | {"moe_intermediate_size": hidden}}


MODELS = {
    "qwen3-vl-moe": CASES["qwen3-vl-moe"],
    "qwen3-vl-moe, tied, biases": CASES["qwen3-vl-moe, tied, biases"],
    # Sizes at which one of the two tensors has the same shape in both layouts.
    "qwen3-vl-moe, D = 2 F": sized(16),
    "qwen3-vl-moe, D = F": sized(32),
    "llava, qwen3-moe": ("Llava", LLAVA),
    "llava-next, qwen3-moe": ("LlavaNext", LLAVA | {"image_grid_pinpoints": [[16, 32]]}),
}


def torch_model(name):
    kind, fields = MODELS[name]
    config = getattr(transformers, kind + "Config")(**copy.deepcopy(fields))
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    return shaken(getattr(transformers, kind + "ForConditionalGeneration")(config))


def our_model(theirs):
    family = FAMILIES[theirs.config.model_type]
    config = family.config_from_hf(theirs.config.to_dict())
    model = build_model(config, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    return model, family.weights(config)


def assert_experts_are(theirs, params):
    """Compare with torch's parameters [X, 2 F, D] and [X, D, F], without any table of names."""
    named = {n.rpartition("layers.")[2]: p for n, p in theirs.named_parameters() if "experts" in n}
    for layer in range(theirs.config.text_config.num_hidden_layers):
        joined = named[f"{layer}.mlp.experts.gate_up_proj"].detach().numpy()
        gate, up = np.split(joined, 2, axis=1)
        down = named[f"{layer}.mlp.experts.down_proj"].detach().numpy()
        for ours, matrix in (("w_gate", gate), ("w_in", up), ("w_out", down)):
            found = np.asarray(params[f"decoder/stack/blocks/mlp/{ours}"])[layer]
            np.testing.assert_array_equal(found, matrix.swapaxes(1, 2))


@pytest.mark.parametrize("original", [True, False], ids=["as published", "as in memory"])
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_is_read_and_written_again(name, original, tmp_path):
    theirs = torch_model(name)
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=original)
    model, weights = our_model(theirs)
    layout = safetensors.read_layout(tmp_path / "theirs")
    params = safetensors.read_params(tmp_path / "theirs", weights, model.abstract())
    assert_experts_are(theirs, params)
    out = tmp_path / "ours"
    theirs.config.save_pretrained(out)
    safetensors.write_params(out, params, weights, layout)
    assert safetensors.read_layout(out) == layout
    again, info = type(theirs).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, x in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], x), key


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "llava, qwen3-moe"])
def test_logits_of_a_saved_folder_are_torchs(name, tmp_path):
    theirs = torch_model(name)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    model, weights = our_model(theirs)
    params = safetensors.read_params(tmp_path, weights, model.abstract())
    tokens = np.random.default_rng(0).integers(3, 90, (2, 16)).astype(np.int32)
    rows = 3 if "vl" in name else 1
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), (2, rows, 16))
    batch = Batch(tokens, None, positions, np.ones_like(tokens))
    out = jax.jit(model.apply)(params, batch)
    with torch.no_grad():
        expected = theirs(input_ids=torch.from_numpy(tokens).long()).logits.numpy()
    got = np.asarray(out.logits(out.hidden))
    assert np.linalg.norm(got - expected) < 1e-4 * np.linalg.norm(expected)


def test_the_layout_of_published_folders_is_read_where_one_tensor_fits_both():
    for name in ("qwen3-vl-moe, D = 2 F", "qwen3-vl-moe, D = F"):
        theirs = torch_model(name)
        _, weights = our_model(theirs)
        published = {
            n: p.detach().numpy().swapaxes(1, 2) if ".experts." in n else p.detach().numpy()
            for n, p in theirs.named_parameters()
        }
        assert_experts_are(theirs, weights.load(published))


def test_experts_in_two_layouts_at_once_are_refused():
    theirs = torch_model("qwen3-vl-moe")
    _, weights = our_model(theirs)
    mixed = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    for name in [n for n in mixed if n.endswith("0.mlp.experts.down_proj")]:
        mixed[name] = mixed[name].swapaxes(1, 2)
    with pytest.raises(ConfigError, match=r"of another shape: .*experts"):
        weights.load(mixed)
