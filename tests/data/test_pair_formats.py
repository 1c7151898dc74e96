"""Every form of a pair gives the same examples; every bad record is named, with the reason."""

import csv
import io
import json
import logging
import sys
import tarfile

import pytest
from PIL import Image

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import image_files
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.sources import pair_formats

LITERAL = "data.literal_markers can keep it"
FOUND = Example("x", Item("what is it?"), Item("a cat"), (Item("a dog"), Item("a cow")))
SEEN = Example("x", Item("<image>what is it?", "a.png"), Item("<image>", "b.png"))


def user(content):
    return [{"role": "user", "content": content}]


def message(image, said="what is it?"):
    parts = [{"type": "image", "image": image}, {"type": "text", "text": said}]
    return [{"role": "user", "content": parts}]


TEXTS = [
    {"query": "what is it?", "positive": "a cat", "negatives": ["a dog", "a cow"]},
    {"query": " what is it?\n", "positive": ["a cat"], "negative": ["a dog", "a cow"]},
    {"query": "what is it?", "positive": "a cat", "negative": "a dog", "negative_1": "a cow"},
    {"anchor": "what is it?", "positive": "a cat", "negative_2": "a cow", "negative_1": "a dog"},
    {"query": {"text": "what is it?"}, "positive": "a cat", "negatives": ["a dog", "a cow"]},
    {"qry": "what is it?", "pos_text": "a cat", "neg_text": ["a dog", "a cow"]},
    {"qry": "what is it?", "qry_image_path": "", "pos_text": ["a cat"], "pos_image_path": [""]}
    | {"neg_text": ["a dog", "a cow"], "neg_image_path": ["", ""]},
    {"messages": user("what is it?"), "positive_messages": [user("a cat")]}
    | {"negative_messages": [user("a dog"), user("a cow")]},
]
IMAGES = [
    {"query": "what is it?", "query_image": "a.png", "positive_image": "b.png"},
    {"query": "<image>what is it?", "query_image": "a.png", "positive_image": ["b.png"]},
    {"query": "<image>\nwhat is it?", "query_image": {"path": "a.png"}, "positive_images": "b.png"},
    {"query": {"text": "what is it?", "image": "a.png"}, "positive": {"image": "b.png"}},
    {"qry": "<|image_1|>\nwhat is it?", "qry_image_path": "a.png", "pos_image_path": "b.png"},
    {"qry": "<|image_1|>\nwhat is it?", "qry_image_path": "a.png", "pos_text": "<|image_1|>"}
    | {"pos_image_path": "b.png", "neg_text": [""], "neg_image_path": [""]},
    {"messages": user("<image>what is it?"), "images": ["a.png"]}
    | {"positive_messages": [user("<image>")], "positive_images": [["b.png"]]},
    {"messages": message("a.png"), "positive_messages": [user("")], "positive_images": [["b.png"]]},
]


def located(example, root):
    def at(item):
        return item._replace(image=str(root / item.image) if item.image else "")

    negatives = tuple(map(at, example.negatives))
    return example._replace(
        query=at(example.query), positive=at(example.positive), negatives=negatives
    )


@pytest.mark.parametrize(
    ("item", "want"),
    [(item, FOUND) for item in TEXTS] + [(item, SEEN) for item in IMAGES],
)
def test_formats_agree(item, want, write_json, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        examples, problems = pair_formats.read(write_json([item | {"id": "x"}]))
    assert (examples, problems) == ([located(want, tmp_path)], [])
    assert not caplog.records


def mapped(*pairs):
    return DataConfig(column_mapping=pairs)


def test_columns_are_mapped(write_json):
    rows = [{"question": "a", "passage": "b", "hard": "c", "n": 3, "source": "web", "text": ""}]
    mapping = [("question", "query"), ("passage", "positive"), ("hard", "negative"), ("n", "id")]
    (found,), problems = pair_formats.read(write_json(rows), mapped(*mapping))
    assert found == Example("3", Item("a"), Item("b"), (Item("c"),)) and not problems
    with pytest.raises(DataError, match=r"names 'answer', which no record has; .*passage"):
        pair_formats.read(write_json(rows), mapped(("answer", "positive")))
    config = mapped(("question", "query"), ("n", "query"))
    _, (problem,) = pair_formats.read(write_json(rows), config)
    assert problem.reason == "two columns for 'query'"


def test_scores_labels_tasks_and_instructions(write_json):
    rows = [
        {"sentence1": "a", "sentence2": "b", "score": 0.5},
        {"sentence1": "a", "sentence2": "b", "label": 1},
        {"messages": user("a"), "positive_messages": [user("b")], "label": 0.7},
        {"query": "a", "positive": "b", "negatives": ["c"], "scores": [0.9, -0.1], "label": 4},
        {"query": "a", "positive": ["b", "c"], "negative": "d", "scores": [1, 2, 3], "task": "t"},
        {"query": "a", "positive": "b", "instruction": "find", "document_instruction": "shown"},
        {"messages": [{"role": "system", "content": "find"}, *user("a")]}
        | {"positive_messages": [user("b")]},
    ]
    found, problems = pair_formats.read(write_json(rows))
    assert not problems
    pairs = [(0.5,), (1,), (0.7,)]
    assert [e.scores for e in found] == [*pairs, (0.9, -0.1), (1, 3), (2, 3), (), ()]
    assert [e.label for e in found] == [
        "",
        "",
        "",
        "4",
        "id:data.json[4]",
        "id:data.json[4]",
        "",
        "",
    ]
    assert [e.id for e in found[4:6]] == ["data.json[4]#0", "data.json[4]#1"]
    assert [e.task for e in found[3:5]] == ["", "t"]
    assert [e.query.instruction for e in found[-2:]] == ["find", "find"]
    assert found[-2].positive.instruction == "shown"


def test_labels_and_ids_are_compared_by_one_function(write_json):
    rows = [good(label=1, id=7), good(label=1.0, id=8.0), good(label="1"), good(label="1.0")]
    found, problems = pair_formats.read(write_json(rows))
    assert [example.label for example in found] == ["1", "1", "1", "1.0"] and not problems
    assert [example.id for example in found[:2]] == ["7", "8"]
    with pytest.raises(DataError, match="ids that several records share: 7 "):
        pair_formats.read(write_json([good(id=7), good(id=7.0)]))
    _, problems = pair_formats.read(write_json([good(label=float("nan")), good(id=float("nan"))]))
    assert [problem.reason for problem in problems] == [
        "'label' is neither text nor a number",
        "an id that is neither text nor a number",
    ]


def good(**more):
    return {"query": "a", "positive": "b"} | more


UNREAD = "that jaxvlm does not read; data.ignored_fields can pass over it"
BAD = {
    "not a JSON object": [1],
    "no positive": {"query": "a"},
    "neither text nor an image": good(query=" "),
    "'query' is a list; a record has one query": good(query=["a"]),
    "'positive' is not text": good(positive=[3]),
    "'negative' needs an image (or null) for each text": good(
        negatives=["c", "d"], negative_images=["c.png"]
    ),
    "placeholders and images differ in number": good(query="<image> what?"),
    "needs one score for each positive and then each negative": good(scores=[1, 2]),
    "a score that is not a finite number": good(score="high"),
    f"a field of the record {UNREAD}": good(videos=["a.mp4"]),
    f"a field of the turn {UNREAD}": {
        "messages": [user("a")[0] | {"loss_mask": 0}],
        "positive_messages": [user("b")],
    },
    f"a field of the image of 'query' {UNREAD}": good(query_image={"path": "a.png", "crop": 3}),
    "both 'score' and 'scores'; which one is meant?": good(score=1, scores=[1]),
    "both 'anchor' and 'query'; which one is meant?": good(anchor="c"),
    "both 'qry' and 'positive_messages'; which one is meant?": good(qry="a", positive_messages=[1]),
    "both 'instruction' and 'query_instruction'; which one is meant?": good(
        instruction="a", query_instruction="b"
    ),
    "two images for 'query'": good(query={"image": "a.png"}, query_image="b.png"),
    f"a field of the 'query' {UNREAD}": good(query={"txt": "a"}),
    "an image that is not a file": good(query_image="https://example.com/a.png"),
    "an image's name is not text": good(query_image=3),
    "text that is not valid Unicode": good(query="\ud83d"),
    "'label' is neither text nor a number": good(label=[1]),
    f"an image marker of another format, which would be text; {LITERAL}": good(
        query="<image_1> what?", query_image="a.png"
    ),
    "several images in one item": {
        "messages": user("<image><image>"),
        "images": ["a.png", "b.png"],
        "positive_messages": [user("a")],
    },
    "'type' is not normal": {"query": "a", "pos": ["b"], "type": "only_1neg"},
    "'pos_scores' and 'neg_scores' need one score for each text": {
        "query": "a",
        "pos": ["b", "c"],
        "pos_scores": [1],
    },
    "'messages' is not a user turn, or a system and a user turn": {
        "messages": [*user("a"), {"role": "assistant", "content": "b"}],
        "positive_messages": [user("a")],
    },
    "'positive_messages' is not a list of messages": {
        "messages": user("a"),
        "positive_messages": ["a"],
    },
    "'positive_images' needs a list for each of 'positive_messages'": {
        "messages": user("a"),
        "positive_messages": [user("<image>")],
        "positive_images": [["a.png"], ["b.png"]],
    },
}


@pytest.mark.parametrize(
    "bad",
    [
        good(query_image=["a.png", "b.png"]),
        good(positive={"text": "b", "image": ["a.png", "b.png"]}),
        good(negative_images=[["a.png", "b.png"]]),
        {"qry": "a", "qry_image_path": ["a.png", "b.png"], "pos_text": "b"},
    ],
)
def test_several_images_in_an_item_are_refused_with_a_way_out(bad, write_json):
    found, (problem,) = pair_formats.read(write_json([bad]))
    assert not found and problem.reason == "several images in one item"
    assert "2 images; put them into one image file, or into an item each" in problem.detail


@pytest.mark.parametrize("reason", BAD)
def test_bad_record_is_named(reason, write_json):
    bad = BAD[reason]
    bad = bad | {"id": "x"} if isinstance(bad, dict) else bad
    examples, problems = pair_formats.read(write_json([good(id="good"), bad]))
    assert [e.id for e in examples] == ["good"]
    assert [p.reason for p in problems] == [reason]
    assert problems[0].id == ("x" if isinstance(bad, dict) else "data.json[1]")


def test_records_with_an_empty_id_are_named_by_their_lines(write_json):
    examples, problems = pair_formats.read(write_json([good(id=None), good(id=None)]))
    assert not problems
    assert [example.id.endswith(f"[{i}]") for i, example in enumerate(examples)] == [True, True]


def test_nothing_is_lost_silently(write_json):
    rows = [good(source="web", url=None), good(source="web", rank=3), good(negative="c")]
    found, (problem,) = pair_formats.read(write_json(rows))
    assert len(found) == 2 and problem.detail == "rank"
    config = DataConfig(ignored_fields=("rank",))
    assert len(pair_formats.read(write_json(rows), config)[0]) == 3
    with pytest.raises(DataError, match=r"ids that several records share: 7 \(1 in all\)"):
        pair_formats.read(write_json([good(id=7), good(id="7"), good(id=8)]))


@pytest.mark.parametrize(
    "name, text, positives, reasons",
    [
        # Quotation marks of a TSV are text, at the start of a cell too.
        (
            "a.tsv",
            'query\tpositive\nq\t"I have a dream" said\nr\t"To be\ns\t"Pig" is\n',
            ['"I have a dream" said', '"To be', '"Pig" is'],
            [],
        ),
        # A mark that opens a cell and ends behind the next records.
        ("a.csv", 'query,positive\n"5 inch,a\n12",b\nc,d\n', ["b", "d"], ["opens a cell"]),
        ("a.csv", 'query,positive\na,"b\nc,d\ne,f\n', ["d", "f"], ["not CSV"]),
        ("a.csv", 'query,positive\na,"b" said\nc,d\n', ["d"], ["not CSV"]),
        ("a.csv", 'query,positive\na,"two\nlines"\nc,d\n', ["two\nlines", "d"], []),
        ("a.csv", "query,positive\r\na,b\r\n\r\nc\r\n", ["b"], ["fewer cells than columns"]),
        ("a.csv", "\ufeffquery,positive\na,b\n", ["b"], []),
    ],
)
def test_no_record_swallows_another(tmp_path, name, text, positives, reasons):
    path = tmp_path / name
    path.write_bytes(text.encode())
    found, problems = pair_formats.read(str(path))
    assert [e.positive.text for e in found] == positives
    assert [r in p.reason for p, r in zip(problems, reasons, strict=True)] == [True] * len(reasons)


def test_a_tsv_that_was_written_with_quotation_marks(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('query\tpositive\na\t"say ""b"" \t or c"\n')
    config = DataConfig(tsv_quoting=True)
    (found,), problems = pair_formats.read(str(path), config)
    assert found.positive.text == 'say "b" \t or c' and not problems
    assert pair_formats.read(str(path))[1][0].reason == "more cells than columns"


@pytest.mark.parametrize(
    "cell, negatives",
    [
        ('["n1", "n2"]', ["n1", "n2"]),
        ("[]", []),
        ("[sic] it is", ["[sic] it is"]),
        ("[laughs]", ["[laughs]"]),
        ("{x} and {y}", ["{x} and {y}"]),
        ("['n1', 'n2']", None),
        ("['n1' 'n2']", None),
        ("['n1'\n 'n2']", None),
        ('{"text": "n1"}', ["n1"]),
        ("{'text': 'n1'}", None),
    ],
)
def test_a_cell_with_a_list_is_one_or_refused(tmp_path, cell, negatives):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["query", "positive", "negatives"], ["a", "b", cell]])
    found, problems = pair_formats.read(str(path))
    if negatives is None:
        assert not found and "a list that is not JSON" in problems[0].reason
    else:
        assert [item.text for item in found[0].negatives] == negatives and not problems


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["sentence1", "sentence2", "score"], ["a, b", 'say "c"', "0.25"]])
        rows.writerows([["a", "b", "1", "more"], ["a", "", "1"], ["a", "b", "much"]])
    (found,), problems = pair_formats.read(str(path))
    assert found == Example("a.csv:2", Item("a, b"), Item('say "c"'), scores=(0.25,))
    assert [(p.id, p.reason) for p in problems] == [
        ("a.csv:3", "more cells than columns"),
        ("a.csv:4", "no positive"),
        ("a.csv:5", "a score that is not a finite number"),
    ]
    path.rename(path.with_suffix(".tsv"))
    path.with_suffix(".tsv").write_text("query\tpositive\na\tb\n")
    assert pair_formats.read(str(path.with_suffix(".tsv")))[0][0].positive.text == "b"
    path.write_text("query,query\na,b\n")
    with pytest.raises(DataError, match="must name each column, once"):
        pair_formats.read(str(path))


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1")
    else:
        rows = [good(negatives=["c"]), good(query="d", negatives=[])]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        found, problems = pair_formats.read(str(path))
        assert [(e.id, len(e.negatives)) for e in found] == [
            ("a.parquet[0]", 1),
            ("a.parquet[1]", 0),
        ]
        assert not problems
        path.write_bytes(b"PAR1")
        with pytest.raises(DataError, match="can't be read as Parquet"):
            pair_formats.read(str(path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'jaxvlm\[parquet\]'"):
        pair_formats.read(str(path))


def image(color):
    out = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(out, "PNG")
    return out.getvalue()


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def test_tar_shards(tmp_path):
    write_tar(
        tmp_path / "0.tar",
        {"a/000.png": image("red"), "a/000.txt": "red", "001.png": image("blue")}
        | {"001.json": json.dumps({"positive": "blue", "id": "b", "width": 3})},
    )
    mixed = {"query": "find", "positive": {"image": "002.dot.png"}, "negatives": ["green"]}
    write_tar(
        tmp_path / "1.tar",
        {"002.json": json.dumps(mixed), "002.dot.png": image("green")}
        | {"003.query_image.png": image("lime"), "003.positive.txt": "lime", "004.txt": "alone"}
        | {"README": "x", "005.json": "{"},
    )
    found, problems = pair_formats.read(str(tmp_path / "*.tar"))
    assert [e.id for e in found] == ["0.tar:a/000", "b", "1.tar:002", "1.tar:003"]
    assert [e.task for e in found] == ["0.tar", "0.tar", "1.tar", "1.tar"]
    shown = [found[0].query, found[1].query, found[2].positive, found[3].query]
    prepare = image_files.squares(4)
    for item, color in zip(shown, ("red", "blue", "green", "lime"), strict=True):
        assert image_files.check(item.image, 100) is None
        assert image_files.check(item.image, 10) == "more than data.max_pixels=10 pixels"
        assert (image_files.load(item.image, prepare) == Image.new("RGB", (4, 4), color)).all()
    assert [found[i].positive.text for i in (0, 1, 3)] == ["red", "blue", "lime"]
    assert sorted((p.id, p.reason) for p in problems) == [
        ("1.tar:004", "neither text nor an image"),
        ("1.tar:005", "not JSON"),
        ("1.tar:README", "a tar member that is not a regular file with an extension"),
    ]
    (tmp_path / "0.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:600])
    assert "truncated since it was indexed" in image_files.check(found[1].query.image, 100)


def test_tar_by_mapping_and_compressed(tmp_path):
    members = {"0.txt": "red", "0.png": image("red")}
    path = write_tar(tmp_path / "a.tar", members)
    mapping = [("txt", "query"), ("png", "positive_image")]
    (found,), problems = pair_formats.read(path, mapped(*mapping))
    assert found.query == Item("red") and found.positive.text == "<image>" and not problems
    path = write_tar(tmp_path / "b.tar", members, "w:gz")
    with pytest.raises(DataError, match="can't be read as an uncompressed tar"):
        pair_formats.read(path)


def test_several_files_are_tasks(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps(good(query_image="1.png")) + "\n")
    found, _ = pair_formats.read(str(tmp_path / "*" / "train.jsonl"))
    assert [e.id for e in found] == ["a/train.jsonl:1", "b/train.jsonl:1"]
    assert [e.task for e in found] == ["a/train.jsonl", "b/train.jsonl"]
    assert [e.query.image for e in found] == [str(tmp_path / n / "1.png") for n in "ab"]
    config = DataConfig(image_root="/images")
    rooted, _ = pair_formats.read(str(tmp_path / "*" / "train.jsonl"), config)
    assert rooted[0].query.image == "/images/1.png"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "no such file; give one of .jsonl, .json"),
        ("a.txt", b"a", "not a file of records"),
        ("a.json", b"[]", "contains no record"),
        ("a.jsonl", b"", "empty"),
        ("a.csv", b"query,positive\n\xff,b\n", "not UTF-8"),
    ],
)
def test_bad_file(name, content, says, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        pair_formats.read(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_conversation_is_no_pair(name, write_json):
    """Not one field is too many: the whole record is of another kind."""
    path = write_json([{"id": "a", name: [user("what is it?")], "image": "a.png"}])
    (problem,) = pair_formats.read(path)[1]
    assert "a conversation, where pairs are wanted" in str(problem)
    assert f"{name!r} is not read" in str(problem)
    item = {"query": "a", "positive": "b", name: [1]}
    (problem,) = pair_formats.read(write_json([item]))[1]
    assert UNREAD in str(problem)


def test_half_a_surrogate_pair_is_refused_wherever_it_is(tmp_path):
    """JSON may have it, and no tokenizer or packed set takes it."""
    good = {"query": "a", "positive": "b", "label": "c"}
    rows = [good | {"id": name, name: "\ud83d"} for name in ("query", "positive", "label")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [good, *rows]))
    examples, problems = pair_formats.read(str(path))
    assert len(examples) == 1
    assert [(x.id, x.reason) for x in problems] == [
        (name, "text that is not valid Unicode") for name in ("query", "positive", "label")
    ]
