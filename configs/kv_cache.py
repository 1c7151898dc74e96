"""A model of images with 256 visual tokens, whose answers need few or many of them.

    python configs/kv_cache.py runs/marks  # makes the images and questions
    jaxvlm train --config=configs/kv_cache.py:runs/marks --workdir=runs/kv_cache
    jaxvlm eval --checkpoint=runs/kv_cache --data=runs/marks/test/few.jsonl --kv=vl_cache \
        --kv_budget=0.1 --kv_queries=8

Each of an image's 4 x 4 cells has a mark of one visual token in one of eight colours. Asked for a
row, four tokens tell the answer; asked for all rows, sixteen do. Answers have several words, since
the first one is chosen with the whole prompt, whatever is kept of it. Prompts end a few tokens
after the image: so few queries are observed (``--kv_queries``).
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np
from PIL import Image

from jaxvlm.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    ModelConfig,
    OptimConfig,
    VisionConfig,
)

COLORS = {
    "red": (200, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 200), "yellow": (220, 220, 0),
    "pink": (250, 130, 200), "brown": (120, 70, 20), "gray": (128, 128, 128), "black": (0, 0, 0),
}  # fmt: skip
ROWS = ("one", "two", "three", "four")


def write_data(folder: pathlib.Path, train: int = 8000, test: int = 1000) -> None:
    """Write so many images, and ``train.jsonl``, ``test/few.jsonl`` and ``test/many.jsonl``."""
    for name, count, seed in (("train", train, 0), ("test", test, 1)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        draws, lines = np.random.default_rng(seed), {"few": list[str](), "many": list[str]()}
        for i in range(count):
            pixels = np.full((64, 64, 3), 245, np.uint8)
            colors = [list(COLORS)[c] for c in draws.integers(len(COLORS), size=16)]
            for cell, color in enumerate(colors):
                top, left = (4 * (4 * n + int(draws.integers(4))) for n in divmod(cell, 4))
                pixels[top : top + 4, left : left + 4] = COLORS[color]
            image = (folder / name / f"{i}.png").absolute()
            Image.fromarray(pixels).save(image)
            row = i % 4
            for task, question, answer in (
                ("few", f"colors of row {ROWS[row]}?", colors[4 * row : 4 * row + 4]),
                ("many", "colors of all rows?", colors),
            ):
                said = [("user", f"<image>{question}"), ("assistant", " ".join(answer))]
                turns = [{"role": role, "content": text} for role, text in said]
                lines[task].append(json.dumps({"messages": turns, "images": [str(image)]}) + "\n")
        if name == "train":
            together = [line for both in zip(*lines.values()) for line in both]
            (folder / "train.jsonl").write_text("".join(together))
            continue
        for task, own in lines.items():
            (folder / name / f"{task}.jsonl").write_text("".join(own))


def get_config(arg: str = "") -> Config:
    """``arg``: the folder of :func:`write_data`; ``FOLDER,smoke`` takes 10 steps."""
    folder, _, how = arg.partition(",")
    if not folder:
        raise ConfigError("give the folder of the data: --config=configs/kv_cache.py:FOLDER")
    config = Config(
        data=DataConfig(
            train=f"{folder}/train.jsonl",
            eval=f"{folder}/test/few.jsonl",
            batch_size=16,
            max_length=320,
            max_images_per_sequence=1,
        ),
        model=ModelConfig(
            vision=VisionConfig(
                image_size=64,
                patch_size=4,
                stem="conv",
                pixel_mean=(0.9, 0.9, 0.9),
                pixel_std=(0.2, 0.2, 0.2),
                width=64,
                depth=1,
                num_heads=4,
                mlp_dim=256,
            ),
            connector=ConnectorConfig(merge=1),
            decoder=DecoderConfig(
                width=64, depth=4, mlp_dim=192, num_heads=4, num_kv_heads=4, head_dim=16
            ),
        ),
        optim=OptimConfig(learning_rate=1e-3, b2=0.99, warmup_steps=100),
        epochs=0.0,
        steps=3000,
        log_every=50,
        eval_every=0,
        checkpoint=CheckpointConfig(every=0),
    )
    if how == "smoke":
        optim = dataclasses.replace(config.optim, warmup_steps=5)
        return dataclasses.replace(config, steps=10, optim=optim, log_every=5, eval_records=20)
    if how:
        raise ConfigError(f"kv_cache.py takes FOLDER or FOLDER,smoke, not {arg!r}")
    return config


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python configs/kv_cache.py FOLDER: the folder that the data go to")
    write_data(pathlib.Path(sys.argv[1]))
