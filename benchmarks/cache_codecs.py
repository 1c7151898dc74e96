"""What a store's codec costs the final metric: easy-VQA with a frozen vision encoder, by codec.

    python -m benchmarks.cache_codecs [--seeds 0 1] [--only NAME ...]

The quickstart's model is trained for a while; then its vision encoder is frozen and the rest is
trained on from there, without augmentation. The tokens are computed each time (``off``), computed
and stored (``exact, made``), or read from a store that was filled before: then no image is encoded.
The metric is exact match on the official test split, whose images are always encoded. ``bits`` is a
digest of what was trained: equal where the runs are, to the bit. A row is written as soon as it is
complete; the benchmark resumes from the rows that it has.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

import jaxvlm
from benchmarks.common import ROOT, environment, kept, write
from jaxvlm.cache.store import codec, maintenance, segment_files
from jaxvlm.cache.store.rows import Store
from jaxvlm.config import to_config_dict
from jaxvlm.train.metrics import read_metrics

sys.path.append(str(ROOT / "configs"))
import quickstart  # recipes are files, not a package

NAME = "cache_codecs_cpu"
START_EPOCHS, EPOCHS = 12.0, 8.0
CHUNK = 8
MADE = "exact, made"
ARMS = ("off", MADE, *codec.CODECS)


def recipe(seed: int, epochs: float) -> Any:
    """The quickstart's, shorter."""
    config = to_config_dict(quickstart.get_config())
    config.seed, config.epochs = seed, epochs
    config.checkpoint.every, config.tensorboard = 0, False
    return config


def start(folder: pathlib.Path) -> pathlib.Path:
    """The folder of a run whose vision encoder all arms take as it is."""
    there = folder / "start"
    if not (there / "checkpoints").exists():
        config = recipe(0, START_EPOCHS)
        config.data.eval = ""
        jaxvlm.Trainer(config, there).fit()
    return there


def transcoded(folder: pathlib.Path, kept_by: str) -> pathlib.Path:
    """A store with the rows of the one that ``MADE`` has filled, in another codec."""
    found, there = sorted(folder.glob("made*")), folder / kept_by
    if not found:
        raise SystemExit(f"no store to read: run {MADE!r} first, with the same --folder")
    if not there.exists():
        (usage,) = maintenance.stat(found[0])
        source = Store(found[0], usage.facts, usage.codec)
        target = Store(there, usage.facts, kept_by)
        for path in segment_files.list_folder(source.folder).segments:
            for key in segment_files.read_segment(path).rows:
                target.put(key, source.get(key))
            target.flush()  # else rows that come faster than a disk takes them are left out
        source.close()
        target.close()
    return there


def one_run(arm: str, seed: int, folder: pathlib.Path) -> dict[str, Any]:
    """Train and evaluate; accuracy in percent, and the share of shows that were read."""
    config = recipe(seed, EPOCHS)
    config.init_from = str(start(folder))
    config.data.eval, config.data.flip, config.data.max_shift = "", False, 0
    config.optim.frozen = ("vision/*",)
    config.cache.encode_batch = CHUNK
    if arm != "off":
        store = folder / f"made{seed}" if arm == MADE else transcoded(folder, arm)
        config.cache.policy, config.cache.store = "strict", str(store)
        config.cache.codec = "exact" if arm == MADE else arm
    with tempfile.TemporaryDirectory() as workdir:
        run = jaxvlm.Trainer(config, pathlib.Path(workdir))
        seconds = run.fit()["seconds"]
        lines = [row for row in read_metrics(workdir) if "train/step_ms" in row]
    digest, trained = hashlib.blake2b(digest_size=8), run.state.params
    for path in sorted(trained):
        digest.update(np.asarray(trained[path]).tobytes())
    report = run.loaded().evaluate("easy-vqa:test", blind=False)
    stored = [row.get("train/cache/from_store", 0.0) for row in lines]
    return {
        "arm": arm,
        "seed": seed,
        "epochs": EPOCHS,
        "exact_match": round(100 * report.metrics["exact_match"], 3),
        "loss": lines[-1]["train/loss"],
        "read_share": round(sum(stored) / len(stored), 4),
        "bits": digest.hexdigest(),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="*", default=ARMS, choices=ARMS)
    parser.add_argument("--folder", type=pathlib.Path, help="of the start and the stores")
    args = parser.parse_args()
    before, rows = environment(), kept(NAME)
    with tempfile.TemporaryDirectory() as made:
        for seed in args.seeds:
            for arm in args.only:
                if any((row["arm"], row["seed"]) == (arm, seed) for row in rows):
                    continue
                rows.append(one_run(arm, seed, args.folder or pathlib.Path(made)))
                print(rows[-1], flush=True)
                write(f"{NAME}.json", {"environment": before, "rows": rows})


if __name__ == "__main__":
    main()
