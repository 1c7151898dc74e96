"""Videos, and embeddings, of Qwen-VLs: transformers' torch models are the oracle."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import close_in_norm

from jaxvlm.config import ConfigError
from jaxvlm.hf.families import qwen_video, qwen_vl
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


def frame_text(times, count):
    """What their processor writes for a video."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class Given:
        video_processor = types.SimpleNamespace(merge_size=2, temporal_patch_size=2)
        video_token, vision_start_token, vision_end_token = "V", "(", ")"
        _calculate_timestamps = Qwen3VLProcessor._calculate_timestamps

    metadata = types.SimpleNamespace(fps=1000.0, frames_indices=[int(1000 * t) for t in times])
    grid = np.asarray([[len(times) // 2, 2, 2 * count]])
    given = {"video_grid_thw": grid, "video_metadata": [metadata]}
    return Qwen3VLProcessor.replace_video_token(Given(), given, 0)


def test_a_frames_time_is_written_as_transformers_does():
    ids = {"video_token_id": ord("V"), "vision_start_token_id": ord("(")}
    given = hf_config("qwen3-vl").to_dict() | ids | {"vision_end_token_id": ord(")")}
    config = qwen_vl.config_from_hf(given)
    find = qwen_video.video_span(config, given, lambda text: list(map(ord, text)))
    text = frame_text([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], 3)
    assert "".join(map(chr, find((3, 1, 3), 1.0).ids)) == text
    assert "".join(map(chr, find((3, 1, 3), 9.0, [0.25, 1.25, 2.25]).ids)) == text
    assert "".join(map(chr, find((2, 1, 1), 9.0, [0.04, 12.06]).ids)) == frame_text(
        [0.0, 0.08, 12.0, 12.12], 1
    )


def test_a_config_without_a_videos_token_is_told_so():
    given = hf_config("qwen3-vl").to_dict() | {"video_token_id": None}
    with pytest.raises(ConfigError, match="video_token_id is missing"):
        qwen_video.video_span(qwen_vl.config_from_hf(given), given, lambda text: [])


@pytest.mark.parametrize("name", PLAIN[:3])
def test_a_video_is_torchs(name, shows):
    """An image, then a video of three frames: positions and logits."""
    shows(hf_config(name).model_type, "video")
    theirs, ours, params = oracle(name)
    hf = hf_config(name).to_dict() | {"vision_start_token_id": 92, "vision_end_token_id": 93}
    seconds = 0.7  # Qwen2.5-VL: 3 * 0.7 positions from a frame to the next, cut to whole ones
    video = qwen_video.video_span(ours.config, hf, lambda text: [len(text), 7, 8])(
        (3, 2, 3), seconds
    )
    apart = name == "qwen3-vl"
    batch = make_batch(ours, hf, [[3, (16, 24), 2, "video", 5]], video=video, length=52)
    given = torch_inputs(batch, ours.config.vision)
    tokens = torch.from_numpy(batch.tokens)
    given["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
    patches = given.pop("pixel_values")
    given["pixel_values"], given["pixel_values_videos"] = patches[:24], patches[24:]
    given["image_grid_thw"] = torch.tensor([[1, 6, 4]])
    given["video_grid_thw"] = torch.tensor([[3, 4, 6]])
    if name == "qwen2.5-vl":
        given["second_per_grid_ts"] = [seconds]
    theirs.model.rope_deltas = None
    assert np.prod(batch.grid[0], -1).tolist() == ([24, 24, 24, 24] if apart else [24, 72, 0, 0])
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
