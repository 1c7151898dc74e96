"""Images of pairs whose visual tokens are known: these come in their pixels' place."""

import numpy as np
import pytest
from pair_data import assert_equal, dataset, shapes, take, text_collator, text_tokenizer
from PIL import Image

from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.images.processor import Processor
from jaxvlm.data.page_allocation import TokenShape
from jaxvlm.data.pairs.collate_prompt_items import PromptCollator
from jaxvlm.data.pairs.collate_texts import TextCollator
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.types import Span

SIZES = [(8, 8), (24, 16), (16, 40), (32, 16)]
PATCHING = Patching(4, 2, 2, "cthw")
AS_IT_IS = image_files.Preparation(lambda image: np.asarray(image), "as it is")


def rows_of(kind, chat_tokenizer):
    """Rows of a kind of model, and its tower's tokens of an image; 0: one of each patch."""

    def span(width, height):
        place = np.indices((1, height // 8, width // 8)).reshape(3, -1).astype(np.int32)
        count = place.shape[1]
        return Span(
            np.full(count, chat_tokenizer.image_id, np.int32), np.ones(count, np.int32), place, 1
        )

    if kind == "patches":
        return PromptCollator(
            chat_tokenizer, image_files.ImageFormat(AS_IT_IS, 0, span, False, PATCHING)
        ), 0
    if kind == "embeddings of patches":
        how = (AS_IT_IS, 0, None, (0.5,) * 3, (0.5,) * 3, PATCHING)
        return TextCollator(text_tokenizer(), Processor(*how, max_patches=64)), 1
    return text_collator(), 1


@pytest.fixture
def shown(tmp_path):
    rng, made = np.random.default_rng(0), []
    for i, (width, height) in enumerate(4 * SIZES):
        path = str(tmp_path / f"{i}.png")
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        made.append(Example(path, Item.of(f"w{i}", path), Item.of("w1", path)))
    return made


@pytest.mark.parametrize("kind", ["squares", "patches", "embeddings of patches"])
def test_tokens_come_in_the_place_of_pixels(kind, shown, chat_tokenizer, monkeypatch):
    rows, count = rows_of(kind, chat_tokenizer)
    whole = take(dataset(shown, rows, batch_size=4).train(np.arange(4)), 4)
    data = dataset(shown, rows, batch_size=4)
    made = data.allocate_tokens(count, TokenShape(3, np.float32))
    assert made.windows == ((1,) if count else (128,))  # room for a kernel's least
    known, left = {}, set()
    for pairs, _ in whole:
        key, size = pairs.query.image_key[:, 0], np.ones(4, int)
        if not count:
            size = pairs.query.grid[:, 0].prod(-1)
        for k, n in zip(key, size.tolist()):
            if k[0] % 2:
                known[k.tobytes()] = np.full((n, 3), k[1], np.float32)
            else:
                left.add(k.tobytes())
    assert known and left
    decode, decoded = image_files.decode, []
    monkeypatch.setattr(image_files, "decode", lambda *x: decoded.append(x) or decode(*x))
    data.look_up(known.get, 0.0)
    for (pairs, meta), (plain, of) in zip(take(data.train(np.arange(4)), 4), whole):
        np.testing.assert_array_equal(meta.example, of.example)
        for got, want in ((pairs.query, plain.query), (pairs.document, plain.document)):
            _check(got, want, known, count)
    # The batches of three more steps may be read ahead, and the two sides share what is decoded.
    assert 0 < len(decoded) <= 2 * len(left)
    _, found = next(data.items("query", np.arange(4), 4))
    assert found.stored is None and (found.pixels is None or found.pixels.any((1, 2, 3, 4)).all())


def _check(got, want, known, count):
    """Pixels or tokens, the latter where they are known; all else as it was."""
    new = {"stored", "is_stored", "pixels", "patches", "grid"}
    assert_equal(got._replace(**dict.fromkeys(new)), want._replace(**dict.fromkeys(new)))
    assert {n: x for n, x in shapes(got).items() if n not in ("stored", "is_stored")} == shapes(
        want
    )
    lead = got.image_start.size
    here = got.is_stored.reshape(lead)
    given, whole = ("patches" if got.pixels is None else "pixels"), got.stored
    whole = whole.reshape(lead, -1, 3)
    for row, key in enumerate(got.image_key.reshape(lead, 4)):
        pixels = getattr(got, given).reshape(lead, -1)[row]
        tokens = known.get(key.tobytes())
        assert here[row] == (tokens is not None)
        if tokens is None:
            np.testing.assert_array_equal(pixels, getattr(want, given).reshape(lead, -1)[row])
            assert not whole[row].any()
        else:
            assert not pixels.any()
            np.testing.assert_array_equal(whole[row, : len(tokens)], tokens)
            assert not whole[row, len(tokens) :].any()
    if not count:
        np.testing.assert_array_equal(got.grid, want.grid)


def test_a_share_is_decoded_all_the_same(shown):
    """To be compared: other images in each pass, the same in each run."""
    data = dataset(shown, text_collator(), batch_size=4)
    data.allocate_tokens(1, TokenShape(3, np.float32))
    data.look_up(lambda key: np.ones((1, 3), np.float32), 0.5)
    runs = [
        [pairs.query.is_stored.sum() for pairs, _ in take(data.train(np.arange(4)), 24)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and 0.3 < np.sum(runs[0]) / 96 < 0.7
    assert len(set(np.reshape(runs[0], (6, 4)).sum(1).tolist())) > 1
