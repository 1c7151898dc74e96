"""Features stay in their process: each device takes its part from a device of the same process."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_disaggregated import ROWS, rows_of
from zoo import KINDS

from jaxvlm.config import ConfigError, EncoderConfig, MeshConfig, OptimConfig, StrategyConfig
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel import transfer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives
from jaxvlm.spmd.disaggregated_encoder import (
    assemble_disaggregated,
    divide_devices,
    encoder_on_devices,
)
from jaxvlm.spmd.model import build_model
from jaxvlm.train.disaggregated import ENCODER_PROGRAMS

PARTS = PartitionSpec("a"), PartitionSpec("b"), PartitionSpec(("a", "b")), PartitionSpec()


@pytest.fixture
def several(monkeypatch):
    """The way that arrays take where there are several processes."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)


@pytest.mark.parametrize("source", PARTS)
@pytest.mark.parametrize("target", [*PARTS, PartitionSpec(None, "b")])
def test_arrays_arrive_whole(several, source, target):
    devices = np.asarray(jax.devices())
    theirs = Mesh(devices[:4].reshape(2, 2), ("a", "b"))
    ours = Mesh(devices[4:].reshape(2, 2), ("a", "b"))
    x = np.arange(64.0).reshape(8, 8)
    there = jax.device_put(x, NamedSharding(theirs, source))
    for mesh in (ours, theirs):
        wanted = NamedSharding(mesh, target)
        moved = transfer.move({"x": there}, wanted)["x"]
        assert moved.sharding == wanted and np.array_equal(moved, x)
    everywhere = NamedSharding(ours, PartitionSpec())
    number = jax.device_put(3.0, NamedSharding(theirs, PartitionSpec()))
    assert transfer.move(number, everywhere) == 3.0


def machine(counts):
    """Devices of processes that have so many, in the order in which JAX lists them."""
    return [
        types.SimpleNamespace(id=10 * process + i, process_index=process)
        for process, count in enumerate(counts)
        for i in range(count)
    ]


def test_each_process_gives_as_many():
    encoder, rest = divide_devices(EncoderConfig(4), machine([3, 3, 3, 3]))
    assert [d.id for d in encoder] == [0, 10, 20, 30]
    assert [d.id for d in rest] == [1, 2, 11, 12, 21, 22, 31, 32]


@pytest.mark.parametrize(
    "count, counts, says",
    [
        (3, [4, 4], "a multiple of 2 that leaves each process some"),
        (4, [1, 1, 1, 1, 1], "a multiple of 5"),
        (2, [4, 2], "2 processes with 4, 2 devices: each process gives the encoder as many"),
        (4, [2, 2], "4 of 4 devices"),
    ],
)
def test_what_can_not_be_divided_is_refused(count, counts, says):
    with pytest.raises(ConfigError, match=says):
        divide_devices(EncoderConfig(count), machine(counts))


class Device:
    def __init__(self, process):
        self.process_index = process


class Placed:
    """A sharding over devices of processes: ``p1=[(0, 4)]``, process 1's one device has these."""

    def __init__(self, **parts):
        self.indices = {
            Device(int(name[1:])): (slice(*part),) for name, own in parts.items() for part in own
        }

    def devices_indices_map(self, shape):
        return self.indices


def test_other_sequences_on_the_other_mesh_are_refused_in_every_process():
    halves = Placed(p0=[(0, 4)], p1=[(4, 8)])
    transfer.check_same_rows(halves, Placed(p0=[(0, 2), (2, 4)], p1=[(4, 8)]), 8, "config.a")
    for other in (Placed(p0=[(0, 4)], p1=[(0, 8)]), Placed(p0=[(0, 4)])):
        with pytest.raises(ConfigError, match=r"config.a: process 1 would have sequences 4 to 7"):
            transfer.check_same_rows(halves, other, 8, "config.a")


def test_processes_agree_on_how_an_array_moves():
    """One process could move its part alone, the other could not: neither does."""
    source, target = Placed(p0=[(0, 8)], p1=[(0, 4)]), Placed(p0=[(0, 4)], p1=[(4, 8)])
    assert not transfer._is_local(source, target, (8,))
    assert transfer._is_local(target, target, (8,))
    assert not transfer._is_local(target, Placed(p2=[(0, 4)]), (8,))


MESHES = {
    "data": (MeshConfig(), "ddp", StrategyConfig()),
    "data x tensor": (MeshConfig(data=-1, tensor=2), "zero2", StrategyConfig(name="ddp")),
}


def check_traffic(step, encoder, model):
    """Compiled: devices send at most their side's gradients, in a ring, and a few scalars."""
    sent = {
        name: collectives.total(
            collectives.read(
                program.as_text(), (encoder if name in ENCODER_PROGRAMS else model).mesh.shape
            )
        )
        for name, program in step.programs.items()
    }
    for name, side in (("backward", encoder), ("gradients", model)):
        paths = [p for p in model.shapes if (p in encoder.shapes) == (side is encoder)]
        size, devices = sum(4 * model.shapes[p].size for p in paths), side.mesh.size
        # Less: a layer after the one that features are taken from has no gradient to send.
        assert 0 < sent.pop(name) < 2 * (devices - 1) / devices * size + 64
    assert sent.pop("encode") == 0 and sum(sent.values()) < 64


@pytest.mark.parametrize("processes, mesh", [(2, "data"), (4, "data"), (2, "data x tensor")])
@pytest.mark.parametrize("frozen", [(), ("vision/*",)], ids=["trained", "frozen"])
def test_every_part_comes_from_its_own_process(processes, mesh, frozen):
    """A step's transfers, of eight devices that are called those of so many processes."""
    sizes, name, split = MESHES[mesh]
    each = 8 // processes
    share = 2 if processes == 2 else 1
    groups = [jax.devices()[i * each : (i + 1) * each] for i in range(processes)]
    own = [d for group in groups for d in group[:share]]
    rest = [d for group in groups for d in group[share:]]
    process_of = {d: i for i, group in enumerate(groups) for d in group}
    sizes, split = resolve(split, sizes, rest)
    model = build_model(KINDS["llava"].config, make_mesh(sizes, rest), split)
    tower = EncoderConfig(len(own), strategy=StrategyConfig(name=name))
    tx = make_optimizer(OptimConfig(), lambda step: 1e-2, model.logical)
    encoder = encoder_on_devices(model, tower, own)
    made = assemble_disaggregated(model, encoder, KINDS["llava"].loss, tx, 1, frozen)
    state = made.init(model.init(0))
    batch = made.place(rows_of(KINDS["llava"].batch(0, True)), ROWS)
    step = made.build(state, batch)
    if mesh == "data" and not frozen:
        check_traffic(step, encoder, model)
    moved = []

    def move(tree, sharding):
        for x in jax.tree.leaves(tree):
            moved.append((x.sharding, sharding, x.shape))
        return jax.device_put(tree, sharding)

    dataclasses.replace(step, move=move)(state, batch)
    crossed = [m for m in moved if m[0].device_set != m[1].device_set]
    assert len(crossed) >= 1 + 3 * (not frozen)
    for source, target, shape in crossed:
        had = source.devices_indices_map(shape)
        for device, index in target.devices_indices_map(shape).items():
            mine = [
                d for d, i in had.items() if transfer._key(i, shape) == transfer._key(index, shape)
            ]
            assert process_of[device] in {process_of[d] for d in mine}, (shape, source, target)
