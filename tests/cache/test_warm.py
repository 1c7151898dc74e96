"""Tokens of a tower that learns, in host memory: as good as those in pages, and a step later."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from builders import ROWS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recompute import PER_ROW, Made, onto, picture, showing, tower_bits

from jaxvlm.build.cached import TOKENS
from jaxvlm.build.parts import tower_part
from jaxvlm.build.warm import Warm
from jaxvlm.data.slots import Slots
from jaxvlm.models.vlm import tower_tokens
from jaxvlm.types import PAGE, Batch

BOUND = 2
PLACES = np.asarray([0, 1, -1, PER_ROW, PER_ROW + 1])
"""Of each picture: a page of its row on the devices, none, or one in host memory."""
SLOTS = Slots.__new__(Slots)
SLOTS.count, SLOTS.beyond, SLOTS._turns = ROWS * PER_ROW, PER_ROW, 1
SLOTS._outside, SLOTS._size = [{3: 0, 4: 1}] * ROWS, lambda picture: (1, PAGE)


def shown(made, seed, which):
    """A batch as the loader gives it."""
    batch, page = showing(seed, which, np.where(PLACES[which] < PER_ROW, PLACES[which], -1)), None
    page = SLOTS.count + np.arange(ROWS)[:, None] * PER_ROW + PLACES[which] - PER_ROW
    pages = np.where(PLACES[which] >= PER_ROW, page, batch.image_pages[..., 0])
    config = made.model.config
    tokens = np.zeros((ROWS, 2, tower_tokens(config), config.vision.width), np.float32)
    return batch._replace(
        image_pages=pages[..., None].astype(np.int32),
        stored=tokens,
        is_stored=np.zeros((ROWS, 2), bool),
    )


class Model:
    """What such a cache should do: pages at once, what is in host memory a step later."""

    def __init__(self):
        self.pages, self.visible, self.last, self.version = {}, {}, {}, 0

    def copy(self):
        other = Model()
        vars(other).update({k: dict(v) if k != "version" else v for k, v in vars(self).items()})
        return other

    def step(self, which, start, ok):
        """(pictures encoded, sum of the others' lags)."""
        encoded, lags, written, made = 0, 0, {}, {}
        for row, place in np.argwhere(start >= 0).tolist():
            picture = int(which[row, place])
            outside = PLACES[picture] >= PER_ROW
            kept = (self.visible if outside else self.pages).get((row, picture))
            if kept is not None and self.version - kept <= BOUND:
                lags += self.version - kept
                continue
            encoded += 1
            if PLACES[picture] >= 0:
                (made if outside else written)[row, picture] = self.version
        self.visible |= self.last
        self.last = made if ok else {}
        if ok:
            self.pages |= written
            self.version += 1
        return encoded, lags


@pytest.fixture(scope="module")
def lazy():
    names = "data8", "data2_fsdp2_tensor2"
    return [Made(name, "lazy", (), "fine", bound=BOUND, memory_mb=1) for name in names]


MOVES = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 10_000)),
    st.tuples(st.just("step"), st.integers(0, 10_000)),
    st.tuples(st.just("bad"), st.integers(0, 10_000)),
    st.tuples(st.sampled_from(["save", "restore", "move"]), st.just(0)),
)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(moves=st.lists(MOVES, min_size=6, max_size=16))
def test_no_token_from_host_memory_is_older_than_its_bound(lazy, moves, tmp_path_factory):
    folder, made, model = tmp_path_factory.mktemp("warm"), lazy[0], Model()
    warm = Warm(SLOTS, np.arange(ROWS), pytest.fail)
    state, params, saved, steps = made.init(made.model.init(0)), {}, None, 0
    for kind, seed in moves:
        if kind == "move":
            made = lazy[1] if made is lazy[0] else lazy[0]
            state = onto(made, state)
        elif kind == "save":
            warm.save(folder, steps)
            warm.close()
            saved = jax.tree.map(np.asarray, state), model.copy(), steps, warm.told
        elif kind == "restore":
            if saved:
                state, model = onto(made, saved[0]), saved[1].copy()
                warm = Warm(SLOTS, np.arange(ROWS), pytest.fail)
                warm.load(folder, saved[2], saved[3])
        else:
            which = np.random.default_rng(seed).integers(0, len(PLACES), (ROWS, 2))
            loaded = shown(made, seed, which)
            if kind == "bad":
                loaded = loaded._replace(loss_weight=loaded.loss_weight * np.nan)
            filled = warm.fill(loaded)
            assert filled.image_pages.max() < SLOTS.count
            params[model.version] = tower_bits(state)
            state, metrics = made.step(state, made.place(filled))
            warm.take(loaded, metrics.pop(TOKENS))
            encoded, lags = model.step(which, loaded.image_start, kind == "step")
            steps += 1
            assert int(metrics["cache/encoded"]) == encoded
            found = max(1, int((loaded.image_start >= 0).sum()) - encoded)
            assert float(metrics["cache/lag"]) == pytest.approx(lags / found)
    check_rows(made, warm, model, params)


def check_rows(made, warm, model, params):
    """What is kept is what the tower made when it was kept."""
    tower = tower_part(made.model, made.mesh, made.model.strategies["vision"])
    run = jax.jit(lambda p, x: tower.module(p)(Batch(None, None, None, None, pixels=x)))
    kept = {
        (at[0], int(np.frombuffer(row.key, np.uint32)[1])): row
        for at, row in warm._known.seen.items()
    }
    assert {at: row.age.version for at, row in kept.items()} == model.visible
    for (row, which), found in kept.items():
        pixels = np.broadcast_to(picture(row, which), (ROWS, 1, 16, 16, 3))
        expected = np.asarray(run(params[found.age.version], pixels))[0, 0]
        np.testing.assert_allclose(found.tokens, expected, rtol=2e-5, atol=2e-5)
