"""Islands against each island's steps on one device, combined by NumPy in float64 (DiLoCo)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import ROWS, TINY, random_batch
from numerics import close, close_in_norm

from jaxvlm.config import MeshConfig, OuterConfig, StrategyConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.parallel.mesh import ISLAND, make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.parallel.strategies import resolve
from jaxvlm.planner.compiled import collectives
from jaxvlm.spmd.islands import IslandProgram, outer_of, outer_program
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.islands import NOT_FINITE, NOT_TRAINED, USED

MESHES = {
    "data": ("ddp", MeshConfig(4, island=2)),
    "fsdp": ("fsdp", MeshConfig(1, island=4)),
    "tensor": ("ddp", MeshConfig(1, tensor=4, island=2)),
    "data x tensor": ("ddp", MeshConfig(2, tensor=2, island=2)),
    "fsdp x tensor": ("fsdp", MeshConfig(1, fsdp=2, tensor=2, island=2)),
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

    def __init__(self, preset, wanted, outer, tx, loss=LOSS, **strategy):
        mesh, split = resolve(StrategyConfig(preset, **strategy), wanted, jax.devices())
        self.mesh, self.tx, self.outer = make_mesh(mesh), tx, outer
        self.islands = mesh.island
        self.model = build_model(TINY, self.mesh, split)
        self.outer_update = outer_of(self.model, outer)
        self.jitted, self.abstract, self.init = assemble(
            self.model, loss, tx, outer=self.outer_update
        )

    @functools.cached_property
    def step(self):
        batch = self.place(random_batch(0))
        return IslandProgram(self.jitted.lower(self.abstract, batch).compile(), self.mesh)

    @functools.cached_property
    def update(self):
        return outer_program(self.outer_update, self.abstract)

    def first(self):
        params = on_one_device()[1]
        return self.init({p: jax.device_put(x, self.model.shardings[p]) for p, x in params.items()})

    def place(self, batch):
        return to_global(self.mesh, batch, ROWS)

    def rounds(self, count):
        """State and reports after so many rounds, and each step's loss."""
        state, losses, reports = self.first(), [], []
        for round_ in range(count):
            for i in range(self.outer.steps):
                batch = self.place(random_batch(round_ * self.outer.steps + i))
                state, metrics = self.step(state, batch)
                losses.append(float(metrics["loss"]))
            state, report = self.update(state)
            reports.append(jax.device_get(report))
        return state, losses, reports


@functools.cache
def made(name):
    return Made(*MESHES[name], DILOCO, adam())


def nesterov(config):
    """DiLoCo's outer optimizer, as its paper writes it, in float64."""
    velocity = {}

    def update(shared, mean_change):
        for path, change in mean_change.items():
            grad = -change
            velocity[path] = grad + config.momentum * velocity.get(path, 0.0)
            step = grad + config.momentum * velocity[path]
            shared[path] = shared[path] - config.learning_rate * step
        return shared

    return update


@functools.cache
def oracle(islands, rounds, outer, make_tx=adam):
    """Shared parameters and losses of islands that are stepped one after the other."""
    model, params = on_one_device()
    step, _, init = assemble(model, NextToken(), make_tx())
    states = [init(jax.tree.map(jnp.array, params)) for _ in range(islands)]
    shared = {p: np.asarray(x, np.float64) for p, x in params.items()}
    update, size, losses = nesterov(outer), ROWS // islands, []
    for round_ in range(rounds):
        for i in range(outer.steps):
            batch = random_batch(round_ * outer.steps + i)
            each = []
            for at, state in enumerate(states):
                rows = jax.tree.map(lambda x: x[at * size : (at + 1) * size], batch)  # noqa: B023
                states[at], metrics = step(state, to_global(model.mesh, rows, size))
                each.append(float(metrics["loss"]))
            losses.append(np.mean(each))
        own = [jax.device_get(state.params) for state in states]
        mean = {
            p: np.mean([np.asarray(x[p], np.float64) - shared[p] for x in own], axis=0)
            for p in shared
        }
        shared = update(shared, mean)
        again = {p: x.astype(np.float32) for p, x in shared.items()}
        states = [state._replace(params=jax.tree.map(jnp.array, again)) for state in states]
    return shared, losses


LAID_OUT = [pytest.param(name, marks=[] if name == "data" else pytest.mark.long) for name in MESHES]


@pytest.mark.parametrize("name", LAID_OUT)
def test_islands_are_diloco(name):
    built = made(name)
    state, losses, reports = built.rounds(3)
    expected, their_losses = oracle(built.mesh.shape[ISLAND], 3, DILOCO)
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    for path, x in jax.device_get(state.params).items():
        close_in_norm(x, expected[path], 1e-5, path, least=0.1)
    for report in reports:
        assert report.applied and (report.why == USED).all()


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_step_sends_nothing_from_island_to_island(name):
    built = made(name)
    shape = dict(built.mesh.shape)
    inside = collectives.read(built.step.step.as_text(), shape)
    assert inside and all(c.axes and ISLAND not in c.axes for c in inside)


def wire_bytes(program, mesh, axis=ISLAND):
    return collectives.total(collectives.read(program.as_text(), dict(mesh.shape)), axis)


def test_an_outer_update_sends_what_a_step_of_data_parallelism_sends():
    """So that over H steps islands send H times fewer bytes; and a quarter in 8 bits."""
    built = made("data")
    whole = wire_bytes(built.update, built.mesh)
    plain, abstract, _ = assemble(built.model, NextToken(), adam())  # gradients over both axes
    step = plain.lower(abstract, built.place(random_batch(0))).compile()
    assert 0 < whole <= wire_bytes(step, built.mesh)
    quantized = []
    for dtype, share in (("int8", 4), ("int4", 8)):  # XLA on CPU widens bfloat16
        sent = collectives.read(sending(dtype).update.as_text(), dict(built.mesh.shape))
        values = sum(c.wire_bytes for c in sent if c.dtype == "s8" and ISLAND in c.axes)
        unquantized = whole - share * values  # arrays without blocks
        scales = collectives.total(sent, ISLAND) - values - unquantized
        assert values > 0 and 0 < scales <= share * values / 32
        quantized.append(share * values)
    assert quantized[0] == quantized[1]


@functools.cache
def sending(dtype):
    outer = OuterConfig(steps=1, delta_dtype=dtype, moments="reset")
    return Made(*MESHES["data"], outer, adam())


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
        np.ones(built.islands, np.int32), built.abstract.islands.applied.sharding
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
    built = Made(*MESHES["data"], OuterConfig(steps=1), tx, PerRow())
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
        p: np.asarray(x, np.float64) for p, x in optax.tree.get(state.opt_state, "trace").items()
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
