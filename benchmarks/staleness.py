"""What old visual tokens cost: easy-VQA with a tower that learns, by policy, bound and rate.

    python -m benchmarks.staleness [--part main|curve] [--seeds 0 1 2] [--only NAME ...]

The quickstart's model and data, no augmentation (a picture must be the same each time). ``main``:
every picture encoded each time it is shown (full), never after a random start (frozen), a share of
the shows by each policy, the same learning rate for all; ``curve``: one seed, bounds x learning
rates. A row is kept as soon as it is there; the benchmark goes on from what is there.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from typing import Any

import jaxvlm
from benchmarks.common import ROOT, environment, kept, write
from jaxvlm.train.metrics import read_metrics

sys.path.append(str(ROOT / "configs"))
import quickstart  # recipes are files, not a package

FAR = 10_000  # updates: more than a run has
MAIN: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"frozen": True},
    "random 11 %": {"policy": "lazy", "bound": FAR, "refresh": 0.11},
    "adaptive 11 %": {"policy": "adaptive", "bound": FAR, "refresh": 0.11, "tolerance": 1e9},
    "adaptive 1": {"policy": "adaptive", "bound": FAR, "tolerance": 1.0},
    "adaptive 2": {"policy": "adaptive", "bound": FAR, "tolerance": 2.0},
    "lazy": {"policy": "lazy", "bound": 1500},
}
RATES = (5e-4, 1e-3, 2e-3)
CURVE: dict[str, dict[str, Any]] = {
    **{f"lazy {b}": {"policy": "lazy", "bound": b} for b in (300, 600, 1200, 2400)},
    **{f"hybrid {b}": {"policy": "hybrid", "bound": b, "ahead": b // 2} for b in (600, 1200)},
    **{
        f"adaptive {t:g}": {"policy": "adaptive", "bound": FAR, "tolerance": t}
        for t in (0.2, 0.5, 1.0)
    },
    "full": {},
}


def recipe(seed: int, epochs: float, rate: float) -> Any:
    """The quickstart's, without augmentation."""
    config = quickstart.get_config()
    config.data.flip, config.data.shift = False, 0
    config.seed, config.epochs, config.optim.learning_rate = seed, epochs, rate
    config.checkpoint.every, config.tensorboard = 0, False
    return config


def start(folder: pathlib.Path, seed: int) -> str:
    """The folder of a run of one epoch, whose tower has seen little."""
    there = folder / f"start{seed}"
    if not (there / "checkpoints").exists():
        config = recipe(seed, 1.0, 1e-3)
        config.data.eval = ""
        jaxvlm.Run(config, there).fit()
    return str(there)


def one_run(
    arm: dict[str, Any], seed: int, rate: float, epochs: float, folder: pathlib.Path
) -> dict[str, Any]:
    """Train and evaluate; accuracy in percent, and the share of shows that were encoded."""
    config = recipe(seed, epochs, rate)
    config.init_from = start(folder, seed)
    if arm.get("frozen"):
        config.optim.frozen = ("vision/*",)
    for name, value in arm.items():
        if name != "frozen":
            config.cache[name] = value
    with tempfile.TemporaryDirectory() as workdir:
        result = jaxvlm.Run(config, pathlib.Path(workdir)).fit()
        rows = [row for row in read_metrics(workdir) if "train/step_ms" in row]
    found = [row.get("train/cache/found", 0.0) for row in rows]
    drift = [row.get("train/cache/drift", 0.0) for row in rows]
    return {
        "seed": seed,
        "learning_rate": rate,
        "epochs": epochs,
        "settings": dict(arm),
        "exact_match": round(100 * result["exact_match"], 2),
        "blind": round(100 * result["blind/exact_match"], 2),
        "encoded_share": 0.0 if arm.get("frozen") else round(1 - sum(found) / len(found), 4),
        "mean_lag": round(sum(r.get("train/cache/lag", 0.0) for r in rows) / len(rows), 1),
        "encoded_by_time": [round(1 - x, 2) for x in found[:: max(1, len(found) // 20)]],
        "drift_by_time": [round(x, 2) for x in drift[:: max(1, len(drift) // 20)]],
    }


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("main", "curve"), default="main")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--starts", type=pathlib.Path, help="folder of the starts; else made anew")
    parser.add_argument("--name", default="", help="of the result, where it is not the part's")
    args = parser.parse_args()
    before, name = environment(), args.name or f"staleness_{args.part}_cpu"
    folder = args.starts or pathlib.Path(tempfile.mkdtemp())
    rows = kept(name)
    arms, rates = (MAIN, (1e-3,)) if args.part == "main" else (CURVE, RATES)
    for seed in args.seeds:
        for arm in args.only or arms:
            for rate in rates:
                at = {"arm": arm, "seed": seed, "learning_rate": rate, "epochs": args.epochs}
                if any(all(row[k] == v for k, v in at.items()) for row in rows):
                    continue
                rows.append({"arm": arm, **one_run(arms[arm], seed, rate, args.epochs, folder)})
                print(rows[-1], flush=True)
                write(f"{name}.json", {"environment": before, "rows": rows})


if __name__ == "__main__":
    main()
