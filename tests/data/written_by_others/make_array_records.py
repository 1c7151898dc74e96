"""Write examples.array_record-00000-of-00001 by TensorFlow's protos and ArrayRecord's own writer.

It needs tensorflow, which the tests do without: in an environment of its own,
``python -m tests.data.written_by_others.make_array_records``.
"""

from __future__ import annotations

import io
import pathlib

import numpy as np
import tensorflow
from array_record.python import array_record_module
from PIL import Image

HERE = pathlib.Path(__file__).parent
NAME = "examples.array_record-00000-of-00001"


def feature(value):
    kinds = {bytes: ("bytes_list", "BytesList"), int: ("int64_list", "Int64List")}
    kinds[float] = ("float_list", "FloatList")
    values = value if isinstance(value, list) else [value]
    field, name = kinds[type(values[0]) if values else bytes]
    of = getattr(tensorflow.train, name)(value=values)
    return tensorflow.train.Feature(**{field: of})


def image(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(out, "PNG")
    return out.getvalue()


ROWS = [
    {"image": image(3), "question": b"what?", "answer": "drei é".encode()},
    {"image": image(3), "question": b"again?", "answer": b"7", "index": 4},
    {"images": [image(5), image(6)], "question": b"<image> or <image>?", "answer": b"both"},
    {
        "image": image(9),
        "conversations": b'[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]',
    },
    {"question": b"none", "answer": b"x", "score": [0.5, -1.5], "counts": [2**40, -3], "note": []},
]


def main() -> None:
    """Write the file."""
    writer = array_record_module.ArrayRecordWriter(str(HERE / NAME), "group_size:2")
    for row in ROWS:
        features = tensorflow.train.Features(feature={k: feature(v) for k, v in row.items()})
        writer.write(tensorflow.train.Example(features=features).SerializeToString())
    writer.close()


if __name__ == "__main__":
    main()
