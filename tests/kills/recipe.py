"""A recipe of seconds for each kind of run: ``--config=recipe.py:KIND:DATA:STORE``."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxvlm.config import default_config
from tests import runs

STEPS = 24


def _evaluations(config: Any) -> None:
    """Dropout, augmentation, and evaluations that choose a best checkpoint."""
    config.model.decoder.dropout = 0.1
    config.data.eval, config.eval_every, config.eval_records = config.data.train, 6, 16


def _microbatches(config: Any) -> None:
    """A checkpoint every other step, of which one is kept: it is deleted as often as written."""
    config.model.decoder.dropout = 0.1
    config.microbatches, config.checkpoint.every, config.checkpoint.keep = 2, 2, 1


def _store(config: Any) -> None:
    """Tokens of a frozen vision encoder on the devices, in host memory and in a store on disk."""
    _cached(config, policy="strict", memory_mb=1)
    config.optim.frozen = ("vision/*",)


def _host_cache(config: Any) -> None:
    """Tokens of a vision encoder that learns, in host memory, saved with each checkpoint."""
    _cached(config, policy="lazy", max_staleness=50, max_images=16, memory_mb=1)


def _cached(config: Any, **cache: Any) -> None:
    config.data.flip, config.data.max_shift = False, 0
    config.cache.update(cache | {"encode_batch": 2})


def _lora(config: Any) -> None:
    """Adapters on a frozen model, with dropout of both."""
    config.model.decoder.dropout = 0.1
    config.model.lora.rank, config.model.lora.dropout = 2, 0.1


KINDS = {
    "evaluations": _evaluations,
    "microbatches": _microbatches,
    "strict cache and store": _store,
    "host cache": _host_cache,
    "LoRA and dropout": _lora,
}
"""Kind of conversations' run -> what it changes of tests/e2e/recipe.py."""
PAIRS = "pairs and gradient cache"


def _pairs(data: pathlib.Path) -> Any:
    """A dual encoder, whose gradients are cached, and evaluations that choose a checkpoint."""
    config = default_config()
    config.loss.name, config.embedder = "info_nce", "dual"
    config.data.train = config.data.eval = str(data / "pairs.jsonl")
    config.data.batch_size, config.data.max_length, config.data.buckets = 8, 32, 1
    config.grad_cache.query_mini_batch, config.grad_cache.document_mini_batch = 2, 4
    config.pair_loss.temperature, config.dual.embed_dim = 0.0, 16
    vision, text = config.dual.vision, config.dual.text
    vision.image_size, vision.patch_size = 16, 8
    for tower in (vision, text):
        tower.width, tower.depth, tower.num_heads, tower.mlp_dim = 16, 1, 2, 32
    text.max_length = 16
    config.optim.warmup_steps, config.optim.learning_rate = 2, 3e-3
    config.eval_every, config.log_every, config.checkpoint.every = 12, 1, 3
    config.tensorboard = False
    return config


def get_config(arg: str) -> Any:
    """``arg``: a kind, the folder of the data, and one for a store of visual tokens."""
    kind, data, store = arg.split(":")
    folder = pathlib.Path(data)
    config = _pairs(folder) if kind == PAIRS else runs.recipe(folder / "data.jsonl")
    config.steps = STEPS
    if kind != PAIRS:
        KINDS[kind](config)
    if config.cache.policy == "strict":
        config.cache.store = store
    return config
