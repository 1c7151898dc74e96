"""An embedding model is trained on the rows that it makes embeddings of, from real folders."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from checkpoints import write_llava, write_qwen_vl
from PIL import Image

import jaxvlm
from jaxvlm.config import DataConfig, PairDataConfig
from jaxvlm.data.pairs.collate_prompt_items import PromptCollator
from jaxvlm.data.pairs.collate_texts import TextCollator
from jaxvlm.data.pairs.dataset import PairDataset
from jaxvlm.inference import prompts_to_embed
from jaxvlm.types import Batch
from tests.e2e.test_encoders import write

pytest.importorskip("torch", reason="writes the checkpoints; Python 3.11 only")

SIZES = [(23, 40), (61, 17), (9, 9), (33, 35), (5, 70)]  # width, height
PER_TOKEN = ("tokens", "segment", "positions", "bidirectional")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Queries and documents of all kinds, with instructions of their own and without."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    lines = []
    for i, (width, height) in enumerate(SIZES):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        told = {"instruction": "is it red"} if i % 2 else {}
        query = {"query": "which color " * (i + 1)}
        lines.append(query | told | {"positive_image": f"{i}.png"})
        both = {"query": "what <image> is it", "query_image": f"{i}.png", "positive": f"it is {i}"}
        lines.append(both | {"negatives": [{"text": "blue", "image": f"{i}.png"}, "yes"]})
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def rows_of(model, records, padding="left"):
    mask = model.config.model.decoder.visual_mask
    pairs = PairDataConfig(document_instruction="which color is it?")
    config = DataConfig(train=str(records), batch_size=2, max_length=128, pairs=pairs)
    rows = PromptCollator(model.tokenizer, model.image_format, mask, padding)
    return PairDataset.from_config(config, rows)


def alone(model, item):
    """The sequence of one item, as ``VLM.embed`` collates it."""
    given = [item.image] if item.image else []
    asked = [(given, item.text)]
    how = (model.model, model.tokenizer, model.image_format, 10**6)
    batch = prompts_to_embed.batch(asked, *how, instruction=item.instruction)
    return Batch(*(None if x is None else np.asarray(x)[0] for x in batch))


def assert_same_row(row, want, padding):
    """Equal but for how much padding there is, and for places of images that are not used."""
    n = int((want.segment > 0).sum())
    here, there = slice(-n, None) if padding == "left" else slice(n), slice(-n, None)
    for name in PER_TOKEN:
        x, y = getattr(row, name), getattr(want, name)
        assert (x is None) == (y is None)
        if x is not None:
            y = np.broadcast_to(y[..., there], (*x.shape[:-1], n))
            np.testing.assert_array_equal(x[..., here], y, name)
    assert (row.segment > 0).sum() == n
    if want.image_start is None:
        assert (row.image_start == -1).all() and not row.image_key.any()
        return
    used = want.image_start >= 0
    moved = 0 if padding == "left" else len(want.segment) - n
    offset = len(row.segment) - len(want.segment) if padding == "left" else 0
    found = row.image_start[: len(used)][used]
    np.testing.assert_array_equal(found - offset, want.image_start[used] - moved)
    if want.pixels is not None:
        np.testing.assert_array_equal(row.pixels[: len(used)][used], want.pixels[used])
        return
    patches = int(want.grid.prod(axis=1).sum())
    np.testing.assert_array_equal(row.grid[: len(used)], want.grid)
    np.testing.assert_array_equal(row.patches[:patches], want.patches[:patches])
    assert not row.patches[patches:].any()


@pytest.mark.long
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("kind", ["llava", "Qwen3VL"])
def test_rows_are_those_of_embed(kind, padding, records, data, tmp_path):
    if kind == "llava":
        folder = write_llava(tmp_path / "hf", data, "float32")
    else:
        folder = write_qwen_vl(tmp_path / "hf", data, kind)
    model = jaxvlm.load(folder)
    found = rows_of(model, records, padding)
    assert not found.problems and len(found.examples) == 10
    seen = 0
    for side in (found.queries, found.documents):
        for numbers, batch in found.items(side.name, np.arange(4), 4):
            for row, number in enumerate(numbers.tolist()):
                if number >= 0:
                    own = Batch(*(None if x is None else x[row] for x in batch))
                    assert_same_row(own, alone(model, side.items[number]), padding)
                    seen += 1
    assert seen == 10 + 16
    pairs, meta = next(found.train(np.arange(2)))
    for row, example in enumerate(meta.example.tolist()):
        own = Batch(*(None if x is None else x[row] for x in pairs.query))
        query = found.queries.items[found.corpus.query[example]]
        assert_same_row(own, alone(model, query), padding)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["clip", "siglip2"])
def test_rows_of_dual_encoders_give_its_embeddings(kind, tmp_path):
    """Captions and images of an encoder's folder, as ``encode_text`` and ``encode_image``."""
    rng = np.random.default_rng(1)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(
            tmp_path / f"{i}.png"
        )
    texts = ["a red circle", "blue", "the photo of two big red square", "big big", "a"]
    lines = [{"query": text, "positive_image": f"{i}.png"} for i, text in enumerate(texts)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    model = jaxvlm.load(write(tmp_path / "hf", kind))
    rows = TextCollator(model.tokenizer, model.image_processor)
    data = PairDataset.from_config(DataConfig(train=str(path), batch_size=5), rows)
    (_, said), (_, shown) = (next(data.items(s, np.arange(8), 8)) for s in ("query", "document"))

    def embeddings(verb, *arrays):
        run = jax.jit(lambda params, *x: getattr(model.model.module(params), verb)(*x))
        return np.asarray(run(model.params, *arrays)).reshape(8, -1)[:5]

    found = embeddings("encode_text", said.tokens, said.segment, said.positions[:, 0])
    np.testing.assert_allclose(found, model.encode_text(texts), atol=1e-5)
    images = (shown.pixels[:, 0],) if kind == "clip" else (shown.patches, shown.grid)
    found = embeddings("encode_image", *images)
    paths = [str(tmp_path / f"{i}.png") for i in range(5)]
    np.testing.assert_allclose(found, model.encode_image(paths), atol=1e-5)
