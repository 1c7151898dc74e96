"""Virtual time: who goes next, and that waiting takes few turns however long it is."""

from __future__ import annotations

import threading

import pytest

from jaxvlm.sites.turns import Turns


def test_the_thread_that_is_furthest_behind_goes_next():
    turns, order = Turns(["a", "b"]), []

    def work(name, seconds, count):
        for _ in range(count):
            turns.take(name, seconds)
            order.append(name)
        turns.leave(name)

    run([lambda: work("a", 3.0, 2), lambda: work("b", 2.0, 3)])
    assert order == ["b", "a", "b", "a", "b"] and turns.latest == 6.0


@pytest.mark.parametrize("seconds", [0.5, 120.0, 1e6])
def test_many_wait_for_one_without_asking_again_and_again(seconds):
    """Three threads wait for a slow one: they ask once or twice for each thing that it does."""
    names, polls, done, times = ["slow", "a", "b", "c"], [], [], []
    turns = Turns(names)

    def slow():
        for _ in range(3):
            turns.take("slow", seconds)
            done.append("slow")
        turns.leave("slow")

    def fast(name):
        turns.take(name, 0.1)
        for count in (1, 2, 3):
            while len(done) < count:
                polls.append(name)
                turns.wait_for_others(name, 1e9)
            times.append((count, turns.now()))
        turns.leave(name)

    run([slow, *(lambda name=name: fast(name) for name in names[1:])])
    assert len(polls) <= 3 * 3 * 3
    for count, now in times:
        assert count * seconds <= now < count * seconds + 1e-3


def run(works):
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "they wait for each other for ever"
