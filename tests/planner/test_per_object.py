"""Memoization by identity: one result per object and arguments, never another object's."""

from __future__ import annotations

import dataclasses

from builders import TINY

from jaxvlm.planner.request import per_object, trainable_params


def test_a_result_is_kept_for_its_object_and_arguments_alone():
    calls = []

    @per_object.per_object
    def width(config, times):
        calls.append((config, times))
        return config.decoder.width * times

    equal = dataclasses.replace(TINY)
    assert [width(TINY, 2), width(TINY, 2), width(TINY, 3)] == [
        TINY.decoder.width * n for n in (2, 2, 3)
    ]
    assert len(calls) == 2
    assert width(equal, 2) == width(TINY, 2) and len(calls) == 3  # equal, not the same
    assert width(TINY, times=5) == TINY.decoder.width * 5
    assert width(TINY, times=6) == TINY.decoder.width * 6


def test_a_config_that_was_freed_leaves_no_result_to_another(monkeypatch):
    monkeypatch.setattr(per_object, "_MOST", 3)

    @per_object.per_object
    def width(config):
        return config.decoder.width

    for n in range(1, 20):  # objects are freed when results are dropped: their ids come again
        decoder = dataclasses.replace(TINY.decoder, width=n)
        assert width(dataclasses.replace(TINY, decoder=decoder)) == n


def test_plain_configs_are_one_object():
    assert trainable_params.plain(TINY) is trainable_params.plain(TINY)
