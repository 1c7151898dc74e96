"""Mixtures: shares held at every step, each source in its own order, whatever the start."""

import dataclasses
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxvlm.config import ConfigError, DataConfig, SourceConfig, check_mixture
from jaxvlm.data.conversations import mixture, mixture_records, packing, tokenize
from jaxvlm.data.conversations.mixture import PERIOD, MixtureOrder, Schedule, whole_weights
from jaxvlm.data.conversations.packing import SequenceOrder
from jaxvlm.data.conversations.run_data import load_dataset, read_records
from jaxvlm.data.errors import DataError, TooFewRecords
from tests.data.conftest import llava, record
from tests.data.test_packing import PATCHES, TOKENIZER, build, config, records_of

fast = hypothesis.settings(deadline=None, max_examples=40)


@fast
@hypothesis.given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_each_source_has_its_share_to_within_one_at_every_place(weights):
    schedule = Schedule(tuple(weights))
    total, count = sum(weights), [0] * len(weights)
    for place in range(2 * total):
        for i, weight in enumerate(weights):
            assert schedule.before(place, i) == count[i]
            assert abs(count[i] - Fraction(place * weight, total)) < 1
            following = schedule.after(place, i, 1)
            assert schedule.source(place + following - 1) == i
            assert schedule.before(place + following, i) == count[i] + 1
        count[schedule.source(place)] += 1
    assert count == [2 * weight for weight in weights]


def test_weights_are_exact_where_a_period_holds_them():
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_weights([3.0, 1.5]) == (2, 1)
    assert whole_weights([Fraction(1)]) == (1,)
    wide = whole_weights([1e9, 1.0, 1e9])
    assert sum(wide) == PERIOD and wide[1] == 1 and abs(wide[0] - wide[2]) <= 1


@st.composite
def mixtures(draw, caps=False, budgets=False):
    """Pieces of two or three sources, the source of each piece, and the settings."""
    sizes = draw(st.lists(st.integers(4, 14), min_size=2, max_size=3))
    words = draw(st.lists(st.integers(1, 8), min_size=sum(sizes), max_size=sum(sizes)))
    names = "abc"[: len(sizes)]
    origin = [i for i, size in enumerate(sizes) for _ in range(size)]
    records = [
        record(f"{names[s]}/{i}", [f"{i % 5}"] * (i % 2), "circle " * n)
        for i, (s, n) in enumerate(zip(origin, words))
    ]
    sources = {}
    for i, name in enumerate(names):
        own = {"train": f"{name}.jsonl"}
        if budgets:
            own["epochs"] = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0]))
        else:
            own["weight"] = draw(st.sampled_from([0.1, 1.0, 2.5, 7.0]))
        if caps and i:  # the first goes on
            own["max_epochs"] = draw(st.sampled_from([0.5, 1.0, 2.0]))
        sources[name] = SourceConfig(**own)
    batch = draw(st.sampled_from([1, 2, 3]))
    shards = draw(st.sampled_from([1, 4, 16]))
    settings = config(mixture=sources, batch_size=batch, virtual_shards=shards, share_images=True)
    corpus, problems = tokenize.encode(records, TOKENIZER, PATCHES)
    assert not problems
    limits = packing.Limits(40, 3)
    pieces, long = packing.build_pieces(corpus, TOKENIZER.image_id, limits, True, origin)
    hypothesis.assume(not long)
    return pieces, packing.of_pieces(pieces, origin), settings, origin


def order_of(drawn, seed=0):
    pieces, origin, settings, _ = drawn
    try:
        return MixtureOrder(pieces, settings, seed, origin)
    except TooFewRecords:
        hypothesis.reject()


@fast
@hypothesis.given(mixtures(), st.integers(0, 2))
def test_a_source_is_read_as_by_a_run_on_it_alone(drawn, seed):
    pieces, origin, settings, _ = drawn
    order = order_of(drawn, seed)
    alone = [
        SequenceOrder(pieces, settings, seed, np.flatnonzero(origin == i).tolist())
        for i in range(len(settings.mixture))
    ]
    visits = np.zeros((settings.batch_size, len(alone)), int)
    for step in range(60):
        assert order.sequences_before(step) == tuple(visits.sum(axis=0))
        for row in range(settings.batch_size):
            found = order.sequence(step, row)
            (source,) = set(origin[found.pieces].tolist())
            same = alone[source].sequence(int(visits[row, source]), row)
            np.testing.assert_array_equal(found.pieces, same.pieces)
            assert found.pass_ == same.pass_
            assert set(found.pieces.tolist()) <= set(order.shards[found.shard].tolist())
            assert found.shard in range(row * order.turns, (row + 1) * order.turns)
            visits[row, source] += 1
    fresh = order_of(drawn, seed)  # one that begins in the middle
    for row in range(settings.batch_size):
        for step in (59, 17):
            np.testing.assert_array_equal(
                fresh.sequence(step, row).pieces, order.sequence(step, row).pieces
            )


@fast
@hypothesis.given(mixtures())
def test_shares_are_the_weights_to_within_a_batch_at_every_step(drawn):
    _, _, settings, _ = drawn
    order = order_of(drawn)
    weights = [source.weight for source in settings.mixture.values()]
    for step in range(200):
        for count, weight in zip(order.sequences_before(step), weights):
            exact = step * settings.batch_size * weight / sum(weights)
            assert abs(count - exact) <= settings.batch_size


@fast
@hypothesis.given(mixtures() | mixtures(caps=True))
def test_an_epoch_has_every_record_of_every_source(drawn):
    pieces, _, settings, origin = drawn
    order = order_of(drawn)
    ends = {i for i, x in enumerate(settings.mixture.values()) if 0 < x.max_epochs < 1}
    seen = set()
    for step in range(order.steps_per_epoch):
        for row in range(settings.batch_size):
            found = records_of(pieces, order.sequence(step, row).pieces)
            assert len(set(found)) == len(found)
            seen |= set(found)
    assert {i for i, source in enumerate(origin) if source not in ends} <= seen


@fast
@hypothesis.given(mixtures(caps=True))
def test_a_source_ends_after_its_passes_and_the_others_take_its_share(drawn):
    _, _, settings, _ = drawn
    order = order_of(drawn)
    rows = range(settings.batch_size)
    last = max(span.begin for spans in order._spans for span in spans)
    counts = np.zeros((settings.batch_size, len(settings.mixture)), int)
    for step in range(last + 20):
        assert order.sequences_before(step) == tuple(counts.sum(axis=0))
        for row in rows:
            source = order.place(step, row)[0]
            assert step < last or source == 0
            counts[row, source] += 1
    for i, source in enumerate(settings.mixture.values()):
        for row in rows:
            whole = order.orders[i].steps_of_pass(row)
            if source.max_epochs:
                assert counts[row, i] == max(1, int(np.ceil(whole * source.max_epochs)))


@fast
@hypothesis.given(mixtures(budgets=True))
def test_budgets_are_read_in_one_epoch(drawn):
    _, _, settings, _ = drawn
    order = order_of(drawn)
    passes = order.passes_before(order.steps_per_epoch)
    for source, done in zip(settings.mixture.values(), passes):
        assert done >= source.epochs
    # No more than what rows that end earlier, and a schedule's places, go on for.
    before = order.passes_before(order.steps_per_epoch - 1)
    short = [done < x.epochs + 1e-9 for x, done in zip(settings.mixture.values(), before)]
    rows = [order.orders[i].steps_of_pass(r) for i in range(len(short)) for r in range(order._rows)]
    assert any(short) or len(set(rows)) > 1


def test_sizes_make_weights_and_a_temperature_evens_them():
    records = [record(f"a/{i}") for i in range(40)] + [record(f"b/{i}") for i in range(10)]
    _, pieces, _ = build(records)
    origin = np.asarray([0] * 40 + [1] * 10)
    shares = {}
    for temperature in (1.0, 2.0, 1e6):
        sources = {"a": SourceConfig(train="a"), "b": SourceConfig(train="b")}
        settings = config(mixture=sources, mixture_temperature=temperature)
        a, b = MixtureOrder(pieces, settings, 0, origin).weights
        shares[temperature] = a / (a + b)
    assert shares[1.0] == 0.8
    assert shares[2.0] == pytest.approx(2 / 3, abs=2 / PERIOD)
    assert shares[1e6] == pytest.approx(1 / 2, abs=2 / PERIOD)


def test_tokens_are_a_budget():
    records = [record(f"a/{i}") for i in range(40)] + [record(f"b/{i}") for i in range(40)]
    _, pieces, _ = build(records)
    origin = np.asarray([0] * 40 + [1] * 40)
    tokens = float(pieces.num_tokens[:40].sum())
    sources = {
        "a": SourceConfig(train="a", tokens=3 * tokens),
        "b": SourceConfig(train="b", tokens=tokens),
    }
    order = MixtureOrder(pieces, config(mixture=sources), 0, origin)
    assert order.weights == (3, 1)
    passes = order.passes_before(order.steps_per_epoch)
    assert passes[0] >= 3 and passes[1] >= 1


def test_a_source_too_small_for_a_batch_is_named():
    records = [record(f"a/{i}") for i in range(8)] + [record("b/0")]
    _, pieces, _ = build(records)
    sources = {"a": SourceConfig(train="a", weight=1.0), "b": SourceConfig(train="b", weight=1.0)}
    with pytest.raises(DataError, match=r"config\.data\.mixture\.b: 1 records make 1 .*lower it"):
        MixtureOrder(pieces, config(mixture=sources), 0, np.asarray([0] * 8 + [1]))


@pytest.fixture
def files(write_json, image):
    """Two files of other columns, which name the same images."""
    for i in range(6):
        image(f"{i}.png", (40 * i, 0, 0))
    chat = write_json([llava(f"{i}", f"{i}.png") for i in range(6)] * 2, "chat", lines=True)
    rows = [{"photo": f"{i}.png", "ask": "is it red?", "label": "yes"} for i in range(6)]
    return chat, write_json(rows, "vqa", lines=True)


def dataset(files, word_tokenizer, **more):
    chat, vqa = files
    columns = (("photo", "image"), ("ask", "question"), ("label", "answer"))
    sources = {
        "chat": SourceConfig(train=chat, weight=2.0),
        "vqa": SourceConfig(train=vqa, weight=1.0, column_mapping=columns, **more),
    }
    settings = DataConfig(batch_size=4, max_length=40, mixture=sources, image_cache_mb=8)
    return load_dataset(settings, word_tokenizer, image_size=8, num_patches=4)


def test_batches_are_the_same_for_any_processes_and_any_start(files, word_tokenizer):
    data = dataset(files, word_tokenizer)
    assert data.records[0].id == "chat/0" and data.records[-1].id.startswith("vqa/")
    whole = iter(data.train(np.arange(4)))
    batches = [next(whole)[0] for _ in range(6)]
    for start, rows in ((0, [0, 1]), (0, [3]), (4, [2, 3]), (5, [0, 1, 2, 3])):
        part = iter(dataset(files, word_tokenizer).train(np.asarray(rows), start))
        for batch in batches[start:]:
            found = next(part)[0]
            np.testing.assert_array_equal(found.tokens, batch.tokens[rows])
            np.testing.assert_array_equal(found.segment, batch.segment[rows])
    assert "data.mixture.chat" in data.fingerprint()


def test_sources_share_no_image_and_keep_to_their_limits(files, word_tokenizer, write_json):
    data = dataset(files, word_tokenizer)
    of_record = mixture_records.sources(data.config, data.records, data.corpus.source)
    for piece in range(len(data.pieces.num_tokens)):
        assert len({of_record[r] for r in records_of(data.pieces, [piece])}) == 1
    chat, vqa = files
    with open(vqa, "a") as out:
        out.write("\n" + '{"photo": "0.png", "ask": "is it red?"}')
    with pytest.raises(DataError, match=r"vqa\.jsonl: 1 of 7 records .*14\.3%.*vqa/.*vqa\.jsonl:7"):
        dataset((chat, vqa), word_tokenizer)  # 5 % of all, 14 % of its source


def test_records_are_capped_by_a_choice_that_stays(files, word_tokenizer):
    ids = [
        [x.id for x in dataset(files, word_tokenizer, max_records=4).records if x.id[0] == "v"]
        for _ in range(2)
    ]
    assert ids[0] == ids[1] and len(ids[0]) == 4
    assert len(dataset(files, word_tokenizer, max_records=99).records) == 18


@pytest.mark.parametrize(
    "sources, says",
    [
        ({"a": {}}, "a.train names no data"),
        ({"a b": {"train": "x"}}, "letters, digits"),
        ({"a": {"train": "x", "weight": 1.0, "epochs": 1.0}}, "a has weight and epochs"),
        ({"a": {"train": "x", "tokens": 1.0, "max_epochs": 1.0}}, "a budget ends it"),
        ({"a": {"train": "x", "weight": 1.0}, "b": {"train": "x"}}, "a has weight, b has neither"),
        ({"a": {"train": "x", "weight": 1.0}, "b": {"train": "x", "epochs": 1.0}}, "all a budget"),
        ({"a": {"train": "x", "max_epochs": 1.0}}, "nothing would be left"),
    ],
)
def test_settings_that_contradict_each_other(sources, says):
    given = {name: SourceConfig(**values) for name, values in sources.items()}
    with pytest.raises(ConfigError, match=says):
        check_mixture(given, "config.data.mixture")
    check_mixture(
        {"a": SourceConfig(train="x"), "b": SourceConfig(train="y")}, "config.data.mixture"
    )


def test_read_records_reads_a_file_or_the_mixture(files):
    chat, _ = files
    settings = DataConfig(mixture={"one": SourceConfig(train=chat)})
    mixed, alone = read_records(settings, "")[0], read_records(settings, chat)[0]
    assert [x.id for x in mixed] == [f"one/{x.id}" for x in alone]
    assert dataclasses.replace(settings).mixture == settings.mixture
    assert mixture.schedule((2, 1)) is mixture.schedule((2, 1))
