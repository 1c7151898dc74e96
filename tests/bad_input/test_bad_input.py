"""300 bad inputs of every kind: each is used or refused by a line; none raises or blocks."""

from tests.bad_input import runner


def test_every_bad_input_is_refused_by_a_line():
    found = runner.outcomes(300)
    counts = runner.summary(found)
    assert len(found) >= 300 and set(counts["kinds"]) == set(runner.KINDS)
    assert not counts["places"], [o for o in found if o.what not in ("ok", "refused")]
    # Were every input used, or every one refused, the generators or this test would be broken.
    assert counts["total"]["refused"] > 100 and counts["total"]["ok"] > 10


def test_the_runner_sees_what_is_wrong():
    def divides(file, data):
        return 1 / 0

    assert runner.one("config", "a", b"", divides).what == "traceback"
    assert runner.one("config", "a", b"", lambda *_: bytearray(10**15)).what == "memory"
