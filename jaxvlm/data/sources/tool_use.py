"""Functions that a model may call, its calls of them, and their results, in conversations.

Calls are what chat templates of Hugging Face take: ``{"type": "function", "function": {"name": ...,
"arguments": {...}}}``, with arguments as an object, not as the JSON text that OpenAI has. Both are
read, and so are the roles by which ms-swift and LLaMA-Factory tell calls and results.
"""

from __future__ import annotations

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


def with_joined_calls(turns: Sequence[Any]) -> list[Any]:
    """Turns in which calls that follow each other, each a turn of its own, are one turn's."""
    joined: list[Any] = []
    for turn in turns:
        last = joined[-1] if joined else None
        both_call = last and turn.role == last.role == "assistant" and turn.calls and last.calls
        if last and both_call and not turn.content:
            calls = [call for part in (last.calls, turn.calls) for call in json.loads(part)]
            trained = last.trained and turn.trained
            joined[-1] = last._replace(calls=_text(calls), trained=trained)
        else:
            joined.append(turn)
    return joined


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
        text: its :attr:`Turn.calls`.
    """
    if not text:
        return {}
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
