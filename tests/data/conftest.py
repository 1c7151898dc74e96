"""Small conversations and images, written to a temporary folder."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from jaxvlm.data.images import image_files, processor
from jaxvlm.data.pairs.collate_prompt_items import PromptCollator
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.tokenizer import chat_tokenizer as tokenizer
from jaxvlm.types import Span
from tests.data.any_size import QWEN, SIZES, write_processor


@pytest.fixture(scope="session")
def word_tokenizer():
    texts = ["what color is the shape?", "red blue green yes no", "is it a circle", "describe both"]
    return tokenizer.build(texts)


@pytest.fixture
def image(tmp_path):
    """``image(name, color)`` writes a small PNG and returns its path."""

    def write(name="a.png", color=(255, 0, 0), size=(24, 16)) -> str:
        path = tmp_path / name
        Image.new("RGB", size, color).save(path)
        return str(path)

    return write


@pytest.fixture
def write_json(tmp_path):
    """``write_json(value)`` -> path of a .json; ``lines=True`` -> of a .jsonl."""

    def write(value, name="data", lines=False) -> str:
        path = pathlib.Path(tmp_path / (name + (".jsonl" if lines else ".json")))
        text = "\n".join(map(json.dumps, value)) if lines else json.dumps(value)
        path.write_text(text)
        return str(path)

    return write


def llava(identifier="x", image: object = "a.png", text="<image>\nwhat color is it?", answer="red"):
    item = {
        "id": identifier,
        "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": answer}],
    }
    return item | ({"image": image} if image else {})


def record(identifier, paths=(), question="what color is the shape?", answer="red"):
    text = "<image>" * len(paths) + question
    return Record(str(identifier), (Turn("user", text), Turn("assistant", answer)), tuple(paths))


@pytest.fixture
def album(tmp_path):
    """Records about ``num_images`` images, a few questions each, and some without one."""

    def write(num_images=12, questions=3, blind=2) -> list[Record]:
        rng = np.random.default_rng(0)
        records = []
        for i in range(num_images):
            path = str(tmp_path / f"{i}.png")
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
            for q in range(questions + i % 2):
                words = "is it a circle " * (1 + (i + q) % 3)
                records.append(record(f"{i}/{q}", [path], words))
        return records + [record(f"blind/{i}") for i in range(blind)]

    return write


@pytest.fixture(scope="session")
def chat_tokenizer():
    words = " ".join(f"w{i}" for i in range(60))
    return tokenizer.build([words, "represent the user's input . find it NULL"])


@pytest.fixture(scope="session")
def prompt_collator(chat_tokenizer):
    before = [chat_tokenizer.unk_id]

    def span(width, height):
        return Span.of(chat_tokenizer.image_id, 1 + width // 8, before, before)

    images = image_files.ImageFormat(image_files.squares(8), 8, span, fixed=False)
    return PromptCollator(chat_tokenizer, images)


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    """Texts, images and both, on both sides; some positives are of several queries."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)

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


@pytest.fixture
def qwen(tmp_path):
    return processor.load(write_processor(tmp_path, QWEN))


@pytest.fixture
def ragged(tmp_path):
    """Records about images of many sizes: one or two images, shared by some questions."""
    records, rng = [], np.random.default_rng(0)
    for i in range(12):
        width, height = SIZES[i % (len(SIZES) - 1)]
        path = str(tmp_path / f"{i}.png")
        pixels = rng.integers(0, 256, (height + i, width, 3), np.uint8)
        Image.fromarray(pixels).save(path)
        paths = [path] if i % 3 else [str(tmp_path / f"{max(i - 1, 0)}.png"), path]
        records += [record(f"{i}/{q}", paths, "is it a circle") for q in range(1 + i % 2)]
    return [*records, record("blind")]
