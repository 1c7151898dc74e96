"""Small text towers, each in torch and in our words, and what both make of one batch."""

import copy
import functools
import importlib
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvlm.config import DecoderConfig, MeshConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.decoder import Decoder
from jaxvlm.models.families import llama, text
from jaxvlm.models.families.names import NameMap
from jaxvlm.models.vlm import Stream
from jaxvlm.nn.mask import batch_mask
from jaxvlm.nn.param import Init, merge, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.train.objective import scales, total
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")
from transformers.models.gemma3 import modeling_gemma3 as gemma3  # noqa: E402

torch.set_num_threads(1)  # on models this small its threads wait for each other, seconds a test
VOCAB = 96
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
TOWERS = {
    "llama: biases, llama3, tied": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama: three heads, linear": (
        "Llama",
        {
            "hidden_size": 30,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-4,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    ),
    "mistral: window, yarn": (
        "Mistral",
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5, "rope_parameters": YARN},
    ),
    "mistral: no window, dynamic": (
        "Mistral",
        {
            "num_key_value_heads": 4,
            "sliding_window": None,
            "max_position_embeddings": 9,  # the batch outgrows it
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
        },
    ),
    "qwen2: upper windows, yarn": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False},
        },
    ),
    "qwen2: tied": (
        "Qwen2",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "qwen3: biases, mixed windows": (
        "Qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": MIXED,
        },
    ),
    "qwen3: tied, dynamic": (
        "Qwen3",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "max_position_embeddings": 7,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "gemma: one key head, the old name of gelu": (
        "Gemma",
        {"num_key_value_heads": 1, "head_dim": 16, "hidden_act": "gelu"},
    ),
    "gemma: biases, untied, llama3": (
        "Gemma",
        {
            "num_key_value_heads": 4,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "gemma2: alternating": (
        "Gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2: uncapped scores": (
        "Gemma2",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "attention_bias": True,
            "query_pre_attn_scalar": 5,
            "sliding_window": 4,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 20.0,
            "layer_types": MIXED,
            "hidden_activation": "silu",
        },
    ),
    "gemma3: two bases, linear": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3: capped logits, yarn": (
        "Gemma3Text",
        {
            "num_key_value_heads": 1,
            "head_dim": 8,
            "attention_bias": True,
            "sliding_window": 3,
            "layer_types": MIXED,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "qwen2-vl: sections": (
        "Qwen2VLText",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
    ),
    "qwen2.5-vl: sections, yarn": (
        "Qwen2_5_VLText",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {**YARN, "mrope_section": [1, 1, 2]},
        },
    ),
    "qwen3-vl: sections in turn": (
        "Qwen3VLText",
        {
            "num_key_value_heads": 2,
            "head_dim": 20,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 3, 3]},
        },
    ),
    "qwen3-vl: biases, linear": (
        "Qwen3VLText",
        {
            "num_key_value_heads": 1,
            "head_dim": 12,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 300.0,
                "factor": 2.0,
                "mrope_section": [2, 2, 2],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3-moe: shares that add up, a window": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "qwen3-moe: biases, tied, raw shares": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeText",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]},
        },
    ),
}


class Text(nnx.Module):
    """A decoder alone, with the parts that generation and losses use."""

    def __init__(self, init, axes, config):
        self.decoder = Decoder(init, axes, config, "xla")

    def __call__(self, batch):
        return self.post(self.blocks(self.pre(batch)))

    def pre(self, batch):
        x = self.decoder.embed(batch.tokens, jnp.float32)
        return Stream(x, batch.positions, batch_mask(batch))

    def blocks(self, stream):
        x, side = self.decoder(stream.x, stream.positions, stream.mask, stream.kv, stream.length)
        return stream._replace(x=x, kv=side.kv, routed=side.routed)

    def post(self, stream):
        return self.decoder.out(stream.x, stream.routed)


def build(config):
    """(static graph, shapes of parameters)."""
    axes, seen = Axes(make_mesh(MeshConfig(data=1), jax.devices()[:1])), {}

    def draw(key):
        seen["graph"], params = split(Text(Init(nnx.Rngs(params=key)), axes, config))
        return params

    shapes = jax.eval_shape(draw, jax.random.key(0))
    return seen["graph"], shapes


def hf_config(family, given):
    """transformers' config of a small tower."""
    dims = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    return family_class(family, "Config")(**{**dims, **given})


def family_class(family, kind):
    """A class of transformers that its top level may not show."""
    found = getattr(transformers, family + kind, None)
    if found is None:
        folder = {
            "Qwen2VLText": "qwen2_vl",
            "Qwen2_5_VLText": "qwen2_5_vl",
            "Qwen3VLText": "qwen3_vl",
            "Qwen3VLMoeText": "qwen3_vl_moe",
        }[family]
        file = "configuration" if kind == "Config" else "modeling"
        module = f"transformers.models.{folder}.{file}_{folder}"
        found = getattr(importlib.import_module(module), family + kind)
    return found


class Tied(torch.nn.Module):
    """A text tower of a larger model, with the embedding's transpose for a head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, labels=None, **inputs):
        hidden = self.model(**inputs, use_cache=False).last_hidden_state
        logits = hidden @ self.model.embed_tokens.weight.T
        loss = None
        if labels is not None:
            flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(*flat)
        return types.SimpleNamespace(logits=logits, loss=loss)


class Oracle(NamedTuple):
    """One tower twice."""

    theirs: torch.nn.Module
    config: DecoderConfig
    graph: Any
    params: dict[str, np.ndarray]


@functools.cache
def oracle(name):
    """The tower of that name in ``TOWERS``."""
    return make_oracle(*TOWERS[name])


def make_oracle(family, given):
    """A tower with random weights."""
    config = hf_config(family, given)
    torch.manual_seed(3)
    if in_sections(family):
        config._attn_implementation = "eager"
        theirs = Tied(family_class(family, "Model")(config))
    else:
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs = theirs.float().eval()
    with torch.no_grad():  # biases and norms are born 0 and 1, which would hide mistakes
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    group = config.to_dict() | ({"tie_word_embeddings": True} if in_sections(family) else {})
    ours = text.decoder_from_hf(group, "config.json: ")
    graph, shapes = build(ours)
    params = load({n: p.detach().numpy() for n, p in theirs.named_parameters()}, ours)
    assert {path: x.shape for path, x in params.items()} == {p: x.shape for p, x in shapes.items()}
    return Oracle(theirs, ours, graph, params)


def in_sections(family):
    """Whether its positions have three rows."""
    return "VL" in family


def table(config):
    """Entries, sizes and depths, as ``NameMap`` takes them."""
    return llama.entries(config, "model.", ""), llama.dims(config), llama.depths(config)


def load(tensors, config):
    """Our parameters from those of a torch model, which holds experts in one piece."""
    apart = {}
    for name, array in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(np.split(expert, 2) for expert in array):
                stem = name.removesuffix("gate_up_proj") + f"{e}."
                apart |= {stem + "gate_proj.weight": gate, stem + "up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            apart |= {f"{stem}{e}.down_proj.weight": expert for e, expert in enumerate(array)}
        else:
            apart[name] = array
    return NameMap(*table(config)).load(apart)


def make_batch(spans, length, seed=0):
    """One segment a row, over places [first, end); the last third of its tokens is weighted."""
    rng = np.random.default_rng(seed)
    tokens, segment = np.zeros((2, len(spans), length), np.int32)
    positions, weight = np.zeros_like(tokens), np.zeros(tokens.shape, np.float32)
    for row, (first, end) in enumerate(spans):
        tokens[row, first:end] = rng.integers(3, VOCAB, end - first)
        segment[row, first:end] = 1
        positions[row, first:end] = np.arange(end - first)
        weight[row, end - (end - first) // 3 : end] = 1
    example = np.arange(len(spans), dtype=np.int32)
    return Batch(tokens, weight, positions[:, None], segment, example_id=example)


RAGGED = make_batch([(0, 11), (5, 16), (0, 16)], 16)  # padding on the right, left, nowhere
PROMPTS = make_batch([(3, 11), (8, 11), (0, 11)], 11, seed=2)


def torch_inputs(batch):
    positions = torch.from_numpy(batch.positions).long().transpose(0, 1)
    return {
        "input_ids": torch.from_numpy(batch.tokens).long(),
        "attention_mask": torch.from_numpy((batch.segment > 0).astype(np.int64)),
        "position_ids": positions if len(positions) > 1 else positions[0],
    }


def ragged_case(family, model):
    """The ragged batch as the tower's larger model would see it, and torch's inputs."""
    batch, rng = RAGGED, np.random.default_rng(7)
    if in_sections(family):
        shape = (batch.tokens.shape[0], 3, batch.tokens.shape[1])
        batch = batch._replace(positions=rng.integers(0, 20, shape).astype(np.int32))
    inputs = torch_inputs(batch)
    if family.startswith("Gemma3"):
        # Two pictures, one longer than the window, whose tokens see each other both ways.
        group = np.zeros_like(batch.tokens)
        group[:, 6:8], group[:, 8:15] = 1, 2
        batch = batch._replace(bidirectional=np.where(batch.segment > 0, group, 0))
        inputs["attention_mask"] = gemma3.create_masks_for_vision_model(
            model.config,
            torch.zeros(*batch.tokens.shape, model.config.hidden_size),
            inputs["attention_mask"],
            None,
            inputs["position_ids"],
            torch.from_numpy(batch.bidirectional) - 1,
        )
    return batch, inputs


def relative(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def assert_gradients_close(grads, expected, tolerance=1e-3):
    """Each leaf by the measure of DESIGN's Numerics; the largest error."""
    worst = 0.0
    norm_all = np.sqrt(sum(np.sum(np.square(g)) for g in expected.values()))
    n_all = sum(g.size for g in expected.values())
    for path, g in expected.items():
        floor = 1e-2 * norm_all * np.sqrt(g.size / n_all)
        error = np.linalg.norm(np.asarray(grads[path]) - g) / max(np.linalg.norm(g), floor)
        assert error <= tolerance, (path, error)
        worst = max(worst, float(error))
    return worst


def assert_torch_agrees(family, tower):
    """Logits, loss and every gradient of the ragged batch: errors of logits, worst gradient."""
    theirs, config, graph, params = tower
    theirs = copy.deepcopy(theirs)  # a dynamic rope remembers the longest row that it has seen
    batch, inputs = ragged_case(family, theirs)
    labels = torch.from_numpy(np.where(batch.loss_weight > 0, batch.tokens, -100)).long()
    out = theirs(**inputs, labels=labels)
    out.loss.backward()
    their_grads = load({n: p.grad.numpy() for n, p in theirs.named_parameters()}, config)

    @jax.jit
    def run(params, batch):
        def objective(params):
            loss, result = NextToken(), merge(graph, params)(batch)
            return total(loss(result, batch), scales(loss, batch)), result.logits(result.hidden)

        return jax.value_and_grad(objective, has_aux=True)(params)

    (value, logits), grads = run(params, batch)
    real = batch.segment > 0
    ours, expected = np.asarray(logits)[real], out.logits.detach().numpy()[real]
    assert relative(ours, expected) < 1e-4
    np.testing.assert_allclose(float(value), out.loss.item(), rtol=1e-3)
    worst = assert_gradients_close(grads, their_grads)
    assert all(np.any(g) for g in their_grads.values())
    return float(relative(ours, expected)), float(np.abs(ours - expected).max()), worst


FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3Text"]


def drawn(family, seed):
    """Settings that the family knows, at random: odd widths, heads, scalings, windows, caps."""
    rng = np.random.default_rng((seed, FAMILIES.index(family)))

    def one_of(*values):
        return values[rng.integers(len(values))]

    kv, per_kv, depth = one_of(1, 2, 3), one_of(1, 2, 3), one_of(2, 3, 4)
    heads = kv * per_kv
    given = {
        "hidden_size": heads * one_of(4, 8, 12),
        "intermediate_size": one_of(28, 36, 52),
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": one_of(6, 8, 10, 14),
        "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": one_of(True, False),
        "max_position_embeddings": one_of(8, 64),
    }
    act = one_of("silu", "gelu_pytorch_tanh", "relu")
    given["hidden_activation" if family in ("Gemma2", "Gemma3Text") else "hidden_act"] = act
    rope = one_of(
        {"rope_type": "default", "rope_theta": 300.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0},
        LLAMA3 | {"factor": one_of(2.0, 32.0)},
        YARN | {"beta_slow": one_of(0.5, 2.0), "attention_factor": one_of(None, 1.3)},
    )
    given["rope_parameters"] = rope
    kinds = [one_of("full_attention", "sliding_attention") for _ in range(depth)]
    window = {"sliding_window": one_of(2, 5, 9)}
    if family not in ("Mistral", "Qwen2"):
        given["attention_bias"] = one_of(True, False)
    if family == "Llama":
        given["mlp_bias"] = one_of(True, False)
    if family == "Mistral":
        given |= one_of(window, {"sliding_window": None})
    if family in ("Qwen2", "Qwen3"):
        upper = {"max_window_layers": one_of(0, 1, 2)}
        given |= one_of({}, window | {"use_sliding_window": True} | upper)
    if family == "Qwen3Moe":
        given |= one_of({}, window | {"use_sliding_window": True})
        given |= {"num_experts": one_of(3, 4, 7), "num_experts_per_tok": one_of(1, 2, 3)}
        given |= {"moe_intermediate_size": one_of(8, 12), "norm_topk_prob": one_of(True, False)}
    if family in ("Gemma2", "Gemma3Text"):
        given |= window | {"layer_types": kinds, "query_pre_attn_scalar": one_of(3, 16)}
        given["final_logit_softcapping"] = one_of(None, 2.0, 30.0)
    if family == "Gemma2":
        given["attn_logit_softcapping"] = one_of(None, 1.0, 50.0)
    if family == "Gemma3Text":
        local = {"rope_type": "default", "rope_theta": one_of(10.0, 1e4)}
        given["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return given
