"""`jaxvlm data check` refuses what a run refuses, record by record, for the same reasons."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
from PIL import Image

from jaxvlm.config import DataConfig, default_config, from_config_dict
from jaxvlm.data import validate
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError, NothingUsable
from jaxvlm.data.images import image_files
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.trainer import embedding_run
from tests.bad_input import data_files, runner
from tests.data.conftest import llava

SKIP = DataConfig(
    max_length=64, on_bad_record="skip", on_too_long="skip", max_skip_fraction=1.0, workers=1
)
NONE_LEFT = "no usable record is left"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the names of ``data_files.NAMES`` stand for."""
    path = tmp_path_factory.mktemp("bad")
    data_files.write_images(path)
    return path


def write(folder, file, data):
    """Write a drawn file, and a record that names it if it is an image."""
    (folder / file).write_bytes(data)
    if file.startswith("data."):
        return str(folder / file)
    records = [llava(str(i), name) for i, name in enumerate([file, file, "good.png"])]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder / "data.jsonl")


def refused(problems):
    return sorted((problem.id, problem.reason) for problem in problems)


def of_check(report):
    return sorted((id_, reason) for reason, ids in report.problems.items() for id_ in ids)


def run_refuses(path):
    """What a run on conversations refuses: before the first step, and as it decodes images."""
    read = conversation_formats.read(path, SKIP)
    words = chat_tokenizer.build(tokenize.texts(read[0]))
    prepare = image_files.squares(16)
    data = load_dataset(
        SKIP, words, image_size=16, num_patches=16, prepare=prepare, spec=path, read=read
    )
    try:
        for _ in data.eval(np.arange(1), 1):
            pass
    except DataError as error:
        assert "over data.max_skip_fraction" not in str(error)
    return refused([*data.problems, *data.skipped])


def check_refuses(path):
    report = validate.validate(path, SKIP, prepare=image_files.squares(16), num_patches=16)
    assert report.good + sum(map(len, report.problems.values())) == report.total
    return of_check(report), report.good


def outcome(function, path):
    try:
        return function(path)
    except DataError as error:
        return str(error)


def test_conversations(folder):
    counts = {"same": 0, "refused": 0, "whole": 0}
    for file, data in [*runner.inputs("conversations", 60), *runner.inputs("image", 25)]:
        path = write(folder, file, data)
        run, check = outcome(run_refuses, path), outcome(check_refuses, path)
        if isinstance(run, str) and NONE_LEFT in run:
            assert check[1] == 0, (file, data)
        elif isinstance(run, str):
            assert check == run, (file, data)
            counts["whole"] += 1
        else:
            assert check[0] == run, (file, data)
            counts["same"] += 1
            counts["refused"] += len(run)
    assert counts["same"] > 30 and counts["refused"] > 20, counts


def test_conversations_with_several_faults(tmp_path):
    """A header that is good, pixels that are cut off, in records of one piece; too long as well."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "cut.png")
    cut = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(cut[: len(cut) // 2])
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    long = "<image>" + "word " * 100
    rows = [
        llava("a", "cut.png"),
        llava("b", "cut.png", answer="blue"),
        llava("c", "cut.png", long),
    ]
    rows += [llava("d", "gone.png", long), llava("e", ["good.png"] * 9, "<image>" * 9 + "what?")]
    rows += [llava("f", ["good.png", "cut.png"], "<image><image>"), llava("g", "good.png")]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows))
    run = run_refuses(str(path))
    assert [name for name, _ in run] == ["a", "b", "c", "d", "e", "f"]
    assert check_refuses(str(path)) == (run, 1)


@functools.cache
def embedding():
    config = default_config()
    config.loss.name, config.embedder = "info_nce", "vlm"
    config.data.batch_size, config.data.max_length, config.data.workers = 1, 48, 1
    config.data.pairs.batch_sampler = "random"
    config.data.on_bad_record, config.data.max_skip_fraction = "skip", 1.0
    config.model.vision.image_size, config.model.vision.patch_size = 16, 8
    return from_config_dict(config)


def run_of_pairs_refuses(path):
    try:
        config = dataclasses.replace(
            embedding(), data=dataclasses.replace(embedding().data, train=path)
        )
        data = embedding_run.prepare_pairs(config, None).dataset
    except NothingUsable as error:
        return refused(error.problems)
    batches = data.train(np.arange(1))
    for _ in range(data.steps_per_epoch):
        next(batches)
    batches.close()
    return refused([*data.problems, *data.skipped])


def check_of_pairs_refuses(path):
    return of_check(embedding_run.validate_file(embedding(), path))


def test_pairs(folder):
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:-20])
    lines = [{"query": "a", "positive": "b", "negatives": [{"image": "cut.png"}, "c"], "id": "n"}]
    lines += [{"query": {"image": "cut.png"}, "positive": "b", "id": "q"}]
    lines += [{"query": "d", "positive": "e", "id": "good"}]
    by_hand = ("data.jsonl", "\n".join(map(json.dumps, lines)).encode())
    none = ("data.jsonl", b'{"query": "a"}\n{"positive": "b"}')
    drawn = [*runner.inputs("pairs", 20), *runner.inputs("tables", 8), by_hand, none]
    found = 0
    for file, data in drawn:
        path = write(folder, file, data)
        run = outcome(run_of_pairs_refuses, path)
        assert outcome(check_of_pairs_refuses, path) == run, (file, data)
        found += isinstance(run, list) and len(run) > 0
    assert found > 5
    # Where nothing can be used, every record is listed all the same.
    assert len(check_of_pairs_refuses(write(folder, *none))) == 2
