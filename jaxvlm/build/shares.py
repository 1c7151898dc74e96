"""How many devices a vision tower gets, by what it costs."""

from __future__ import annotations

from collections.abc import Collection

import jax

from jaxvlm.build.assemble import split
from jaxvlm.build.model import build_model
from jaxvlm.config import DualConfig, MeshConfig, ModelConfig, TrainConfig
from jaxvlm.models.lora import is_adapter
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.plan import count
from jaxvlm.train.apart import Sides, is_tower
from jaxvlm.train.pairs import rows_of
from jaxvlm.types import Batch, Pairs

BY_COST = -1
"""``config.tower.devices``: as many as :func:`best_first` puts first and the run can use."""


def flops(
    config: ModelConfig, trained: Collection[str], batch: Batch, scale: float = 1.0
) -> tuple[count.Flops, count.Flops]:
    """Model FLOPs of a forward pass, and of a step; see ``jaxvlm.plan.count``.

    Args:
        config: of the model.
        trained: paths of the trained parameters.
        batch: rows that stand for all, numpy.
        scale: rows of a step to these.
    """
    num_tokens = scale * float((batch.segment > 0).sum())
    num_pictures, patches = count.pictures(batch)
    owns = {path.split("/")[0] for path in trained if not is_adapter(path)}
    adapted = {path.split("/")[0] for path in trained if is_adapter(path)}
    reach = count.reach(batch)
    forward = count.forward(config, num_tokens, reach, scale * num_pictures, patches)
    return forward, count.step(forward, dict.fromkeys(owns, True), adapted)


def step_flops(
    config: ModelConfig | DualConfig, trained: Collection[str], batch: Batch | Pairs, scale: float
) -> count.Flops:
    """Model FLOPs of a step.

    Args:
        config: of the model.
        trained: paths of the trained parameters.
        batch: rows, or examples, that stand for all, numpy.
        scale: rows of a step to these.
    """
    if isinstance(batch, Batch):
        assert isinstance(config, ModelConfig)
        return flops(config, trained, batch, scale)[1]
    document = rows_of(batch.document)
    if isinstance(config, DualConfig):
        each = [count.encoders(config, x, trained) for x in (batch.query, document)]
    else:
        each = [flops(config, trained, x)[1]._replace(head=0.0) for x in (batch.query, document)]
    return count.Flops(*(scale * sum(parts) for parts in zip(*each)))


def costs(config: TrainConfig, batch: Batch) -> Sides:
    """FLOPs of a step as it is run with the tower elsewhere, what is done again counted too.

    Args:
        config: of the run, its model whole.
        batch: rows that stand for all, numpy.
    """
    model = config.model
    one = build_model(model, make_mesh(MeshConfig(1), jax.devices()[:1]))
    trained, _ = split(one, one.shapes, config.optim.frozen)
    forward, step = flops(model, trained, batch)
    tower, rest = step.vision, step.total - step.vision
    if any(is_tower(path) for path in trained):
        tower += forward.vision  # the backward pass encodes again
        tower += forward.vision * (model.vision.remat == "full")
    rest += forward.top * (model.vision.remat == "full")
    rest += forward.decoder * (model.decoder.remat == "full")
    return Sides(tower, rest)


def best_first(cost: Sides, devices: int) -> list[int]:
    """Numbers of devices for the tower, the shortest step first.

    A step is as long as the work of that side which has more of it for each device.
    """
    return sorted(range(1, devices), key=lambda n: max(cost.tower / n, cost.rest / (devices - n)))
