"""Images against Pillow, and every way in which a file can be bad."""

import itertools
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.image_inputs import ImageCache
from jaxvlm.data.images import image_files
from jaxvlm.inference import prompts
from tests.bad_input.data_files import png

RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (16, 16, 3), np.uint8)


def bomb(path, width, height):
    """A PNG whose header alone says how large it is."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "YCbCr"])
def test_modes_as_pillow(mode, tmp_path):
    path = tmp_path / "a.tiff"
    image = Image.fromarray(COLORS).convert(mode)
    image.save(path)
    np.testing.assert_array_equal(
        image_files.load(str(path), image_files.squares(16)), np.asarray(image.convert("RGB"))
    )


def test_alpha_lies_over_white(tmp_path):
    for mode in ("RGBA", "LA"):
        image = Image.new("RGBA", (16, 16), (200, 200, 200, 0)).convert(mode)
        image.save(tmp_path / "a.png")
        assert (image_files.load(str(tmp_path / "a.png"), image_files.squares(16)) == 255).all()
    half = Image.new("RGBA", (16, 16), (0, 0, 0, 128))
    half.save(tmp_path / "a.png")
    assert (image_files.load(str(tmp_path / "a.png"), image_files.squares(16)) == 127).all()


def test_palette_with_transparency(tmp_path):
    image = Image.new("P", (16, 16), 0)
    image.putpalette([10, 20, 30] + [0] * 765)
    image.save(tmp_path / "a.png", transparency=0)
    assert (image_files.load(str(tmp_path / "a.png"), image_files.squares(16)) == 255).all()


def test_sixteen_bits_are_scaled(tmp_path):
    for suffix, grey in itertools.product(("png", "tiff", "ppm"), (0, 1, 100, 255)):
        values = np.full((16, 16), 257 * grey, np.uint16)
        path = str(tmp_path / f"a.{suffix}")
        Image.fromarray(values).save(path)
        assert (image_files.load(path, image_files.squares(16)) == grey).all()


def test_a_dark_image_of_sixteen_bits_is_as_dark_as_in_a_brighter_one(tmp_path):
    dark = np.full((16, 16), 255, np.uint16)
    brighter = dark.copy()
    brighter[0, 0] = 65_535
    pixels = []
    for name, values in (("dark.png", dark), ("brighter.png", brighter)):
        Image.fromarray(values).save(tmp_path / name)
        pixels.append(image_files.load(str(tmp_path / name), image_files.squares(16)))
    np.testing.assert_array_equal(pixels[0][1:], pixels[1][1:])


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(0, 1, 256, dtype=np.float32),  # would be black
        np.full(256, np.nan, np.float32),
        np.full(256, -5, np.float32),
        np.full(256, 100_000, np.int32),
        np.full(256, -1, np.int16),
    ],
    ids=["floats to 1", "not numbers", "negative floats", "32 bits", "signed 16 bits"],
)
def test_grey_of_unknown_range_is_refused(values, tmp_path):
    mode = "F" if values.dtype == np.float32 else "I"
    image = Image.fromarray(values.reshape(16, 16).astype({"F": "f4", "I": "i4"}[mode]))
    path, squares = str(tmp_path / "a.tiff"), image_files.squares(16)
    if values.dtype == np.int16:
        image = Image.frombytes("I;16", (16, 16), values.tobytes())
        image.save(path, tiffinfo={339: 2})  # SampleFormat: two's complement
    else:
        image.save(path)
    assert "32-bit grey values" in image_files.check(path, 1000)
    with pytest.raises(ImageError, match="32-bit grey values"):
        image_files.load(path, squares)
    if values.dtype != np.int16:  # of Python's own images too
        with pytest.raises(DataError, match="an image: 32-bit grey values"):
            prompts.load_pixels(image, squares, 1000)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.zeros((16, 16, 3), np.uint8)
    upright[:8, :8] = 255  # bright at the top left once turned
    turn = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"}
    turn |= {6: "ROTATE_90", 7: "TRANSVERSE", 8: "ROTATE_270"}
    stored = Image.fromarray(upright)
    if orientation > 1:
        stored = stored.transpose(Image.Transpose[turn[orientation]])
    stored.save(tmp_path / "a.jpg", exif=exif, quality=95)
    got = image_files.load(str(tmp_path / "a.jpg"), image_files.squares(16))
    assert got[:6, :6].min() > 200
    assert got[10:].max() < 50
    opened = Image.open(tmp_path / "a.jpg")
    size = opened.size
    np.testing.assert_array_equal(image_files.convert(opened, image_files.squares(16)), got)
    assert opened.size == size  # the caller's image stays as it was


@pytest.mark.parametrize("resize", image_files.RESIZE)
@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (7, 300), (16, 16)])
def test_any_shape_fits(resize, shape, tmp_path):
    Image.new("RGB", shape, (9, 9, 9)).save(tmp_path / "a.png")
    got = image_files.load(str(tmp_path / "a.png"), image_files.squares(16, resize))
    assert got.shape == (16, 16, 3)
    assert got.dtype == np.uint8
    if resize == "pad" and shape[0] != shape[1]:
        assert (got == image_files.PAD).any()
        assert (got == 9).any()
    else:
        assert (got == 9).all()


def test_squash_as_pillow(tmp_path):
    image = Image.fromarray(RNG.integers(0, 256, (50, 30, 3), np.uint8))
    image.save(tmp_path / "a.png")
    want = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(
        image_files.load(str(tmp_path / "a.png"), image_files.squares(16)), want
    )


def test_large_jpeg_is_close_to_pillow(tmp_path):
    smooth = Image.fromarray(COLORS).resize((400, 400), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.jpg", quality=95)
    want = np.asarray(Image.open(tmp_path / "a.jpg").resize((16, 16), Image.Resampling.BICUBIC))
    got = image_files.load(str(tmp_path / "a.jpg"), image_files.squares(16))
    assert np.abs(got.astype(int) - want).max() <= 6


def test_bad_files(tmp_path):
    missing, empty, text, short = (tmp_path / n for n in ("no.png", "0.png", "t.png", "s.jpg"))
    empty.write_bytes(b"")
    text.write_text("not an image")
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)).save(short)
    short.write_bytes(short.read_bytes()[:1500])
    large = tmp_path / "large.png"
    bomb(large, 10_000, 10_000)
    huge = tmp_path / "huge.png"
    bomb(huge, 100_000, 100_000)
    hollow = tmp_path / "hollow.png"
    bomb(hollow, 100, 100)
    by_header = {missing: "missing file", empty: "0-byte", text: "not an image"}
    by_header |= {large: "max_pixels", huge: "max_pixels", tmp_path: "can't be read"}
    for path, reason in by_header.items():
        assert reason in (image_files.check(str(path), 50_000_000) or "")
        with pytest.raises(ImageError, match=reason):
            image_files.load(str(path), image_files.squares(16))
    for path in (short, hollow):
        assert image_files.check(str(path), 50_000_000) is None
        with pytest.raises(ImageError, match="truncated"):
            image_files.load(str(path), image_files.squares(16))


def test_key_is_of_bytes_preprocessing_and_augmentation():
    a, b = b"a" * 16, b"b" * 16
    keys = [(a, "64"), (b, "64"), (a, "32"), (a, "64", (1, 0, 0)), (a, "64", (0, 1, 0))]
    seen = {image_files.key(*k).tobytes() for k in keys}
    assert len(seen) == len(keys)
    key = image_files.key(a, "64")
    assert key.shape == (4,)
    np.testing.assert_array_equal(key, image_files.key(a, "64"))


def test_augment():
    pixels = COLORS
    assert image_files.augment(pixels, ()) is pixels
    np.testing.assert_array_equal(image_files.augment(pixels, (1, 0, 0)), pixels[:, ::-1])
    moved = image_files.augment(pixels, (0, 2, -3))
    np.testing.assert_array_equal(moved[2:, :-3], pixels[:-2, 3:])
    drawn = {image_files.draw(np.random.default_rng(i), True, 2) for i in range(200)}
    assert {d[1] for d in drawn if d} == {-2, -1, 0, 1, 2}
    assert image_files.draw(np.random.default_rng(0), False, 0) == ()


def test_cache_is_bounded(image, monkeypatch):
    paths = [image(f"{i}.png", (i, i, i)) for i in range(6)]
    images = ImageCache(image_files.squares(256), 10**6, cache_mb=1)  # room for five
    for path in paths:
        images.get(path)
    opened = []
    read = image_files.read_bytes
    monkeypatch.setattr(image_files, "read_bytes", lambda path: opened.append(path) or read(path))
    for path in paths[::-1]:
        assert images.get(path).pixels[0, 0, 0] == paths.index(path)
    assert opened == [paths[0]]
    assert images.get(paths[0]).digest != images.get(paths[1]).digest


AVIF = ["avif"] if image_files.HAS_AVIF else []


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow says what it finds
@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "webp", "tiff", "bmp", *AVIF])
def test_damaged_files_are_images_or_image_errors(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    Image.fromarray(COLORS).save(path)
    good = np.frombuffer(path.read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        data = good.copy()
        data[rng.integers(len(data), size=4)] = rng.integers(256, size=4)
        path.write_bytes(data.tobytes()[: rng.integers(1, 2 * len(data))])
        try:
            assert image_files.load(str(path), image_files.squares(16), max_pixels=10**6).shape == (
                16,
                16,
                3,
            )
        except ImageError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused


@pytest.mark.skipif(not AVIF, reason="this Pillow does not read AVIF")
def test_avif_is_read(tmp_path):
    path = str(tmp_path / "a.avif")
    Image.new("RGB", (24, 16), (200, 30, 60)).save(path, quality=100)
    assert image_files.check(path, 24 * 16) is None
    assert image_files.check(path, 100) == "more than data.max_pixels=100 pixels"
    pixels = image_files.load(path, image_files.squares(8)).astype(int)
    assert abs(pixels - [200, 30, 60]).max() <= 4


def test_avif_that_pillow_can_not_read_is_refused_by_a_package(tmp_path, monkeypatch):
    """The files' first bytes, as ISO 23000-22 has them."""
    monkeypatch.setattr(image_files, "HAS_AVIF", False)
    monkeypatch.setattr(image_files, "FORMATS", ("JPEG", "PNG"))
    for brand in (b"avif", b"avis"):
        data = b"\0\0\0\x20ftyp" + brand + b"\0\0\0\0" + b"avifmif1miafMA1B"
        (tmp_path / "a.png").write_bytes(data)
        assert "pip install -U 'pillow>=11.3'" in image_files.check(str(tmp_path / "a.png"), 100)
        with pytest.raises(ImageError, match="an AVIF image, which this Pillow can't read"):
            image_files.load(str(tmp_path / "a.png"), image_files.squares(8))


def test_what_can_be_read_without_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "x.tar").write_bytes(b"abc")
    (tmp_path / "tall.png").write_bytes(png(1, 49_999_999))
    # The last is a tar's member that is said to have 10^12 bytes.
    for name in ("fifo.png", "zero.png", "tall.png", "x.tar::0+1000000000000::p.png"):
        path = str(tmp_path / name)
        assert image_files.check(path, 50_000_000) is not None
        with pytest.raises(ImageError):
            image_files.load(path, image_files.squares(8))


FRAMES = [Image.fromarray(RNG.integers(0, 256, (12, 16, 3), np.uint8)) for _ in range(3)]
MOVING = ["gif", "webp", "png", "tiff", *(["avif"] if image_files.HAS_AVIF else [])]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("suffix", MOVING)
def test_one_of_several_frames_or_pages_is_not_chosen(suffix, count, tmp_path):
    path = tmp_path / f"a.{suffix}"
    FRAMES[0].save(path, save_all=True, append_images=FRAMES[1:count], lossless=True)
    square = image_files.squares(16)
    if count == 1:
        assert image_files.check(str(path), 10**6) is None
        with Image.open(path) as image:
            wanted = image_files.convert(image, square)
        np.testing.assert_array_equal(image_files.load(str(path), square), wanted)
        return
    says = "several frames or pages, .* save the one that is meant as a file of its own"
    for read in (
        lambda: image_files.load(str(path), square),
        lambda: image_files.ImageFormat(square, 0, lambda w, h: None, fixed=False).of_file(
            str(path)
        ),
    ):
        with pytest.raises(ImageError, match=says):
            read()
    assert "several frames or pages" in image_files.check(str(path), 10**6)


def test_copies_and_previews_of_one_image_are_no_pages(tmp_path):
    tiff, photo = tmp_path / "a.tiff", tmp_path / "a.jpg"
    for tag, value, refused in ((254, 1, False), (254, 4, False), (255, 2, False), (254, 0, True)):
        small = FRAMES[1].resize((8, 6))
        small.encoderinfo = {"tiffinfo": TiffImagePlugin.ImageFileDirectory_v2()}
        small.encoderinfo["tiffinfo"][tag] = value
        FRAMES[0].save(tiff, save_all=True, append_images=[small])
        assert bool(image_files.check(str(tiff), 10**6)) == refused, (tag, value)
    FRAMES[0].save(photo, format="MPO", save_all=True, append_images=FRAMES[1:2])
    with Image.open(photo) as image:
        assert image.format == "MPO" and image.n_frames == 2
    assert image_files.check(str(photo), 10**6) is None


@pytest.mark.parametrize("suffix", ["gif", "tiff"])
def test_damage_behind_the_first_image_changes_nothing(suffix, tmp_path):
    path, square = tmp_path / f"a.{suffix}", image_files.squares(16)
    FRAMES[0].save(path)
    wanted = image_files.load(str(path), square)
    data = bytearray(path.read_bytes())
    if suffix == "gif":
        data[-1:] = b",\0\0"  # a frame that ends in its header
    else:  # a second page far behind the end of the file
        (at,) = struct.unpack("<I", data[4:8])
        (entries,) = struct.unpack("<H", data[at : at + 2])
        data[at + 2 + 12 * entries : at + 6 + 12 * entries] = b"\xff\xff\xff\x00"
    path.write_bytes(data)
    np.testing.assert_array_equal(image_files.load(str(path), square), wanted)
