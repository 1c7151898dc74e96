"""Pages that give their memory back, and have it again: rows are lost, and no bit changes."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from test_encode import PER_ROW, ROWS, Made, assert_same_bits, turns

from jaxvlm.cache.state import pages_after_halving, renumber_pages
from jaxvlm.config import ConfigError
from jaxvlm.train.cache_memory import CacheMemory

OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_an_image_is_there_whole_or_not_at_all():
    """Against a walk through the pages, one by one."""
    rng = np.random.default_rng(0)
    for shards, own, times in ((1, 7, 1), (4, 10, 1), (8, 9, 3), (2, 8, 2)):
        count = shards * own
        room, kept = pages_after_halving(count, shards, times), own >> times
        assert room == kept * shards
        first = rng.integers(-1, count - 2, (5, 6))
        pages = np.where(first[..., None] < 0, -1, first[..., None] + np.arange(3))
        pages[0, :, 2] = -1
        found = np.asarray(renumber_pages(jax.numpy.asarray(pages, np.int32), count, room, shards))
        where = {s * own + i: s * kept + i for s in range(shards) for i in range(kept)}
        for mine, there in zip(pages.reshape(-1, 3), found.reshape(-1, 3)):
            asked = [p for p in mine if p >= 0]
            fits = all(p in where for p in asked)
            assert list(there) == [where[p] if p >= 0 and fits else -1 for p in mine]
        same = renumber_pages(jax.numpy.asarray(pages, np.int32), count, count, shards)
        np.testing.assert_array_equal(same, pages)


def room_of(made, times=1):
    lie = made.cache.shardings
    return CacheMemory(
        [
            jax.jit(functools.partial(made.cache.init, n), out_shardings=lie)
            for n in range(times + 1)
        ]
    )


def run(mesh, policy, dtype):
    """Four steps with all pages, four with half of them, four with all again."""
    made = Made(mesh, policy, dtype=dtype, min_pages_fraction=0.5)
    room, seen = room_of(made), []
    state = made.init(made.model.init(0))
    for step, batch in enumerate(turns(12, policy != "off")):
        if step == 4:
            state = room.retry_smaller(state, OUT_OF_MEMORY)
        if step == 8:
            room.grow(state)
        state = room.restored(state)
        assert state.cache.pages.shape[0] == ROWS * PER_ROW // (1 + (4 <= step < 8))
        state, metrics = made.step(state, made.place(batch))
        seen.append((float(metrics["loss"]), float(metrics["cache/hit_rate"])))
    assert int(state.cache.step) == 12
    return state, seen


@pytest.mark.parametrize(
    "mesh, dtype, half",
    [
        # Two sets of images are shown in turn: one lies in the first half of a row's pages.
        ("data8", "float32", [1, 0]),
        ("fsdp8", "bfloat16", [1, 0]),
        # Here a shard has two rows, and the first one's pages are left; two rows show nothing.
        ("data4_tensor2", "float32", [2 / 3, 2 / 3]),
        ("data4_tensor2", "bfloat16", [2 / 3, 2 / 3]),
    ],
)
@pytest.mark.long
def test_half_of_the_pages_and_all_again_change_no_bit(mesh, dtype, half):
    """Against a run that keeps nothing, in arrays of the same sizes."""
    on, off = run(mesh, "strict", dtype), run(mesh, "off", dtype)
    assert_same_bits(on[0].params, off[0].params)
    assert [loss for loss, _ in on[1]] == [loss for loss, _ in off[1]]
    found = [found for _, found in on[1]]
    assert found == pytest.approx([0, 0, 1, 1, 0, 0, *half, 0, 0, 1, 1])


def test_what_can_not_give_anything_back():
    made = Made("one", min_pages_fraction=0.5)
    state, room = made.init(made.model.init(0)), room_of(made)
    with pytest.raises(ValueError, match="another"):
        room.retry_smaller(state, ValueError("another"))
    assert not state.cache.pages.is_deleted() and room.halved == 0
    state = room.retry_smaller(state, OUT_OF_MEMORY)
    assert state.cache.pages.shape[0] == ROWS * PER_ROW // 2
    with pytest.raises(jax.errors.JaxRuntimeError):  # it is as small as it may be
        room.retry_smaller(state, OUT_OF_MEMORY)
    assert room.evict(state) and not room.evict(state)
    with pytest.raises(jax.errors.JaxRuntimeError):  # the state is consumed
        room.retry_smaller(state, OUT_OF_MEMORY)
    room.grow(state)  # what is not there may grow too
    assert room.halved == 0 and room.restored(state).cache.pages.shape[0] == ROWS * PER_ROW
    with pytest.raises(jax.errors.JaxRuntimeError):  # nothing to give
        CacheMemory().retry_smaller(made.init(made.model.init(0)), OUT_OF_MEMORY)
    with pytest.raises(ConfigError, match=r"min_pages_fraction=0\.125: 4 pages per data shard"):
        Made("data8", min_pages_fraction=0.125)
    for name, value in (("min_pages_fraction", 0.5), ("evict_for_eval", True)):
        with pytest.raises(ConfigError, match=f"{name}=.* with a trained vision encoder"):
            Made("one", "lazy", (), bound=2, **{name: value})
