"""Number of devices of a vision encoder: by FLOPs, against the compiler's own count."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from zoo import KINDS, LLAVA

from jaxvlm.config import Config, DataConfig, MeshConfig, OptimConfig, feature_blocks
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.pipeline.schedule import best_microbatches_in_flight
from jaxvlm.spmd.encoder_share import best_first, model_costs
from jaxvlm.spmd.model import build_model
from jaxvlm.train.disaggregated import AHEAD, EncoderAndRest


@pytest.mark.parametrize(
    ("cost", "devices", "first"),
    [((60, 40), 8, 5), ((50, 50), 8, 4), ((1, 99), 8, 1), ((99, 1), 8, 7), ((10, 90), 64, 7)],
)
def test_the_side_with_more_work_gets_more_devices(cost, devices, first):
    order = best_first(EncoderAndRest(*cost), devices)
    assert order[0] == first and sorted(order) == list(range(1, devices))
    spans = [max(cost[0] / n, cost[1] / (devices - n)) for n in order]
    assert spans == sorted(spans)


def of(model, frozen=(), **fields):
    data = DataConfig(train="none", batch_size=12)
    return Config(model=model, data=data, optim=OptimConfig(frozen=frozen), **fields)


def test_costs_are_what_is_run():
    """Frozen: once; trained: once, again, and twice for gradients; and again under remat."""
    batch = jax.tree.map(np.asarray, KINDS["llava"].batch(0, True))
    full = dataclasses.replace(LLAVA, vision=dataclasses.replace(LLAVA.vision, remat="full"))
    frozen = model_costs(of(LLAVA, ("vision/*",)), batch)
    learns, again = model_costs(of(LLAVA), batch), model_costs(of(full), batch)
    assert learns.encoder == pytest.approx(4 * frozen.encoder)
    assert again.encoder == pytest.approx(5 * frozen.encoder)
    assert learns.rest == pytest.approx(again.rest) == frozen.rest

    # Wide, so that matmuls are most of what the compiler counts.
    vision = dataclasses.replace(LLAVA.vision, width=512, mlp_dim=2048)
    wide = dataclasses.replace(LLAVA, vision=vision)
    model = build_model(wide, make_mesh(MeshConfig(1), jax.devices()[:1]))
    pixels = jax.ShapeDtypeStruct(batch.pixels.shape, batch.pixels.dtype)
    made = (
        jax.jit(lambda params, x: model.module(params).encode(x.reshape(-1, *x.shape[2:])))
        .lower(model.shapes, pixels)
        .compile()
    )
    here = (batch.image_start >= 0).sum() / batch.image_start.size
    # The compiler counts a loop over layers once, and all places for images.
    counted = made.cost_analysis()["flops"] * max(feature_blocks(vision)) * here
    assert 1 <= counted / model_costs(of(wide, ("vision/*",)), batch).encoder < 1.15


def test_microbatches_in_flight_take_the_least_time():
    """By going through a step in time, programs in the order in which they are queued.

    Both sides have as much work a microbatch; a quarter of the tower's is its first encoding.
    """

    def span(stages, parts, size):
        groups, tower, rest = parts // size, 0.0, 0.0
        made = []
        for m in range(groups + AHEAD):
            if m < groups:
                tower += 0.25 * size
                made.append(tower)
            if m >= AHEAD:
                rest = max(rest, made[m - AHEAD]) + size + stages - 1
                tower = max(tower, rest) + 0.75 * size
        return tower

    worst = 1.0
    for stages, parts in itertools.product((2, 3, 4, 8), (1, 4, 8, 12, 32, 64)):
        sizes = [g for g in range(1, parts + 1) if parts % g == 0]
        least = min(span(stages, parts, g) for g in sizes)
        worst = max(worst, span(stages, parts, best_microbatches_in_flight(stages, parts)) / least)
    assert worst < 1.1
    assert best_microbatches_in_flight(1, 8) == 1 and best_microbatches_in_flight(4, 32) == 8
    assert (
        best_microbatches_in_flight(4, 32, virtual_stages=2) % 4 == 0
        and best_microbatches_in_flight(4, 6, virtual_stages=2) == 6
    )
