"""The training loop: what it logs of a run that stopped between two log lines and went on."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxvlm.train import loop
from jaxvlm.train.callbacks import Callback, CallbackList, StepBatch
from jaxvlm.train.step import NO_WEIGHT, CompiledSteps
from jaxvlm.types import Batch, Guard, TrainState

STEPS, LOG_EVERY = 11, 4
BAD = 6
"""A step whose update is skipped, and which is in no mean."""


class Batches:
    """Batch number n has n as its token."""

    def __init__(self, start):
        self.taken = start

    def __iter__(self):
        return self

    def __next__(self):
        self.taken += 1
        batch = Batch(jnp.full((1, 1), self.taken), None, None, None)
        return StepBatch(batch, batch, batch)

    def state(self):
        return {"step": self.taken}


def step(state, batch):
    number = int(batch.tokens[0, 0])
    is_bad = number == BAD
    draw = np.random.default_rng(number).normal(size=2).astype(np.float32)
    metrics = {
        "loss": draw[0],
        "largest_max": draw[1],
        "skipped": int(number >= BAD),
        "bad_in_a_row": int(is_bad),
        "bad_leaf": -1,
        f"{NO_WEIGHT}second": int(number != 2),
    }
    return state, {name: jnp.asarray(x) for name, x in metrics.items()}


class Recorder(Callback):
    def __init__(self):
        self.rows, self.said, self.extra = {}, {}, {}

    def on_log(self, step, metrics):
        self.rows[step] = {k: x for k, x in metrics.items() if "_ms" not in k}

    def on_bad_step(self, step, what):
        self.said.setdefault(step, []).append(what)

    def on_save(self, step, state, record):
        self.extra[step] = json.loads(json.dumps(record.extra))


EVERY = loop.Schedule(STEPS, LOG_EVERY, 0, 1, 5)


def run(start=0, extra=None, recorder=None, schedule=EVERY):
    recorder, zero = recorder or Recorder(), jnp.zeros((), jnp.int32)
    state = TrainState(zero, {}, {}, (), (), (), Guard(zero, zero))
    loop.train(
        state,
        CompiledSteps(lambda *_: step, lambda line: None),
        Batches(start),
        schedule,
        CallbackList([recorder]),
        start=start,
        leaves=["w"],
        extra=extra or {},
    )
    return recorder


@pytest.fixture(scope="module")
def unbroken():
    return run()


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_a_resumed_run_logs_the_same_rows(unbroken, stop):
    again = run(stop, extra=unbroken.extra[stop])
    assert unbroken.extra[stop]["data"] == {"step": stop}
    assert again.rows.keys() == {s for s in unbroken.rows if s > stop}
    for number, row in again.rows.items():
        expected = unbroken.rows[number]
        same = ("loss", "largest_max", "skipped_updates")
        assert {k: row[k] for k in same} == {k: expected[k] for k in same}
    # Step 2 alone has something for the second term, whoever took it.
    assert again.said == {s: what for s, what in unbroken.said.items() if s > stop}


def test_a_row_is_the_mean_of_the_steps_since_the_last(unbroken):
    losses = {n: np.random.default_rng(n).normal(size=2).astype(np.float32) for n in range(1, 12)}
    assert unbroken.rows.keys() == {4, 8, 11}
    assert unbroken.rows[8]["loss"] == pytest.approx(np.mean([losses[n][0] for n in (5, 7, 8)]))
    assert unbroken.rows[8]["largest_max"] == max(float(losses[n][1]) for n in (5, 7, 8))


class Failing(Recorder):
    """Its evaluation fails."""

    def on_evaluate(self, step, state):
        raise OSError(f"no image at step {step}")


def test_what_was_trained_is_saved_where_an_evaluation_fails():
    recorder = Failing()
    with pytest.raises(OSError, match="no image at step 3"):
        run(recorder=recorder, schedule=loop.Schedule(STEPS, LOG_EVERY, 3, 0, 5))
    assert recorder.extra.keys() == {3} and recorder.extra[3]["data"] == {"step": 3}
    assert recorder.extra[3]["unlogged"]["count"] == 3, "steps that no line has yet"
