"""What the pages point at exists, and their figures about the quickstart are the quickstart's."""

from __future__ import annotations

import pathlib
import re
import runpy

import numpy as np
import pytest
from PIL import Image

from jaxvlm.config import from_config_dict
from jaxvlm.data import Dataset
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.dataset import make_dataset
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf.run_processor import image_format_of
from jaxvlm.models.vlm import num_visual_tokens

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_files_and_tests_that_design_names_exist():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(?:jaxvlm/)?((?:\w+/)+\w+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "jaxvlm" / name).exists(), name
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+)(?:…)?`", text):
        assert f"def {name}" in tests, name


@pytest.fixture(scope="module")
def quickstart():
    """The recipe's Config, and what its training data is read as."""
    recipe = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))
    config = from_config_dict(recipe["get_config"]())
    return config, conversation_formats.read(config.data.train)


def test_the_quickstart_normalizes_by_its_images_own_pixels(quickstart):
    """With a mean of 0.5 a white background is most of the input, and shapes are learned late."""
    config, (records, _) = quickstart
    paths = list(dict.fromkeys(record.images[0] for record in records))[::20]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths]) / 255
    vision = config.model.vision
    np.testing.assert_allclose(pixels.mean((0, 1, 2)), vision.pixel_mean, atol=0.02)
    np.testing.assert_allclose(pixels.std((0, 1, 2)), vision.pixel_std, atol=0.02)


def test_figures_of_the_quickstart(quickstart):
    config, read = quickstart
    built = chat_tokenizer.build(tokenize.texts(read[0]))
    data: Dataset = make_dataset(
        config, config.data.train, built, image_format_of(config, None, built), read
    )
    design, page = ((ROOT / "docs" / f"{n}.md").read_text("utf-8") for n in ("design", "data"))
    order = data.order
    pieces, records = len(data.pieces.num_tokens), len(data.records)
    assert f"{records:,} records" in design and f"{pieces:,} pieces" in design
    assert f"{len(order.sequences):,} sequences" in design
    rows, length = config.data.batch_size, config.data.max_length
    side = config.model.vision.image_size
    assert f"{rows} sequences of {length} tokens, images of {side} pixels" in design
    assert f"image's one token becomes {num_visual_tokens(config.model)}" in design
    epoch = f"{rows} rows in a batch, so {order.steps_per_epoch} steps"
    assert f"records in {pieces:,} pieces, {len(order.sequences):,} sequences, {epoch}" in page
