"""Images of any size, as a processor of Qwen2-VL cuts them."""

from __future__ import annotations

import json

from jaxvlm.data.images import processor, resize
from jaxvlm.hf.families import qwen_vl

SIDE, BOUNDS = 8, (64, 1024)
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": SIDE // 2,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": BOUNDS[0], "longest_edge": BOUNDS[1]},
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}
SIZES = [(17, 31), (64, 9), (8, 8), (5, 90), (33, 33), (100, 40), (1, 3)]  # width, height


def write_processor(folder, settings):
    (folder / processor.FILE).write_text(json.dumps(settings))
    return folder


def span_of(tokenizer):
    def of_size(width, height):
        columns, rows = (n // SIDE for n in resize.fit(width, height, SIDE, *BOUNDS))
        return qwen_vl.grid_span(tokenizer.image_id, (1, rows, columns))

    return of_size
