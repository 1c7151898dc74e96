"""What cached visual tokens save: a step whose images all hit, and one without a cache.

    python -m benchmarks.cache

One device, a frozen vision encoder. ``off`` is the step without a cache, ``warm`` the one that has
every image in its pages, ``disk`` the one whose images come from the store's files with each batch
(read, checked, unpacked and placed, nothing of it ahead of the step), ``fed`` the same step given
the features (so it has no lookup and no write), ``tower`` the encoder alone. With f the encoder's
share of ``off``, 1 / (1 - f) is what a cache could save at most. ``locked tower`` trains a text
encoder on pairs with a frozen vision encoder (LiT); its ``warm`` is a step whose images' embeddings
come from host memory, with the batch. Runs are interleaved; seconds are CPU seconds of the process,
which other work distorts least. ``decode`` is reading the store's files alone, to be compared with
``tower``. What a lookup costs compared with ``fed`` is in benchmarks/cache_coherency.py.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Collection
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # the platform is for it
import numpy as np
import optax

from benchmarks.batches import images_and_text
from benchmarks.common import environment, kept, timed, write
from benchmarks.gradcache import pairs
from jaxvlm.cache.cached_step import make_cache
from jaxvlm.cache.pair_batches import make_pair_cache
from jaxvlm.cache.store.rows import Store
from jaxvlm.config import (
    CacheConfig,
    ConnectorConfig,
    DecoderConfig,
    DualConfig,
    MeshConfig,
    ModelConfig,
    TextConfig,
    VisionConfig,
)
from jaxvlm.losses.contrastive import InfoNCE
from jaxvlm.losses.next_token import NextToken
from jaxvlm.optim.optimizer import split_frozen
from jaxvlm.parallel.distributed.processes import keep_freed_memory
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.submodels import vision_encoder_part
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.types import Batch, Pairs

ROWS, LENGTH, FROZEN = 2, 512, ("vision/*",)
STEPS = ("off", "warm", "disk", "fed")
DECODER = DecoderConfig(
    vocab_size=4096, width=384, depth=6, num_heads=6, num_kv_heads=6, head_dim=64, mlp_dim=1024
)
MODELS = {
    # (width, depth, heads) of the encoder, images per sequence, patches that become a token: m x m
    "small tower": ((128, 4, 2), 2, 2),
    "tower and decoder alike": ((384, 6, 6), 8, 2),
    "big tower": ((512, 10, 8), 10, 2),
    "many frames, pooled": ((512, 10, 8), 28, 7),
}


LOCKED, EXAMPLES = "locked tower", 32
LIT = DualConfig(
    vision=VisionConfig(
        image_size=224, patch_size=16, width=384, depth=6, num_heads=6, mlp_dim=1536,
        pool="attention",
    ),
    text=TextConfig(vocab_size=4096, width=256, depth=4, num_heads=4, mlp_dim=1024, max_length=32),
    project=("text",),
    embed_dim=384,
)  # fmt: skip


class Contest:
    """The contestants of a model, compiled.

    Args:
        name: of the model.
        length: of a row, in tokens.
        steps: the kinds of them to compile.
    """

    def __init__(self, name: str, length: int = LENGTH, steps: Collection[str] = STEPS):
        (width, depth, heads), images, merge = MODELS[name]
        config = ModelConfig(
            vision=VisionConfig(
                image_size=224, patch_size=16, width=width, depth=depth, num_heads=heads,
                mlp_dim=4 * width,
            ),
            connector=ConnectorConfig(merge=merge),
            decoder=DECODER,
        )  # fmt: skip
        mesh = make_mesh(MeshConfig(1), jax.devices()[:1])
        self.model = build_model(config, mesh)
        places = np.arange(ROWS * images).reshape(ROWS, images)
        batch = images_and_text(config, ROWS, length, images)
        start = 1 + (14 // merge) ** 2 * np.arange(images, dtype=np.int32)
        key = np.stack([places + 1] * 4, axis=-1).astype(np.uint32)
        pages = 4 * places[..., None] + np.arange(4)  # 196 tokens
        batch = batch._replace(
            image_start=np.tile(start, (ROWS, 1)), image_key=key, image_pages=pages.astype(np.int32)
        )
        own, _ = split_frozen(self.model.shapes, FROZEN)
        cache = make_cache(
            CacheConfig("strict", encode_batch=8), self.model, own, 4 * ROWS * images, (196,)
        )
        tower = vision_encoder_part(self.model, mesh, self.model.strategies["vision"])
        encode = jax.jit(lambda p, x: tower.module(p)(Batch(None, None, None, None, pixels=x)))
        params = self.model.init(0)
        still = {path: x for path, x in params.items() if path.startswith("vision/")}
        features = jax.block_until_ready(encode(still, batch.pixels))
        alone = batch._replace(pixels=None, image_key=None, image_pages=None)
        self.steps, self.states, self.batches = {}, {}, {}
        self.folder = tempfile.TemporaryDirectory()  # as long as this lives
        self.store = Store(self.folder.name, {"benchmark": name})
        self.keys = [key.tobytes() for key in key.reshape(-1, 4)]
        for one, tokens in zip(self.keys, np.asarray(features).reshape(len(self.keys), 196, -1)):
            self.store.put(one, tokens)
        self.store.flush()
        self.shape = features.shape
        behind = CacheConfig("strict", encode_batch=8, store="somewhere")
        disk = make_cache(behind, self.model, own, 4 * ROWS * images, (196,))
        for kind, given, cached in (
            ("off", batch._replace(image_key=None, image_pages=None), None),
            ("warm", batch, cache),
            ("disk", self.from_disk(batch) if "disk" in steps else None, disk),
            ("fed", alone._replace(features=np.asarray(features)), None),
        ):
            if kind not in steps:
                continue
            run, abstract, init = assemble(
                self.model, NextToken(), optax.adamw(1e-4), frozen=FROZEN, cache=cached
            )
            self.batches[kind] = to_global(mesh, given, ROWS)
            self.steps[kind] = run.lower(abstract, self.batches[kind]).compile()
            self.states[kind] = init(self.model.init(0))
        pixels = jax.device_put(batch.pixels)
        tower_run = encode.lower(still, pixels).compile()
        self.work = {kind: (lambda kind=kind: self.step(kind)) for kind in self.steps}
        self.local = batch
        self.work["decode"] = lambda: [self.store.get(one) for one in self.keys]
        self.work["tower"] = lambda: jax.block_until_ready(tower_run(still, pixels))

    def step(self, kind: str) -> dict[str, Any]:
        """One step."""
        if kind == "disk":
            batch = self.from_disk(self.local)
            self.batches[kind] = to_global(self.model.mesh, batch, ROWS)
        self.states[kind], metrics = self.steps[kind](self.states[kind], self.batches[kind])
        return jax.block_until_ready(metrics)

    def from_disk(self, batch: Batch) -> Batch:
        """The batch with its images' tokens, read from the store's files."""
        tokens = np.stack([self.store.get(one) for one in self.keys]).reshape(self.shape)
        here = np.ones(self.shape[:2], bool)
        return batch._replace(stored=tokens, is_stored=here, pixels=np.zeros_like(batch.pixels))


class Locked:
    """The contestants of a text encoder that is trained with a frozen vision encoder.

    Args:
        length: of a text, sixteen times; ``LENGTH`` at most.
        steps: the kinds of them to compile.
    """

    def __init__(self, length: int = LENGTH, steps: Collection[str] = STEPS) -> None:
        mesh = make_mesh(MeshConfig(1), jax.devices()[:1])
        self.model = build_model(LIT, mesh)
        self.local = batch = pairs(EXAMPLES, LIT, length // 16)
        own, still = split_frozen(self.model.init(0), FROZEN)
        tower = vision_encoder_part(self.model, mesh, self.model.strategies["vision"])
        encode = jax.jit(lambda p, x: tower.module(p)(Batch(None, None, None, None, pixels=x)))
        pixels = jax.device_put(batch.query.pixels)
        tower_run = encode.lower(still, pixels).compile()
        self.features = np.asarray(tower_run(still, pixels))
        self.folder = tempfile.TemporaryDirectory()  # as long as this lives
        self.store = Store(self.folder.name, {"benchmark": LOCKED})
        self.keys = [i.to_bytes(16, "little") for i in range(EXAMPLES)]
        for one, tokens in zip(self.keys, self.features[:, 0]):
            self.store.put(one, tokens)
        self.store.flush()
        cache = make_pair_cache(
            CacheConfig("strict", encode_batch=8, memory_mb=1), self.model, list(own), (1,)
        )
        alone = batch.query._replace(pixels=None, features=self.features)
        self.steps, self.states, self.batches = {}, {}, {}
        for kind, given, cached in (
            ("off", batch, None),
            ("warm", self.given(self.features), cache),
            ("disk", self.from_disk() if "disk" in steps else None, cache),
            ("fed", batch._replace(query=alone), None),
        ):
            if kind not in steps:
                continue
            run, abstract, init = assemble(
                self.model, InfoNCE(temperature=0.0), optax.adamw(1e-4), frozen=FROZEN,
                cache=cached, mini_batches=(MiniBatch(), MiniBatch()),
            )  # fmt: skip
            self.batches[kind] = to_global(mesh, given, EXAMPLES)
            self.steps[kind] = run.lower(abstract, self.batches[kind]).compile()
            self.states[kind] = init(self.model.init(0))
        self.work = {kind: (lambda kind=kind: self.step(kind)) for kind in self.steps}
        self.work["decode"] = lambda: [self.store.get(one) for one in self.keys]
        self.work["tower"] = lambda: jax.block_until_ready(tower_run(still, pixels))

    def step(self, kind: str) -> dict[str, Any]:
        """One step."""
        if kind == "disk":
            self.batches[kind] = to_global(self.model.mesh, self.from_disk(), EXAMPLES)
        self.states[kind], metrics = self.steps[kind](self.states[kind], self.batches[kind])
        return jax.block_until_ready(metrics)

    def given(self, tokens: np.ndarray) -> Pairs:
        """The batch with its images' embeddings."""
        query, here = self.local.query, np.ones(tokens.shape[:2], bool)
        blank = np.zeros_like(query.pixels)
        query = query._replace(pixels=blank, stored=tokens, is_stored=here)
        return self.local._replace(query=query)

    def from_disk(self) -> Pairs:
        """The pairs with their tokens, read from the store's files."""
        tokens = np.stack([self.store.get(one) for one in self.keys])
        return self.given(tokens.reshape(self.features.shape))


def make(name: str, length: int = LENGTH, steps: Collection[str] = STEPS) -> Contest | Locked:
    """The contestants of a model, by its name."""
    return Locked(length, steps) if name == LOCKED else Contest(name, length, steps)


def main() -> None:
    """Run all, print a line each, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="*", default=[*MODELS, LOCKED])
    parser.add_argument("--name", default="cache_cpu", help="of the result, whose rows are kept")
    args = parser.parse_args()
    keep_freed_memory()
    before = environment()
    rows = []
    for name in args.models:
        contest, seconds = make(name), {}
        for turn in range(args.rounds + 1):
            for kind in contest.work if turn % 2 else reversed(contest.work):
                spent = timed(contest.work[kind])[1]
                if turn:  # the first fills the cache
                    seconds.setdefault(kind, []).append(spent)
        found = float(contest.step("warm")["cache/hit_rate"])
        least = {kind: min(x) for kind, x in seconds.items()}
        share = least["tower"] / least["off"]
        gain, best = least["off"] / least["warm"], 1 / (1 - share)
        row = {
            "model": name,
            "found": found,
            "cpu_ms": {kind: round(1e3 * x, 1) for kind, x in least.items()},
            "tower_share": round(share, 3),
            "gain": round(gain, 3),
            "of_the_best_possible": round(gain / best, 3),
            "disk_gain": round(least["off"] / least["disk"], 3),
            "disk_of_the_best_possible": round(least["off"] / least["disk"] / best, 3),
            "encode_to_decode": round(least["tower"] / least["decode"], 1),
            "rounds": args.rounds,
            "environment": before,
        }
        print(row, flush=True)
        rows.append(row)
    write_rows(args.name, rows)


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    """Rows of models that were not asked for are kept."""
    asked = {row["model"]: row for row in (*kept(name), *rows)}
    write(f"{name}.json", {"rows": [*asked.values()]})


if __name__ == "__main__":
    main()
