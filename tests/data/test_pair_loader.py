"""Batches of pairs: the same on any split and after any kill, rows as for inference."""

import dataclasses
import io
import json
import logging
import pathlib
import tarfile
import time

import jax
import numpy as np
import pytest
import tokenizers
from PIL import Image
from tokenizers import models, pre_tokenizers, processors

from jaxvlm.config import ConfigError, DataConfig, PairsConfig
from jaxvlm.data import images, tokenizer
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.examples import Example, Item
from jaxvlm.data.iterate import resume_step
from jaxvlm.data.loader import Dataset
from jaxvlm.data.pair_loader import PairDataset
from jaxvlm.data.patches import Patching
from jaxvlm.data.processor import Processor
from jaxvlm.data.prompt_items import PromptRows
from jaxvlm.data.text_rows import TextRows
from jaxvlm.data.texts import TextTokenizer
from jaxvlm.types import Span, TextStyle

BASE = DataConfig(batch_size=8, max_length=32, max_skip_share=0.5)
PAIRS = {f.name for f in dataclasses.fields(PairsConfig)}


def text_tokenizer(**style):
    words = [*(f"w{i}" for i in range(60)), "query:", "find"]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    return TextTokenizer(backend, TextStyle(**{"max_length": 24} | style), 0)


def squares():
    return Processor(images.squares(8), 8, None, (0.5,) * 3, (0.5,) * 3)


def text_rows(**style):
    return TextRows(text_tokenizer(**style), squares())


@pytest.fixture(scope="module")
def chat_tokenizer():
    words = " ".join(f"w{i}" for i in range(60))
    return tokenizer.build([words, "represent the user's input . find it NULL"])


@pytest.fixture(scope="module")
def prompt_rows(chat_tokenizer):
    before = [chat_tokenizer.unk_id]

    def span(width, height):
        return Span.of(chat_tokenizer.image_id, 1 + width // 8, before, before)

    pictures = images.PictureFormat(images.squares(8), 8, span, fixed=False)
    return PromptRows(chat_tokenizer, pictures)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """Texts, pictures and both, on both sides; some positives are of several queries."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)

    def item(kind, words, name):
        path = ""
        if kind:
            path = str(folder / f"{name}.png")
            if not pathlib.Path(path).exists():
                pixels = rng.integers(0, 256, (8, 8 + 8 * (len(name) % 3), 3), np.uint8)
                Image.fromarray(pixels).save(path)
        return Item.of("" if kind == 2 else words, path)

    made = []
    for i in range(50):
        words = " ".join(f"w{(i * 7 + k) % 60}" for k in range(1 + i % 9))
        query = item(i % 3, words, f"q{i}")
        positive = item((i // 3) % 3, f"w{i % 20} w{i % 7}", f"d{i % 30}")
        negatives = tuple(item(k % 3, f"w{i} w{k} w59", f"n{i}{k}") for k in range(i % 4))
        made.append(Example(f"e{i}", query, positive, negatives, task=f"t{i % 2}"))
    return made


def dataset(examples, rows, problems=(), **more):
    pairs = PairsConfig(**{k: v for k, v in more.items() if k in PAIRS})
    rest = {k: v for k, v in more.items() if k not in PAIRS and k not in ("seed", "document_rows")}
    config = dataclasses.replace(BASE, pairs=pairs, **rest)
    own = {k: v for k, v in more.items() if k in ("seed", "document_rows")}
    return PairDataset.from_config(config, rows, read=(list(examples), list(problems)), **own)


def take(batches, count):
    out = [next(batches) for _ in range(count)]
    batches.close()
    return out


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def shapes(batch):
    return {n: (v.shape, str(v.dtype)) for n, v in batch._asdict().items() if v is not None}


@pytest.mark.parametrize("kind", ["text", "prompt"])
def test_batch_shapes(kind, examples, prompt_rows):
    rows = {"text": text_rows(), "prompt": prompt_rows}[kind]
    pairs, meta = next(dataset(examples, rows, max_negatives=2).train(np.arange(8)))
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
        "there": ((8, 3), "bool"),
        "query_key": ((8,), "int32"),
        "document_key": ((8, 3), "int32"),
        "example_id": ((8,), "int32"),
    }
    assert pairs.query.tokens.shape[0] == 8 and pairs.query.pixels.shape == (8, 1, 8, 8, 3)
    np.testing.assert_array_equal(meta.query_tokens, (pairs.query.segment > 0).sum(-1))
    np.testing.assert_array_equal(meta.document_tokens, (pairs.document.segment > 0).sum(-1))


@pytest.mark.parametrize("kind", ["text", "prompt"])
def test_any_split_of_rows_and_any_start(kind, examples, prompt_rows):
    rows = {"text": text_rows(), "prompt": prompt_rows}[kind]
    more = {"flip": True, "shift": 2, "max_negatives": 1, "tasks": "homogeneous"}
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
    data = dataset(examples, text_rows())
    assert data.steps_per_epoch == 7
    seen = []
    for pairs, meta in take(data.train(np.arange(8)), 7):
        seen += meta.example.tolist()
        for keys in (pairs.query_key, pairs.document_key[:, 0]):
            assert len(set(keys.tolist())) == 8
        for row, example in enumerate(meta.example.tolist()):
            found = data.examples[example]
            assert pairs.there[row].tolist() == [k <= len(found.negatives) for k in range(4)]
            named = [data.corpus.contents[k] for k in pairs.document_key[row] if k >= 0]
            items = (found.positive, *found.negatives)
            assert named == [" ".join(filter(None, item.content))[:80] for item in items]
    assert set(seen) == set(range(50))


def test_rows_of_texts_and_pictures_are_those_of_inference(examples):
    """What ``Encoder.encode_text`` and ``encode_image`` hand to the model."""
    rows = text_rows()
    data = dataset(examples, rows)
    prepare = images.squares(8)
    kinds = set()
    for numbers, batch in data.items("document", np.arange(8), 8):
        for row, number in enumerate(numbers.tolist()):
            item = data.documents.items[number] if number >= 0 else Item()
            kinds.add((bool(item.words), bool(item.image)))
            if item.words:
                (ids,) = rows.tokenizer.encode([item.words])
                tokens, segment = rows.tokenizer.rows([ids], 1, batch.tokens.shape[1])
                np.testing.assert_array_equal(batch.tokens[row], tokens[0])
                np.testing.assert_array_equal(batch.segment[row], segment[0])
            else:
                assert not batch.segment[row].any()
            assert batch.image_start[row, 0] == (0 if item.image else -1)
            if item.image:
                pixels = images.load(item.image, prepare)
                np.testing.assert_array_equal(batch.pixels[row, 0], pixels)
                decoded = images.Pictures(prepare, 10**6, 1).get(item.image)
                key = images.key(decoded.digest, prepare.fingerprint)
                np.testing.assert_array_equal(batch.image_key[row, 0], key)
            else:
                assert not batch.pixels[row].any() and not batch.image_key[row].any()
        assert (batch.positions[:, 0] == np.arange(batch.tokens.shape[1])).all()
    assert kinds == {(True, False), (False, True), (True, True), (False, False)}


def texts(count=20, **more):
    return [Example(f"t{i}", Item(f"w{i}"), Item(f"w{i + 20} w1"), **more) for i in range(count)]


def test_fields_that_no_record_needs_are_none(examples, prompt_rows):
    for rows in (text_rows(), prompt_rows):
        pairs, _ = next(dataset(texts(), rows).train(np.arange(8)))
        for batch in (pairs.query, pairs.document):
            for name in ("pixels", "image_start", "image_key", "patches"):
                assert getattr(batch, name) is None
        assert pairs.group is None and pairs.teacher is None and pairs.there.all()
    path = next(e.query.image for e in examples if e.query.image)
    padded = TextRows(text_tokenizer(see_padding=True), squares())
    shown = [Example(str(i), Item.of("", path), Item(f"w{i}")) for i in range(3)]
    data = dataset(shown, padded, batch_size=1)
    pairs, _ = next(data.train(np.arange(1)))
    assert pairs.query.tokens.shape == (1, 0) and pairs.query.pixels.any()
    with pytest.raises(DataError, match="a picture, and the model takes none"):
        dataset(shown, TextRows(text_tokenizer()))


def test_lengths_are_the_smallest_that_fit_the_whole_batch(examples, prompt_rows):
    data = dataset(examples, prompt_rows, buckets=6)
    queries, documents = data.row_shapes
    assert len(queries) == 3 and queries[-1][0] % 8 == 0
    met = set()
    for pairs, meta in take(data.train(np.arange(8)), 20):
        for shape, found, tokens in (
            (pairs.query.tokens.shape, queries, meta.query_tokens),
            (pairs.document.tokens.shape, documents, meta.document_tokens),
        ):
            assert shape[-1] == min(n for n, _ in found if n >= tokens.max())
            met.add(shape[-1])
    assert len(met) > 1
    whole = text_rows(see_padding=True)
    pairs, _ = next(dataset(texts(), whole).train(np.arange(8)))
    assert pairs.query.tokens.shape == (8, 24) and pairs.query.segment.all()


def test_long_texts_are_cut_and_counted(chat_tokenizer, prompt_rows, caplog):
    long = Item(" ".join(f"w{k}" for k in range(40)))
    made = [Example("a", long, long), Example("b", Item("w1"), Item("w2"))]
    more = {"max_query_length": 10, "batch_size": 1}
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        data = dataset(made, text_rows(), **more)
    assert data.cut == {"query": 1, "document": 1}
    assert "1 of 2 query texts are longer than 10 tokens and were cut" in caplog.text
    assert data.queries.encoded.ids(0).tolist() == [1, *range(4, 12), 2]
    assert len(data.documents.encoded.ids(0)) == 24  # the model's, less than data.max_length

    assert "1 of 2 document texts are longer than 24 tokens and were cut" in caplog.text
    with pytest.raises(DataError, match="rows of 2 tokens have no room beside 2 special ones"):
        dataset(made, text_rows(), max_query_length=2)

    data = dataset(made, prompt_rows, max_query_length=20, max_length=60, batch_size=1)
    assert data.cut == {"query": 1, "document": 0}
    whole, cut = data.documents.encoded.ids(0), data.queries.encoded.ids(0)
    words = [chat_tokenizer.backend.token_to_id(f"w{k}") for k in range(40)]
    at = whole.tolist().index(words[0])
    assert len(cut) == 20 and whole.tolist()[at : at + 40] == words
    rest = len(whole) - at - 40  # the header of the answer, which the vector stands on
    assert cut.tolist() == whole[: 20 - rest].tolist() + whole[-rest:].tolist()


def test_a_picture_is_never_cut(examples, prompt_rows):
    example = next(e for e in examples if e.query.image and e.query.words)
    shown = [example._replace(negatives=(), positive=Item("w1"))] * 1
    (whole,) = dataset(shown, prompt_rows, batch_size=1).queries.num_tokens
    words = len(example.query.words.split())
    least = int(whole) - words
    for length in (int(whole), least + 1, least):
        data = dataset(shown, prompt_rows, batch_size=1, max_query_length=length)
        assert data.queries.num_tokens.tolist() == [length]
        assert data.cut["query"] == (length < whole)
        pairs, _ = next(data.train(np.arange(1)))
        assert (pairs.query.image_start >= 0).all()
    with pytest.raises(DataError, match=rf"longer than the longest row \({least} of {least - 1}"):
        dataset(shown, prompt_rows, batch_size=1, max_query_length=least - 1)


def test_negatives_are_drawn_anew_each_pass():
    negatives = tuple(Item(f"w{k} w2") for k in range(6))
    made = [e._replace(negatives=negatives, scores=(1, *range(6))) for e in texts(8)]
    data = dataset(made, text_rows(), max_negatives=2)
    drawn = set()
    for pairs, _ in take(data.train(np.arange(8)), 20):
        assert pairs.there.all() and pairs.teacher.shape == (8, 3)
        for keys, scores in zip(pairs.document_key, pairs.teacher, strict=True):
            names = [data.corpus.contents[key] for key in keys[1:]]
            assert names == [f"w{int(score)} w2" for score in scores[1:]]
            drawn.add(tuple(names))
    assert len(drawn) == 15
    assert dataset(made, text_rows(), max_negatives=0).corpus.num_documents == 1


def test_labels_scores_and_known_positives(caplog):
    made = [
        Example("a", Item("w1"), Item("w2"), (Item("w4"), Item("w3")), "x", (1.0, 0.5, 0.25)),
        Example("b", Item("w5"), Item("w6"), (), "x", (0.5,)),
        Example("c", Item("w7"), Item("w8"), (), "", (0.75,)),
        Example("d", Item("w1"), Item("w3"), (), "y", (1.0,)),
    ]
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        data = dataset(made, text_rows(), batch_size=1)
    assert "1 hard negatives were left out: they are positives of the same query" in caplog.text
    found = {m.example[0]: p for p, m in take(data.train(np.arange(1)), 4)}
    group = [int(found[i].group[0]) for i in range(4)]
    assert group[0] == group[1] >= 0 > group[2] and group[3] not in group[:3]
    assert found[0].teacher.tolist() == [[1.0, 0.5]] and found[2].teacher.tolist() == [[0.75, 0.0]]
    assert found[2].there.tolist() == [[True, False]]
    # w1 finds w2 and w3, its own, and w6, of its label; w5 likewise w2.
    names = [item.text for item in data.documents.items]
    relevant = [[names[d] for d in row] for row in data.relevance()]
    assert relevant == [["w2", "w6", "w3"], ["w2", "w6"], ["w8"]]
    queries, documents, scores = data.scored()
    assert [names[d] for d in documents] == ["w2", "w4", "w6", "w8", "w3"]
    assert queries.tolist() == [0, 0, 1, 2, 0] and scores.tolist() == [1.0, 0.5, 0.5, 0.75, 1.0]


def test_items_are_each_once_on_any_split(examples, prompt_rows):
    data = dataset(examples, prompt_rows)
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


def test_relevance_is_by_content():
    made = [
        Example("a", Item("w1"), Item("w2", instruction="one")),
        Example("b", Item("w1", instruction="find "), Item("w3")),
        Example("c", Item("w4"), Item("w2", instruction="two")),
    ]
    data = dataset(made, text_rows(), batch_size=1)
    assert [list(x) for x in data.relevance()] == [[0, 1, 2], [0, 1, 2], [0, 2]]
    keys = {m.example[0]: p for p, m in take(data.train(np.arange(1)), 3)}
    assert keys[0].query_key == keys[1].query_key != keys[2].query_key
    assert keys[0].document_key == keys[2].document_key != keys[1].document_key


def test_instructions_stand_before_texts(prompt_rows):
    made = [Example("a", Item("w1"), Item("w2")), Example("b", Item("w1", "", "find "), Item("w3"))]
    data = dataset(made, text_rows(), batch_size=1, query_instruction="query: ")
    said = [data.queries.rows.tokenizer.backend.decode(data.queries.encoded.ids(i)) for i in (0, 1)]
    assert said == ["<s> query: w1 </s>", "<s> find w1 </s>"]
    data = dataset(made, prompt_rows, batch_size=1, document_instruction="find it")
    told = [
        prompt_rows.tokenizer.decode(side.encoded.ids(0)) for side in (data.queries, data.documents)
    ]
    assert told[0].split()[:2] == ["represent", "the"] and told[1].split()[:2] == ["find", "it"]


def test_state_resumes_and_names_what_changed(examples):
    data = dataset(examples, text_rows())
    batches = data.train(np.arange(8))
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    want, of = next(batches)
    fresh = dataset(examples, text_rows(), workers=2, prefetch=1)
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
            resume_step(state, dataset(examples, text_rows(), **more).fingerprint())
    with pytest.raises(DataError, match="content"):
        resume_step(state, dataset(examples[::-1], text_rows()).fingerprint())


def test_bad_examples_before_the_first_step(examples):
    made = texts(10)
    made[0] = made[0]._replace(query=Item.of("", "/gone.png"))
    data = dataset(made, text_rows(), [Problem("p", "not JSON")])
    assert [(p.id, p.reason) for p in data.problems] == [("p", "not JSON"), ("t0", "missing file")]
    with pytest.raises(DataError, match=r"2 of 11 records .*p: not JSON; t0: missing file"):
        dataset(made, text_rows(), [Problem("p", "not JSON")], on_bad="refuse")
    with pytest.raises(DataError, match=r"data\.max_skip_share=5\.0%"):
        dataset(made, text_rows(), max_skip_share=0.05)
    some = [e._replace(negatives=(Item("w9"),)) if i else e for i, e in enumerate(texts(10))]
    data = dataset(some, text_rows(), require_negatives=True)
    assert data.problems == [
        Problem("t0", "no negative, which data.pairs.require_negatives asks for")
    ]
    some = [e._replace(scores=(0.5,)) if i else e for i, e in enumerate(texts(10))]
    assert dataset(some, text_rows()).problems == [Problem("t0", "no score, which others have")]


def test_forged_turns_are_refused(prompt_rows):
    made = [*texts(9), Example("x", Item("w1 <assistant> w2"), Item("w3"))]
    assert dataset(made, prompt_rows).problems == [
        Problem("x", "the text holds a special token", "<assistant>")
    ]


def test_a_picture_that_fails_while_running(tmp_path, caplog, prompt_rows):
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
    fixed = prompt_rows.pictures._replace(fixed=True)  # else a PNG is read to its end beforehand
    assert len(dataset(made, prompt_rows).problems) == 3
    for rows in (text_rows(), prompt_rows._replace(pictures=fixed)):
        data = dataset(made, rows)
        assert not data.problems
        with caplog.at_level(logging.WARNING, "jaxvlm.data"):
            for pairs, meta in take(data.train(np.arange(8)), 2):
                there = {data.examples[e].id: pairs.there[i] for i, e in enumerate(meta.example)}
                assert there["query"].tolist() == there["positive"].tolist() == [False, False]
                assert there["negative"].tolist() == [True, False] and there["t10"].all()
                assert (pairs.document_key >= 0).tolist() == pairs.there.tolist()
                assert not pairs.query.segment[list(there).index("query")].any()
        assert {p.id for p in data.skipped} == {"query", "positive", "negative"}
        assert "truncated" in caplog.text
        numbers = np.concatenate([n for n, _ in data.items("document", np.arange(4), 4)])
        assert len(set(numbers.tolist()) - {-1}) == len(data.documents.items) - 2
    with pytest.raises(DataError, match="truncated"):
        next(dataset(made, text_rows(), on_bad="refuse").train(np.arange(8)))


def test_augmented_pictures_have_keys_of_their_own(examples):
    shown = [e for e in examples if e.query.image][:8]
    plain, moved = dataset(shown, text_rows()), dataset(shown, text_rows(), flip=True, shift=3)

    def keys(data):
        found = [
            p.query.image_key[p.query.image_start >= 0] for p, _ in take(data.train(range8), 9)
        ]
        return {key.tobytes() for part in found for key in part}

    range8 = np.arange(8)
    assert len(keys(plain)) == 8 and len(keys(moved)) > 40


def test_pictures_of_any_size_become_patches(tmp_path, chat_tokenizer):
    """As of Qwen-VL: rows have room for patches as for tokens."""
    patching, rng = Patching(4, 2, 2, "cthw"), np.random.default_rng(0)
    sizes = [(8, 8), (24, 16), (16, 40), (64, 32)]
    paths = [str(tmp_path / f"{i}.png") for i in range(4)]
    for path, (width, height) in zip(paths, sizes, strict=True):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
    prepare = images.Preparation(lambda image: np.asarray(image), "as it is")

    def span(width, height):
        return Span.of(chat_tokenizer.image_id, width // 8 * height // 8)

    pictures = images.PictureFormat(prepare, 0, span, False, patching)
    made = [Example(p, Item.of("w1", p), Item.of("", p)) for p in paths]
    data = dataset(made, PromptRows(chat_tokenizer, pictures), batch_size=2, max_length=99)
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
            picture = io.BytesIO()
            Image.new("RGB", (9, 7), color).save(picture, "PNG")
            for name, data in ((f"{i}.png", picture.getvalue()), (f"{i}.txt", f"w{i}".encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    turned = PairsConfig(column_mapping=(("txt", "query"), ("png", "positive_image")))
    digests = set()
    for pairs in (PairsConfig(), turned):
        config = dataclasses.replace(BASE, train=str(tmp_path / "*.tar"), pairs=pairs)
        data = PairDataset.from_config(config, text_rows())
        digests.add(data.fingerprint()["content"])
        found, meta = next(data.train(np.arange(8)))
        shown, side = (found.query, 0) if pairs is not turned else (found.document, 1)
        for row, example in enumerate(meta.example.tolist()):
            pixels = shown.pixels[row, 0, 0] if side else shown.pixels[row, 0]
            assert (pixels == colors[example]).all()
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tasks": "one"}, r"data\.pairs\.tasks='one' is unknown; use one of mixed, homogeneous"),
        ({"batch_sampler": "some"}, "use one of no_duplicates, random"),
        ({"max_negatives": -2}, "max_negatives=-2 must be at least -1"),
        ({"max_query_length": -1}, "max_query_length=-1 must be at least 0"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 99}, "lower it to 20"),
    ],
)
def test_settings_are_checked(more, says):
    with pytest.raises(DataError, match=says):
        dataset(texts(), text_rows(), **more).train(np.arange(1))


def test_settings_that_nothing_would_read_are_refused(word_tokenizer):
    with pytest.raises(ConfigError, match=r"task_alpha=0\.5 is not read without tasks="):
        dataset(texts(), text_rows(), task_alpha=0.5)
    with pytest.raises(ConfigError, match=r"data\.packing=False is read of conversations alone"):
        dataset(texts(), text_rows(), packing=False)
    config = dataclasses.replace(BASE, pairs=PairsConfig(tasks="homogeneous"))
    with pytest.raises(DataError, match="pairs is set, but these data are conversations"):
        Dataset.from_config(config, word_tokenizer, image_size=8, num_patches=4, read=([], []))


def test_speed(capsys, prompt_rows):
    """Printed, not asserted, and with every argument's type checked: ids, and batches of them."""
    count = 300
    made = [
        Example(str(i), Item(f"w{i % 60} q{i} w1 w2 w3"), Item(f"w{i % 59} d{i} w4"))
        for i in range(count)
    ]
    said = []
    for name, rows in (("texts", text_rows()), ("prompts", prompt_rows)):
        start = time.perf_counter()
        data = dataset(made, rows, batch_size=64)
        data.sampler.batch(0)
        ready = time.perf_counter()
        take(data.train(np.arange(64)), 5)
        done = time.perf_counter()
        rate = 5 * 64 / (done - ready)
        said.append(f"{name}: {count:,} encoded in {ready - start:.2f} s, {rate:,.0f} examples/s")
    with capsys.disabled():
        print("\n" + "\n".join(said))
