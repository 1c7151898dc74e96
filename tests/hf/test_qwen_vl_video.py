"""Videos, and embeddings, of Qwen-VLs: transformers' torch models are the oracle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import close_in_norm

from jaxvlm.data.videos.video_format import Shown
from jaxvlm.hf import video_families
from jaxvlm.inference.embed_sequences import embed_sequences
from jaxvlm.nn.norm import unit
from jaxvlm.nn.pooling import last_token

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
transformers = pytest.importorskip("transformers", reason="the oracle")

from qwen import (  # noqa: E402  # after the oracle is known to be there
    IMAGE,
    LENGTH,
    PLAIN,
    ROWS,
    VIDEO,
    hf_config,
    make_batch,
    oracle,
    torch_inputs,
)


@pytest.mark.parametrize("name", PLAIN[:3])
def test_a_video_is_torchs(name, shows):
    """An image, then a video of three frames: positions and logits."""
    shows(hf_config(name).model_type, "video")
    theirs, ours, params = oracle(name)
    hf = hf_config(name).to_dict()
    seconds = 0.7  # Qwen2.5-VL: 3 * 0.7 positions from a frame to the next, cut to whole ones
    given = video_families.Given(
        ours.config, hf, lambda text: [len(text), 7, 8], lambda *_: (16, 24)
    )
    shown = Shown(np.arange(6) * seconds / 2, 3 * seconds, 24, 16)
    video = video_families.FORMS[hf["model_type"]].span(given)(shown)
    batch = make_batch(ours, hf, [[3, (16, 24), 2, "video", 5]], video=video, length=52)
    assert np.prod(batch.grid[0], -1).tolist() == [24, 24, 24, 24]
    given = torch_inputs(batch, ours.config.vision)
    # A video's tokens have an id of their own there; ours have the images', and are no words.
    in_video = np.flatnonzero(batch.tokens[0] == IMAGE)[6:]
    tokens = torch.from_numpy(batch.tokens).long()
    tokens[0, in_video] = VIDEO
    given["input_ids"] = tokens
    given["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
    patches = given.pop("pixel_values")
    given["pixel_values"], given["pixel_values_videos"] = patches[:24], patches[24:]
    given["image_grid_thw"] = torch.tensor([[1, 6, 4]])
    given["video_grid_thw"] = torch.tensor([[3, 4, 6]])
    if name == "qwen2.5-vl":
        given["second_per_grid_ts"] = [seconds]
    theirs.model.rope_deltas = None
    with torch.no_grad():
        expected = theirs(**given).logits.numpy()
    for unused in ("pixel_values", "pixel_values_videos"):
        del given[unused]
    positions, _ = theirs.model.get_rope_index(**given)
    np.testing.assert_array_equal(batch.positions, positions.numpy().transpose(1, 0, 2))
    got = jax.jit(lambda p, b: (out := ours.apply(p, b)).logits(out.hidden))(params, batch)
    real = batch.segment > 0
    error = close_in_norm(np.asarray(got)[real], expected[real], 1e-4)
    print(f"{name}, a video: logits {error:.1e}")


@pytest.mark.parametrize("rows", ROWS)
def test_pooled_embeddings_are_torchs(rows):
    """Qwen3-VL-Embedding is a Qwen3-VL whose last token's state is scaled to unit length."""
    theirs, ours, params = oracle("qwen3-vl")
    batch = make_batch(ours, hf_config("qwen3-vl").to_dict(), *ROWS[rows])
    theirs.model.rope_deltas = None
    given = torch_inputs(batch, ours.config.vision)
    with torch.no_grad():
        hidden = theirs.model(**given).last_hidden_state
    seen = given["attention_mask"] * torch.arange(LENGTH)
    expected = hidden[torch.arange(len(hidden)), seen.argmax(1)]
    wanted = torch.nn.functional.normalize(expected, dim=-1).numpy()
    embeddings = np.asarray(pooled("qwen3-vl")(params, batch))
    cosine = (embeddings * wanted).sum(-1)
    np.testing.assert_allclose(cosine, 1.0, atol=1e-6)
    np.testing.assert_allclose(embeddings, wanted, atol=1e-5)
    print(f"{rows}: cosine {cosine.min():.8f}")


@functools.cache
def pooled(name):
    ours = oracle(name)[1]
    return jax.jit(lambda params, batch: embed_sequences(ours.module(params), batch))


def test_a_row_of_padding_has_no_embedding():
    hidden = jnp.ones((2, 3, 4))
    segment = jnp.asarray([[0, 0, 0], [1, 0, 0]])

    def total_of(hidden):
        return jnp.sum(unit(last_token(hidden, segment)))

    value, gradient = jax.value_and_grad(total_of)(hidden)
    assert value == 2.0 and np.isfinite(gradient).all() and not np.any(gradient[0])
