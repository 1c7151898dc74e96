"""transformers' torch models are the oracle for whole VLMs: logits, loss, gradients, greedy ids."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.build.model import build_model
from jaxvlm.config import MeshConfig
from jaxvlm.infer.generate import Sampling, generate
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.families import FAMILIES
from jaxvlm.models.vlm import num_visual_tokens
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.train.objective import scales, total
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

IMAGE, VOCAB, LENGTH, NEW = 95, 96, 28, 12
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
# Gemma 3's window is shorter than a row, so that pictures are seen across its border.
GEMMA3 = TEXT | {
    "model_type": "gemma3_text",
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
CASES = {
    "paligemma": (
        "PaliGemma",
        {"vision_config": SIGLIP, "projection_dim": 32, "image_token_index": IMAGE}
        | {"text_config": TEXT | {"model_type": "gemma"}},
    ),
    "paligemma2": (
        "PaliGemma",
        {"vision_config": SIGLIP, "projection_dim": 32, "image_token_index": IMAGE}
        | {
            "text_config": TEXT
            | {"model_type": "gemma2", "sliding_window": 9, "query_pre_attn_scalar": 16}
        },
    ),
    "gemma3": (
        "Gemma3",
        {"vision_config": SIGLIP, "text_config": GEMMA3, "mm_tokens_per_image": 4}
        | {"image_token_index": IMAGE, "boi_token_index": 93, "eoi_token_index": 94},
    ),
    "internvl": (
        "InternVL",
        {
            "vision_config": {
                "model_type": "internvl_vision",
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "image_size": [16, 16],
                "patch_size": [4, 4],
                "attention_bias": True,
            },
            "text_config": {k: v for k, v in TEXT.items() if k != "head_dim"}
            | {"model_type": "qwen2"},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
    ),
    "idefics3": (
        "Idefics3",
        {
            "vision_config": SIGLIP | {"model_type": "idefics3_vision"},
            "text_config": TEXT | {"model_type": "llama", "pad_token_id": 0},
            "scale_factor": 2,
            "image_token_id": IMAGE,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "vision_config": SIGLIP | {"model_type": "smolvlm_vision"},
            "text_config": TEXT | {"model_type": "llama", "pad_token_id": 0},
            "scale_factor": 2,
            "tie_word_embeddings": True,
            "image_token_id": IMAGE,
        },
    ),
    "llava-mistral": (
        "Llava",
        {
            "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": 7},
            "image_token_index": IMAGE,
            "vision_feature_layer": [-1, 1],
        },
    ),
}


@functools.cache
def oracle(name):
    """(torch model, our model, our parameters)."""
    kind, fields = CASES[name]
    fields = {k: dict(v) if isinstance(v, dict) else v for k, v in fields.items()}
    if fields["vision_config"]["model_type"] != "siglip_vision_model":
        fields["vision_config"].pop("vision_use_head", None)
    config = getattr(transformers, kind + "Config")(**fields)
    torch.manual_seed(3)
    theirs = getattr(transformers, kind + "ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():  # biases and norms are born 0 and 1, which would hide mistakes
        for parameter in theirs.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter += 0.2 * torch.randn_like(parameter)
    family = FAMILIES[config.model_type]
    ours = build_model(
        family.config_from_hf(config.to_dict()),
        make_mesh(MeshConfig(data=1), jax.devices()[:1]),
    )
    named = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    params = family.weights(ours.config).load(named)
    assert {path: x.shape for path, x in params.items()} == {
        path: x.shape for path, x in ours.shapes.items()
    }
    return theirs, ours, params


def make_batch(config, rows, side="right", seed=0):
    """Rows are lists of text lengths and ``"image"``; the last third of a row is trained."""
    rng = np.random.default_rng(seed)
    B, count = len(rows), num_visual_tokens(config)
    size, most = config.vision.image_size, 2
    tokens, segment = np.zeros((B, LENGTH), np.int32), np.zeros((B, LENGTH), np.int32)
    weight, group = np.zeros((B, LENGTH), np.float32), np.zeros((B, LENGTH), np.int32)
    positions = np.zeros((B, 1, LENGTH), np.int32)
    start = np.full((B, most), -1, np.int32)
    pixels = np.zeros((B, most, size, size, 3), np.uint8)
    for b, row in enumerate(rows):
        ids, at = [], []
        for part in row:
            if part == "image":
                at.append(len(ids))
                ids += [IMAGE] * count
            else:
                ids += rng.integers(3, 90, part).tolist()
        n = len(ids)
        first = 0 if side == "right" else LENGTH - n
        here = slice(first, first + n)
        tokens[b, here], segment[b, here], positions[b, 0, here] = ids, 1, np.arange(n)
        weight[b, first + n - n // 3 : first + n] = 1
        if config.decoder.visual_mask == "prompt":
            group[b, first : first + n - n // 3] = 1
        for i, place in enumerate(at):
            start[b, i] = first + place
            pixels[b, i] = rng.integers(0, 256, pixels.shape[2:])
            if config.decoder.visual_mask == "prefix":
                group[b, first + place : first + place + count] = i + 1
    both_ways = None if config.decoder.visual_mask == "causal" else group
    ids = np.arange(B, dtype=np.int32)
    return Batch(
        tokens,
        weight,
        positions,
        segment,
        bidirectional=both_ways,
        pixels=pixels,
        image_start=start,
        example_id=ids,
    )


def torch_inputs(batch, config, kind, prompt=False):
    used = batch.image_start >= 0
    pixels = batch.pixels.astype(np.float32) / 255
    pixels = (pixels - np.float32(config.vision.pixel_mean)) / np.float32(config.vision.pixel_std)
    pixels = np.moveaxis(pixels, -1, 2)
    if kind in ("Idefics3", "SmolVLM"):  # zeros are no pictures to them
        given = torch.from_numpy(np.where(used[..., None, None, None], pixels, 0).copy())
    else:
        given = torch.from_numpy(pixels[used].copy())
    inputs = {
        "input_ids": torch.from_numpy(batch.tokens).long(),
        "attention_mask": torch.from_numpy((batch.segment > 0).astype(np.int64)),
        "position_ids": torch.from_numpy(batch.positions[:, 0]).long(),
        "pixel_values": given,
    }
    if kind == "PaliGemma":
        suffix = np.zeros_like(batch.tokens) if prompt else (batch.bidirectional == 0)
        inputs["token_type_ids"] = torch.from_numpy(suffix.astype(np.int64))
    if kind == "Gemma3":
        inputs["token_type_ids"] = torch.from_numpy((batch.tokens == IMAGE).astype(np.int64))
    return inputs


ROWS = {
    "one picture": ([["image", 5], [3, "image", 9]], "right"),
    "several pictures, a row of text, padding left": (
        [[1, "image", 9], [12]],
        "left",
    ),
}
TWO = ([[2, "image", 3, "image", 6], [1, "image", 4]], "left")


def rows_of(config, name):
    # A picture of 16 tokens leaves no room for a second one.
    if name != "one picture" and num_visual_tokens(config) <= 4:
        return TWO
    return ROWS[name]


@functools.cache
def loss_and_grad(name):
    ours = oracle(name)[1]

    def objective(params, batch):
        loss, result = NextToken(), ours.apply(params, batch)
        value = total(loss(result, batch), scales(loss, batch))
        return value, result.logits(result.hidden)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_logits_loss_and_gradients_are_torchs(name, rows, shows):
    theirs, ours, params = oracle(name)
    shows(
        theirs.config.model_type,
        "import",
        "train",
        *([] if rows == "one picture" else ["several pictures"]),
    )
    kind = CASES[name][0]
    batch = make_batch(ours.config, *rows_of(ours.config, rows))
    given = torch_inputs(batch, ours.config, kind)
    labels = torch.from_numpy(np.where(batch.loss_weight > 0, batch.tokens, -100)).long()
    logits = theirs(**given).logits
    theirs.zero_grad()
    flat = logits[:, :-1].flatten(0, 1)
    their_loss = torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten())
    their_loss.backward()
    named = {
        n: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for n, p in theirs.named_parameters()
    }
    their_grads = FAMILIES[theirs.config.model_type].weights(ours.config).load(named)

    (value, our_logits), grads = loss_and_grad(name)(params, batch)
    real = batch.segment > 0
    expected = logits.detach().numpy()[real]
    error = np.linalg.norm(np.asarray(our_logits)[real] - expected) / np.linalg.norm(expected)
    assert error < 1e-4, error
    np.testing.assert_allclose(float(value), their_loss.item(), rtol=1e-5)
    norm_all = np.sqrt(sum(np.sum(np.square(g)) for g in their_grads.values()))
    n_all = sum(g.size for g in their_grads.values())
    for path, wanted in their_grads.items():
        floor = 1e-2 * norm_all * np.sqrt(wanted.size / n_all)
        bound = 1e-3 * max(np.linalg.norm(wanted), floor)
        assert np.linalg.norm(np.asarray(grads[path]) - wanted) <= bound, path
    assert all(np.any(their_grads[p]) for p in ("vision/stem/w", "connector/w_out"))


@pytest.mark.parametrize("name", CASES)
def test_greedy_generation_gives_transformers_ids(name, shows):
    theirs, ours, params = oracle(name)
    shows(theirs.config.model_type, "generate")
    batch = make_batch(ours.config, [["image", 6], [2, "image", 7], [5]], "left", seed=2)
    if ours.config.decoder.visual_mask == "prompt":
        batch = batch._replace(bidirectional=batch.segment)
    given = torch_inputs(batch, ours.config, CASES[name][0], prompt=True)
    del given["position_ids"]
    made = theirs.generate(
        **given,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    expected = made.sequences[:, LENGTH:].numpy()
    logits = torch.stack(made.logits, 1)
    best = logits.topk(2).values
    clear = (best[..., 0] - best[..., 1]) > 1e-3 * (logits.amax(-1) - logits.amin(-1))
    sure = np.cumprod(clear.numpy(), axis=1).astype(bool)
    d = ours.config.decoder
    shape = (d.depth, d.num_kv_heads, d.head_dim)
    new = jax.jit(
        lambda p, b: generate(ours.module(p), b, Sampling(), NEW, shape, jax.random.key(0))
    )(params, jax.tree.map(jnp.asarray, batch))
    assert sure.mean() > 0.5
    np.testing.assert_array_equal(np.where(sure, new, 0), np.where(sure, expected, 0))


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_changes_no_bit_and_no_name(name, shows):
    theirs, ours, params = oracle(name)
    shows(theirs.config.model_type, "export")
    weights = FAMILIES[theirs.config.model_type].weights(ours.config)
    written = weights.dump(params)
    named = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    spelled = weights.check({n: x.shape for n, x in named.items()}, "torch's parameters")
    assert spelled.keys() == written.keys()
    for tensor, theirs_name in spelled.items():
        np.testing.assert_array_equal(written[tensor], named[theirs_name])
