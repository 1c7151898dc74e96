"""Every format gives the same records; every bad record is named, with the reason."""

import json
import pathlib
import sys

import pytest

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.conversation_formats import Turn, read
from jaxvlm.data.sources.fields import name_of
from tests.data.conftest import llava

QUESTION = "<image>what color is it?"  # no line break: see formats.tidy


def messages(content=QUESTION, answer="red", **more):
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"id": "x", "messages": turns, **more}


def part(**image):
    return [{"type": "image", **image}, {"type": "text", "text": "\nwhat color is it?"}]


@pytest.mark.parametrize(
    "item",
    [
        llava(),
        llava(image=["a.png"]),
        llava(text="what color is it?"),  # no placeholder, one image: it stands first
        messages(images=["a.png"]),
        messages(part(), images=["a.png"]),
        messages(part(image="a.png")),
        messages(part(path="a.png")),
        messages(part(url="a.png")),
        messages([{"type": "image_url", "image_url": {"url": "a.png"}}, part()[1]]),
    ],
)
@pytest.mark.parametrize("lines", [False, True])
def test_formats_agree(item, lines, write_json, tmp_path):
    records, problems = read(write_json([item], lines=lines))
    assert not problems
    assert records[0].turns == (Turn("user", QUESTION), Turn("assistant", "red"))
    assert records[0].images == (str(tmp_path / "a.png"),)
    assert records[0].id == "x"


def test_image_root_and_roles(write_json):
    item = llava(image=None, text="hello")
    item["conversations"].insert(0, {"from": "system", "value": "be brief"})
    with_image = llava("y", "sub/a.png")
    records, _ = read(write_json([item, with_image]), DataConfig(image_root="/images"))
    assert [t.role for t in records[0].turns] == ["system", "user", "assistant"]
    assert records[1].images == ("/images/sub/a.png",)


BAD = {
    "placeholders and images differ": llava(text="<image><image> what?"),
    "placeholders and images differ in number": llava(image=["a.png", "b.png"], text="what?"),
    "empty conversation": {"id": "x", "conversations": []},
    "no assistant turn": {"id": "x", "messages": [{"role": "user", "content": "hi"}]},
    "an assistant turn is empty": llava(answer=" "),
    "turn is empty": {
        "id": "x",
        "messages": [
            *({"role": "user", "content": "hi"}, {"role": "assistant", "content": "\n"}),
            *({"role": "user", "content": "hi?"}, {"role": "assistant", "content": "yes"}),
        ],
    },
    "an image marker of another format": llava(text="<image_1> what?"),
    "an image in an assistant turn": llava(text="draw", answer="<image>"),
    "unknown role": {"id": "x", "conversations": [{"from": "cat", "value": "miau"}]},
    "a turn without 'role'": {"id": "x", "messages": [{"content": "hi"}]},
    "a turn without 'from'": {"id": "x", "conversations": [{"value": "hi"}]},
    "a turn is not an object": {"id": "x", "conversations": ["hi"]},
    "neither 'conversations'": {"id": "x", "text": "hi"},
    "an image that is not a file": llava(image="https://example.com/a.png"),
    "image that is not a file": llava(image="gs://bucket/a.png"),
    "a content item of unknown type": messages([{"type": "audio", "audio": "a.wav"}]),
    "images named both": messages(part(image="a.png"), images=["b.png"]),
    "neither text nor a list": messages(content=None),
    "text that is not valid Unicode": llava(answer="\ud83d"),
    "both 'conversations' and 'messages'": llava() | messages("hi"),
    "both 'image' and 'images'": llava(image="a.png") | {"images": ["b.png"]},
    "both 'path' and 'url'": messages(part(path="a.png", url="b.png")),
    "an image with several names": messages("<image>", images=[{"path": "a", "url": "b"}]),
    "a training weight other than 0 and 1": {
        "id": "x",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes", "weight": 0.5},
        ],
    },
    "a content part whose 'text' is not text": messages([{"type": "text", "text": None}]),
}


@pytest.mark.parametrize("make", [lambda x: llava(answer=x), lambda x: messages("hi", x)])
def test_an_integer_is_its_digits_and_other_values_are_refused(make, write_json):
    (record,), _ = read(write_json([make(-3)]))
    assert record.turns[-1].content == "-3"
    (record,), _ = read(write_json([messages([{"type": "text", "text": 7}])]))
    assert record.turns[0].content == "7"
    for value, detail in (
        (True, 'true; write the words that are meant, such as "true"'),
        (1.0, '1.0; write the words that are meant, such as "1.0"'),
        (None, "null"),
        ({"a": 1}, "dict"),
    ):
        _, (problem,) = read(write_json([make(value)]))
        assert problem.detail == detail and "text" in problem.reason


@pytest.mark.parametrize("same", [(1, 1.0, "1"), (0, 0.0, "0", -0.0), (10**22, 1e22)])
def test_a_number_is_one_name_however_it_is_written(same):
    assert len({name_of(value) for value in same}) == 1
    assert name_of(same[-1]) == str(same[0])


def test_names_that_differ_stay_apart():
    names = [name_of(value) for value in (1, "1.0", "01", 1.5, "a", " a", True, "True", 10**22 + 1)]
    assert len(set(names)) == len(names) and None not in names
    assert name_of("cafe\u0301") == name_of("caf\u00e9") != name_of("cafe"), "to Unicode one text"
    assert [name_of(value) for value in (float("nan"), float("inf"), [1], {}, None)] == [None] * 5


def test_fields_that_say_nothing_are_no_harm(write_json):
    item = llava() | {"videos": [], "system": None, "source": "web"}
    item["conversations"][1] |= {"weight": 1, "tool_calls": None}
    assert len(read(write_json([item]))[0]) == 1


def _of_turn(**fields):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"} | fields]
    return {"id": "x", "messages": turns}


def _of_part(kind, **fields):
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "hi"}]
    return messages([parts[kind] | fields])


@pytest.mark.parametrize(
    "level, item",
    [
        ("record", llava() | {"functions": ["search"]}),
        ("record", llava() | {"loss_scale": "last_round"}),
        ("record", llava() | {"Videos": ["a.mp4"]}),
        ("record", _of_turn() | {"rejected_response": "no"}),
        ("record", _of_turn() | {"frobnicate": 0}),
        ("turn", _of_turn(function_call={"name": "f"})),
        ("turn", _of_turn(masked=True)),
        ("turn", _of_turn(name="Ann")),
        ("turn", {"id": "x", "conversations": [{"from": "gpt", "value": "hi", "mask": 1}]}),
        ("content part", _of_part(0, resized_height=280)),
        ("content part", _of_part(0, min_pixels=50176)),
        ("content part", _of_part(1, cache_control={"type": "ephemeral"})),
        ("image", messages([{"type": "image_url", "image_url": {"url": "a", "detail": "low"}}])),
    ],
)
def test_a_field_that_is_not_read_is_refused_unless_it_is_ignored(level, item, write_json):
    path = write_json([item])
    records, (problem,) = read(path)
    assert not records and problem.id == "x"
    assert problem.reason.startswith(f"a field of the {level} that jaxvlm does not read")
    ignored = tuple(problem.detail.split(", "))
    records, problems = read(path, DataConfig(ignored_fields=ignored))
    assert len(ignored) == 1 and not [p for p in problems if "does not read" in p.reason]


@pytest.mark.parametrize("reason", BAD)
def test_bad_record_is_named(reason, write_json):
    records, problems = read(write_json([llava("good"), BAD[reason]]))
    assert [r.id for r in records] == ["good"]
    assert [p.id for p in problems] == ["x"]
    assert reason in problems[0].reason


def test_bad_lines_have_numbers(tmp_path, write_json):
    path = pathlib.Path(write_json([llava("one"), llava("two")], lines=True))
    path.write_bytes(path.read_bytes() + b'\n{"id": \n{"id": "\xff"}\n[1]\n')
    records, problems = read(str(path))
    assert len(records) == 2
    found = [(p.id, p.reason) for p in problems]
    assert found == [
        ("data.jsonl:3", "not JSON"),
        ("data.jsonl:4", "not UTF-8"),
        ("data.jsonl:5", "not a JSON object"),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b"[]", "no record"),
        (b"[{}", "not JSON"),
        (b"hello", "neither JSON"),
        (b'[\n{"id": "\xff"}]', "data.json:2: not UTF-8"),
    ],
)
def test_bad_file(content, says, tmp_path):
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        read(str(path))
    assert "\n" not in str(error.value)


def test_easy_vqa():
    records, problems = read("easy-vqa:test")
    assert len(records) == 9673
    assert not problems
    assert {r.tags["kind"] for r in records} == {"yes/no", "shape", "color"}
    assert all(pathlib.Path(r.images[0]).is_file() for r in records[::500])


def test_easy_vqa_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(DataError, match="pip install easy-vqa"):
        read("easy-vqa:train")


TWO_TURNS = [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "red"}]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"id": "\ud800"}, "text that is not valid Unicode"),
        ({"id": [1]}, "an id that is neither text nor a number"),
        ({"conversations": 300 * TWO_TURNS}, "a conversation of more than 512 turns"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "a content item of unknown"),
    ],
)
def test_what_no_report_or_template_can_hold_is_refused(record, reason, tmp_path):
    path = tmp_path / "data.jsonl"
    text = json.dumps({"conversations": TWO_TURNS, "id": "good"})
    given = {"conversations": TWO_TURNS, **record}
    if "messages" in record:
        given = record
    path.write_text(f"{json.dumps(given)}\n{text}\n", encoding="utf-8")
    (good,), (problem,) = read(str(path))
    assert good.id == "good" and problem.reason.startswith(reason)


@pytest.mark.parametrize(
    "part", ["9" * 5_000, "1" + "0" * 400, "[" * 980 + "]" * 980, "[" * 100_000]
)
def test_json_that_python_can_not_hold_costs_one_line(part, tmp_path):
    path = tmp_path / "data.jsonl"
    text = json.dumps({"conversations": TWO_TURNS, "id": "good"})
    path.write_text('{"id": ' + part + "}\n" + text + "\n", encoding="utf-8")
    (good,), (problem,) = read(str(path))
    assert good.id == "good" and problem.reason == "not JSON"


TWICE = {
    "record": ('"conversations": []', True),
    "id": ('"id": "other"', True),
    "the same id": ('"id": "x"', False),
    "turn": ('"metadata": [{"a": 1, "a": 2}]', True),
    "1 is not true": ('"metadata": {"a": 1, "a": true}', True),
    "the same object": ('"metadata": {"a": {"b": [1]}, "a": {"b": [1]}}', False),
}


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("level", TWICE)
def test_a_key_twice_with_different_values_is_refused(level, lines, tmp_path):
    part, differs = TWICE[level]
    path = tmp_path / ("data.jsonl" if lines else "data.json")
    item = f'{{"id": "x", "conversations": {json.dumps(TWO_TURNS)}, {part}}}'
    good = json.dumps({"conversations": TWO_TURNS, "id": "good"})
    path.write_text(f"{item}\n{good}\n" if lines else f"[{item}, {good}]", encoding="utf-8")
    if differs and not lines:
        with pytest.raises(DataError, match=r"the key '\w+' twice, with different values"):
            read(str(path))
        return
    records, problems = read(str(path))
    assert [r.id for r in records] == (["good"] if differs else ["x", "good"])
    assert ["twice" in p.detail for p in problems] == [True] * differs


MARKERS = ["<image_1>", "<Image>", "<img>", "<image 2>", "<|image_1|>", "[IMG]", "<ImageHere>"]


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("mark", ["", "<image>"])
def test_a_marker_of_another_format_is_no_text_beside_an_image(marker, mark, write_json):
    item = llava(text=f"{mark}what color is {marker}?")
    _, (problem,) = read(write_json([item]))
    assert problem.reason.startswith("an image marker of another format")
    assert "data.literal_markers" in problem.reason and problem.detail == marker
    (record,), problems = read(write_json([item]), DataConfig(literal_markers=(marker,)))
    assert not problems and f"is {marker}?" in record.turns[0].content
    alone = llava(image=None, text=f"what does {marker} mean?")
    assert not read(write_json([alone]))[1]  # of HTML, say
    html = llava(text="what is <img src='a'> and <images>?")
    assert not read(write_json([html]))[1]
