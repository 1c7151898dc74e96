"""When cached tokens are recomputed: by draw, by drift, early; never after max_staleness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import ROWS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encode import IMAGES, PER_ROW, Made, image, showing

from jaxvlm.cache.policy import NEVER, Policy, draw, draw_step
from jaxvlm.spmd.submodels import vision_encoder_part
from jaxvlm.types import Batch

DRAWS = 2000


@pytest.mark.parametrize("need", [None, "zeros", "skewed"])
def test_draws(need):
    """Exactly k, each as often as its probability says, none almost never."""
    rng = np.random.default_rng(0)
    allowed = jnp.asarray(rng.random(40) < 0.8)
    given = {None: None, "zeros": jnp.zeros(40)}.get(
        need, jnp.asarray(rng.exponential(size=40) ** 3, jnp.float32)
    )
    drawn, chance = jax.vmap(lambda turn: draw(allowed, given, 0.2, turn))(jnp.arange(20_000))
    k = 0.2 * int(allowed.sum())
    chance = np.asarray(chance[0])
    counts, often = np.unique(np.asarray(drawn).sum(1), return_counts=True)
    assert often[counts == round(k)] > 0.999 * len(drawn)  # 6: but for rounding
    assert not np.asarray(drawn)[:, ~np.asarray(allowed)].any()
    assert chance.sum() == pytest.approx(k, rel=1e-5)
    least = 1.0 if need is None else 0.5
    assert chance[np.asarray(allowed)].min() >= 0.999 * least * k / int(allowed.sum())
    error = np.sqrt(chance * (1 - chance) / len(drawn)) + 1e-9
    assert np.all(np.abs(np.asarray(drawn).mean(0) - chance) <= 4.5 * error)
    if need == "skewed":
        order = np.argsort(np.where(np.asarray(allowed), np.asarray(given), -1))
        assert np.all(np.diff(chance[order]) >= -1e-6) and chance.max() > 2 * chance[allowed].min()


@pytest.mark.parametrize("count, share", [(8, 0.05), (16, 0.02), (8192, 1 / 8192), (2, 0.25)])
def test_small_shares(count, share):
    """Less than one a step is one in some steps; and none, the last neither, is never drawn."""
    turns = 20_000 if count < 100 else 2000
    drawn, chance = jax.lax.map(
        lambda turn: draw(jnp.ones(count, bool), None, share, turn, 3), jnp.arange(turns)
    )
    mean = np.asarray(drawn).sum(1).mean()
    assert mean == pytest.approx(count * share, abs=5 * np.sqrt(count * share / turns))
    np.testing.assert_allclose(chance[0], share, rtol=1e-5)
    if count < 100:
        each = np.asarray(drawn).mean(0)
        np.testing.assert_allclose(each, share, atol=5 * np.sqrt(share / turns))


def test_seeds_draw_otherwise():
    allowed = jnp.ones(32, bool)
    seen = {np.asarray(draw(allowed, None, 0.25, 5, seed)[0]).tobytes() for seed in range(8)}
    assert len(seen) > 2
    turns = jnp.arange(40)
    run = jax.vmap(lambda turn, seed: draw_step(allowed, 0.1, turn, seed)[0][0], (0, None))
    assert len({np.asarray(run(turns, seed)).tobytes() for seed in range(8)}) > 2


def test_nothing_to_draw_from():
    drawn, chance = draw(jnp.zeros(5, bool), jnp.ones(5), 0.5, 0)
    assert not drawn.any() and not chance.any()


def test_due():
    """Intervals are powers of two below threshold / drift, from 1 up to max_staleness."""
    drift = jnp.asarray([0.0, 1e-3, 0.012, 0.03, 0.9, jnp.inf])
    due = Policy(max_staleness=100, drift_threshold=0.05).next_refresh(jnp.int32(7), drift)
    assert due.tolist() == [7 + 64, 7 + 32, 7 + 4, 7 + 1, 7 + 1, 7 + 1]
    assert Policy(max_staleness=100).next_refresh(jnp.int32(7), drift).tolist() == [NEVER] * 6


def one_a_row(seed, which=0):
    batch = showing(seed, np.full((ROWS, 2), which), np.zeros((ROWS, 2), int))
    start = np.tile(np.int32([1, -1]), (ROWS, 1))
    return batch._replace(image_start=start)


@pytest.mark.long
def test_gradients_by_draw_are_right_in_the_mean():
    """Of 2,000 draws, against the gradient with every image encoded; one image a row."""
    # A clipped gradient's mean is not the mean's.
    made = Made("one", "lazy", (), bound=NEVER, refresh_fraction=0.375, encode_batch=4, clip=0.0)
    full = Made("one", "off", (), encode_batch=4, clip=0.0)
    first, second = (made.place(one_a_row(seed)) for seed in (0, 1))
    state, _ = made.step(made.init(made.model.init(0)), first)
    at = jax.tree.map(np.asarray, state)

    def gradient(of, state, batch):  # moments at zero: a tenth of it is mu
        state = state._replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))
        new, metrics = of.step(state, batch)
        moved = optax.tree.get(new.opt_state, "mu")
        return {p: x for p, x in moved.items() if p.startswith("vision/")}, metrics

    def drawn(turn):
        there = state._replace(cache=state.cache._replace(step=turn))
        return gradient(made, there, second)

    state = jax.tree.map(jnp.asarray, at)
    many, metrics = jax.jit(lambda turns: jax.lax.map(drawn, turns))(jnp.arange(DRAWS))
    assert set(np.asarray(metrics["cache/encoded"]).tolist()) == {round(0.375 * ROWS)}
    fresh = full.init(full.model.init(0))._replace(params=jax.tree.map(jnp.asarray, at.params))
    expected, _ = gradient(full, fresh, second)
    rng = np.random.default_rng(0)
    for path, values in many.items():
        values = np.asarray(values).reshape(DRAWS, -1)
        for direction in rng.normal(size=(3, values.shape[1])):
            seen, true = values @ direction, np.asarray(expected[path]).ravel() @ direction
            error = seen.std(ddof=1) / np.sqrt(DRAWS)
            assert abs(seen.mean() - true) <= 3 * error + 1e-9, path
            # What a draw without weights would give, k / n of it, is far away.
            assert error < 0.2 * np.abs(seen).mean()


def test_need_is_drawn_more_often():
    """A row that teaches nothing has no gradient at its tokens, and waits."""
    more = {"refresh_fraction": 0.25, "drift_threshold": 1e9}
    made = Made("one", "adaptive", (), bound=NEVER, encode_batch=4, **more)
    batch = one_a_row(0)
    weight = batch.loss_weight.copy()
    weight[: ROWS // 2] = 0
    batch = made.place(batch._replace(loss_weight=weight))
    state, _ = made.step(made.init(made.model.init(0)), batch)
    for _ in range(3):
        state, _ = made.step(state, batch)
    pull = np.asarray(state.cache.grad_norm).reshape(ROWS, PER_ROW)[:, 0]
    assert np.all(pull[: ROWS // 2] == 0) and np.all(pull[ROWS // 2 :] > 0)
    begin, made_at = int(state.cache.version), []
    for _ in range(40):
        state, _ = made.step(state, batch)
        made_at.append(np.asarray(state.cache.page_version).reshape(ROWS, PER_ROW)[:, 0].copy())
    often = [len(set(x[x >= begin])) for x in np.stack(made_at, 1)]
    assert sum(often[ROWS // 2 :]) > 1.8 * sum(often[: ROWS // 2])


@pytest.mark.long
def test_hybrid_fills_the_last_encode_batch():
    for policy, encoded in (("lazy", 1), ("hybrid", 4)):
        more = {"prefetch_staleness": 1} if policy == "hybrid" else {}
        made = Made("one", policy, (), bound=6, encode_batch=4, **more)
        state, _ = made.step(made.init(made.model.init(0)), made.place(one_a_row(0)))
        for _ in range(2):
            state, metrics = made.step(state, made.place(one_a_row(0)))
        assert int(metrics["cache/encoded"]) == 0  # no encode batch runs, so none is filled
        batch = one_a_row(0)
        batch.image_key[0] += 5  # one image is another
        state, metrics = made.step(state, made.place(batch))
        assert int(metrics["cache/encoded"]) == encoded
        assert int(metrics["cache/staleness_max"]) == 3


def test_tokens_are_due_by_their_drift():
    tolerance = 0.3
    made = Made("one", "adaptive", (), bound=1000, drift_threshold=tolerance, encode_batch=4)
    tower = vision_encoder_part(made.model, made.mesh, made.model.strategies["vision"])
    run = jax.jit(lambda p, x: tower.module(p)(Batch(None, None, None, None, pixels=x)))
    pixels = np.stack([image(r, 0) for r in range(ROWS)])[:, None]
    batch, state = made.place(one_a_row(0)), made.init(made.model.init(0))
    tokens, encoded = [], []
    for _ in range(3):
        own = {p: np.asarray(x) for p, x in state.params.items() if p.startswith("vision/")}
        tokens.append(np.asarray(run(own, pixels), np.float64).reshape(ROWS, -1))
        state, metrics = made.step(state, batch)
        encoded.append(int(metrics["cache/encoded"]))
    # Never measured: due at once. Measured: as long as it takes to move so far.
    assert encoded[:2] == [ROWS, ROWS]
    apart = np.linalg.norm(tokens[1] - tokens[0], axis=1) / np.linalg.norm(tokens[0], axis=1)
    due = np.asarray(state.cache.refresh_at).reshape(ROWS, PER_ROW)[:, 0]
    made_at = np.asarray(state.cache.page_version).reshape(ROWS, PER_ROW)[:, 0]
    interval = 2 ** np.floor(np.log2(np.clip(tolerance / apart, 1, None)))
    still = made_at == 1
    assert encoded[2] == ROWS - still.sum() == np.sum(interval <= 1)
    np.testing.assert_array_equal(due[still], 1 + interval[still])


@pytest.fixture(scope="module")
def policies():
    return [
        Made(
            "data8",
            "adaptive",
            (),
            bound=3,
            drift_threshold=0.2,
            refresh_fraction=0.25,
            encode_batch=2,
        ),
        Made("data2_fsdp2_tensor2", "hybrid", (), bound=3, prefetch_staleness=1, encode_batch=2),
    ]


@pytest.mark.long
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    which=st.integers(0, 1),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 10_000)), min_size=3, max_size=10),
)
def test_no_policy_reads_past_its_bound(policies, which, moves):
    made = policies[which]
    state = made.init(made.model.init(0))
    for good, seed in moves:
        rng = np.random.default_rng(seed)
        shape = (ROWS, 2)
        batch = showing(seed, rng.integers(0, IMAGES, shape), rng.integers(-1, PER_ROW, shape))
        if not good:
            batch = batch._replace(loss_weight=batch.loss_weight * np.nan)
        before = jax.tree.map(np.asarray, state.cache)
        state, metrics = made.step(state, made.place(batch))
        assert int(metrics["cache/staleness_max"]) <= 3
        assert int(state.cache.version) == int(before.version) + good
        if not good:
            for name in ("pages", "key", "page_version", "refresh_at"):
                np.testing.assert_array_equal(
                    getattr(before, name), np.asarray(getattr(state.cache, name)), name
                )


@pytest.mark.parametrize("share", [0.16, 0.25, 1.0])
def test_whole_steps_at_equal_distances(share):
    """A long run too; distances differ by one at most."""
    allowed = jnp.ones(3, bool).at[1].set(False)
    turns = jnp.concatenate([jnp.arange(5000), 1_000_000 + jnp.arange(5000)])
    drawn, chance = jax.vmap(lambda turn: draw_step(allowed, share, turn))(turns)
    drawn = np.asarray(drawn)
    assert np.array_equal(drawn[:, 0], drawn[:, 2]) and not drawn[:, 1].any()
    np.testing.assert_allclose(chance[0], [share, 0, share])
    for part in (drawn[:5000, 0], drawn[5000:, 0]):
        assert part.mean() == pytest.approx(share, abs=5e-4)
        assert np.ptp(np.diff(np.flatnonzero(part))) <= 1
