"""Small decoders, each in torch and in jaxvlm, and the outputs of both for one batch."""

import copy
import functools
import importlib
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import worst_gradient
from flax import nnx
from numerics import close_in_norm
from text_cases import TOWERS, VOCAB

from jaxvlm.config import DecoderConfig, MeshConfig
from jaxvlm.hf.families import llama, text_decoders
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.decoder import Decoder
from jaxvlm.models.vlm import Stream
from jaxvlm.nn.mask import batch_mask
from jaxvlm.nn.param import Init, merge, split
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.train.grad_accum import scales, total
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")
from transformers.models.gemma3 import modeling_gemma3 as gemma3  # noqa: E402

torch.set_num_threads(1)  # on models this small its threads wait for each other, seconds a test


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
        x, side = self.decoder(stream.x, stream.positions, stream.mask, stream.kv, stream.cached)
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
    """transformers' config of a small decoder."""
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
    """A class of transformers that its top level may not export."""
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
    ours = text_decoders.decoder_from_hf(group, "config.json: ")
    graph, shapes = build(ours)
    params = load({n: p.detach().numpy() for n, p in theirs.named_parameters()}, ours)
    assert {path: x.shape for path, x in params.items()} == {p: x.shape for p, x in shapes.items()}
    return Oracle(theirs, ours, graph, params)


def in_sections(family):
    """Whether its positions have three rows (M-RoPE)."""
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
    """One segment per sequence, at [first, end); the last third of its tokens has loss weight."""
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
        # Two images, one longer than the window, whose tokens see each other both ways.
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
    off = close_in_norm(ours, expected, 1e-4)
    np.testing.assert_allclose(float(value), out.loss.item(), rtol=1e-3)
    worst = worst_gradient(grads, their_grads)
    assert all(np.any(g) for g in their_grads.values())
    return off, float(np.abs(ours - expected).max()), worst
