"""Published models by name: their dims, and checkpoint folders of random weights for trials."""

from __future__ import annotations

import functools
import json
import os
import pathlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jax
import numpy as np

from jaxvlm.config import ConfigError, DualConfig, MeshConfig, ModelConfig
from jaxvlm.config.merge import write_json
from jaxvlm.hf import safetensors
from jaxvlm.hf.families import any_family, config_reader
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model

SHARD_BYTES = 2**31
"""Approximate bytes of a checkpoint shard."""


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of the models in the zoo."""
    return tuple(_table())


def published_config(name: str) -> dict[str, Any]:
    """Return a published model's ``config.json``: the fields that determine the network.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in _table():
        raise ConfigError(f"no published model {name!r}; known: {', '.join(names())}")
    return _table()[name]


def config_of(name: str) -> ModelConfig | DualConfig:
    """Return a published model's settings.

    Raises:
        ConfigError: an unknown name.
    """
    hf_config = published_config(name)
    return config_reader.model_of(any_family(hf_config, name), hf_config)


def num_parameters(hf_config: Mapping[str, Any]) -> int:
    """Count the parameters of the model of a ``config.json``, without allocating them."""
    config = config_reader.model_of(any_family(hf_config, "config.json"), hf_config)
    model = build_model(config, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    return sum(int(np.prod(x.shape)) for x in model.shapes.values())


def write_random(
    hf_config: Mapping[str, Any],
    folder: str | os.PathLike[str],
    dtype: str = "BF16",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a Hugging Face folder of random weights: ``config.json`` and safetensors.

    Memory holds one shard's tensors at a time. The folder has no tokenizer.

    Args:
        hf_config: content of the model's ``config.json``.
        folder: folder to write to; created if it does not exist.
        dtype: ``F32``, ``F16`` or ``BF16``.
        seed: random seed.
        shard_bytes: maximum bytes of a shard, unless one tensor is larger.

    Returns:
        Bytes of weights.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    family = any_family(hf_config, str(path))
    shapes = family.weights(family.config_from_hf(hf_config)).tensors()
    layout = safetensors.sharded(shapes, dtype, shard_bytes)
    rng = np.random.default_rng(seed)

    def draw(name: str) -> np.ndarray:
        # Slices of one random block at random offsets: a hundred times faster than drawing each.
        shape = shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        start = int(rng.integers(_BLOCK))
        count = int(np.prod(shape))
        reps = -(-(start + count) // _BLOCK)
        drawn = np.tile(_block(), reps)[start : start + count]
        return (0.02 * drawn).reshape(shape)  # in this order a scalar remains an array

    write_json(path / "config.json", hf_config)
    return safetensors.write_tensors(path, layout, draw)


_BLOCK = 2**20 + 7


@functools.cache
def _block() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_BLOCK, np.float32)


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("jaxvlm.planner").joinpath("targets", "models.json").read_text("utf-8")
    return json.loads(text)
