"""Small conversations and pictures, written to a temporary folder."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from jaxvlm.data import tokenizer
from jaxvlm.data.formats import Record, Turn


@pytest.fixture(scope="session")
def word_tokenizer():
    texts = ["what color is the shape?", "red blue green yes no", "is it a circle", "describe both"]
    return tokenizer.build(texts)


@pytest.fixture
def picture(tmp_path):
    """``picture(name, color)`` writes a small PNG and returns its path."""

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
    """Records about ``num_pictures`` pictures, a few questions each, and some without one."""

    def write(num_pictures=12, questions=3, blind=2) -> list[Record]:
        rng = np.random.default_rng(0)
        records = []
        for i in range(num_pictures):
            path = str(tmp_path / f"{i}.png")
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
            for q in range(questions + i % 2):
                words = "is it a circle " * (1 + (i + q) % 3)
                records.append(record(f"{i}/{q}", [path], words))
        return records + [record(f"blind/{i}") for i in range(blind)]

    return write
