"""transformers' LLaVA in torch is the oracle: same weights, same logits, losses, gradients, ids."""

import functools

import jax
import numpy as np
import pytest
from builders import loss_and_gradient, worst_gradient
from greedy import assert_same_choices, assert_same_words, forced, our_greedy, torch_greedy
from numerics import close_in_norm

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.hf.families import llava
from jaxvlm.losses.next_token import targets, token_scores
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

IMAGE, VOCAB, SIZE, PATCHES = 95, 96, 16, 4
CONFIGS = {
    "mha-untied": {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False},
    "gqa-tied": {
        "num_key_value_heads": 2,
        "head_dim": 16,  # not width / heads
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    },
}


@functools.cache
def oracle(name):
    """(torch model, our model, our parameters)."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=3,
            image_size=SIZE,
            patch_size=8,
            initializer_range=0.2,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.2,
            **CONFIGS[name],
        ),
        image_token_index=IMAGE,
        image_seq_length=PATCHES,
        tie_word_embeddings=CONFIGS[name]["tie_word_embeddings"],
    )
    torch.manual_seed(3)
    theirs = transformers.LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():  # biases and norms are born 0 and 1, which would hide mistakes
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    ours = build_model(
        llava.config_from_hf(config.to_dict()), make_mesh(MeshConfig(data=1), jax.devices()[:1])
    )
    params = llava.weights(ours.config).load(tensors(theirs))
    assert {path: x.shape for path, x in params.items()} == {
        path: x.shape for path, x in ours.shapes.items()
    }
    return theirs, ours, params


def tensors(model):
    """Named parameters as a checkpoint would hold them; a tied one once."""
    return {name: x.detach().numpy() for name, x in model.named_parameters()}


def make_batch(rows, side="right", seed=0, length=20, most=2):
    """Rows are lists of text lengths and ``"image"``; the last half of a row's text is weighted."""
    rng = np.random.default_rng(seed)
    B = len(rows)
    tokens, segment = np.zeros((B, length), np.int32), np.zeros((B, length), np.int32)
    weight, positions = np.zeros((B, length), np.float32), np.zeros((B, 1, length), np.int32)
    start = np.full((B, most), -1, np.int32)
    pixels = np.zeros((B, most, SIZE, SIZE, 3), np.uint8)
    for b, row in enumerate(rows):
        ids = []
        images = []
        for part in row:
            if part == "image":
                images.append(len(ids))
                ids += [IMAGE] * PATCHES
            else:
                ids += rng.integers(3, IMAGE, part).tolist()
        n = len(ids)
        first = 0 if side == "right" else length - n
        tokens[b, first : first + n], segment[b, first : first + n] = ids, 1
        positions[b, 0, first : first + n] = np.arange(n)
        weight[b, first + n - n // 3 : first + n] = 1
        for i, at in enumerate(images):
            start[b, i] = first + at
            pixels[b, i] = rng.integers(0, 256, pixels.shape[2:])
    return Batch(tokens, weight, positions, segment, pixels=pixels, image_start=start)


def torch_inputs(batch):
    used = batch.image_start >= 0
    pixels = batch.pixels[used].astype(np.float32) / 255
    pixels = (pixels - np.float32(llava.clip.PIXEL_MEAN)) / np.float32(llava.clip.PIXEL_STD)
    has_images = {"pixel_values": torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())}
    return {
        "input_ids": torch.from_numpy(batch.tokens).long(),
        "attention_mask": torch.from_numpy((batch.segment > 0).astype(np.int64)),
        "position_ids": torch.from_numpy(batch.positions[:, 0]).long(),
        **(has_images if used.any() else {}),
    }


def labels(batch):
    return torch.from_numpy(np.where(batch.loss_weight > 0, batch.tokens, -100)).long()


@functools.cache
def loss_and_grad(name):
    return loss_and_gradient(oracle(name)[1])


# Of one shape, so that a configuration compiles once.
BATCHES = {
    "one image": ([["image", 5], [3, "image", 9]], "right"),
    "several images": ([["image", 2, "image", 5], [1, "image", 7]], "right"),
    "a row of text": ([["image", 6], [12]], "right"),
    "padding left": ([["image", 2, "image", 9], [5]], "left"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", BATCHES)
def test_logits_loss_and_gradients_are_torchs(name, kind):
    theirs, ours, params = oracle(name)
    batch = make_batch(*BATCHES[kind])
    out = theirs(**torch_inputs(batch), labels=labels(batch))
    theirs.zero_grad()
    out.loss.backward()
    their_grads = llava.weights(ours.config).load(
        {
            n: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
            for n, p in theirs.named_parameters()
        }
    )

    (value, logits), grads = loss_and_grad(name)(params, batch)
    real = batch.segment > 0
    close_in_norm(np.asarray(logits)[real], out.logits.detach().numpy()[real], 1e-4)
    np.testing.assert_allclose(float(value), out.loss.item(), rtol=1e-5)
    worst_gradient(grads, their_grads)
    assert all(np.any(their_grads[p]) for p in ("vision/stem/w", "connector/w_in"))


def test_questions_packed_behind_one_image_lose_what_separate_rows_lose():
    theirs, ours, params = oracle("gqa-tied")
    rng = np.random.default_rng(5)
    head = [7, *[IMAGE] * PATCHES, 8]
    questions = [rng.integers(3, IMAGE, n).tolist() for n in (4, 7, 5)]
    rows = [head + question for question in questions]
    length = 32
    tokens, segment = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
    parent, positions = np.zeros((1, length), np.int32), np.zeros((1, 1, length), np.int32)
    weight = np.zeros((1, length), np.float32)
    at, where = 0, []
    for i, piece in enumerate([head, *questions]):
        here = slice(at, at + len(piece))
        tokens[0, here], segment[0, here], parent[0, here] = piece, i + 1, int(i > 0)
        positions[0, 0, here] = np.arange(len(piece)) + (len(head) if i else 0)
        weight[0, here] = float(i > 0)
        where.append(at)
        at += len(piece)
    pixels = rng.integers(0, 256, (1, 1, SIZE, SIZE, 3), np.uint8)
    start = np.asarray([[1]], np.int32)
    packed = Batch(tokens, weight, positions, segment, parent, pixels=pixels, image_start=start)
    given, counted = targets(packed)
    score = jax.jit(lambda p, b, labels: token_scores(ours.apply(p, b), labels))
    nll, _ = score(params, packed, given)
    nll = np.asarray(nll * (counted > 0))[0]

    for first, row, question in zip(where[1:], rows, questions, strict=True):
        n = len(row)
        one = Batch(
            np.asarray([row], np.int32),
            np.ones((1, n), np.float32),
            np.arange(n, dtype=np.int32)[None, None],
            np.ones((1, n), np.int32),
            pixels=pixels,
            image_start=start,
        )
        with torch.no_grad():
            logits = theirs(**torch_inputs(one)).logits[0].log_softmax(-1)
        expected = [-logits[t - 1, row[t]].item() for t in range(len(head) + 1, n)]
        np.testing.assert_allclose(nll[first : first + len(question) - 1], expected, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_trip_changes_no_bit_and_no_name(name):
    theirs, ours, params = oracle(name)
    written = llava.weights(ours.config).dump(params)
    again = llava.weights(ours.config).load(written)
    for path, x in params.items():
        np.testing.assert_array_equal(again[path], x)
    rewritten = llava.weights(ours.config).dump(again)
    assert list(rewritten) == list(written)
    for tensor, x in written.items():
        np.testing.assert_array_equal(rewritten[tensor], x)
    # What torch holds under its names is there, all of it.
    original = tensors(theirs)
    spelled = llava.weights(ours.config).check({n: x.shape for n, x in original.items()}, "")
    assert spelled.keys() == written.keys()
    for tensor, name in spelled.items():
        np.testing.assert_array_equal(written[tensor], original[name])


def test_transformers_loads_what_we_write(tmp_path):
    from safetensors.numpy import save_file

    theirs, ours, params = oracle("mha-untied")
    save_file(
        llava.weights(ours.config).dump(params), tmp_path / "model.safetensors", {"format": "pt"}
    )
    theirs.config.save_pretrained(tmp_path)
    loaded, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, x in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_generation_gives_transformers_ids(name):
    theirs, ours, params = oracle(name)
    batch = make_batch([["image", 6], [2, "image", 9], [5]], "left", seed=2, length=16, most=1)
    batch = batch._replace(example_id=np.arange(3, dtype=np.int32))
    made = torch_greedy(theirs, torch_inputs(batch))
    found = our_greedy(ours.module, params, batch, ours.config.decoder)
    assert_same_choices(found, made)
    np.testing.assert_array_equal(found[:, :10], made.ids[:, :10])  # unclear ones too
    out = jax.jit(ours.apply)(params, forced(batch, made))
    assert_same_words(out.logits(out.hidden), made)


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        ("", "vision_feature_select_strategy", "pooled"),
        ("", "vision_feature_layer", [-2, -5]),
        ("", "vision_feature_layer", -99),
        ("", "projector_hidden_act", "mish"),
        ("", "a_new_field", 1),
        ("text_config", "model_type", "mamba"),
        ("text_config", "attention_dropout", 0.1),
        ("text_config", "sliding_window", 4096),
        ("text_config", "rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}),
        ("text_config", "rope_scaling", {"type": "longrope", "factor": 2}),
        ("vision_config", "num_channels", 1),
        ("vision_config", "model_type", "dinov2"),
    ],
)
def test_a_field_that_it_cannot_do_is_named(group, field, value):
    config = oracle("mha-untied")[0].config.to_dict()
    place = config[group] if group else config
    place[field] = value
    with pytest.raises(ConfigError, match=field):
        llava.config_from_hf(config)


def test_the_published_config_is_read():
    """llava-hf/llava-1.5-7b-hf leaves most of Llama's fields to their defaults."""
    config = llava.config_from_hf(
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "ignore_index": -100,
            "image_token_index": 32000,
            "model_type": "llava",
            "pad_token_id": 32001,
            "projector_hidden_act": "gelu",
            "text_config": {
                "_name_or_path": "lmsys/vicuna-7b-v1.5",
                "architectures": ["LlamaForCausalLM"],
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "rms_norm_eps": 1e-05,
                "torch_dtype": "float16",
                "vocab_size": 32064,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.36.0.dev0",
            "vision_config": {
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "model_type": "clip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "projection_dim": 768,
                "vocab_size": 32000,
            },
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "vocab_size": 32064,
        }
    )
    assert (config.decoder.width, config.decoder.depth, config.decoder.head_dim) == (4096, 32, 128)
    assert (config.vision.width, config.vision.feature_layer) == (1024, -2)


def test_missing_extra_and_misshapen_tensors_are_one_error():
    _, ours, params = oracle("mha-untied")
    written = llava.weights(ours.config).dump(params)
    norm, table = "language_model.model.norm.weight", "language_model.model.embed_tokens.weight"
    broken = {n: x for n, x in written.items() if n != norm}
    broken |= {"adapter.weight": written[norm], table: written[table][:-1]}
    with pytest.raises(ConfigError) as caught:
        llava.weights(ours.config).load(broken)
    for line in (f"1 missing: {norm}", "1 extra: adapter.weight", f"{table} (has [95"):
        assert line in str(caught.value)
