"""transformers' text models in torch are the oracle of every text tower."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxvlm.config import MeshConfig
from jaxvlm.infer.generate import Sampling, generate
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
        x, kv = self.decoder(stream.x, stream.positions, stream.mask, stream.kv, stream.length)
        return stream._replace(x=x, kv=kv)

    def post(self, stream):
        return self.decoder.out(stream.x)


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
    config_class = getattr(transformers, family + "Config", None) or getattr(
        transformers, family + "TextConfig"
    )
    return config_class(**{**dims, **given})


@functools.cache
def oracle(name):
    """(torch model, our config, our graph, our parameters)."""
    config = hf_config(name)
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    theirs = theirs.float().eval()
    with torch.no_grad():  # biases and norms are born 0 and 1, which would hide mistakes
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    ours = text.decoder_from_hf(config.to_dict(), "config.json: ")
    graph, shapes = build(ours)
    params = table(ours).load({n: p.detach().numpy() for n, p in theirs.named_parameters()})
    assert {path: x.shape for path, x in params.items()} == {p: x.shape for p, x in shapes.items()}
    return theirs, ours, graph, params


def table(config):
    """Every tensor of a text model."""
    depths = {"decoder": config.depth}
    return NameMap(llama.entries(config, "model.", ""), llama.dims(config), depths)


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
    return {
        "input_ids": torch.from_numpy(batch.tokens).long(),
        "attention_mask": torch.from_numpy((batch.segment > 0).astype(np.int64)),
        "position_ids": torch.from_numpy(batch.positions[:, 0]).long(),
    }


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
    batch = RAGGED
    labels = torch.from_numpy(np.where(batch.loss_weight > 0, batch.tokens, -100)).long()
    out = theirs(**torch_inputs(batch), labels=labels)
    out.loss.backward()
    their_grads = table(config).load({n: p.grad.numpy() for n, p in theirs.named_parameters()})

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


@pytest.mark.parametrize("name", TOWERS)
def test_greedy_decoding_gives_torchs_ids(name):
    theirs, config, graph, params = oracle(name)
    inputs = torch_inputs(PROMPTS)
    del inputs["position_ids"]
    made = copy.deepcopy(theirs).generate(
        **inputs,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    expected = made.sequences[:, PROMPTS.tokens.shape[1] :].numpy()
    logits = torch.stack(made.logits, 1)
    best = logits.topk(2).values
    clear = (best[..., 0] - best[..., 1]) > 1e-3 * (logits.amax(-1) - logits.amin(-1))
    sure = np.cumprod(clear.numpy(), axis=1).astype(bool)
    shape = (config.depth, config.num_kv_heads, config.head_dim)
    new = jax.jit(
        lambda p, b: generate(merge(graph, p), b, Sampling(NEW), shape, jax.random.key(0))
    )(params, jax.tree.map(jnp.asarray, PROMPTS))
    assert sure.mean() > 0.5
    np.testing.assert_array_equal(np.where(sure, new, 0), np.where(sure, expected, 0))
