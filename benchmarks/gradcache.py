"""Gradient caching: memory by batch size, time against plain training, and other libraries.

    python -m benchmarks.gradcache [--part memory|time|peers ...]

``memory``: a step compiled for batches of pairs from 256 to 16,384 at one mini-batch size, and
without mini-batches where that is not too much; nothing is run. ``time``: steps of both,
interleaved, at a batch that fits both; with the vision encoder frozen; and with its embeddings
cached. ``peers``: the gradients, time and memory of sentence-transformers' cached loss and of
open_clip's feature accumulation, compared with ours (benchmarks/gradcache_peers.py).

    python -m benchmarks.gradcache --plot

draws docs/gradcache_memory.svg from the result that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

from benchmarks.common import RESULTS, ROOT, environment, write
from jaxvlm.cache.pair_batches import make_pair_cache
from jaxvlm.config import (
    CacheConfig,
    DualConfig,
    MeshConfig,
    OptimConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.distributed.processes import keep_freed_memory
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Batch, Pairs

CLIP = DualConfig(
    vision=VisionConfig(
        image_size=64, patch_size=8, width=192, depth=4, num_heads=3, mlp_dim=768, pool="attention"
    ),
    text=TextConfig(vocab_size=4096, width=192, depth=4, num_heads=3, mlp_dim=768, max_length=32),
    embed_dim=128,
)
CHUNK, TOKENS = 64, 32
BATCHES = (256, 1024, 4096, 16384)
PLAIN_UP_TO = 1024
BOTH_HOLD, ROUNDS = 256, 6
PARTS = ("memory", "time", "peers")


def pairs(count: int, config: DualConfig = CLIP, length: int = TOKENS) -> Pairs:
    """An image and a text an example."""
    rng = np.random.default_rng(0)
    side = config.vision.image_size
    tokens = rng.integers(3, config.text.vocab_size, (count, length)).astype(np.int32)
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (count, 1, length)).copy()
    text = Batch(tokens, np.zeros(tokens.shape, np.float32), places, np.ones_like(tokens))
    empty = Batch(*(x if x is None else x[..., :0] for x in text))
    image = empty._replace(
        pixels=rng.integers(0, 256, (count, 1, side, side, 3), np.uint8),
        image_start=np.zeros((count, 1), np.int32),
    )
    number = np.arange(count, dtype=np.int32)
    document = jax.tree.map(lambda x: x[:, None], text)
    return Pairs(image, document, np.ones((count, 1), bool), number, number[:, None])


def found(batch: Pairs, config: DualConfig = CLIP) -> Pairs:
    """The batch with what a tower makes of its images, noise here, in their pixels' place."""
    query = batch.query
    shape = (*query.pixels.shape[:2], 1, config.vision.width)
    tokens = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    query = query._replace(
        pixels=np.zeros_like(query.pixels), stored=tokens, is_stored=np.ones(shape[:2], bool)
    )
    return batch._replace(query=query)


def step_of(
    mini_batch: int, frozen: tuple[str, ...] = (), given: bool = False
) -> tuple[Any, tuple[Any, Any]]:
    """The jitted step and its first state; of batches whose images are :func:`found` or not."""
    model = build_model(CLIP, make_mesh(MeshConfig(1), jax.devices()[:1]))
    own = {p: w for p, w in model.logical.items() if not any(p.startswith(f[:-1]) for f in frozen)}
    tx = make_optimizer(OptimConfig(), lambda step: 1e-3, own)
    cut = (MiniBatch(mini_batch), MiniBatch(mini_batch))
    asked = CacheConfig("strict", memory_mb=1, encode_batch=8)
    trained = [path for path in model.shapes if not path.startswith("vision/")]
    cache = make_pair_cache(asked, model, trained, (1,)) if given else None
    loss = InfoNCE(temperature=0.0)
    step, _, init = assemble(model, loss, tx, frozen=frozen, cache=cache, mini_batches=cut)
    return model, (step, init(model.init(0)))


def memory() -> list[dict[str, Any]]:
    """Bytes of temporaries by batch, with and without."""
    rows = []
    for mini_batch in (CHUNK, 0):
        model, (step, state) = step_of(mini_batch)
        for count in BATCHES:
            if not mini_batch and count > PLAIN_UP_TO:
                continue
            batch = to_global(model.mesh, pairs(count), count)
            stats = step.lower(state, batch).compile().memory_analysis()
            embeddings = 2 * count * CLIP.embed_dim * 4
            rows.append(
                {
                    "chunk": mini_batch,
                    "batch": count,
                    "temporaries": stats.temp_size_in_bytes,
                    "embeddings": embeddings,
                    "embeddings_and_their_gradients": 2 * embeddings,
                    "beyond": stats.temp_size_in_bytes - 2 * embeddings,
                }
            )
            print(rows[-1], flush=True)
    return rows


def timed(rounds: int) -> dict[str, Any]:
    """Seconds a step, interleaved; medians, and the ratios to plain."""
    arms = {
        "plain": step_of(0),
        "cached": step_of(CHUNK),
        "plain, tower frozen": step_of(0, ("vision/*",)),
        "cached, tower frozen": step_of(CHUNK, ("vision/*",)),
        "plain, tokens found": step_of(0, ("vision/*",), True),
        "cached, tokens found": step_of(CHUNK, ("vision/*",), True),
    }
    whole = pairs(BOTH_HOLD)
    batch = {
        name: to_global(m.mesh, found(whole) if "found" in name else whole, BOTH_HOLD)
        for name, (m, _) in arms.items()
    }
    states = {name: state for name, (_, (_, state)) in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, (_, (step, _)) in arms.items():
            begun = time.perf_counter()
            states[name], metrics = step(states[name], batch[name])
            jax.block_until_ready((states[name], metrics))
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    median = {name: statistics.median(x) for name, x in seconds.items()}
    return {
        "batch": BOTH_HOLD,
        "chunk": CHUNK,
        "seconds": median,
        "cached_to_plain": median["cached"] / median["plain"],
        "frozen_cached_to_plain": median["cached, tower frozen"] / median["plain, tower frozen"],
        "found_cached_to_frozen_plain": median["cached, tokens found"]
        / median["plain, tower frozen"],
        "found_cached_to_found_plain": median["cached, tokens found"]
        / median["plain, tokens found"],
    }


def peers(rounds: int) -> dict[str, Any]:
    """Gradients, time and memory of others' and of ours."""
    from benchmarks import gradcache_peers  # which needs torch

    return gradcache_peers.measure(rounds)


def plot(rows: list[dict[str, Any]]) -> None:
    """docs/gradcache_memory.svg: temporaries by batch, cached and plain."""
    import matplotlib  # not among what measuring needs

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradcache"  # the same file each time
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    arms = ((CHUNK, f"in mini-batches of {CHUNK}", "o-"), (0, "plain", "s-"))
    for mini_batch, label, style in arms:
        mine = sorted((r["batch"], r["temporaries"]) for r in rows if r["chunk"] == mini_batch)
        panel.plot(*zip(*((n, size / 2**30) for n, size in mine)), style, label=label)
    embeddings = sorted({(r["batch"], r["embeddings_and_their_gradients"]) for r in rows})
    panel.plot(
        *zip(*((n, size / 2**30) for n, size in embeddings)), "--", label="embeddings, gradients"
    )
    panel.set(xscale="log", yscale="log", xlabel="pairs a step", ylabel="temporaries, GiB")
    panel.set_xticks(BATCHES, [f"{n:,}" for n in BATCHES])
    panel.minorticks_off()
    panel.legend()
    figure.savefig(ROOT / "docs" / "gradcache_memory.svg", metadata={"Date": None})


def main() -> None:
    """Run the parts, keep those that were not asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps that are timed")
    parser.add_argument("--plot", action="store_true", help="draw what is measured already")
    args = parser.parse_args()
    if args.plot:
        text = (RESULTS / "gradcache_memory_cpu.json").read_text(encoding="utf-8")
        plot(json.loads(text)["memory"])
        return
    keep_freed_memory()  # as `jaxvlm train` does
    known = {"memory": lambda rounds: memory(), "time": timed, "peers": peers}
    for part in args.part:
        before, found = environment(), known[part](args.rounds)
        print(part, found, flush=True)
        write(f"gradcache_{part}_cpu.json", {"environment": before, part: found})


if __name__ == "__main__":
    main()
