"""transformers' torch models are the oracle for whole Qwen-VLs of every generation.

Logits, loss, gradients, positions, greedy ids, tensors both ways, and what is refused.
"""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.build.model import build_model
from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.data import spans
from jaxvlm.infer.embed import embed, last_token, unit
from jaxvlm.infer.generate import Sampling, generate
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.families import qwen_vl, resize
from jaxvlm.models.families.fields import METADATA
from jaxvlm.models.vit import per_value
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.train.objective import scales, total
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from safetensors.numpy import load_file, save_file  # noqa: E402  # after the oracle
from towers import shaken, worst_gradient  # noqa: E402

IMAGE, VIDEO, VOCAB, LENGTH, PATCHES, NEW = 95, 94, 96, 26, 56, 32
PIXELS = (64, 1024)
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VISION = {"num_heads": 3, "patch_size": 4}
VISION2 = VISION | {"depth": 2, "embed_dim": 24, "mlp_ratio": 2, "hidden_size": 32}
VISION25 = VISION | {"depth": 3, "hidden_size": 24, "intermediate_size": 30}
VISION25 |= {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
VISION3 = VISION | {"depth": 3, "hidden_size": 24, "intermediate_size": 30}
VISION3 |= {"out_hidden_size": 32, "num_position_embeddings": 16}
VISION3 |= {"deepstack_visual_indexes": [0, 1]}
TEXT3 = TEXT | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}}
MOE = TEXT3 | {"num_hidden_layers": 2}
MOE |= {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
CASES = {
    "qwen2-vl": (
        "Qwen2VL",
        {"vision_config": VISION2, "text_config": TEXT | {"rope_parameters": MROPE}},
    ),
    "qwen2-vl, tied, yarn": (
        "Qwen2VL",
        {
            "vision_config": VISION2 | {"depth": 1, "hidden_act": "gelu", "num_heads": 2},
            "text_config": TEXT
            | {"num_attention_heads": 2, "num_key_value_heads": 2}
            | {"rope_parameters": MROPE | YARN | {"mrope_section": [2, 3, 3]}},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {"vision_config": VISION25, "text_config": TEXT | {"rope_parameters": MROPE}},
    ),
    "qwen2.5-vl, tied, other windows": (
        "Qwen2_5_VL",
        {
            "vision_config": VISION25
            | {"fullatt_block_indexes": [0, 3], "window_size": 8, "hidden_act": "gelu"},
            "text_config": TEXT
            | {"rope_parameters": MROPE | {"rope_type": "linear", "factor": 2.0}}
            | {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl": ("Qwen3VL", {"vision_config": VISION3, "text_config": TEXT3}),
    "qwen3-vl, tied, biases": (
        "Qwen3VL",
        {
            "vision_config": VISION3
            | {"deepstack_visual_indexes": [1], "num_position_embeddings": 49},
            "text_config": TEXT3
            | {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4}
            | {"rope_parameters": TEXT3["rope_parameters"] | YARN | {"mrope_section": [4, 2, 2]}},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "vision_config": VISION3 | {"deepstack_visual_indexes": [1], "depth": 2},
            "text_config": MOE,
        },
    ),
    "qwen3-vl-moe, tied, biases": (
        "Qwen3VLMoe",
        {
            "vision_config": VISION3 | {"deepstack_visual_indexes": [], "depth": 2},
            "text_config": MOE
            | {"num_experts": 4, "num_experts_per_tok": 3, "head_dim": None}
            # As the published files have it, though no one reads it there.
            | {"attention_bias": True, "tie_word_embeddings": False},
            "tie_word_embeddings": True,
        },
    ),
}
PLAIN = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"]


@functools.cache
def hf_config(name):
    kind, fields = CASES[name]
    config = getattr(transformers, kind + "Config")(
        **copy.deepcopy(fields), image_token_id=IMAGE, video_token_id=VIDEO
    )
    config._experts_implementation = "eager"
    return config


@functools.cache
def oracle(name):
    """(torch model, our model, our parameters)."""
    config = hf_config(name)
    theirs = getattr(transformers, CASES[name][0] + "ForConditionalGeneration")(config)
    theirs = shaken(theirs)
    ours = build_model(
        qwen_vl.config_from_hf(config.to_dict()),
        make_mesh(MeshConfig(data=1), jax.devices()[:1]),
    )
    params = qwen_vl.weights(ours.config).load(named(theirs, lambda p: p))
    assert {path: x.shape for path, x in params.items()} == {
        path: x.shape for path, x in ours.shapes.items()
    }
    return theirs, ours, params


def named(theirs, of):
    """``of`` each parameter, as the published files lay it out: experts turned round."""
    found = {}
    for name, p in theirs.named_parameters():
        x = of(p)
        x = np.zeros(p.shape, np.float32) if x is None else x.detach().numpy()
        found[name] = x.swapaxes(1, 2) if ".experts." in name else x
    return found


def make_batch(ours, hf, rows, side="right", seed=0, length=LENGTH):
    """Rows are lists of text lengths and pictures' (width, height); a row's last third is trained.

    Spans, and so positions, are the family's own.
    """
    rng = np.random.default_rng(seed)
    vision, B, most = ours.config.vision, len(rows), 2
    factor = vision.patch_size * vision.block
    find = qwen_vl.span(ours.config, hf, lambda text: [], PIXELS)
    patch_dim = 3 * vision.frames * vision.patch_size**2
    tokens, segment = np.zeros((B, length), np.int32), np.zeros((B, length), np.int32)
    weight, positions = np.zeros((B, length), np.float32), np.zeros((B, 3, length), np.int32)
    start, grid = np.full((B, most), -1, np.int32), np.zeros((B, most, 3), np.int32)
    patches = np.zeros((B, PATCHES, patch_dim), np.uint8)
    for b, row in enumerate(rows):
        ids, found = [], []
        for part in row:
            ids += [IMAGE] if isinstance(part, tuple) else rng.integers(3, 90, part).tolist()
            if isinstance(part, tuple):
                width, height = resize.fit(*part, factor, *PIXELS)
                grid[b, len(found)] = 1, height // vision.patch_size, width // vision.patch_size
                found.append(find(*part))
        whole = spans.expand(np.asarray(ids), IMAGE, found)
        n, used = len(whole.ids), int(grid[b].prod(-1).sum())
        first = 0 if side == "right" else length - n
        here = slice(first, first + n)
        tokens[b, here], segment[b, here], positions[b, :, here] = whole.ids, 1, whole.positions
        weight[b, first + n - n // 3 : first + n] = 1
        for i in range(len(found)):
            start[b, i] = first + np.argmax(whole.tile == i + 1)
        patches[b, :used] = rng.integers(0, 256, (used, patch_dim))
    ids = np.arange(B, dtype=np.int32)
    return Batch(
        tokens,
        weight,
        positions,
        segment,
        patches=patches,
        grid=grid,
        image_start=start,
        example_id=ids,
    )


def torch_inputs(batch, vision):
    """What their processor makes of it; positions are left to their model."""
    inputs = {
        "input_ids": torch.from_numpy(batch.tokens).long(),
        "attention_mask": torch.from_numpy((batch.segment > 0).astype(np.int64)),
        "mm_token_type_ids": torch.from_numpy((batch.tokens == IMAGE).astype(np.int32)),
    }
    used = batch.grid.prod(-1).sum(-1)
    if used.any():
        mean, std = (per_value(x, vision) for x in (vision.pixel_mean, vision.pixel_std))
        x = np.concatenate([p[:n] for p, n in zip(batch.patches, used, strict=True)])
        inputs["pixel_values"] = torch.from_numpy((x.astype(np.float32) / 255 - mean) / std)
        inputs["image_grid_thw"] = torch.from_numpy(batch.grid[batch.grid.prod(-1) > 0]).long()
    return inputs


# Pictures are wide, high and square; the rows of one batch hold all kinds.
ROWS = {
    "padding right": ([[(24, 16), 6], [2, (16, 33), 3, (20, 9), 4], [11]], "right"),
    "padding left": ([[1, (40, 8), 5], [(16, 16), 1, (8, 17), 9], [7]], "left"),
    "text alone": ([[12], [20], [5]], "left"),
}


@functools.cache
def loss_and_grad(name):
    ours = oracle(name)[1]

    def objective(params, batch):
        loss, result = NextToken(), ours.apply(params, batch)
        value = total(loss(result, batch), scales(loss, batch))
        return value, result.logits(result.hidden)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


CHOSEN = [
    (name, rows) for name in CASES for rows in ROWS if name in PLAIN or rows == "padding left"
]


@pytest.mark.parametrize(("name", "rows"), CHOSEN)
def test_logits_loss_and_gradients_are_torchs(name, rows):
    theirs, ours, params = oracle(name)
    batch = make_batch(ours, hf_config(name).to_dict(), *ROWS[rows])
    given = torch_inputs(batch, ours.config.vision)
    labels = torch.from_numpy(np.where(batch.loss_weight > 0, batch.tokens, -100)).long()
    theirs.model.rope_deltas = None
    logits = theirs(**given).logits
    theirs.zero_grad()
    flat = logits[:, :-1].flatten(0, 1)
    their_loss = torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten())
    their_loss.backward()
    their_grads = qwen_vl.weights(ours.config).load(named(theirs, lambda p: p.grad))

    (value, our_logits), grads = loss_and_grad(name)(params, batch)
    real = batch.segment > 0
    expected, got = logits.detach().numpy()[real], np.asarray(our_logits)[real]
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < 1e-4, error
    np.testing.assert_allclose(float(value), their_loss.item(), rtol=1e-5)
    worst = worst_gradient(grads, their_grads)
    seen = any(np.any(their_grads[p]) for p in ("vision/stem/w", "connector/w_out"))
    assert seen == (rows != "text alone")
    most = np.abs(got - expected).max()
    print(f"{name}, {rows}: logits {error:.1e} (at most {most:.1e}), worst gradient {worst:.1e}")


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("rows", ["padding right", "padding left"])
def test_positions_are_torchs(name, rows):
    theirs, ours, _ = oracle(name)
    batch = make_batch(ours, hf_config(name).to_dict(), *ROWS[rows])
    given = torch_inputs(batch, ours.config.vision)
    del given["pixel_values"]
    expected, _ = theirs.model.get_rope_index(**given)
    np.testing.assert_array_equal(batch.positions, expected.numpy().transpose(1, 0, 2))


@pytest.mark.parametrize("name", PLAIN)
def test_greedy_generation_gives_transformers_ids(name):
    theirs, ours, params = oracle(name)
    # No row ends in a picture: there torch counts on from its last token, row by row.
    rows = [[(24, 16), 6], [2, (8, 30), 3, (16, 16), 1], [5]]
    batch = make_batch(ours, hf_config(name).to_dict(), rows, "left", seed=2)
    made = theirs.generate(
        **torch_inputs(batch, ours.config.vision),
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
    clear = clear.numpy()
    sure = np.cumprod(clear, axis=1).astype(bool)
    d = ours.config.decoder
    shape = (d.depth, d.num_kv_heads, d.head_dim)
    new = jax.jit(
        lambda p, b: generate(ours.module(p), b, Sampling(), NEW, shape, jax.random.key(0))
    )(params, jax.tree.map(jnp.asarray, batch))
    assert sure.mean() > 0.25 and clear.mean() > 0.9
    assert len(np.unique(expected)) > 8  # not one token over and over
    np.testing.assert_array_equal(np.where(sure, new, 0), np.where(sure, expected, 0))

    # Behind the first choice that is not clear: what ours says of torch's own words.
    on = batch.positions.max((1, 2), keepdims=True) + 1 + np.arange(NEW, dtype=np.int32)
    forced = batch._replace(
        tokens=np.concatenate([batch.tokens, expected], 1),
        loss_weight=None,
        positions=np.concatenate([batch.positions, np.tile(on, (1, 3, 1))], 2),
        segment=np.pad(batch.segment, ((0, 0), (0, NEW)), constant_values=1),
    )

    def of_new(params, batch):
        out = ours.apply(params, batch)
        return out.logits(out.hidden[:, LENGTH - 1 : -1])

    said, wanted = np.asarray(jax.jit(of_new)(params, forced)), logits.numpy()
    assert np.linalg.norm(said - wanted) < 1e-4 * np.linalg.norm(wanted)
    np.testing.assert_array_equal(said.argmax(-1)[clear], wanted.argmax(-1)[clear])


@pytest.mark.parametrize(
    ("rows", "dims"), [("padding right", 0), ("padding left", 12), ("text alone", 0)]
)
def test_pooled_vectors_are_torchs(rows, dims):
    """Qwen3-VL-Embedding is a Qwen3-VL whose last token's state is scaled to unit length."""
    theirs, ours, params = oracle("qwen3-vl")
    batch = make_batch(ours, hf_config("qwen3-vl").to_dict(), *ROWS[rows])
    theirs.model.rope_deltas = None
    given = torch_inputs(batch, ours.config.vision)
    with torch.no_grad():
        hidden = theirs.model(**given).last_hidden_state
    seen = given["attention_mask"] * torch.arange(LENGTH)
    expected = hidden[torch.arange(len(hidden)), seen.argmax(1), : dims or None]
    wanted = torch.nn.functional.normalize(expected, dim=-1).numpy()
    vectors = np.asarray(pooled("qwen3-vl", dims)(params, batch))
    cosine = (vectors * wanted).sum(-1)
    np.testing.assert_allclose(cosine, 1.0, atol=1e-6)
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)
    print(f"{rows}, {dims or 'all'} dims: cosine {cosine.min():.8f}")


@functools.cache
def pooled(name, dims):
    ours = oracle(name)[1]
    return jax.jit(lambda params, batch: embed(ours.module(params), batch, dims))


def test_a_row_of_padding_has_no_vector():
    hidden = jnp.ones((2, 3, 4))
    segment = jnp.asarray([[0, 0, 0], [1, 0, 0]])

    def total_of(hidden):
        return jnp.sum(unit(last_token(hidden, segment)))

    value, gradient = jax.value_and_grad(total_of)(hidden)
    assert value == 2.0 and np.isfinite(gradient).all() and not np.any(gradient[0])


@pytest.mark.parametrize("name", CASES)
def test_tensors_come_and_go_unchanged(name, tmp_path):
    """What transformers writes is what we write, and what we write it loads."""
    theirs, ours, params = oracle(name)
    theirs.save_pretrained(tmp_path / "theirs")
    published = load_file(tmp_path / "theirs" / "model.safetensors")
    weights = qwen_vl.weights(ours.config)
    written = weights.dump(params)
    assert written.keys() == published.keys()
    for tensor, x in written.items():  # transformers writes experts turned round, and reads both
        turned = x.swapaxes(1, 2) if ".experts." in tensor else x
        np.testing.assert_array_equal(turned, published[tensor])
    for path, x in weights.load(written).items():
        np.testing.assert_array_equal(x, params[path])
    (tmp_path / "ours").mkdir()
    theirs.config.save_pretrained(tmp_path / "ours")
    save_file(written, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    loaded, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for key, x in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], x), key


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


def test_a_picture_is_given_transformers_size():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 200), (5, 900), (28, 28), (14, 42), (4000, 3000)]
    sizes += np.exp(rng.uniform(0, 8, (500, 2))).astype(int).tolist()
    for width, height in sizes:
        for factor, bounds in ((28, qwen_vl.PIXELS), (32, (65536, 16777216)), (8, (64, 4096))):
            try:
                high, wide = smart_resize(height, width, factor, *bounds)
            except ValueError:
                with pytest.raises(ValueError, match="over 200 times the other"):
                    resize.fit(width, height, factor, *bounds)
            else:
                assert resize.fit(width, height, factor, *bounds) == (wide, high)
