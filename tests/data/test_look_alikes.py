"""Images that look alike: the nearest earlier one by brute force, and what `data check` says."""

import json
import sys

import hypothesis
import hypothesis.strategies as st
import imagehash
import numpy as np
import pytest
from PIL import Image

from jaxvlm.cli import main
from jaxvlm.data.images.look_alikes import BITS, alike, look_at
from tests.data.conftest import llava

fast = hypothesis.settings(deadline=None, max_examples=60)


@fast
@hypothesis.given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sets(st.integers(0, BITS - 1), max_size=5)), max_size=24
    ),
    st.integers(0, 6),
)
def test_the_nearest_earlier_image_is_found(drawn, distance):
    """Hashes are a few bits away from one of four, so that some are near and some are equal."""
    centres = np.random.default_rng(0).integers(0, 2**63, 4, dtype=np.uint64)
    hashes = [int(centres[c]) ^ sum(1 << bit for bit in bits) for c, bits in drawn]
    found = {x.image: x for x in alike(np.asarray(hashes, np.uint64), distance)}
    for i, own in enumerate(hashes):
        bits = [(own ^ other).bit_count() for other in hashes[:i]]
        if not bits or min(bits) > distance:
            assert i not in found
            continue
        assert (found[i].distance, found[i].first) == (min(bits), bits.index(min(bits)))


@pytest.fixture
def files(tmp_path, write_json):
    """An image, a smaller and coarser copy of it, another one, and one of one colour."""
    rng = np.random.default_rng(1)
    for name in ("a", "other"):
        rough = Image.fromarray(rng.integers(0, 255, (6, 6, 3), np.uint8))
        rough.resize((96, 64), Image.Resampling.BICUBIC).save(tmp_path / f"{name}.png")
    Image.open(tmp_path / "a.png").resize((48, 32)).save(tmp_path / "copy.jpg", quality=50)
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "plain.png")
    names = ("a.png", "other.png", "copy.jpg", "plain.png")
    return write_json([llava(name, name) for name in names], lines=True), names


def test_hashes_are_those_of_imagehash(files, tmp_path):
    paths = [str(tmp_path / name) for name in files[1]]
    look = look_at(paths, 10_000)
    wanted = [int(str(imagehash.phash(Image.open(path).convert("RGB"))), 16) for path in paths]
    assert look.hash.tolist() == wanted
    assert look.one_colour.tolist() == [False, False, False, True]


def test_check_names_them_and_draws(files, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    assert main.run(["data", "check", files[0], "--look_alikes=6", f"--plot={plot}", "--json"]) == 0
    said, _, last = capsys.readouterr().out.strip().rpartition("\n")
    report = json.loads(last)
    (one_colour,), (like,) = report["images_of_note"].values()
    assert one_colour == f"plain.png ({tmp_path}/plain.png)"
    assert like.startswith(f"copy.jpg ({tmp_path}/copy.jpg) like a.png ({tmp_path}/a.png), ")
    assert one_colour in said and like in said
    assert "images of 8..96 x 8..64 pixels" in said
    assert report["image_sizes"]["width"]["p100"] == 96
    edges, counts = report["histograms"]["pixels per image"]
    wanted, _ = np.histogram([96 * 64, 96 * 64, 48 * 32, 64], edges)
    assert counts == wanted.tolist() and sum(counts) == 4
    assert Image.open(plot).size[0] > 400
    assert main.run(["data", "check", files[0], "--json"]) == 0
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["images_of_note"]


@pytest.mark.parametrize(
    "flag, says",
    [
        ("--look_alikes=17", "--look_alikes=17: must be from 0 to 16"),
        ("--plot=x.pdf", "--plot=x.pdf: the name of the file must end in .png"),
        ("--plot=/no/folder/x.png", "--plot=/no/folder/x.png: No such file or directory"),
    ],
)
def test_flags_that_can_not_be(flag, says, files, capsys):
    assert main.run(["data", "check", files[0], flag]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and error.count("\n") == 0


@pytest.mark.parametrize(
    "flag, module", [("--look_alikes=4", "imagehash"), ("--plot=x.png", "matplotlib.figure")]
)
def test_a_package_that_is_missing_is_named(flag, module, files, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert main.run(["data", "check", files[0], flag]) == 2
    assert "pip install 'jaxvlm[check]'" in capsys.readouterr().err
