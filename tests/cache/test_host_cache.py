"""The host cache of a trained encoder: as good as pages, one step later."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from builders import ROWS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_encode import PER_ROW, Made, image, onto, showing, tower_bits

from jaxvlm.cache.cached_step import TOKENS
from jaxvlm.cache.host_cache import HostCache
from jaxvlm.data.page_allocation import PageAllocation
from jaxvlm.models.vlm import encoder_tokens
from jaxvlm.types import PAGE

BOUND = 2
PLACES = np.asarray([0, 1, -1, PER_ROW, PER_ROW + 1])
"""Of each image: a page of its row on the devices, none, or one in host memory."""
ALLOCATION = PageAllocation.__new__(PageAllocation)
ALLOCATION.count, ALLOCATION.beyond, ALLOCATION._turns = ROWS * PER_ROW, PER_ROW, 1
ALLOCATION._outside, ALLOCATION._size = [{3: 0, 4: 1}] * ROWS, lambda image: (1, PAGE)


def shown(made, seed, which):
    """A batch as the loader gives it."""
    batch, page = showing(seed, which, np.where(PLACES[which] < PER_ROW, PLACES[which], -1)), None
    page = ALLOCATION.count + np.arange(ROWS)[:, None] * PER_ROW + PLACES[which] - PER_ROW
    pages = np.where(PLACES[which] >= PER_ROW, page, batch.image_pages[..., 0])
    config = made.model.config
    tokens = np.zeros((ROWS, 2, encoder_tokens(config), config.vision.width), np.float32)
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
        """(images encoded, sum of the others' lags)."""
        encoded, lags, written, made = 0, 0, {}, {}
        for row, place in np.argwhere(start >= 0).tolist():
            image = int(which[row, place])
            outside = PLACES[image] >= PER_ROW
            kept = (self.visible if outside else self.pages).get((row, image))
            if kept is not None and self.version - kept <= BOUND:
                lags += self.version - kept
                continue
            encoded += 1
            if PLACES[image] >= 0:
                (made if outside else written)[row, image] = self.version
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


@pytest.mark.long
@settings(max_examples=8, deadline=None, derandomize=True)
@given(moves=st.lists(MOVES, min_size=6, max_size=16))
def test_no_token_from_host_memory_is_older_than_its_bound(lazy, moves, tmp_path_factory):
    folder, made, model = tmp_path_factory.mktemp("host_cache"), lazy[0], Model()
    host = HostCache(ALLOCATION, np.arange(ROWS), pytest.fail)
    state, params, saved, steps = made.init(made.model.init(0)), {}, None, 0
    for kind, seed in moves:
        if kind == "move":
            made = lazy[1] if made is lazy[0] else lazy[0]
            state = onto(made, state)
        elif kind == "save":
            host.save(folder, steps)
            host.close()
            saved = jax.tree.map(np.asarray, state), model.copy(), steps, host.checkpoint_record
        elif kind == "restore":
            if saved:
                state, model = onto(made, saved[0]), saved[1].copy()
                host = HostCache(ALLOCATION, np.arange(ROWS), pytest.fail)
                host.load(folder, saved[2], saved[3])
        else:
            which = np.random.default_rng(seed).integers(0, len(PLACES), (ROWS, 2))
            loaded = shown(made, seed, which)
            if kind == "bad":
                loaded = loaded._replace(loss_weight=loaded.loss_weight * np.nan)
            filled = host.fill(loaded)
            assert filled.image_pages.max() < ALLOCATION.count
            params[model.version] = tower_bits(state)
            state, metrics = made.step(state, made.place(filled))
            host.write(loaded, metrics.pop(TOKENS))
            encoded, lags = model.step(which, loaded.image_start, kind == "step")
            steps += 1
            assert int(metrics["cache/encoded"]) == encoded
            found = max(1, int((loaded.image_start >= 0).sum()) - encoded)
            assert float(metrics["cache/staleness"]) == pytest.approx(lags / found)
    check_rows(made, host, model, params)


def check_rows(made, host, model, params):
    """Cached tokens are what the encoder computed when they were cached."""
    kept = {
        (at[0], int(np.frombuffer(row.key, np.uint32)[1])): row
        for at, row in host._tokens.current.items()
    }
    assert {at: row.age.version for at, row in kept.items()} == model.visible
    for (row, which), found in kept.items():
        pixels = np.broadcast_to(image(row, which), (ROWS, 1, 16, 16, 3))
        expected = np.asarray(made.encode(params[found.age.version], pixels))[0, 0]
        np.testing.assert_allclose(found.tokens, expected, rtol=2e-5, atol=2e-5)
