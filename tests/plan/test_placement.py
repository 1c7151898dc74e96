"""Where a search puts the vision tower: split, whole on every device, or on devices of its own."""

from __future__ import annotations

import dataclasses

import pytest

from jaxvlm.build.shares import best_first
from jaxvlm.config import MeshConfig
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.plan import machine, memory, placement, question, search, time, ways
from jaxvlm.plan.time import step_time
from jaxvlm.train.apart import Sides


def asked(devices="a100-pcie-40gb:32", train="full", batch=32):
    """LLaVA-1.5 7B, short rows: weights are gathered over slow links for longer than it works."""
    given = question.Asked(train=train, batch=batch, length=1024, pictures=1)
    return question.ask("llava-1.5-7b", None, machine.parse(devices), given)


def plain(devices, **more):
    strategy = dataclasses.replace(PRESETS["fsdp"], name="fsdp")
    return ways.Way("fsdp", MeshConfig(1, devices), strategy, "full", **more)


@pytest.fixture(scope="module")
def slow():
    return asked(train="connector")


def test_a_tower_s_weights_are_left_whole_where_gathering_them_takes_longer_than_the_work(slow):
    found = search.search(slow, 3, lambda way: way.preset == "fsdp" and way.mesh.tensor == 1)
    best = found.best[0]
    assert best.way.strategy.whole == ("vision",) and "whole=vision" in best.way.text()
    split = best.way._replace(strategy=plain(32).strategy)
    assert best.time.total < found.known.time(split).total
    model = memory.model_of(ways.setup_of(slow, best.way))
    tower = sum(4.0 * x.size for path, x in model.shapes.items() if path.startswith("vision/"))
    # Each device has all of it, and not a share.
    more = found.known.plan(split, best.time, always=True)
    states = sum(best.states.values()) - sum(more.states.values())
    assert states == pytest.approx(tower * 31 / 32, rel=0.01)
    assert "--config.strategy.whole=('vision',)" in ways.overrides(slow, best.way)


def test_a_tower_is_whole_only_where_that_fits_and_is_asked_for(slow):
    known = search.Memory(slow)
    way = plain(32)
    plan = known.plan(way, known.time(way), always=True)
    placed = search._placed(known, plan, 0.0, lambda way: True)
    assert placed.way.strategy.whole == ("vision",) and placed.time.total < plan.time.total
    tight = (plan.peak + placed.peak) / 2
    assert search._placed(known, plan, tight, lambda way: True) is plan
    assert search._placed(known, plan, 0.0, lambda way: not way.strategy.whole) is plan
    assert placement.with_whole_tower(placed.way) is None
    assert placement.with_whole_tower(way._replace(strategy=PRESETS["ddp"])) is None


@pytest.mark.parametrize("train", ["full", "connector"])
def test_a_tower_of_its_own_takes_as_long_as_the_side_with_more_work(train):
    there = asked("h200:8", train, batch=840)  # any number of devices divides it
    setup = ways.setup_of(there, plain(8))
    time = step_time(setup, there.machine)
    count, seconds = placement.apart(setup, time, there.machine)
    tower = time.parts["vision"]
    if train == "full":  # what it makes is not kept until its backward pass
        tower += step_time(setup._replace(frozen=("*",)), there.machine).parts["vision"]
    rest = time.total - time.parts["vision"]
    assert count == best_first(Sides(tower, rest), 8)[0]
    assert seconds == pytest.approx(8 * max(tower / count, rest / (8 - count)))
    assert seconds > time.total  # no side has less work than before


def test_a_tower_of_its_own_by_hand():
    there = asked("h200:8", "connector", batch=840)
    setup = ways.setup_of(there, plain(8))
    time = step_time(setup, there.machine)._replace(total=4.0, parts={"vision": 1.0})
    # Two devices for a quarter of the work: as long as before. Of three rows' divisors, no.
    assert placement.apart(setup, time, there.machine) == (2, 4.0)
    assert placement.apart(setup._replace(rows=35), time, there.machine) == (3, 4.8)


@pytest.mark.parametrize("more", [{"pictures": 0}, {"samples": 64, "pictures": 1}])
def test_a_tower_that_does_not_run_is_not_placed(more):
    given = question.Asked(train="connector", batch=32, length=1024, **more)
    there = question.ask("llava-1.5-7b", None, machine.parse("a100-pcie-40gb:32"), given)
    known = search.Memory(there)
    way = plain(32, cache="strict" if "samples" in more else "off")
    plan = known.plan(way, known.time(way))
    assert search._placed(known, plan, 0.0, lambda way: True) is plan


def test_a_whole_tower_is_updated_in_shares_all_the_same():
    there = asked("h100:32")
    setup = ways.setup_of(there, plain(32))
    whole = setup._replace(strategy=placement.with_whole_tower(plain(32)).strategy)
    one, other = (sum(op.bytes for op in time._optimizer(x)) for x in (setup, whole))
    assert one == other > 0


def test_others_are_slower_than_the_first_that_is_shown():
    found = search.search(asked("rtx4090:32", "lora"), 1)
    for lost in found.lost:
        if lost.why == "slower" and " x the step time" in lost.text and "about" not in lost.text:
            assert float(lost.text.split(" x ")[0]) >= 0.99, lost


def test_a_tower_of_its_own_is_said_of_one_host_alone():
    found = search.search(asked("h200:8", batch=16), 1)
    lost = {x.family: x.text for x in found.lost}
    assert "tower.devices=" in lost["tower on devices of its own"]
    there = asked("h200:16", batch=16)
    setup = ways.setup_of(there, plain(16))
    assert placement.apart(setup, step_time(setup, there.machine), there.machine) is None
    odd = ways.setup_of(asked("h200:8", batch=16), plain(8))._replace(rows=17)
    count, _ = placement.apart(
        odd, step_time(odd, machine.parse("h200:8")), machine.parse("h200:8")
    )
    assert count == 7  # no other number leaves devices that divide the rows
