"""Every key that other projects document is read as they mean it, harmless, or refused by name."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxvlm.config import DataConfig
from jaxvlm.data.sources import conversation_formats, fields, pair_formats
from tests.bad_input import values
from tests.data import documented_keys as documented
from tests.data.documented_keys import ANSWER, ASKED, TEXT, chat, flag, image, llava, pair, swift

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEYS = [(project, key) for project in documented.PROJECTS for key in project.keys]
OF_PAIRS = (documented.FLAG_EMBEDDING, documented.SENTENCE_TRANSFORMERS)


def names(problem):
    """Whether a problem's text has a name as a word of its own."""
    return re.findall(r"[\w-]+", f"{problem.reason} {problem.detail}")


@pytest.mark.parametrize(
    ("project", "key"), KEYS, ids=[f"{p.name}-{k.level}-{k.name}" for p, k in KEYS]
)
def test_a_documented_key_is_read_as_it_is_meant_or_refused_by_name(project, key, write_json):
    path = write_json([key.record])
    is_pair = project in OF_PAIRS or "positive_messages" in key.record
    reader = pair_formats if is_pair else conversation_formats
    read, problems = reader.read(path)
    assert [documented.shown(record) for record in read] == ([key.read] if key.read else [])
    assert [key.name in names(problem) for problem in problems] == [True] * (not key.read)
    if not key.read and not is_pair:  # nor does a run that trains embeddings pass over it
        assert not pair_formats.read(path)[0]


def test_the_page_has_every_documented_key():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert documented.table() in page, "python -m tests.data.documented_keys prints the table"
    assert documented.sources() in page
    for reason, harmless in fields.HARMLESS.items():
        listed = ", ".join(f"`{name}`" for name in harmless)
        assert f"| {reason} | {listed} |" in page, reason


WEIGHTS = {"loss", "loss_scale", "loss_weight", "train", "weight"}
OF_IMAGE = {"path", "url", "image", "bytes"}
MMEB = {"qry": "hi", "pos_text": "yes"}
PLACES = [
    (conversation_formats, chat(), (), {"id"}),
    (conversation_formats, llava(), (), {"id"}),
    (conversation_formats, chat(), ("messages", 1), {"role", "content"} | WEIGHTS),
    (conversation_formats, llava(), ("conversations", 1), {"from", "value"} | WEIGHTS),
    (conversation_formats, image(image="a.png"), ("messages", 0, "content", 0), WEIGHTS),
    (conversation_formats, image(image="a.png"), ("messages", 0, "content", 1), WEIGHTS),
    (
        conversation_formats,
        image(image={"path": "a.png"}),
        ("messages", 0, "content", 0, "image"),
        set(),
    ),
    (conversation_formats, chat(images=[{"path": "a.png"}]), ("images", 0), set()),
    (pair_formats, pair(), (), pair_formats.OWN_FIELDS | {"anchor", "sentence1", "sentence2"}),
    (pair_formats, flag(), (), {"prompt", "type"}),
    (pair_formats, MMEB, (), {"neg_text"}),
    (pair_formats, swift(), (), {"task"}),
    (pair_formats, swift(), ("positive_messages", 0, 0), {"role", "content"} | WEIGHTS),
    (pair_formats, pair(query={"text": "hi"}), ("query",), {"text", "image", "instruction"}),
    (pair_formats, pair(query_image={"path": "a.png"}), ("query_image",), set()),
]
"""Reader, a good record, where a key is added, and names that are read there; the names of all
formats' fields are left out too."""
READ = (
    {"messages", "conversations", "images", "image", "type", "text", "path", "url", "image_url"}
    | {"bytes", "score", "scores", "label", "task"}
    | {name for _, read in pair_formats.FORMATS.values() for name in read}
)
NAMES = st.one_of(
    st.text(min_size=1, max_size=12),
    st.sampled_from(sorted(READ | WEIGHTS | fields.OF_RECORD)).flatmap(
        lambda name: st.sampled_from([name.upper(), f"{name}s", f"{name}_mask", f" {name}"])
    ),
)
FILLED = values.VALUES.filter(lambda value: not fields.is_empty(value))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PLACES), NAMES, FILLED)
def test_an_unknown_key_is_refused_by_its_name(tmp_path, place, name, value):
    reader, record, at, read = place
    harmless = fields.OF_RECORD if at == () or at[-1] == "query" else fields.OF_IMAGE
    if name in READ | read | harmless | fields.OF_TURN or re.match(r"negative(_image)?_\d", name):
        return
    inner = record
    for step in at:
        inner = inner[step]
    path = tmp_path / "data.json"
    path.write_text(json.dumps([values.replaced(record, at, inner | {name: value})]))
    found, (problem,) = reader.read(str(path))
    assert not found and "that jaxvlm does not read" in problem.reason
    assert name in problem.detail.split(", ") or ", " in name


@pytest.mark.parametrize("name", ["source", "index", "image_id", "dataset"])
def test_a_name_that_may_choose_an_image_is_not_harmless_in_a_part(name, write_json):
    part = {"type": "image", name: 1}
    record = {"messages": [{"role": "user", "content": [part, TEXT]}, ANSWER], "images": ["a.png"]}
    _, (problem,) = conversation_formats.read(write_json([record]))
    assert problem.detail == name and "of the content part" in problem.reason
    assert conversation_formats.read(write_json([chat(**{name: 1})]))[0]


@pytest.mark.parametrize(
    ("record", "ignored", "said"),
    [
        (documented.answer(weight=0.5), ("weight",), documented.TWICE),
        (documented.answered(train=False), ("train",), "user: hi | assistant: hi"),
        (image(path="a.png", url="b.png"), ("url",), documented.SEEN),
        (image(image={"path": "a.png", "bytes": "x"}), ("bytes",), documented.SEEN),
    ],
)
def test_a_field_that_could_be_read_is_ignored_at_every_level(record, ignored, said, write_json):
    path = write_json([record])
    assert not conversation_formats.read(path)[0]
    (read,), _ = conversation_formats.read(path, DataConfig(ignored_fields=ignored))
    assert documented.shown(read) == said


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([ANSWER | {"weight": 1, "train": False}], "a training weight other than 0 and 1"),
        ([ANSWER | {"loss": "false"}], "a training weight other than 0 and 1"),
        ([ANSWER | {"weight": [0]}], "a training weight other than 0 and 1"),
        ([ANSWER | {"weight": 0}], "no assistant turn that is trained"),
        (
            [{"role": "assistant", "content": ""}, ASKED, ANSWER | {"loss": 0}],
            "an assistant turn is empty",
        ),
        (
            [ANSWER | {"content": [TEXT | {"train": False}, TEXT]}],
            "a content part that is trained otherwise than its turn",
        ),
        (
            [ANSWER | {"content": [TEXT | {"train": True}], "loss": False}, ASKED, ANSWER],
            "a content part that is trained otherwise than its turn",
        ),
    ],
)
def test_a_training_weight_that_can_not_be_followed_is_refused(turns, reason, write_json):
    _, (problem,) = conversation_formats.read(write_json([{"messages": [ASKED, *turns]}]))
    assert problem.reason.startswith(reason)
