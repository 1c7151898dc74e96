"""Runs killed at drawn moments go on to the bits of a run that was not killed."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from jaxvlm.checkpoint.checkpointer import Checkpointer
from tests.kills import runner


def test_sixty_moments_are_drawn_the_same_each_time():
    drawn = [runner.moments(kind, 0) for kind in runner.KINDS]
    flat = [moment for chains in drawn for given in chains for moment in given]
    assert len(flat) == 60 and sum(moment.phase == "start" for moment in flat) >= 15
    assert all(0 <= moment.share < 1 for moment in flat) and len({m.share for m in flat}) == 60
    assert (
        drawn
        == [runner.moments(kind, 0) for kind in runner.KINDS]
        != [runner.moments(kind, 1) for kind in runner.KINDS]
    )


@pytest.fixture
def pair(tmp_path):
    """Two folders of runs with the same metrics and checkpoint."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with Checkpointer(whole / "checkpoints", 1, "", "max", on_warning=pytest.fail) as checkpointer:
        state = {"w": jax_array([1.0, 2.0]), "moment": jax_array([0.5])}
        checkpointer.save(2, state, {})
    lines = [{"step": i, "time": i, "train/loss": 1 / i, "train/step_ms": i} for i in (1, 2)]
    (whole / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copytree(whole, broken)
    return whole, broken


def jax_array(values):
    import jax.numpy as jnp

    return jnp.asarray(np.asarray(values, np.float32))


def test_the_comparison_sees_a_bit_a_row_and_an_array(pair):
    whole, broken = pair
    assert not runner.differences("host cache", whole, broken)
    path = broken / "metrics.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    path.write_text(json.dumps(first | {"time": 9.0, "train/step_ms": 7}) + "\n")
    assert runner.differences("host cache", whole, broken) == ["1 rows of metrics instead of 2"]
    second["train/loss"] = float(np.nextafter(0.5, 1))
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    (line,) = runner.differences("host cache", whole, broken)
    assert line.startswith("step 2: train/loss 0.5 -> 0.50000")
    shutil.copyfile(whole / "metrics.jsonl", path)
    shutil.rmtree(broken / "checkpoints")
    with Checkpointer(broken / "checkpoints", 1, "", "max", on_warning=pytest.fail) as saved:
        one_bit = float(np.nextafter(np.float32(2), np.float32(3)))
        saved.save(2, {"w": jax_array([1.0, one_bit]), "moment": jax_array([0.5])}, {})
    assert runner.differences("host cache", whole, broken) == ["2/w: other bits"]


def test_what_a_kill_left_says_when_it_came(pair):
    workdir, _ = pair
    now = (workdir / "checkpoints" / "2").stat().st_ctime
    assert runner.stands(workdir, now - 5, now) == runner.BEFORE
    (workdir / "config.json").write_text("{}")
    assert runner.stands(workdir, now - 5, now + 0.01) == runner.COMMIT
    assert runner.stands(workdir, now - 5, now + 9) == runner.TRAINING
    assert runner.stands(workdir, now + 5, now + 9) == runner.NO_STEP
    (workdir / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir()
    assert runner.stands(workdir, now - 5, now + 9) == runner.WRITING


@pytest.mark.long
@pytest.mark.parametrize("kind", ["evaluations", "host cache"])
def test_killed_five_times_and_the_same_bits(kind, tmp_path):
    data = runner.prepare(tmp_path / "data")
    whole = runner.unbroken(kind, data, tmp_path / "unbroken")
    given = runner.moments(kind, 0)[1]
    kills, differ = runner.chain(kind, given, data, tmp_path / "run", whole)
    assert not differ
    assert len(kills) == 5 and kills[0].step == 0, kills


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", runner.KINDS)
def test_ten_kills_of_every_kind(kind, tmp_path):
    kills, differ = runner.every(kind, tmp_path / "runs", seed=0)
    assert not differ and len(kills) == 10, kills
