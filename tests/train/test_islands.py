"""Islands against each island's steps on one device, combined by NumPy in float64 (DiLoCo)."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import ROWS, TINY, random_batch
from hypothesis import given
from hypothesis import strategies as st
from numerics import close, close_in_norm
from zoo import on_stages

from jaxvlm.config import MeshConfig, OuterConfig, StrategyConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.islands import on_islands
from jaxvlm.parallel.mesh import ISLAND, make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives
from jaxvlm.spmd.islands import IslandProgram, OuterPrograms, outer_of
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.dropout_keys import seeded
from jaxvlm.train.islands import NOT_FINITE, NOT_TRAINED, USED, OuterSchedule

MESHES = {
    "data": ("ddp", MeshConfig(4, island=2)),
    "fsdp": ("fsdp", MeshConfig(1, island=4)),
    "tensor": ("ddp", MeshConfig(1, tensor=4, island=2)),
    "data x tensor": ("ddp", MeshConfig(2, tensor=2, island=2)),
    "fsdp x tensor": ("fsdp", MeshConfig(1, fsdp=2, tensor=2, island=2)),
    "zero1": ("zero1", MeshConfig(2, fsdp=2, island=2)),
    "context": ("ddp", MeshConfig(2, context=2, island=2), {"context": "ring"}),
    "pipeline": ("ddp", MeshConfig(2, pipeline=2, island=2)),
    "fsdp x pipeline": ("fsdp", MeshConfig(1, fsdp=2, pipeline=2, island=2)),
}
LOSS = NextToken()
DILOCO = OuterConfig(steps=3, optimizer="nesterov", learning_rate=0.7, momentum=0.9)


def adam():
    # A large epsilon: Adam makes rounding of gradients near zero as large as a step.
    return optax.adamw(1e-2, eps=1e-2)


@functools.cache
def on_one_device():
    """The model and its plain step with Adam on one device, and the first parameters."""
    model = build_model(TINY, make_mesh(MeshConfig(1), jax.devices()[:1]))
    return model, jax.device_get(model.init(0))


class Made:
    """A model on a mesh of islands, with its two programs."""

    def __init__(self, layout, outer, tx, loss=LOSS):
        preset, wanted, *more = layout
        asked = StrategyConfig(preset, **(more[0] if more else {}))
        mesh, split = resolve(asked, wanted, jax.devices())
        stages = mesh.pipeline > 1
        self.mesh, self.tx, self.outer = make_mesh(mesh), tx, outer
        self.islands = mesh.island
        self.model = build_model(on_stages(TINY) if stages else TINY, self.mesh, split)
        self.outer_update = outer_of(self.model, outer, self.model.shapes)
        self.jitted, self.abstract, self.init = assemble(
            self.model, loss, tx, 2 if stages else 1, outer=self.outer_update
        )

    @functools.cached_property
    def step(self):
        batch = self.place(random_batch(0))
        return IslandProgram(self.jitted.lower(self.abstract, batch).compile(), self.mesh)

    @functools.cached_property
    def programs(self):
        return OuterPrograms(self.outer_update, self.abstract)

    def update(self, state):
        return self.programs.update(state, 0)

    def first(self):
        params = on_one_device()[1]
        return self.init({p: jax.device_put(x, self.model.shardings[p]) for p, x in params.items()})

    def place(self, batch):
        return to_global(self.mesh, batch, ROWS)

    def rounds(self, count):
        """State and reports after so many rounds, and each step's loss."""
        state, losses, reports = self.first(), [], []
        due = schedule(self.outer, count)
        for step in range(1, due.last + 1):
            state, metrics = self.step(state, self.place(random_batch(step - 1)))
            losses.append(float(metrics["loss"]))
            for fragment in due.receives(step):
                state = self.programs.receive(state, fragment, self.outer.mixing)
            for fragment in due.sends(step):
                state, report = self.programs.update(state, fragment)
                reports.append(jax.device_get(report))
                if self.outer.overlap_steps and step == due.last:
                    state = self.programs.receive(state, fragment, 0.0)
        return state, losses, reports


def schedule(outer, rounds):
    return OuterSchedule(outer.steps, outer.fragments, outer.overlap_steps, rounds * outer.steps)


@functools.cache
def made(name):
    return Made(MESHES[name], DILOCO, adam())


def nesterov(config):
    """DiLoCo's outer optimizer, as its paper writes it, in float64."""
    velocity = {}

    def updated(path, shared, change):
        velocity[path] = config.momentum * velocity.get(path, 0.0) - change
        return shared - config.learning_rate * (config.momentum * velocity[path] - change)

    return updated


def oracle(islands, rounds, outer, fragments):
    """Shared parameters and losses of islands that are stepped one after the other."""
    model, params = on_one_device()
    step, _, init = assemble(model, NextToken(), adam())
    states = [init(jax.tree.map(jnp.array, params)) for _ in range(islands)]
    shared = {p: np.asarray(x, np.float64) for p, x in params.items()}
    updated, due, size, losses = nesterov(outer), schedule(outer, rounds), ROWS // islands, []
    for number in range(1, due.last + 1):
        batch, each = random_batch(number - 1), []
        for at, state in enumerate(states):
            own = slice(at * size, (at + 1) * size)
            rows = jax.tree.map(operator.itemgetter(own), batch)
            states[at], metrics = step(state, to_global(model.mesh, rows, size))
            each.append(float(metrics["loss"]))
        losses.append(np.mean(each))
        own = [
            {p: np.asarray(x, np.float64) for p, x in jax.device_get(state.params).items()}
            for state in states
        ]
        for path in (p for i in due.receives(number) for p in fragments[i]):
            for x in own:
                x[path] = outer.mixing * x[path] + (1 - outer.mixing) * shared[path]
        for path in (p for i in due.sends(number) for p in fragments[i]):
            change = np.mean([x[path] - shared[path] for x in own], axis=0)
            shared[path] = updated(path, shared[path], change)
            for x in () if outer.overlap_steps else own:
                x[path] = shared[path]
        for at, x in enumerate(own):
            params = {p: jnp.asarray(y, jnp.float32) for p, y in x.items()}
            states[at] = states[at]._replace(params=params)
    return shared, losses


def check_against_numpy(built, rounds):
    state, losses, reports = built.rounds(rounds)
    expected, theirs = oracle(built.islands, rounds, built.outer, built.outer_update.fragments)
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    for path, x in jax.device_get(state.params).items():
        close_in_norm(x, expected[path], 1e-5, path, least=0.1)
        np.testing.assert_array_equal(state.islands.params[path], [x] * built.islands, path)
    assert all(report.applied and (report.why == USED).all() for report in reports)
    return len(reports)


MARKS = {"data": [], "zero1": pytest.mark.exhaustive, "context": pytest.mark.exhaustive}
LAID_OUT = [pytest.param(name, marks=MARKS.get(name, pytest.mark.long)) for name in MESHES]


@pytest.mark.parametrize("name", LAID_OUT)
def test_islands_are_diloco(name):
    assert check_against_numpy(made(name), 3) == 3


STREAMING = {
    "in turn": dataclasses.replace(DILOCO, fragments=3),
    "in turn, some steps later": dataclasses.replace(
        DILOCO, steps=4, fragments=2, overlap_steps=2, mixing=0.25
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", STREAMING)
def test_fragments_are_streaming_diloco(name):
    outer = STREAMING[name]
    built = Made(MESHES["data"], outer, adam())
    # The last step ends the run, and sends all fragments.
    assert check_against_numpy(built, 2) == outer.fragments * 2 + (outer.fragments - 1)
    sent = [wire_bytes(built.programs, built.mesh, i) for i in range(outer.fragments)]
    whole = wire_bytes(made("data").programs, built.mesh)
    # Whether an island is finite is sent with each.
    assert whole <= sum(sent) < whole + 64 * outer.fragments
    assert max(sent) < 1.25 * whole / outer.fragments


@given(st.integers(1, 9), st.data())
def test_each_fragment_is_sent_in_turn_and_mixed_in_once(steps, data):
    fragments = data.draw(st.integers(1, steps))
    late, last = data.draw(st.integers(0, steps - 1)), data.draw(st.integers(1, 40))
    due = OuterSchedule(steps, fragments, late, last)
    for i in range(fragments):
        sent = [step for step in range(1, last + 1) if i in due.sends(step)]
        received = [step for step in range(1, last + 1) if i in due.receives(step)]
        assert sent[-1] == last and all(b - a == steps for a, b in pairwise(sent[:-1]))
        assert sent[0] <= steps
        assert received == ([min(step + late, last) for step in sent[:-1]] if late else [])
    each = [len(due.sends(step)) for step in range(1, last)]
    assert max(each, default=0) <= 1


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_step_sends_nothing_from_island_to_island(name):
    built = made(name)
    shape = dict(built.mesh.shape)
    inside = collectives.read(built.step.step.as_text(), shape)
    assert inside and all(ISLAND not in c.axes for c in inside)
    assert not crossing(built.step.step.as_text(), built.mesh.size // built.islands)


def crossing(text, size):
    """Pairs of devices, of two islands, between which a collective-permute of a program sends."""
    pairs = re.findall(r"source_target_pairs=\{(\{.*?\})\}", text)
    sent = {tuple(map(int, x)) for found in pairs for x in re.findall(r"\{(\d+),(\d+)\}", found)}
    return {(a, b) for a, b in sent if a // size != b // size}


def test_a_permute_between_islands_would_be_found():
    assert crossing("source_target_pairs={{0,1},{3,4}}, x={{2,6}}", 4) == {(3, 4)}


def test_dropout_keys_are_those_of_the_global_batch():
    mesh, batch, with_keys = make_mesh(MESHES["data"][1]), random_batch(0), seeded(0)

    def of(step, batch):
        return (with_keys(step, batch).dropout_keys,)

    islands = on_islands(of, mesh, (False, True), (True,))
    found = jax.jit(islands)(jnp.int32(3), to_global(mesh, batch, ROWS))
    np.testing.assert_array_equal(found, of(jnp.int32(3), batch))


def wire_bytes(program, mesh, *which):
    return collectives.total(collectives.read(program.as_text(*which), dict(mesh.shape)), ISLAND)


def test_an_outer_update_sends_each_change_once_and_a_quarter_in_8_bits():
    built = made("data")
    whole = wire_bytes(built.programs, built.mesh)
    numbers = sum(x.size for x in built.model.shapes.values())
    # An all-reduce between two; whether an island is finite is sent too.
    assert 4 * numbers <= whole < 4 * numbers + 64
    quantized = []
    for dtype, share in (("int8", 4), ("int4", 8)):  # XLA on CPU widens bfloat16
        sent = collectives.read(sending(dtype).programs.as_text(), dict(built.mesh.shape))
        values = sum(c.wire_bytes for c in sent if c.dtype == "s8" and ISLAND in c.axes)
        unquantized = whole - share * values  # arrays without blocks
        scales = collectives.total(sent, ISLAND) - values - unquantized
        assert values > 0 and 0 < scales <= share * values / 32
        quantized.append(share * values)
    assert quantized[0] == quantized[1]


@pytest.mark.long
def test_a_step_of_data_parallelism_sends_no_less_than_an_outer_update():
    """So that over H steps islands send H times fewer bytes."""
    built = made("data")
    plain, abstract, _ = assemble(built.model, NextToken(), adam())  # gradients over both axes
    step = plain.lower(abstract, built.place(random_batch(0))).compile()
    assert 0 < wire_bytes(built.programs, built.mesh) <= wire_bytes(step, built.mesh) + 64


@functools.cache
def sending(dtype):
    outer = OuterConfig(steps=1, delta_dtype=dtype, moments="reset")
    return Made(MESHES["data"], outer, adam())


def own_params(built, state, seed):
    """The state, each island's parameters moved by numbers of their own; and by which, [n, ...]."""
    rng, moved, sharding = np.random.default_rng(seed), {}, built.abstract.islands.params
    params = {}
    for path, x in jax.device_get(state.params).items():
        by = rng.normal(size=(built.islands, *x.shape)).astype(np.float32) * 1e-2
        own = x + by
        moved[path] = own.astype(np.float64) - x
        params[path] = jax.device_put(own, sharding[path].sharding)
    applied = jax.device_put(
        np.ones((built.islands, 1), np.int32), built.abstract.islands.applied.sharding
    )
    return state._replace(islands=state.islands._replace(params=params, applied=applied)), moved


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_what_was_sent_and_what_is_held_is_what_was_changed(dtype):
    built = sending(dtype)
    state, changed, largest = built.first(), {}, {}
    before = {p: np.asarray(x, np.float64) for p, x in jax.device_get(state.params).items()}
    for seed in range(4):
        state, moved = own_params(built, state, seed)
        for path, by in moved.items():
            changed[path] = changed.get(path, 0) + by.sum(axis=0)
        state, report = built.update(state)
        assert report.applied
    held = jax.device_get(state.comm)
    for path, x in jax.device_get(state.params).items():
        sent = (np.asarray(x, np.float64) - before[path]) * built.islands
        rest = np.asarray(held[path], np.float64).sum(axis=0)
        # Parameters of size 1 are rounded to 2**-24 four times, and counted for each island.
        bar = 8 * built.islands * 2.0**-24 * max(1.0, np.abs(x).max())
        np.testing.assert_allclose(sent + rest, changed[path], rtol=0, atol=bar, err_msg=path)
        largest[path] = np.abs(rest).max()
    assert max(largest.values()) > 100 * 8 * built.islands * 2.0**-24  # something was held


class PerRow(NextToken):
    """Divided by rows, of which each island has as many."""

    def weights(self, batch):
        return {"loss": jnp.float32(len(batch.tokens))}


def test_data_parallelism_is_an_outer_update_after_each_step():
    """With plain gradient descent the mean of the islands' updates is the update by the mean."""
    tx = optax.sgd(0.1)
    built = Made(MESHES["data"], OuterConfig(steps=1), tx, PerRow())
    state, losses, _ = built.rounds(3)
    step, _, init = assemble(built.model, PerRow(), tx)
    params = on_one_device()[1]
    plain = init({p: jax.device_put(x, built.model.shardings[p]) for p, x in params.items()})
    for seed in range(3):
        plain, metrics = step(plain, built.place(random_batch(seed)))
        close(losses[seed], float(metrics["loss"]), 1e-6, seed)
    assert any(np.any(np.asarray(plain.params[p]) != x) for p, x in params.items())
    for path, x in jax.device_get(state.params).items():
        close_in_norm(x, np.asarray(plain.params[path]), 1e-6, path, least=0.1)


def poisoned(built, state, islands):
    """The state with a NaN in one parameter of these islands."""
    path, params = "decoder/norm/scale", state.islands.params
    x = np.array(params[path])
    x[list(islands)] = np.nan
    x = jax.device_put(x, built.abstract.islands.params[path].sharding)
    return state._replace(islands=state.islands._replace(params={**params, path: x}))


def shared_of(state):
    return {p: np.asarray(x, np.float64) for p, x in jax.device_get(state.params).items()}


def test_an_island_that_is_not_finite_is_left_out_and_rejoins():
    built = made("data")
    state, _, _ = built.rounds(1)
    state = poisoned(built, state, [1])
    before, guard = shared_of(state), int(state.guard.skipped)
    velocity = {
        p: np.asarray(x, np.float64) for p, x in optax.tree.get(state.opt_state[0], "trace").items()
    }
    for seed in range(3, 6):
        state, metrics = built.step(state, built.place(random_batch(seed)))
        assert np.isfinite(metrics["loss"]) and metrics["bad_in_a_row"] == 0
        assert metrics["islands_skipped"] == 1
    own = {p: np.asarray(x[0], np.float64) for p, x in state.islands.params.items()}
    moments = jax.device_get(optax.tree.get(state.islands.opt_state, "mu"))
    state, report = built.update(state)
    assert list(report.why) == [USED, NOT_FINITE] and report.applied
    after = shared_of(state)
    for path, x in after.items():
        grad = before[path] - own[path]
        speed = grad + 0.9 * velocity[path]
        expected = before[path] - 0.7 * (grad + 0.9 * speed)
        close_in_norm(x, expected, 1e-6, path, least=0.1)
        for island in range(2):
            np.testing.assert_array_equal(state.islands.params[path][island], after[path])
        kept, fresh = np.asarray(optax.tree.get(state.islands.opt_state, "mu")[path])
        np.testing.assert_array_equal(kept, moments[path][0])
        assert not fresh.any()
    assert int(state.guard.skipped) == guard
    state, metrics = built.step(state, built.place(random_batch(6)))
    assert metrics["islands_skipped"] == 0
    state, report = built.update(state)
    assert list(report.why) == [USED, USED]


def test_without_a_finite_island_nothing_changes():
    built = made("data")
    state = poisoned(built, built.rounds(1)[0], [0, 1])
    state, metrics = built.step(state, built.place(random_batch(3)))
    assert metrics["bad_in_a_row"] == 1 and not np.isfinite(metrics["loss"])
    before = jax.device_get((state.params, state.opt_state, state.comm))
    state, report = built.update(state)
    assert list(report.why) == [NOT_FINITE] * 2 and not report.applied
    after = jax.device_get((state.params, state.opt_state, state.comm))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert int(state.guard.skipped) == int(state.guard.in_a_row) == 1
    state, metrics = built.step(state, built.place(random_batch(4)))
    assert metrics["bad_in_a_row"] == 0 and np.isfinite(metrics["loss"])


def test_an_island_that_skipped_all_its_updates_is_left_out():
    built = made("data")
    state, batch = built.first(), random_batch(0)
    weight = batch.loss_weight.copy()
    weight[ROWS // 2 :] = np.inf  # of island 1
    state, metrics = built.step(state, built.place(batch._replace(loss_weight=weight)))
    assert metrics["islands_skipped"] == 1 and metrics["skipped"] == 0
    state, report = built.update(state)
    assert list(report.why) == [USED, NOT_TRAINED] and report.applied


def test_moments_may_start_anew():
    built = sending("int8")
    state, _ = own_params(built, built.first(), 0)
    ones = jax.tree.map(jnp.ones_like, state.islands.opt_state)
    state = state._replace(islands=state.islands._replace(opt_state=ones))
    state, report = built.update(state)
    assert (report.why == USED).all()
    assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get(state.islands.opt_state)))
