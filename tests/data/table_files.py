"""Small images, and tables of every kind that have them in their cells."""

from __future__ import annotations

import io
import json
import tarfile

import pyarrow
from PIL import Image
from pyarrow import parquet


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 255 - value, value // 2)).save(data, "PNG")
    return data.getvalue()


def cell(value: int, name: str | None = None) -> dict:
    return {"bytes": png(value), "path": name}


def asked(question="what is it?", answer="red", **more):
    return {
        "messages": [
            {"role": "user", "content": f"<image>{question}"},
            {"role": "assistant", "content": answer},
        ],
        **more,
    }


def write_tar(path, files):
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_arrow(path, table):
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)


def write_saved(folder, table):
    """As ``datasets.Dataset.save_to_disk`` does, in two files."""
    folder.mkdir()
    half = len(table) // 2
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        write_arrow(folder / name, part)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    (folder / "dataset_info.json").write_text("{}")


def written(folder, rows, kind):
    """The rows as a table of some kind; returns what ``data.train`` names it by."""
    table = pyarrow.Table.from_pylist(rows)
    path = folder / f"table{kind}"
    if kind == ".parquet":
        parquet.write_table(table, path, row_group_size=3)
    elif kind == ".arrow":
        write_arrow(path, table)
    else:
        write_saved(path, table)
    return str(path)


KINDS = [".parquet", ".arrow", ""]
