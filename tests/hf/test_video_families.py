"""Videos of the families whose frames have one size: transformers' torch models are the oracle."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from numerics import close_in_norm

from jaxvlm.data.videos.video_format import Shown
from jaxvlm.hf import video_families

torch = pytest.importorskip("torch", reason="the oracle; Python 3.11 only")
pytest.importorskip("transformers", reason="the oracle")

import vlm_cases as vlm  # noqa: E402  # after the oracle is known to be there

VIDEO, FRAMES = 94, 3


@pytest.mark.parametrize("name", ["internvl", "smolvlm", "llava-onevision", "llava-next-video"])
def test_a_video_is_torchs(name, shows):
    """A row with an image and a video of three frames, and one with a video alone: logits."""
    theirs, ours, params = vlm.oracle(name)
    kind, fields = theirs.config.model_type, vlm.CASES[name][1]
    shows(kind, "video")
    hf_config = {"model_type": kind, "image_token_id": vlm.IMAGE, **fields}

    def encode(text):
        return vlm.split(text.replace("<IMG_CONTEXT>", "<image>"))

    given = video_families.Given(ours.config, hf_config, encode, lambda *_: (16, 16))
    video = video_families.FORMS[kind].span(given)(Shown(np.arange(FRAMES) / 2, 1.5, 64, 48))
    assert len(video.starts) == FRAMES
    rows = [[2, (32, 14), 3, video, 6], [4, video, 7]]
    batch = vlm.make_batch(name, rows)
    inputs = vlm.torch_inputs(batch, name, rows)
    if kind.startswith("llava"):  # it has videos apart from images, and tokens of their own
        pixels, ids = inputs["pixel_values"], inputs["input_ids"]
        tiles = len(pixels) - 2 * FRAMES  # of the first row's image
        inputs["pixel_values"] = pixels[None, :tiles]
        inputs["pixel_values_videos"] = pixels[tiles:].reshape(2, FRAMES, *pixels.shape[1:])
        visual = [torch.nonzero(row == vlm.IMAGE)[:, 0] for row in ids]
        for row, places in zip(ids, visual, strict=True):
            row[places[-len(video.ids) :]] = VIDEO
    with torch.no_grad():
        expected = theirs(**inputs).logits.numpy()
    got = jax.jit(lambda p, b: (out := ours.apply(p, b)).logits(out.hidden))(params, batch)
    real = batch.segment > 0
    error = close_in_norm(np.asarray(got)[real], expected[real], 1e-4)
    print(f"{name}, videos: logits {error:.1e}")
