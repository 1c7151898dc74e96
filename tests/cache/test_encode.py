"""The visual-token cache changes no bit where it must not, and never exceeds max_staleness."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from builders import (
    MESHES,
    PATCHES,
    ROWS,
    TINY,
    assert_gradients_close,
    devices_of,
    random_batch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import QWEN3, on_stages

from jaxvlm.cache.cached_step import TOKENS, make_cache
from jaxvlm.cache.metrics import LOST, lag_bins
from jaxvlm.cache.settings import token_layout
from jaxvlm.config import CacheConfig, ConfigError, MeshConfig, OptimConfig
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.vlm import encoder_tokens
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import batch_sharding, to_global
from jaxvlm.planner.compiled import collectives
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.submodels import feature_shape, vision_encoder_part
from jaxvlm.spmd.train_step import assemble, split
from jaxvlm.types import Batch

MESHES = {
    **MESHES,
    "data4_tensor2": MeshConfig(4, 1, 2),
    "data4_stage2": MeshConfig(data=4, pipeline=2),
}
DEEP = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, feature_layers=(-2, -1)),
    connector=dataclasses.replace(TINY.connector, deepstack_levels=1),
)
FROZEN_BLOCKS = dataclasses.replace(
    TINY, vision=dataclasses.replace(TINY.vision, depth=3, frozen_blocks=2, class_token=True)
)
FROZEN_DEEP = dataclasses.replace(  # a feature layer below the border
    DEEP, vision=dataclasses.replace(DEEP.vision, depth=3, frozen_blocks=2, feature_layers=(-3, -1))
)
FROZEN_QWEN = dataclasses.replace(  # below it and at it; blocks on both sides see windows
    QWEN3, vision=dataclasses.replace(QWEN3.vision, frozen_blocks=2, window=8, full_layers=(1,))
)
FINE = dataclasses.replace(  # 4 x 4 patches, of which four become a token
    TINY,
    vision=dataclasses.replace(TINY.vision, patch_size=4),
    connector=dataclasses.replace(TINY.connector, merge=2),
)
FINE_FROZEN = dataclasses.replace(
    FINE, vision=dataclasses.replace(FINE.vision, depth=3, frozen_blocks=2, class_token=True)
)
MODELS = {
    "llava": TINY,
    "fine": FINE,
    "fine_frozen": FINE_FROZEN,
    "deep": DEEP,
    "qwen": QWEN3,
    "staged": on_stages(TINY),
    "frozen": FROZEN_BLOCKS,
    "frozen_deep": FROZEN_DEEP,
    "frozen_qwen": FROZEN_QWEN,
}
WINDOWS = (4, 8, 16)
"""Patches of images of any size."""
FROZEN = ("vision/*",)
PER_ROW, IMAGES = 4, 3
"""Pages of a row, and images that it may show."""


class Made:
    """A compiled train step with a cache."""

    def __init__(
        self, mesh="one", policy="strict", frozen=FROZEN, model="llava", dtype="float32",
        bound=0, pages=ROWS * PER_ROW, parts=1, encode_batch=1, clip=1.0, **more,
    ):  # fmt: skip
        config = dataclasses.replace(MODELS[model], dtype=dtype)
        self.mesh = make_mesh(MESHES[mesh], devices_of(MESHES[mesh]))
        self.model = build_model(config, self.mesh)
        own, _ = split(self.model, self.model.shapes, frozen)
        cache = None
        if policy:
            asked = CacheConfig(policy, max_staleness=bound, encode_batch=encode_batch, **more)
            windows = WINDOWS if config.vision.packed else (encoder_tokens(config),)
            cache = make_cache(asked, self.model, own, pages, windows)
            self.kept = token_layout(asked, config)
        self.cache = cache
        tx = make_optimizer(OptimConfig(max_grad_norm=clip), lambda step: 1e-2, self.model.logical)
        self.step, self.abstract, self.init = assemble(
            self.model, NextToken(), tx, parts, frozen, cache
        )

    @functools.cached_property
    def encode(self):
        """The encoder alone, compiled: (parameters, pixels) -> tokens."""
        tower = vision_encoder_part(self.model, self.mesh, self.model.strategies["vision"])
        return jax.jit(lambda p, x: tower.module(p)(Batch(None, None, None, None, pixels=x)))

    def place(self, batch):
        return to_global(self.mesh, batch, ROWS)

    def run(self, batches):
        state, seen = self.init(self.model.init(0)), []
        for batch in batches:
            state, metrics = self.step(state, self.place(batch))
            seen.append({name: np.asarray(x) for name, x in metrics.items()})
        return state, seen


a_step = functools.cache(Made)
"""One that several tests take."""


@functools.cache
def image(row, which):
    return np.random.default_rng([row, which]).integers(0, 256, (16, 16, 3)).astype(np.uint8)


def showing(seed, which, page):
    """A batch whose rows show images.

    Args:
        seed: of its text.
        which: [ROWS, 2] numbers of each row's images.
        page: [ROWS, 2], of the row's pages; -1 is none.
    """
    batch = random_batch(seed)
    rows = np.arange(ROWS)[:, None]
    pixels = np.stack([[image(r, w) for w in row] for r, row in enumerate(which)])
    key = np.zeros((ROWS, 2, 4), np.uint32)
    key[..., 0], key[..., 1] = rows + 1, which
    pages = np.where(np.asarray(page) >= 0, rows * PER_ROW + page, -1).astype(np.int32)
    return batch._replace(pixels=pixels, image_key=key, image_pages=pages[..., None])


def turns(steps, pages=True, model="llava"):
    """Batches that show two sets of images in turn, each with pages of its own."""
    out = []
    for i in range(steps):
        page = np.broadcast_to([i % 2 * 2, i % 2 * 2 + 1], (ROWS, 2)) if pages else -1
        batch = showing(i % 3, np.full((ROWS, 2), i % 2), np.broadcast_to(page, (ROWS, 2)))
        out.append(of_any_size(batch) if MODELS[model].vision.packed else batch)
    return out


def of_any_size(batch):
    """The batch with images of three sizes, two in the rows that had one, in packed patches."""
    grid = np.zeros((ROWS, 2, 3), np.int32)
    patches = np.zeros((ROWS, 2 * WINDOWS[-1], 96), np.uint8)
    start = np.where((batch.image_start >= 0).any(1, keepdims=True), [1, 14], -1).astype(np.int32)
    for row in range(ROWS):
        at = 0
        for i in range(2):
            if start[row, i] >= 0:
                key = batch.image_key[row, i]
                shape = [(4, 4), (2, 4), (2, 2)][(row + i + key[1]) % 3]
                grid[row, i] = (1, *shape)
                seed = np.random.default_rng([*key, i])
                size = shape[0] * shape[1]
                patches[row, at : at + size] = seed.integers(0, 256, (size, 96))
                at += size
    key = batch.image_key + np.uint32([[[0, 0, 0, 0], [0, 0, 1, 0]]])
    positions = np.repeat(batch.positions, 3, axis=1)
    return batch._replace(
        pixels=None, patches=patches, grid=grid, image_start=start, image_key=key,
        positions=positions,
    )  # fmt: skip


def tagged(made, batch):
    """The batch as the loader of such a run gives it."""
    keys = [made.kept.cache_key(key) for key in batch.image_key.reshape(-1, 4)]
    return batch._replace(image_key=np.reshape(keys, batch.image_key.shape))


def assert_same_bits(a, b):
    for path, x in a.items():
        assert np.asarray(x).tobytes() == np.asarray(b[path]).tobytes(), path


@pytest.mark.parametrize(
    "mesh, dtype, model, frozen",
    [
        ("data4_tensor2", "float32", "deep", FROZEN),
        ("fsdp8", "float32", "llava", ()),
        pytest.param("data8", "bfloat16", "qwen", FROZEN, marks=pytest.mark.long),
        pytest.param("data8", "float32", "llava", FROZEN, marks=pytest.mark.long),
        pytest.param("fsdp8", "bfloat16", "deep", FROZEN, marks=pytest.mark.long),
        pytest.param("data4_tensor2", "bfloat16", "llava", FROZEN, marks=pytest.mark.long),
        pytest.param("data4_tensor2", "float32", "frozen", (), marks=pytest.mark.long),
        pytest.param("fsdp8", "bfloat16", "frozen_deep", (), marks=pytest.mark.long),
        pytest.param("data8", "float32", "frozen_qwen", (), marks=pytest.mark.long),
        pytest.param("data8", "float32", "frozen_deep", (), marks=pytest.mark.long),
        pytest.param("data4_tensor2", "float32", "qwen", FROZEN, marks=pytest.mark.long),
        pytest.param("fsdp8", "float32", "qwen", (), marks=pytest.mark.long),
        pytest.param("data8", "float32", "deep", (), marks=pytest.mark.long),
        pytest.param("data4_tensor2", "bfloat16", "deep", (), marks=pytest.mark.long),
    ],
)
def test_a_cache_that_may_not_be_seen_changes_no_bit(mesh, dtype, model, frozen):
    of = {"mesh": mesh, "dtype": dtype, "model": model, "frozen": frozen}
    off = Made(policy="off", **of).run(turns(5, False, model))
    on = Made(policy="strict", **of).run(turns(5, model=model))
    assert_same_bits(off[0].params, on[0].params)
    assert [x["loss"].tobytes() for x in off[1]] == [x["loss"].tobytes() for x in on[1]]
    found = [float(x["cache/hit_rate"]) for x in on[1]]
    # A trained encoder changes with each step, so all cached tokens are stale.
    still = frozen or model.startswith("frozen")
    assert found == ([0, 0, 1, 1, 1] if still else [0] * 5)
    assert [int(x["cache/encoded"]) for x in off[1]] == [12 if "qwen" in model else 6] * 5


@pytest.mark.parametrize(
    "mesh, model, order, frozen",
    [
        pytest.param("data4_tensor2", "fine", "morton", FROZEN, marks=pytest.mark.long),
        pytest.param("fsdp8", "fine", "tiled(2)", (), marks=pytest.mark.long),
        ("data8", "fine_frozen", "merge2x2", ()),
    ],
)
def test_the_order_in_which_tokens_are_kept_changes_no_bit(mesh, model, order, frozen):
    """Against a run without a cache; pages hold the tokens in that order, a class token first."""
    of = {"mesh": mesh, "model": model, "frozen": frozen}
    off = Made(policy="off", token_order=order, **of).run(turns(3, False, model))
    made = Made(policy="strict", token_order=order, **of)
    on = made.run(tagged(made, x) for x in turns(3, model=model))
    assert_same_bits(off[0].params, on[0].params)
    rows = Made(policy="strict", **of).run(turns(3, model=model))
    for a, b in zip(on[1], rows[1]):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
    if frozen or model == "fine_frozen":
        assert [float(x["cache/hit_rate"]) for x in on[1]] == [0, 0, 1]
        count = encoder_tokens(made.model.config)
        plain = np.asarray(rows[0].cache.pages)[:, :count]
        kept = np.asarray(on[0].cache.pages)[:, :count]
        np.testing.assert_allclose(kept, made.kept.to_cache(plain), rtol=1e-5, atol=1e-5)
        assert np.abs(kept - plain).max() > 0.1


def test_images_of_any_size_lie_as_they_are_read():
    assert token_layout(CacheConfig(token_order="merge2x2"), QWEN3) == token_layout(
        CacheConfig(), QWEN3
    )
    with pytest.raises(
        ConfigError, match=r"any size, which are stored as the model reads them \(merge2x2\)"
    ):
        token_layout(CacheConfig(token_order="row_major"), QWEN3)


def test_where_pages_lie_changes_no_bit():
    here = a_step("data8")
    rng = np.random.default_rng(0)
    other = np.stack([rng.permutation(PER_ROW) for _ in range(ROWS)])
    rows, batches = np.arange(ROWS)[:, None], turns(4)

    def put(batch, page):
        return batch._replace(image_pages=(page + PER_ROW * rows)[..., None].astype(np.int32))

    moved = [put(b, other[rows, b.image_pages[..., 0] % PER_ROW]) for b in batches]
    # And some thrown out in between, by images of other batches in their places.
    evicted = [put(b, np.zeros((ROWS, 2), int)) for b in batches]
    expected = here.run(batches)
    for others in (moved, evicted):
        got = here.run(others)
        assert_same_bits(expected[0].params, got[0].params)
    assert (
        float(got[1][-1]["cache/hit_rate"]) == 0 and float(expected[1][-1]["cache/hit_rate"]) == 1
    )


def test_pixels_are_not_missed_where_pages_are_good_and_an_error_where_not():
    made = a_step("one")
    sent = [x._replace(in_pages=np.zeros((ROWS, 2), bool)) for x in turns(4)]
    left = [x._replace(pixels=np.zeros_like(x.pixels), in_pages=x.image_start >= 0) for x in sent]
    expected, (*_, last) = made.run(sent)
    state, seen = made.run(sent[:2] + left[2:])
    assert_same_bits(expected.params, state.params)
    assert [float(x["cache/hit_rate"]) for x in seen] == [0, 0, 1, 1]
    assert seen[-1]["loss"].tobytes() == last["loss"].tobytes()
    assert not any(x[LOST] for x in seen)
    # Of what its pages do not hold nothing is made: the step is skipped, and writes none.
    state, _ = made.run(sent[:1])
    before = [np.asarray(x) for x in (*state.params.values(), state.cache.pages, state.cache.key)]
    state, metrics = made.step(state, made.place(left[1]))
    assert int(metrics[LOST]) == 6 and int(metrics["bad_in_a_row"]) == 1
    after = [np.asarray(x) for x in (*state.params.values(), state.cache.pages, state.cache.key)]
    assert [x.tobytes() for x in before] == [x.tobytes() for x in after]


@pytest.mark.parametrize(
    "mesh, parts, model",
    [
        ("one", 1, "llava"),
        pytest.param("data2_fsdp2_tensor2", 2, "llava", marks=pytest.mark.long),
        pytest.param("one", 1, "qwen", marks=pytest.mark.long),
        pytest.param("data4_stage2", 2, "staged", marks=pytest.mark.long),
    ],
)
def test_encode_batches_give_the_gradients_of_the_whole(mesh, parts, model):
    """Of a trained encoder, in microbatches too, against the model as it runs by itself."""
    plain = Made(policy="", frozen=(), model=model)
    batched = Made(mesh, "off", (), model, parts=parts, encode_batch=3 if mesh == "one" else 2)
    grads = []
    for made in (plain, batched):
        state, _ = made.run(turns(1, False, model))
        grads.append(optax.tree.get(state.opt_state, "mu"))  # of one step: a tenth of them
    assert any(path.startswith("vision/") for path in grads[0])
    assert_gradients_close(grads[1], grads[0])


class Model:
    """What a lazy cache should do, page by page."""

    def __init__(self, bound):
        self.bound, self.pages, self.version = bound, {}, 0

    def step(self, batch, ok):
        """(images encoded, those of them that were cached, the others' lags)."""
        encoded, old, lags, written = 0, 0, [], {}
        for row in range(ROWS):
            for place in range(2):
                if batch.image_start[row, place] < 0:
                    continue
                page, key = (
                    int(batch.image_pages[row, place, 0]),
                    tuple(batch.image_key[row, place].tolist()),
                )
                kept = self.pages.get(page)
                if kept and kept[0] == key and self.version - kept[1] <= self.bound:
                    lags.append(self.version - kept[1])
                    continue
                encoded += 1
                old += bool(kept and kept[0] == key)
                if page >= 0:
                    written.setdefault(page, (key, self.version))
        if ok:
            self.pages |= written
            self.version += 1
        return encoded, old, np.asarray(lags)


@pytest.fixture(scope="module")
def lazy():
    """Meshes, and orders in which tokens are cached."""
    ways = ("data8", ""), ("fsdp8", "morton"), ("data4_tensor2", "")
    return {way: Made(way[0], "lazy", (), "fine", bound=2, token_order=way[1]) for way in ways}


MOVES = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 10_000)),
    st.tuples(st.just("bad"), st.integers(0, 10_000)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("restore"), st.just(0)),
    st.tuples(st.just("move"), st.integers(1, 2)),
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(moves=st.lists(MOVES, min_size=4, max_size=14))
def test_no_token_is_older_than_its_bound(lazy, moves):
    names = list(lazy)
    made, model = lazy[names[0]], Model(2)
    state, params = made.init(made.model.init(0)), {}
    saved = None
    for kind, seed in moves:
        if kind == "move":
            names = names[seed:] + names[:seed]
            made = lazy[names[0]]
            state = onto(made, state)
        elif kind == "save":
            versions = dict(model.pages), model.version
            saved = jax.tree.map(np.asarray, state), versions
        elif kind == "restore":
            if saved:
                state, (pages, version) = onto(made, saved[0]), saved[1]
                model.pages, model.version = dict(pages), version
        else:
            rng = np.random.default_rng(seed)
            shape = (ROWS, 2)
            batch = showing(seed, rng.integers(0, IMAGES, shape), rng.integers(-1, PER_ROW, shape))
            if kind == "bad":
                batch = batch._replace(loss_weight=batch.loss_weight * np.nan)
            batch = tagged(made, batch)
            params[model.version] = tower_bits(state)
            state, metrics = made.step(state, made.place(batch))
            encoded, old, lags = model.step(batch, kind == "step")
            assert int(metrics["cache/encoded"]) == encoded
            assert int(metrics["cache/stale"]) == old
            found = max(1, len(lags))
            assert float(metrics["cache/staleness"]) == pytest.approx(lags.sum() / found)
            ends = [*lag_bins(2)[1:], 3]
            shown = max(1, int((batch.image_start >= 0).sum()))
            for start, end in zip(lag_bins(2), ends, strict=True):
                share = ((lags >= start) & (lags < end)).sum() / shown
                assert float(metrics[f"cache/staleness_from_{start}"]) == pytest.approx(share)
            assert int(state.cache.version) == model.version
    check_pages(made, state, model, params, [x.kept for x in lazy.values()])


def onto(made, state):
    def move(x, like):
        return jax.device_put(np.asarray(x), like.sharding)

    return jax.tree.map(move, state, made.abstract)


def tower_bits(state):
    return {p: np.asarray(x) for p, x in state.params.items() if p.startswith("vision/")}


def check_pages(made, state, model, params, ways):
    """Cached tokens are what the encoder computed then, in the order that their key says."""
    pages, keys = np.asarray(state.cache.pages), np.asarray(state.cache.key)
    count = encoder_tokens(made.model.config)
    for version in {v for _, v in model.pages.values()}:
        kept = [(page, key) for page, (key, v) in model.pages.items() if v == version]
        pixels = np.zeros((ROWS * PER_ROW, 1, 16, 16, 3), np.uint8)
        orders = []
        for i, (_, key) in enumerate(kept):
            # A tag undoes itself; keys of images end in zeros.
            found = [(way, way.cache_key(np.uint32(key))) for way in ways]
            way, (row, which, *_) = next((w, k) for w, k in found if not k[2:].any())
            pixels[i, 0] = image(int(row) - 1, int(which))
            orders.append(way)
        expected = np.asarray(made.encode(params[version], pixels))[:, 0]
        for i, ((page, key), way) in enumerate(zip(kept, orders)):
            np.testing.assert_array_equal(keys[page], key)
            made_then = way.to_cache(expected[i])
            np.testing.assert_allclose(pages[page, :count], made_then, rtol=2e-5, atol=2e-5)


def test_an_image_that_is_twice_in_a_row_is_kept_once():
    made = a_step("one")
    which, page = np.zeros((ROWS, 2), int), np.zeros((ROWS, 2), int)
    batch = showing(0, which, page)
    batch = batch._replace(image_start=np.tile(np.int32([1, 14]), (ROWS, 1)))
    _, seen = made.run([batch, batch])
    assert [int(x["cache/encoded"]) for x in seen] == [2 * ROWS, 0]


@pytest.mark.parametrize(
    ("mesh", "model", "store", "policy"),
    [
        ("data8", "llava", "", "strict"),
        ("data8", "llava", "somewhere", "strict"),
        pytest.param("data8", "llava", "", "lazy", marks=pytest.mark.long),
        pytest.param("fsdp8", "deep", "", "strict", marks=pytest.mark.long),
        pytest.param("data4_tensor2", "llava", "", "strict", marks=pytest.mark.long),
    ],
)
def test_all_found_runs_no_encoder_and_sends_no_features(mesh, model, store, policy):
    """From the compiled programs: the encoder is inside a conditional, and no feature is sent."""
    made = Made(mesh, policy, model=model, store=store, bound=50 * (policy == "lazy"))
    fed = Made(mesh, policy="", model=model)
    local = turns(1)[0]._replace(in_pages=np.zeros((ROWS, 2), bool))
    if store:  # tokens come with the batch, and the step gives what it made
        shape = (ROWS, 2, PATCHES, TINY.vision.width)
        local = local._replace(
            stored=np.zeros(shape, np.float32), is_stored=np.zeros((ROWS, 2), bool)
        )
        _, metrics = made.step(made.init(made.model.init(0)), made.place(local))
        assert metrics[TOKENS].tokens.sharding.is_equivalent_to(batch_sharding(made.mesh), 4)
        assert all(x.ndim == 0 for name, x in metrics.items() if name != TOKENS)
    batch = made.place(local)
    cached = made.step.lower(made.abstract, batch).compile().as_text()
    of_tower = [x for x in cached.splitlines() if re.search(r'op_name="[^"]*/vision/', x)]
    assert any(" dot(" in x or "fusion(" in x for x in of_tower)
    assert all("/cond/branch_1_fun/" in x for x in of_tower)
    # The conditionals of one encode batch and of any: where none runs, there are no such arrays.
    whole = [x for x in of_tower if 'op_name="jit(' in x]
    assert whole and all(x.count("/cond/branch_1_fun/") >= 2 for x in whole)
    features = np.zeros((ROWS, 2, PATCHES, feature_shape(made.model.config)[1]), np.float32)
    alone = turns(1)[0]._replace(pixels=None, image_key=None, image_pages=None)
    given = fed.place(alone._replace(features=features))
    plain = fed.step.lower(fed.abstract, given).compile().as_text()

    def wire(text):
        # A sharded encoder communicates where it runs, inside its branch.
        return collectives.total(collectives.read(text, dict(made.mesh.shape), branches=False))

    # Of a number of 4 bytes each of eight devices sends 7 by a ring; with a bound there are lags.
    assert 0 <= wire(cached) - wire(plain) <= (64 * 7 / 4 if policy == "lazy" else 64)
