"""Federated training on easy-VQA: exact match, rounds and bytes, against one run and one site.

    PYTHONPATH=. python benchmarks/federation.py [--part NAME ...] [--seeds 0]

Writes results/federation_cpu.json after each run, and goes on from it. Every run is trained on the
same number of sequences in as many steps: 1,520 steps of 16 sequences over all sites, 5 epochs.

``split``: Dirichlet(0.1, 0.3, inf) over 2, 4 and 8 sites; ``baselines``: all data in one run, and
one of four sites alone on its own; ``slow``: one of four sites is four times slower, synchronous
and buffered (virtual time); ``bits``: updates in 16, 8 and 4 bits; ``adapters``: adapters alone, of
weights that were trained before; ``privacy``: clipped and noisy updates with their epsilon;
``cache``: a trained encoder's cached tokens under the three kinds of invalidation.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import RESULTS, environment, kept, write
from jaxvlm.federate import status

NAME = "federation_cpu"
STEPS, EVERY, BATCH = 1520, 40, 16
FIGURES = ("exact_match", "exact_match/color", "exact_match/shape", "exact_match/yes/no")


def settings(sites: int, **more: Any) -> dict[str, Any]:
    """Overrides of the recipe for so many sites."""
    return {
        "federate.sites": sites,
        "federate.rounds": STEPS // EVERY,
        "outer.steps": EVERY,
        "steps": STEPS,
        "data.batch_size": BATCH // sites,
        "log_every": 200,
        **more,
    }


def cases(part: str, seed: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name of a run -> overrides of the recipe, flags of the command."""
    four = {"alpha": 0.3}
    rounding = {d: settings(4, **{"outer.delta_dtype": d}) for d in ("bfloat16", "int8", "int4")}
    noisy = {
        "federate.weighting": "uniform",
        "federate.max_delta_norm": 1.0,
    }
    tokens = {
        "data.flip": False, "data.max_shift": 0, "cache.policy": "lazy",
        "cache.max_staleness": 120, "cache.encode_batch": 8,
    }  # fmt: skip
    buffered = {"federate.buffer": 2, "federate.max_staleness": 8, "steps": 2 * STEPS}
    alphas = ("0.3", "inf", "0.1")
    return {
        "split": {
            f"{n} sites, Dirichlet({a})": (settings(n), {"alpha": a})
            for a in alphas
            for n in (4, 2, 8)
            if seed == 0 or (n, a) == (4, "0.3")
        },
        "baselines": {"all data, one run": (settings(1), {})},
        "alone": {"one of 4 sites alone, Dirichlet(0.3)": (settings(4) | {
            "federate.sites": 1}, {"alone": True})},
        "slow": {
            "4 sites, one 4 x slower, synchronous": (settings(4), {
                **four, "step_seconds": "4,1,1,1"}),
            "4 sites, one 4 x slower, buffer of 2": (
                settings(4, **buffered) | {"federate.rounds": 2 * STEPS // EVERY},
                {**four, "step_seconds": "4,1,1,1"},
            ),
        },
        "bits": {f"4 sites, updates in {d}": (rounding[d], four) for d in rounding},
        "adapters": {
            f"4 sites, adapters alone, {how}": (
                settings(4, **{"model.lora.rank": 8, "model.lora.alpha": 16.0,
                               "federate.lora": how, "outer.moments": moments}),
                {**four, "pretrained": True},
            )
            for how, moments in (("product", "reset"), ("freeze_a", "keep"))
        },
        "privacy": {
            f"4 sites, noise {z:g}": (
                settings(4, **noisy, **({"federate.noise_multiplier": z} if z else {})), four
            )
            for z in (0.0, 0.1, 1.0)
        },
        "cache": {
            f"2 sites, trained encoder, {how}": (
                settings(2, **tokens, **{"federate.cache_invalidation": how}), {"alpha": 0.3}
            )
            for how in ("digest", "lazy", "flush")
        } | {"2 sites, trained encoder, no cache": (settings(2, **{
            "data.flip": False, "data.max_shift": 0}), {"alpha": 0.3})},
    }[part]  # fmt: skip


def one_run(overrides: dict[str, Any], flags: dict[str, Any], seed: int) -> dict[str, Any]:
    """Simulate one federation in a process of its own; its figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if flags.pop("alone", False):
            divided = folder / "divided"
            simulate(divided, settings(4, steps=EVERY, **{"federate.rounds": 1}),
                     {"alpha": 0.3}, seed)  # fmt: skip
            flags = {"site_data": str(divided / "data" / "site-0.jsonl")}
            overrides = overrides | {"tokenizer.path": str(divided / "data" / "tokenizer")}
        if flags.pop("pretrained", False):
            before = settings(1, steps=400, **{"federate.rounds": 400 // EVERY})
            simulate(folder / "before", before, {}, seed)
            overrides = overrides | {"init_from": str(folder / "before" / "site-0")}
        result = simulate(folder / "run", overrides, flags, seed)
        found = status.read_status(folder / "run")
        lines = (folder / "run" / "site-0" / "metrics.jsonl").read_text().splitlines()
    versions = found["versions"]
    row = {name: round(result[name], 5) for name in FIGURES}
    if "blind/exact_match" in result:
        row["blind/exact_match"] = round(result["blind/exact_match"], 5)
    row |= {
        "versions": found["version"],
        "virtual_seconds": round(result["virtual_seconds"], 1),
        "megabytes_sent": round(sum(s["bytes_sent"] for s in found["sites"]) / 1e6, 2),
        "megabytes_received": round(sum(s["bytes_received"] for s in found["sites"]) / 1e6, 2),
        "accepted": [s["accepted"] for s in found["sites"]],
        "late": sum(s["late"] for s in found["sites"]),
        "largest_lag": max(max(v["lags"]) for v in versions),
        "lora_lost": max(v["lora_lost"] for v in versions),
        "epsilon": versions[-1].get("epsilon"),
    }
    rates = [m["train/cache/hit_rate"] for m in map(json.loads, lines) if
             "train/cache/hit_rate" in m]  # fmt: skip
    if rates:
        row["mean_hit_rate_of_site_0"] = round(sum(rates) / len(rates), 4)
    return row


def simulate(
    folder: pathlib.Path, overrides: dict[str, Any], flags: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Run ``jaxvlm federate simulate``; what it reports."""
    command = [sys.executable, "-m", "jaxvlm", "federate", "simulate", "--json"]
    command += ["--config=configs/federated.py", f"--workdir={folder}", f"--config.seed={seed}"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    command += [f"--config.{path}={value}" for path, value in overrides.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


PARTS = ("split", "baselines", "alone", "slow", "bits", "adapters", "privacy", "cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    for seed in args.seeds:
        for part in args.part:
            for name, (overrides, flags) in cases(part, seed).items():
                rows = kept(NAME)
                if any((row["run"], row["seed"]) == (name, seed) for row in rows):
                    continue
                machine = environment()
                row = {"run": name, "part": part, "seed": seed}
                rows.append(row | one_run(overrides, dict(flags), seed) | {"environment": machine})
                write(f"{NAME}.json", {"steps": STEPS, "rows": rows}, RESULTS)
                print(f"{name}, seed {seed}: {rows[-1]['exact_match']:.2%}", flush=True)


if __name__ == "__main__":
    main()
