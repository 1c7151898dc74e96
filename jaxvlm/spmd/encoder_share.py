"""Choose the number of devices of a disaggregated vision encoder by its share of the FLOPs."""

from __future__ import annotations

import jax

from jaxvlm.config import Config, MeshConfig
from jaxvlm.models import model_flops
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import split
from jaxvlm.train.disaggregated import EncoderAndRest
from jaxvlm.types import Batch, trains_vision

BY_COST = -1
"""Value of ``config.encoder.devices``: the first of :func:`best_first` that the run can use."""


def model_costs(config: Config, batch: Batch) -> EncoderAndRest:
    """Count FLOPs of a step with a disaggregated encoder, recomputation included.

    Args:
        config: the run's settings, with the full model.
        batch: a representative batch, numpy.
    """
    model = config.model
    one = build_model(model, make_mesh(MeshConfig(1), jax.devices()[:1]))
    trained, _ = split(one, one.shapes, config.optim.frozen)
    forward, step = model_flops.of_batch(model, trained, batch)
    encoder, rest = step.vision, step.total - step.vision
    if trains_vision(trained):
        encoder += forward.vision  # the backward pass recomputes the encoder's forward pass
        encoder += forward.vision * (model.vision.remat == "full")
    rest += forward.vision_top * (model.vision.remat == "full")
    rest += forward.decoder * (model.decoder.remat == "full")
    return EncoderAndRest(encoder, rest)


def best_first(cost: EncoderAndRest, devices: int) -> list[int]:
    """Return numbers of devices for the encoder, ordered by step time, the shortest first.

    A step takes as long as the side that has more FLOPs for each device.
    """
    return sorted(range(1, devices), key=lambda n: max(cost.encoder / n, cost.rest / (devices - n)))
