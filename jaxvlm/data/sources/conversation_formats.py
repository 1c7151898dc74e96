"""Read files of conversations about images into records; invalid items become problems.

A format is a function in ``FORMATS``, chosen by the key that an item has: ``conversations``
(LLaVA), ``messages`` (OpenAI-like), or that of a layout in ``layouts.py``. Named sources are in
``SOURCES``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import DataConfig, extension
from jaxvlm.data import image_placeholders
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import (
    custom_format,
    fetched,
    fields,
    members,
    tables,
    tool_use,
    visuals,
)
from jaxvlm.data.sources.fetched import OfUrl
from jaxvlm.data.sources.fields import OF_IMAGE, OF_TURN, Allowed, BadItem, is_empty, name_of
from jaxvlm.data.sources.layouts import LAYOUTS, TEXTS, Layout, by_rows
from jaxvlm.data.sources.member_names import InFile, as_video, bare, is_video
from jaxvlm.data.sources.spool import Spool

_OF_TAR = dict.fromkeys(tables.IMAGES, "image") | {"txt": "caption"}
_OF_TAR |= dict.fromkeys(tables.VIDEOS, "video")
"""Fields of a tar's plain ``KEY.jpg``, ``KEY.mp4`` and ``KEY.txt``."""
PLACEHOLDER = image_placeholders.MARK

_ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {
    **{role: role for role in _ROLES},
    "developer": "system",  # OpenAI's newer name
    **dict.fromkeys(tool_use.CALL_ROLES, "assistant"),
    **dict.fromkeys(tool_use.RESULT_ROLES, "tool"),
}
"""Role in a file -> :attr:`Turn.role`."""
_LLAVA_ROLE_OF = _ROLE_OF | {"human": "user", "gpt": "assistant", "model": "assistant"}
_TRAINED = frozenset(["loss", "loss_scale", "loss_weight", "train", "weight"])
"""Fields of a turn or a content part that say whether it is trained: 1 or true, 0 or false."""
MAX_TURNS = 512
"""Turns of a conversation. Each answer's place is found by rendering what comes before it, so the
work grows with the square of the turns: 2,000 turns took 20 seconds."""
_BREAKS = re.compile(rf"\n*{PLACEHOLDER}\n*")


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: str
    """system | user | assistant | tool."""
    content: str
    """Text, with one ``<image>`` for each image or video."""
    trained: bool = True
    """Whether the loss covers the turn, if it is an assistant's; it covers no other."""
    calls: str = ""
    """An assistant's calls of functions, JSON text as :func:`tool_use.calls` makes it; a tool's
    turn: which call it answers, see :func:`tool_use.result`."""
    tools: str = ""
    """Functions that the model may call, JSON text; of a conversation's first turn alone."""


class Record(NamedTuple):
    """One conversation, with any number of images."""

    id: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...]
    """Image files, in the order of the placeholders; a video's name ends in ``::video``."""
    tags: Mapping[str, str] = {}
    """Labels that evaluations group their results by, e.g. ``{"kind": "color"}``."""


def read(
    spec: str, config: DataConfig = tables.DEFAULT, of_url: OfUrl | None = None
) -> tuple[Sequence[Record], list[Problem]]:
    """Read a data file, several, or a named source.

    Args:
        spec: what :func:`jaxvlm.data.sources.tables.each` reads, or a name in ``SOURCES`` such as
            ``easy-vqa:train``.
        config: data settings; of these, ``image_root``, ``ignored_fields``, ``literal_markers``,
            ``format``, ``column_mapping``, ``tsv_quoting`` and ``fetched`` are read.
        of_url: gives the files of images at URLs; ``None``: as ``data.fetched`` says.

    Returns:
        Records in the file's order, from a temporary file if they are many; and a Problem for each
        item that is not a valid record.

    Raises:
        DataError: the file as a whole can't be used.
    """
    own = extension.is_set(config.format, custom_format.PATH)
    if spec in SOURCES and not own:
        return SOURCES[spec](), []
    raw: Iterable[tables.Raw | Problem]
    if own:
        items = custom_format.read_items(config, spec, Record)
        raw = tables.raw_records(items, spec, config)
    else:
        raw = tables.each(spec, config, SOURCES, TEXTS)
    allowed = Allowed.of(
        config.ignored_fields, config.literal_markers, of_url or fetched.of_config(config)
    )
    records = record_spool()
    unread, problems = list[Problem](), list[Problem]()
    columns, splits = tables.Columns(spec, config), fields.Splits(spec, config)
    for found in raw:
        if isinstance(found, Problem):
            unread.append(found)
            continue
        identifier, item, locate, _ = found
        try:
            if isinstance(item, Problem):
                problems.append(item)
                continue
            if isinstance(item, Record):
                identifier = id_of(item.id, found.where)
                records.add(_own_record(item._replace(id=identifier), locate, allowed))
                continue
            if not isinstance(item, dict):
                raise BadItem("not a JSON object")
            columns.add(item)
            item = {
                k: v
                for k, v in item.items()
                if k not in config.ignored_fields and v is not None  # as tables without it have
            }
            item = tables.renamed(item, columns.names, _OF_TAR)
            splits.add(item)
            identifier = id_of(item.get("id"), found.where)
            records.add(_record(identifier, item, locate, allowed))
        except BadItem as bad:
            problems.append(Problem(identifier, bad.reason, bad.detail))
    columns.check()
    splits.check()
    return records.items(), [*unread, *problems]


def record_spool() -> Spool[Record]:
    """Takes any number of records."""

    def made(plain: Any) -> Record:
        name, turns, images, tags = plain  # lists, which JSON has in place of tuples
        return Record(name, tuple(Turn(*turn) for turn in turns), tuple(images), tags)

    return Spool(tuple, made)


def _record(
    identifier: str, item: dict[str, Any], locate: Callable[[str], str], allowed: Allowed
) -> Record:
    """Parse one raw item to a Record; raises BadItem."""
    keys = [key for key in FORMATS if key in item and (
        key not in LAYOUTS or LAYOUTS[key].needs <= item.keys())]  # fmt: skip
    if not keys:
        known = " nor ".join(map(repr, FORMATS))
        raise BadItem(f"neither {known}", f"keys: {', '.join(sorted(item))}")
    if len(keys) > 1:  # a table of several kinds of records has empty cells
        keys = [key for key in keys if not is_empty(item[key])] or keys[:1]
    if len(keys) > 1:
        raise BadItem(f"both {' and '.join(map(repr, keys))}; which one is meant?")
    layout = LAYOUTS.get(keys[0])
    own = layout.needs | layout.optional if layout else {keys[0]}
    item = allowed.fields_of("record", item, {"id", "system", "tools", *own, *visuals.IN_LISTS})
    turns, inline = FORMATS[keys[0]](item, allowed)
    if not is_empty(item.get("system")):
        if turns and turns[0].role == "system":
            raise BadItem("a system prompt both in 'system' and in the conversation")
        turns.insert(0, Turn("system", _text(item["system"], "'system' is not text")))
    named = [visuals.listed(item, kind, allowed) for kind in ("image", "video")]
    texts, images = visuals.in_order(
        [turn.content for turn in turns], inline, named[0], named[1], allowed
    )
    turns = [t._replace(content=tidy(text)) for t, text in zip(turns, texts, strict=True)]
    if described := tool_use.tools(item.get("tools")):
        turns[0] = turns[0]._replace(tools=described)
    record = Record(identifier, tuple(tool_use.in_order(turns)), tuple(images))
    return _checked_record(record, locate, allowed, several_lead=layout is not None)


def _checked_record(
    record: Record, locate: Callable[[str], str], allowed: Allowed, several_lead: bool = False
) -> Record:
    """``record`` with a placeholder for each image, and images' paths; raises BadItem.

    Args:
        record: as it was read.
        locate: gives an image's path.
        allowed: markers of other formats that are text.
        several_lead: whether several images, too, without placeholders stand at the beginning.
    """
    turns, images = list(record.turns), record.images
    count = sum(turn.content.count(PLACEHOLDER) for turn in turns)
    if count == 0 and (len(images) == 1 or several_lead):
        # As in LLaVA's own files, the image goes before the first question.
        first, count = (
            next((i for i, turn in enumerate(turns) if turn.role == "user"), 0),
            len(images),
        )
        marked = f"{PLACEHOLDER * count}{turns[first].content}"
        turns[first] = turns[first]._replace(content=marked)
    if count != len(images):
        detail = f"{count} placeholders, {len(images)} images"
        raise BadItem("placeholders and images differ in number", detail)
    _check_turns(turns)
    for turn in turns if images else ():
        allowed.refuse_markers(turn.content)
    files = tuple(
        as_video(locate(bare(name))) if is_video(name) else locate(name) for name in images
    )
    return record._replace(turns=tuple(turns), images=files)


def _own_record(record: Record, locate: Callable[[str], str], allowed: Allowed) -> Record:
    """A Record that a format of the user's own made, checked like one of a file; raises BadItem."""
    tags = dict(record.tags)
    if not all(isinstance(text, str) for pair in tags.items() for text in pair):
        raise BadItem("tags that are not text", str(tags)[:60])
    for turn in record.turns:
        if not isinstance(turn, Turn):
            raise BadItem("a turn is not an object", f"{type(turn).__name__}, not a Turn")
        if turn.role not in _ROLES:
            raise BadItem("unknown role", repr(turn.role))
        if not isinstance(turn.content, str):
            raise BadItem("a turn whose 'content' is neither text nor a list")
    named = []
    for name in record.images:
        video = isinstance(name, str) and is_video(name)
        article = "a video" if video else "an image"
        file = visuals.file_name(bare(name) if video else name, allowed, article)
        named.append(as_video(file) if video else file)
    texts = [turn.content for turn in record.turns]
    texts, files = visuals.in_order(texts, tuple(named), (), (), allowed)
    turns = tuple(
        turn._replace(content=text, trained=bool(turn.trained))
        for turn, text in zip(record.turns, texts, strict=True)
    )
    record = record._replace(turns=turns, images=tuple(files), tags=tags)
    return _checked_record(record, locate, allowed)


def id_of(value: Any, where: str) -> str:
    """Return a record's id as printable text, or ``where`` if it has none; raises BadItem."""
    if is_empty(value):
        return where
    name = name_of(value)
    if name is None:
        raise BadItem("an id that is neither text nor a number")
    check_unicode(name)
    return name


def tidy(text: str) -> str:
    """Remove the line breaks that LLaVA's files put around ``<image>``.

    The chat template determines what separates an image from a text; in this way data in every
    format and prompts for generation agree.
    """
    return _BREAKS.sub(PLACEHOLDER, text)


def _check_turns(turns: list[Turn]) -> None:
    """Check that a conversation can be trained on; raises BadItem."""
    if len(turns) > MAX_TURNS:
        raise BadItem("a conversation of more than 512 turns", f"{len(turns)} turns")
    for i, turn in enumerate(turns):
        for text in (turn.content, turn.calls, turn.tools):
            check_unicode(text)
        if turn.role == "tool" and not (i and (turns[i - 1].role == "tool" or turns[i - 1].calls)):
            raise BadItem("a function's result without a call before it", f"turn {i}")
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise BadItem("no assistant turn")
    if not any(turn.trained for turn in answers):
        raise BadItem("no assistant turn that is trained")
    for i, turn in enumerate(turns):
        is_said = turn.content.strip() or turn.calls
        if turn.role == "assistant" and turn.trained and not is_said:
            raise BadItem("an assistant turn is empty", f"turn {i}")
    if any(PLACEHOLDER in turn.content for turn in answers):
        raise BadItem("an image in an assistant turn")


def check_unicode(text: str) -> None:
    """Refuse half of a surrogate pair, which JSON may contain and no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadItem("text that is not valid Unicode") from None


ParseTurn = Callable[[dict[str, Any], Allowed], tuple[Turn, list[str]]]


def _conversation(raw: Any, parse: ParseTurn, allowed: Allowed) -> tuple[list[Turn], list[str]]:
    """Parse turns, and for each image in a content list its file ("" takes the next listed)."""
    raw = by_rows(raw)
    if not isinstance(raw, list):
        raise BadItem("the conversation is not a list")
    if not raw:
        raise BadItem("empty conversation")
    turns: list[Turn] = []
    inline: list[str] = []
    for entry in raw:
        if not isinstance(entry, dict):
            raise BadItem("a turn is not an object")
        turn, names = parse(entry, allowed)
        if tool_use.is_call(entry) and turns and turns[-1].role == "assistant":
            turns[-1] = tool_use.joined(turns[-1], turn)
        else:
            turns.append(turn)
        inline += names
    return turns, inline


def _text(value: Any, reason: str) -> str:
    """Text as a record gives it, or an integer's digits; raises BadItem with ``reason``."""
    if isinstance(value, InFile):
        return members.text(value)
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bool | float):  # true, True or yes? 1, 1.0 or 1e0?
        written = json.dumps(value)
        raise BadItem(reason, f'{written}; write the words that are meant, such as "{written}"')
    raise BadItem(reason, "null" if value is None else type(value).__name__)


def _own_weight(item: dict[str, Any], is_answer: bool) -> bool | None:
    """Whether a turn, or a part of it, says that it is trained; None if it says nothing.

    Args:
        item: its fields.
        is_answer: whether it is the assistant's; nothing else can be trained.

    Raises:
        BadItem: it asks for what jaxvlm does not do.
    """
    given = {key: item[key] for key in sorted(_TRAINED) if not is_empty(item.get(key))}
    if not given:
        return None
    detail = ", ".join(f"{key}: {value!r}"[:60] for key, value in given.items())
    if any(value not in (0, 1) for value in given.values()) or len(set(given.values())) > 1:
        raise BadItem("a training weight other than 0 and 1", detail)
    trained = 1 in given.values()
    if trained and not is_answer:
        raise BadItem("a turn that is to be trained and is not the assistant's", detail)
    return trained


def _is_trained(entry: dict[str, Any], role: str) -> bool:
    """``Turn.trained`` of a turn; raises BadItem."""
    is_answer = role == "assistant"
    return _own_weight(entry, is_answer) is not False or not is_answer


def _llava_turn(entry: dict[str, Any], allowed: Allowed) -> tuple[Turn, list[str]]:
    entry = allowed.fields_of("turn", entry, _TRAINED | {"from", "value"}, OF_TURN)
    given = entry.get("from")
    if given is None:
        raise BadItem("a turn without 'from'")
    if not isinstance(given, str) or given not in _LLAVA_ROLE_OF:
        raise BadItem("unknown role", repr(given)[:60])
    role = _LLAVA_ROLE_OF[given]
    if given in tool_use.CALL_ROLES:
        return _call(entry.get("value"), _is_trained(entry, role)), []
    value = _text(entry.get("value"), "a turn whose 'value' is not text")
    return Turn(role, value, _is_trained(entry, role)), []


def _call(value: Any, trained: bool) -> Turn:
    """The turn of a call that is text."""
    made = tool_use.calls(value)
    if not made:
        raise BadItem("an assistant turn is empty")
    return Turn("assistant", "", trained, made)


def message_turn(
    entry: dict[str, Any], allowed: Allowed = fields.DEFAULT
) -> tuple[Turn, list[str]]:
    """Parse a turn of a list of messages, and the image files that its content names.

    Args:
        entry: ``{"role": ..., "content": text or list of parts}``.
        allowed: other fields of a turn or a part that are passed over.

    Returns:
        The turn, with ``<image>`` for each image of a content list; and the file of each of these
        images, "" if it takes the next of the record's.

    Raises:
        BadItem: the message is invalid; the reason says why.
    """
    given = entry.get("role")
    if given is None:
        raise BadItem("a turn without 'role'")
    if not isinstance(given, str) or given not in _ROLE_OF:
        raise BadItem("unknown role", repr(given)[:60])
    role = _ROLE_OF[given]
    of_tools = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}.get(role, set())
    entry = allowed.fields_of("turn", entry, _TRAINED | {"role", "content", *of_tools}, OF_TURN)
    trained, is_answer = _is_trained(entry, role), role == "assistant"
    content = entry.get("content")
    if given in tool_use.CALL_ROLES:
        return _call(content, trained), []
    calls = tool_use.result(entry) if role == "tool" else tool_use.calls(entry.get("tool_calls"))
    if calls and is_answer and content is None:
        content = ""
    if not isinstance(content, list):
        text = _text(content, "a turn whose 'content' is neither text nor a list")
        return Turn(role, text, trained, calls), []
    parts, names = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in visuals.FIELDS_OF_PART:
            raise BadItem("a content item of unknown type", repr(kind)[:60])
        read = _TRAINED | visuals.FIELDS_OF_PART[kind]
        part = allowed.fields_of("content part", part, read, OF_IMAGE)
        if _own_weight(part, is_answer) not in (None, trained and is_answer):
            raise BadItem("a content part that is trained otherwise than its turn", str(part)[:60])
        if kind == "text":
            parts.append(_text(part.get("text"), "a content part whose 'text' is not text"))
            for mark in visuals.MARKS.values():
                if mark in parts[-1] and mark not in allowed.literal:
                    raise BadItem(f"'{mark}' written inside a content list's text")
        else:
            parts.append(visuals.MARKS[visuals.PARTS[kind]])
            names.append(visuals.of_part(part, allowed))
    return Turn(role, "".join(parts), trained, calls), names


def _of_layout(
    layout: Layout, item: dict[str, Any], allowed: Allowed
) -> tuple[list[Turn], list[str]]:
    said = layout.turns(item, allowed)
    if not said:
        raise BadItem("empty conversation")
    return [Turn(role, _text(text, "a turn that is not text")) for role, text in said], []


FORMATS: dict[str, Callable[[dict[str, Any], Allowed], tuple[list[Turn], list[str]]]] = {
    "conversations": lambda item, allowed: _conversation(
        item["conversations"], _llava_turn, allowed
    ),
    "messages": lambda item, allowed: _conversation(item["messages"], message_turn, allowed),
    **{key: functools.partial(_of_layout, layout) for key, layout in LAYOUTS.items()},
}
"""Key that identifies a format -> parser of an item, which returns its turns, and the image files
that the turns themselves name ("" takes the next of the item's ``image`` or ``images``). It raises
BadItem for an invalid item."""


def _easy_vqa(split: str) -> list[Record]:
    """Records of PyPI's easy-vqa, one per question."""
    try:
        import easy_vqa
    except ImportError:
        raise DataError(f"easy-vqa:{split}: not installed; run `pip install easy-vqa`") from None
    questions, answers, images = getattr(easy_vqa, f"get_{split}_questions")()
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    shapes = ("circle", "rectangle", "triangle")
    kinds = {"yes": {"kind": "yes/no"}, "no": {"kind": "yes/no"}}
    kinds |= {shape: {"kind": "shape"} for shape in shapes}
    return [
        Record(
            f"easy-vqa:{split}/{i}",
            (Turn("user", f"{PLACEHOLDER}{question}"), Turn("assistant", answer)),
            (paths[image],),
            kinds.get(answer, {"kind": "color"}),
        )
        for i, (question, answer, image) in enumerate(zip(questions, answers, images))
    ]


SOURCES: dict[str, Callable[[], list[Record]]] = {
    "easy-vqa:train": lambda: _easy_vqa("train"),
    "easy-vqa:test": lambda: _easy_vqa("test"),
}
"""Named data sources. A new one is a function that returns records."""
