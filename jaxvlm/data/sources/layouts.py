"""Conversations whose turns are fields of a record, as several projects write them.

``LAYOUTS`` has all of them, and the fields by which each is recognised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from jaxvlm.data.sources.fields import OF_TURN, Allowed, BadItem, is_empty
from jaxvlm.data.sources.member_names import InFile

Said = list[tuple[str, Any]]
"""Role and text of each turn."""


class Layout(NamedTuple):
    """A record's fields, and what they say."""

    needs: Set[str]
    """Names of fields by which it is recognised, all of them."""
    optional: Set[str]
    """Names of the other fields that are read."""
    turns: Callable[[dict[str, Any], Allowed], Said]


def by_rows(value: Any) -> Any:
    """A list of objects, also where it is stored as an object of lists of equal length, as Hugging
    Face's data sets had it until version 4."""
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        with contextlib.suppress(ValueError):
            return [dict(zip(value, each)) for each in zip(*value.values(), strict=True)]
    return value


def _history(item: dict[str, Any]) -> Said:
    pairs = item.get("history") or []
    if not isinstance(pairs, list) or any(not isinstance(x, list) or len(x) != 2 for x in pairs):
        raise BadItem("a 'history' that is not a list of [question, answer]")
    return [turn for asked, said in pairs for turn in (("user", asked), ("assistant", said))]


def _query(item: dict[str, Any], allowed: Allowed) -> Said:
    """ms-swift's ``query``, ``response`` and ``history``. Source: its Custom-dataset.md."""
    return [*_history(item), ("user", item["query"]), ("assistant", item["response"])]


def _instruction(item: dict[str, Any], allowed: Allowed) -> Said:
    """Alpaca's fields as LLaMA-Factory reads them, without a prompt around. Source: its
    data/README.md."""
    asked, more = item["instruction"], item.get("input")
    if not is_empty(more):
        if (
            not isinstance(asked, str)
            or not isinstance(more, str)
            or InFile in map(type, (asked, more))
        ):
            raise BadItem("an 'instruction' or 'input' that is not text")
        asked = f"{asked}\n{more}"
    return [*_history(item), ("user", asked), ("assistant", item["output"])]


def _texts(item: dict[str, Any], allowed: Allowed) -> Said:
    """The Cauldron's rounds. Source: nanoVLM's data/datasets.py."""
    rounds, said = by_rows(item["texts"]), list[tuple[str, Any]]()
    if not isinstance(rounds, list):
        raise BadItem("'texts' is not a list")
    for one in rounds:
        if not isinstance(one, dict):
            raise BadItem("a turn is not an object")
        one = allowed.fields_of("turn", one, {"user", "assistant"}, OF_TURN)
        said += [("user", one.get("user")), ("assistant", one.get("assistant"))]
    return said


def _caption(item: dict[str, Any], allowed: Allowed) -> Said:
    """A caption answers its image alone."""
    if all(is_empty(item.get(name)) for name in ("image", "images", "video", "videos")):
        raise BadItem("a caption without an image")
    return [("user", ""), ("assistant", item["caption"])]


def _question(item: dict[str, Any], allowed: Allowed) -> Said:
    return [("user", item["question"]), ("assistant", item["answer"])]


LAYOUTS: dict[str, Layout] = {
    "texts": Layout({"texts"}, set(), _texts),
    "query": Layout({"query", "response"}, {"history"}, _query),
    "instruction": Layout({"instruction", "output"}, {"input", "history"}, _instruction),
    "question": Layout({"question", "answer"}, set(), _question),
    "caption": Layout({"caption"}, set(), _caption),
}
"""Field that names a layout -> the layout."""
TEXTS = {"system", "query", "response", "instruction", "output", "input", "question", "answer"}
TEXTS |= {"caption"}
"""Fields that are text."""
