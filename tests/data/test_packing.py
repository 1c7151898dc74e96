"""Packing: each record once, none cut, order free of devices and hosts, children apart."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import packing, tokenize
from jaxvlm.data.conversations.collate import Layout, collate
from jaxvlm.data.conversations.packing import SequenceOrder
from jaxvlm.data.errors import DataError
from jaxvlm.data.tokenizer import chat_tokenizer
from tests.data.conftest import record

TOKENIZER = chat_tokenizer.build(["what color is the shape? red is it a circle"])
PATCHES = 5


@st.composite
def albums(draw, least=8):
    """Records with 0 to 2 images from a few, and questions of different length."""
    images = st.sampled_from(["a", "b", "c", "d", "e"])
    one = st.tuples(st.lists(images, max_size=2), st.integers(1, 8))
    rows = draw(st.lists(one, min_size=least, max_size=40))
    return [record(i, paths, "circle " * words) for i, (paths, words) in enumerate(rows)]


def build(records, max_length=40, max_images=3, share=True):
    corpus, problems = tokenize.encode(records, TOKENIZER, PATCHES)
    assert not problems
    pieces, long = packing.build_pieces(
        corpus, TOKENIZER.image_id, packing.Limits(max_length, max_images), share
    )
    return corpus, pieces, long


def records_of(pieces, chosen):
    found = [pieces.record[pieces.start[i] : pieces.start[i + 1]] for i in chosen]
    return [int(r) for part in found for r in part if r >= 0]


def config(**more):
    return DataConfig(**{"max_length": 40, "max_images_per_sequence": 3, "batch_size": 2} | more)


fast = hypothesis.settings(deadline=None, max_examples=40)


@fast
@hypothesis.given(albums(), st.booleans(), st.integers(12, 40), st.integers(0, 3))
def test_every_record_is_in_one_piece_that_fits(records, share, max_length, max_images):
    corpus, pieces, long = build(records, max_length, max_images, share)
    placed = records_of(pieces, range(len(pieces.num_tokens)))
    assert sorted(placed + [i for i, *_ in long]) == list(range(len(records)))
    assert (pieces.num_tokens <= max_length).all()
    assert (pieces.num_images <= max_images).all()
    for i, *_ in long:
        assert corpus.length[i] > max_length or len(corpus.images[i]) > max_images
    if not share:
        assert (pieces.record >= 0).all()


@fast
@hypothesis.given(albums(), st.integers(0, 3), st.sampled_from([1, 2, 8]), st.booleans())
def test_a_pass_is_every_record_once(records, seed, virtual_shards, packed):
    _, pieces, _ = build(records)
    hypothesis.assume(len(pieces.num_tokens) >= 2)
    order = SequenceOrder(pieces, config(virtual_shards=virtual_shards, packing=packed), seed)
    assert order.num_shards % 2 == 0
    assert all(len(shard) for shard in order.shards)
    first_pass = []
    for step in range(order.steps_per_epoch):
        for r in range(2):
            row = order.sequence(step, r)
            assert pieces.num_tokens[row.pieces].sum() <= 40
            assert pieces.num_images[row.pieces].sum() <= 3
            assert packed or len(row.pieces) == 1
            first_pass += records_of(pieces, row.pieces) if row.pass_ == 0 else []
    assert sorted(first_pass) == list(range(len(records)))


@fast
@hypothesis.given(albums(), st.integers(0, 3))
def test_later_passes_too_and_from_any_step(records, seed):
    _, pieces, _ = build(records)
    hypothesis.assume(len(pieces.num_tokens) >= 2)
    whole = SequenceOrder(pieces, config(), seed)
    steps = 4 * whole.steps_per_epoch + 3
    seen = [[whole.sequence(step, r) for r in range(2)] for step in range(steps)]
    for v in range(whole.num_shards):
        r, phase = divmod(v, whole.turns)
        visits = [seen[step][r] for step in range(phase, steps, whole.turns)]
        for pass_ in range(visits[-1].pass_):
            found = np.concatenate([row.pieces for row in visits if row.pass_ == pass_])
            assert sorted(found.tolist()) == whole.shards[v].tolist()
    for step in (steps - 1, steps // 2, 0):  # a fresh process that begins here
        fresh = SequenceOrder(pieces, config(), seed)
        for r in (1, 0):
            row = fresh.sequence(step, r)
            assert row.pass_ == seen[step][r].pass_
            np.testing.assert_array_equal(row.pieces, seen[step][r].pieces)


@fast
@hypothesis.given(albums(), st.integers(0, 3), st.booleans())
def test_an_image_stays_in_its_shard(records, seed, share):
    _, pieces, _ = build(records, share=share)
    members = packing.units(pieces, 1)
    shards = packing.assign(pieces, members, packing.effective_shards(8, 1, len(members)), seed)
    home = {}
    for number, shard in enumerate(shards):
        for piece in shard.tolist():
            if pieces.images[piece]:
                assert home.setdefault(pieces.images[piece], number) == number


def test_shards_are_even_and_the_seed_matters():
    records = [record(i, [f"{i}"], "circle " * (1 + i % 7)) for i in range(400)]
    _, pieces, _ = build(records)
    members = packing.units(pieces, 4)
    assert packing.effective_shards(256, 4, len(members)) == 100
    deals = [packing.assign(pieces, members, 20, seed) for seed in (0, 0, 1)]
    for a, b in zip(deals[0], deals[1]):
        np.testing.assert_array_equal(a, b)
    assert any(a.tolist() != b.tolist() for a, b in zip(deals[0], deals[2]))
    loads = [int(pieces.num_tokens[shard].sum()) for shard in deals[0]]
    assert max(loads) - min(loads) <= pieces.num_tokens.max()


def test_too_few_pieces_is_an_error():
    _, pieces, _ = build([record(i, ["a"]) for i in range(3)])
    with pytest.raises(DataError, match="lower it to 1"):
        SequenceOrder(pieces, config(), 0)


def visible(batch):
    """bool[B, T, S]: the mask rule, and causality."""
    segment, parent = batch.segment, batch.parent
    same = segment[:, :, None] == segment[:, None]
    if parent is not None:
        same |= (parent[:, :, None] == segment[:, None]) & (parent[:, :, None] > 0)
    at = np.arange(segment.shape[1])
    return same & (segment[:, :, None] > 0) & (at[:, None] >= at[None])


@fast
@hypothesis.given(albums(), st.integers(0, 3))
def test_a_shared_record_is_seen_as_if_alone(records, seed):
    """Ids, positions, loss and what each token sees: as in a row of its own."""
    corpus, pieces, _ = build(records)
    hypothesis.assume(len(pieces.num_tokens) >= 2)
    order = SequenceOrder(pieces, config(), seed)
    rows = [order.sequence(0, r).pieces for r in range(2)] + [np.zeros(0, np.int32)]
    shared = bool((pieces.record < 0).any())
    layout = Layout(TOKENIZER.image_id, TOKENIZER.pad_id, 3, shared, "prefix")
    batch, meta, places = collate(corpus, pieces, rows, 40, layout)
    mask = visible(batch)
    assert not batch.segment[2].any()
    assert (batch.tokens[batch.segment == 0] == TOKENIZER.pad_id).all()
    held = 0
    for row, found in enumerate(meta.by_sequence()):
        for segment, source in found:
            last = np.flatnonzero(batch.segment[row] == segment)[-1]
            seen = np.flatnonzero(mask[row, last])
            one = slice(corpus.first[source], corpus.last[source])
            repeats = np.where(corpus.tokens[one] == TOKENIZER.image_id, PATCHES, 1)
            ids = np.repeat(corpus.tokens[one], repeats)
            np.testing.assert_array_equal(batch.tokens[row, seen], ids)
            np.testing.assert_array_equal(batch.positions[row, 0, seen], np.arange(len(ids)))
            loss = np.repeat(corpus.loss[one], repeats)
            np.testing.assert_array_equal(batch.loss_weight[row, seen], loss)
            # Where loss lies, the token before it in the row is the one before it in the record.
            for t in np.flatnonzero(batch.loss_weight[row]):
                assert batch.positions[row, 0, t - 1] == batch.positions[row, 0, t] - 1
            held += 1
    assert held == len(meta.record) == sum(len(records_of(pieces, row)) for row in rows)
    starts = batch.image_start
    assert (starts >= 0).sum() == len(places.row)
    for row, slot in zip(places.row, places.slot):
        begin = starts[row, slot]
        span = slice(begin, begin + PATCHES)
        assert (batch.tokens[row, span] == TOKENIZER.image_id).all()
        assert (batch.bidirectional[row, span] == slot + 1).all()
    assert (batch.bidirectional > 0).sum() == PATCHES * len(places.row)


def test_sharing_encodes_an_image_once():
    records = [record(i, ["a"]) for i in range(3)] + [record("b", ["b"])]
    corpus, pieces, _ = build(records, max_length=60)
    assert len(pieces.num_tokens) == 2
    assert pieces.record.tolist() == [-1, 0, 1, 2, 3]
    assert pieces.offset.tolist() == [0, 6, 6, 6, 0]  # <user> and five patches
    assert pieces.num_tokens[0] == 6 + 3 * (corpus.length[0] - 6)
    _, apart, _ = build(records, share=False)
    assert apart.num_images.sum() == 4


def test_a_record_without_header_before_its_loss_is_not_shared():
    bare = chat_tokenizer.ChatTokenizer(
        TOKENIZER.backend, "{% for m in messages %}{{ m.content }}{% endfor %}", TOKENIZER.special
    )
    records = [record(i, ["a"], question="") for i in range(2)]
    corpus, _ = tokenize.encode(records, bare, PATCHES)
    assert corpus.loss[1]  # right after the image
    pieces, _ = packing.build_pieces(corpus, bare.image_id, packing.Limits(40, 3), True)
    assert (pieces.record >= 0).all()


@hypothesis.given(st.integers(8, 5000), st.integers(1, 9))
def test_buckets(max_length, count):
    lengths = packing.buckets(max_length, count)
    assert lengths[-1] == max_length
    assert len(lengths) <= count
    assert list(lengths) == sorted(set(lengths))
    assert all(length % 8 == 0 for length in lengths[:-1])


def test_each_seed_pass_and_shard_has_an_order_of_its_own():
    pieces = np.arange(50, dtype=np.int32)
    orders = {
        tuple(packing.shuffled(pieces, seed, pass_, shard).tolist())
        for seed in (0, 1)
        for pass_ in (0, 1)
        for shard in (0, 1)
    }
    assert len(orders) == 8 and all(sorted(order) == pieces.tolist() for order in orders)
