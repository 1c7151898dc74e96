"""Prompts of pairs and of ``VLM.embed`` are collated by one function and give equal batches."""

import numpy as np
import pytest
from PIL import Image

from jaxvlm.config import DataConfig, DecoderConfig, MeshConfig, ModelConfig
from jaxvlm.data import Example, Item, PairDataset, PromptCollator
from jaxvlm.data.images import image_files
from jaxvlm.data.tokenizer import chat_tokenizer as tokenizer
from jaxvlm.inference import prompts_to_embed
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Span


@pytest.mark.parametrize("mask", ["causal", "prefix", "prompt"])
def test_batches_are_those_of_prompts(mask, tmp_path):
    chat_tokenizer = tokenizer.build(["what is it a cat dog", "represent the user's input ."])
    decoder = DecoderConfig(vocab_size=64, visual_mask=mask)
    model = build_model(ModelConfig(decoder=decoder), make_mesh(MeshConfig()))

    def span(width, height):  # one token per pixel of width, between two others
        return Span.of(chat_tokenizer.image_id, width, [5], [6, 7])

    images = image_files.ImageFormat(image_files.squares(8), 8, span, fixed=False)
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (9, 3 + i, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    path = [str(tmp_path / f"{i}.png") for i in range(4)]
    examples = [
        Example("0", Item.of("what is it", path[0]), Item("a cat")),
        Example("1", Item.of("is <image> a cat", path[1]), Item.of("", path[2])),
        Example("2", Item("a dog", instruction="what is it?"), Item.of("a dog", path[3])),
    ]
    rows = PromptCollator(chat_tokenizer, images, mask)
    data = PairDataset.from_config(DataConfig(batch_size=1), rows, read=(examples, []))
    for side in (data.queries, data.documents):
        for numbers, batch in data.items(side.name, np.arange(3), 3):
            for row, number in enumerate(numbers.tolist()):
                item = side.items[number]
                asked = [([item.image] if item.image else [], item.text)]
                how = (model, chat_tokenizer, images, 10**6, item.instruction)
                want = prompts_to_embed.batch(asked, *how)
                length = int(np.sum(want.segment[0] > 0))
                for name in ("tokens", "segment", "positions", "bidirectional"):
                    x, y = getattr(batch, name), getattr(want, name)
                    if y is None:  # no image in this one
                        assert x is None or not x[row].any()
                    else:
                        x, y = x[row][..., -length:], np.asarray(y)[0][..., -length:]
                        np.testing.assert_array_equal(x, y, name)
                assert (batch.segment[row] > 0).sum() == length
                if want.pixels is not None:
                    np.testing.assert_array_equal(batch.pixels[row], np.asarray(want.pixels)[0])
