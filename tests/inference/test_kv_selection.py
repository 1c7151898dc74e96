"""What is kept, against a plain sort, kvpress and EffiVLM-Bench; alone and among neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import (
    LAYERS,
    PLACES,
    QUERIES,
    WINDOW,
    B,
    K,
    N,
    S,
    golden,
    queries_and_keys,
    weights_of_layers,
)

from jaxvlm.config import ConfigError
from jaxvlm.inference import kv_policy
from jaxvlm.inference.kv_selection import (
    PRIORITIES,
    Observed,
    keep,
    observed_queries,
    priorities,
    selection_keys,
)
from jaxvlm.nn.attention_rows import attention_rows

kept_of = jax.jit(keep)
allocate = jax.jit(kv_policy.allocate, static_argnums=0)
scored = jax.jit(attention_rows)


def ranked(scorer, seen):
    """Priorities, compiled."""
    return jax.jit(lambda s: priorities(scorer, s._replace(num_kv_heads=K)))(seen)


def firsts(scores, count, valid, recent):
    """The kept places of each prompt and head, as lists."""
    order = np.asarray(kept_of(scores, count, valid, recent))
    assert np.all(np.sort(order, axis=-1) == np.arange(order.shape[-1]))  # none is lost
    return [[head[:n].tolist() for head in prompt] for prompt, n in zip(order, count, strict=True)]


def plainly(scores, count, valid, recent):
    """The same by sorting tuples."""
    places = [p for p in range(len(valid)) if valid[p]]
    newest = set(places[len(places) - recent :]) if recent else set()
    ranked = sorted(places, key=lambda p: (p in newest, scores[p], p), reverse=True)
    return sorted(ranked[:count])


numbers = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.0000001, np.inf, -np.inf, 3.0])


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_keep_is_a_sort_by_score_then_place(data):
    scores, count, valid, recent = [], [], [], []
    for _ in range(2):
        valid.append(data.draw(st.lists(st.booleans(), min_size=9, max_size=9)))
        scores.append([data.draw(st.lists(numbers, min_size=9, max_size=9)) for _ in range(2)])
        count.append(data.draw(st.integers(0, sum(valid[-1]))))
        recent.append(data.draw(st.integers(0, 9)))
    recent = [min(r, sum(v)) for r, v in zip(recent, valid, strict=True)]
    run = (np.array(scores, np.float32), np.array(count), np.array(valid), np.array(recent))
    for b, prompt in enumerate(firsts(*run)):
        for h in range(2):
            given_ = run[0][b, h], count[b], valid[b], recent[b]
            assert prompt[h] == plainly(*given_)


def test_a_score_that_is_no_number_comes_last():
    scores = np.array([[[1, np.nan, 0, 2]]], np.float32)
    valid = np.array([[True, True, True, False]])
    assert firsts(scores, np.array([2]), valid, np.array([0])) == [[[0, 2]]]
    assert firsts(scores, np.array([3]), valid, np.array([0])) == [[[0, 1, 2]]]


def seen_by(left=0, order=(0, 1), visual=range(5, 30)):
    """What scorers see of two prompts in this order, with ``left`` places of padding before."""
    q, k = (np.pad(x[list(order)], ((0, 0), (left, 0), (0, 0), (0, 0))) for x in queries_and_keys())
    place = np.arange(S + left)
    valid = jnp.broadcast_to(place >= left, (len(order), S + left))
    allowed = (place <= place[-WINDOW:, None]) & (place >= left)
    allowed = np.broadcast_to(allowed, (len(order), *allowed.shape))
    is_visual = jnp.asarray(np.isin(place - left, list(visual))) & valid
    last, after = observed_queries(valid, is_visual, WINDOW)
    keys = selection_keys(jax.random.key(0), jnp.array([7, 9])[jnp.array(order)], jnp.int32(3))
    rows = scored(q[:, -WINDOW:], k, allowed)
    return Observed(valid, K, rows, last, after, keys)


@pytest.mark.parametrize("scorer", PRIORITIES)
def test_what_a_prompt_keeps_is_its_own(scorer):
    def chosen(left, order):
        seen = seen_by(left, order)
        scores = ranked(scorer, seen)
        n = np.full(len(order), 15)
        kept = firsts(scores, n, seen.valid, np.full(len(order), 2))
        return [[[p - left for p in head] for head in prompt] for prompt in kept]

    first, second = chosen(0, (0, 1))
    assert all(head[-2:] == [S - 2, S - 1] for head in (*first, *second))
    assert chosen(0, (1, 0)) == [second, first]
    assert chosen(0, (1,)) == [second]
    assert chosen(6, (1, 0)) == [second, first]
    assert (first != second) == (scorer != "window")


@pytest.mark.parametrize("left", [0, 7])
def test_snapkv_and_the_window_keep_what_kvpress_keeps(left):
    expected = golden("kv_kvpress")
    case = expected["snapkv"][1]
    seen = seen_by(left)
    none = np.zeros(B, np.int32)
    for kept, scorer in [(case["kept"], "snapkv"), *((x, "window") for x in expected["streaming"])]:
        n = np.full(B, len(kept[0][0]))
        ours = np.array(firsts(ranked(scorer, seen), n, seen.valid, none)) - left
        assert ours.tolist() == kept, scorer


def test_vl_cache_keeps_what_effivlm_bench_keeps():
    weights = weights_of_layers()
    valid = np.ones((LAYERS, PLACES), bool)  # its layers are prompts here
    rows = jnp.asarray(weights).reshape(LAYERS, K, N // K, QUERIES, PLACES)
    seen = Observed(valid, K, rows, after_vision=np.ones((LAYERS, QUERIES), bool))
    scores = ranked("vl_cache", seen)
    for case in golden("kv_effivlm")["cases"]:
        # It keeps the most recent places on top of a layer's share.
        recent = [max(1, int(share * PLACES * 0.1)) for share in case["shares"]]
        count = [len(layer[0]) for layer in case["kept"]]
        assert firsts(scores, np.array(count), valid, np.array(recent)) == case["kept"]


def test_random_numbers_depend_on_seed_example_and_layer():
    seen = seen_by()
    known = np.asarray(ranked("random", seen))
    assert len(np.unique(known)) == known.size and known.min() >= 0 and known.max() < 1
    for key, ids, layer in ((1, [7, 9], 3), (0, [8, 9], 3), (0, [7, 9], 4)):
        keys = selection_keys(jax.random.key(key), jnp.array(ids), jnp.int32(layer))
        other = np.asarray(ranked("random", seen._replace(keys=keys)))
        assert not np.any(other[0] == known[0])
        assert np.all(other[1] == known[1]) == (key == 0 and layer == 3)


def test_queries_after_the_last_visual_token_are_observed():
    valid = jnp.array([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8, [1] * 8, [0] * 8], bool)
    visual = jnp.array([[0, 0, 1, 1, 1, 0, 0, 0], [0] * 8, [0] * 5 + [1] * 3, [0] * 8], bool)
    last, after = observed_queries(valid, visual, 4)
    np.testing.assert_array_equal(last, [[1] * 4, [1] * 4, [1] * 4, [0] * 4])
    np.testing.assert_array_equal(after, [[0, 1, 1, 1], [1] * 4, [0, 0, 0, 1], [0] * 4])
    assert observed_queries(valid, visual, 20)[0].shape == (4, 8)


def test_presets_are_pairs_of_a_scorer_and_an_allocator():
    m, density = jnp.array([200, 90]), jnp.array([[0.625, 0.1], [0.125, 0.1], [0.25, 0.1]])
    kept = {}
    for name in kv_policy.PRESETS:
        policy = kv_policy.preset(name, budget=0.2)._replace(queries=5)
        kept[name] = np.asarray(allocate(policy, m, density)).T.tolist()
    assert kept["vl_cache"] == [[75, 15, 30], [18, 18, 18]]
    assert kept["snapkv"] == kept["window"] == kept["random"] == [[40] * 3, [18] * 3]
    assert kept["pyramid"] == [[40] * 3, [18] * 3]  # the last layer's would be below the window
    steep = kv_policy.preset("pyramid", budget=0.2, queries=1)
    assert np.asarray(allocate(steep, m, density))[:, 0].tolist() == [78, 40, 2]
    clipped = kv_policy.preset("vl_cache", budget=0.6, clip=True)
    assert np.asarray(allocate(clipped, m, density))[:, 0].tolist() == [200, 45, 90]


def test_a_tenth_of_the_kept_places_are_recent():
    policy = kv_policy.preset("vl_cache", budget=0.1)
    count = jnp.array([0, 1, 9, 10, 29, 3000])
    assert kv_policy.recent_places(policy, count).tolist() == [0, 1, 1, 1, 2, 300]
    assert not np.any(kv_policy.recent_places(policy._replace(recent=0.0), count))
    assert kv_policy.recent_places(policy._replace(recent=1.0), count).tolist() == count.tolist()


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("h2o", {}, "kv='h2o'; known: vl_cache"),
        ("vl_cache", {"budget": 0.0}, "kv_budget=0.0; it is a share"),
        ("vl_cache", {"budget": 1.5}, "kv_budget=1.5"),
        ("vl_cache", {"recent": -0.1}, "kv_recent=-0.1"),
        ("vl_cache", {"threshold": 2.0}, "kv_threshold=2.0"),
        ("snapkv", {"queries": 0}, "kv_queries=0"),
        ("snapkv", {"clip": True}, "kv_clip is read by kv_allocator=density"),
        ("snapkv", {"scorer": "taste"}, "kv_scorer='taste'"),
    ],
)
def test_a_policys_values_are_checked(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        kv_policy.preset(name, **changes)


@pytest.mark.parametrize(
    "name, places, changes, line",
    [
        ("snapkv", 280, {}, "all of them among the last 50"),
        ("snapkv", 280, {"queries": 8}, ""),
        ("snapkv", 2000, {}, ""),
        ("pyramid", 2000, {}, "too few for a pyramid"),
        ("pyramid", 2000, {"queries": 4}, ""),
        ("vl_cache", 40, {}, ""),
        ("window", 40, {}, ""),
    ],
)
def test_what_keeps_too_little_is_said(name, places, changes, line):
    found = kv_policy.without_scores(kv_policy.preset(name, **changes), places, 12)
    assert line in found and bool(line) == bool(found)
