"""Packing: each record once, none cut, order free of devices and hosts, children apart."""

import collections
import hashlib
import itertools
import json
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats

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
@hypothesis.given(albums(), st.integers(0, 3), st.sampled_from([1, 2, 3, 8]), st.booleans())
def test_a_pass_is_every_record_once(records, seed, rows, packed):
    _, pieces, _ = build(records)
    hypothesis.assume(len(pieces.num_tokens) >= rows)
    order = SequenceOrder(pieces, config(batch_size=rows, packing=packed), seed)
    first_pass = []
    for step in range(order.steps_per_epoch):
        for r in range(rows):
            row = order.sequence(step, r)
            assert len(row.pieces) and row.row == r
            assert pieces.num_tokens[row.pieces].sum() <= 40
            assert pieces.num_images[row.pieces].sum() <= 3
            assert packed or len(row.pieces) == 1
            first_pass += records_of(pieces, row.pieces) if row.pass_ == 0 else []
    assert sorted(first_pass) == list(range(len(records)))


@fast
@hypothesis.given(albums(), st.integers(0, 3), st.sampled_from([1, 2, 5]))
def test_later_passes_too_and_from_any_step(records, seed, rows):
    _, pieces, _ = build(records)
    hypothesis.assume(len(pieces.num_tokens) >= rows)
    given = config(batch_size=rows)
    whole = SequenceOrder(pieces, given, seed)
    assert sorted(np.concatenate([whole.pieces_of_row(r) for r in range(rows)]).tolist()) == list(
        range(len(pieces.num_tokens))
    )
    steps = 4 * whole.steps_per_epoch + 3
    seen = [[whole.sequence(step, r) for r in range(rows)] for step in range(steps)]
    for r in range(rows):
        for pass_ in range(seen[-1][r].pass_):
            found = [row[r].pieces for row in seen if row[r].pass_ == pass_]
            assert len(found) == whole.sequences_of_pass(r)
            assert sorted(np.concatenate(found).tolist()) == sorted(whole.pieces_of_row(r).tolist())
    for step in (steps - 1, steps // 2, 0):  # a fresh process that begins here
        fresh = SequenceOrder(pieces, given, seed)
        for r in reversed(range(rows)):
            row = fresh.sequence(step, r)
            assert row.pass_ == seen[step][r].pass_
            np.testing.assert_array_equal(row.pieces, seen[step][r].pieces)


@fast
@hypothesis.given(albums(), st.integers(0, 9))
def test_all_rows_and_seeds_have_the_same_sequences(records, seed):
    """An index that is stored with them holds for any batch size that they fill."""
    _, pieces, _ = build(records)
    planned = packing.plan(pieces, config())
    for rows in range(1, len(planned) + 1):
        order = SequenceOrder(pieces, config(batch_size=rows), seed)
        for given in (None, planned):
            again = SequenceOrder(pieces, config(batch_size=rows), seed, planned=given)
            for r in range(rows):
                assert order.sequence(7, r).pieces.tolist() == again.sequence(7, r).pieces.tolist()
        np.testing.assert_array_equal(order.sequences.piece, planned.piece)
        if len(planned) > 1:
            starts = {SequenceOrder(pieces, config(), key)._shift for key in range(40)}
            assert len(starts) > 1, "which rows have fewer records depends on the seed"
        counts = [order.sequences_of_pass(r) for r in range(rows)]
        assert max(counts) - min(counts) <= 1 and sum(counts) == len(planned)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("sets", "of_each", "rows"), [(400, 5, 4), (60, 40, 16), (16, 50, 16)])
def test_an_image_stays_in_its_row_but_for_those_at_its_ends(sets, of_each, rows, packed):
    """Records of one image in pieces of their own: few images are in a second row."""
    total = sets * of_each
    records = [record(i, [f"{i % sets}"], "circle " * (1 + i % 7)) for i in range(total)]
    _, pieces, _ = build(records, share=False)
    order = SequenceOrder(pieces, config(batch_size=rows, packing=packed), 0)
    homes = {}
    for r in range(rows):
        for piece in order.pieces_of_row(r).tolist():
            homes.setdefault(pieces.images[piece], set()).add(r)
    assert len(homes) == sets
    # Each row's end cuts those that are mixed there, and sequences that are still open.
    cut = packing.NEAR + 2 if packed else 1
    assert sum(len(found) - 1 for found in homes.values()) <= rows * cut
    loads = [int(pieces.num_tokens[order.pieces_of_row(r)].sum()) for r in range(rows)]
    assert max(loads) <= 1.2 * min(loads)


def test_the_order_is_the_one_of_its_version():
    """Runs resume by step: where this fails, raise ORDER_VERSION, and put the new numbers here."""
    records = [record(i, [f"{i % 30}"] * (i % 3), "circle " * (1 + i % 7)) for i in range(200)]
    _, pieces, _ = build(records)
    found = []
    for packed in (True, False):
        order = SequenceOrder(pieces, config(batch_size=4, packing=packed), 7)
        rows = [order.sequence(step, r).pieces.tolist() for step in (0, 3, 1000) for r in range(4)]
        found.append(hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16])
    assert (packing.ORDER_VERSION, *found) == (2, "89060b21239b7cca", "45d1901c94a53184")


def test_records_of_an_image_are_apart():
    """In storage they follow each other; in a sequence and a step they should not."""
    records = [record(i, [f"{i // 8}"], "circle") for i in range(4000)]
    _, pieces, _ = build(records, share=False)
    order = SequenceOrder(pieces, config(batch_size=4), 0)
    alike = [
        len(images) - len(set(images))
        for step in range(order.steps_per_epoch)
        for images in [[pieces.images[i] for r in range(4) for i in order.sequence(step, r).pieces]]
    ]
    together = sum(len(order.sequence(0, r).pieces) for r in range(4))
    assert together >= 8 and np.mean(alike) <= 0.3 * together


def test_few_records_still_fill_a_batch():
    """They would fit into fewer sequences than the batch has."""
    _, pieces, _ = build([record(i, [], "red") for i in range(5)])
    assert len(packing.plan(pieces, config())) < 4
    order = SequenceOrder(pieces, config(batch_size=4), 0)
    held = [records_of(pieces, order.sequence(0, r).pieces) for r in range(4)]
    assert all(held) and sorted(itertools.chain(*held)) == list(range(5))


@fast
@hypothesis.given(st.integers(1, 500), st.lists(st.integers(0, 2**40), max_size=4))
def test_a_permutation_has_each_place_once(count, key):
    assert sorted(packing.permuted(i, count, *key) for i in range(count)) == list(range(count))


@hypothesis.given(st.integers(1, 2**50), st.data())
def test_a_permutation_of_any_size_takes_no_memory(count, data):
    places = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=20))
    found = [packing.permuted(i, count, 1, 2) for i in places]
    assert len(set(found)) == len(places) and all(0 <= i < count for i in found)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_permutations_are_equally_likely(count):
    """Chi-squared over all of them, at the 1e-6 quantile of scipy's distribution."""
    draws = 60 * math.factorial(count)
    counts = collections.Counter(
        tuple(packing.permuted(i, count, 7, key) for i in range(count)) for key in range(draws)
    )
    assert len(counts) == math.factorial(count)
    expected = draws / len(counts)
    found = sum((n - expected) ** 2 / expected for n in counts.values())
    assert found < scipy.stats.chi2.isf(1e-6, len(counts) - 1)


def test_steps_and_rows_are_independent():
    """Where a place goes in one pass says nothing of the next, nor of its neighbour."""
    count, passes = 64, 40
    made = np.asarray(
        [[packing.permuted(i, count, 0, p, 3) for i in range(count)] for p in range(passes)]
    )
    bound = 5 / math.sqrt(count * passes)  # of a correlation of independent numbers
    assert abs(np.corrcoef(made[1:].ravel(), made[:-1].ravel())[0, 1]) < bound
    assert abs(np.corrcoef(made[:, 1:].ravel(), made[:, :-1].ravel())[0, 1]) < bound + 1 / count


def test_the_hash_is_splitmix64():
    """Its first numbers from seed 1234567, as the C program of Vigna prints them; on arrays too."""
    state, expected = 1234567, (6457827717110365317, 3203168211198807973, 9817491932198370423)
    for value in expected:
        assert packing.mixed(state) == value
        assert packing.mixed(np.asarray([state], np.uint64)).tolist() == [value]
        state = (state + 0x9E3779B97F4A7C15) % 2**64


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


def test_each_seed_pass_and_row_has_an_order_of_its_own():
    orders = {
        tuple(packing.permuted(i, 50, seed, pass_, row) for i in range(50))
        for seed in (0, 1)
        for pass_ in (0, 1)
        for row in (0, 1)
    }
    assert len(orders) == 8 and all(sorted(order) == list(range(50)) for order in orders)
