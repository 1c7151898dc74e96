"""Write what transformers' video processors make of frames: videos.json and videos.npz.

It needs torch and torchvision, which the tests do without: in an environment of its own,
``python -m tests.data.written_by_others.make_videos``. The versions are in videos.json.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pathlib
import sys
import types
import warnings

import numpy as np

from tests.data.video_cases import CLIPS, KINDS, PIXELS, ROUTES, TEXTS, frames

HERE = pathlib.Path(__file__).parent


def without_cuda() -> None:
    """Let torchvision be imported where its compiled part finds no CUDA; it is not called."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules["_kept"] = library  # freed definitions are lost


def video_processor(kind: str):
    module = KINDS[kind].module
    name = f"transformers.models.{module}.video_processing_{module}"
    return getattr(importlib.import_module(name), KINDS[kind].video_processor)


def sampled(kind: str) -> list:
    from transformers.video_utils import VideoMetadata

    own, out = video_processor(kind)(), []
    for total, fps in CLIPS:
        for route in ROUTES[kind]:
            metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
            try:
                found = np.asarray(own.sample_frames(metadata, **route)).tolist()
            except (ValueError, ZeroDivisionError, RuntimeError):
                found = None  # a video that is too short for them
            out.append([total, fps, route, found])
    return out


def texts(kind: str) -> list:
    from transformers.video_utils import VideoMetadata

    module = KINDS[kind].module
    name = f"transformers.models.{module}.processing_{module}"
    processor = getattr(importlib.import_module(name), KINDS[kind].processor)
    out = []
    for indices, fps, total in TEXTS:
        given = KINDS[kind].of_text(len(indices))
        metadata = VideoMetadata(
            total_num_frames=total, fps=fps, duration=total / fps, frames_indices=list(indices)
        )
        inputs = given.pop("inputs") | {"video_metadata": [metadata]}
        fake = types.SimpleNamespace(**given)
        if hasattr(processor, "_calculate_timestamps"):
            fake._calculate_timestamps = types.MethodType(processor._calculate_timestamps, fake)
        out.append([indices, fps, total, processor.replace_video_token(fake, inputs, 0)])
    return out


def main() -> None:
    """Write both files."""
    without_cuda()
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    arrays = {}
    for name, (kind, settings, (count, width, height)) in PIXELS.items():
        processor = video_processor(kind)(**settings)
        out = processor(
            videos=[torch.from_numpy(frames(count, width, height))],
            do_sample_frames=False,
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
        )
        values = np.asarray(out["pixel_values_videos" if kind != "smolvlm" else "pixel_values"])
        assert np.array_equal(values, values.astype(np.uint8)), name
        arrays[name] = values.astype(np.uint8)
        if "video_grid_thw" in out:
            arrays[f"{name} grid"] = np.asarray(out["video_grid_thw"])
    np.savez_compressed(HERE / "videos.npz", **arrays)
    names = ("transformers", "torch", "torchvision", "num2words")
    document = {
        "versions": {name: importlib.metadata.version(name) for name in names},
        "sampled": {kind: sampled(kind) for kind in KINDS},
        "texts": {kind: texts(kind) for kind in KINDS},
    }
    text = json.dumps(document, separators=(",", ":"))
    (HERE / "videos.json").write_text(text.replace("],[", "],\n[") + "\n")


if __name__ == "__main__":
    main()
