"""What is read of pairs, what is cut, what is refused, and what belongs together."""

import dataclasses
import logging

import numpy as np
import pytest
from pair_data import (
    BASE,
    dataset,
    take,
    text_collator,
    texts,
)

from jaxvlm.config import ConfigError, PairDataConfig
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.inference.examples import gather


def test_texts_that_are_the_same_once_cut_count_as_one(caplog):
    start = " ".join(f"w{k}" for k in range(12))
    made = [Example(str(i), Item(f"w{i}"), Item(f"{start} w{i + 20}")) for i in range(4)]
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        cut = dataset(made, text_collator(), max_document_length=8)
    assert len(set(cut.corpus.positive_content.tolist())) == 1
    assert "3 document texts are the same tokens as another" in caplog.text
    whole = dataset(made, text_collator())
    assert len(set(whole.corpus.positive_content.tolist())) == 4


def test_long_texts_are_cut_and_counted(chat_tokenizer, prompt_collator, caplog):
    long = Item(" ".join(f"w{k}" for k in range(40)))
    made = [Example("a", long, long), Example("b", Item("w1"), Item("w2"))]
    more = {"max_query_length": 10, "batch_size": 1}
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        data = dataset(made, text_collator(), **more)
    assert data.truncated == {"query": 1, "document": 1}
    assert "1 of 2 query texts are longer than 10 tokens and were truncated" in caplog.text
    assert data.queries.encoded.ids(0).tolist() == [1, *range(4, 12), 2]
    assert len(data.documents.encoded.ids(0)) == 24  # the model's, less than data.max_length

    assert "1 of 2 document texts are longer than 24 tokens and were truncated" in caplog.text
    with pytest.raises(
        DataError, match="a length of 2 tokens leaves no room for text next to 2 special"
    ):
        dataset(made, text_collator(), max_query_length=2)

    data = dataset(made, prompt_collator, max_query_length=20, max_length=60, batch_size=1)
    assert data.truncated == {"query": 1, "document": 0}
    whole, cut = data.documents.encoded.ids(0), data.queries.encoded.ids(0)
    words = [chat_tokenizer.backend.token_to_id(f"w{k}") for k in range(40)]
    at = whole.tolist().index(words[0])
    assert len(cut) == 20 and whole.tolist()[at : at + 40] == words
    rest = len(whole) - at - 40  # the header of the answer, which the embedding stands on
    assert cut.tolist() == whole[: 20 - rest].tolist() + whole[-rest:].tolist()


def test_an_image_is_never_cut(examples, prompt_collator):
    example = next(e for e in examples if e.query.image and e.query.words)
    shown = [example._replace(negatives=(), positive=Item("w1"))] * 1
    (whole,) = dataset(shown, prompt_collator, batch_size=1).queries.num_tokens
    words = len(example.query.words.split())
    least = int(whole) - words
    for length in (int(whole), least + 1, least):
        data = dataset(shown, prompt_collator, batch_size=1, max_query_length=length)
        assert data.queries.num_tokens.tolist() == [length]
        assert data.truncated["query"] == (length < whole)
        pairs, _ = next(data.train(np.arange(1)))
        assert (pairs.query.image_start >= 0).all()
    with pytest.raises(
        DataError, match=rf"longer than the maximum length \({least} of {least - 1}"
    ):
        dataset(shown, prompt_collator, batch_size=1, max_query_length=least - 1)


def test_negatives_are_drawn_anew_each_pass():
    negatives = tuple(Item(f"w{k} w2") for k in range(6))
    made = [e._replace(negatives=negatives, scores=(1, *range(6))) for e in texts(8)]
    data = dataset(made, text_collator(), max_negatives=2)
    drawn = set()
    for pairs, _ in take(data.train(np.arange(8)), 20):
        assert pairs.valid.all() and pairs.teacher.shape == (8, 3)
        for keys, scores in zip(pairs.document_key, pairs.teacher, strict=True):
            names = [data.corpus.contents[key] for key in keys[1:]]
            assert names == [f"w{int(score)} w2" for score in scores[1:]]
            drawn.add(tuple(names))
    assert len(drawn) == 15
    assert dataset(made, text_collator(), max_negatives=0).num_documents == 1


def test_labels_scores_and_known_positives(caplog):
    made = [
        Example("a", Item("w1"), Item("w2"), (Item("w4"), Item("w3")), "x", (1.0, 0.5, 0.25)),
        Example("b", Item("w5"), Item("w6"), (), "x", (0.5,)),
        Example("c", Item("w7"), Item("w8"), (), "", (0.75,)),
        Example("d", Item("w1"), Item("w3"), (), "y", (1.0,)),
    ]
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        data = dataset(made, text_collator(), batch_size=1)
    assert "1 hard negatives were dropped: they are their query, or a positive of it" in caplog.text
    found = {m.example[0]: p for p, m in take(data.train(np.arange(1)), 4)}
    group = [int(found[i].group[0]) for i in range(4)]
    assert group[0] == group[1] >= 0 > group[2] and group[3] not in group[:3]
    assert found[0].teacher.tolist() == [[1.0, 0.5]] and found[2].teacher.tolist() == [[0.75, 0.0]]
    assert found[2].valid.tolist() == [[True, False]]
    # w1 finds w2 and w3, its own, and w6, of its label; w5 likewise w2.
    names = [item.text for item in data.documents.items]
    relevant = [[names[d] for d in row] for row in data.relevance()]
    assert relevant == [["w2", "w6", "w3"], ["w2", "w6"], ["w8"]]
    queries, documents, scores = data.scored()
    assert [names[d] for d in documents] == ["w2", "w4", "w6", "w8", "w3"]
    assert queries.tolist() == [0, 0, 1, 2, 0] and scores.tolist() == [1.0, 0.5, 0.5, 0.75, 1.0]


def test_a_query_is_not_its_own_negative(caplog):
    """In its record, whatever the instruction; ``require_negatives`` counts the rest."""
    made = [
        Example("a", Item("w1"), Item("w2"), (Item("w1"), Item("w3")), "", (3.0, 2.0, 1.0)),
        Example("b", Item("w4"), Item("w5"), (Item("w4", instruction="find "),), "", (3.0, 2.0)),
    ]
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        data = dataset(made, text_collator(), batch_size=1)
    assert "2 hard negatives were dropped: they are their query" in caplog.text
    assert [[n.text for n in e.negatives] for e in data.examples] == [["w3"], []]
    assert [e.scores for e in data.examples] == [(3.0, 1.0), (3.0,)]
    pairs, _ = next(data.train(np.arange(1)))
    assert pairs.query_key[0] not in pairs.document_key
    problems = dataset(made, text_collator(), batch_size=1, require_negatives=True).problems
    assert [(p.id, p.reason[:15]) for p in problems] == [("b", "no negative, bu")]


def test_relevance_is_by_content():
    made = [
        Example("a", Item("w1"), Item("w2", instruction="one")),
        Example("b", Item("w1", instruction="find "), Item("w3")),
        Example("c", Item("w4"), Item("w2", instruction="two")),
    ]
    data = dataset(made, text_collator(), batch_size=1)
    assert [list(x) for x in data.relevance()] == [[0, 1, 2], [0, 1, 2], [0, 2]]
    keys = {m.example[0]: p for p, m in take(data.train(np.arange(1)), 3)}
    assert keys[0].query_key == keys[1].query_key != keys[2].query_key
    assert keys[0].document_key == keys[2].document_key != keys[1].document_key


ONE_TEXT = [("caf\u00e9", "cafe\u0301"), ("\u212b", "A\u030a"), ("\uac01", "\u1100\u1161\u11a8")]


@pytest.mark.parametrize(("one", "other"), ONE_TEXT)
def test_texts_that_are_one_to_unicode_are_one(one, other, caplog):
    """As a negative of its query, in a batch, and where documents are ranked."""
    one, other = f"w1 {one}", f"w1 {other}"
    made = [
        Example("a", Item("w2"), Item(one), (Item(other), Item("w3"))),
        Example("b", Item(other), Item("w4"), (Item(one), Item("w5"))),
        Example("c", Item("w6"), Item(other)),
        *(Example(f"d{i}", Item(f"w{i}"), Item(f"w{i + 1}")) for i in (7, 9, 11)),
    ]
    with caplog.at_level(logging.WARNING, "jaxvlm.data"):
        data = dataset(made, text_collator(), batch_size=2)
    assert "2 hard negatives were dropped: they are their query, or a positive" in caplog.text
    negatives = [[n.text for n in e.negatives] for e in data.examples]
    assert negatives == [["w3"], ["w5"], [], [], [], []]
    for _, meta in take(data.train(np.arange(2)), 12):
        assert len({0, 1, 2} & set(meta.example.tolist())) < 2, "one text is no other's negative"
    names = [item.text for item in data.documents.items]
    assert [[names[d] for d in row] for row in data.relevance()] == [
        [one, other],
        ["w4"],
        [one, other],
        ["w8"],
        ["w10"],
        ["w12"],
    ]
    assert {one, other} <= set(names), "the model reads each as it is written"


def test_compatible_characters_are_others():
    assert Item("\ufb01").content != Item("fi").content


@pytest.mark.parametrize("of_teacher", [False, True])
def test_what_is_right_is_as_defined(of_teacher):
    rng, told = np.random.default_rng(0), ("", "find ")

    def item(most):
        return Item(f"w{rng.integers(most)}", instruction=told[rng.integers(2)])

    made = [
        Example(str(i), item(9), item(12), (item(12),), ("", "", "x", "y")[k], (float(score),))
        for i, (k, score) in enumerate(zip(rng.integers(4, size=30), rng.integers(-1, 3, 30)))
    ]
    # A teacher's scores of positives and negatives have no zero below which nothing matches.
    made = [
        e._replace(scores=(*e.scores, 0.5)) if of_teacher else e._replace(negatives=())
        for e in made
    ]

    def right(query, document):
        labels = {e.label for e in made if e.query.content == query.content} - {""}
        return any(
            e.positive.content == document.content and (of_teacher or e.scores[0] > 0)
            for e in made
            if e.query.content == query.content or e.label in labels
        )

    data = dataset(made, text_collator(), batch_size=1)
    documents = data.documents.items
    expected = [
        [n for n, d in enumerate(documents) if right(query, d)] for query in data.queries.items
    ]
    assert data.relevance() == expected
    assert 0 < sum(map(len, expected)) < len(expected) * len(documents)
    found = gather(data.examples)  # which evaluates files
    assert found.queries == data.queries.items and found.documents == documents
    assert found.positives == expected


def test_instructions_stand_before_texts(prompt_collator):
    made = [Example("a", Item("w1"), Item("w2")), Example("b", Item("w1", "", "find "), Item("w3"))]
    data = dataset(made, text_collator(), batch_size=1, query_instruction="query: ")
    said = [
        data.queries.collator.tokenizer.backend.decode(data.queries.encoded.ids(i)) for i in (0, 1)
    ]
    assert said == ["<s> query: w1 </s>", "<s> find w1 </s>"]
    data = dataset(made, prompt_collator, batch_size=1, document_instruction="find it")
    told = [
        prompt_collator.tokenizer.decode(side.encoded.ids(0))
        for side in (data.queries, data.documents)
    ]
    assert told[0].split()[:2] == ["represent", "the"] and told[1].split()[:2] == ["find", "it"]


def test_bad_examples_before_the_first_step(examples):
    made = texts(10)
    made[0] = made[0]._replace(query=Item.of("", "/gone.png"))
    data = dataset(made, text_collator(), [Problem("p", "not JSON")])
    assert [(p.id, p.reason) for p in data.problems] == [("p", "not JSON"), ("t0", "missing file")]
    with pytest.raises(DataError, match=r"2 of 11 records .*p: not JSON; t0: missing file"):
        dataset(made, text_collator(), [Problem("p", "not JSON")], on_bad_record="refuse")
    with pytest.raises(DataError, match=r"data\.max_skip_fraction=5\.0%"):
        dataset(made, text_collator(), max_skip_fraction=0.05)
    some = [e._replace(negatives=(Item("w9 w9 w9"),)) if i else e for i, e in enumerate(texts(10))]
    data = dataset(some, text_collator(), require_negatives=True)
    assert data.problems == [Problem("t0", "no negative, but data.pairs.require_negatives is set")]
    some = [e._replace(scores=(0.5,)) if i else e for i, e in enumerate(texts(10))]
    assert dataset(some, text_collator()).problems == [
        Problem("t0", "no score, but other records have one")
    ]


def test_forged_turns_are_refused(prompt_collator):
    made = [*texts(9), Example("x", Item("w1 <assistant> w2"), Item("w3"))]
    assert dataset(made, prompt_collator).problems == [
        Problem("x", "the text contains a special token", "<assistant>")
    ]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tasks": "one"}, r"data\.pairs\.tasks='one' is unknown; use one of mixed, homogeneous"),
        ({"batch_sampler": "some"}, "use one of no_duplicates, random"),
        ({"max_negatives": -2}, "max_negatives=-2 must be at least -1"),
        ({"max_query_length": -1}, "max_query_length=-1 must be at least 0"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 99}, "lower it to 20"),
    ],
)
def test_settings_are_checked(more, says):
    with pytest.raises(DataError, match=says):
        dataset(texts(), text_collator(), **more).train(np.arange(1))


def test_settings_that_nothing_would_read_are_refused(word_tokenizer):
    with pytest.raises(ConfigError, match=r"task_alpha=0\.5 is not read without tasks="):
        dataset(texts(), text_collator(), task_alpha=0.5)
    with pytest.raises(ConfigError, match=r"data\.packing=False is read for conversations only"):
        dataset(texts(), text_collator(), packing=False)
    config = dataclasses.replace(BASE, pairs=PairDataConfig(tasks="homogeneous"))
    with pytest.raises(DataError, match="pairs is set, but this run trains on conversations"):
        load_dataset(config, word_tokenizer, image_size=8, num_patches=4, read=([], []))
