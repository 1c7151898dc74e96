"""Write the MDS folder here, and what MosaicML Streaming's own reader reads of it.

``pip install streaming-community pillow``, in an environment of its own; then
``python tests/data/written_by_others/make_mds.py``.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
from importlib.metadata import version

import streaming
from PIL import Image
from streaming.base.format import reader_from_json

HERE = pathlib.Path(__file__).parent
COLUMNS = {"id": "str", "messages": "json", "image": "png", "index": "int", "height": "uint16"}


def main() -> None:
    folder = HERE / "mds"
    shutil.rmtree(folder, ignore_errors=True)
    with streaming.MDSWriter(out=str(folder), columns=COLUMNS, size_limit=900) as writer:
        for i in range(6):
            turns = [
                {"role": "user", "content": f"<image>é {i}?"},
                {"role": "assistant", "content": f"a{i}"},
            ]
            image = Image.new("RGB", (8, 6), (20 * i, 100, 255 - 20 * i))
            writer.write({"id": str(i), "messages": turns, "image": image, "index": i, "height": 6})
    read = {"versions": {"streaming-community": version("streaming-community")}, "mds": []}
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        reader = reader_from_json(str(folder), "", shard)
        for i in range(reader.samples):
            sample, data = reader[i], reader.get_sample_data(i)
            # The reader decodes images; their bytes stand in the sample's.
            begin = data.index(b"\x89PNG")
            end = data.index(b"IEND", begin) + 8
            turns = [[turn["role"], turn["content"]] for turn in sample["messages"]]
            digest = hashlib.sha256(data[begin:end]).hexdigest()
            read["mds"].append({"id": sample["id"], "turns": turns, "images": [digest]})
    (HERE / "read_mds.json").write_text(json.dumps(read, indent=1) + "\n")


if __name__ == "__main__":
    main()
