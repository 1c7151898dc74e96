"""Images of any size: cut as transformers cuts them, packed so that no row overflows."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import odd_images
import pytest
from PIL import Image, ImageOps

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import packing
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import image_files, processor, resize
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.validate import validate
from tests.data.any_size import BOUNDS, QWEN, SIDE, SIZES, span_of, write_processor
from tests.data.conftest import llava, record

NAFLEX = {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 4, "max_num_patches": 40}


def some_images(sizes=SIZES):
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(sizes):
        rgb = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        yield rgb.convert(("RGB", "L", "P")[i % 3])


@pytest.mark.parametrize("settings", [QWEN, NAFLEX], ids=["qwen", "naflex"])
def test_fifty_odd_images(settings, tmp_path):
    import transformers  # slow to import

    found = processor.load(write_processor(tmp_path, settings))
    assert found.size == 0
    theirs = getattr(transformers, settings["image_processor_type"] + "Pil").from_pretrained(
        tmp_path
    )
    count = 3 * found.patching.frames * found.patching.size**2
    lay = np.tile if found.patching.layout == "hwc" else np.repeat
    mean, std = (lay(np.float32(x), count // 3) for x in (found.mean, found.std))
    grids = set()
    for path in odd_images.write(tmp_path):
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            upright.load()
        if upright.mode.startswith("I"):  # Pillow clips 16 bits, we scale them
            upright = Image.fromarray((np.asarray(upright) // 257).astype(np.uint8))
        # SigLIP 2's gives one or four channels of what is not RGB, which its model can't take.
        want = theirs(upright, do_convert_rgb=True, return_tensors="np")
        pixels = image_files.load(path, found.prepare)
        patches, (t, h, w) = found.patching.cut(pixels), found.patching.grid(pixels)
        assert (patches.dtype, t) == (np.uint8, 1)
        np.testing.assert_array_equal(
            found.patching.join(patches, h, w), pixels, "join is cut's inverse"
        )
        if "image_grid_thw" in want:
            assert want["image_grid_thw"].tolist() == [[t, h, w]]
            assert found.grid(*upright.size) == (h // 2, w // 2), "known from the size alone"
            values = want["pixel_values"]
        else:
            assert want["spatial_shapes"].tolist() == [[h, w]]
            assert not want["pixel_values"][0, h * w :].any(), "padding"
            values = want["pixel_values"][0, : h * w]
        np.testing.assert_allclose((patches / 255.0 - mean) / std, values, atol=2e-6, err_msg=path)
        grids.add((h, w))
    assert len(grids) > 5


def test_bounds_of_the_recipe(qwen, tmp_path):
    tight = processor.load(tmp_path, (256, 512))
    assert (qwen.bounds, tight.bounds) == (BOUNDS, (256, 512))
    assert processor.load(tmp_path, (0, 512)).bounds == (64, 512)
    assert tight.prepare.fingerprint != qwen.prepare.fingerprint
    for image in some_images():
        height, width = tight.prepare.convert(image).shape[:2]
        assert (width, height) == resize.fit(*image.size, SIDE, 256, 512)
        assert height * width <= 512 or SIDE in (height, width)
    with pytest.raises(DataError, match="minimum of 2000 pixels is over the maximum of 1024"):
        processor.load(tmp_path, (2000, 0))
    with pytest.raises(DataError, match=r"does not support data\.image_pixels_range"):
        processor.load(write_processor(tmp_path, NAFLEX), (256, 0))
    with pytest.raises(DataError, match="do_resize=False"):
        processor.load(write_processor(tmp_path, QWEN | {"do_resize": False}))
    (tmp_path / processor.FILE).unlink()
    whole = {"processor_class": "Qwen2VLProcessor", "image_processor": QWEN}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert processor.load(tmp_path).bounds == BOUNDS


BASE = DataConfig(batch_size=2, max_length=96, max_images_per_sequence=3, max_skip_fraction=0.5)


def dataset(records, qwen, word_tokenizer, **more):
    images = image_files.ImageFormat(qwen.prepare, 0, span_of(word_tokenizer), False, qwen.patching)
    return load_dataset(
        dataclasses.replace(BASE, **more),
        word_tokenizer,
        read=(records, []),
        image_size=0,
        num_patches=images.of_file,
        prepare=images.prepare,
        patching=images.patching,
    )


def images_of(batch, row, patching):
    """The row's images, put together again."""
    first = 0
    for (t, h, w), start in zip(batch.grid[row].tolist(), batch.image_start[row].tolist()):
        assert (t > 0) == (start >= 0)
        if t:
            yield patching.join(batch.patches[row, first : first + h * w], h, w), start
            first += h * w
    assert not batch.patches[row, first:].any()


@pytest.mark.parametrize(
    "more",
    [{}, {"packing": False}, {"share_images": False}, {"max_patches_per_sequence": 80}],
    ids=str,
)
def test_rows_hold_their_images(more, ragged, qwen, word_tokenizer):
    data = dataset(ragged, qwen, word_tokenizer, **more)
    patching, seen, shapes = qwen.patching, [], set()
    for batch, meta in data.eval(np.arange(2), 2):
        shapes.add((batch.tokens.shape[1], batch.patches.shape[1]))
        assert batch.pixels is None
        assert batch.patches.shape[2] == 3 * 2 * 4 * 4
        assert batch.positions.shape[1] == 3
        if "max_patches_per_sequence" in more:
            assert (batch.grid.prod(-1).sum(-1) <= 80).all()
        for row, found in enumerate(meta.by_sequence()):
            want = []  # each group's once
            for _, source in found:
                seen.append(source)
                paths = list(data.records[source].images)
                if paths and (not data.config.share_images or want[-len(paths) :] != paths):
                    want += paths
            shown = list(images_of(batch, row, patching))
            assert len(shown) == len(want)
            for (pixels, start), path in zip(shown, want, strict=True):
                image = Image.open(path)
                np.testing.assert_array_equal(pixels, qwen.prepare.convert(image))
                span = span_of(word_tokenizer)(*image.size)
                at = slice(start, start + len(span.ids))
                np.testing.assert_array_equal(batch.tokens[row, at], span.ids)
                offset = batch.positions[row, :, start - 1].max() + 1
                np.testing.assert_array_equal(batch.positions[row, :, at] - offset, span.positions)
    assert sorted(seen) == list(range(len(ragged)))
    assert shapes <= set(data.sequence_shapes)
    assert len(data.sequence_shapes) == (1 if data.config.packing else BASE.buckets)


def test_any_split_of_rows_and_augmentation(ragged, qwen, word_tokenizer):
    more = {"flip": True, "max_shift": 2, "packing": False, "max_patches_per_sequence": 100}
    data = dataset(ragged, qwen, word_tokenizer, **more)
    whole, plain = data.train(np.arange(2)), dataset(ragged, qwen, word_tokenizer, packing=False)
    changed = 0
    others = plain.train(np.arange(2))
    parts = [dataset(ragged, qwen, word_tokenizer, **more).train(np.asarray([r])) for r in (0, 1)]
    for _ in range(6):
        both, same = next(whole)[0], next(others)[0]
        for row, part in enumerate(parts):
            one = next(part)[0]
            for name in ("patches", "grid", "image_start", "image_key", "tokens"):
                np.testing.assert_array_equal(getattr(one, name)[0], getattr(both, name)[row])
        np.testing.assert_array_equal(both.grid, same.grid)
        n = min(both.patches.shape[1], same.patches.shape[1])
        changed += (both.patches[:, :n] != same.patches[:, :n]).any()
    assert changed
    whole.close(), others.close(), [part.close() for part in parts]


def test_blind_control_shows_another_image_in_the_same_size(ragged, qwen, word_tokenizer):
    data = dataset(ragged, qwen, word_tokenizer)
    pairs = zip(data.eval(np.arange(2), 2), data.eval(np.arange(2), 2, shuffled_images=True))
    for (true, _), (blind, _) in pairs:
        np.testing.assert_array_equal(true.grid, blind.grid)
        np.testing.assert_array_equal(true.tokens, blind.tokens)
        for row in range(2):
            shown = zip(*(images_of(b, row, qwen.patching) for b in (true, blind)), strict=True)
            assert all((a != b).any() for (a, _), (b, _) in shown)


def test_what_fits_no_row_is_named(ragged, qwen, word_tokenizer, tmp_path, write_json):
    with pytest.raises(
        DataError, match=r"data\.max_patches_per_sequence=20 patches \(.* data\.image_pixels"
    ):
        dataset(ragged, qwen, word_tokenizer, max_patches_per_sequence=20)
    with pytest.raises(DataError, match=r"\(24 tokens, 16 of them images'; data\.image_pix"):
        dataset(ragged, qwen, word_tokenizer, max_length=20)
    kept = dataset(
        ragged,
        qwen,
        word_tokenizer,
        max_patches_per_sequence=40,
        on_too_long="skip",
        max_skip_fraction=0.9,
    )
    assert 0 < len(kept.problems) < len(ragged)
    Image.new("RGB", (1000, 2)).save(tmp_path / "thin.png")
    thin = record("thin", [str(tmp_path / "thin.png")])
    (problem,) = dataset([*ragged, thin], qwen, word_tokenizer).problems
    assert problem.id == "thin"
    assert problem.reason == "one side is over 200 times the other"
    images = image_files.ImageFormat(qwen.prepare, 0, span_of(word_tokenizer), False, qwen.patching)
    path = write_json([llava(), llava("thin", "thin.png"), llava("gone", "gone.png")])
    Image.new("RGB", (30, 40)).save(tmp_path / "a.png")
    report = validate(
        path,
        dataclasses.replace(BASE, max_patches_per_sequence=40),
        chat_tokenizer=word_tokenizer,
        prepare=qwen.prepare,
        num_patches=images.of_file,
        patching=qwen.patching,
    )
    reasons = {name: why for why, names in report.problems.items() for name in names}
    assert reasons["gone"] == "missing file"
    assert reasons["x"] == "more than data.max_patches_per_sequence=40 patches"
    assert "200 times" in reasons["thin"]


def test_another_size_than_the_header_says_is_left_out(ragged, qwen, word_tokenizer):
    data = dataset(ragged, qwen, word_tokenizer, max_skip_fraction=1.0)
    path = data.corpus.paths[3]
    Image.new("RGB", (60, 11)).save(path)  # since the corpus was made
    seen = {int(i) for _, meta in data.eval(np.arange(2), 2) for i in meta.record}
    lost = {i for i, r in enumerate(ragged) if path in r.images}
    assert seen == set(range(len(ragged))) - lost
    assert all("differs from the size in its header" in p.reason for p in data.skipped)


def test_room_and_packing():
    patching = Patching(4, 2, 2)
    assert (patching.padded_count(0), patching.padded_count(128), patching.padded_count(129)) == (
        128,
        128,
        256,
    )
    assert Patching(4, 3).padded_count(1) == 1152, "whole blocks of nine"
    rng = np.random.default_rng(0)
    count = 200
    patches = rng.integers(0, 60, count).astype(np.int32)
    pieces = packing.Pieces(
        *[np.zeros(0)] * 6, (), *[np.ones(count, np.int32)] * 2, num_patches=patches
    )
    settings = DataConfig(
        max_length=1000, max_images_per_sequence=1000, max_patches_per_sequence=100
    )
    rows = packing.pack(np.arange(count), pieces, settings)
    assert sorted(np.concatenate(rows).tolist()) == list(range(count))
    sizes = [int(patches[row].sum()) for row in rows]
    assert max(sizes) <= 100
    assert np.mean(sizes) > 80, "first fit fills rows"
    unlimited = dataclasses.replace(settings, max_patches_per_sequence=0)
    assert len(packing.pack(np.arange(count), pieces, unlimited)) == 1


@pytest.mark.parametrize("older", [False, True], ids=["size", "pixels"])
def test_a_folder_takes_over_a_recipes_bounds(older, tmp_path):
    settings = dict(QWEN)
    if older:  # the name that released checkpoints have
        del settings["size"]
        settings |= dict(zip(("min_pixels", "max_pixels"), BOUNDS))
    write_processor(tmp_path, settings)
    recipe = processor.load(tmp_path, (0, 512))
    processor.write_bounds(tmp_path, (0, 512))
    folder = processor.load(tmp_path)
    assert folder.bounds == recipe.bounds == (BOUNDS[0], 512)
