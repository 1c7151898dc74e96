"""transformers' CLIP, SigLIP, SigLIP 2 and BERT in torch are the oracle of ours."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import worst_gradient
from numerics import close, close_in_norm

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from towers import packed, shaken  # noqa: E402  # after the oracle

from jaxvlm.config import MeshConfig  # noqa: E402
from jaxvlm.hf.families import ENCODERS  # noqa: E402
from jaxvlm.parallel.mesh import make_mesh  # noqa: E402
from jaxvlm.spmd.model import build_model  # noqa: E402
from jaxvlm.types import Batch  # noqa: E402

VOCAB, LENGTH, EOS, PAD = 40, 9, 37, 3
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH + 2,
    "pad_token_id": PAD,
    "bos_token_id": 1,
}
VISION = {
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
GRIDS = [[(1, 4, 6)], [(1, 2, 8)], [(1, 7, 3)], [(1, 1, 5)]]
"""Patches down and across of each row's one image."""


def texts(seed=0):
    """Tokens that end in EOS, of many lengths, padded on either side; which are real."""
    rng = np.random.default_rng(seed)
    tokens = np.full((4, LENGTH), PAD, np.int32)
    real = np.zeros((4, LENGTH), np.int32)
    for row, (start, stop) in enumerate([(0, LENGTH), (0, 4), (3, LENGTH), (0, 6)]):
        tokens[row, start:stop] = rng.integers(4, EOS, stop - start)
        tokens[row, stop - 1], real[row, start:stop] = EOS, 1
    tokens[0, 5] = EOS  # the first one ends the text
    tokens[3, 2] = EOS + 1  # a larger id than it
    return tokens, real


class Case(NamedTuple):
    """A dual model of transformers and what it is given."""

    model: torch.nn.Module
    batch: Batch
    inputs: dict
    """The same, for torch."""


def text_batch(see_padding=False):
    tokens, real = texts()
    segment = np.ones_like(real) if see_padding else real
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (4, 1, LENGTH))
    batch = Batch(tokens, np.zeros(tokens.shape, np.float32), positions, segment)
    inputs = {"input_ids": torch.from_numpy(tokens).long()}
    if not see_padding:
        inputs["attention_mask"] = torch.from_numpy(real).long()
    return batch, inputs


def squares(model, mean, std, see_padding=False):
    """Texts with images of one size."""
    batch, inputs = text_batch(see_padding)
    side = model.config.vision_config.image_size
    pixels = np.random.default_rng(1).integers(0, 256, (4, 1, side, side, 3)).astype(np.uint8)
    x = (pixels[:, 0] / 255 - mean) / std
    inputs["pixel_values"] = torch.from_numpy(x.transpose(0, 3, 1, 2).astype(np.float32))
    return Case(shaken(model), batch._replace(pixels=pixels), inputs)


def clip(eos, vision=VISION, width=17, **fields):
    config = transformers.CLIPConfig(
        text_config=TEXT | {"eos_token_id": eos} | fields,
        vision_config=vision | {"image_size": 12},
        projection_dim=width,
    )
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return squares(transformers.CLIPModel(config), mean, std)


def siglip(see_padding, vision=VISION, **fields):
    config = transformers.SiglipConfig(
        text_config=TEXT | {"projection_size": vision["hidden_size"]} | fields,
        vision_config=vision | {"image_size": 12},
    )
    return squares(transformers.SiglipModel(config), 0.5, 0.5, see_padding)


def siglip2(see_padding=True, vision=VISION, num_patches=16, **fields):
    """Images of four shapes, not one of them square."""
    config = transformers.Siglip2Config(
        text_config=TEXT | {"projection_size": vision["hidden_size"]} | fields,
        vision_config=vision | {"num_patches": num_patches},
    )
    batch, inputs = text_batch(see_padding)
    x, grid, _, thw = packed(GRIDS, 32, 3 * 4 * 4)
    batch = batch._replace(patches=127.5 * (x + 1), grid=grid[:, :1])
    inputs["pixel_values"] = torch.from_numpy(x)
    counts = grid.prod(-1).sum(-1)
    inputs["pixel_attention_mask"] = torch.from_numpy((np.arange(32) < counts[:, None]).astype(int))
    inputs["spatial_shapes"] = thw[:, 1:]
    return Case(shaken(transformers.Siglip2Model(config)), batch, inputs)


CASES = {
    "CLIP, first eos": lambda: clip(EOS, hidden_act="gelu", num_attention_heads=4),
    "CLIP, largest id": lambda: clip(2, layer_norm_eps=1e-3, num_hidden_layers=3),
    "SigLIP, padding seen": lambda: siglip(True),
    "SigLIP, padding hidden": lambda: siglip(False, hidden_act="gelu", layer_norm_eps=1e-3),
    "SigLIP 2, any shape": siglip2,
    "SigLIP 2, smaller than its table": lambda: siglip2(
        False, VISION | {"hidden_act": "gelu"}, 49, hidden_act="relu"
    ),
}


def built(hf_config, state):
    """Our model of a config, its parameters from torch's, and the map; a round trip on the way."""
    family = ENCODERS[hf_config["model_type"]]
    config = family.config_from_hf(hf_config)
    model = build_model(config, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    tensors = {name: p.detach().numpy() for name, p in state.items()}
    weights = family.weights(config)
    params = weights.load(tensors)
    assert {n: x.shape for n, x in model.shapes.items()} == {n: x.shape for n, x in params.items()}
    back = weights.dump(params)
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        assert back[name].shape == x.shape, name
        np.testing.assert_array_equal(back[name], x)
    return model, params, weights


def their_gradients(model, weights):
    named = dict(model.named_parameters())
    zero = {n: np.zeros(p.shape, np.float32) for n, p in named.items()}
    return weights.load(
        {n: zero[n] if p.grad is None else p.grad.numpy() for n, p in named.items()}
    )


def contrastive(out):
    """CLIP's loss, or SigLIP's where the logits have a bias; and logits_per_image."""
    images, texts = out.hidden[:, 0], out.hidden[:, 1]
    logits = jnp.exp(out.scale) * images @ texts.T
    if out.bias is not None:
        logits = logits + out.bias
        sign = 2 * jnp.eye(len(logits)) - 1
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(sign * logits), axis=1)), logits
    diagonal = jnp.arange(len(logits))
    rows = jax.nn.log_softmax(logits, axis=1)[diagonal, diagonal]
    columns = jax.nn.log_softmax(logits, axis=0)[diagonal, diagonal]
    return -(jnp.mean(rows) + jnp.mean(columns)) / 2, logits


@pytest.mark.parametrize("name", CASES)
def test_embeddings_logits_and_gradients_are_torchs(name, record_property, shows):
    case = CASES[name]()
    shows(case.model.config.model_type, "import", "embed")
    errors = compare(case)
    for what, error in errors.items():
        record_property(what, error)
    print(f"{name}: " + ", ".join(f"{what} {error:.1e}" for what, error in errors.items()))


def compare(case):
    """Relative errors of embeddings, logits, loss and the worst gradient, each checked."""
    model, params, weights = built(case.model.config.to_dict(), dict(case.model.named_parameters()))
    theirs = case.model(**case.inputs, return_loss=True)
    theirs.loss.backward()

    def objective(params, batch):
        out = model.apply(params, batch)
        loss, logits = contrastive(out)
        return loss, (out.hidden, logits)

    run = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (loss, (hidden, logits)), grads = run(params, case.batch)
    errors = {
        "images": close_in_norm(hidden[:, 0], theirs.image_embeds, 1e-4),
        "texts": close_in_norm(hidden[:, 1], theirs.text_embeds, 1e-4),
        "logits": close_in_norm(logits, theirs.logits_per_image, 1e-4),
        "loss": close(loss, theirs.loss, 1e-4),
    }
    expected = their_gradients(case.model, weights)
    for leaf in ("head/text", "text/table", "text/position", "text/stack/blocks/attn/wq"):
        assert np.linalg.norm(expected[leaf]) > 1e-4, leaf
    errors["worst gradient"] = worst_gradient(grads, expected)
    errors["most"] = float(np.abs(logits - theirs.logits_per_image.detach().numpy()).max())
    return errors


ALONE = {
    "CLIP": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT, eos_token_id=2)),
    "CLIP, projected": lambda: transformers.CLIPTextModelWithProjection(
        transformers.CLIPTextConfig(**TEXT, eos_token_id=EOS, projection_dim=10)
    ),
    "SigLIP": lambda: transformers.SiglipTextModel(
        transformers.SiglipTextConfig(**TEXT, projection_size=10)
    ),
    "SigLIP 2": lambda: transformers.Siglip2TextModel(transformers.Siglip2TextConfig(**TEXT)),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_text_tower_alone_is_torchs(name, tmp_path):
    theirs = shaken(ALONE[name]())
    theirs.save_pretrained(tmp_path)  # fills in architectures
    model, params, weights = built(theirs.config.to_dict(), dict(theirs.named_parameters()))
    if name != "CLIP, projected":  # older files have the prefix of the whole model
        older = {f"text_model.{n}": shape for n, shape in weights.tensors().items()}
        spelled = weights.check(older, "here")
        assert all(there == f"text_model.{here}" for here, there in spelled.items())
    batch, inputs = text_batch()
    with torch.no_grad():
        out = theirs(**inputs)
    expected = out.text_embeds if "text_embeds" in out else out.pooler_output
    ours = jax.jit(model.apply)(params, batch)
    assert ours.hidden.shape == (4, 1, expected.shape[1]) and ours.scale is None
    close_in_norm(ours.hidden[:, 0], torch.nn.functional.normalize(expected), 1e-4)


BERTS = {
    "BERT": {"type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-6},
    "BERT, another": {"type_vocab_size": 3, "num_attention_heads": 4, "num_hidden_layers": 1},
}


@pytest.mark.parametrize("name", BERTS)
def test_bert_is_torchs(name, record_property, shows):
    shows("bert", "import")
    record_property("worst gradient", compare_bert(TEXT | BERTS[name])[2])


def compare_bert(fields):
    """Hidden states, each way of pooling, token types: errors of states, worst gradient."""
    width = fields["hidden_size"]
    theirs = shaken(transformers.BertModel(transformers.BertConfig(**fields)))
    model, params, weights = built(theirs.config.to_dict(), dict(theirs.named_parameters()))
    batch, inputs = text_batch()
    types = np.random.default_rng(2).integers(0, 3, batch.tokens.shape)
    expected = theirs(**inputs, token_type_ids=torch.from_numpy(types))
    real = batch.segment > 0
    states = expected.last_hidden_state
    mean = torch.stack([row[torch.from_numpy(m)].mean(0) for row, m in zip(states, real)])
    rng = np.random.default_rng(3)
    weight = {n: rng.normal(size=(4, width)).astype(np.float32) for n in ("mean", "pooler")}
    # Theirs pools the row's first place, so rows padded on the left have no say here.
    weight["pooler"][2] = 0
    loss = (mean * torch.from_numpy(weight["mean"])).sum()
    (loss + (expected.pooler_output * torch.from_numpy(weight["pooler"])).sum()).backward()

    def objective(params, batch, types):
        text, pooled = model.module(params).text, {}
        x = text(batch.tokens, batch.segment, batch.positions[:, 0], types=types)
        for pool in ("mean", "pooler", "class", "last"):
            text.config = dataclasses.replace(model.config.text, pool=pool)
            pooled[pool] = text.pooled(x, batch.tokens, batch.segment)
        total = sum(jnp.sum(pooled[n] * weight[n]) for n in weight)
        return total, (x, pooled)

    run = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (_, (x, pooled)), grads = run(params, batch, types)
    of_states = close_in_norm(np.asarray(x)[real], states[torch.from_numpy(real)], 1e-4)
    close_in_norm(pooled["mean"], mean, 1e-4)
    right = [0, 1, 3]
    close_in_norm(pooled["pooler"][np.array(right)], expected.pooler_output[right], 1e-4)
    for pool, places in (("class", (0, 0, 3, 0)), ("last", (8, 3, 8, 5))):
        close_in_norm(pooled[pool], states[torch.arange(4), torch.tensor(places)], 1e-4)
    off = np.asarray(x)[real] - states[torch.from_numpy(real)].detach().numpy()
    worst = worst_gradient(grads, their_gradients(theirs, weights))
    return (
        of_states,
        float(abs(off).max()),
        worst,
    )


DRAWS = int(os.environ.get("JAXVLM_DRAWS", "1"))
FAMILIES = ("clip", "siglip", "siglip2", "bert")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_settings_drawn_at_random_are_torchs(family, seed, parity):
    """``JAXVLM_DRAWS=10`` draws ten a family."""
    rng = np.random.default_rng((seed, FAMILIES.index(family)))

    def one_of(*values):
        return values[rng.integers(len(values))]

    def tower():
        heads = one_of(1, 2, 3, 5)
        return {
            "hidden_size": heads * one_of(4, 6, 10),
            "num_attention_heads": heads,
            "intermediate_size": one_of(20, 28, 52),
            "num_hidden_layers": one_of(1, 2, 3),
            "hidden_act": one_of("gelu", "quick_gelu", "gelu_pytorch_tanh", "silu", "relu"),
            "layer_norm_eps": one_of(1e-3, 1e-5, 1e-6),
        }

    text = tower() | {"max_position_embeddings": LENGTH + one_of(0, 1, 7)}
    vision = tower() | {"patch_size": 4}
    if family == "bert":
        parity(family, seed, *compare_bert(TEXT | text | {"type_vocab_size": 3}))
        return
    if family == "clip":
        case = clip(one_of(2, EOS), vision, one_of(3, 8, 33), **text)
    elif family == "siglip":
        case = siglip(one_of(True, False), vision, **text)
    else:
        case = siglip2(one_of(True, False), vision, one_of(4, 16, 36), **text)
    errors = compare(case)
    parity(family, seed, errors["logits"], errors["most"], errors["worst gradient"])
