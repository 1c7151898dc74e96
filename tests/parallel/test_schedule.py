"""Pipeline schedules: what they promise, checked by simulation."""

from __future__ import annotations

import pytest

from jaxvlm.config import ConfigError
from jaxvlm.parallel.pipeline.schedule import one_way, rounds, timetable, virtual_stage_moves

CASES = [
    (name, S, M, V)
    for name, V in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
    for S, M in ((2, 2), (2, 6), (4, 4), (4, 12), (3, 9))
] + [
    ("1f1b", 4, 1, 1),
    ("1f1b", 4, 3, 1),
    ("gpipe", 3, 2, 1),
    ("1f1b", 1, 3, 1),
    *(("zero_bubble", S, M, 1) for S, M in ((1, 2), (2, 2), (2, 6), (4, 1), (4, 4), (4, 12))),
]


def play(table, S, M, V):
    """Runs a table on names instead of arrays; each array may only hold what a stage was sent."""
    inbox, d_inbox = [None] * S, [None] * S
    kept = [[None] * table.kept for _ in range(S)]
    rest = [[None] * table.kept_rest for _ in range(S)]
    begun, ended = [None] * table.kept_begin, [None] * table.kept_end
    done = {"forward": set(), "backward": set(), "begin": set(), "weights": set()}
    for t in range(len(table.forward)):
        if table.begin[t] >= 0:
            begun[table.begin_slot[t]] = table.begin[t]
        sent, left = [None] * S, None
        for s in range(S):
            m, v = table.forward[t, s], table.forward_virtual_stage[t, s]
            if m < 0:
                continue
            if (s, v) == (0, 0):
                assert table.begin[t] == m
            else:
                assert inbox[s] == (m, v * S + s), "it has just come"
            kept[s][table.forward_slot[t, s]] = (m, v)
            done["forward"].add((m, v * S + s))
            sent[s] = (m, v * S + s + 1)
            if v * S + s == V * S - 1:
                left = m
        inbox = [sent[(s - 1) % S] for s in range(S)]
        assert (left is None and table.end[t] < 0) or left == table.end[t]
        if left is not None:
            ended[table.end_slot[t]] = left
        sent = [None] * S
        for s in range(S):
            m, v = table.backward[t, s], table.backward_virtual_stage[t, s]
            if m < 0:
                continue
            if v * S + s == V * S - 1:
                assert ended[table.end_back_slot[t]] == m
            else:
                assert d_inbox[s] == (m, v * S + s)
            assert kept[s][table.backward_slot[t, s]] == (m, v), "nothing has taken its place"
            done["backward"].add((m, v * S + s))
            sent[s] = (m, v * S + s - 1)
            assert (table.begin_back[t] == m) == ((s, v) == (0, 0)) or s
            if table.kept_rest:
                rest[s][table.rest_slot[t, s]] = (m, v)
        d_inbox = [sent[(s + 1) % S] for s in range(S)]
        m, v = table.weights[t], table.weights_virtual_stage[t]
        for s in range(S if m >= 0 else 0):
            assert kept[s][table.weights_slot[t, s]] == (m, v), "it is still there"
            assert rest[s][table.rest_back_slot[t, s]] == (m, v)
            done["weights"].add((m, v * S + s))
        if table.begin_back[t] >= 0:
            assert begun[table.begin_back_slot[t]] == table.begin_back[t]
            done["begin"].add(table.begin_back[t])
    return done


@pytest.mark.parametrize(("name", "S", "M", "V"), CASES)
def test_each_unit_is_done_once_with_what_it_needs(name, S, M, V):
    table = timetable(name, S, M, V)
    done = play(table, S, M, V)
    units = {(m, c) for m in range(M) for c in range(S * V)}
    assert done["forward"] == done["backward"] == units
    assert done["begin"] == set(range(M))
    if name == "zero_bubble":
        assert done["weights"] == units
        assert table.busy == 3 * M / (3 * M + 2 * (S - 1))
        assert table.kept_rest <= S
    else:
        assert not done["weights"] and not table.kept_rest
        assert table.busy == M * V / (M * V + S - 1)
    assert len(table.forward) == (2 if name == "gpipe" else 1) * (M * V + S - 1) + (
        0 if name == "gpipe" else (V + 1) * S - 1 - S
    )
    if name == "gpipe":
        assert table.kept == M == table.kept_end
    else:
        assert table.kept <= (V + 1) * S - 1 and table.kept_end == 1


def test_in_flight_is_bounded_by_stages():
    kept = [timetable("1f1b", 4, M).kept for M in (8, 16, 64)]
    assert kept == [7, 7, 7]
    assert [timetable("zero_bubble", 4, M).kept for M in (8, 16, 64)] == [7, 7, 7]
    assert [timetable("interleaved", 4, M, 2).kept for M in (8, 16, 64)] == [11] * 3
    assert [timetable("gpipe", 4, M).kept for M in (8, 16, 64)] == [8, 16, 64]


def test_microbatches_that_stages_do_not_divide():
    with pytest.raises(ConfigError, match=r"config\.microbatches=6 is not a multiple"):
        timetable("interleaved", 4, 6, 2)


@pytest.mark.parametrize(("S", "V"), [(2, 2), (4, 2), (2, 4), (4, 3), (3, 3), (1, 2)])
def test_virtual_stages_come_where_the_schedule_wants_them(S, V):
    moves = virtual_stage_moves(S, V)
    assert moves[(1 % S, 1)] == divmod(S + 1 % S, V)
    for there in (moves, {source: to for to, source in moves.items()}):
        got = {}
        for far, sent, put in rounds(there, S):
            for s in range(S):
                to = (s + far) % S
                if put[to] >= 0:
                    assert (to, put[to]) not in got
                    got[to, put[to]] = (s, sent[s])
        assert got == there


@pytest.mark.parametrize(("name", "S", "M", "V"), CASES)
def test_one_way_is_the_same_way_and_no_longer(name, S, M, V):
    there, both = one_way(timetable(name, S, M, V)), timetable(name, S, M, V)
    ticks = M * V + S - 1
    for column in ("forward", "forward_virtual_stage", "begin", "end"):
        assert (getattr(there, column) == getattr(both, column)[:ticks]).all()
    assert len(there.forward) == ticks == there.span and there.units == M * V
    assert (both.end[ticks:] < 0).all() and there.kept == there.kept_begin == there.kept_end == 0
