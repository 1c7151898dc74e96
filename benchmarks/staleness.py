"""What stale visual tokens cost: easy-VQA with a trained encoder, by policy, limit and rate.

    python -m benchmarks.staleness [--part main|curve] [--seeds 0 1 2] [--only NAME ...]

The quickstart's data, no augmentation (an image must be the same each time), its model with a
vision encoder half as wide and a decoder of one layer, all from a run of one epoch. ``main``: every
image encoded each time it is shown (full), never again (frozen), a share of the shows by each
policy, the same learning rate for all; ``curve``: limits x learning rates, with half of the images.
A row is written as soon as it is complete; the benchmark resumes from the rows that it has.

    python -m benchmarks.staleness --plot

draws docs/staleness_curve.svg from the rows of the curve that are there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import jaxvlm
from benchmarks.common import ROOT, environment, kept, write
from jaxvlm.config import to_config_dict
from jaxvlm.data.sources import conversation_formats
from jaxvlm.train.metrics import read_metrics

sys.path.append(str(ROOT / "configs"))
import quickstart  # recipes are files, not a package

IMAGES = 4000
START_EPOCHS = 1.0
MAIN_EPOCHS = 80.0  # of 304 updates; half as many cost the policies half a point to two
FAR = 10_000  # updates: more than a run has
MAIN: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"frozen": True},
    "random 12 %": {"policy": "lazy", "max_staleness": FAR, "refresh_fraction": 0.11},
    "random 20 %": {"policy": "lazy", "max_staleness": FAR, "refresh_fraction": 0.185},
    "adaptive": {"policy": "adaptive", "max_staleness": FAR, "drift_threshold": 0.75},
}
RATES = (5e-4, 2e-3, 1e-3)
CURVE_IMAGES, CURVE_EPOCHS = 2000, 12.0  # of 160 updates
BOUNDS = (80, 160, 320, 640)
CURVE: dict[str, dict[str, Any]] = {
    "full": {},
    **{f"lazy {b}": {"policy": "lazy", "max_staleness": b} for b in BOUNDS},
    **{
        f"hybrid {b}": {"policy": "hybrid", "max_staleness": b, "prefetch_staleness": b // 2}
        for b in BOUNDS[1:]
    },
    **{
        f"adaptive {t:g}": {"policy": "adaptive", "max_staleness": FAR, "drift_threshold": t}
        for t in (0.25, 0.5, 1.0)
    },
    **{
        f"steps {p:g}": {
            "policy": "lazy",
            "max_staleness": FAR,
            "refresh_fraction": p,
            "refresh_burst": 1,
        }
        for p in (0.1, 0.3)
    },
}


@functools.cache
def some_images(folder: pathlib.Path, count: int) -> str:
    """A file of the questions about the first images."""
    lines = []
    for record in conversation_formats.read("easy-vqa:train")[0]:
        (image,) = record.images
        if int(pathlib.Path(image).stem) < count:
            messages = [{"role": t.role, "content": t.content} for t in record.turns]
            lines.append(json.dumps({"id": record.id, "messages": messages, "images": [image]}))
    path = folder / f"first{count}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def recipe(
    folder: pathlib.Path, seed: int, epochs: float, rate: float, images: int = IMAGES
) -> Any:
    """The quickstart's, smaller and without augmentation."""
    config = to_config_dict(quickstart.get_config())
    config.data.train = some_images(folder, images)
    config.data.flip, config.data.max_shift = False, 0
    # An encoder as wide as the quickstart's costs less where it is frozen at its start: 4.8 points.
    config.model.vision.width, config.model.vision.mlp_dim = 32, 128
    config.model.decoder.depth = 1
    config.seed, config.epochs, config.optim.learning_rate = seed, epochs, rate
    config.checkpoint.every, config.tensorboard = 0, False
    return config


def start(folder: pathlib.Path, seed: int) -> str:
    """The folder of a short run, whose vision encoder has seen little."""
    there = folder / f"start{seed}"
    if not (there / "checkpoints").exists():
        config = recipe(folder, seed, START_EPOCHS, 1e-3)
        config.data.eval = ""
        config.optim.warmup_steps = 0.1
        jaxvlm.Trainer(config, there).fit()
    return str(there)


def one_run(
    arm: dict[str, Any], seed: int, rate: float, epochs: float, folder: pathlib.Path, images: int
) -> dict[str, Any]:
    """Train and evaluate; accuracy in percent, and the share of shows that were encoded."""
    config = recipe(folder, seed, epochs, rate, images)
    config.init_from = start(folder, seed)
    if arm.get("frozen"):
        config.optim.frozen = ("vision/*",)
    for name, value in arm.items():
        if name != "frozen":
            config.cache[name] = value
    with tempfile.TemporaryDirectory() as workdir:
        result = jaxvlm.Trainer(config, pathlib.Path(workdir)).fit()
        rows = [row for row in read_metrics(workdir) if "train/step_ms" in row]
    found = [row.get("train/cache/hit_rate", 0.0) for row in rows]
    drift = [row.get("train/cache/drift_max", 0.0) for row in rows]
    return {
        "seed": seed,
        "learning_rate": rate,
        "epochs": epochs,
        "images": images,
        "settings": dict(arm),
        "exact_match": round(100 * result["exact_match"], 2),
        "blind": round(100 * result["blind/exact_match"], 2),
        "encoded_share": 0.0 if arm.get("frozen") else round(1 - sum(found) / len(found), 4),
        "mean_lag": round(sum(r.get("train/cache/staleness", 0.0) for r in rows) / len(rows), 1),
        "encoded_by_time": [round(1 - x, 2) for x in found[:: max(1, len(found) // 20)]],
        "drift_by_time": [round(x, 2) for x in drift[:: max(1, len(drift) // 20)]],
    }


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Accuracy by bound or tolerance, a panel a policy; and of all by the share encoded."""
    import matplotlib  # not among what measuring needs

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "staleness"  # the same file each time
    from matplotlib import pyplot

    rates = sorted({row["learning_rate"] for row in rows})
    color = {rate: f"C{i}" for i, rate in enumerate(rates)}
    panels = {"lazy": "max_staleness", "hybrid": "max_staleness", "adaptive": "drift_threshold"}
    figure, axes = pyplot.subplots(1, 4, figsize=(11, 3.3), sharey=True, layout="constrained")
    for rate, panel in itertools.product(rates, axes):
        whole = [x["exact_match"] for x in rows if _of(x) == "full" and x["learning_rate"] == rate]
        if whole:
            panel.axhline(sum(whole) / len(whole), color=color[rate], linestyle=":", linewidth=1)
    for panel, (policy, name) in zip(axes, panels.items()):
        for rate in rates:
            mine = [x for x in rows if _of(x) == policy and x["learning_rate"] == rate]
            at = sorted({x["settings"][name] for x in mine})
            means = [_mean(x["exact_match"] for x in mine if x["settings"][name] == b) for b in at]
            panel.plot(at, means, "o-", color=color[rate], label=f"learning rate {rate:g}")
        unit = "updates" if name == "max_staleness" else "of the norm"
        panel.set(title=policy, xlabel=f"{name}, {unit}", xscale="log")
        ticks = sorted({x["settings"][name] for x in rows if _of(x) == policy})
        panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
        panel.minorticks_off()
    for policy, mark in (("lazy", "o"), ("hybrid", "s"), ("adaptive", "^"), ("steps", "x")):
        mine = [x for x in rows if _of(x) == policy]
        shares, reached = ([x[name] for x in mine] for name in ("encoded_share", "exact_match"))
        colors = [color[x["learning_rate"]] for x in mine]
        axes[3].scatter([100 * x for x in shares], reached, c=colors, marker=mark, s=18)
        axes[3].scatter([], [], c="gray", marker=mark, s=18, label=policy)
    axes[3].set(title="all", xlabel="shows encoded, %")
    axes[0].set_ylabel("exact match, % (dotted: all encoded)")
    lines, marks = (axis.get_legend_handles_labels() for axis in (axes[0], axes[3]))
    named = [a + b for a, b in zip(lines, marks, strict=True)]
    figure.legend(*named, loc="outside lower center", ncols=7, fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _of(row: dict[str, Any]) -> str:
    """A row's kind: its arm without the number."""
    return row["arm"].split()[0]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def measure(args: argparse.Namespace, folder: pathlib.Path) -> None:
    """Run what is asked for and not there yet."""
    before, name = environment(), args.name or f"staleness_{args.part}_cpu"
    rows = kept(name)
    is_main = args.part == "main"
    arms, rates = (MAIN, (1e-3,)) if is_main else (CURVE, RATES)
    epochs = args.epochs or (MAIN_EPOCHS if is_main else CURVE_EPOCHS)
    images = IMAGES if is_main else CURVE_IMAGES
    for seed, rate, arm in itertools.product(args.seeds, rates, args.only or arms):
        at = {"arm": arm, "seed": seed, "learning_rate": rate, "epochs": epochs}
        if any(all(row[k] == v for k, v in at.items()) for row in rows):
            continue
        rows.append({"arm": arm, **one_run(arms[arm], seed, rate, epochs, folder, images)})
        print(rows[-1], flush=True)
        write(f"{name}.json", {"environment": before, "rows": rows})


def main() -> None:
    """Measure, or draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("main", "curve"), default="main")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--epochs", type=float, default=0.0)
    parser.add_argument("--starts", type=pathlib.Path, help="folder of trained starts")
    parser.add_argument("--name", default="", help="of the result, where it is not the part's")
    parser.add_argument("--plot", action="store_true", help="draw the curve's rows that are there")
    args = parser.parse_args()
    if args.plot:
        plot(kept(args.name or "staleness_curve_cpu"), ROOT / "docs" / "staleness_curve.svg")
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(args, args.starts or pathlib.Path(folder))


if __name__ == "__main__":
    main()
