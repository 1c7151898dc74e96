"""Where a run's time goes: each second has one cause, over all starts."""

from __future__ import annotations

import contextlib
import json
import time

import jax
import pytest

from jaxvlm.train import loop, metrics
from jaxvlm.train.metrics import AGAIN, CAUSES, DOWN, STEPS, WAIT, Goodput, goodput


def line(start, began, at, step, steps, **more):
    seconds = {STEPS: steps, "startup": 5.0, **more}
    return {"start": start, "began": began, "time": at, "step": step, "seconds": seconds}


def test_a_run_that_nothing_stops():
    lines = [line("a", 0, 5, 0, 0), line("a", 0, 40, 20, 30, compilation=5.0)]
    assert goodput(lines) == dict.fromkeys(CAUSES, 0.0) | {
        STEPS: 30, "startup": 5, "compilation": 5,
    }  # fmt: skip


def test_steps_after_the_checkpoint_were_in_vain():
    lines = [line("a", 0, 5, 0, 0), line("a", 0, 15, 10, 10), line("a", 0, 25, 20, 20),
             line("b", 60, 65, 10, 0), line("b", 60, 85, 30, 20)]  # fmt: skip
    found = goodput(lines)
    assert (found[STEPS], found[AGAIN], found[DOWN], found["startup"]) == (30, 10, 35, 10)
    assert sum(found.values()) == 85


def test_a_start_that_a_later_one_went_back_behind():
    """Steps 11 to 20 of the first start count no more, though the second went on from 20."""
    lines = [line("a", 0, 5, 0, 0), line("a", 0, 15, 10, 10), line("a", 0, 25, 20, 20),
             line("b", 25, 30, 20, 0), line("b", 25, 40, 30, 10),
             line("c", 40, 45, 10, 0), line("c", 40, 65, 30, 20)]  # fmt: skip
    found = goodput(lines)
    assert (found[STEPS], found[AGAIN]) == (30, 20) and sum(found.values()) == 65


def test_two_runs_of_one_process_are_two_starts():
    lines = [line("a", 0, 5, 0, 0), line("a", 0, 105, 10, 100), line("b", 0, 110, 10, 0)]
    assert goodput(lines)[STEPS] == 100


def test_no_lines_are_no_time(tmp_path):
    assert metrics.read_goodput(tmp_path) == dict.fromkeys(CAUSES, 0.0)
    with pytest.raises(KeyError):
        goodput([{"start": "a"}])


def test_what_is_written_adds_up_over_starts(tmp_path):
    """Against the clock of this test, and each cause against what the test waited for."""
    jax.process_index()  # JAX starts
    begun = time.time()
    waits = {"compilation": 0.08, "exchange": 0.04, "evaluation": 0.06, "checkpoint": 0.05}
    for start, last in ((0, 4), (2, 6)):
        time.sleep(0.05)  # between starts; and before the first, startup
        made = Goodput(tmp_path, begun if not start else time.time())
        time.sleep(0.05)
        clock = loop.Clock(start, made)
        for step in range(start + 1, last + 1):
            with clock.waiting():
                time.sleep(0.02)
            with clock.computing():
                time.sleep(0.03)
            for kind, seconds in waits.items():
                with clock.paused(kind):
                    time.sleep(seconds)
            assert 0 < clock.lap(step)["goodput"] < 1
        time.sleep(0.1)
        found = made.end()
    assert found == pytest.approx(metrics.read_goodput(tmp_path), abs=0.01)
    assert sum(found.values()) == pytest.approx(time.time() - begun, abs=0.05)
    assert found[AGAIN] == pytest.approx(2 * 0.03, abs=0.03)
    assert found[STEPS] == pytest.approx(6 * 0.03, abs=0.06)
    assert found[WAIT] == pytest.approx(8 * 0.02, abs=0.05)
    for kind, seconds in waits.items():
        assert found[kind] == pytest.approx(8 * seconds, abs=0.06)
    assert found["startup"] == pytest.approx(0.15, abs=0.05) and found["end"] > 0.19
    assert found[DOWN] == pytest.approx(0.05, abs=0.04)


def test_truncated_lines_are_left_out(tmp_path):
    path = tmp_path / metrics.GOODPUT_FILE
    whole = [json.dumps(x) for x in (line("a", 0, 5, 0, 0), line("a", 0, 15, 10, 10))]
    path.write_text("\n".join([whole[0], "", "7", '{"start": 1}', whole[1], whole[0][:40]]))
    assert metrics.read_goodput(tmp_path)[STEPS] == 10


def test_a_run_without_a_step_has_time_too(tmp_path):
    assert sum(Goodput(tmp_path, time.time() - 10).end().values()) == pytest.approx(10, abs=0.5)


def traces(monkeypatch, profile, asked, steps=30, start=0):
    """The first and last steps of the traces that are made."""
    made, now, signals = [], [start], set(asked)

    @contextlib.contextmanager
    def trace(folder):
        made.append([now[0], None])
        yield
        made[-1][1] = now[0] - 1

    def is_asked():
        found = now[0] in signals
        signals.discard(now[0])
        return found

    monkeypatch.setattr(jax.profiler, "trace", trace)
    schedule = loop.Schedule(steps, 1, 0, 0, 1, profile, "f", is_asked)
    profiler = loop._Profiler(schedule, start)
    for now[0] in range(start + 1, steps + 1):
        profiler.before(now[0])
    now[0] = steps + 1
    profiler.close()
    return made


@pytest.mark.parametrize(
    "profile, asked, start, expected",
    [
        ((0, 0), (), 0, []),
        ((3, 6), (), 0, [[3, 5]]),
        ((3, 6), (), 4, [[5, 5]]),
        ((3, 6), (), 9, []),
        ((25, 99), (), 0, [[25, 30]]),
        ((0, 0), (4,), 0, [[4, 8]]),
        ((0, 0), (4, 6), 0, [[4, 8], [9, 13]]),  # what is asked meanwhile follows
        ((20, 22), (4,), 0, [[4, 8], [20, 21]]),  # and what was planned is not lost
        ((6, 8), (4,), 0, [[4, 5], [6, 7]]),
        ((6, 8), (7,), 0, [[6, 7], [8, 12]]),
        ((0, 0), (28,), 0, [[28, 30]]),
    ],
)
def test_traces(monkeypatch, profile, asked, start, expected):
    assert traces(monkeypatch, profile, asked, start=start) == expected
