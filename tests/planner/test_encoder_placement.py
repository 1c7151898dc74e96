"""Placement of the vision encoder in a search: sharded, replicated, or disaggregated."""

from __future__ import annotations

import dataclasses

import pytest

from jaxvlm.config import MeshConfig
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory import step_memory
from jaxvlm.planner.request import request
from jaxvlm.planner.search import candidates, encoder_placement, search
from jaxvlm.planner.time import step_time as time
from jaxvlm.planner.time.step_time import step_time
from jaxvlm.spmd.encoder_share import best_first
from jaxvlm.train.disaggregated import EncoderAndRest


def asked(devices="a100-pcie-40gb:32", train="full", batch=32):
    """LLaVA-1.5 7B, short sequences: all-gathers over slow links take longer than the matmuls."""
    given = request.RequestFlags(train=train, batch=batch, length=1024, images=1)
    return request.plan_request("llava-1.5-7b", None, machine.parse(devices), given)


def plain(devices, **more):
    strategy = dataclasses.replace(PRESETS["fsdp"], name="fsdp")
    return candidates.Candidate("fsdp", MeshConfig(1, devices), strategy, "full", **more)


@pytest.fixture(scope="module")
def slow():
    return asked(train="connector")


def test_the_encoder_is_replicated_if_gathering_it_takes_longer_than_its_work(slow):
    found = search.search(slow, 3, lambda way: way.preset == "fsdp" and way.mesh.tensor == 1)
    best = found.best[0]
    assert (
        best.candidate.strategy.replicated == ("vision",)
        and "replicated=vision" in best.candidate.text()
    )
    split = best.candidate._replace(strategy=plain(32).strategy)
    assert best.time.total < found.memory.time(split).total
    model = step_memory.model_of(candidates.setup_of(slow, best.candidate))
    # Frozen weights are stored in the checkpoint's dtype.
    tower = sum(2.0 * x.size for path, x in model.shapes.items() if path.startswith("vision/"))
    # Each device has all of it, and not a share.
    more = found.memory.plan(split, best.time, always=True)
    states = sum(best.states.values()) - sum(more.states.values())
    assert states == pytest.approx(tower * 31 / 32, rel=0.01)
    assert "--config.strategy.replicated=('vision',)" in candidates.overrides(slow, best.candidate)


def test_the_encoder_is_replicated_only_if_that_fits_and_is_accepted(slow):
    known = search.Memory(slow)
    way = plain(32)
    plan = known.plan(way, known.time(way), always=True)
    placed = search._with_replicated_encoder(known, plan, 0.0, lambda way: True)
    assert (
        placed.candidate.strategy.replicated == ("vision",) and placed.time.total < plan.time.total
    )
    tight = (plan.peak + placed.peak) / 2
    assert search._with_replicated_encoder(known, plan, tight, lambda way: True) is plan
    assert (
        search._with_replicated_encoder(known, plan, 0.0, lambda way: not way.strategy.replicated)
        is plan
    )
    assert encoder_placement.with_replicated_encoder(placed.candidate) is None
    assert encoder_placement.with_replicated_encoder(way._replace(strategy=PRESETS["ddp"])) is None


@pytest.mark.parametrize("train", ["full", "connector"])
def test_a_disaggregated_step_takes_as_long_as_its_slower_side(train):
    there = asked("h200:8", train, batch=840)  # any number of devices divides it
    setup = candidates.setup_of(there, plain(8))
    time = step_time(setup, there.machine)
    count, seconds = encoder_placement.disaggregated(setup, time, there.machine)
    tower = time.parts["vision"]
    if train == "full":  # its forward pass is recomputed for its backward pass
        tower += step_time(setup._replace(frozen=("*",)), there.machine).parts["vision"]
    rest = time.total - time.parts["vision"]
    assert count == best_first(EncoderAndRest(tower, rest), 8)[0]
    assert seconds == pytest.approx(8 * max(tower / count, rest / (8 - count)))
    assert seconds > time.total  # no side has less work than before


def test_a_disaggregated_step_by_hand():
    there = asked("h200:8", "connector", batch=840)
    setup = candidates.setup_of(there, plain(8))
    time = step_time(setup, there.machine)._replace(total=4.0, parts={"vision": 1.0})
    # Two devices for a quarter of the work: as long as before. Of three rows' divisors, no.
    assert encoder_placement.disaggregated(setup, time, there.machine) == (2, 4.0)
    assert encoder_placement.disaggregated(setup._replace(rows=35), time, there.machine) == (3, 4.8)


@pytest.mark.parametrize("more", [{"images": 0}, {"samples": 64, "images": 1}])
def test_an_encoder_that_does_not_run_is_not_replicated(more):
    given = request.RequestFlags(train="connector", batch=32, length=1024, **more)
    there = request.plan_request("llava-1.5-7b", None, machine.parse("a100-pcie-40gb:32"), given)
    known = search.Memory(there)
    way = plain(32, cache="strict" if "samples" in more else "off")
    plan = known.plan(way, known.time(way))
    assert search._with_replicated_encoder(known, plan, 0.0, lambda way: True) is plan


def test_a_replicated_encoder_is_still_updated_in_shards():
    there = asked("h100:32")
    setup = candidates.setup_of(there, plain(32))
    whole = setup._replace(strategy=encoder_placement.with_replicated_encoder(plain(32)).strategy)
    one, other = (sum(op.bytes for op in time._optimizer(x)) for x in (setup, whole))
    assert one == other > 0


def test_rejected_candidates_are_slower_than_the_first():
    found = search.search(asked("rtx4090:32", "lora"), 1)
    for lost in found.rejected:
        if lost.why == "slower" and " x the step time" in lost.text and "about" not in lost.text:
            assert float(lost.text.split(" x ")[0]) >= 0.99, lost


def test_disaggregation_is_estimated_on_one_host_only():
    found = search.search(asked("h200:8", batch=16), 1)
    lost = {x.family: x.text for x in found.rejected}
    assert "encoder.devices=" in lost["disaggregated vision encoder"]
    there = asked("h200:16", batch=16)
    setup = candidates.setup_of(there, plain(16))
    assert (
        encoder_placement.disaggregated(setup, step_time(setup, there.machine), there.machine)
        is None
    )
    odd = candidates.setup_of(asked("h200:8", batch=16), plain(8))._replace(rows=17)
    count, _ = encoder_placement.disaggregated(
        odd, step_time(odd, machine.parse("h200:8")), machine.parse("h200:8")
    )
    assert count == 7  # no other number leaves devices that divide the rows
