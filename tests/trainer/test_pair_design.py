"""Data and batches of pairs that a loss learns nothing from are refused before the first step."""

import numpy as np
import pytest
from pair_data import dataset, text_collator
from PIL import Image

from jaxvlm.config import Config, DataConfig, LossConfig, PairDataConfig, PairLossConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.trainer import pair_design


def examples(count=8, negatives=0, score=None, label=None):
    def score_of(i):
        return () if score is None else tuple(score(i, k) for k in range(1 + negatives))

    return [
        Example(
            f"e{i}",
            Item(f"w{i} w1"),
            Item(f"w{i} w2"),
            tuple(Item(f"w{i} w{3 + k}") for k in range(negatives)),
            "" if label is None else label(i),
            score_of(i),
        )
        for i in range(count)
    ]


def judged(made, loss="info_nce", shards=1, batch_size=4, sampler="no_duplicates", **pair_loss):
    config = Config(
        loss=LossConfig(name=loss),
        pair_loss=PairLossConfig(**pair_loss),
        data=DataConfig(batch_size=batch_size, pairs=PairDataConfig(batch_sampler=sampler)),
    )
    data = dataset(made, text_collator(), batch_size=batch_size, batch_sampler=sampler)
    return pair_design.check(config, data, shards)


@pytest.mark.parametrize(
    "made, settings, words",
    [
        (examples(label=lambda i: "1"), {}, "all examples have one label"),
        (examples(label=lambda i: "1"), {"loss": "sigmoid"}, "all examples have one label"),
        (examples(), {"batch_size": 1}, r"raise config\.data\.batch_size"),
        (examples(), {"negatives_from": "shard", "shards": 4}, "a device's own examples are"),
        (examples(), {"negatives_from": "own"}, "the examples have none"),
        (
            [e._replace(positive=Item("w1 w2")) for e in examples()],
            {"sampler": "random"},
            "all documents of a batch are positives",
        ),
        (examples(score=lambda i, k: i), {"loss": "cosine"}, "the scores are from 0 to 7; divide"),
        (examples(score=lambda i, k: i - 4), {"loss": "cosine"}, "from -4 to 3; divide them by 4"),
        (examples(score=lambda i, k: 0.5), {"loss": "cosent"}, "every score is 0.5"),
        (examples(score=lambda i, k: 0.1 * i), {}, "does not read scores"),
        (
            examples(1, 1, score=lambda i, k: k),
            {"loss": "triplet", "batch_size": 1},
            "not read sco",
        ),
        (
            examples(2, 1, label=lambda i: "a"),
            {"loss": "triplet", "batch_size": 1},
            "does not read labels",
        ),
    ],
)
def test_what_teaches_nothing_is_refused(made, settings, words):
    with pytest.raises(DataError, match=words):
        judged(made, **settings)


@pytest.mark.parametrize(
    "made, settings, lines",
    [
        (examples(), {}, []),
        (examples(), {"negatives_from": "shard", "shards": 2}, []),
        (examples(negatives=1), {"negatives_from": "own"}, []),
        (examples(negatives=1), {"batch_size": 1}, []),
        (examples(label=lambda i: str(i // 2)), {}, ["labels: 4 groups"]),
        (
            examples(score=lambda i, k: i / 8),
            {"loss": "cosine"},
            ["scores: similarities of pairs, from 0 to 0.875"],
        ),
        (
            examples(negatives=2, score=lambda i, k: -i - k),
            {"loss": "distill"},
            ["scores: a teacher's scores, from -9 to 0"],
        ),
    ],
)
def test_what_can_be_trained_is_told(made, settings, lines):
    told = judged(made, **settings)
    assert [line[: len(start)] for line, start in zip(told, lines, strict=True)] == lines


def test_some_queries_without_a_negative_are_counted():
    made = examples(8, label=lambda i: "same" if i < 5 else f"other {i}")
    (_, line) = judged(made, batch_size=2)
    assert line.endswith("of queries meet no negative in their batch and teach nothing")
    assert 0 < float(line.split("%")[0]) < 100


def test_a_teachers_negative_logits_leave_positives_relevant():
    """A similarity of 0 or less says that a pair does not match; a teacher's logit does not."""
    data = dataset(examples(negatives=1, score=lambda i, k: -1.0 - k), text_collator())
    assert all(data.relevance())
    pairs = dataset(examples(score=lambda i, k: float(i % 2)), text_collator())
    assert [bool(found) for found in pairs.relevance()] == [False, True] * 4


@pytest.mark.parametrize("embedder", ["dual", "vlm"])
def test_settings_of_texts_that_no_query_has_are_named(embedder, tmp_path):
    """A vision-language model reads an instruction beside an image too."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    alone = [e._replace(query=Item.of("", str(tmp_path / "a.png"))) for e in examples()]
    settings = {"query_instruction": "find ", "max_query_length": 8, "document_instruction": "w1 "}
    config = Config(embedder=embedder, data=DataConfig(pairs=PairDataConfig(**settings)))
    data = dataset(alone, text_collator(), batch_size=4, batch_sampler="random")
    named = [line.split(" ")[0] for line in pair_design.unread(config, data)]
    assert [name.split("=")[0].rpartition(".")[2] for name in named] == (
        ["query_instruction", "max_query_length"] if embedder == "dual" else []
    )
    assert not pair_design.unread(config, dataset(examples(), text_collator(), batch_size=4))


def test_texts_that_are_cut_to_the_same_tokens_are_one(caplog):
    """As documents they can't be told apart, so none may be a negative of another."""
    long = [
        e._replace(positive=Item(f"w1 w2 w3 w4 w{5 + i % 4}")) for i, e in enumerate(examples())
    ]
    settings = {"batch_size": 4, "batch_sampler": "random", "max_document_length": 4}
    data = dataset(long, text_collator(), **settings)
    keys = data.keys(0)
    assert len(np.unique(keys.document_key)) == 1 and len(np.unique(keys.query_key)) == 4
    config = Config(loss=LossConfig(name="info_nce"), data=DataConfig(batch_size=4))
    with pytest.raises(DataError, match="all documents of a batch are positives"):
        pair_design.check(config, data, 1)
    whole = dataset(long, text_collator(), batch_size=4, batch_sampler="random")
    assert len(np.unique(whole.keys(0).document_key)) > 1
