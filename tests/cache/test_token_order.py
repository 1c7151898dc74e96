"""Orders of a grid's cells, against independent ways to say them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvlm.cache import token_order as orders
from jaxvlm.cache.token_order import (
    MERGE2X2,
    MORTON,
    ROW_MAJOR,
    TokenLayout,
    convert,
    inverse,
    key_with_order,
    permutation,
    pool,
    tiled,
)
from jaxvlm.data.images.image_files import tile_key
from jaxvlm.data.images.patches import Patching
from jaxvlm.grid_order import morton_code
from jaxvlm.models.connector import merge_patches
from jaxvlm.models.grid import places

SIDES = st.integers(1, 40)
GRIDS = [(1, 1), (1, 7), (4, 4), (3, 5), (6, 10), (8, 8), (12, 20), (2, 64), (31, 17)]


def interleaved(row, column):
    """Bits of row and column in turns, as text."""
    bits = max(row.bit_length(), column.bit_length(), 1)
    pairs = zip(f"{row:0{bits}b}", f"{column:0{bits}b}")
    return int("".join(a + b for a, b in pairs), 2)


def by_loops(block, height, width):
    """Cells block by block, in four loops."""
    return [
        (top + y) * width + left + x
        for top in range(0, height, block)
        for left in range(0, width, block)
        for y in range(block)
        for x in range(block)
    ]


def blocks_of(height, width, side):
    """The cells of each aligned block, as sets."""
    cells = np.arange(height * width).reshape(height, width)
    corners = itertools.product(range(0, height, side), range(0, width, side))
    return {frozenset(cells[y : y + side, x : x + side].flat) for y, x in corners}


@pytest.mark.parametrize("height, width", [*GRIDS, (1000, 3)])
def test_morton_is_bits_in_turns(height, width):
    cells = [divmod(i, width) for i in range(height * width)]
    expected = sorted(range(len(cells)), key=lambda i: interleaved(*cells[i]))
    np.testing.assert_array_equal(permutation(MORTON, height, width), expected)


def test_morton_of_large_numbers():
    row, column = np.int64([0, 1, 2**30, 2**30 + 5]), np.int64([2**30 + 3, 0, 1, 2**30])
    codes = morton_code(row, column)
    assert codes.tolist() == [interleaved(int(a), int(b)) for a, b in zip(row, column)]


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_blocks_are_four_loops(block):
    for high, wide in ((1, 1), (2, 3), (5, 1)):
        height, width = high * block, wide * block
        np.testing.assert_array_equal(
            permutation(tiled(block), height, width), by_loops(block, height, width)
        )


def test_names():
    known = {MORTON: "morton", ROW_MAJOR: "row_major", MERGE2X2: "merge2x2", tiled(5): "tiled(5)"}
    for order, name in known.items():
        assert str(order) == name and orders.parse(name) == order
        assert 0 <= order.code < 2**16
    # One order is one tag, whatever it is called.
    assert orders.parse("tiled(1)") == ROW_MAJOR and tiled(2) == MERGE2X2
    assert len({order.code for order in known}) == len(known)
    for wrong in ("zigzag", "tiled(0)", "tiled(70000)", "tiled"):
        with pytest.raises(ValueError):
            orders.parse(wrong)


@pytest.mark.parametrize("order", [MERGE2X2, tiled(4)])
def test_sides_that_blocks_do_not_fill_are_refused(order):
    with pytest.raises(ValueError, match=f"{order.block}, not 8 x [67]; pad"):
        permutation(order, 8, 7 if order == MERGE2X2 else 6)


@settings(max_examples=60, deadline=None)
@given(high=SIDES, wide=SIDES, seed=st.integers(0, 99), blocks=st.tuples(*[st.integers(0, 3)] * 2))
def test_there_and_back(high, wide, seed, blocks):
    source, target = (orders.Order(b) for b in blocks)
    height, width = 6 * high // 2 * 2, 6 * wide  # 1, 2 and 3 divide them
    tokens = np.random.default_rng(seed).normal(size=(2, height * width, 3))
    there = convert(tokens, source, target, height, width)
    np.testing.assert_array_equal(convert(there, target, source, height, width), tokens)
    # The token at an index is that of its cell, checked with the plain grid.
    plain = tokens[:, inverse(source, height, width)]
    np.testing.assert_array_equal(there, plain[:, permutation(target, height, width)])
    for order in (source, target):
        assert sorted(permutation(order, height, width)) == list(range(height * width))


def test_convert_is_one_gather():
    x = jnp.arange(2 * 64 * 3.0).reshape(2, 64, 3)

    def run(x):
        return convert(x, ROW_MAJOR, MORTON, 8, 8)

    names = [str(e.primitive) for e in jax.make_jaxpr(run)(x).eqns]
    assert sum("gather" in name or "pjit" in name or "take" in name for name in names) == 1, names
    np.testing.assert_array_equal(jax.jit(run)(x), run(np.asarray(x)))
    assert convert(x, MORTON, MORTON, 8, 8) is x
    with pytest.raises(ValueError, match="64 tokens do not fill a grid of 8 x 9"):
        convert(x, ROW_MAJOR, MORTON, 8, 9)


def test_merge2x2_is_transformers_patch_order():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    height, width, p = 4, 6, 2
    theirs = Qwen2VLImageProcessorPil(
        patch_size=p, merge_size=2, temporal_patch_size=1, do_rescale=False, do_normalize=False,
        do_resize=False, do_convert_rgb=False,
    )  # fmt: skip
    number = np.arange(height * width, dtype=np.uint8).reshape(height, width)
    pixels = np.repeat(np.kron(number, np.ones((p, p), np.uint8))[..., None], 3, axis=-1)
    patches = theirs(images=[pixels], return_tensors="np")["pixel_values"]
    assert np.ptp(patches, axis=1).max() == 0  # a patch shows its number
    np.testing.assert_array_equal(patches[:, 0], permutation(MERGE2X2, height, width))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_the_house_counts_in_the_same_orders(block):
    """Patches as they are cut, as they are counted, and as the connector joins them."""
    height, width, p = 2 * block, 3 * block, 2
    order = permutation(tiled(block), height, width)
    number = np.arange(height * width, dtype=np.uint8).reshape(height, width)
    pixels = np.repeat(np.kron(number, np.ones((p, p), np.uint8))[..., None], 3, axis=-1)
    for layout in ("hwc", "cthw"):
        cut = Patching(p, block, layout=layout).cut(pixels)
        np.testing.assert_array_equal(cut[:, 0], order)
    at = places(jnp.asarray([[[1, height, width]]]), height * width, block)
    np.testing.assert_array_equal(np.asarray(at.row * width + at.column)[0], order)
    side = 2 * block
    tokens = jnp.arange(side**2, dtype=jnp.float32).reshape(1, -1, 1)
    joined = merge_patches(tokens, block)
    blocks = convert(tokens, ROW_MAJOR, tiled(block), side, side)
    np.testing.assert_array_equal(np.asarray(joined).reshape(-1), np.asarray(blocks).reshape(-1))


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_blocks_follow_each_other_exactly_where_they_fill_the_grid(levels):
    """All grids up to 17 x 17: the reshape is right where it is allowed, and nowhere else."""
    side = 2**levels
    for height, width in itertools.product(range(1, 18), repeat=2):
        order = permutation(MORTON, height, width)
        runs = {frozenset(order[i : i + side**2]) for i in range(0, len(order), side**2)}
        whole = height % side == 0 and width % side == 0
        full = all(len(run) == side**2 for run in runs)
        assert (full and runs == blocks_of(height, width, side)) == whole
        if not whole:
            with pytest.raises(ValueError, match=f"do not fill a grid of {height} x {width}"):
                pool(np.zeros((height * width, 1)), height, width, levels)


@pytest.mark.parametrize(
    "height, width, levels", [(8, 8, 3), (4, 12, 2), (24, 40, 3), (6, 10, 1), (3, 5, 0)]
)
def test_pool_is_the_mean_of_windows(height, width, levels):
    side = 2**levels
    grid = np.random.default_rng(0).normal(size=(2, height, width, 3))
    windows = grid.reshape(2, height // side, side, width // side, side, 3).mean((2, 4))
    coarse = (height // side, width // side)
    tokens = convert(grid.reshape(2, -1, 3), ROW_MAJOR, MORTON, height, width)
    pooled = pool(tokens, height, width, levels)
    back = convert(pooled, MORTON, ROW_MAJOR, *coarse)
    np.testing.assert_allclose(back.reshape(windows.shape), windows, rtol=1e-12)
    # Level by level it is the same grid.
    if levels > 1:
        half = pool(tokens, height, width, 1)
        rest = pool(half, height // 2, width // 2, levels - 1)
        np.testing.assert_allclose(rest, pooled, rtol=1e-12)


def test_keys():
    key = np.uint32([1, 2, 3, 4])
    assert key_with_order(key, ROW_MAJOR) is key
    made = [key_with_order(key, order) for order in (MORTON, MERGE2X2, tiled(3), tiled(258))]
    made += [tile_key(key, tile) for tile in (0, 1, 2, 3, 258)]
    assert len({x.tobytes() for x in made}) == len(made)
    assert all(x.dtype == np.uint32 and x.shape == (4,) for x in made)
    other = key_with_order(np.uint32([1, 2, 3, 5]), MORTON)
    assert other.tobytes() != made[0].tobytes()
    for x, order in zip(made, (MORTON, MERGE2X2, tiled(3), tiled(258))):
        np.testing.assert_array_equal(key_with_order(x, order), key)
    # Stored tokens outlive a process: the key is the same everywhere.
    assert made[0].tolist() == key_with_order(key.copy(), orders.parse("morton")).tolist()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("order", [ROW_MAJOR, MORTON, MERGE2X2, tiled(3), tiled(6)])
def test_tokens_are_found_in_whatever_order_they_were_kept(order, first):
    """A class token stays where it is."""
    side = 6
    made = np.random.default_rng(0).normal(size=(first + side**2, 3)).astype(np.float32)
    key = np.uint32([1, 2, 3, 4])
    there = TokenLayout(order, ROW_MAJOR, side)
    kept = {there.cache_key(key).tobytes(): there.to_cache(made)}
    np.testing.assert_array_equal(there.from_cache(there.to_cache(made)), made)
    np.testing.assert_array_equal(there.to_cache(made)[:first], made[:first])
    grid = made[first:].reshape(side, side, 3)
    expected = [grid[y, x] for y, x in np.stack(np.divmod(permutation(order, side, side), side)).T]
    np.testing.assert_array_equal(there.to_cache(made)[first:], expected)
    for other in (ROW_MAJOR, MORTON, MERGE2X2, tiled(3)):
        for own in (ROW_MAJOR, MORTON):
            here = TokenLayout(other, own, side)
            found = here.find(kept.get, here.cache_key(key).tobytes())
            np.testing.assert_array_equal(found, TokenLayout(other, ROW_MAJOR, side).to_cache(made))
            assert here.find(kept.get, here.cache_key(key + 1).tobytes()) is None
    assert (
        there.find(kept.get, there.cache_key(key).tobytes()) is kept[there.cache_key(key).tobytes()]
    )
