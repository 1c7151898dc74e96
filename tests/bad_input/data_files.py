# ruff: noqa: E501
"""Files of records: JSON, JSON lines, CSV, TSV, Parquet, tar; and images."""

from __future__ import annotations

import io
import json
import os
import pathlib
import struct
import tarfile
import zlib
from typing import Any

from hypothesis import strategies as st

from tests.bad_input import values

CONVERSATION = {
    "id": "a",
    "image": "good.png",
    "conversations": [
        {"from": "human", "value": "<image>\nwhat is it?"},
        {"from": "gpt", "value": "a cat"},
    ],
}
MESSAGES = {
    "id": "b",
    "images": ["good.png"],
    "messages": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "a dog", "weight": 1},
    ],
}
PAIR = {
    "id": "c",
    "query": "a cat",
    "positive": {"text": "cats", "image": "good.png"},
    "negatives": ["dogs", "birds"],
    "scores": [0.9, 0.1, 0.2],
    "label": "x",
    "task": "t",
}
MESSAGE_PAIR = {
    "messages": [{"role": "user", "content": "a cat"}],
    "positive_messages": [{"role": "user", "content": "cats"}],
    "label": 1.0,
}
FLAG = {
    "query": "a cat",
    "pos": ["cats"],
    "neg": ["dogs"],
    "pos_scores": [1.5],
    "neg_scores": [-1],
    "prompt": "find ",
    "type": "normal",
}
MMEB = {
    "qry": "<|image_1|> what",
    "qry_image_path": "good.png",
    "pos_text": ["a"],
    "neg_text": ["b"],
}
NAMES = [
    "fifo.png", "zero.png", "random.png", "folder.png", "tall.png", "wide.png", "empty.png", "gone.png",
    "good.tar::0+1000000000000::p.png", "good.tar::99999999999999999999999+1::p.png", "/dev/zero",
    "good.tar::" + "9" * 5_000 + "+1::p.png", "good.tar::-1+1::p", "fifo.tar::0+10::p.png", "x" * 5_000,
    "\x00.png", "a\ud800.png", "http://x/y.png", "good.png/x.png", "",
]  # fmt: skip
"""What a record may name as its image; :func:`write_images` makes these files."""


def records(base: dict[str, Any], image: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    """One record's JSON: something is wrong with it, or with the image that it names."""
    named = st.sampled_from(NAMES).map(
        lambda name: values.text_of(values.replaced(base, image, name)).encode()
    )
    return st.one_of(values.json_texts(base), values.json_texts(base), named)


def long_conversation(turns: int) -> bytes:
    """A record of many turns."""
    pair = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]
    return json.dumps({"conversations": pair * (turns // 2)}).encode()


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, bytes]:
    """(name, content) of a file of conversations."""
    one = st.one_of(records(CONVERSATION, ("image",)), records(MESSAGES, ("images", 0)))
    if draw(st.integers(0, 39)) == 0:
        return "data.jsonl", long_conversation(draw(st.sampled_from([2_000, 5_000])))
    return draw(_joined(one, CONVERSATION))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, bytes]:
    """(name, content) of a file of pairs in JSON."""
    one = st.one_of(
        records(PAIR, ("positive", "image")),
        records(MMEB, ("qry_image_path",)),
        values.json_texts(MESSAGE_PAIR),
        values.json_texts(FLAG),
    )
    return draw(_joined(one, PAIR))


@st.composite
def _joined(draw: st.DrawFn, one: st.SearchStrategy[bytes], good: Any) -> tuple[str, bytes]:
    # Mostly one: several share an id, which is refused before anything else of them is read.
    lines = draw(st.lists(one, min_size=1, max_size=draw(st.sampled_from([1, 1, 3]))))
    lines.append(json.dumps(good | {"id": "good"}).encode())
    if draw(st.integers(0, 3)) == 0:
        return "data.json", b"[" + b",".join(lines) + b"]"
    return "data.jsonl", b"\n".join(lines)


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, bytes]:
    """(name, content) of a CSV, a TSV or a Parquet file of pairs."""
    kind = draw(st.sampled_from([".csv", ".tsv", ".parquet"]))
    if kind == ".parquet":
        return "data.parquet", draw(_parquet())
    cut = "\t" if kind == ".tsv" else ","
    cells = st.one_of(
        st.sampled_from(['"', '""', "[1, 2", "['a' 'b']", "1" * 400, "\x00", '["a"', *values.DEEP]),
        st.text(max_size=6),
        values.VALUES.map(values.text_of),
    )
    header = draw(st.sampled_from(["query,positive", "query,positive,score", "query", "a,a", ","]))
    rows = draw(st.lists(st.lists(cells, min_size=1, max_size=4), min_size=1, max_size=4))
    text = "\n".join([header.replace(",", cut), *(cut.join(row) for row in rows)])
    data = text.encode("utf-8", "surrogatepass")
    return f"data{kind}", values.damaged(draw, data) if draw(st.booleans()) else data


@st.composite
def _parquet(draw: st.DrawFn) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    columns = {
        "query": draw(st.sampled_from([["a", "b"], [1, 2], [None, None], [b"\xff", b"x"]])),
        "positive": draw(
            st.sampled_from([["c", "d"], [["c"], []], [{"text": "c"}, {"text": None}]])
        ),
        "scores": draw(st.sampled_from([[1.0, float("nan")], [[1.0], [2.0]], ["x", "y"]])),
    }
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), file)
    data = file.getvalue()
    return values.damaged(draw, data) if draw(st.booleans()) else data


@st.composite
def tars(draw: st.DrawFn) -> tuple[str, bytes]:
    """(name, content) of a tar shard."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(draw(st.integers(1, 3))):
            names = [f"{number}.json", f"{number}.png", f"{number}.txt", "noext", f"{number}.a.b"]
            for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
                info = tarfile.TarInfo(name)
                info.type = draw(st.sampled_from([tarfile.REGTYPE] * 8 + [tarfile.SYMTYPE, b"S"]))
                json_part = draw(records(PAIR, ("positive", "image")))
                data = json_part if name.endswith("json") else draw(st.binary(max_size=20))
                info.size = len(data) if info.type == tarfile.REGTYPE else 0
                tar.addfile(info, io.BytesIO(data))
    data = file.getvalue()
    return "data.tar", values.damaged(draw, data) if draw(st.integers(0, 2)) == 0 else data


def png(width: int, height: int, data: bytes | None = None) -> bytes:
    """A grey PNG; ``data`` instead of its pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        sum_ = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", sum_)

    if data is None:
        packer = zlib.compressobj(9)
        row = b"\0" * (width + 1)
        at_once = max(1, 2**20 // len(row))
        parts = [packer.compress(row * min(at_once, height - i)) for i in range(0, height, at_once)]
        data = b"".join([*parts, packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def write_images(folder: pathlib.Path) -> None:
    """Write what the names in ``NAMES`` stand for."""
    (folder / "good.png").write_bytes(png(8, 8))
    (folder / "empty.png").touch()
    (folder / "tall.png").write_bytes(png(1, 49_999_999))
    (folder / "wide.png").write_bytes(png(49_999_999, 1))
    (folder / "folder.png").mkdir()
    for name, device in (("zero.png", "/dev/zero"), ("random.png", "/dev/urandom")):
        (folder / name).symlink_to(device)
    for name in ("fifo.png", "fifo.tar"):
        os.mkfifo(folder / name)
    with tarfile.open(folder / "good.tar", "w") as tar:
        tar.add(folder / "good.png", "p.png")


@st.composite
def images(draw: st.DrawFn) -> tuple[str, bytes]:
    """(name, content) of an image file."""
    from PIL import Image

    from jaxvlm.data.images import image_files

    kind = draw(st.sampled_from([*image_files.FORMATS, "head"]))
    if kind == "head":
        width, height = draw(st.sampled_from([(0, 8), (1, 2**31 - 1), (70_000, 2), (7_000, 7_000)]))
        return "image.png", png(width, height, draw(st.binary(max_size=30)))
    mode = draw(st.sampled_from(["RGB", "L", "1"])) if kind != "WEBP" else "RGB"
    file = io.BytesIO()
    Image.new(mode, draw(st.sampled_from([(1, 1), (9, 7), (1, 300)]))).save(file, kind)
    return f"image.{kind.lower()}", values.damaged(draw, file.getvalue())
