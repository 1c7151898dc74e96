"""Published models by name: their dims, and folders of random weights to try things with."""

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

from jaxvlm.build.model import build_model
from jaxvlm.config import ConfigError, DualConfig, MeshConfig, ModelConfig
from jaxvlm.io import hf
from jaxvlm.models.families import any_family
from jaxvlm.parallel.mesh import make_mesh

SHARD_BYTES = 2**31
"""Of a file of weights, about."""


@functools.cache
def names() -> tuple[str, ...]:
    """The models that :func:`published` knows."""
    return tuple(_table())


def published(name: str) -> dict[str, Any]:
    """The ``config.json`` of a published model: the fields that change its network.

    Raises:
        ConfigError: a name that is not known.
    """
    if name not in _table():
        raise ConfigError(f"no published model {name!r}; known: {', '.join(names())}")
    return _table()[name]


def config_of(name: str) -> ModelConfig | DualConfig:
    """The dims of a published model.

    Raises:
        ConfigError: a name that is not known.
    """
    found = published(name)
    return any_family(found, name).config_from_hf(found)


def num_parameters(hf_config: Mapping[str, Any]) -> int:
    """Parameters of the model of a ``config.json``; allocates none."""
    config = any_family(hf_config, "config.json").config_from_hf(hf_config)
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

    Memory holds one file's tensors at a time. There is no tokenizer in it.

    Args:
        hf_config: of the model.
        folder: made if it is not there.
        dtype: ``F32``, ``F16`` or ``BF16``.
        seed: of the draw.
        shard_bytes: of a file, at most, unless one tensor is larger.

    Returns:
        Bytes of weights.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    one = any_family(hf_config, str(path))
    shapes = one.weights(one.config_from_hf(hf_config)).tensors()
    layout = hf.sharded(shapes, dtype, shard_bytes)
    rng = np.random.default_rng(seed)

    def draw(name: str) -> np.ndarray:
        # A hundred times faster than drawing each: slices of one block, from anywhere in it.
        shape = shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        start = int(rng.integers(_BLOCK))
        count = int(np.prod(shape))
        reps = -(-(start + count) // _BLOCK)
        drawn = np.tile(_block(), reps)[start : start + count]
        return (0.02 * drawn).reshape(shape)  # in this order a scalar stays an array

    (path / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
    return hf.write_tensors(path, layout, draw)


_BLOCK = 2**20 + 7


@functools.cache
def _block() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_BLOCK, np.float32)


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("jaxvlm.plan").joinpath("targets", "models.json").read_text("utf-8")
    return json.loads(text)
