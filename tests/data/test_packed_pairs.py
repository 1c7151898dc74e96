"""Packed sets of pairs: batches as from files, any split and step; damage and other settings."""

import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from pair_data import assert_equal, dataset, squares, take, text_collator, text_tokenizer, texts

from jaxvlm.cli.main import run
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.packed import packed_files
from jaxvlm.data.pairs.collate_prompt_items import PromptCollator
from jaxvlm.data.pairs.collate_texts import TextCollator
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.hf.families import qwen_vl
from tests.data.stored_sets import (
    SIZES,
    harmless,
    of_files,
    opened,
    opened_pairs,
    packed,
    packed_pairs_of,
)

ROWS = np.arange(8)
CASES = {
    "text": {},
    "prompt": {"kind": "prompt"},
    "tasks": {"tasks": "homogeneous", "task_alpha": 0.5, "max_negatives": 1},
    "random": {"batch_sampler": "random", "flip": True, "max_shift": 2},
    "cut": {"max_query_length": 4, "max_document_length": 5, "query_instruction": "query: "},
    "any size": {"kind": "any size"},
    "prompt, cut": {"kind": "prompt", "max_query_length": 24, "buckets": 3},
}


@pytest.fixture
def rows(prompt_collator):
    """As of a dual encoder, of a VLM, and of one that reads images of any size."""
    tokenizer, patching = prompt_collator.tokenizer, Patching(4, 2, 2, "cthw")

    def span(width, height):
        return qwen_vl.grid_span(tokenizer.image_id, (1, height // 8, width // 8))

    as_it_is = image_files.Preparation(lambda image: np.asarray(image), "as it is")
    images = image_files.ImageFormat(as_it_is, 0, span, False, patching)
    any_size = PromptCollator(tokenizer, images)
    return {"text": text_collator(), "prompt": prompt_collator, "any size": any_size}


def copied(examples, folder):
    """The examples, of images that a test may remove."""

    def item(own):
        return own._replace(image=str(shutil.copy(own.image, folder)) if own.image else "")

    folder.mkdir()
    return [
        x._replace(
            query=item(x.query), positive=item(x.positive), negatives=tuple(map(item, x.negatives))
        )
        for x in examples
    ]


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_the_files(case, examples, rows, tmp_path):
    """From one process and several, from any step, when the images' files are gone."""
    more = dict(CASES[case])
    collator = rows[more.pop("kind", "text")]
    data = dataset(copied(examples, tmp_path / "images"), collator, **more)
    folder = packed_pairs_of(data, tmp_path / "set")
    whole, keys = take(data.train(ROWS), 16), data.keys(9)
    told = [data.corpus.contents[i] for i in range(len(data.corpus.contents))]
    shutil.rmtree(tmp_path / "images")
    moved = str(shutil.copytree(folder, tmp_path / "elsewhere" / "moved"))
    again = opened_pairs(moved, data)
    assert again.fingerprint() == data.fingerprint()
    assert len(list(pathlib.Path(folder).glob("images-*.tar"))) > 1
    for name in ("sequence_shapes", "steps_per_epoch", "position_rows", "modalities", "truncated"):
        assert getattr(again, name) == getattr(data, name)
    assert_equal(again.keys(9), keys)
    for ours, theirs in zip(take(again.train(ROWS), 16), whole, strict=True):
        assert_equal(ours, theirs)
    for local in ([0, 1, 2, 3], [4, 5, 6, 7], [6], [7, 2]):
        fresh = opened_pairs(moved, data, workers=2, image_cache_mb=0)
        for step, (part, meta) in enumerate(take(fresh.train(np.asarray(local), 5), 3), 5):
            want, of = whole[step]
            assert_equal(part, jax.tree.map(lambda x, local=local: x[local], want))
            np.testing.assert_array_equal(meta.example, of.example[local])
    for i in {0, 7, len(told) - 1}:
        assert _without_folder(again.corpus.contents[i]) == _without_folder(told[i])
    for ours, theirs in zip(again.examples, data.examples, strict=True):
        items = [(e.query, e.positive, *e.negatives) for e in (ours, theirs)]
        for one, other in zip(*items, strict=True):
            assert (one.text, one.instruction) == (other.text, other.instruction)
            assert bool(one.image) == bool(other.image)
        assert (ours.id, ours.label, ours.task) == (theirs.id, theirs.label, theirs.task)


def _without_folder(text):
    return text.partition("/")[0]


def test_the_batch_size_the_seed_and_the_sampler_can_be_changed(examples, tmp_path):
    data = dataset(examples, text_collator())
    folder = packed_pairs_of(data, tmp_path / "set")
    for more in (
        {"batch_size": 5}, {"batch_size": 25, "seed": 3}, {"max_negatives": 0}, {"buckets": 1},
        {"batch_sampler": "random", "max_negatives": 2}, {"flip": True, "workers": 3},
    ):  # fmt: skip
        files = dataset(examples, text_collator(), **more)
        seed = {"seed": more["seed"]} if "seed" in more else {}
        again = opened_pairs(folder, data, **{k: v for k, v in more.items() if k != "seed"}, **seed)
        assert again.fingerprint() == files.fingerprint()
        rows = np.arange(files.config.batch_size)
        for ours, theirs in zip(
            take(again.train(rows, 3), 9), take(files.train(rows, 3), 9), strict=True
        ):
            assert_equal(ours, theirs)


def test_scores_labels_and_records_that_are_left_out(tmp_path, capsys):
    """Scores are float32 as in batches; what was left out counts in ``max_skip_fraction``."""
    made = [
        Example(f"e{i}", Item(f"w{i}"), Item(f"w{i + 20}"), (Item(f"w{i + 30} w2"),), f"g{i % 3}",
                (1.0 + i / 7, 0.1 * i))
        for i in range(16)
    ]  # fmt: skip
    data = dataset(made, text_collator(), [Problem("bad", "no text", "")], max_skip_fraction=0.1)
    folder = packed_pairs_of(data, tmp_path / "set")
    again = opened_pairs(folder, data)
    assert again.fingerprint() == data.fingerprint()
    for ours, theirs in zip(take(again.train(ROWS), 4), take(data.train(ROWS), 4), strict=True):
        assert ours[0].teacher is not None and ours[0].group is not None
        assert_equal(ours, theirs)
    assert again.examples[4].label == "g1"
    np.testing.assert_allclose(again.examples[4].scores, made[4].scores, rtol=1e-6)
    assert again.problems == data.problems and again.total == 17
    for x, y in zip(again.scored(), data.scored(), strict=True):
        np.testing.assert_array_equal(x, y)
    assert again.relevance() == data.relevance()
    with pytest.raises(DataError, match=f"1 of 17 .*`jaxvlm data verify {folder}` lists them"):
        opened_pairs(folder, data, max_skip_fraction=0.01)
    assert run(["data", "verify", folder]) == 0
    assert "left out: 1  no text: bad\n" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [False, True])
def test_texts_alone_and_images_alone(tokens, examples, tmp_path):
    if tokens:
        data = dataset(texts(), TextCollator(text_tokenizer()))
    else:
        with_images = [e.query.image for e in examples if e.query.image]
        made = [
            Example(f"{i}", Item.of("", path), Item.of("", with_images[i - 1]))
            for i, path in enumerate(with_images)
        ]
        data = dataset(made, TextCollator(None, squares()), batch_sampler="random")
    again = opened_pairs(packed_pairs_of(data, tmp_path / "set"), data)
    assert (pathlib.Path(tmp_path / "set" / "tokenizer").exists()) == tokens
    assert again.fingerprint() == data.fingerprint()
    for ours, theirs in zip(take(again.train(ROWS), 5), take(data.train(ROWS), 5), strict=True):
        assert_equal(ours, theirs)


CHANGED = {
    "data.max_length": {"max_length": 31},
    "data.max_pixels": {"max_pixels": 10**6},
    "data.on_bad_record": {"on_bad_record": "refuse"},
    "data.pairs.max_query_length": {"max_query_length": 9},
    "data.pairs.max_document_length": {"max_document_length": 9},
    "data.pairs.query_instruction": {"query_instruction": "find "},
    "data.pairs.document_instruction": {"document_instruction": "find "},
    "data.pairs.require_negatives": {"require_negatives": True},
    "data.pairs.tasks": {"tasks": "homogeneous"},
}


def test_other_settings_are_refused_by_name(examples, prompt_collator, tmp_path):
    data = dataset(examples, text_collator())
    folder = packed_pairs_of(data, tmp_path / "set")
    for name, more in CHANGED.items():
        with pytest.raises(DataError, match=rf"packed for other settings: {re.escape(name)} "):
            opened_pairs(folder, data, **more)
    with pytest.raises(DataError, match=r"data.image_root is not read"):
        opened_pairs(folder, data, image_root=str(tmp_path))
    other = dataset(examples, text_collator(max_length=23))
    with pytest.raises(DataError, match=r"(?s)query lengths \[0, 24\] -> \[0, 23\].*tokenizer"):
        opened_pairs(folder, other)
    with pytest.raises(DataError, match="query rows 'text' -> 'prompt"):
        opened_pairs(folder, dataset(examples, prompt_collator))


def test_columns_with_different_tokenizers(tmp_path):
    """Which the command line never makes: they are not packed, and never read with another."""
    data = dataset(texts(), TextCollator(text_tokenizer()))
    folder = packed_pairs_of(data, tmp_path / "set")
    other = TextCollator(text_tokenizer())
    other.tokenizer.backend.add_tokens(["w90"])
    both = dataset(texts(), TextCollator(text_tokenizer()), document_collator=other)
    with pytest.raises(DataError, match="packed for other settings: document tokenizer"):
        opened_pairs(folder, both)
    with pytest.raises(DataError, match="different tokenizers"):
        packed_pairs_of(both, tmp_path / "both")


def test_what_is_equal_across_columns_is_in_the_digest():
    """Two texts that are cut to the same tokens are one content only in a column of their own."""

    def made(document):
        rest = [Example(f"r{i}", Item(f"w{i}"), Item(f"w{i + 20}")) for i in range(12)]
        crossed = Example("x", Item("w50 w51 w52 w53"), Item(document))
        return dataset([crossed, *rest], text_collator(), max_query_length=4, max_document_length=4)

    same, other = made("w50 w51 w52 w53"), made("w50 w51 w52 w54")
    for column in ("queries", "documents"):
        np.testing.assert_array_equal(
            getattr(same, column).encoded.tokens, getattr(other, column).encoded.tokens
        )
    assert same.fingerprint()["content"] != other.fingerprint()["content"]


def test_examples_and_items_are_lists_that_lie_on_disk(examples, tmp_path):
    data = dataset(examples, text_collator())
    again = opened_pairs(packed_pairs_of(data, tmp_path / "set"), data)
    texts_of = [[item.text for item in x.queries.items[-3:]] for x in (again, data)]
    assert texts_of[0] == texts_of[1]
    assert [x.id for x in again.examples[3:5]] == [x.id for x in data.examples[3:5]]
    for ours in (again.examples, again.queries.items):
        assert ours[-1] == ours[len(ours) - 1] and len(ours[:2]) == 2
        with pytest.raises(IndexError):
            ours[len(ours)]


def test_a_set_of_the_other_kind_is_refused(examples, album, word_tokenizer, tmp_path):
    data = dataset(examples, text_collator())
    pairs = packed_pairs_of(data, tmp_path / "pairs")
    conversations = packed(of_files(album(), word_tokenizer, SIZES), tmp_path / "talks")
    with pytest.raises(DataError, match="packed from pairs, and this run trains on conversations"):
        opened(pairs, word_tokenizer, SIZES)
    with pytest.raises(DataError, match="packed from conversations, and this run trains on pairs"):
        opened_pairs(conversations, data)


@pytest.mark.parametrize("kind", ["text", "any size"])
def test_nothing_damaged_is_trained_on(kind, examples, rows, tmp_path):
    """A changed number in any array ends the run, or changes no batch."""
    made = [e._replace(label=f"g{i % 9}") for i, e in enumerate(examples[:24])]
    data = dataset(made, rows[kind], max_skip_fraction=0.0)
    folder = pathlib.Path(packed_pairs_of(data, tmp_path / "set"))
    whole = take(data.train(ROWS), 2 * data.steps_per_epoch)

    def batches():
        again = opened_pairs(str(folder), data)
        for ours, theirs in zip(take(again.train(ROWS), len(whole)), whole, strict=True):
            assert_equal(ours, theirs)

    every = {path.stem for path in folder.glob("*.npy")}
    found = harmless(folder, tmp_path / "kept", batches)
    # Texts and ids are for messages, and spans of images for models that have tokens of them.
    messages = {"id", "id_start", "label_name", "label_name_start"}
    for side in ("query", "document"):
        messages |= {f"{side}_{name}" for name in ("text", "text_start", "instruction_text_start")}
        messages |= {
            f"{side}_span_{name}"
            for name in ("lead", "lead_start", "weight", "weight_end", "feature", "feature_end",
                         "per_tile")
        }  # fmt: skip
    assert found <= messages | {x for x in every if kind == "text" and "_span_" in x} | {
        f"{side}_instruction_text" for side in ("query", "document")
    }


def test_a_damaged_image_is_skipped_and_named(examples, tmp_path):
    data = dataset(examples, text_collator())
    folder = pathlib.Path(packed_pairs_of(data, tmp_path / "set", 10**6))
    (shard,) = folder.glob("*.tar")
    whole = bytearray(shard.read_bytes())
    whole[whole.index(b"IDAT") + 6] ^= 1
    shard.write_bytes(whole)
    again = opened_pairs(str(folder), data)
    take(again.train(ROWS), again.steps_per_epoch)
    (reason,) = {problem.reason for problem in again.skipped}
    assert reason == "can't be read: its bytes are not those that were packed"
    assert {problem.id for problem in again.skipped} <= {e.id for e in data.examples}
    assert dict(packed_files.damaged(str(folder))).keys() == {"images-00000.tar"}


def test_images_that_changed_while_they_were_packed(examples, tmp_path, monkeypatch):
    data = dataset(copied(examples, tmp_path / "images"), text_collator())
    path = pathlib.Path(data.queries.encoded.paths[0])
    path.write_bytes(path.read_bytes() + b"?")
    with pytest.raises(DataError, match="changed while they were packed"):
        packed_pairs_of(data, tmp_path / "set")
    path.unlink()
    with pytest.raises(DataError, match=r"missing file; it could be read before"):
        packed_pairs_of(data, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_the_same_data_are_the_same_bytes(examples, tmp_path):
    found = []
    for name in ("a", "b"):
        folder = packed_pairs_of(dataset(examples, text_collator()), tmp_path / name)
        found.append(json.loads((pathlib.Path(folder) / "packed.json").read_text())["digest"])
    assert found[0] == found[1]


def test_a_damaged_header_is_named(examples, tmp_path):
    """Of arrays that no start reads, too; what a crash leaves are zeros."""
    data = dataset(examples, text_collator())
    folder = pathlib.Path(packed_pairs_of(data, tmp_path / "set"))
    for path in sorted(folder.glob("*.npy")):
        whole = path.read_bytes()
        for header in (bytes(128), whole[:40] + b"x" + whole[41:128]):
            path.write_bytes(header + whole[128:])
            with pytest.raises(DataError, match=f"{path.name} is not as it was packed"):
                opened = opened_pairs(str(folder), data)
                take(opened.train(ROWS), 1)
                opened.examples[0], opened.queries.items[0], opened.queries.encoded.spans
        path.write_bytes(whole)
