"""Relevance pooling: which cells are split, what tokens hold, inputs of scores, gradients."""

from __future__ import annotations

import dataclasses
import heapq
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import TINY, VOCAB, assert_gradients_close, devices_of, norm_of, worst_gradient
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import close
from token_cases import in_float64
from zoo import on_stages

from jaxvlm.cache.cached_step import make_cache
from jaxvlm.config import (
    CacheConfig,
    ConfigError,
    ConnectorConfig,
    MeshConfig,
    OptimConfig,
    RelevanceConfig,
)
from jaxvlm.grid_order import MORTON, permutation
from jaxvlm.losses.next_token import NextToken
from jaxvlm.models.frozen_blocks import recut
from jaxvlm.models.relevance import (
    Relevance,
    cell_index,
    check,
    choose,
    place_table,
    question,
)
from jaxvlm.models.texture import CHANNELS
from jaxvlm.models.vlm import encoder_tokens, encoder_width, num_visual_tokens
from jaxvlm.nn.param import Init
from jaxvlm.optim.optimizer import make_optimizer, split_frozen
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.parallel.sharding import to_global
from jaxvlm.spmd.model import build_model
from jaxvlm.spmd.submodels import vision_encoder_part, without_vision_encoder
from jaxvlm.spmd.train_step import assemble
from jaxvlm.train.grad_accum import PlainRunner, scales
from jaxvlm.types import Batch

ROWS, LENGTH, SIDE, BUDGET = 8, 40, 8, 10
ASKS = RelevanceConfig(budget=BUDGET, levels=3, width=8)
MODEL = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, patch_size=2, stem="linear"),
    connector=ConnectorConfig(relevance=ASKS),
)
MESHES = {
    "one": MeshConfig(1),
    "data8": MeshConfig(8),
    "fsdp8": MeshConfig(1, 8),
    "data4_tensor2": MeshConfig(4, 1, 2),
    "data2_context2_tensor2": MeshConfig(data=2, context=2, tensor=2),
    "data2_stage2": MeshConfig(data=2, pipeline=2),
}
FROZEN = ("vision/*",)


def turns_of(row):
    """(text, image, question, answer, question, answer), (image, question, answer)."""
    return [(1, BUDGET, 4 - row % 2, 2, 2, 2), (0, BUDGET, 3, 1 + row % 3)]


def some_batch(seed=0):
    """Packed sequences of two conversations with an image each; the first has two answers."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    segment, start = np.zeros_like(tokens), np.full((ROWS, 2), -1, np.int32)
    weight = np.zeros(tokens.shape, np.float32)
    positions = np.zeros((ROWS, 1, LENGTH), np.int32)
    for row in range(ROWS):
        at = 0
        for number, turn in enumerate(turns_of(row)):
            before, image, asked, *rest = turn
            size = sum(turn)
            segment[row, at : at + size] = number + 1
            positions[row, 0, at : at + size] = np.arange(size)
            start[row, number] = at + before
            answer = at + before + image + asked
            weight[row, answer : answer + rest[0]] = 1
            if len(rest) > 1:
                weight[row, at + size - rest[2] : at + size] = 1
            at += size
    start[3, 1] = -1  # a conversation without its image: those places are text
    return Batch(
        tokens=tokens, loss_weight=weight, positions=positions, segment=segment,
        pixels=rng.integers(0, 256, (ROWS, 2, 16, 16, 3)).astype(np.uint8), image_start=start,
        example_id=np.arange(ROWS, dtype=np.int32),
    )  # fmt: skip


def built(mesh="one", **changes):
    made = make_mesh(MESHES[mesh], devices_of(MESHES[mesh]))
    return build_model(dataclasses.replace(MODEL, **changes), made)


@pytest.fixture(scope="module")
def one():
    model = built()
    return model, model.init(0)


def greedy(score, levels, budget):
    """(first patch, level) of each piece: the best cell is split, again and again."""
    coarse = len(score) // 4**levels

    def cell(first, level):
        return (-max(score[first : first + 4**level]), -level, first)

    heap = [cell(i * 4**levels, levels) for i in range(coarse)]
    heapq.heapify(heap)
    done = []
    while len(heap) + len(done) < budget:
        _, minus, first = heapq.heappop(heap)
        if minus == 0:
            done.append((first, 0))
            continue
        step = 4 ** (-minus - 1)
        for part in range(4):
            heapq.heappush(heap, cell(first + part * step, -minus - 1))
    return sorted([*done, *((first, -minus) for _, minus, first in heap)])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    levels=st.integers(1, 3),
    coarse=st.integers(1, 3),
    share=st.floats(0, 1),
    seed=st.integers(0, 999),
    ties=st.booleans(),
)
def test_the_best_cell_is_split_again_and_again(levels, coarse, share, seed, ties):
    patches = coarse**2 * 4**levels
    budget = coarse**2 + 3 * round(share * (patches - coarse**2) / 3)
    score = np.random.default_rng(seed).normal(size=(2, patches)).astype(np.float32)
    score = np.round(score) if ties else score
    pieces = jax.jit(choose, static_argnums=(1, 2))(score, levels, budget)
    pieces = jax.tree.map(np.asarray, pieces)
    for first, level, row in zip(pieces.first, pieces.level, score):
        assert len(first) == budget
        # All of the image, once, in Morton order; and cut no further than it may be.
        ends = first + 4**level
        np.testing.assert_array_equal(first, [0, *ends[:-1]])
        assert ends[-1] == patches and level.min() >= 0 and level.max() <= levels
        if not ties:
            assert list(zip(first, level)) == greedy(row, levels, budget)


@pytest.mark.parametrize("budget, levels", [(64, 3), (100, 2), (256, 4), (400, 5)])
def test_the_usual_budgets_fit_the_usual_grids(budget, levels):
    check(RelevanceConfig(budget=budget, levels=levels), 32)
    model = dataclasses.replace(
        MODEL,
        vision=dataclasses.replace(MODEL.vision, image_size=64),
        connector=ConnectorConfig(relevance=RelevanceConfig(budget=budget, levels=levels)),
    )
    assert num_visual_tokens(model) == budget
    assert encoder_width(model) == MODEL.vision.width + CHANNELS


def module_and_input(levels=2, side=8, budget=25, query=True, seed=0):
    config = RelevanceConfig(budget=budget, levels=levels, width=8, query=query)
    made = Relevance(Init(nnx.Rngs(params=jax.random.key(seed))), config, 16, 12)
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(3, side**2, 16)), jnp.float32)
    texture = jnp.asarray(rng.normal(size=(3, side**2, CHANNELS)), jnp.float32)
    return made, x, texture, jnp.asarray(rng.normal(size=(3, 12)), jnp.float32)


def test_tokens_are_means_of_gated_patches():
    levels, side, budget = 2, 8, 25
    made, x, texture, query = module_and_input(levels, side, budget)
    order = permutation(MORTON, side, side)
    tokens, where = made(x[:, order], texture[:, order], query)
    assert tokens.shape == (3, budget, 16) and where.shape == (3, budget, 12)
    score = np.asarray(made.score(x[:, order], texture[:, order], query))
    table = place_table(side, levels) @ np.asarray(made.w_place[...])
    pieces = choose(jnp.asarray(score), levels, budget)
    index = np.asarray(cell_index(pieces, side**2, levels))
    for row in range(3):
        gate = np.zeros(side**2)
        gate[order] = 2 / (1 + np.exp(-score[row].astype(np.float64)))
        gated = np.asarray(x[row]) * gate[:, None]
        for k, (first, level) in enumerate(greedy(score[row], levels, budget)):
            y, x_ = divmod(int(order[first]), side)
            size = 2**level
            square = gated.reshape(side, side, 16)[y : y + size, x_ : x_ + size]
            np.testing.assert_allclose(tokens[row, k], square.mean((0, 1)), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(where[row, k], table[index[row, k]], rtol=1e-5, atol=1e-5)
    # Each place of each size is told apart from all others.
    rows = np.round(place_table(side, levels), 5)
    assert len(np.unique(rows, axis=0)) == len(rows) == 64 + 16 + 4


def test_all_patches_and_all_scores_learn():
    """In float64: the least patch's gradient is 1e-6, where float32 may round to nothing."""
    with in_float64():
        made, *inputs = module_and_input()
        graph, params = nnx.split(made)
        params, inputs = jax.tree.map(lambda x: x.astype(np.float64), (params, inputs))
        made = nnx.merge(graph, params)
        check_that_all_learn(made, *inputs)


def check_that_all_learn(made, x, texture, query):
    graph, params = nnx.split(made)

    def loss(params, x, query):
        tokens, where = nnx.merge(graph, params)(x, texture, query)
        return jnp.sum(jnp.sin(3 * tokens)) + jnp.sum(jnp.sin(where))

    grads, of_x, of_query = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(params, x, query)
    assert of_x.dtype == np.float64
    leaves = {f"/{'/'.join(path)}": leaf[...] for path, leaf in nnx.to_flat_state(grads)}
    # Scores are standardised: a shift of all patches changes none.
    nothing = 1e-12 * norm_of(leaves["/norm/scale"])
    assert norm_of(leaves.pop("/norm/bias")) <= nothing
    for path, leaf in leaves.items():
        assert float(jnp.abs(leaf).max()) > 0.1, path
    # Patches that are in no piece of their own too.
    assert float(jnp.abs(of_x).max(axis=-1).min()) > nothing
    assert float(jnp.abs(of_query).min()) > nothing

    score = made.score(x, texture, query)

    def by_score(score):
        with mock.patch.object(Relevance, "score", lambda *_: score):
            return jnp.sum(jnp.sin(3 * made(x, texture, query)[0]))

    assert float(jnp.abs(jax.jit(jax.grad(by_score))(score)).min()) > nothing


def test_scores_are_of_one_image_and_one_question():
    made, x, texture, query = module_and_input()
    alone = made.score(x[:1], texture[:1], query[:1])
    others = made.score(x.at[1:].mul(7.0), texture, query.at[1:].add(2.0))
    np.testing.assert_allclose(alone[0], others[0], atol=1e-5)
    blind = made.score(x[:1], texture[:1], 0 * query[:1])
    assert np.isfinite(blind).all() and float(jnp.abs(blind - alone).max()) > 1e-3
    nothing = made.score(0 * x, 0 * texture, query)
    np.testing.assert_allclose(nothing, 0, atol=1e-3)
    with pytest.raises(ValueError, match="needs the question's embedding"):
        made.score(x, texture, None)


def test_the_question_is_what_stands_before_the_first_answer():
    batch = some_batch()
    eye = jnp.broadcast_to(jnp.eye(LENGTH), (ROWS, LENGTH, LENGTH))
    found = np.asarray(question(eye, batch, BUDGET)).reshape(ROWS, 2, LENGTH)
    for row in range(ROWS):
        at = 0
        for number, (before, image, asked, *rest) in enumerate(turns_of(row)):
            expected = np.zeros(LENGTH)
            if batch.image_start[row, number] >= 0:
                expected[at : at + before] = 1
                expected[at + before + image :][:asked] = 1
                expected /= expected.sum()
            np.testing.assert_allclose(found[row, number], expected, atol=1e-6)
            at += before + image + asked + sum(rest)


def test_no_answer_is_seen_before_it_is_given(one):
    """Whatever is changed from an answer on, in any conversation, all before stays as it is."""
    model, params = one
    batch = some_batch()
    run = jax.jit(lambda batch: model.apply(params, batch).hidden)
    plain = np.asarray(run(batch))
    for row in (0, 1):
        first, _ = turns_of(row)
        answers = np.flatnonzero(batch.loss_weight[row])
        for at in answers:
            tokens = batch.tokens.copy()
            end = sum(first) if at < sum(first) else LENGTH
            tokens[row, at:end] = (tokens[row, at:end] + 1) % VOCAB
            changed = np.asarray(run(batch._replace(tokens=tokens)))
            np.testing.assert_array_equal(changed[row, :at], plain[row, :at])
            np.testing.assert_array_equal(changed[row, end:], plain[row, end:])
            assert np.abs(changed[row, at] - plain[row, at]).max() > 0
        # But the question changes the image's tokens.
        tokens = batch.tokens.copy()
        tokens[row, answers[0] - 1] = (tokens[row, answers[0] - 1] + 1) % VOCAB
        changed = np.asarray(run(batch._replace(tokens=tokens)))
        assert np.abs(changed[row, 1] - plain[row, 1]).max() > 1e-6


def loss_and_gradients(model, batch):
    runner, loss = PlainRunner(model.apply), NextToken()

    def run(params, batch):
        scale = scales(loss, batch)
        sums, grads = runner.loss_grad(params, {}, batch, loss, scale)
        return sums.terms["loss"] * scale["loss"], grads

    placed = to_global(model.mesh, batch, ROWS)
    value, grads = jax.jit(run, out_shardings=(None, model.shardings))(model.init(0), placed)
    return float(value), jax.device_get(grads)


@pytest.mark.parametrize(
    "mesh",
    [
        "data4_tensor2",
        pytest.param("data8", marks=pytest.mark.long),
        pytest.param("data2_context2_tensor2", marks=pytest.mark.long),
    ],
)
def test_any_mesh_gives_one_devices_gradients(mesh):
    """In float64: standardised scores, of which pieces are chosen, magnify what float32 rounds."""
    with in_float64():
        value, grads = loss_and_gradients(built(), some_batch())
        there, of_mesh = loss_and_gradients(built(mesh), some_batch())
    assert any("relevance" in path for path in grads)
    assert {x.dtype for x in grads.values()} == {np.dtype(np.float64)}
    close(there, value, 1e-12)
    worst_gradient(of_mesh, grads, 1e-11)


@pytest.mark.long
def test_a_pipeline_gives_one_devices_gradients():
    seen = []
    for mesh, model, parts in (("one", MODEL, 1), ("data2_stage2", on_stages(MODEL), 2)):
        made = build_model(model, make_mesh(MESHES[mesh], devices_of(MESHES[mesh])))
        tx = make_optimizer(OptimConfig(max_grad_norm=0.0), lambda step: 1e-2, made.logical)
        step, _, init = assemble(made, NextToken(), tx, parts, ())
        state, metrics = step(init(made.init(0)), to_global(made.mesh, some_batch(), ROWS))
        # Of one step: a tenth of the gradients.
        seen.append((float(metrics["loss"]), jax.device_get(optax.tree.get(state.opt_state, "mu"))))
    close(seen[1][0], seen[0][0], 1e-5)
    assert_gradients_close(seen[1][1], seen[0][1])


def run_steps(mesh, dtype, policy, pages):
    """Metrics and parameters after five steps that alternate between two sets of images."""
    model = built(mesh, dtype=dtype)
    own, _ = split_frozen(model.shapes, FROZEN)
    cache = make_cache(CacheConfig(policy, encode_batch=1), model, own, 4 * ROWS, (SIDE**2,))
    tx = make_optimizer(OptimConfig(), lambda step: 1e-2, model.logical)
    step, _, init = assemble(model, NextToken(), tx, 1, FROZEN, cache)
    state, seen = init(model.init(0)), []
    for i in range(5):
        batch = some_batch(i % 2)
        key = np.zeros((ROWS, 2, 4), np.uint32)
        key[..., 0] = 1 + np.arange(2 * ROWS).reshape(ROWS, 2)
        key[..., 1] = i % 2
        page = 4 * np.arange(ROWS)[:, None] + 2 * (i % 2) + np.arange(2)
        page = (page if pages else np.full_like(page, -1)).astype(np.int32)
        placed = to_global(
            model.mesh, batch._replace(image_key=key, image_pages=page[..., None]), ROWS
        )
        state, metrics = step(state, placed)
        seen.append({name: np.asarray(x) for name, x in metrics.items()})
    return jax.device_get(state), seen


@pytest.mark.parametrize(
    "mesh, dtype",
    [
        pytest.param("data4_tensor2", "bfloat16", marks=pytest.mark.long),
        pytest.param("data8", "float32", marks=pytest.mark.long),
        ("one", "bfloat16"),
        pytest.param("fsdp8", "float32", marks=pytest.mark.long),
    ],
)
def test_kept_tokens_change_no_bit(mesh, dtype):
    """Tokens are cached before pooling, with their texture: other questions hit the same pages."""
    off, on = (run_steps(mesh, dtype, *of) for of in (("off", False), ("strict", True)))
    assert on[0].cache.pages.shape[-1] == MODEL.vision.width + CHANNELS
    for path, x in off[0].params.items():
        assert x.tobytes() == on[0].params[path].tobytes(), path
    assert [x["loss"].tobytes() for x in off[1]] == [x["loss"].tobytes() for x in on[1]]
    assert [float(x["cache/hit_rate"]) for x in on[1]] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"budget": 11}, "budget=11 is not .* 10 would do"),
        ({"budget": 100}, "at most 64; 64 would do"),
        ({"levels": 4}, "cells of 16 x 16 do not fill an image of 8 x 8"),
        ({"levels": 0}, "levels=0 must be at least 1"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"budget": 0}, "levels=3 is not read without a budget"),
        ({"connector.merge": 2}, "leave config.model.connector.merge at its default"),
        ({"connector.newline": True}, "leave config.model.connector.newline at its default"),
        ({"vision.class_token": True, "vision.keep_class_token": True}, "keep_class_token"),
        ({"vision.packed": True, "vision.merge_block": 1}, "leave config.model.vision.packed"),
    ],
)
def test_refused(changes, words):
    parts = {"vision": MODEL.vision, "connector": MODEL.connector, "relevance": ASKS}
    for name, value in changes.items():
        group, _, field = name.rpartition(".")
        group = group or "relevance"
        parts[group] = dataclasses.replace(parts[group], **{field: value})
    connector = dataclasses.replace(parts["connector"], relevance=parts["relevance"])
    with pytest.raises(ConfigError, match=words):
        built(vision=parts["vision"], connector=connector)


@pytest.mark.long
def test_relevance_above_frozen_blocks():
    """Features have texture channels, and a class token without them."""
    vision = dataclasses.replace(MODEL.vision, depth=3, class_token=True)
    mesh, batch = make_mesh(MeshConfig(1), jax.devices()[:1]), some_batch()
    whole, cut = (
        build_model(
            dataclasses.replace(MODEL, vision=dataclasses.replace(vision, frozen_blocks=frozen)),
            mesh,
        )
        for frozen in (0, 2)
    )
    params = whole.init(0)
    below = recut(params, 2)
    expected = jax.jit(whole.apply)(params, batch).hidden
    found = jax.jit(cut.apply)(below, batch).hidden
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    tower = vision_encoder_part(cut, mesh, cut.strategies["vision"])
    own = {path: x for path, x in below.items() if path.startswith("vision/")}
    features = jax.jit(lambda p, batch: tower.module(p)(batch))(own, batch)
    assert features.shape[-2:] == (encoder_tokens(cut.config), encoder_width(cut.config))
    rest = {path: x for path, x in below.items() if path not in own}
    fed = jax.jit(without_vision_encoder(cut).apply)(
        rest, batch._replace(pixels=None, features=features)
    ).hidden
    np.testing.assert_allclose(fed, expected, rtol=1e-4, atol=1e-5)
