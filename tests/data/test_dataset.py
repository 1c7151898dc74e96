"""Batches: the same on any split and after any kill; bad images counted and named."""

import dataclasses
import json
import logging
import pathlib

import numpy as np
import pytest
from PIL import Image

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations.dataset import Dataset, load_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.data.images.image_files import Preparation, squares
from jaxvlm.data.prefetch import resume_step
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.data.validate import validate
from jaxvlm.hf.families import anyres
from jaxvlm.types import Batch
from tests.data.conftest import llava, record

BASE = DataConfig(batch_size=4, max_length=64, max_images_per_sequence=3, max_skip_fraction=0.5)


def dataset(records, word_tokenizer, **more):
    known = {f.name for f in dataclasses.fields(DataConfig)}
    config = dataclasses.replace(BASE, **{k: v for k, v in more.items() if k in known})
    rest = {k: v for k, v in more.items() if k not in known}
    settings = {"image_size": 8, "num_patches": 4} | rest
    return load_dataset(config, word_tokenizer, read=(records, []), **settings)


def take(batches, count):
    out = [next(batches)[0] for _ in range(count)]
    batches.close()
    return out


def assert_equal(a: Batch, b: Batch):
    for name in Batch._fields:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y, name)


def test_batch_shapes(album, word_tokenizer):
    batch, meta = next(dataset(album(), word_tokenizer).train(np.arange(4)))
    found = {n: (v.shape, str(v.dtype)) for n, v in batch._asdict().items() if v is not None}
    assert found == {
        "tokens": ((4, 64), "int32"),
        "loss_weight": ((4, 64), "float32"),
        "positions": ((4, 1, 64), "int32"),
        "segment": ((4, 64), "int32"),
        "parent": ((4, 64), "int32"),
        "pixels": ((4, 3, 8, 8, 3), "uint8"),
        "image_start": ((4, 3), "int32"),
        "image_key": ((4, 3, 4), "uint32"),
        "example_id": ((4,), "int32"),
    }
    assert meta.num_sequences == 4


@pytest.mark.parametrize("more", [{}, {"packing": False}, {"share_images": False}])
def test_any_split_of_rows_and_any_start(album, word_tokenizer, more):
    augmented = {"flip": True, "max_shift": 2, "visual_mask": "prefix"} | more
    records = album()
    whole = take(dataset(records, word_tokenizer, **augmented).train(np.arange(4)), 12)
    for split in ([[0, 1], [2, 3]], [[3], [0, 2, 1]]):
        for rows in split:
            fresh = dataset(records, word_tokenizer, **augmented, workers=3, image_cache_mb=0)
            for step, part in enumerate(take(fresh.train(np.asarray(rows), 5), 7), 5):
                want = [None if v is None else v[rows] for v in whole[step]]
                assert_equal(part, Batch(*want))
    assert [b.example_id.tolist() for b in whole[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_pixels_are_the_records_images(album, word_tokenizer):
    from PIL import Image

    data = dataset(album(), word_tokenizer)
    for batch, meta in data.eval(np.arange(4), 4):
        for row, found in enumerate(meta.by_sequence()):
            want = []  # images of the row, in order, each group's once
            for _, source in found:
                for path in data.records[source].images:
                    if not want or want[-1] != path:
                        want.append(path)
            assert (batch.image_start[row] >= 0).sum() == len(want)
            for slot, path in enumerate(want):
                np.testing.assert_array_equal(batch.pixels[row, slot], np.asarray(Image.open(path)))
                assert batch.image_key[row, slot].any()
            assert not batch.pixels[row, len(want) :].any()


def test_augmentation_changes_with_the_pass_and_its_key_too(album, word_tokenizer):
    records = album(4, 1, 0)
    data = dataset(records, word_tokenizer, flip=True, max_shift=3)
    batches = take(data.train(np.arange(4)), 12)
    keys = {k.tobytes() for b in batches for k in b.image_key[b.image_start >= 0]}
    pixels = {p.tobytes() for b in batches for p in b.pixels[b.image_start >= 0]}
    assert len(keys) == len(pixels) > 8
    plain = take(dataset(records, word_tokenizer).train(np.arange(4)), 12)
    assert len({k.tobytes() for b in plain for k in b.image_key[b.image_start >= 0]}) == 4


def test_row_length_is_the_smallest_bucket(album, word_tokenizer):
    data = dataset(album(), word_tokenizer, packing=False, max_length=128, buckets=5)
    lengths = [length for length, patches in data.sequence_shapes if not patches]
    assert lengths == [24, 32, 56, 80, 128]
    for batch in take(data.train(np.arange(4)), 6):
        assert batch.parent is None
        longest = (batch.segment > 0).sum(1).max()
        length = batch.tokens.shape[1]
        assert length == min(n for n in lengths if n >= longest)


@pytest.mark.parametrize("packing", [True, False])
def test_eval_is_every_record_once(album, word_tokenizer, packing):
    data = dataset(album(), word_tokenizer, packing=packing)
    halves = [list(data.eval(np.asarray(r), 8)) for r in (range(4), range(4, 8))]
    assert len(halves[0]) == len(halves[1])
    seen = [int(i) for half in halves for _, meta in half for i in meta.record]
    assert sorted(seen) == list(range(len(data.records)))
    assert all(batch.tokens.shape[0] == 4 for half in halves for batch, _ in half)
    for left, right in zip(*halves):
        assert left[0].tokens.shape == right[0].tokens.shape
    few = [int(i) for _, meta in data.eval(np.arange(4), 4, num_records=7) for i in meta.record]
    assert len(set(few)) == len(few) == 7
    again = [int(i) for _, meta in data.eval(np.arange(4), 4, num_records=7) for i in meta.record]
    assert few == again


def test_blind_control_shows_another_image(album, word_tokenizer):
    data = dataset(album(), word_tokenizer)
    pairs = zip(data.eval(np.arange(4), 4), data.eval(np.arange(4), 4, shuffled_images=True))
    for (true, meta), (blind, meta_blind) in pairs:
        np.testing.assert_array_equal(true.tokens, blind.tokens)
        np.testing.assert_array_equal(meta.record, meta_blind.record)
        present = true.image_start >= 0
        differs = (true.pixels != blind.pixels).any((2, 3, 4))
        np.testing.assert_array_equal(differs, present)
    with pytest.raises(DataError, match="needs two images"):
        list(dataset(album(1), word_tokenizer).eval(np.arange(4), 4, shuffled_images=True))


def tiled(word_tokenizer, folder):
    """Images of 1 + 2 or 1 + 4 tiles, each of one grey that tells image and tile."""
    sizes = {str(folder / f"{i}.png"): (8 + 8 * (i % 2), 16) for i in range(8)}
    for i, (path, size) in enumerate(sizes.items()):
        Image.new("L", size, 10 * i).save(path)

    def span(path):
        grid = sizes[path][0] // 8, 2
        rows, columns = (0, 2 * grid[0]), (1, 3)  # a column of padding on both sides
        return anyres.span(word_tokenizer.image_id, 2, grid, rows, columns)

    def convert(image):
        base, count = image.getpixel((0, 0)), 1 + image.width // 8 * 2
        grey = np.arange(base, base + count, dtype=np.uint8)[:, None, None, None]
        return np.broadcast_to(grey, (count, 8, 8, 3)).copy()

    how = {
        "prepare": Preparation(convert, "tiles"),
        "num_patches": span,
        "max_images_per_sequence": 11,
    }
    records = [record(f"{p}/{q}", [p], "is it a circle " * q) for p in sizes for q in (1, 2)]
    return dataset(records, word_tokenizer, **how)


def test_tokens_of_tiles_lead_to_their_own_images(word_tokenizer, tmp_path):
    data = tiled(word_tokenizer, tmp_path)
    batch, _ = next(data.train(np.arange(4)))
    assert batch.image_weight is None and batch.image_source.shape == (4, 64, 1)
    several = 0
    for row in range(4):
        source = batch.image_source[row, :, 0]
        source = source[source != -1]
        grey = batch.pixels[row, np.maximum(source, 0) // 4, 0, 0, 0].astype(int)
        found = np.where(source < 0, source, grey * 4 + source % 4)
        pieces = data.order.sequence(0, row).pieces.tolist()
        used = [p for piece in pieces for p in data.pieces.images[piece]]
        several += len(used) > 1
        want = []
        for image in used:
            feature = data.corpus.spans[image].sources.feature[:, 0]
            base = 10 * int(pathlib.Path(data.corpus.paths[image]).stem)
            want += np.where(feature < 0, feature, 4 * base + feature).tolist()
        assert found.tolist() == want
        assert (batch.image_start[row] >= 0).sum() == sum(
            data.corpus.spans[p].sources.tiles for p in used
        )
    assert several, "rows of one image don't show it"


def test_blind_control_of_tiles(word_tokenizer, tmp_path):
    data = tiled(word_tokenizer, tmp_path)
    pairs = zip(data.eval(np.arange(4), 4), data.eval(np.arange(4), 4, shuffled_images=True))
    for (true, _), (blind, _) in pairs:
        np.testing.assert_array_equal(true.image_source, blind.image_source)
        used = true.image_start >= 0
        assert (true.pixels // 10 != blind.pixels // 10)[used].all()


def test_tiles_are_not_mirrored(word_tokenizer, tmp_path):
    data = tiled(word_tokenizer, tmp_path)
    config = dataclasses.replace(data.config, flip=True)
    with pytest.raises(DataError, match="flip=False"):
        Dataset("x", data.content, config, word_tokenizer, data.settings)


def test_text_alone_has_no_image_fields(word_tokenizer):
    records = [record(i) for i in range(20)]
    data = dataset(records, word_tokenizer, visual_mask="prefix")
    batch = take(data.train(np.arange(4)), 1)[0]
    for name in ("pixels", "image_start", "image_key", "bidirectional", "parent"):
        assert getattr(batch, name) is None


def test_state_resumes_and_names_what_changed(album, word_tokenizer):
    records = album()
    data = dataset(records, word_tokenizer)
    batches = data.train(np.arange(4))
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    want = next(batches)[0]
    fresh = dataset(records, word_tokenizer, workers=2, prefetch=1)  # these may change
    step = resume_step(state, fresh.fingerprint())
    older = {k: v for k, v in state["fingerprint"].items() if k != "order_version"}
    with pytest.raises(DataError, match="begun by an older jaxvlm"):
        resume_step(state | {"fingerprint": older}, fresh.fingerprint())
    assert step == 3
    assert_equal(next(fresh.train(np.arange(4), step))[0], want)
    with pytest.raises(DataError, match=r"data\.max_length 64 -> 72, seed 0 -> 1"):
        resume_step(state, dataset(records, word_tokenizer, max_length=72, seed=1).fingerprint())
    with pytest.raises(DataError, match="changed since the checkpoint: content"):
        resume_step(state, dataset(records[::-1], word_tokenizer).fingerprint())


@pytest.mark.parametrize(
    "more, says",
    [
        ({"flip": True}, r"data\.flip False -> True"),
        ({"max_shift": 2}, r"data\.max_shift 0 -> 2"),
        ({"prepare": squares(8, "pad")}, r"images '8\|squash\|rgb-2' -> '8\|pad\|rgb-2'"),
        ({"visual_mask": "prefix"}, "visual_mask 'causal' -> 'prefix'"),
    ],
)
def test_what_an_image_becomes_belongs_to_the_run(more, says, album, word_tokenizer):
    records = album()
    state = {"step": 3, "fingerprint": dataset(records, word_tokenizer).fingerprint()}
    with pytest.raises(DataError, match=says):
        resume_step(state, dataset(records, word_tokenizer, **more).fingerprint())


def test_what_is_trained_belongs_to_the_run(album, word_tokenizer):
    def fingerprint(first_trained):
        records = [
            r._replace(turns=(r.turns[0], r.turns[1]._replace(trained=first_trained), *r.turns))
            for r in album(blind=12)
            if not r.images
        ]
        return dataset(records, word_tokenizer).fingerprint()

    with pytest.raises(DataError, match="changed since the checkpoint: content"):
        resume_step({"step": 3, "fingerprint": fingerprint(True)}, fingerprint(False))


def spoil(path):
    """An image whose header is good and whose data ends early."""
    data = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(data[:50])


def test_image_that_fails_while_running(album, word_tokenizer, caplog):
    records = album()
    spoil(records[0].images[0])
    lost = {r.id for r in records if r.images == records[0].images}
    data = dataset(records, word_tokenizer)
    assert not data.problems
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        for _ in range(2):
            seen = {data.records[i].id for _, m in data.eval(np.arange(4), 4) for i in m.record}
            assert seen == {r.id for r in records} - lost
    assert {p.id for p in data.skipped} == lost
    assert len(caplog.records) == len(lost)
    assert "truncated" in caplog.text
    with pytest.raises(DataError, match="truncated"):
        list(dataset(records, word_tokenizer, on_bad_record="refuse").eval(np.arange(4), 4))
    with pytest.raises(DataError, match=r"max_skip_fraction=1\.0%"):
        list(dataset(records, word_tokenizer, max_skip_fraction=0.01).eval(np.arange(4), 4))


def test_bad_images_and_long_records_before_the_first_step(album, word_tokenizer):
    records = album()
    records[0] = records[0]._replace(images=("/gone.png",))
    long = record("long", question="circle " * 100)
    with pytest.raises(DataError, match=r"long: longer than data\.max_length=64 \(1\d\d tokens\)"):
        dataset([*records, long], word_tokenizer)
    data = dataset([*records, long], word_tokenizer, on_too_long="skip")
    assert [(p.id, p.reason) for p in data.problems] == [
        (records[0].id, "missing file"),
        ("long", "longer than data.max_length=64"),
    ]
    with pytest.raises(DataError, match="missing file"):
        dataset(records, word_tokenizer, on_bad_record="refuse")
    with pytest.raises(DataError, match=r"over data\.max_skip_fraction=1\.0%"):
        dataset(records, word_tokenizer, max_skip_fraction=0.01)


@pytest.mark.parametrize(
    "setting",
    [
        {"resize": "stretch"},
        {"on_bad_record": "ignore"},
        {"on_too_long": "cut"},
        {"visual_mask": "none"},
    ],
)
def test_settings_are_checked(setting, word_tokenizer):
    with pytest.raises(DataError, match="is unknown; use one of"):
        dataset([record(i) for i in range(9)], word_tokenizer, **setting)


def test_check_reports_every_reason(tmp_path, image, write_json):
    good, cut = image("a.png"), image("cut.png")
    spoil(cut)
    items = [llava(f"good{i}", good) for i in range(3)]
    items += [llava("cut", cut), llava("gone", "gone.png"), llava("two", good, "<image><image>")]
    items += [llava("long", good, "<image>" + "word " * 300)]
    path = write_json(items)
    report = validate(path, DataConfig(), prepare=squares(64))
    assert (report.total, report.good, report.images) == (7, 3, 1)
    assert report.problems == {
        "placeholders and images differ in number": ["two"],
        "truncated file": ["cut"],
        "missing file": ["gone"],
        "longer than data.max_length=256": ["long"],
    }
    assert report.tokens["p0"] == report.tokens["p100"] > 16
    assert json.loads(json.dumps(report.to_dict()))["skip_share"] == pytest.approx(4 / 7)
    text = "\n".join(report.lines())
    assert "3 of 7 records are good" in text
    assert "truncated file: cut" in text


def test_check_says_what_repeats(tmp_path, image, write_json):
    a, b = image("a.png"), image("b.png")
    items = [llava("x", a), llava("x", b), llava("y", a), llava("x", b), llava("z", b)]
    report = validate(write_json(items), DataConfig(), prepare=squares(64))
    assert report.good == 5 and not report.problems
    same_id = "has the id of an earlier record; both are used"
    equal = "equals an earlier record; both are used"
    assert report.repeats == {same_id: ["x", "x"], equal: ["y", "x", "z"]}
    assert f"      2  {same_id}: x, x" in report.lines()
    alone = validate(write_json([items[0], llava("w", b)]), DataConfig(), prepare=squares(64))
    assert alone.repeats == {} and len(alone.lines()) == 3


def test_easy_vqa_epoch():
    """The quickstart's data: every question once, an image about once."""
    from jaxvlm.data.conversations import tokenize
    from jaxvlm.data.sources import conversation_formats

    read = conversation_formats.read("easy-vqa:test")
    built = chat_tokenizer.build(tokenize.texts(read[0]))
    config = DataConfig(train="easy-vqa:test", max_images_per_sequence=4)
    data = load_dataset(config, built, image_size=64, num_patches=16, read=read)
    assert not data.problems
    seen: list[int] = []
    images = 0
    for batch, meta in data.eval(np.arange(32), 32):
        seen += meta.record.tolist()
        images += int((batch.image_start >= 0).sum())
    assert sorted(seen) == list(range(9673))
    assert 1000 <= images < 1100
