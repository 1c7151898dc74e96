"""A frozen encoder's tokens that come with a batch of pairs: same bits, no encoder run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import assert_gradients_close, devices_of
from gradcache_cases import (
    EMBEDDINGS,
    FSDP,
    KINDS,
    MESHES,
    Softmax,
    both,
    dual_pairs,
    images,
    pairs_of,
)
from numerics import close
from zoo import DUAL, LLAVA, QWEN3, ROWS, text_and_images

from jaxvlm.cache.cached_step import TOKENS
from jaxvlm.cache.pair_batches import make_pair_cache
from jaxvlm.config import CacheConfig, ConfigError, DualConfig, MeshConfig, OptimConfig
from jaxvlm.models.vlm import DTYPES
from jaxvlm.optim.optimizer import make_optimizer
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.planner.compiled import collectives
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.submodels import feature_shape
from jaxvlm.spmd.train_step import assemble, split
from jaxvlm.train.gradcache import MiniBatch

NAFLEX = dataclasses.replace(
    DUAL,
    vision=dataclasses.replace(DUAL.vision, packed=True, patch_size=4, position="learned"),
)
FROZEN = dataclasses.replace(
    LLAVA, vision=dataclasses.replace(LLAVA.vision, frozen_blocks=1, feature_layer=-1)
)


def images_on_both_sides():
    rng = np.random.default_rng(3)
    return pairs_of(images(rng, ROWS), both(rng, 2 * ROWS))


def patches_on_one_side():
    """Images of several sizes, of each of which an encoder computes one embedding."""
    rng, made = np.random.default_rng(4), dual_pairs()
    grid = np.asarray([(1, 2, 4), (1, 4, 4), (1, 1, 2)], np.int32)[np.arange(ROWS) % 3]
    query = made.query._replace(
        pixels=None, patches=rng.integers(0, 256, (ROWS, 16, 48), np.uint8), grid=grid[:, None]
    )
    return made._replace(query=query)


def of_fixed_size():
    one, two, three = (text_and_images(LLAVA, seed, packed=False) for seed in (2, 3, 4))
    document = jax.tree.map(lambda a, b: np.concatenate([a, b]), one, two)
    return pairs_of(three, document)


STAGED = dataclasses.replace(
    LLAVA,
    vision=dataclasses.replace(LLAVA.vision, remat="dots"),
    decoder=dataclasses.replace(LLAVA.decoder, remat="dots"),
)
CASES = {
    "dual": (DUAL, images_on_both_sides, ("vision/*",), (1,)),
    "dual, any size": (NAFLEX, patches_on_one_side, ("vision/*",), (1,)),
    "vlm": (LLAVA, of_fixed_size, ("vision/*",), (4,)),
    "vlm, any size": (QWEN3, KINDS["vlm"][1], ("vision/*",), (4, 8, 16)),
    "vlm, stages": (STAGED, of_fixed_size, ("vision/*",), (4,)),
    "vlm, frozen": (FROZEN, of_fixed_size, (), (5,)),
}


class Made:
    """A compiled step, with room for tokens or plain."""

    def __init__(
        self, case, mesh="one", dtype="float32", mini_batches=(0, 0), cached=True, fed=False
    ):
        config, self.batch, frozen, windows = CASES[case]
        self.config = config = dataclasses.replace(config, dtype=dtype)
        where = {**MESHES, "stage2": MeshConfig(1, pipeline=2)}[mesh]
        embeddings = None if isinstance(config, DualConfig) else EMBEDDINGS
        self.model = build_model(
            config, make_mesh(where, devices_of(where)), FSDP, embeddings=embeddings
        )
        own, _ = split(self.model, self.model.shapes, frozen)
        asked = CacheConfig("strict", memory_mb=1, encode_batch=2)
        cache = make_pair_cache(asked, self.model, own, windows) if cached else None
        tx = make_optimizer(OptimConfig(max_grad_norm=0.0), lambda step: 1e-2, self.model.logical)
        cut = tuple(MiniBatch(rows) for rows in mini_batches)
        step, abstract, self.init = assemble(
            self.model, Softmax(), tx, frozen=frozen, cache=cache, mini_batches=cut
        )
        shapes = self.with_room() if cached or fed else self.batch()
        if fed:
            shapes = shapes._replace(query=_fed(shapes.query), document=_fed(shapes.document))
        self.step = step.lower(abstract, self.place(shapes)).compile()

    def place(self, batch):
        return to_global(self.model.mesh, batch, ROWS)

    def with_room(self, query=None, document=None, found=lambda here: here & False):
        """The batch, with tokens instead of pixels for the images that are ``found``."""
        batch = self.batch()
        sides = [
            self._room(side, tokens, found)
            for side, tokens in ((batch.query, query), (batch.document, document))
        ]
        return batch._replace(query=sides[0], document=sides[1])

    def _room(self, rows, tokens, found):
        given = rows.pixels if rows.patches is None else rows.patches
        if given is None:
            return rows
        (count, width), lead = feature_shape(self.config), rows.image_start.shape
        shape = (*lead, count, width) if count else (*rows.patches.shape[:-1], width)
        here = found(rows.image_start >= 0)
        stored = np.zeros(shape, DTYPES[self.config.dtype])
        if tokens is not None:
            seen = here[..., None, None] if count else self._of(rows, here)
            stored = np.where(seen, np.asarray(tokens).reshape(shape), stored)
            blank = here if count or rows.grid is None else self._of(rows, here)[..., 0]
            given = np.where(
                blank.reshape(blank.shape + (1,) * (given.ndim - blank.ndim)), 0, given
            )
        name = "pixels" if rows.patches is None else "patches"
        return rows._replace(**{name: given}, stored=stored, is_stored=here)

    def _of(self, rows, here):
        """bool[..., P, 1]: which patches are of images that are ``here``."""
        upto = np.cumsum(rows.grid.prod(-1), -1)
        which = np.arange(rows.patches.shape[-2])[:, None] >= upto[..., None, :]
        which = np.minimum(which.sum(-1), here.shape[-1] - 1)
        return np.take_along_axis(here, which, -1)[..., None]

    def run(self, batches, frozen=lambda x: x):
        """(trained parameters, losses, metrics) of steps."""
        state, seen = self.init(self.model.init(0)), []
        state = state._replace(frozen=jax.tree.map(frozen, state.frozen))
        for batch in batches:
            state, metrics = self.step(state, self.place(batch))
            seen.append(jax.device_get(metrics))
        moments = jax.device_get(optax.tree.get(state.opt_state, "mu"))
        return jax.device_get(state.params), [x["loss"].tobytes() for x in seen], seen, moments


def _fed(rows):
    """Rows that were given all of their features."""
    return rows._replace(features=rows.stored, pixels=None, stored=None, is_stored=None)


def same_bits(one, two):
    assert one[1] == two[1]
    for path, x in one[0].items():
        assert x.tobytes() == two[0][path].tobytes(), path


@functools.cache
def compiled(*how):
    return Made(*how)


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "case, mesh, dtype, mini_batches",
    [
        ("dual", "one", "float32", (0, 0)),
        long("dual", "data4", "float32", (2, 3)),
        long("dual, any size", "one", "float32", (0, 0)),
        long("vlm", "data4", "bfloat16", (1, 3)),
        long("vlm, any size", "one", "float32", (0, 0)),
        long("vlm, frozen", "one", "float32", (0, 0)),
        long("vlm, stages", "stage2", "float32", (1, 3)),
    ],
)
def test_tokens_that_are_given_change_no_bit(case, mesh, dtype, mini_batches):
    step = compiled(case, mesh, dtype, mini_batches)
    off = step.run([step.with_room()] * 3)
    tokens = [made and made.tokens for made in off[2][0][TOKENS]]
    some = np.random.default_rng(0)
    mixed = step.with_room(*tokens, found=lambda here: here & (some.random(here.shape) < 0.5))
    every = step.with_room(*tokens, found=lambda here: here)
    on = step.run([step.with_room(), mixed, every])
    same_bits(off, on)
    share = [float(x["cache/hit_rate"]) for x in on[2]]
    assert share[0] == 0 < share[1] < 1 == share[2]
    assert on[2][2]["cache/encoded"] == 0 < off[2][2]["cache/encoded"]
    # An encoder that gives NaN for everything changes nothing.
    spoilt = step.run([every] * 3, lambda x: jnp.full_like(x, jnp.nan))
    same_bits(off, spoilt)


def test_a_top_does_not_learn_from_tokens_that_a_codec_changes():
    config, _, frozen, windows = CASES["vlm, frozen"]
    where = MESHES["one"]
    model = build_model(config, make_mesh(where, devices_of(where)), FSDP, embeddings=EMBEDDINGS)
    own, _ = split(model, model.shapes, frozen)
    asked = CacheConfig("strict", store="tokens", codec="int8", encode_batch=2)
    with pytest.raises(ConfigError, match="codec='int8' with trained blocks above frozen_blocks"):
        make_pair_cache(asked, model, own, windows)


@pytest.mark.long
def test_the_step_is_that_without_a_cache():
    given, plain = compiled("dual", "data4", "float32", (2, 3)), Made("dual", cached=False)
    off, on = plain.run([plain.batch()]), given.run([given.with_room()])
    close(on[2][0]["loss"], off[2][0]["loss"], 1e-5)
    assert_gradients_close(on[3], off[3])


@pytest.mark.long
def test_no_collective_carries_a_feature():
    """Against the same step that is given all features."""
    step = compiled("dual", "data4", "float32", (2, 3))
    fed = Made("dual", "data4", mini_batches=(2, 3), cached=False, fed=True)

    def wire(text):
        return collectives.total(collectives.read(text, dict(step.model.mesh.shape)))

    assert 0 <= wire(step.step.as_text()) - wire(fed.step.as_text()) <= 64


def test_a_tower_that_learns_is_refused():
    model = build_model(DUAL, make_mesh(MESHES["one"], jax.devices()[:1]))
    with pytest.raises(ConfigError, match=r"config.cache.policy='strict' .* freeze the encoder"):
        make_pair_cache(
            CacheConfig("strict", memory_mb=1, encode_batch=2), model, model.shapes, (1,)
        )
