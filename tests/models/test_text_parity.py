"""transformers' text models in torch are the oracle of every text tower."""

import copy
import functools
import importlib
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvlm.config import ConfigError, DecoderConfig, MeshConfig, RopeScaling
from jaxvlm.infer.generate import Sampling, generate
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.decoder import Decoder, check
from jaxvlm.models.families import llama, names, text
from jaxvlm.models.families.llama import IGNORED
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

VOCAB, NEW = 96, 12
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


def hf_config(name):
    family, given = TOWERS[name]
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


@functools.cache
def oracle(name):
    """(torch model, our config, our graph, our parameters)."""
    config = hf_config(name)
    torch.manual_seed(3)
    if in_sections(name):
        config._attn_implementation = "eager"
        theirs = Tied(family_class(TOWERS[name][0], "Model")(config))
    else:
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs = theirs.float().eval()
    with torch.no_grad():  # biases and norms are born 0 and 1, which would hide mistakes
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    group = config.to_dict() | ({"tie_word_embeddings": True} if in_sections(name) else {})
    ours = text.decoder_from_hf(group, "config.json: ")
    graph, shapes = build(ours)
    params = load({n: p.detach().numpy() for n, p in theirs.named_parameters()}, ours)
    assert {path: x.shape for path, x in params.items()} == {p: x.shape for p, x in shapes.items()}
    return theirs, ours, graph, params


def in_sections(name):
    return "VL" in TOWERS[name][0]


def table(config):
    """Entries, sizes and depths, as ``names`` takes them."""
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
    return names.load(apart, *table(config))


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


def case(name):
    """The ragged batch as the tower's larger model would see it, and torch's inputs."""
    batch, rng = RAGGED, np.random.default_rng(7)
    if in_sections(name):
        shape = (batch.tokens.shape[0], 3, batch.tokens.shape[1])
        batch = batch._replace(positions=rng.integers(0, 20, shape).astype(np.int32))
    inputs = torch_inputs(batch)
    if name.startswith("gemma3"):
        # Two pictures, one longer than the window, whose tokens see each other both ways.
        group = np.zeros_like(batch.tokens)
        group[:, 6:8], group[:, 8:15] = 1, 2
        batch = batch._replace(bidirectional=np.where(batch.segment > 0, group, 0))
        inputs["attention_mask"] = gemma3.create_masks_for_vision_model(
            oracle(name)[0].config,
            torch.zeros(*batch.tokens.shape, 32),
            inputs["attention_mask"],
            None,
            inputs["position_ids"],
            torch.from_numpy(batch.bidirectional) - 1,
        )
    return batch, inputs


def relative(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def assert_gradients_close(grads, expected, tolerance=1e-3):
    norm_all = np.sqrt(sum(np.sum(np.square(g)) for g in expected.values()))
    n_all = sum(g.size for g in expected.values())
    for path, g in expected.items():
        floor = 1e-2 * norm_all * np.sqrt(g.size / n_all)
        bound = tolerance * max(np.linalg.norm(g), floor)
        assert np.linalg.norm(np.asarray(grads[path]) - g) <= bound, path


@pytest.mark.parametrize("name", TOWERS)
def test_logits_loss_and_gradients_are_torchs(name):
    theirs, config, graph, params = oracle(name)
    theirs = copy.deepcopy(theirs)  # a dynamic rope remembers the longest row that it has seen
    batch, inputs = case(name)
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
    assert relative(np.asarray(logits)[real], out.logits.detach().numpy()[real]) < 1e-4
    np.testing.assert_allclose(float(value), out.loss.item(), rtol=1e-3)
    assert_gradients_close(grads, their_grads)
    assert all(np.any(g) for g in their_grads.values())


def torch_generate(model, inputs):
    """(new ids i64[B, NEW], their logits)."""
    del inputs["position_ids"]
    made = model.generate(
        **inputs,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[:, inputs["input_ids"].shape[1] :].numpy(), torch.stack(made.logits, 1)


def torch_decode_uncached(model, inputs):
    """Likewise, for a text tower that has no ``generate``; each token is a forward pass."""
    ids, logits = [], []
    after = inputs["position_ids"].amax((0, 2)) + 1
    for step in range(NEW):
        with torch.no_grad():
            logits.append(model(**inputs).logits[:, -1])
        ids.append(logits[-1].argmax(-1))
        new = (after + step).expand(3, -1)
        news = {"input_ids": ids[-1], "attention_mask": torch.ones_like(after), "position_ids": new}
        inputs = {k: torch.cat([x, news[k][..., None]], -1) for k, x in inputs.items()}
    return torch.stack(ids, 1).numpy(), torch.stack(logits, 1)


@pytest.mark.parametrize("name", TOWERS)
def test_greedy_decoding_gives_torchs_ids(name):
    theirs, config, graph, params = oracle(name)
    batch = PROMPTS
    if in_sections(name):
        shape = (len(batch.tokens), 3, batch.tokens.shape[1])
        noise = np.random.default_rng(9).integers(0, 5, shape, np.int32)
        batch = batch._replace(positions=batch.positions + noise)
    decode = torch_decode_uncached if in_sections(name) else torch_generate
    expected, logits = decode(copy.deepcopy(theirs), torch_inputs(batch))
    best = logits.topk(2).values
    clear = (best[..., 0] - best[..., 1]) > 1e-3 * (logits.amax(-1) - logits.amin(-1))
    sure = np.cumprod(clear.numpy(), axis=1).astype(bool)
    shape = (config.depth, config.num_kv_heads, config.head_dim)
    new = jax.jit(
        lambda p, b: generate(merge(graph, p), b, Sampling(NEW), shape, jax.random.key(0))
    )(params, jax.tree.map(jnp.asarray, batch))
    assert sure.mean() > 0.5
    np.testing.assert_array_equal(np.where(sure, new, 0), np.where(sure, expected, 0))


@pytest.mark.parametrize("name", ["gemma3: two bases, linear", "mistral: window, yarn"])
def test_packed_questions_see_through_a_window_what_separate_rows_see(name):
    _, _, graph, params = oracle(name)
    rng = np.random.default_rng(5)
    head, questions = 6, (4, 7, 5)
    pieces = [rng.integers(3, VOCAB, n).astype(np.int32) for n in (head, *questions)]
    sizes = [len(piece) for piece in pieces]
    whole = np.concatenate(pieces)[None]
    segment = np.repeat(np.arange(1, 5, dtype=np.int32), sizes)[None]
    places = [np.arange(n, dtype=np.int32) + (head if i else 0) for i, n in enumerate(sizes)]
    # The parent's tokens see both ways, as a picture's may.
    group = (segment == 1).astype(np.int32)
    packed = Batch(
        whole,
        None,
        np.concatenate(places)[None, None],
        segment,
        (segment > 1).astype(np.int32),
        group,
    )
    run = jax.jit(lambda p, b: merge(graph, p)(b).hidden)
    together = np.asarray(run(params, packed))[0]
    length = head + max(questions)
    rows = np.zeros((3, length), np.int32)
    real = np.zeros_like(rows)
    for row, question in enumerate(pieces[1:]):
        rows[row, : head + len(question)] = np.concatenate([pieces[0], question])
        real[row, : head + len(question)] = 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, 1, length))
    both_ways = np.where(np.arange(length) < head, real, 0).astype(np.int32)
    apart = np.asarray(run(params, Batch(rows, None, positions, real, None, both_ways)))
    first = head
    for row, n in enumerate(questions):
        np.testing.assert_allclose(
            together[first : first + n], apart[row, head : head + n], rtol=2e-4, atol=2e-5
        )
        first += n


REFUSED = [
    ("llama: biases, llama3, tied", "hidden_act", "mish"),
    ("llama: biases, llama3, tied", "attention_dropout", 0.1),
    ("llama: biases, llama3, tied", "sliding_window", 4),
    ("llama: biases, llama3, tied", "rope_interleaved", True),
    ("llama: biases, llama3, tied", "a_new_field", 1),
    ("llama: biases, llama3, tied", "rope_scaling", {"type": "longrope", "factor": 2.0}),
    ("llama: biases, llama3, tied", "rope_scaling", {"type": "linear"}),
    ("llama: biases, llama3, tied", "rope_scaling", {"type": "linear", "factor": 2.0, "beta": 1}),
    ("llama: biases, llama3, tied", "rope_parameters", {"partial_rotary_factor": 0.5}),
    ("llama: biases, llama3, tied", "rope_parameters", {"mrope_section": [2, 2, 2]}),
    ("mistral: window, yarn", "layer_types", MIXED),
    ("mistral: window, yarn", "sliding_window", 0),
    ("qwen2: upper windows, yarn", "layer_types", [*MIXED[:2], "chunked_attention"]),
    ("qwen2: upper windows, yarn", "layer_types", MIXED[:2]),
    ("qwen2: tied", "layer_types", MIXED),
    ("qwen2: tied", "attention_bias", True),
    ("qwen3: tied, dynamic", "mlp_bias", True),
    ("qwen2-vl: sections", "use_sliding_window", True),
    ("qwen2-vl: sections", "head_dim", 32),
    ("qwen3-moe: biases, tied, raw shares", "decoder_sparse_step", 2),
    ("qwen3-moe: biases, tied, raw shares", "mlp_only_layers", [0]),
    ("qwen3-moe: biases, tied, raw shares", "output_router_logits", True),
    ("qwen3-vl-moe", "norm_topk_prob", False),
    ("qwen3-vl: sections in turn", "rope_parameters", {"mrope_interleaved": False}),
    ("gemma: biases, untied, llama3", "use_bidirectional_attention", True),
    ("gemma: biases, untied, llama3", "hidden_activation", "relu"),
    ("gemma2: alternating", "hidden_act", "relu"),
    ("gemma3: two bases, linear", "attn_logit_softcapping", 50.0),
    ("gemma3: two bases, linear", "rope_parameters", {"rope_theta": 1e4}),
    ("gemma3: two bases, linear", "rope_parameters", {"sliding_attention": {"factor": 2.0}}),
]


@pytest.mark.parametrize(("name", "field", "value"), REFUSED)
def test_what_it_cannot_do_is_named(name, field, value):
    group = hf_config(name).to_dict() | {field: value}
    if field == "rope_scaling":
        del group["rope_parameters"]
    with pytest.raises(ConfigError, match=field if name[:5] != "qwen2" else "layer_types|" + field):
        text.decoder_from_hf(group, "config.json: ")


def test_an_unknown_tower_is_named():
    with pytest.raises(ConfigError, match="model_type='mamba'; known: llama"):
        text.decoder_from_hf({"model_type": "mamba"}, "config.json: ")


# As the hub has them: the spelling before transformers 5, and fields left to their defaults.
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": (
        {
            "model_type": "llama",
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)},
    ),
    "mistralai/Mistral-7B-v0.1": (
        {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 4096},
        {"window": 4096, "window_pattern": (True,), "num_kv_heads": 8, "mlp_dim": 14336},
    ),
    "Qwen/Qwen2.5-7B, with its card's yarn": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "max_window_layers": 28,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            },
        },
        {
            "window": 0,
            "head_dim": 128,
            "qkv_bias": True,
            "out_bias": False,
            "rope_scaling": RopeScaling("yarn", 4.0, 32768, magnitude=0.1 * math.log(4.0) + 1.0),
        },
    ),
    "google/gemma-2-2b": (
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
        {"window": 4096, "window_pattern": (True, False), "query_scale": 1 / 16, "logit_cap": 30.0},
    ),
    "google/gemma-3-4b, text": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        {
            "window": 1024,
            "window_pattern": (True,) * 5 + (False,),
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "rope_scaling": RopeScaling("linear", 8.0),
            "num_kv_heads": 4,
        },
    ),
    "Qwen/Qwen3-VL-4B, text": (
        {
            "model_type": "qwen3_vl_text",
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
        },
        {"rope_sections": (24, 20, 20), "rope_interleaved": True, "rope_theta": 5e6},
    ),
    "HuggingFaceTB/SmolLM2-135M": (
        {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "vocab_size": 49152,
        },
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "rope_theta": 1e5},
    ),
    "Qwen/Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"num_experts": 128, "experts_per_token": 8, "mlp_dim": 768, "normalize_experts": True},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    group, expected = PUBLISHED[name]
    config = text.decoder_from_hf(group, "config.json: ")
    check(config)
    assert {field: getattr(config, field) for field in expected} == expected
    # What transformers makes of the file, in the new spelling, says the same.
    family = {
        "gemma3_text": "Gemma3Text",
        "qwen3_vl_text": "Qwen3VLText",
        "qwen3_moe": "Qwen3Moe",
    }
    kind = family.get(group["model_type"], group["model_type"].capitalize())
    given = copy.deepcopy({k: v for k, v in group.items() if k != "model_type"})
    again = family_class(kind, "Config")(**given).to_dict()
    again.setdefault("tie_word_embeddings", config.tied_embeddings)
    assert text.decoder_from_hf(again, "config.json: ") == config


# Fields that say nothing where another one rules, in torch as here.
MOOT = {"_sliding_window_pattern", "max_window_layers", "sliding_window"}
MOOT |= {"sliding_window_pattern", "use_sliding_window"}  # layer_types is there
MOOT |= {"router_aux_loss_coef"}  # output_router_logits is off


@pytest.mark.parametrize("name", TOWERS)
def test_no_field_is_overlooked(name):
    """Any field with another value makes another decoder, or is refused by name."""
    group = hf_config(name).to_dict()
    config = text.decoder_from_hf(group, "config.json: ")
    other = {bool: lambda v: not v, int: lambda v: 2 * v, float: lambda v: v / 2 + 0.5}
    seen = 0
    for field, value in group.items():
        if field in IGNORED or field in MOOT or type(value) not in other:
            continue
        if config.num_experts and field == "intermediate_size":  # of dense layers; there are none
            continue
        seen += 1
        try:
            changed = text.decoder_from_hf(group | {field: other[type(value)](value)}, "")
        except ConfigError as error:
            assert field in str(error)
        else:
            assert changed != config, field
    assert seen >= 8


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"norm": "layer"}, "norm='layer'; known: rms, rms_plus_one"),
        ({"rope_scaling": RopeScaling("longrope")}, "kind='longrope'; known: default"),
        ({"rope_scaling": RopeScaling("yarn", 2.0)}, "needs the length"),
        ({"rope_sections": (2, 2, 2)}, "add up to 6, not to half of head_dim=16"),
        ({"window": 4, "rope_sections": (4, 2, 2)}, "no meaning with rope_sections"),
        ({"window": 4, "window_pattern": ()}, "window_pattern is empty"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        check(DecoderConfig(vocab_size=8, **change))
