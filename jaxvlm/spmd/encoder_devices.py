"""Choose the number of devices of a disaggregated vision encoder by its share of the FLOPs."""

from __future__ import annotations

from collections.abc import Collection

import jax

from jaxvlm.config import Config, DualConfig, MeshConfig, ModelConfig
from jaxvlm.models import model_flops
from jaxvlm.models.lora import is_adapter
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import split
from jaxvlm.train.disaggregated import EncoderAndRest
from jaxvlm.train.gradcache import rows_of
from jaxvlm.types import Batch, Pairs, is_vision_path

BY_COST = -1
"""Value of ``config.encoder.devices``: the first of :func:`best_first` that the run can use."""


def flops(
    config: ModelConfig, trained: Collection[str], batch: Batch, scale: float = 1.0
) -> tuple[model_flops.Flops, model_flops.Flops]:
    """Count model FLOPs of a forward pass, and of a step; see ``jaxvlm.models.model_flops``.

    Args:
        config: the model's settings.
        trained: paths of the trained parameters.
        batch: a representative batch, numpy.
        scale: sequences of a step over sequences of ``batch``.
    """
    num_tokens = scale * float((batch.segment > 0).sum())
    num_images, patches = model_flops.images(batch)
    owns = {path.split("/")[0] for path in trained if not is_adapter(path)}
    adapted = {path.split("/")[0] for path in trained if is_adapter(path)}
    reach = model_flops.reach(batch)
    forward = model_flops.forward(config, num_tokens, reach, scale * num_images, patches)
    return forward, model_flops.step(forward, dict.fromkeys(owns, True), adapted)


def step_flops(
    config: ModelConfig | DualConfig, trained: Collection[str], batch: Batch | Pairs, scale: float
) -> model_flops.Flops:
    """Count model FLOPs of a step.

    Args:
        config: the model's settings.
        trained: paths of the trained parameters.
        batch: representative sequences, or pairs, numpy.
        scale: examples of a step over examples of ``batch``.
    """
    if isinstance(batch, Batch):
        assert isinstance(config, ModelConfig)
        return flops(config, trained, batch, scale)[1]
    document = rows_of(batch.document)
    if isinstance(config, DualConfig):
        each = [model_flops.encoders(config, x, trained) for x in (batch.query, document)]
    else:
        each = [flops(config, trained, x)[1]._replace(head=0.0) for x in (batch.query, document)]
    return model_flops.Flops(*(scale * sum(parts) for parts in zip(*each)))


def model_costs(config: Config, batch: Batch) -> EncoderAndRest:
    """Count FLOPs of a step with a disaggregated encoder, recomputation included.

    Args:
        config: the run's settings, with the full model.
        batch: a representative batch, numpy.
    """
    model = config.model
    one = build_model(model, make_mesh(MeshConfig(1), jax.devices()[:1]))
    trained, _ = split(one, one.shapes, config.optim.frozen)
    forward, step = flops(model, trained, batch)
    tower, rest = step.vision, step.total - step.vision
    if any(is_vision_path(path) for path in trained):
        tower += forward.vision  # the backward pass recomputes the encoder's forward pass
        tower += forward.vision * (model.vision.remat == "full")
    rest += forward.vision_top * (model.vision.remat == "full")
    rest += forward.decoder * (model.decoder.remat == "full")
    return EncoderAndRest(tower, rest)


def best_first(cost: EncoderAndRest, devices: int) -> list[int]:
    """Return numbers of devices for the encoder, ordered by step time, the shortest first.

    A step takes as long as the side that has more FLOPs for each device.
    """
    return sorted(range(1, devices), key=lambda n: max(cost.tower / n, cost.rest / (devices - n)))
