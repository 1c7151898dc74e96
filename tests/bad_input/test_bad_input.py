"""Bad inputs of every kind, handed to commands: each is used or refused by a line."""

import pathlib

import pytest

from tests.bad_input import commands, runner


@pytest.mark.parametrize(
    ("count", "workers"), [(36, 1), pytest.param(300, 2, marks=pytest.mark.long)]
)
def test_every_bad_input_is_refused_by_a_line(count, workers):
    found = runner.outcomes(count, workers=workers)
    counts = runner.summary(found)
    assert len(found) >= count and set(counts["kinds"]) == set(runner.KINDS)
    assert not counts["places"], [o for o in found if o.what not in runner.FINE]
    # Were every input used, or every one refused, the generators or this test would be broken.
    assert counts["total"]["refused"] > count / 3 and counts["total"]["ok"] > count / 30


def divides(file, data):
    return 1 / 0


def fills(file, data):
    return bytearray(10**15)


def says(status, out="", err=""):
    return lambda file, data: commands.Said(status, out, err)


@pytest.mark.parametrize(
    ("enter", "what"),
    [
        (divides, "traceback"),
        (fills, "memory"),
        (says(0, err="Traceback (most recent call last):"), "traceback"),
        (says(3, err="jaxvlm: no"), "status"),
        (says(2), "status"),
        (says(2, err="jaxvlm: no\njaxvlm: and no"), "status"),
        (says(2, err="jaxvlm: no"), "refused"),
        (says(1, out="1 of 2 records"), "refused"),
        (says(0), "ok"),
    ],
)
def test_the_runner_sees_what_is_wrong(enter, what):
    assert runner.one("config", "a", b"", enter).what == what


def test_the_names_of_an_old_commit_are_found():
    names = commands.Names(str(pathlib.Path(__file__).parent / "names_665e77b.json"))
    assert names("encoder.strategy.sequence_parallel") == "tower.strategy.sequence"
    assert names("embedder") == "encoder" and names("data.seed") == "data.seed"
    assert names("data.max_shift") == "data.shift"
