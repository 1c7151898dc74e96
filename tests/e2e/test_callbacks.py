"""Callbacks of the user's, and what a run leaves in order when one of them fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from runs import recipe

import jaxvlm
from jaxvlm.checkpoint.checkpointer import Checkpointer

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


class Recorder(jaxvlm.Callback):
    """Notes each call, adds a figure to the log and a word to the checkpoints."""

    def __init__(self, stop_at: int = 0):
        self.calls, self.stop_at = [], stop_at

    def on_dispatch(self, batch, metrics):
        assert isinstance(batch.local.tokens, np.ndarray)
        assert batch.arrays.tokens.shape == batch.local.tokens.shape == batch.given.tokens.shape
        self.calls.append("dispatch")

    def on_step_end(self, step, metrics):
        self.calls.append(f"step {step}")

    def on_log(self, step, metrics):
        metrics["twice_the_loss"] = 2 * metrics["loss"]

    def on_save(self, step, state, record):
        record.extra["word"] = f"at {step}"

    def should_stop(self, step):
        return step == self.stop_at

    def on_end(self, state, result):
        result["calls"] = len(self.calls)


class Failure(jaxvlm.Callback):
    def after_save(self, step, state, record):
        raise RuntimeError(f"no more after {step}")


def saved(run):
    folder = run.workdir / "checkpoints"
    with Checkpointer(folder, 3, "exact_match", "max", on_warning=pytest.fail) as checkpointer:
        return checkpointer.restore(run.training.checkpointed(run.training.abstract))


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_a_callback_of_ones_own(data, tmp_path):
    recorder = Recorder(stop_at=4)
    run = jaxvlm.Trainer(recipe(data), tmp_path, callbacks=[recorder])
    result = run.fit()
    assert result["step"] == 4 and result["calls"] == len(recorder.calls) == 8
    assert recorder.calls[:3] == ["dispatch", "step 1", "dispatch"]
    for line in lines_of(tmp_path):
        assert line["train/twice_the_loss"] == pytest.approx(2 * line["train/loss"])
    assert saved(run).extra["word"] == "at 4"


def test_a_run_that_fails_has_its_checkpoint(data, tmp_path):
    """Whole, though it was being written when the run failed; the folder is free again."""
    run = jaxvlm.Trainer(recipe(data), tmp_path, callbacks=[Failure()])
    with pytest.raises(RuntimeError, match="no more after 3"):
        run.fit()
    assert saved(run).step == 3
    assert jaxvlm.Trainer(recipe(data), tmp_path).fit()["step"] == 12


def test_the_page_shows_one_that_works(data, tmp_path):
    code = re.search(r"```python\n(import jaxvlm\n.*?)```", PAGE.read_text(), re.S)[1]
    names = {"config": recipe(data), "workdir": tmp_path}
    exec(code.replace("StopAt(0.1)", "StopAt(100.0)"), names)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]
