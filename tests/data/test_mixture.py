"""Mixtures: shares held at every step, each source in its own order, whatever the start."""

import dataclasses
import json
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxvlm.config import (
    Config,
    ConfigError,
    DataConfig,
    SourceConfig,
    check_mixture,
    from_config_dict,
)
from jaxvlm.data.conversations import mixture_records, packing, tokenize
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.conversations.mixture import PERIOD, MixtureOrder, Schedule, whole_weights
from jaxvlm.data.conversations.packing import SequenceOrder
from jaxvlm.data.errors import DataError, Problem, TooFewRecords
from jaxvlm.data.prefetch import resume_step
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
    assert abs(sum(wide) - PERIOD) <= 1 and wide[1] == 1 and abs(wide[0] - wide[2]) <= 1
    assert whole_weights([1e-300, 1.0])[0] == 1
    one, rest = whole_weights([1.0002, PERIOD - 1.0002])
    assert (one, rest) == (1, PERIOD - 1)
    assert whole_weights([np.float64(0.1), 0.3]) == (1, 3)


@st.composite
def mixtures(draw, caps=False, budgets=False):
    """Pieces of two or three sources, and the settings."""
    sizes = draw(st.lists(st.integers(4, 14), min_size=2, max_size=3))
    words = draw(st.lists(st.integers(1, 8), min_size=sum(sizes), max_size=sum(sizes)))
    names = "abc"[: len(sizes)]
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
    settings = config(mixture=sources, batch_size=batch, share_images=True)
    left, given = iter(words), []
    for size in sizes:
        own = [record(f"{i}", [f"{i % 5}"] * (i % 2), "circle " * next(left)) for i in range(size)]
        corpus, problems = tokenize.encode(own, TOKENIZER, PATCHES)
        assert not problems
        pieces, long = packing.build_pieces(corpus, TOKENIZER.image_id, packing.Limits(40, 3), True)
        hypothesis.assume(not long)
        given.append(pieces)
    return given, settings


def mixed(given, settings, seed=0):
    return MixtureOrder(
        [(pieces, None, int(pieces.num_tokens.sum())) for pieces in given], settings, seed
    )


def order_of(drawn, seed=0):
    given, settings = drawn
    try:
        return mixed(given, settings, seed)
    except TooFewRecords:
        hypothesis.reject()


@fast
@hypothesis.given(mixtures(), st.integers(0, 2))
def test_a_source_is_read_as_by_a_run_on_it_alone(drawn, seed):
    given, settings = drawn
    order = order_of(drawn, seed)
    alone = [SequenceOrder(pieces, settings, seed) for pieces in given]
    counts = [len(pieces.num_tokens) for pieces in given]
    origin = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum([0, *counts])
    visits = np.zeros((settings.batch_size, len(alone)), int)
    for step in range(60):
        assert order.sequences_before(step) == tuple(visits.sum(axis=0))
        for row in range(settings.batch_size):
            found = order.sequence(step, row)
            (source,) = set(origin[found.pieces].tolist())
            same = alone[source].sequence(int(visits[row, source]), row)
            np.testing.assert_array_equal(found.pieces, same.pieces + firsts[source])
            assert found.pass_ == same.pass_
            assert set(found.pieces.tolist()) <= set(order.pieces_of_row(row).tolist())
            assert found.row == row
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
    _, settings = drawn
    order = order_of(drawn)
    weights = [source.weight for source in settings.mixture.values()]
    for step in range(200):
        for count, weight in zip(order.sequences_before(step), weights):
            exact = step * settings.batch_size * weight / sum(weights)
            assert abs(count - exact) <= settings.batch_size


@fast
@hypothesis.given(mixtures() | mixtures(caps=True))
def test_an_epoch_has_every_record_of_every_source(drawn):
    given, settings = drawn
    order = order_of(drawn)
    firsts = np.cumsum([0, *(len(pieces.num_tokens) for pieces in given)])
    ends = {i for i, x in enumerate(settings.mixture.values()) if 0 < x.max_epochs < 1}
    seen = set()
    for step in range(order.steps_per_epoch):
        for row in range(settings.batch_size):
            source = order.place(step, row)[0]
            own = order.sequence(step, row).pieces - firsts[source]
            found = [(source, x) for x in records_of(given[source], own)]
            assert len(set(found)) == len(found)
            seen |= set(found)
    for source, pieces in enumerate(given):
        every = {(source, x) for x in records_of(pieces, range(len(pieces.num_tokens)))}
        assert source in ends or every <= seen


@fast
@hypothesis.given(mixtures(caps=True))
def test_a_source_ends_after_its_passes_and_the_others_take_its_share(drawn):
    _, settings = drawn
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
        if source.max_epochs:
            asked = [order._cap(row, i) for row in rows]
            assert all(count >= least for count, least in zip(counts[:, i].tolist(), asked))
            # One row reads no more; the others go on to the same step.
            assert any(count == least for count, least in zip(counts[:, i].tolist(), asked))


@fast
@hypothesis.given(mixtures(budgets=True))
def test_budgets_are_read_in_one_epoch(drawn):
    _, settings = drawn
    order = order_of(drawn)
    end, rows = order.steps_per_epoch, range(settings.batch_size)
    counts, total = order.sequences_before(end), sum(order.weights)
    steps = []
    for i, source in enumerate(settings.mixture.values()):
        alone = order.orders[i]
        once = sum(map(alone.sequences_of_pass, rows))
        assert counts[i] >= source.epochs * once - len(rows) / 2  # half a sequence a row is rounded
        longest = max(alone.sequences_of_pass(row) for row in rows) * max(source.epochs, 1.0)
        longest = longest if source.epochs >= 1 else longest * source.epochs + 1
        steps.append((longest + 2) * total / order.weights[i])  # a schedule is within one
    assert end <= max(steps) + 1


def test_sizes_make_weights_and_a_temperature_evens_them():
    given = [build([record(f"{i}") for i in range(n)])[1] for n in (400, 100)]
    shares = {}
    for temperature in (1.0, 2.0, 1e6):
        sources = {"a": SourceConfig(train="a"), "b": SourceConfig(train="b")}
        settings = config(mixture=sources, mixture_temperature=temperature)
        a, b = mixed(given, settings).weights
        shares[temperature] = a / (a + b)
    assert shares[1.0] == pytest.approx(0.8, abs=0.02)  # in whole sequences
    assert shares[2.0] == pytest.approx(2 / 3, abs=0.02)
    assert shares[1e6] == pytest.approx(1 / 2, abs=1e-4)


def test_sources_of_one_size_that_fill_sequences_otherwise_are_read_as_one_data_set():
    """Images end a sequence before its tokens do: such a source has more sequences."""
    records = [record(f"{i}", [f"{i}"], "circle") for i in range(40)]
    others = [record(f"{i}", (), "circle " * 6) for i in range(40)]
    given = [build(own, max_length=60, max_images=1)[1] for own in (records, others)]
    limits = {"max_length": 60, "max_images_per_sequence": 1}
    sources = {"a": SourceConfig(train="a"), "b": SourceConfig(train="b")}
    order = mixed(given, config(mixture=sources, **limits))
    assert order.weights[0] > 2 * order.weights[1]
    passes = order.passes_before(order.steps_per_epoch)
    assert max(passes) < 1.2 * min(passes)


def test_tokens_are_a_budget():
    _, pieces, _ = build([record(f"{i}") for i in range(40)])
    tokens = float(pieces.num_tokens.sum())
    sources = {
        "a": SourceConfig(train="a", tokens=3 * tokens),
        "b": SourceConfig(train="b", tokens=tokens),
    }
    order = mixed([pieces, pieces], config(mixture=sources))
    assert order.weights[0] / sum(order.weights) == pytest.approx(0.75, abs=0.02)
    passes = order.passes_before(order.steps_per_epoch)
    assert passes[0] >= 3 and passes[1] >= 1


def test_a_source_too_small_for_a_batch_is_named():
    given = [build([record(f"{i}") for i in range(n)])[1] for n in (8, 1)]
    sources = {"a": SourceConfig(train="a", weight=1.0), "b": SourceConfig(train="b", weight=1.0)}
    with pytest.raises(DataError, match=r"config\.data\.mixture\.b: 1 records make 1 .*lower it"):
        mixed(given, config(mixture=sources))


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
        "vqa": SourceConfig(**{"train": vqa, "weight": 1.0, "column_mapping": columns} | more),
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
    saved = json.loads(json.dumps(data.train(np.arange(4), 3).state()))  # as a checkpoint has it
    assert resume_step(saved, dataset(files, word_tokenizer).fingerprint()) == 3
    with pytest.raises(DataError, match=r"data\.mixture\.vqa\.weight 1\.0 -> 3\.0; restore"):
        resume_step(saved, dataset(files, word_tokenizer, weight=3.0).fingerprint())


def test_sources_share_no_image_and_keep_to_their_limits(files, word_tokenizer, write_json):
    data = dataset(files, word_tokenizer)
    ids = [data.records[i].id for i in range(len(data.records))]
    for piece in range(len(data.pieces.num_tokens)):
        found = data.corpus.source[records_of(data.pieces, [piece])]
        assert len({ids[i].partition("/")[0] for i in found.tolist()}) == 1
    chat, vqa = files
    with open(vqa, "a") as out:
        out.write("\n" + '{"photo": "0.png", "ask": "is it red?"}')
    says = r"mixture\.vqa: .*vqa\.jsonl: 1 of 7 records .*14\.3%.*vqa\.jsonl:7.*check --config"
    with pytest.raises(DataError, match=says):
        dataset((chat, vqa), word_tokenizer)  # 5 % of all, 14 % of its source


def test_images_that_fail_in_a_run_count_for_their_source(files, word_tokenizer, tmp_path):
    data = dataset(files, word_tokenizer)
    with pytest.raises(DataError, match=r"mixture\.vqa: .*1 of 6 records"):  # 1 of 18, over 10 %
        data._skipped._config = dataclasses.replace(data.config, max_skip_fraction=0.1)
        data._skipped.add({17: Problem(data.records[17].id, "truncated file")})


def test_bad_lines_are_capped_with_the_good(write_json, word_tokenizer):
    lines = [llava(f"{i}", None, "is it red?") for i in range(400)] + [{"id": "bad"}] * 4
    path = write_json(lines, "many", lines=True)
    settings = DataConfig(mixture={"many": SourceConfig(train=path, max_records=200)})
    good, bad = mixture_records.read(settings)["many"]
    assert len(good) + len(bad) == 200 and len(bad) <= 4


def test_a_file_that_is_missing_is_named_with_its_source(files):
    settings = DataConfig(mixture={"gone": SourceConfig(train="no/file.jsonl")})
    with pytest.raises(DataError, match=r"config\.data\.mixture\.gone: no/file\.jsonl"):
        mixture_records.read(settings)


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


def test_sources_are_in_the_order_of_their_names(files):
    chat, _ = files
    settings = DataConfig(mixture={"one": SourceConfig(train=chat)})
    assert dataclasses.replace(settings).mixture == settings.mixture
    a, b = SourceConfig(train=chat, weight=2.0), SourceConfig(train=chat, weight=1.0)
    listed = [DataConfig(mixture=x) for x in ({"a": a, "b": b}, {"b": b, "a": a})]
    assert [list(x.mixture) for x in listed] == [["a", "b"]] * 2
    of_run = from_config_dict(Config(data=listed[1])).data.mixture
    assert list(of_run.items()) == [("a", a), ("b", b)]
