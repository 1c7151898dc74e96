"""Answers from a compressed KV cache: what is stored and read, on every mesh, for any batch."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import re

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import TINY, devices_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import close_in_norm

from jaxvlm.config import ConfigError, MeshConfig
from jaxvlm.inference import kv_compression
from jaxvlm.inference.generate import Compression, Sampling, decode, prefill
from jaxvlm.inference.kv_policy import PRESETS, allocate, policy_of, preset
from jaxvlm.nn import attention, kv_cache
from jaxvlm.nn.attention_backends import attend
from jaxvlm.nn.mask import Mask
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.rules import Axes
from jaxvlm.parallel.sharding import batch_sharding
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.runners import forward_of
from jaxvlm.types import Batch

ONE = MeshConfig(data=1)
IMAGE, NEW, LENGTH = 3, 6, 48
DECODER = dataclasses.replace(
    TINY.decoder, depth=3, num_heads=8, num_kv_heads=4, vocab_size=64, width=32
)
CONFIG = dataclasses.replace(TINY, decoder=DECODER)
SHAPE = (DECODER.depth, DECODER.num_kv_heads, DECODER.head_dim)
SIZES = (48, 29, 40, 17, 48, 33, 21, 38)
METHODS = tuple(PRESETS)


def prompts(rows=range(8), length=LENGTH):
    """Prompts of SIZES, padded on the left; two thirds of each are visual tokens."""
    tokens = np.zeros((len(rows), length), np.int32)
    segment = np.zeros_like(tokens)
    positions = np.zeros((len(rows), 1, length), np.int32)
    for i, row in enumerate(rows):
        draws, size = np.random.default_rng(row), SIZES[row]
        own = draws.integers(4, 64, size)
        own[1 : size * 2 // 3] = IMAGE
        own[3 : size * 2 // 3 : 2] = 4 + np.arange(len(own[3 : size * 2 // 3 : 2])) % 60
        own[size * 2 // 3 - 1] = IMAGE
        tokens[i, length - size :], segment[i, length - size :] = own, 1
        positions[i, 0, length - size :] = np.arange(size)
    ids = np.asarray(list(rows), np.int32)
    return Batch(tokens, None, positions, segment, example_id=ids)


def built(mesh=ONE, depth=DECODER.depth):
    config = dataclasses.replace(CONFIG, decoder=dataclasses.replace(DECODER, depth=depth))
    if mesh.pipeline > 1:
        parts = {
            x: dataclasses.replace(getattr(config, x), remat="full") for x in ("vision", "decoder")
        }
        config = dataclasses.replace(config, **parts)
    return build_model(config, make_mesh(mesh, devices_of(mesh)))


@pytest.fixture(scope="module")
def one():
    """(model on one device, parameters)."""
    model = built()
    return model, jax.tree.map(lambda x: x * 3, model.init(0))


def answering(model, policy):
    """The jitted (parameters, prompts) -> (tokens, state after prefill)."""
    stages = model.mesh.shape["pipeline"]
    compression = policy and Compression(policy, IMAGE, stages, with_places=True)

    @jax.jit
    def run(params, batch):
        module = model.module(params)
        state = prefill(module, batch, Sampling(), 8, SHAPE, jax.random.key(5), compression)
        return decode(module, state, Sampling(), NEW)[1], state._replace(keys=None)

    return lambda params, batch: jax.tree.map(
        np.asarray, run(params, jax.tree.map(jnp.asarray, batch))
    )


def answered(model, params, batch, policy):
    """(tokens, state after prefill)."""
    return answering(model, policy)(params, batch)


@pytest.mark.parametrize("name", METHODS)
def test_a_whole_budget_gives_the_answers_of_no_compression(one, name):
    expected, _ = answered(*one, prompts(), None)
    tokens, state = answered(*one, prompts(), preset(name, budget=1.0))
    np.testing.assert_array_equal(state.kv.part.count, np.tile(SIZES, (SHAPE[0], 1)))
    np.testing.assert_array_equal(tokens, expected)


def places_of(state, whole):
    """bool[L, B, K, T]: which places are stored, by what their keys are."""
    kept = np.zeros((SHAPE[0], len(SIZES), SHAPE[1], LENGTH), bool)
    for layer, row, head in np.ndindex(kept.shape[:3]):
        start, count = state.kv.part.start[layer, row], state.kv.part.count[layer, row]
        own = slice(start, start + count)
        keys, values = (x[layer, row, :LENGTH, head] for x in (whole.kv.k, whole.kv.v))
        first = LENGTH - SIZES[row]
        far = np.abs(keys[None, first:] - state.kept.k[row, own, head][:, None]).max(2)
        at = first + far.argmin(1)
        assert (np.diff(at) > 0).all(), "in rising order, none twice"
        close_in_norm(state.kept.k[row, own, head], keys[at], 1e-5)
        close_in_norm(state.kept.v[row, own, head], values[at], 1e-5)
        kept[layer, row, head, at] = True
    found = kv_compression.places(state.kv.part, state.kept, LENGTH)
    np.testing.assert_array_equal(found, kept)
    return kept


def hiding(attend, kv, kept, mask):
    """Attention over whole prompts in which each head sees no place that was evicted."""
    del kept
    heads = []
    for head in range(SHAPE[1]):
        segment = jnp.where(kv.part[:, head], mask.k_segment, 0)
        out = attend(*kv.of_layer, mask._replace(k_segment=segment))
        group = out.shape[2] // SHAPE[1]
        heads.append(out[:, :, head * group : (head + 1) * group])
    return jnp.concatenate(heads, axis=2)


@pytest.fixture(scope="module")
def whole(one):
    """State of prompts that are not compressed."""
    return answered(*one, prompts(), None)[1]


@pytest.mark.parametrize("name", METHODS)
def test_attention_is_that_over_whole_prompts_without_the_evicted(one, whole, monkeypatch, name):
    model, params = one
    state = answered(model, params, prompts(), preset(name, budget=0.25))[1]
    places = places_of(state, whole)
    total = np.floor(0.25 * SHAPE[0] * np.asarray(SIZES) + 0.5)
    np.testing.assert_array_equal(places.sum((0, 3)), np.tile(total[:, None], SHAPE[1]))

    def run(params, state):
        return decode(model.module(params), state, Sampling(), NEW)

    keys = jax.random.split(jax.random.key(0), len(SIZES))
    ours, tokens = jax.jit(run)(params, state._replace(keys=keys))
    monkeypatch.setattr(attention, "attend_cached", hiding)
    new = np.ones((*places.shape[:3], 8), bool)
    hidden = whole.kv._replace(part=np.concatenate([places, new], axis=3))
    theirs, expected = jax.jit(run)(params, whole._replace(kv=hidden, keys=keys))
    np.testing.assert_array_equal(tokens, expected)
    assert len(np.unique(tokens)) > 8
    for mine, dense in ((ours.kv.k, theirs.kv.k), (ours.kv.v, theirs.kv.v)):
        # Sums of other lengths round otherwise, and three layers of large weights add it up.
        theirs_new = np.asarray(dense)[:, :, LENGTH : LENGTH + NEW]
        close_in_norm(np.asarray(mine)[:, :, :NEW], theirs_new, 1e-5)


@pytest.mark.parametrize("count", [0, 1, 7, 32, 90])
def test_one_layer_reads_its_part_alone(count):
    """Attention over places in the middle, and at the end, of a row of all layers' places."""
    draws = np.random.default_rng(count)
    N, B, K, H, S = 100, 3, 2, 8, 5

    def random(*dims):
        return jnp.asarray(draws.normal(size=dims).astype(np.float32))

    q, kept = random(B, 2, 4, H), kv_cache.Kept(random(B, N, K, H), random(B, N, K, H))
    start = np.asarray([0, (N - count) // 2, N - count])
    size = next(i for i, n in enumerate(kv_cache.read_sizes(N)) if n >= count)
    part = kv_cache.Part(*map(jnp.asarray, (start, np.full(3, count), size)))
    cache = kv_cache.KVCache(random(B, S, K, H), random(B, S, K, H), part)
    index, ones = jnp.arange(S)[None], jnp.ones((B, S), jnp.int32)
    mask = Mask(index[:, -2:], index, ones[:, -2:], ones)
    axes = Axes(make_mesh(ONE, jax.devices()[:1]))

    def over(k, v, mask):
        return attend(q, k, v, mask, axes)

    found = jax.jit(lambda: kv_cache.attend_cached(over, cache, kept, mask))()
    own = np.stack([np.arange(i, i + count) for i in start])
    k, v = (
        np.concatenate([np.take_along_axis(x, own[..., None, None], 1), new], 1).astype(np.float64)
        for x, new in zip(map(np.asarray, kept), (cache.k, cache.v))
    )
    score = np.einsum("btkgh,bskh->bkgts", np.asarray(q).reshape(B, 2, K, 2, H), k) / H**0.5
    score[..., 0, -1] = -np.inf
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    expected = np.einsum("bkgts,bskh->btkgh", weight, v).reshape(found.shape)
    close_in_norm(found, expected, 1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_neighbours_order_and_padding_change_nothing(one, whole, name):
    policy = preset(name, budget=0.25)
    tokens, state = answered(*one, prompts(), policy)
    places = places_of(state, whole)
    draws = np.random.default_rng(1)
    batches = [(draws.choice(8, 8), LENGTH) for _ in range(2)]
    for rows, length in [*batches, ([5], LENGTH), ([3, 1], 64)]:
        found, of = answered(*one, prompts(rows, length), policy)
        np.testing.assert_array_equal(found, tokens[rows])
        np.testing.assert_array_equal(of.kv.part.count, state.kv.part.count[:, rows])
        for i, row in enumerate(rows):
            used = state.kv.part.count[:, row].sum()
            close_in_norm(of.kept.k[i, :used], state.kept.k[row, :used], 1e-5)
    assert 0 < places.sum() < whole.kv.k[..., 0].size


@pytest.fixture(scope="module")
def compiled(one):
    """Answers and counts of eight prompts, compiled once."""
    run = answering(one[0], preset("vl_cache", budget=0.25))

    def of(rows):
        tokens, state = run(one[1], prompts(rows))
        return tokens, state.kv.part.count

    return of


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=8, max_size=8))
def test_any_neighbours_in_any_order_change_nothing(compiled, rows):
    tokens, count = compiled(range(8))
    found, kept = compiled(rows)
    np.testing.assert_array_equal(found, tokens[rows])
    np.testing.assert_array_equal(kept, count[:, rows])


MESHES = {name: builders.MESHES[name] for name in ("data8", "fsdp8", "tensor8")} | {
    "tensor": MeshConfig(data=1, tensor=4),  # with 8, KV heads are repeated
    "context": MeshConfig(data=1, context=4),
    "context8": MeshConfig(data=1, context=8),
    "all": MeshConfig(data=2, context=2, tensor=2),
    "pipeline": MeshConfig(data=1, pipeline=3),
    "pipeline and tensor": MeshConfig(data=1, pipeline=3, tensor=2),
    "pipeline and data": MeshConfig(data=2, pipeline=3),
}
ON_MESHES = [(name, mesh) for name in ("vl_cache", "snapkv", "random") for mesh in MESHES]
ON_MESHES += [("pyramid", "all"), ("pyramid", "pipeline and data"), ("window", "tensor8")]


@pytest.mark.parametrize("name, mesh", ON_MESHES)
def test_meshes_keep_the_places_of_one_device(one, name, mesh):
    policy = preset(name, budget=0.25)
    tokens, state = answered(*one, prompts(), policy)
    model = built(MESHES[mesh])
    params = jax.device_put(one[1], model.shardings)
    batch = jax.device_put(prompts(), batch_sharding(model.mesh))
    found, of = answered(model, params, batch, policy)
    np.testing.assert_array_equal(of.kv.part.count, state.kv.part.count)
    np.testing.assert_array_equal(found, tokens)
    for row in range(8):
        close_in_norm(stored(of, row), stored(state, row), 1e-5)
    theirs, ours = (kv_compression.places(x.kv.part, x.kept, LENGTH) for x in (of, state))
    np.testing.assert_array_equal(theirs, ours)


def stored(state, row):
    """The kept keys of a prompt, layer after layer; on a pipeline from its stages' rows."""
    part, keys, places = state.kv.part, state.kept.k, []
    for layer in range(SHAPE[0]):
        of_stage = keys[layer * len(keys) // SHAPE[0]] if keys.ndim == 5 else keys
        start = part.start[layer, row]
        places.append(of_stage[row, start : start + part.count[layer, row]])
    return np.concatenate(places)


def sent(program):
    """What a program sends: (kind, shape) of each collective."""
    lines = (re.sub(r"\{[^}]*\}", "", line) for line in program.as_text().splitlines())
    found = (re.search(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(", line) for line in lines)
    return collections.Counter((match[2], match[1]) for match in found if match)


KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@pytest.mark.parametrize("mesh", [MeshConfig(data=8), MeshConfig(data=2, tensor=4)])
def test_devices_agree_by_integers_alone(one, mesh):
    """Reading prompts sends each layer's density and its largest size; decoding nothing more."""
    model = built(mesh)
    params = jax.device_put(one[1], model.shardings)
    batch = jax.device_put(prompts(), batch_sharding(model.mesh))
    found = []
    for policy in (None, preset("vl_cache", budget=0.25)):
        compression = policy and Compression(policy, IMAGE, model.mesh.shape["pipeline"])

        def read(params, batch, compression=compression):
            module, key = model.module(params), jax.random.key(5)
            return prefill(module, batch, Sampling(), 8, SHAPE, key, compression)

        def write(params, state):
            return decode(model.module(params), state, Sampling(), NEW)

        first = jax.jit(read).lower(params, batch).compile()
        state = first(params, batch)
        found.append((sent(first), sent(jax.jit(write).lower(params, state).compile())))
    (whole_read, whole_write), (read_, write_) = found
    assert write_ == whole_write
    # Whether all rows have ended; and the sums of split matmuls.
    assert len(whole_write) >= 1 + (mesh.tensor > 1)
    rows = 8 // mesh.data
    more = {("all-reduce", f"s32[{SHAPE[0]}]"): 1}
    if mesh.tensor > 1:
        more |= {("all-reduce", f"u32[{rows}]"): 1}  # in the loop over layers
    assert read_ - whole_read == more and not whole_read - read_


@pytest.mark.parametrize("name", ["none", "vl_cache"])
def test_stages_hold_their_layers(one, name):
    """No parameter and no key or value leaves its stage of a pipeline, whole or compressed."""
    model = built(MeshConfig(data=2, pipeline=3))
    params = jax.device_put(one[1], model.shardings)
    batch = jax.device_put(prompts(), batch_sharding(model.mesh))
    compression = None if name == "none" else Compression(preset(name, budget=0.25), IMAGE, 3)

    def read(params, batch):
        module, key = model.module(params), jax.random.key(5)
        return prefill(module, batch, Sampling(), 8, SHAPE, key, compression)

    def write(params, state):
        return decode(model.module(params), state, Sampling(), NEW)[0]

    reading = jax.jit(read).lower(params, batch).compile()
    state = reading(params, batch)
    writing = jax.jit(write, donate_argnums=1).lower(params, state).compile()
    for program, tokens in ((reading, LENGTH), (writing, 1)):
        activations = f"f32[4,{tokens},{DECODER.width}]"
        floats = {x: n for x, n in sent(program).items() if x[1].startswith("f32")}
        kinds = "collective-permute", "all-reduce"  # to the next stage; the last one's to all
        assert floats == {(kind, activations): 1 for kind in kinds}
    held = [*jax.tree.leaves(state.kv), *jax.tree.leaves(state.kept)]
    assert {x.sharding.spec[0] for x in held} == {"pipeline"}
    # The next call of a compiled decode takes what this one returns.
    after = [x.spec for x in jax.tree.leaves(writing.output_shardings.kv)]
    assert after == [x.sharding.spec for x in jax.tree.leaves(state.kv)]


@pytest.mark.parametrize(
    "mesh", [ONE, MeshConfig(data=1, pipeline=2), MeshConfig(data=1, pipeline=2, tensor=2)]
)
def test_the_kv_cache_is_written_in_place(mesh):
    """Of eight layers, generating copies one layer's at a time, and no stage's whole."""
    model, capacity = built(mesh, depth=8), 512
    shape = (8, *SHAPE[1:])

    def read(params, batch):
        module, key = model.module(params), jax.random.key(5)
        return prefill(module, batch, Sampling(), capacity, shape, key)

    def write(params, state):
        return decode(model.module(params), state, Sampling(), NEW)

    params = model.init(0)
    state = jax.jit(read)(params, jax.device_put(prompts(), batch_sharding(model.mesh)))
    writing = jax.jit(write, donate_argnums=1).lower(params, state).compile()
    kv_bytes = 2 * state.kv.k.addressable_shards[0].data.nbytes
    assert writing.memory_analysis().temp_size_in_bytes < 0.75 * kv_bytes


@pytest.mark.parametrize("rows", [6, 4])
def test_a_pipelined_evaluation_gathers_no_layer(one, rows):
    """Rows that the stages divide go through them as microbatches, others all at once."""
    model = built(MeshConfig(data=1, pipeline=3))
    params = jax.device_put(one[1], model.shardings)
    batch = jax.tree.map(lambda x: jnp.asarray(x[:rows]), prompts())

    def hidden(apply):
        return lambda params, batch: apply(params, batch).hidden

    program = jax.jit(hidden(forward_of(model, rows))).lower(params, batch).compile()
    together = rows if rows % 3 else rows // 3
    assert {shape for _, shape in sent(program) if shape.startswith("f32")} == {
        f"f32[{together},{LENGTH},{DECODER.width}]"
    }
    expected = jax.jit(hidden(one[0].apply))(one[1], batch)
    close_in_norm(np.asarray(program(params, batch)), np.asarray(expected), 1e-5)


REFUSED = {
    "sliding windows": {"window": 8},
    "tokens that attend to later ones": {"visual_mask": "prefix"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_are_not_tested_are_refused(why):
    with pytest.raises(ConfigError, match=f"kv: this model has .*{why}"):
        kv_compression.check_model(dataclasses.replace(DECODER, **REFUSED[why]))
    kv_compression.check_model(DECODER)


@pytest.mark.parametrize("how", ["even", "pyramid", "density", "clip"])
@pytest.mark.parametrize("budget", [6e-5, 0.01, 0.07, 0.3, 0.99996, 1.0])
def test_what_is_stored_always_fits(budget, how):
    """Of any densities, those that one layer has alone too; on a pipeline's stages as well."""
    clip = how == "clip"
    settings = {"budget": budget, "clip": clip, "allocator": "density" if clip else how}
    policy = preset("vl_cache", **settings)
    draws = np.random.default_rng(3)
    for layers, length in ((1, 5), (3, 48), (28, 700), (28, 32768)):
        size = jnp.asarray([length, 1, max(1, length // 3)])
        for density in (np.ones, np.zeros, draws.random, lambda s: draws.random(s) ** 20):
            count = allocate(policy, size, jnp.asarray(density((layers, 3)), jnp.float32))
            for stages in (n for n in (1, 3, 4, 28) if layers % n == 0):
                most = count.reshape(stages, -1, 3).sum(1).max()
                assert most <= kv_compression.capacity(policy, layers, length, stages)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kv_budget": 0.5}, "kv_budget is for a compressed"),
        ({"kv_clip": True}, "kv_clip is for a compressed"),
        ({"kv_allocator": "even"}, "kv_allocator is for a compressed"),
        ({"kv": "h2o"}, "kv='h2o'"),
        ({"kv": "vl_cache", "kv_allocator": "odd"}, "kv_allocator='odd'"),
        ({"kv": "random", "kv_clip": True}, "kv_clip is read by"),
        ({"kv": "window", "kv_queries": 3}, "kv_queries is not read by the scorer window"),
        ({"kv": "snapkv", "kv_threshold": 0.5}, "kv_threshold is not read by the scorer snapkv"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        policy_of(**settings)
    assert policy_of() is None
    mixed = policy_of("vl_cache", kv_allocator="pyramid", kv_budget=0.2)
    assert mixed[:3] == ("vl_cache", "pyramid", 0.2)


def test_pages_have_the_bytes_that_meshes_send():
    root = pathlib.Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/results/kv_cache_traffic_cpu.json").read_text())["rows"]
    page = (root / "docs/kv_cache.md").read_text()
    assert len(rows) == 8
    for whole, kept in zip(rows[::2], rows[1::2], strict=True):
        assert whole["mesh"] == kept["mesh"] and whole["token_bytes"] == kept["token_bytes"] > 0
        mesh = " ".join(f"{axis}={n}" for axis, n in whole["mesh"].items())
        sent = (x[name] for name in ("read_bytes", "token_bytes") for x in (whole, kept))
        assert f"| {mesh} | {' | '.join(f'{n:,}' for n in sent)} |" in page
