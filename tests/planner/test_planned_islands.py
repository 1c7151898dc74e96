"""Plans of runs with islands: the axis is the recipe's, and all others are searched."""

import dataclasses

import jax
import pytest
from runs import recipe, write_data

from jaxvlm.config import ConfigError, MeshConfig, from_config_dict
from jaxvlm.parallel.mesh import AXES
from jaxvlm.planner import command
from jaxvlm.planner.compiled import verify
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.request import request
from jaxvlm.planner.request.request import RequestFlags
from jaxvlm.planner.search import candidates, decision_tree, scaling, search
from jaxvlm.planner.time import communication


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    values = recipe(write_data(tmp_path_factory.mktemp("data"), images=8))
    values.mesh.island, values.outer.steps = 2, 10
    values.outer.optimizer, values.outer.momentum = "nesterov", 0.9
    values.outer.delta_dtype = "int8"
    values.data.batch_size = 16
    return from_config_dict(values)


def asked(config, devices):
    return request.plan_request("recipe.py", config, machine.parse(devices))


def with_islands(config, number):
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, island=number))


@pytest.mark.parametrize("devices", ["h200:8", "2xv5p:2x2x2", "v5p:2x2x2", "4xv5p:2x2x1"])
def test_every_candidate_has_the_islands_and_an_island_crosses_slices_by_data_alone(
    config, devices
):
    there, found = asked(config, devices), list(candidates.candidates(asked(config, devices)))
    assert len({candidate.preset for candidate in found}) >= 3
    slices = there.machine.slices
    for candidate in found:
        mesh = candidate.mesh
        total = 1
        for axis in AXES:
            total *= getattr(mesh, axis)
        assert total == there.machine.devices and mesh.island == 2 and candidate.preset != "single"
        assert candidate.cache == "off" and there.rows % candidate.shards == 0
        assert mesh.data % max(1, slices // 2) == 0
        assert "--config.mesh.island=2" in candidates.overrides(there, candidate)
        assert candidates.setup_of(there, candidate).outer == config.outer


def test_what_islands_share_is_in_the_memory_of_formula_and_trace(config):
    there = asked(config, "h200:8")
    best = search.search(there, 3).best
    plain = asked(with_islands(config, 1), "h200:4")
    memory, alone = search.Memory(there), search.Memory(plain)
    for plan in best:
        shared, parameters = plan.states["shared"], plan.states["parameters"]
        assert shared == 3 * parameters > 0, "the parameters, their momentum, the rounding's rest"
        mesh = dataclasses.replace(plan.candidate.mesh, island=1)
        more = memory.bytes_by_formula(plan.candidate) - alone.bytes_by_formula(
            plan.candidate._replace(mesh=mesh)
        )
        # An island's rows are those of half the devices with half the batch.
        half = scaling.with_batch_size(plain, there.rows // 2)
        less = search.Memory(half).bytes_by_formula(plan.candidate._replace(mesh=mesh))
        assert memory.bytes_by_formula(plan.candidate) - less == pytest.approx(shared)
        assert more < shared


@pytest.mark.parametrize("sizes, slow, fast", [
    (MeshConfig(island=4, data=3, fsdp=4), ["data"], ["island", "fsdp"]),
    (MeshConfig(island=3, data=4, fsdp=4), ["island"], ["data", "fsdp"]),
    (MeshConfig(island=6, data=2, fsdp=4), ["island"], ["data", "fsdp"]),
    (MeshConfig(island=1, data=3, fsdp=16), ["data"], ["fsdp"]),
])  # fmt: skip
def test_links_between_slices_are_those_of_the_real_mesh(sizes, slow, fast):
    """Also where neither the islands nor the slices divide the other."""
    there = machine.parse("3xv5e:4x4")

    def times(axis):
        return communication.seconds(
            communication.Message("all-reduce", (axis,), "", 1e9, 1, False), sizes, there
        )

    for axis in slow:
        assert times(axis)[1] > 0, axis
    for axis in fast:
        assert times(axis)[1] == 0 < times(axis)[0], axis


def test_over_slow_links_a_step_is_the_faster_the_rarer_islands_exchange(config):
    seconds = []
    for islands, steps in ((1, 1), (2, 1), (2, 10), (2, 100)):
        outer = dataclasses.replace(config.outer, steps=steps, delta_dtype="float32")
        run = dataclasses.replace(with_islands(config, islands), outer=outer)
        there = scaling.with_batch_size(asked(run, "2xv5e:16x16"), 512)
        sharded = next(
            one
            for one in candidates.candidates(there)
            if one.preset in ("hybrid_shard", "fsdp") and one.mesh.fsdp == 256
        )
        seconds.append(search.Memory(there).time(sharded).total)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1), "both send a shard in each step"
    assert seconds[1] > seconds[2] > seconds[3]


def test_what_does_not_go_is_said(config):
    result = search.search(asked(with_islands(config, 3), "h200:8"))
    assert not result.best and not result.nearest
    (why,) = [one.text for one in result.rejected]
    assert why == "8 devices are not divisible by config.mesh.island=3"
    for name, value in (("steps", 0), ("fragments", 99), ("optimizer", "lion")):
        outer = dataclasses.replace(config.outer, **{name: value})
        with pytest.raises(ConfigError, match=rf"config\.outer\.{name}="):
            asked(dataclasses.replace(config, outer=outer), "h200:8")
    recipe_file = "configs/quickstart.py"
    flags = RequestFlags(batch=64)
    with pytest.raises(ConfigError, match=r"8 devices are not divisible by config\.mesh\.island=3"):
        command.plan(recipe_file, with_islands(config, 3), flags, command.PlanFlags("h200:8"))
    with pytest.raises(ConfigError, match=r"config\.mesh\.island=0: set the number of islands"):
        asked(with_islands(config, 0), "h200:8")
    pairs = dataclasses.replace(config, loss=dataclasses.replace(config.loss, name="info_nce"))
    with pytest.raises(ConfigError, match=r"config\.mesh\.island=2 cannot be combined with a loss"):
        asked(pairs, "h200:8")


def test_the_tree_and_other_sizes_have_the_islands(config):
    result = search.search(asked(config, "h200:8"), 2)
    first, *rest = decision_tree.branches(result)
    assert "island" not in first["text"], "one device has none"
    assert all("island=2" in branch["text"] for branch in rest if branch["fits"])
    points = {point["devices"]: point for point in scaling.curve(result)}
    assert points[1]["text"] == "1 devices are not divisible by config.mesh.island=2"
    assert "island=2" in points[16]["text"]


def test_an_encoder_on_devices_of_its_own_is_not_compared(config):
    result = search.search(asked(config, "h200:8"), 1)
    assert not [one for one in result.rejected if "disaggregated" in one.family]


@pytest.mark.long
def test_the_compiled_step_has_the_planned_states_and_sends_nothing_between_islands(config):
    result = search.search(asked(config, "cpu:8"), 1)
    (row,) = verify.verify(result, jax.devices())
    assert "island=2" in row["text"] and "why" not in row
    assert row["collectives"] and not any("island" in name for name in row["collectives"])
    states = sum(result.best[0].states.values())
    assert row["compiled"]["arguments"] == pytest.approx(states, abs=64), "counters beside"
