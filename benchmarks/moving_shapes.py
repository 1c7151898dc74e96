"""Short videos of a moving shape, and a question that no single frame answers: which way?

    python -m benchmarks.moving_shapes videos
    python -m benchmarks.moving_shapes --runs runs/video runs/control

A shape of any colour begins anywhere on a background of its own and moves to the left, to the
right, up or down by the same way; where it would leave the image it comes in again on the other
side, so that no place says where it goes. The folder gets ``train.jsonl``, ``test.jsonl`` and the
videos (H.264, 8 frames a second, a second long); the same seed gives the same pixels. ``--runs``
writes what runs of configs/video.py found to the result file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from benchmarks import common

SIDE, FRAMES, RATE, STEP = 64, 8, 8, 6
"""Pixels of a side; frames of a video; frames a second; pixels from a frame to the next."""
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SHAPES = ("circle", "square", "triangle")
COLOURS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200)}


def video(rng: np.random.Generator, way: str, shape: str, colour: str) -> np.ndarray:
    """Draw u8[FRAMES, SIDE, SIDE, 3]."""
    background = rng.integers(225, 256, 3)
    size = int(rng.integers(14, 21))
    x, y = rng.integers(0, SIDE, 2).tolist()
    frames = []
    for i in range(FRAMES):
        image = Image.new("RGB", (SIDE, SIDE), tuple(background.tolist()))
        pen = ImageDraw.Draw(image)
        left = (x + i * STEP * WAYS[way][0]) % SIDE
        top = (y + i * STEP * WAYS[way][1]) % SIDE
        for dx in (-SIDE, 0, SIDE):
            for dy in (-SIDE, 0, SIDE):
                a, b = left + dx, top + dy
                box = (a, b, a + size, b + size)
                if shape == "circle":
                    pen.ellipse(box, COLOURS[colour])
                elif shape == "square":
                    pen.rectangle(box, COLOURS[colour])
                else:
                    corners = [(a, b + size), (a + size, b + size), (a + size // 2, b)]
                    pen.polygon(corners, COLOURS[colour])
        frames.append(np.asarray(image))
    return np.stack(frames)


def write_video(path: pathlib.Path, frames: np.ndarray) -> None:
    """Write u8[n, H, W, 3] as H.264."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        stream.codec_context.thread_count = 1  # the same bytes on every machine
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write(folder: pathlib.Path, name: str, count: int, seed: int) -> None:
    """Write ``count`` videos and ``NAME.jsonl``, with as many of each way."""
    rng = np.random.default_rng(seed)
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        way = list(WAYS)[i % len(WAYS)]
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        file = f"{name}/{i:05d}.mp4"
        write_video(folder / file, video(rng, way, str(shape), str(colour)))
        turns = [
            {"role": "user", "content": f"<video>which way does the {shape} move?"},
            {"role": "assistant", "content": way},
        ]
        lines.append(json.dumps({"id": f"{name}-{i}", "videos": [file], "messages": turns}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def report(workdir: pathlib.Path) -> dict[str, Any]:
    """What a run of configs/video.py was, and its last evaluation."""
    config = json.loads((workdir / "config.json").read_text())["config"]
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "eval/exact_match" in row][-1]
    train = [row for row in rows if "train/loss" in row]
    enough = next((row["step"] for row in train if row["train/accuracy"] > 0.99), None)
    return {
        "frames": config["data"]["video"]["num_frames"],
        "learning_rate": config["optim"]["learning_rate"],
        "steps": last["step"],
        "step_with_training_accuracy_over_0.99": enough,
        "test_videos": int(last["eval/answers"]),
        "exact_match": last["eval/exact_match"],
        "exact_match_with_another_video": last["eval/blind/exact_match"],
    }


def main() -> None:
    """Write both splits, or the report of runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--runs", type=pathlib.Path, nargs="+", help="workdirs to report")
    parser.add_argument("--train", type=int, default=6000, help="number of training videos")
    parser.add_argument("--test", type=int, default=600, help="number of test videos")
    options = parser.parse_args()
    if options.runs:
        runs = [report(workdir) for workdir in options.runs]
        common.write("video_cpu.json", {"environment": common.environment(), "runs": runs})
        return
    if options.folder is None:
        parser.error("name a folder for the videos, or --runs")
    write(options.folder, "train", options.train, 0)
    write(options.folder, "test", options.test, 1)


if __name__ == "__main__":
    main()
