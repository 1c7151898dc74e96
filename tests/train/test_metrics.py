"""The metrics file is valid JSON lines, with each step once, whatever happened to the run."""

import io
import json
import math

import numpy as np
from rich.console import Console

from jaxvlm.train.metrics import MetricWriter, read_metrics
from jaxvlm.train.progress import Progress, short, summary, time_left


def strict_lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_lines_are_valid_json(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(1, {"train/loss": np.float32(0.5), "train/tokens": np.int64(7), "note": "x"})
    writer.write(2, {"train/loss": math.nan, "train/norm": math.inf, "train/low": -math.inf})
    writer.close()
    writer.close()
    first, second = strict_lines(tmp_path / "metrics.jsonl")
    assert first["step"] == 1
    assert (first["train/loss"], first["train/tokens"], first["note"]) == (0.5, 7, "x")
    assert first["time"] > 1e9
    assert (second["train/loss"], second["train/norm"], second["train/low"]) == (
        "nan",
        "inf",
        "-inf",
    )
    again = read_metrics(tmp_path)[1]
    assert math.isnan(again["train/loss"])
    assert again["train/low"] == -math.inf


def test_resume_drops_the_abandoned_future(tmp_path):
    writer = MetricWriter(tmp_path)
    for step in range(1, 7):
        writer.write(step, {"train/loss": step})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "train/lo')  # cut by a kill
    writer = MetricWriter(tmp_path, resume_step=4)
    writer.write(5, {"train/loss": 50})
    writer.close()
    assert [(x["step"], x["train/loss"]) for x in strict_lines(path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 50),
    ]
    MetricWriter(tmp_path).close()
    assert path.read_text() == ""


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(
        10, start=2, console=Console(file=out, force_terminal=False, width=40)
    ) as progress:
        progress.log("step time 0.1 s [data 2%]")
        values = {"loss": 0.12345, "tokens_per_s": 12345, "images_per_s": 45, "mfu": 0.41}
        progress.update(4, values | {"wait": "1%"})
    progress.update(5, {})
    lines = out.getvalue().splitlines()
    assert lines[0] == "step time 0.1 s [data 2%]"
    assert lines[1].startswith(
        "train 4/10 loss 0.1235 tok/s 12.3k img/s 45 MFU 41.0% wait 1% left 0:"
    )
    assert len(lines) == 2


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    with Progress(10, console=Console(file=out, force_terminal=True, width=120)) as progress:
        progress.update(4, {"loss": 0.5})
        progress.log("above the bar")
    text = out.getvalue()
    assert "above the bar" in text
    assert "4/10" in text
    assert "loss 0.5000" in text


def test_numbers_for_people():
    assert [short(x) for x in (0, 9.994, 1234, 999_600, 2.5e9)] == [
        "0",
        "9.99",
        "1.23k",
        "1M",
        "2.5G",
    ]
    assert summary({"loss": math.nan}) == "loss nan"
    assert time_left(10, 0, 5) == "?"
    assert time_left(10, 10, 65) == "1:05"
    assert time_left(10, 1, 1000) == "2:46:40"
