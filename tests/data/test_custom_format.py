"""What a data format of the user's own may give, and what is said of the rest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from jaxvlm.config import DataConfig, Extension
from jaxvlm.data.errors import DataError, Problem, enforce
from jaxvlm.data.images.image_files import squares
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.sources import conversation_formats, pair_formats
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.sources.fields import BadItem
from jaxvlm.data.validate import validate

IMAGE = Image.new("RGB", (4, 4))
TURNS = (Turn("user", "what?"), Turn("assistant", "this"))
GIVEN: list = []


def give(file):
    """The format: what the test put in ``GIVEN``."""
    return GIVEN


def read(*items, of=conversation_formats, spec="/data/here.txt"):
    GIVEN[:] = items
    config = DataConfig(format=Extension(target=f"{__file__}:give"))
    # The file is imported again under another name, so the list has to be shared.
    from jaxvlm.config.extension import resolve

    vars(__import__("sys").modules[resolve(config.format, "x").__module__])["GIVEN"] = GIVEN
    return of.read(spec, config)


def chat(**image):
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}]
    return {"messages": turns, **image}


def test_a_format_reads_a_name_that_is_built_in_too():
    (record,), _ = read(Record("mine", TURNS, ()), spec="easy-vqa:train")
    assert record.id == "mine"


@pytest.mark.parametrize("image", [IMAGE, b"png", np.zeros((4, 4, 3)), 3, {"bytes": b"png"}])
def test_an_image_must_be_a_file(image):
    part = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    inline = chat()
    inline["messages"][0] = {"role": "user", "content": part}
    items = [chat(image=image), chat(images=[image]), inline]
    records, problems = read(*items, Record("", TURNS, (image,)))
    assert not records and len(problems) == 4
    for index, problem in enumerate(problems):
        assert (
            problem.id == f"here.txt[{index}]" and problem.reason == "an image's name is not text"
        )
        assert "an image must be a file, given by its name" in problem.detail
    pair = {"query": "a", "positive_image": image}
    examples, problems = read(pair, of=pair_formats)
    assert not examples and "image" in problems[0].reason
    with pytest.raises(BadItem, match="an image's name is not text"):
        Item.of("a", image)


def test_a_record_of_ones_own_is_checked_like_one_of_a_file():
    for turns, reason in (
        (({"role": "user"}, TURNS[1]), "a turn is not an object"),
        ((Turn("human", "what?"), TURNS[1]), "unknown role"),
        ((Turn("user", 3), TURNS[1]), "a turn whose 'content' is neither text nor a list"),
    ):
        (problem,) = read(Record("r", turns, ()))[1]
        assert (problem.id, problem.reason) == ("r", reason)
    (record,), problems = read(Record("r", TURNS, ("a.png",)))
    assert not problems and record.images == ("/data/a.png",)
    assert record.turns[0].content == "<image>what?"


@pytest.mark.parametrize("of", [conversation_formats, pair_formats])
def test_a_problem_names_its_file(of):
    given = Problem("line 3", "odd"), Problem("", "odd"), Problem("here.txt:3", "odd", "x")
    _, problems = read(*given, of=of)
    assert [p.id for p in problems] == ["here.txt: line 3", "here.txt[1]", "here.txt:3"]


def test_a_check_lists_what_training_says(write_json, image, tmp_path):
    gone = {"id": "gone", "image": "gone.png", **chat()}
    path = write_json([{"id": "good", **chat()}, gone, {"id": "odd", "text": "x"}])
    report = validate(path, DataConfig(), prepare=squares(64))
    said = "\n".join(report.lines())
    assert f"missing file: gone ({tmp_path}/gone.png)" in said
    assert "'conversations' nor 'messages'" in said and "odd (keys: id, text)" in said
    assert dataclasses.asdict(report)["problems"]["missing file"] == ["gone"]
    _, problems = conversation_formats.read(path)
    with pytest.raises(DataError) as error:
        enforce(problems, 3, "skip", 0.01, path)
    assert "(keys: id, text)" in str(error.value)
    assert f"`jaxvlm data check {path} --config=RECIPE` lists them" in str(error.value)
