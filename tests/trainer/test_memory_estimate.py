"""What the planner says of a run's memory and time, and its advice where memory is short."""

from __future__ import annotations

import copy
import dataclasses
import re

import jax
import numpy as np
import pytest
from runs import recipe, write_data

from jaxvlm.config import Config, from_config_dict
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request.abstract_devices import BatchShape
from jaxvlm.planner.request.pairs import PairShapes
from jaxvlm.planner.search import candidate_memory
from jaxvlm.train import program_memory
from jaxvlm.trainer import memory_estimate
from jaxvlm.trainer.trainer import Trainer
from jaxvlm.types import Pairs


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    data = write_data(tmp_path_factory.mktemp("data"), images=8)
    return from_config_dict(recipe(data))


@pytest.fixture(scope="module")
def predicted(config):
    """What is predicted of the recipe's run, built on eight devices."""
    run = Trainer(config)
    local, _ = next(run.dataset.train(run.rows, 0))
    return run, memory_estimate.estimate(run, local), local


def test_states_of_a_run_are_exact_before_it(predicted):
    run, said, _ = predicted
    state = run.training.abstract
    sizes = {"parameters": state.params, "frozen": state.frozen}
    for name, part in sizes.items():
        assert said.states[name] == sum(map(program_memory.bytes_of, jax.tree.leaves(part)))
    assert said.line().startswith("planned: about ") and "parameters" in said.line()
    assert "), by formula, up to twice off, for the largest batches" in said.line()
    assert "from the step's trace" in said._replace(exact=True).line()


def test_a_run_that_is_not_known_says_so(predicted):
    run, _, local = predicted
    config = dataclasses.replace(
        run.config, encoder=dataclasses.replace(run.config.encoder, devices=1)
    )
    odd = copy.copy(run)
    odd.config = config
    assert memory_estimate.estimate(odd, local).startswith(
        "not planned: a disaggregated vision encoder"
    )


def test_a_mistake_of_the_planner_does_not_end_a_run(predicted, monkeypatch):
    run, _, local = predicted

    def broken(*_):
        raise OverflowError("int too large")

    for name in ("step_time", "machine_of"):
        with monkeypatch.context() as patch:
            patch.setattr(memory_estimate, name, broken)
            assert (
                memory_estimate.estimate(run, local) == "not planned: OverflowError: int too large"
            )
    monkeypatch.setattr(memory_estimate, "cheapest", broken)
    assert memory_estimate.advice(run, local) == ""


def test_the_longest_sequences_are_predicted(predicted):
    run, said, local = predicted
    assert said.setup.length == run.config.data.max_length
    short = local._replace(tokens=local.tokens[:, :8])
    assert memory_estimate.estimate(run, short).peak == said.peak
    assert f"({run.config.data.batch_size} sequences of {said.setup.length} tokens)" in said.line()
    assert memory_estimate.is_largest(said.setup, local)
    assert not memory_estimate.is_largest(said.setup, short)


def test_patches_and_pairs_are_compared_too(predicted):
    _, said, local = predicted
    any_size = said.setup._replace(patches=64)
    patches = local._replace(pixels=None, patches=np.zeros((8, 48, 12), np.uint8))
    assert not memory_estimate.is_largest(any_size, patches)
    assert memory_estimate.is_largest(any_size._replace(patches=48), patches)
    shapes = PairShapes(BatchShape(16), BatchShape(32), Config())
    of_pairs = said._replace(setup=said.setup._replace(pairs=shapes))
    assert "(queries of 16 tokens, documents of 32 tokens)" in of_pairs.line()
    query, document = (local._replace(tokens=np.zeros((8, n), np.int32)) for n in (16, 24))
    pairs = Pairs(query, document, np.ones((8, 1), bool), None, None)
    assert not memory_estimate.is_largest(of_pairs.setup, pairs)
    longer = pairs._replace(document=local._replace(tokens=np.zeros((8, 32), np.int32)))
    assert memory_estimate.is_largest(of_pairs.setup, longer)


@pytest.mark.long
def test_short_of_memory_names_what_fills_it_and_what_to_change(predicted):
    run, said, _ = predicted
    there = machine.parse("h200:8")
    setup = said.setup._replace(platform="gpu", rows=64)
    now = step_memory.estimate(setup)
    full = memory_estimate.MemoryEstimate(setup, dict(now.states), dict(now.work), True, None)
    small = there.chip._replace(hbm_bytes=int(0.8 * now.peak / (1 - candidate_memory.MARGIN)))
    text = memory_estimate.cheapest(full, run.config, there._replace(chip=small))
    assert text.startswith("planned: ") and "parameters" in text
    change = text.split("The cheapest change: ")[1]
    assert "--config." in change and re.search(r"[+-]\d+% time", change)
    assert "--config.data.batch_size" not in change
    tiny = there.chip._replace(hbm_bytes=10_000)
    assert "Nothing else fits" in memory_estimate.cheapest(
        full, run.config, there._replace(chip=tiny)
    )


def test_planned_figures_are_compared_with_the_real_ones(predicted):
    found = memory_estimate.compare(predicted[1], 2 * 2**20, [900.0, 100.0, 300.0, 200.0])
    assert found["measured_seconds"] == 0.2 and found["compiled_bytes"] == 2 * 2**20
    assert "and 2.0 MiB a device (the compiler's)" in memory_estimate.compare_line(found)
    assert memory_estimate.compare("not planned: why", 0, []) == {}
    nothing = memory_estimate.compare(predicted[1]._replace(time=None), 0, [])
    said = memory_estimate.compare_line(nothing)
    assert "and not known a device" in said and "not known and not known a step" in said
