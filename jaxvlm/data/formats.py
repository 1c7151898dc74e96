"""Files of conversations about pictures -> records, and the problems of those that are none.

A format is a function in ``FORMATS``. It is chosen by what an item holds: ``conversations``
(LLaVA) or ``messages`` (OpenAI-like). Named sources are in ``SOURCES``.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxvlm.data.errors import DataError, Problem

PLACEHOLDER = "<image>"
"""Stands in a turn's text where a picture's tokens go, whatever the file or tokenizer says."""

_LLAVA_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
_ROLES = ("system", "user", "assistant")
UNUSED = frozenset(
    [
        "audio",
        "audios",
        "chosen",
        "label_mask",
        "objects",
        "rejected",
        "rejected_response",
        "system",
        "tool_calls",
        "tools",
        "video",
        "videos",
    ]
)
"""What other trainers read of a record and jaxvlm does not; ignored, it would be silently lost."""
_UNUSED_OF_TURN = frozenset(
    [
        "audio",
        "audios",
        "function_call",
        "image",
        "images",
        "loss_mask",
        "reasoning",
        "reasoning_content",
        "refusal",
        "thinking",
        "tool_call_id",
        "tool_calls",
        "tools",
        "video",
        "videos",
    ]
)
_TRAINED = frozenset(("loss", "train", "weight"))
"""A turn's own say on whether it is trained on; only "yes" is what happens anyway."""
_BREAKS = re.compile(rf"\n*{PLACEHOLDER}\n*")


class Turn(NamedTuple):
    """What one speaker says."""

    role: str
    """system | user | assistant."""
    content: str
    """Text, with one ``<image>`` for each picture."""


class Record(NamedTuple):
    """One conversation about some pictures (or none)."""

    id: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...]
    """Files, in the order of the placeholders."""
    tags: Mapping[str, str] = {}
    """Labels that evaluations report by, e.g. ``{"kind": "color"}``."""


class BadItem(Exception):
    """An item that is no record.

    Args:
        reason: why, in a few words that are the same for like items.
        detail: what is particular to this one.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def read(spec: str, image_root: str = "") -> tuple[list[Record], list[Problem]]:
    """Read a data file or a named source.

    Args:
        spec: ``FILE.json`` (LLaVA, or a list of messages), ``FILE.jsonl``, or a name in
            ``SOURCES`` such as ``easy-vqa:train``.
        image_root: folder that picture names are relative to; "" is the data file's.

    Returns:
        Records in the file's order, and a Problem for each item that is none.

    Raises:
        DataError: the file as a whole can't be used.
    """
    if spec in SOURCES:
        return SOURCES[spec](), []
    path = pathlib.Path(spec).expanduser()
    if not path.is_file():
        names = ", ".join(SOURCES)
        raise DataError(f"{spec or '(empty name)'}: no such file; give a .json or .jsonl: {names}")
    root = pathlib.Path(image_root).expanduser() if image_root else path.parent
    items, problems = items_of(path)
    records: list[Record] = []
    for where, item in items:
        identifier = where
        try:
            if not isinstance(item, dict):
                raise BadItem("not a JSON object")
            identifier = where if item.get("id") is None else str(item["id"])
            records.append(_record(identifier, item, root))
        except BadItem as bad:
            problems.append(Problem(identifier, bad.reason, bad.detail))
    if not records and not problems:
        raise DataError(f"{spec}: holds no record; give a file with at least one conversation")
    return records, problems


def items_of(path: pathlib.Path) -> tuple[list[tuple[str, Any]], list[Problem]]:
    """``[("file:line or index", raw item)]`` of a JSON array, object or JSON lines.

    Args:
        path: of the file.

    Returns:
        The items, and a Problem for each line that is none.

    Raises:
        DataError: the file as a whole can't be read.
    """
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise DataError(f"{path}: the file is empty; give one with at least one record")
    lines = data.split(b"\n")
    if data.lstrip()[:1] == b"[" or _is_one_object(data, lines):
        try:
            parsed = json.loads(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            bad_line = data[: error.start].count(b"\n") + 1
            raise DataError(f"{path}:{bad_line}: not UTF-8; save the file as UTF-8") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path}: not JSON: {error}; mend it there") from None
        parsed = parsed if isinstance(parsed, list) else [parsed]
        return [(f"{path.name}[{i}]", item) for i, item in enumerate(parsed)], []
    items: list[tuple[str, Any]] = []
    problems = []
    for number, line in enumerate(lines, 1):
        where = f"{path.name}:{number}"
        if not line.strip():
            continue
        try:
            items.append((where, json.loads(line.decode("utf-8"))))
        except UnicodeDecodeError:
            problems.append(Problem(where, "not UTF-8"))
        except (json.JSONDecodeError, RecursionError) as error:
            problems.append(Problem(where, "not JSON", str(error)))
    if not items and problems:
        raise DataError(
            f"{path}: neither JSON nor JSON lines ({problems[0]});"
            " give LLaVA JSON, or messages as JSONL"
        )
    return items, problems


def _is_one_object(data: bytes, lines: list[bytes]) -> bool:
    """Whether the file is a single pretty-printed object rather than one object a line."""
    first = next(line for line in lines if line.strip())
    return data.lstrip()[:1] == b"{" and first.strip() == b"{"


def _record(identifier: str, item: dict[str, Any], root: pathlib.Path) -> Record:
    """One raw item as a Record; raises BadItem."""
    keys = [key for key in FORMATS if key in item]
    if not keys:
        known = " nor ".join(map(repr, FORMATS))
        raise BadItem(f"neither {known}", f"keys: {', '.join(sorted(item))}")
    if len(keys) > 1:
        raise BadItem(f"both {' and '.join(map(repr, keys))}; which one is meant?")
    refuse_unused(item, UNUSED, "a field that is not used here")
    turns, inline = FORMATS[keys[0]](item)
    named = _listed(item)
    if inline.count("") not in (0, len(inline)) or (inline and "" not in inline and named):
        raise BadItem("pictures named both in the content and in 'images'")
    images = [i for i in inline if i] or named
    turns = [Turn(turn.role, tidy(turn.content)) for turn in turns]
    count = sum(turn.content.count(PLACEHOLDER) for turn in turns)
    if count == 0 and len(images) == 1:
        # What LLaVA's own files do: the picture stands before the first question.
        first = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
        turns[first] = Turn(turns[first].role, f"{PLACEHOLDER}{turns[first].content}")
        count = 1
    if count != len(images):
        detail = f"{count} placeholders, {len(images)} pictures"
        raise BadItem("placeholders and pictures differ in number", detail)
    _check_turns(turns)
    return Record(identifier, tuple(turns), tuple(_locate(name, root) for name in images))


def refuse_unused(item: Mapping[str, Any], unused: frozenset[str], reason: str) -> None:
    """Refuse what would change the training if it were read; null and empty say nothing."""
    found = sorted(key for key in unused & item.keys() if item[key] not in (None, "", [], {}))
    if found:
        raise BadItem(reason, ", ".join(found))


def tidy(text: str) -> str:
    """``text`` without the line breaks that LLaVA's files put around ``<image>``.

    What stands between a picture and a text is the chat template's to say; data in every format
    and prompts for generation agree this way.
    """
    return _BREAKS.sub(PLACEHOLDER, text)


def _check_turns(turns: list[Turn]) -> None:
    """What must hold for a conversation to be trained on."""
    for turn in turns:
        check_unicode(turn.content)
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise BadItem("no assistant turn")
    if not any(turn.content.strip() for turn in answers):
        raise BadItem("every assistant turn is empty")
    if any(PLACEHOLDER in turn.content for turn in answers):
        raise BadItem("a picture in an assistant turn")


def check_unicode(text: str) -> None:
    """Refuse what JSON may hold and no tokenizer takes: half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadItem("text that is not valid Unicode") from None


def _conversation(
    raw: Any, parse: Callable[[dict[str, Any]], tuple[Turn, list[str]]]
) -> tuple[list[Turn], list[str]]:
    """Turns, and for each picture in a content list its file ("" takes the next listed)."""
    if not isinstance(raw, list):
        raise BadItem("the conversation is not a list")
    if not raw:
        raise BadItem("empty conversation")
    turns: list[Turn] = []
    inline: list[str] = []
    for entry in raw:
        if not isinstance(entry, dict):
            raise BadItem("a turn is not an object")
        refuse_unused(entry, _UNUSED_OF_TURN, "a turn's field that is not used here")
        if any(entry.get(key) not in (None, 1, True) for key in _TRAINED):
            raise BadItem("a turn that says how much it is trained on")
        turn, names = parse(entry)
        turns.append(turn)
        inline += names
    return turns, inline


def _llava_turn(entry: dict[str, Any]) -> tuple[Turn, list[str]]:
    role = entry.get("from")
    if role is None:
        raise BadItem("a turn without 'from'")
    if not isinstance(role, str) or role not in _LLAVA_ROLES:
        raise BadItem("unknown role", repr(role))
    value = entry.get("value")
    if not isinstance(value, str):
        raise BadItem("a turn whose 'value' is not text")
    return Turn(_LLAVA_ROLES[role], value), []


def message_turn(entry: dict[str, Any]) -> tuple[Turn, list[str]]:
    """A turn of a list of messages, and the files of pictures that its content names.

    Args:
        entry: ``{"role": ..., "content": text or list of parts}``.

    Returns:
        The turn, ``<image>`` for each picture of a list; of these each one's file, "" if it takes
        the next of the record's.

    Raises:
        BadItem: what is wrong with it.
    """
    role = entry.get("role")
    if role is None:
        raise BadItem("a turn without 'role'")
    if role not in _ROLES:
        raise BadItem("unknown role", repr(role))
    content = entry.get("content")
    if isinstance(content, str):
        return Turn(role, content), []
    if not isinstance(content, list):
        raise BadItem("a turn whose 'content' is neither text nor a list")
    parts, names = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            if PLACEHOLDER in part["text"]:
                raise BadItem("'<image>' written inside a content list's text")
            parts.append(part["text"])
        elif kind in ("image", "image_url"):
            parts.append(PLACEHOLDER)
            names.append(_inline_name(part))
        else:
            raise BadItem("a content item of unknown type", repr(kind))
    return Turn(role, "".join(parts)), names


def _inline_name(part: dict[str, Any]) -> str:
    """The file that an image item names; "" if it takes the next of the record's 'images'."""
    for key in ("image", "path", "url", "image_url"):
        if part.get(key):
            value = part[key]
            value = value.get("url") if isinstance(value, dict) else value
            return file_name(value)
    return ""


def _listed(item: dict[str, Any]) -> list[str]:
    """The record's own list of pictures."""
    given = [item[key] for key in ("images", "image") if item.get(key) not in (None, "", [])]
    if not given:
        return []
    if len(given) > 1:
        raise BadItem("both 'image' and 'images'; which one is meant?")
    raw = given[0]
    names = raw if isinstance(raw, list) else [raw]
    return [
        file_name(n.get("path") or n.get("url") or n.get("image") if isinstance(n, dict) else n)
        for n in names
    ]


def file_name(value: Any) -> str:
    """A picture's file as a record names it; raises BadItem."""
    if not isinstance(value, str) or not value:
        raise BadItem("a picture's name is not text")
    if value.startswith(("http://", "https://", "data:")):
        raise BadItem("a picture that is not a file", value[:60])
    return value.removeprefix("file://")


def _locate(name: str, root: pathlib.Path) -> str:
    return str(root / name)


FORMATS: dict[str, Callable[[dict[str, Any]], tuple[list[Turn], list[str]]]] = {
    "conversations": lambda item: _conversation(item["conversations"], _llava_turn),
    "messages": lambda item: _conversation(item["messages"], message_turn),
}
"""The key that marks a format -> a function of an item: its turns, and the files of pictures
that the turns themselves name ("" takes the next of the item's ``image`` or ``images``). It raises
BadItem for an item that it can't read."""


def _easy_vqa(split: str) -> list[Record]:
    """The records of PyPI's easy-vqa, one a question."""
    try:
        import easy_vqa
    except ImportError:
        raise DataError(f"easy-vqa:{split}: not installed; run `pip install easy-vqa`") from None
    questions, answers, pictures = getattr(easy_vqa, f"get_{split}_questions")()
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    shapes = ("circle", "rectangle", "triangle")
    kinds = {"yes": {"kind": "yes/no"}, "no": {"kind": "yes/no"}}
    kinds |= {shape: {"kind": "shape"} for shape in shapes}
    return [
        Record(
            f"easy-vqa:{split}/{i}",
            (Turn("user", f"{PLACEHOLDER}{question}"), Turn("assistant", answer)),
            (paths[picture],),
            kinds.get(answer, {"kind": "color"}),
        )
        for i, (question, answer, picture) in enumerate(zip(questions, answers, pictures))
    ]


SOURCES: dict[str, Callable[[], list[Record]]] = {
    "easy-vqa:train": lambda: _easy_vqa("train"),
    "easy-vqa:test": lambda: _easy_vqa("test"),
}
"""Data sets known by name. A new one is a function that returns records."""
