"""Batches of pairs: the same on any split and after any kill, rows as for inference."""

import dataclasses
import io
import json
import logging
import pathlib
import tarfile

import jax
import numpy as np
import pytest
from pair_data import (
    BASE,
    assert_equal,
    dataset,
    shapes,
    squares,
    take,
    text_collator,
    text_tokenizer,
    texts,
)
from PIL import Image

from jaxvlm.data.errors import DataError
from jaxvlm.data.image_inputs import ImageCache
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.pairs.collate_prompt_items import PromptCollator
from jaxvlm.data.pairs.collate_texts import TextCollator
from jaxvlm.data.pairs.dataset import PairDataset
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.prefetch import resume_step
from jaxvlm.types import Span


@pytest.mark.parametrize("kind", ["text", "prompt"])
def test_batch_shapes(kind, examples, prompt_collator):
    rows = {"text": text_collator(), "prompt": prompt_collator}[kind]
    pairs, _ = next(dataset(examples, rows, max_negatives=2).train(np.arange(8)))
    T = pairs.document.tokens.shape[2]
    assert shapes(pairs.document) == {
        "tokens": ((8, 3, T), "int32"),
        "loss_weight": ((8, 3, T), "float32"),
        "positions": ((8, 3, 1, T), "int32"),
        "segment": ((8, 3, T), "int32"),
        "pixels": ((8, 3, 1, 8, 8, 3), "uint8"),
        "image_start": ((8, 3, 1), "int32"),
        "image_key": ((8, 3, 1, 4), "uint32"),
    }
    assert shapes(pairs._replace(query=None, document=None)) == {
        "valid": ((8, 3), "bool"),
        "query_key": ((8,), "int32"),
        "document_key": ((8, 3), "int32"),
        "example_id": ((8,), "int32"),
    }
    assert pairs.query.tokens.shape[0] == 8 and pairs.query.pixels.shape == (8, 1, 8, 8, 3)


@pytest.mark.parametrize("kind", ["text", "prompt"])
def test_any_split_of_rows_and_any_start(kind, examples, prompt_collator):
    rows = {"text": text_collator(), "prompt": prompt_collator}[kind]
    more = {"flip": True, "max_shift": 2, "max_negatives": 1, "tasks": "homogeneous"}
    whole = take(dataset(examples, rows, **more).train(np.arange(8)), 8)
    for split in (np.arange(8).reshape(2, 4), np.arange(8).reshape(4, 2)[1:3], [[5, 0]]):
        for local in split:
            fresh = dataset(examples, rows, **more, workers=2, image_cache_mb=0)
            for step, (part, meta) in enumerate(take(fresh.train(np.asarray(local), 5), 3), 5):
                want, of = whole[step]
                assert_equal(part, jax.tree.map(lambda x, rows=local: x[rows], want))
                np.testing.assert_array_equal(meta.example, of.example[local])
    assert [p.example_id.tolist() for p, _ in whole[:2]] == [[*range(8)], [*range(8, 16)]]


def test_an_epoch_is_every_example_and_no_batch_has_one_twice(examples):
    data = dataset(examples, text_collator())
    assert data.steps_per_epoch == 7
    seen = []
    for pairs, meta in take(data.train(np.arange(8)), 7):
        seen += meta.example.tolist()
        for keys in (pairs.query_key, pairs.document_key[:, 0]):
            assert len(set(keys.tolist())) == 8
        for row, example in enumerate(meta.example.tolist()):
            found = data.examples[example]
            assert pairs.valid[row].tolist() == [k <= len(found.negatives) for k in range(4)]
            named = [data.corpus.contents[k] for k in pairs.document_key[row] if k >= 0]
            items = (found.positive, *found.negatives)
            assert named == [" ".join(filter(None, item.content))[:80] for item in items]
    assert set(seen) == set(range(50))


def test_rows_of_texts_and_images_are_those_of_inference(examples):
    """What ``Encoder.encode_text`` and ``encode_image`` hand to the model."""
    rows = text_collator()
    data = dataset(examples, rows)
    prepare = image_files.squares(8)
    kinds = set()
    for numbers, batch in data.items("document", np.arange(8), 8):
        for row, number in enumerate(numbers.tolist()):
            item = data.documents.items[number] if number >= 0 else Item()
            kinds.add((bool(item.words), bool(item.image)))
            if item.words:
                (ids,) = rows.tokenizer.encode([item.words])
                tokens, segment = rows.tokenizer.pad([ids], 1, batch.tokens.shape[1])
                np.testing.assert_array_equal(batch.tokens[row], tokens[0])
                np.testing.assert_array_equal(batch.segment[row], segment[0])
            else:
                assert not batch.segment[row].any()
            assert batch.image_start[row, 0] == (0 if item.image else -1)
            if item.image:
                pixels = image_files.load(item.image, prepare)
                np.testing.assert_array_equal(batch.pixels[row, 0], pixels)
                decoded = ImageCache(prepare, 10**6, 1).get(item.image)
                key = image_files.key(decoded.digest, prepare.fingerprint)
                np.testing.assert_array_equal(batch.image_key[row, 0], key)
            else:
                assert not batch.pixels[row].any() and not batch.image_key[row].any()
        assert (batch.positions[:, 0] == np.arange(batch.tokens.shape[1])).all()
    assert kinds == {(True, False), (False, True), (True, True), (False, False)}


def test_fields_that_no_record_needs_are_none(examples, prompt_collator):
    for rows in (text_collator(), prompt_collator):
        pairs, _ = next(dataset(texts(), rows).train(np.arange(8)))
        for batch in (pairs.query, pairs.document):
            for name in ("pixels", "image_start", "image_key", "patches"):
                assert getattr(batch, name) is None
        assert pairs.group is None and pairs.teacher is None and pairs.valid.all()
    path = next(e.query.image for e in examples if e.query.image)
    padded = TextCollator(text_tokenizer(see_padding=True), squares())
    shown = [Example(str(i), Item.of("", path), Item(f"w{i}")) for i in range(3)]
    data = dataset(shown, padded, batch_size=1)
    pairs, _ = next(data.train(np.arange(1)))
    assert pairs.query.tokens.shape == (1, 0) and pairs.query.pixels.any()
    with pytest.raises(DataError, match="it has an image, but the model takes no images"):
        dataset(shown, TextCollator(text_tokenizer()))


def test_lengths_are_the_smallest_that_fit_the_whole_batch(examples, prompt_collator):
    data = dataset(examples, prompt_collator, buckets=6)
    queries, documents = data.sequence_shapes
    assert len(queries) == 3 and queries[-1][0] % 8 == 0
    met = set()
    for pairs, _ in take(data.train(np.arange(8)), 20):
        for rows, found in ((pairs.query, queries), (pairs.document, documents)):
            length, tokens = rows.tokens.shape[-1], (rows.segment > 0).sum(-1)
            assert length == min(n for n, _ in found if n >= tokens.max())
            met.add(length)
    assert len(met) > 1
    whole = text_collator(see_padding=True)
    pairs, _ = next(dataset(texts(), whole).train(np.arange(8)))
    assert pairs.query.tokens.shape == (8, 24) and pairs.query.segment.all()


def test_items_are_each_once_on_any_split(examples, prompt_collator):
    data = dataset(examples, prompt_collator)
    for side, found in (("query", data.queries), ("document", data.documents)):
        whole = list(data.items(side, np.arange(8), 8))
        numbers = np.concatenate([n for n, _ in whole])
        assert numbers[numbers >= 0].tolist() == list(range(len(found.items)))
        assert len(set(found.items)) == len(found.items)
        for local in ([0, 1, 2, 3], [4, 5, 6, 7]):
            for (n, batch), (m, part) in zip(
                whole, data.items(side, np.asarray(local), 8), strict=True
            ):
                np.testing.assert_array_equal(n[local], m)
                assert_equal(jax.tree.map(lambda x, rows=local: x[rows], batch), part)


def test_state_resumes_and_names_what_changed(examples):
    data = dataset(examples, text_collator())
    batches = data.train(np.arange(8))
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    want, of = next(batches)
    fresh = dataset(examples, text_collator(), workers=2, prefetch=1)
    step = resume_step(state, fresh.fingerprint())
    again, meta = next(fresh.train(np.arange(8), step))
    assert step == 3 and meta.example.tolist() == of.example.tolist()
    assert_equal(want, again)
    for more, says in (
        ({"seed": 1}, "seed 0 -> 1"),
        ({"tasks": "homogeneous"}, r"data\.pairs\.tasks 'mixed' -> 'homogeneous'"),
        ({"max_query_length": 5}, "content"),
    ):
        with pytest.raises(DataError, match=says):
            resume_step(state, dataset(examples, text_collator(), **more).fingerprint())
    with pytest.raises(DataError, match="content"):
        resume_step(state, dataset(examples[::-1], text_collator()).fingerprint())


def test_the_scores_belong_to_the_run(examples):
    def fingerprint(score):
        scored = [e._replace(scores=(score,) * (1 + len(e.negatives))) for e in examples]
        return dataset(scored, text_collator()).fingerprint()

    with pytest.raises(DataError, match="changed since the checkpoint: content"):
        resume_step({"step": 1, "fingerprint": fingerprint(0.5)}, fingerprint(0.6))


def test_an_image_that_fails_while_running(tmp_path, caplog, prompt_collator):
    paths = [str(tmp_path / f"{i}.png") for i in range(3)]
    for i, path in enumerate(paths):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    made = [
        Example("query", Item.of("", paths[0]), Item("w1"), (Item("w2"),)),
        Example("positive", Item("w3"), Item.of("", paths[1]), (Item("w2"),)),
        Example("negative", Item("w4"), Item("w5"), (Item.of("", paths[2]),)),
        *[e._replace(negatives=(Item("w2"),)) for e in texts(20)[10:15]],
    ]
    for path in paths:
        data = pathlib.Path(path).read_bytes()
        pathlib.Path(path).write_bytes(data[:50])  # the header is good
    fixed = prompt_collator.image_format._replace(
        fixed=True
    )  # else a PNG is read to its end beforehand
    assert len(dataset(made, prompt_collator).problems) == 3
    for rows in (text_collator(), prompt_collator._replace(image_format=fixed)):
        data = dataset(made, rows)
        assert not data.problems
        with caplog.at_level(logging.WARNING, "jaxvlm.data"):
            for pairs, meta in take(data.train(np.arange(8)), 2):
                valid = {data.examples[e].id: pairs.valid[i] for i, e in enumerate(meta.example)}
                assert valid["query"].tolist() == valid["positive"].tolist() == [False, False]
                assert valid["negative"].tolist() == [True, False] and valid["t10"].all()
                assert (pairs.document_key >= 0).tolist() == pairs.valid.tolist()
                assert not pairs.query.segment[list(valid).index("query")].any()
        assert {p.id for p in data.skipped} == {"query", "positive", "negative"}
        assert "truncated" in caplog.text
        numbers = np.concatenate([n for n, _ in data.items("document", np.arange(4), 4)])
        assert len(set(numbers.tolist()) - {-1}) == len(data.documents.items) - 2
    with pytest.raises(DataError, match="truncated"):
        next(dataset(made, text_collator(), on_bad_record="refuse").train(np.arange(8)))


def test_augmented_images_have_keys_of_their_own(examples):
    shown = [e for e in examples if e.query.image][:8]
    plain, moved = (
        dataset(shown, text_collator()),
        dataset(shown, text_collator(), flip=True, max_shift=3),
    )

    def keys(data):
        found = [
            p.query.image_key[p.query.image_start >= 0] for p, _ in take(data.train(range8), 9)
        ]
        return {key.tobytes() for part in found for key in part}

    range8 = np.arange(8)
    assert len(keys(plain)) == 8 and len(keys(moved)) > 40


def test_images_of_any_size_become_patches(tmp_path, chat_tokenizer):
    """As of Qwen-VL: rows have room for patches as for tokens."""
    patching, rng = Patching(4, 2, 2, "cthw"), np.random.default_rng(0)
    sizes = [(8, 8), (24, 16), (16, 40), (64, 32)]
    paths = [str(tmp_path / f"{i}.png") for i in range(4)]
    for path, (width, height) in zip(paths, sizes, strict=True):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    prepare = image_files.Preparation(lambda image: np.asarray(image), "as it is")

    def span(width, height):
        return Span.of(chat_tokenizer.image_id, width // 8 * height // 8)

    images = image_files.ImageFormat(prepare, 0, span, False, patching)
    made = [Example(p, Item.of("w1", p), Item.of("", p)) for p in paths]
    data = dataset(made, PromptCollator(chat_tokenizer, images), batch_size=2, max_length=99)
    for pairs, meta in take(data.train(np.arange(2)), 4):
        for row, example in enumerate(meta.example.tolist()):
            width, height = sizes[example]
            grid = pairs.query.grid[row, 0]
            assert grid.tolist() == [1, height // 4, width // 4]
            assert pairs.document.grid[row, 0, 0].tolist() == grid.tolist()
            cut = patching.cut(np.asarray(Image.open(paths[example])))
            np.testing.assert_array_equal(pairs.query.patches[row, : len(cut)], cut)
            assert not pairs.query.patches[row, len(cut) :].any()
        assert pairs.query.patches.shape[1] % 128 == 0


def test_shards_of_captions_are_trained_on(tmp_path):
    """From a tar to a batch, in either direction."""
    colors = [(i * 12, 0, 255 - i * 12) for i in range(20)]
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for i, color in enumerate(colors):
            image = io.BytesIO()
            Image.new("RGB", (9, 7), color).save(image, "PNG")
            for name, data in ((f"{i}.png", image.getvalue()), (f"{i}.txt", f"w{i}".encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    turned = (("txt", "query"), ("png", "positive_image"))
    digests = set()
    for mapping in ((), turned):
        config = dataclasses.replace(BASE, train=str(tmp_path / "*.tar"), column_mapping=mapping)
        data = PairDataset.from_config(config, text_collator())
        digests.add(data.fingerprint()["content"])
        found, meta = next(data.train(np.arange(8)))
        shown, side = (found.query, 0) if mapping is not turned else (found.document, 1)
        for row, example in enumerate(meta.example.tolist()):
            pixels = shown.pixels[row, 0, 0] if side else shown.pixels[row, 0]
            assert (pixels == colors[example]).all()
    assert len(digests) == 2
