"""Write the files of this folder, and what the libraries that wrote them read of them.

``pip install datasets webdataset pillow``, in an environment of its own; then
``python tests/data/written_by_others/make.py``. The versions are in read.json.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil

import datasets
import webdataset
from PIL import Image

HERE = pathlib.Path(__file__).parent
TEXT = datasets.Value("string")


def image(i: int) -> Image.Image:
    return Image.new("RGB", (8, 6), (20 * i, 100, 255 - 20 * i))


def of(turns, images) -> dict:
    return {"turns": turns, "images": [hashlib.sha256(data).hexdigest() for data in images]}


def content(row) -> list[bytes]:
    return [one["bytes"] for one in row["images"]]


def messages() -> datasets.Dataset:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"<image>q{i}?"},
                {"role": "assistant", "content": f"a{i}"},
            ],
            "images": [image(i)],
        }
        for i in range(6)
    ]
    turns = datasets.List({"role": TEXT, "content": TEXT})
    features = datasets.Features({"messages": turns, "images": datasets.List(datasets.Image())})
    return datasets.Dataset.from_list(rows, features=features)


def rounds() -> datasets.Dataset:
    rows = [
        {"texts": [{"user": "u", "assistant": "a", "source": "s"}], "images": [image(i), image(7)]}
        for i in range(3)
    ]
    turns = datasets.List({"user": TEXT, "assistant": TEXT, "source": TEXT})
    features = datasets.Features({"texts": turns, "images": datasets.List(datasets.Image())})
    return datasets.Dataset.from_list(rows, features=features)


def undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    return rows.cast_column("images", datasets.List(datasets.Image(decode=False)))


def main() -> None:
    read: dict = {"versions": {x.__name__: x.__version__ for x in (datasets, webdataset)}}
    shutil.rmtree(HERE / "saved", ignore_errors=True)
    messages().save_to_disk(str(HERE / "saved"), num_shards=2)
    messages().to_parquet(HERE / "table.parquet")
    rounds().to_parquet(HERE / "rounds.parquet")
    for name, rows in (
        ("saved", datasets.load_from_disk(str(HERE / "saved"))),
        ("table.parquet", datasets.Dataset.from_parquet(str(HERE / "table.parquet"))),
    ):
        read[name] = [
            of([[x["role"], x["content"]] for x in row["messages"]], content(row))
            for row in undecoded(rows)
        ]
    read["rounds.parquet"] = [
        of([["user", "<image><image>u"], ["assistant", "a"]], content(row))
        for row in undecoded(datasets.Dataset.from_parquet(str(HERE / "rounds.parquet")))
    ]
    with webdataset.TarWriter(str(HERE / "shard.tar")) as shard:
        for i in range(3):
            shard.write({"__key__": f"{i:04d}", "png": image(i), "txt": f"caption {i}"})
        shard.write({"__key__": "0003", "json": {"question": "q", "answer": "a"}, "jpg": image(3)})
    read["shard.tar"] = []
    for sample in webdataset.WebDataset(str(HERE / "shard.tar"), shardshuffle=False):
        if "json" in sample:
            said = json.loads(sample["json"])
            turns = [["user", f"<image>{said['question']}"], ["assistant", said["answer"]]]
        else:
            turns = [["user", "<image>"], ["assistant", sample["txt"].decode()]]
        read["shard.tar"].append(of(turns, [sample.get("png") or sample["jpg"]]))
    (HERE / "read.json").write_text(json.dumps(read, indent=1) + "\n")


if __name__ == "__main__":
    main()
