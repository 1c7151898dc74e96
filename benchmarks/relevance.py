"""Learned choice of an image's tokens against as many of a uniform pooling or a random choice.

    python -m benchmarks.relevance
    python -m benchmarks.relevance --data=FOLDER   # writes the recipe's data, and no more

Made images of 64 pixels a side: coloured squares of 8 pixels among each other on grey noise, and
one of them marked in black, or four, each in its way. A question names a mark, the answer is the
colour of its square; one in six is right by chance. The recipe is ``configs/relevance.py`` for all:
the tower is random and frozen, its tokens are kept, 16 tokens stand for 256 patches. Figures are of
records that were not trained on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import runpy
import tempfile
import time
from collections.abc import Collection
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # the platform is for it
import jax.numpy as jnp
import numpy as np
from PIL import Image

from benchmarks.common import ROOT, environment, write
from jaxvlm.config import to_config_dict
from jaxvlm.models.relevance import Relevance
from jaxvlm.trainer.trainer import Trainer

SIDE, SQUARE, ROOM, PLAIN = 64, 8, 12, 12
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 50),
    "purple": (150, 50, 190), "orange": (240, 140, 30),
}  # fmt: skip
_Y, _X = np.mgrid[:SQUARE, :SQUARE]
MARKS = {
    "striped": _Y // 2 % 2 == 0,
    "barred": _X // 2 % 2 == 0,
    "crossed": np.isin(_X - _Y, (0, 1)) | np.isin(_X + _Y, (SQUARE - 1, SQUARE)),
    "framed": (_Y % (SQUARE - 1) == 0) | (_X % (SQUARE - 1) == 0),
}
TASKS = {
    # marks, images, steps
    "one mark": (("crossed",), 3000, 400),
    "four marks": (tuple(MARKS), 3000, 1000),
}
CONTESTANTS = ("learned", "without the question", "random", "uniform mean", "uniform concat")


def image(
    rng: np.random.Generator, marks: Collection[str] = MARKS
) -> tuple[np.ndarray, dict[str, str]]:
    """u8[64, 64, 3], and the colour of the square with each mark."""
    pixels = rng.integers(110, 146, (SIDE, SIDE, 1)).repeat(3, axis=2).astype(np.uint8)
    across = SIDE // ROOM
    corners = rng.permutation(across**2)[: PLAIN + len(marks)]
    names = rng.choice(list(COLOURS), len(corners)).tolist()
    for corner, name, mark in zip(corners, names, [*marks, *[""] * PLAIN]):
        y, x = ROOM * np.array(divmod(corner, across)) + rng.integers(0, ROOM - SQUARE + 1, 2)
        square = np.tile(np.uint8(COLOURS[name]), (SQUARE, SQUARE, 1))
        if mark:
            square[MARKS[mark]] = 0
        pixels[y : y + SQUARE, x : x + SQUARE] = square
    return pixels, dict(zip(marks, names))


def write_data(
    folder: pathlib.Path, name: str, images: int, seed: int, marks: Collection[str] = MARKS
) -> None:
    """``folder/name.jsonl`` and its images, of up to two questions each."""
    rng, lines = np.random.default_rng(seed), []
    (folder / name).mkdir(parents=True)
    for i in range(images):
        pixels, colours = image(rng, marks)
        file = f"{name}/{i}.png"
        Image.fromarray(pixels).save(folder / file)
        for mark in rng.permutation(list(marks))[:2].tolist():
            asked = [
                {"type": "image", "image": file},
                {"type": "text", "text": f"which color is the {mark} square?"},
            ]
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": colours[mark]},
            ]
            lines.append(json.dumps({"id": f"{i}-{mark}", "messages": messages}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def chance(_self: Relevance, x: jax.Array, *_: Any) -> jax.Array:
    """Scores that say nothing, and leave all gates at 1: a hash of the tower's token."""
    return 1e-6 * jnp.sin(1e5 * jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))


def settings(folder: pathlib.Path, contestant: str, seed: int = 0) -> Any:
    """The recipe, with as many tokens an image for each contestant."""
    get_config = runpy.run_path(str(ROOT / "configs" / "relevance.py"))["get_config"]
    config = to_config_dict(get_config(str(folder)))
    connector, relevance = config.model.connector, config.model.connector.relevance
    if contestant.startswith("uniform"):
        connector.merge, connector.pool = 4, contestant.split()[1]
        relevance.budget, relevance.levels = 0, 2
    if contestant == "without the question":
        relevance.query = False
    config.tensorboard, config.seed = False, seed
    return config


def train(config: Any, contestant: str) -> dict[str, Any]:
    """A run's figures."""
    start = time.perf_counter()
    score = chance if contestant == "random" else Relevance.score
    with tempfile.TemporaryDirectory() as workdir, mock.patch.object(Relevance, "score", score):
        run = Trainer(config, workdir, devices=jax.devices()[:1])
        done = run.fit()
        lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    steps = [row["train/step_ms"] for row in map(json.loads, lines) if "train/step_ms" in row]
    found = {
        "contestant": contestant,
        "seed": config.seed,
        "tokens_per_image": len(run.image_format.span(0, 0).ids),
        "steps": done["step"],
        "exact_match": round(done["exact_match"], 4),
        "blind": round(done["blind/exact_match"], 4),
        "loss": round(done["loss"], 4),
        "step_ms": round(min(steps), 1),
        "seconds": round(time.perf_counter() - start),
    }
    balance = "connector/relevance/balance"
    if run.state is not None and balance in run.state.params and contestant != "random":
        shares = np.asarray(jax.nn.softmax(run.state.params[balance]))
        found["shares"] = dict(zip(("information", "saliency", "match"), shares.round(3).tolist()))
    return found


def main() -> None:
    """Make the data, train all, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    args = parser.parse_args()
    if args.data:
        make_data(pathlib.Path(args.data), "one mark")
        return
    before, rows = environment(), []
    for task in args.tasks:
        with tempfile.TemporaryDirectory() as folder:
            make_data(pathlib.Path(folder), task)
            for seed, contestant in itertools.product(args.seeds, CONTESTANTS):
                config = settings(pathlib.Path(folder), contestant, seed)
                config.steps = TASKS[task][-1]
                rows.append({"task": task, **train(config, contestant)})
                print(rows[-1], flush=True)
                write("relevance_cpu.json", {"environment": before, "rows": rows})


def make_data(folder: pathlib.Path, task: str) -> None:
    """Both files of a task; 400 images are never trained on."""
    marks, images, _ = TASKS[task]
    write_data(folder, "train", images, 0, marks)
    write_data(folder, "eval", 400, 1, marks)


if __name__ == "__main__":
    main()
