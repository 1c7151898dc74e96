"""What a recipe of pairs leaves to the planner, and what is predicted of its run."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from PIL import Image

from jaxvlm.config import (
    ConfigError,
    GradCacheConfig,
    MeshConfig,
    StrategyConfig,
    default_config,
    from_config_dict,
)
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.search import candidate_memory
from jaxvlm.train import program_memory
from jaxvlm.trainer import auto_parallel, memory_estimate
from jaxvlm.trainer.trainer import Trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A dual encoder from scratch, on images of one colour and their names."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = []
    for i in range(32):
        Image.fromarray(np.full((16, 16, 3), 8 * i, np.uint8)).save(folder / f"{i}.png")
        rows.append(json.dumps({"query_image": f"{i}.png", "positive": f"shade {i}"}))
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    config = default_config()
    config.loss.name, config.embedder, config.steps = "info_nce", "dual", 4
    config.data.train, config.data.batch_size = str(folder / "data.jsonl"), 32
    config.data.max_length, config.data.buckets = 16, 1
    config.dual.vision.image_size, config.dual.vision.patch_size = 16, 8
    config.dual.text.vocab_size = 512
    return from_config_dict(config)


def asks(config, **groups):
    """``config`` with some groups' fields changed."""
    for name, fields in groups.items():
        if isinstance(fields, dict):
            fields = dataclasses.replace(getattr(config, name), **fields)
        config = dataclasses.replace(config, **{name: fields})
    return config


def resolved(config, count=8):
    lines: list[str] = []
    made = auto_parallel.resolve_auto(config, jax.devices()[:count], lines.append)
    assert not auto_parallel.auto_settings(made)
    assert all(line.startswith("planner: assumed: ") for line in lines[:-1])
    return made, lines[-1]


@pytest.mark.long
def test_mini_batches_mesh_and_remat_of_pairs_are_chosen_and_logged(config, rates):
    text = dataclasses.replace(config.dual.text, remat="auto")
    asked = asks(config, grad_cache={"query_mini_batch": -1}, dual={"text": text}, mesh={"data": 0})
    made, line = resolved(asked)
    assert line.startswith("planner (mesh.data, dual.text.remat, grad_cache.query_mini_batch): ")
    assert min(dataclasses.astuple(made.grad_cache)) >= 0
    assert made.dual.text.remat in ("none", "dots", "full")
    assert made.dual.vision.remat == config.dual.vision.remat
    assert made.strategy == asked.strategy and made.mesh.data > 0
    both = asks(config, strategy={"name": "auto"}, grad_cache={"query_mini_batch": -1})
    every, _ = resolved(both)
    assert every.strategy.name != "auto" and every.mesh != MeshConfig()


@pytest.mark.long
def test_the_mesh_alone_is_chosen_under_the_recipes_strategy(config, rates):
    asked = asks(config, strategy=StrategyConfig("zero1"), mesh={"data": 0},
                 grad_cache=GradCacheConfig(2, 1))  # fmt: skip
    made, line = resolved(asked, 4)
    assert made.strategy.name == "zero1" and made.mesh == MeshConfig(data=1, fsdp=4)
    assert made.grad_cache == GradCacheConfig(2, 1) and "grad_cache=2,1" in line


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"grad_cache": {"query_mini_batch": -1, "document_mini_batch": 4}},
            "-1 chooses config.grad_cache.document_mini_batch too",
        ),
        ({"mesh": {"data": 0, "tensor": 2}}, "mesh.data=0 chooses config.mesh.tensor too"),
        (
            {"microbatches": 0},
            "microbatches=0: pairs have mini-batches: set config.grad_cache.q",
        ),
        (
            {
                "loss": {"name": "next_token"},
                "embedder": "vlm",
                "grad_cache": {"query_mini_batch": -1},
            },
            "of losses of pair",
        ),
        (
            {"grad_cache": {"query_mini_batch": -1}, "cache": {"policy": "strict"}},
            "cached visual tokens",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(config, change, says):
    with pytest.raises(ConfigError, match=says):
        auto_parallel.resolve_auto(asks(config, **change), jax.devices(), print)


@pytest.mark.parametrize("value", [(-2, 0, 0), (0, -1, 0), (4, 0, -1)])
def test_negative_mini_batches_are_refused(config, value):
    with pytest.raises(ConfigError, match=r"config.grad_cache.\w+=-\d: must be at least (-1|0)$"):
        Trainer(asks(config, grad_cache=GradCacheConfig(*value)), devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def predicted(config):
    """A run in mini-batches on eight devices, what is predicted of it, and its first batch."""
    run = Trainer(asks(config, grad_cache=GradCacheConfig(2, 1)))
    local, _ = next(run.dataset.train(run.rows, 0))
    return run, memory_estimate.estimate(run, local), local


def test_a_run_on_pairs_is_predicted(predicted):
    run, said, local = predicted
    assert said.line().startswith("planned: about ") and "parameters" in said.line()
    assert said.states["parameters"] == sum(
        map(program_memory.bytes_of, run.training.abstract.params.values())
    )
    pairing = said.setup.pairs
    assert (pairing.query.images, pairing.query.length, pairing.documents) == (1, 0, 1)
    assert pairing.document.length == local.document.tokens.shape[-1]
    assert said.setup.microbatches == 4  # documents one by one
    batch = sum(x.nbytes for x in jax.tree.leaves(local)) / 8
    assert said.states["batch"] == pytest.approx(batch, rel=0.02)


@pytest.mark.long
def test_short_of_memory_gradient_caching_may_be_the_change(predicted):
    run, said, _ = predicted
    there = machine.parse("h200:8")
    config = asks(run.config, grad_cache=GradCacheConfig())
    pairing = said.setup.pairs._replace(mini_batches=step_memory.pairs.WHOLE)
    setup = said.setup._replace(platform="gpu", rows=65536, pairs=pairing, microbatches=1)
    now = step_memory.estimate(setup)
    full = memory_estimate.MemoryEstimate(setup, dict(now.states), dict(now.work), True, None)
    small = there.chip._replace(hbm_bytes=int(0.3 * now.peak / (1 - candidate_memory.MARGIN)))
    text = memory_estimate.cheapest(full, config, there._replace(chip=small))
    change = text.split("The cheapest change: ")[1]
    assert "--config.grad_cache.query_mini_batch=" in change and "% time" in change


@pytest.mark.long
def test_a_run_with_the_planners_mini_batches_trains(config, rates, tmp_path, capsys):
    made = Trainer(asks(config, grad_cache={"query_mini_batch": -1}), tmp_path / "run").fit()
    assert made["step"] == 4 and made["plan"]["planned_bytes"] > 0
    assert "planner (grad_cache.query_mini_batch): " in capsys.readouterr().out
