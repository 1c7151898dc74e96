"""Where a run's time goes: each second has one cause, over all starts."""

from __future__ import annotations

import contextlib
import json

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


class FakeTime:
    """Clocks that only the test moves; the one of the machine is set back meanwhile."""

    def __init__(self):
        self.now, self.set_back = 1000.0, 0.0

    def perf_counter(self):
        return self.now

    def time(self):
        return 5e8 + self.now - self.set_back


def test_each_second_has_the_cause_that_it_was_spent_on(tmp_path, monkeypatch):
    clock_of = FakeTime()
    monkeypatch.setattr(loop, "time", clock_of)
    monkeypatch.setattr(metrics, "time", clock_of)
    waits = {"compilation": 8.0, "exchange": 4.0, "evaluation": 6.0, "checkpoint": 5.0}
    begun = clock_of.time()
    for start, last in ((0, 4), (2, 6)):
        began = clock_of.time()
        clock_of.now += 20  # startup
        made = Goodput(tmp_path, began)
        clock_of.now += 3
        clock = loop.Clock(start, made)
        clock_of.set_back += 7 * (start == 0)
        for step in range(start + 1, last + 1):
            with clock.waiting():
                clock_of.now += 2
            with clock.waiting():
                clock_of.now += 1
                clock.hide()  # the devices were at work
            with clock.computing():
                clock_of.now += 9
            for kind, seconds in waits.items():
                with clock.paused(kind):
                    clock_of.now += seconds
            lap = clock.lap(step)
            assert lap["step_ms"] == 12_000 and 0 < lap["goodput"] < 1
        clock_of.now += 30
        found = made.end()
        clock_of.set_back = 0
        clock_of.now += 50 * (start == 0)
    wanted = {kind: 8 * seconds for kind, seconds in waits.items()}
    wanted |= {STEPS: 60, AGAIN: 20, WAIT: 16, "startup": 46, "end": 60, DOWN: 50}
    assert found == pytest.approx(wanted) and metrics.read_goodput(tmp_path) == pytest.approx(
        wanted
    )
    assert sum(found.values()) == pytest.approx(clock_of.time() - begun)
    assert lap["goodput"] == pytest.approx(60 / (sum(wanted.values()) - 30))


def test_truncated_lines_are_left_out(tmp_path):
    path = tmp_path / metrics.GOODPUT_FILE
    whole = [json.dumps(x) for x in (line("a", 0, 5, 0, 0), line("a", 0, 15, 10, 10))]
    path.write_text("\n".join([whole[0], "", "7", '{"start": 1}', whole[1], whole[0][:40]]))
    assert metrics.read_goodput(tmp_path)[STEPS] == 10


def test_a_run_without_a_step_has_time_too(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "time", FakeTime())
    found = Goodput(tmp_path, metrics.time.time() - 10).end()
    assert found["startup"] == sum(found.values()) == pytest.approx(10)


def traces(monkeypatch, profile, asked, steps=30, start=0):
    """The first and last steps of the traces that are made."""
    made, said, now, signals = [], [], [start], set(asked)

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
    schedule = loop.Schedule(
        steps, 1, 0, 0, 1, profile, "f", is_asked, lambda *ends: said.append([*ends])
    )
    profiler = loop._Profiler(schedule, start)
    for now[0] in range(start + 1, steps + 1):
        profiler.before(now[0])
    now[0] = steps + 1
    profiler.close()
    assert said == made
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
