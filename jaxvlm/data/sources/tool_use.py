"""Functions that a model may call, its calls of them, and their results, in conversations.

Calls are what chat templates of Hugging Face take: ``{"type": "function", "function": {"name": ...,
"arguments": {...}}}``, with arguments as an object, not as the JSON text that OpenAI has. Both are
read, and so are the roles by which ms-swift and LLaMA-Factory tell calls and results.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from jaxvlm.config import json_text
from jaxvlm.data.sources.fields import BadItem, is_empty

CALL_ROLES = frozenset(["tool_call", "function_call"])
"""Roles of ms-swift and of LLaMA-Factory's ShareGPT: the text is a call in JSON."""
RESULT_ROLES = frozenset(["tool", "tool_response", "observation"])
"""Roles of a call's result; the first is OpenAI's."""
_BAD_CALL = "a call of a function that has no name or no object of arguments"


def tools(value: Any) -> str:
    """The functions that a record's ``tools`` describe, as JSON text; "" for none.

    Args:
        value: a list of functions, or its JSON text.

    Raises:
        BadItem: it is something else.
    """
    if is_empty(value):
        return ""
    listed = _parsed(value)
    reason = "'tools' is not a list of functions with names"
    if not isinstance(listed, list):
        raise BadItem(reason, type(listed).__name__)
    described = []
    for one in listed:
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise BadItem(reason, str(one)[:60])
        described.append({"type": "function", "function": function})
    return _text(described)


def calls(value: Any) -> str:
    """A turn's calls as JSON text; "" for none.

    Args:
        value: a list of calls, or one, or the JSON text of either.

    Raises:
        BadItem: it is something else.
    """
    if is_empty(value):
        return ""
    listed = _parsed(value)
    made = []
    for one in listed if isinstance(listed, list) else [listed]:
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise BadItem(_BAD_CALL, str(one)[:60])
        arguments = function.get("arguments")
        arguments = {} if is_empty(arguments) else _parsed(arguments)
        others = function.keys() - {"name", "arguments", "id", "type", "index"}
        if not isinstance(arguments, dict) or others:
            raise BadItem(_BAD_CALL, str(one)[:60])
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        made.append(call if is_empty(one.get("id")) else {"id": one["id"], **call})
    return _text(made)


def is_call(entry: dict[str, Any]) -> bool:
    """Whether a turn's role says that its text is a call."""
    role = entry.get("role", entry.get("from"))
    return isinstance(role, str) and role in CALL_ROLES


def joined(turn: Any, call: Any) -> Any:
    """An assistant's turn and the call that follows it as a turn of its own, as one turn.

    Raises:
        BadItem: one of them is trained and the other is not.
    """
    if turn.trained != call.trained:
        raise BadItem("a call that is trained otherwise than what the assistant says before it")
    calls = [one for part in (turn.calls, call.calls) if part for one in json.loads(part)]
    return turn._replace(calls=_text(calls))


def in_order(turns: Sequence[Any]) -> list[Any]:
    """Turns with results in the order of their calls, where both have ids.

    Raises:
        BadItem: a result's id is that of no call before it, or a call is of a function that the
            first turn's ``tools`` do not have.
    """
    known = {one["function"]["name"] for one in json.loads(turns[0].tools or "[]")}
    ordered, places = list(turns), dict[str, int]()
    for i, turn in enumerate(turns):
        if turn.role == "assistant":
            made = json.loads(turn.calls or "[]")
            names = {call["function"]["name"] for call in made}
            if known and names - known:
                raise BadItem("a call of a function that is not in 'tools'", min(names - known))
            places = {str(call["id"]): k for k, call in enumerate(made) if "id" in call}
        elif turn.role == "tool" and turns[i - 1].role != "tool":
            results = list(itertools.takewhile(lambda x: x.role == "tool", turns[i:]))
            ids = [json.loads(x.calls or "{}").get("tool_call_id") for x in results]
            if places and all(ids):
                if unknown := [x for x in ids if x not in places]:
                    raise BadItem("a result of a call that is not before it", unknown[0])
                by_call = sorted(zip(ids, results, strict=True), key=lambda x: places[x[0]])
                ordered[i : i + len(results)] = [x for _, x in by_call]
    return ordered


def result(entry: dict[str, Any]) -> str:
    """Which call a turn's text is the result of, as JSON text: ``tool_call_id`` and ``name``."""
    given = {key: entry[key] for key in ("tool_call_id", "name") if not is_empty(entry.get(key))}
    if any(not isinstance(value, str) for value in given.values()):
        raise BadItem("a result's 'tool_call_id' or 'name' is not text")
    return _text(given) if given else ""


def of_message(role: str, text: str) -> dict[str, Any]:
    """What a message of a chat template has besides role and content.

    Args:
        role: of the turn.
        text: its :attr:`Turn.calls`, not empty.
    """
    return {"tool_calls": json.loads(text)} if role == "assistant" else json.loads(text)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _parsed(value: Any) -> Any:
    """What JSON text says; anything else as it is, without the fields that a table left empty."""
    if isinstance(value, str):
        try:
            return json_text.parse(value)
        except ValueError:
            raise BadItem("a function or a call that is not JSON", value[:60]) from None
    return _filled(value)


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(part) for key, part in value.items() if part is not None}
    return [_filled(part) for part in value] if isinstance(value, list) else value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
