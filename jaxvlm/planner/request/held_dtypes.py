"""The dtypes of frozen parameters, which take their bytes between steps, as the run holds them."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

import numpy as np

from jaxvlm.config import DualConfig, EmbeddingConfig, ModelConfig, OptimConfig
from jaxvlm.planner.request import trainable_params
from jaxvlm.planner.request.per_object import per_object
from jaxvlm.spmd.train_step import split

Held = tuple[tuple[str, str], ...]
"""(path, dtype) of parameters, sorted."""


def of(
    network: ModelConfig | DualConfig,
    optim: OptimConfig,
    embeddings: EmbeddingConfig | None,
    files: Held,
) -> Held:
    """Return the dtypes of a run's frozen parameters that are not float32.

    Args:
        network: the model.
        optim: the run's settings of the optimizer.
        embeddings: settings of a vision-language model's embeddings; ``None``: it has none.
        files: dtypes of the parameters in the files that they are read from.

    Raises:
        ConfigError: as :func:`jaxvlm.hf.frozen_dtypes.hold`.
    """
    how = (optim.frozen, optim.frozen_dtype)
    return _of(trainable_params.plain(network), *how, embeddings, files)


@per_object
def _of(
    network: ModelConfig | DualConfig,
    frozen: tuple[str, ...],
    setting: str,
    embeddings: EmbeddingConfig | None,
    files: Held,
) -> Held:
    model, optim = (
        trainable_params.alone(network, embeddings),
        OptimConfig(frozen=frozen, frozen_dtype=setting),
    )
    if setting == OptimConfig().frozen_dtype and not split(model, model.shapes, frozen)[1]:
        return ()
    from jaxvlm.hf import frozen_dtypes  # imports weight readers, which few plans need

    held = frozen_dtypes.hold(model, optim, lambda: dict(files)).held
    return tuple(sorted(held.items()))


def stored_bytes(
    network: ModelConfig | DualConfig, embeddings: EmbeddingConfig | None, held: Held
) -> Mapping[str, float]:
    """Return the mean bytes of a parameter between steps, by tower; 4 where one has none."""
    return _stored_bytes(trainable_params.plain(network), embeddings, held)


@per_object
def _stored_bytes(
    network: ModelConfig | DualConfig, embeddings: EmbeddingConfig | None, held: Held
) -> Mapping[str, float]:
    counts = collections.Counter[str]()
    sizes = collections.Counter[str]()
    for path, x in trainable_params.alone(network, embeddings).holding(dict(held)).shapes.items():
        tower, count = path.removeprefix("head/").split("/")[0], math.prod(x.shape)
        counts[tower] += count
        sizes[tower] += count * np.dtype(x.dtype).itemsize
    return {"vision_top": 4.0, **{tower: sizes[tower] / counts[tower] for tower in counts}}
