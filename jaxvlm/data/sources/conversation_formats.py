"""Read files of conversations about images into records; invalid items become problems.

A format is a function in ``FORMATS``, chosen by the key that an item has: ``conversations``
(LLaVA) or ``messages`` (OpenAI-like). Named sources are in ``SOURCES``.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxvlm.config import DataConfig, extension, json_text
from jaxvlm.data import image_placeholders
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.sources import custom_format, fields
from jaxvlm.data.sources.fields import OF_IMAGE, OF_TURN, Allowed, BadItem, is_empty, name_of

DEFAULT = DataConfig()
PLACEHOLDER = image_placeholders.MARK

_LLAVA_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
_ROLES = ("system", "user", "assistant")
_LISTS_OF_IMAGES = ("images", "image")
_FIELDS_OF_IMAGE = ("path", "url", "image", "bytes")
_NAMES_OF_IMAGE = ("image", "path", "url", "image_url")
_FIELDS_OF_PART = {
    "text": frozenset(["type", "text"]),
    "image": frozenset(["type", *_NAMES_OF_IMAGE]),
    "image_url": frozenset(["type", *_NAMES_OF_IMAGE]),
}
_TRAINED = frozenset(["loss", "loss_scale", "loss_weight", "train", "weight"])
"""Fields of a turn or a content part that say whether it is trained: 1 or true, 0 or false."""
MAX_TURNS = 512
"""Turns of a conversation. Each answer's place is found by rendering what comes before it, so the
work grows with the square of the turns: 2,000 turns took 20 seconds."""
_BREAKS = re.compile(rf"\n*{PLACEHOLDER}\n*")


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: str
    """system | user | assistant."""
    content: str
    """Text, with one ``<image>`` for each image."""
    trained: bool = True
    """Whether the loss covers the turn, if it is an assistant's; it covers no other."""


class Record(NamedTuple):
    """One conversation, with any number of images."""

    id: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...]
    """Image files, in the order of the placeholders."""
    tags: Mapping[str, str] = {}
    """Labels that evaluations group their results by, e.g. ``{"kind": "color"}``."""


def read(spec: str, config: DataConfig = DEFAULT) -> tuple[list[Record], list[Problem]]:
    """Read a data file or a named source.

    Args:
        spec: ``FILE.json`` (LLaVA, or a list of messages), ``FILE.jsonl``, or a name in
            ``SOURCES`` such as ``easy-vqa:train``.
        config: data settings; of these, ``image_root``, ``ignored_fields``, ``literal_markers`` and
            ``format`` are read.

    Returns:
        Records in the file's order, and a Problem for each item that is not a valid record.

    Raises:
        DataError: the file as a whole can't be used.
    """
    own = extension.is_set(config.format, custom_format.PATH)
    if spec in SOURCES and not own:
        return SOURCES[spec](), []
    path = pathlib.Path(spec).expanduser()
    if not own and not path.is_file():
        names, why = ", ".join(SOURCES), "not a regular" if path.exists() else "no such"
        raise DataError(
            f"{spec or '(empty name)'}: {why} file; give a .json or .jsonl file, or one of {names}"
        )
    root = pathlib.Path(config.image_root).expanduser() if config.image_root else path.parent
    items, problems = (
        (custom_format.read_items(config, spec, Record), []) if own else items_of(path)
    )
    allowed = Allowed.of(config.ignored_fields, config.literal_markers)
    records: list[Record] = []
    splits = fields.Splits(spec, config)
    for where, item in items:
        identifier = where
        try:
            if isinstance(item, Problem):
                problems.append(item)
                continue
            if isinstance(item, Record):
                identifier = item.id or where
                records.append(_own_record(item._replace(id=identifier), root, allowed))
                continue
            if not isinstance(item, dict):
                raise BadItem("not a JSON object")
            item = {k: v for k, v in item.items() if k not in config.ignored_fields}
            splits.add(item)
            identifier = id_of(item.get("id"), where)
            records.append(_record(identifier, item, root, allowed))
        except BadItem as bad:
            problems.append(Problem(identifier, bad.reason, bad.detail))
    splits.check()
    if not records and not problems:
        raise DataError(f"{spec}: contains no record; give a file with at least one conversation")
    return records, problems


def items_of(path: pathlib.Path) -> tuple[list[tuple[str, Any]], list[Problem]]:
    """Read the items of a JSON array, a JSON object or JSON lines.

    Args:
        path: path of the file.

    Returns:
        ``[("file:line or index", raw item)]``, and a Problem for each invalid line.

    Raises:
        DataError: the file as a whole can't be read.
    """
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise DataError(f"{path}: the file is empty; give one with at least one record")
    lines = data.split(b"\n")
    if data.lstrip()[:1] == b"[" or _is_one_object(data, lines):
        try:
            parsed = json_text.parse(data)
        except UnicodeDecodeError as error:
            bad_line = data[: error.start].count(b"\n") + 1
            raise DataError(f"{path}:{bad_line}: not UTF-8; save the file as UTF-8") from None
        except ValueError as error:
            raise DataError(f"{path}: not JSON: {error}; fix the file there") from None
        parsed = parsed if isinstance(parsed, list) else [parsed]
        return [(f"{path.name}[{i}]", item) for i, item in enumerate(parsed)], []
    items: list[tuple[str, Any]] = []
    problems = []
    for number, line in enumerate(lines, 1):
        where = f"{path.name}:{number}"
        if not line.strip():
            continue
        try:
            items.append((where, json_text.parse(line)))
        except UnicodeDecodeError:
            problems.append(Problem(where, "not UTF-8"))
        except ValueError as error:
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


def _record(identifier: str, item: dict[str, Any], root: pathlib.Path, allowed: Allowed) -> Record:
    """Parse one raw item to a Record; raises BadItem."""
    keys = [key for key in FORMATS if key in item]
    if not keys:
        known = " nor ".join(map(repr, FORMATS))
        raise BadItem(f"neither {known}", f"keys: {', '.join(sorted(item))}")
    if len(keys) > 1:
        raise BadItem(f"both {' and '.join(map(repr, keys))}; which one is meant?")
    item = allowed.fields_of("record", item, {"id", keys[0], *_LISTS_OF_IMAGES})
    turns, inline = FORMATS[keys[0]](item, allowed)
    named = _listed(item, allowed)
    if inline.count("") not in (0, len(inline)) or (inline and "" not in inline and named):
        raise BadItem("images named both in the content and in 'images'")
    images = [i for i in inline if i] or named
    turns = [turn._replace(content=tidy(turn.content)) for turn in turns]
    return _checked_record(Record(identifier, tuple(turns), tuple(images)), root, allowed)


def _checked_record(record: Record, root: pathlib.Path, allowed: Allowed) -> Record:
    """``record`` with a placeholder for each image, and images' paths; raises BadItem."""
    turns, images = list(record.turns), record.images
    count = sum(turn.content.count(PLACEHOLDER) for turn in turns)
    if count == 0 and len(images) == 1:
        # As in LLaVA's own files, the image goes before the first question.
        first = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
        turns[first] = turns[first]._replace(content=f"{PLACEHOLDER}{turns[first].content}")
        count = 1
    if count != len(images):
        detail = f"{count} placeholders, {len(images)} images"
        raise BadItem("placeholders and images differ in number", detail)
    _check_turns(turns)
    for turn in turns if images else ():
        allowed.refuse_markers(turn.content)
    files = tuple(_locate(name, root) for name in images)
    return record._replace(turns=tuple(turns), images=files)


def _own_record(record: Record, root: pathlib.Path, allowed: Allowed) -> Record:
    """A Record that a format of the user's own made, checked like one of a file; raises BadItem."""
    for turn in record.turns:
        if not isinstance(turn, Turn):
            raise BadItem("a turn is not an object", f"{type(turn).__name__}, not a Turn")
        if turn.role not in _ROLES:
            raise BadItem("unknown role", repr(turn.role))
        if not isinstance(turn.content, str):
            raise BadItem("a turn whose 'content' is neither text nor a list")
    images = tuple(map(file_name, record.images))
    return _checked_record(record._replace(images=images), root, allowed)


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
    for turn in turns:
        check_unicode(turn.content)
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise BadItem("no assistant turn")
    if not any(turn.trained for turn in answers):
        raise BadItem("no assistant turn that is trained")
    for i, turn in enumerate(turns):
        if turn.role == "assistant" and turn.trained and not turn.content.strip():
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
        turns.append(turn)
        inline += names
    return turns, inline


def _text(value: Any, reason: str) -> str:
    """Text as a record gives it, or an integer's digits; raises BadItem with ``reason``."""
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
    role = entry.get("from")
    if role is None:
        raise BadItem("a turn without 'from'")
    if not isinstance(role, str) or role not in _LLAVA_ROLES:
        raise BadItem("unknown role", repr(role)[:60])
    role = _LLAVA_ROLES[role]
    value = _text(entry.get("value"), "a turn whose 'value' is not text")
    return Turn(role, value, _is_trained(entry, role)), []


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
    entry = allowed.fields_of("turn", entry, _TRAINED | {"role", "content"}, OF_TURN)
    role = entry.get("role")
    if role is None:
        raise BadItem("a turn without 'role'")
    if role not in _ROLES:
        raise BadItem("unknown role", repr(role)[:60])
    trained, is_answer = _is_trained(entry, role), role == "assistant"
    content = entry.get("content")
    if not isinstance(content, list):
        text = _text(content, "a turn whose 'content' is neither text nor a list")
        return Turn(role, text, trained), []
    parts, names = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS_OF_PART:
            raise BadItem("a content item of unknown type", repr(kind)[:60])
        read = _TRAINED | _FIELDS_OF_PART[kind]
        part = allowed.fields_of("content part", part, read, OF_IMAGE)
        if _own_weight(part, is_answer) not in (None, trained and is_answer):
            raise BadItem("a content part that is trained otherwise than its turn", str(part)[:60])
        if kind == "text":
            parts.append(_text(part.get("text"), "a content part whose 'text' is not text"))
            if PLACEHOLDER in parts[-1]:
                raise BadItem("'<image>' written inside a content list's text")
        else:
            parts.append(PLACEHOLDER)
            names.append(_inline_name(part, allowed))
    return Turn(role, "".join(parts), trained), names


def _inline_name(part: dict[str, Any], allowed: Allowed) -> str:
    """File that an image part names; "" if it takes the next of the record's 'images'."""
    given = [key for key in _NAMES_OF_IMAGE if not is_empty(part.get(key))]
    if len(given) > 1:
        raise BadItem(f"both {' and '.join(map(repr, given))}; which one is meant?")
    return _image_name(part[given[0]], allowed) if given else ""


def _image_name(value: Any, allowed: Allowed) -> str:
    """File that a name, or an object with one name, stands for."""
    if isinstance(value, dict):
        value = allowed.fields_of("image", value, _FIELDS_OF_IMAGE, OF_IMAGE)
        given = [value[key] for key in _FIELDS_OF_IMAGE if not is_empty(value.get(key))]
        if len(given) > 1:
            raise BadItem("an image with several names or contents; which one is meant?")
        value = given[0] if given else None
    return file_name(value)


def _listed(item: dict[str, Any], allowed: Allowed) -> list[str]:
    """Image files in the record's 'images' or 'image' field."""
    given = [item[key] for key in _LISTS_OF_IMAGES if not is_empty(item.get(key))]
    if not given:
        return []
    if len(given) > 1:
        raise BadItem("both 'image' and 'images'; which one is meant?")
    raw = given[0]
    names = raw if isinstance(raw, list) else [raw]
    return [_image_name(name, allowed) for name in names]


def file_name(value: Any) -> str:
    """Check and return the file that a record names for an image; raises BadItem."""
    if not isinstance(value, str) or not value:
        detail = f"{type(value).__name__}; an image must be a file, given by its name"
        raise BadItem("an image's name is not text", detail)
    if value.startswith(("http://", "https://", "data:")):
        raise BadItem("an image that is not a file", value[:60])
    return value.removeprefix("file://")


def _locate(name: str, root: pathlib.Path) -> str:
    return str(root / name)


FORMATS: dict[str, Callable[[dict[str, Any], Allowed], tuple[list[Turn], list[str]]]] = {
    "conversations": lambda item, allowed: _conversation(
        item["conversations"], _llava_turn, allowed
    ),
    "messages": lambda item, allowed: _conversation(item["messages"], message_turn, allowed),
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
