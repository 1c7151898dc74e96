"""Records of queries, positives and negatives in the forms that others write -> examples.

A format is a function in ``FORMATS``, chosen by a key that the record holds; what has none of
these keys is read as ours (docs/embedding_data.md).
"""

from __future__ import annotations

import collections
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.data import formats, tables
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.examples import Example, Item
from jaxvlm.data.formats import PLACEHOLDER, BadItem

_log = logging.getLogger("jaxvlm.data")
_NAMED = 5  # unknown fields listed in the log
_ALIASES = {"anchor": "query", "sentence1": "query", "sentence2": "positive"}
"""sentence-transformers' columns -> ours."""
_OF_TAR = dict.fromkeys(tables.PICTURES, "query_image") | {"txt": "positive"}
"""A tar's plain ``KEY.jpg`` and ``KEY.txt``: the picture finds its caption."""
_NUMBERED = re.compile(r"negative(?:_image)?_(\d+)")
_UNUSED = formats.UNUSED | {
    f"{side}_{kind}s" for side in ("positive", "negative") for kind in ("audio", "video")
}
_MMEB_MARK = re.compile(r"<\|image_\d+\|>")
_COMMON = frozenset(["id", "task", "label", "score", "scores"])
OURS = _COMMON | {
    *("query", "query_image", "instruction", "query_instruction", "document_instruction"),
    *("positive", "positive_image", "positive_images"),
    *("negative", "negatives", "negative_image", "negative_images"),
}


class Group(NamedTuple):
    """A record: a query, and all that it should and should not find."""

    query: Item
    positives: Sequence[Item]
    negatives: Sequence[Item]
    label: Any = None
    scores: Sequence[Any] = ()


Locate = Callable[[str], str]


def read(
    spec: str, image_root: str = "", column_mapping: Sequence[tuple[str, str]] = ()
) -> tuple[list[Example], list[Problem]]:
    """Examples of a file or a pattern of files; see :func:`jaxvlm.data.tables.read`.

    Args:
        spec: what to read.
        image_root: folder that picture names are relative to; "" is each file's.
        column_mapping: (their column, our field), before anything else is looked at.

    Returns:
        Examples in the files' order, one for each positive, and a Problem for each record that is
        none.

    Raises:
        DataError: a file as a whole can't be used, a mapped column is nowhere, or two records have
            one id.
    """
    raw, problems = tables.read(spec, image_root)
    mapping = dict(column_mapping)
    fields = [r.fields for r in raw if isinstance(r.fields, dict)]
    for column in mapping:
        if fields and not any(column in f for f in fields):
            has = ", ".join(sorted(fields[0]))
            raise DataError(
                f"{spec}: data.pairs.column_mapping names {column!r}, which no record has: {has}"
            )
    examples: list[Example] = []
    unread: collections.Counter[str] = collections.Counter()
    seen: collections.Counter[str] = collections.Counter()
    for record in raw:
        identifier = record.where
        try:
            if not isinstance(record.fields, dict):
                raise BadItem("not a JSON object")
            item = _mapped(record.fields, mapping)
            identifier = str(item.get("id", record.where))
            seen[identifier] += 1
            examples += _examples(identifier, item, record, unread)
        except BadItem as bad:
            problems.append(Problem(identifier, bad.reason, bad.detail))
    if twice := [name for name, count in seen.items() if count > 1]:
        more = ", ..." if len(twice) > 3 else ""
        raise DataError(
            f"{spec}: ids that several records have: {', '.join(twice[:3])}{more} ({len(twice)} in "
            "all); give each record its own, or none"
        )
    if unread:
        named = ", ".join(f"{n} ({c})" for n, c in unread.most_common(_NAMED))
        more = ", ..." if len(unread) > _NAMED else ""
        _log.warning("%s: fields that are not read (records): %s%s", spec, named, more)
    return examples, problems


def _mapped(fields: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """The fields by our names, without those that say nothing."""
    out: dict[str, Any] = {}
    marked = any(key in fields for key in FORMATS)
    for column, value in fields.items():
        if value is None or value == "" or value == [] or value == {}:
            continue
        name = mapping.get(column, column if marked else _OF_TAR.get(column, column))
        if name in out:
            raise BadItem(f"two columns for '{name}'", column)
        out[name] = value
    return out


def _examples(
    identifier: str, item: dict[str, Any], raw: tables.Raw, unread: collections.Counter[str]
) -> list[Example]:
    """A record's examples, one for each of its positives; raises BadItem."""
    formats.refuse_unused(item, _UNUSED, "a field that is not used here")
    keys = [key for key in FORMATS if key in item]
    if len(keys) > 1:
        raise BadItem(f"both {' and '.join(map(repr, keys))}; which one is meant?")
    parse, known = FORMATS[keys[0]] if keys else (_ours, OURS)
    unread.update(k for k in item if k not in known and not (not keys and _known(k)))
    group = parse(item, raw.locate)
    if not group.positives:
        raise BadItem("no positive")
    count = len(group.positives)
    scores = _scores(group.scores, count, len(group.negatives))
    label = "" if group.label is None else str(group.label)
    label = label or (f"id:{identifier}" if count > 1 else "")
    task = _text(item.get("task", raw.task), "task")
    return [
        Example(
            id=identifier if count == 1 else f"{identifier}#{i}",
            query=group.query,
            positive=positive,
            negatives=tuple(group.negatives),
            label=label,
            scores=(scores[i], *scores[count:]) if scores else (),
            task=task,
        )
        for i, positive in enumerate(group.positives)
    ]


def _known(name: str) -> bool:
    return name in _ALIASES or _NUMBERED.fullmatch(name) is not None


def _scores(raw: Sequence[Any], positives: int, negatives: int) -> tuple[float, ...]:
    if not raw:
        return ()
    if len(raw) != positives + negatives:
        detail = f"{len(raw)} scores, {positives} positives, {negatives} negatives"
        raise BadItem("not one score for each positive and then each negative", detail)
    return tuple(_number(value) for value in raw)


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BadItem("a score that is no number", repr(value)[:60])
    return number


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadItem(f"'{name}' is not text", repr(value)[:60])
    return value


def _list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _one_of(item: Mapping[str, Any], *names: str) -> Any:
    """The value of the one field of these that is there."""
    found = [name for name in names if name in item]
    if len(found) > 1:
        raise BadItem(f"both {' and '.join(map(repr, found))}; which one is meant?")
    return item[found[0]] if found else None


def _item(text: Any, image: Any, told: str, locate: Locate, name: str) -> Item:
    """One item; ``text`` may be an object with both; raises BadItem."""
    if isinstance(text, dict):
        if extra := sorted(text.keys() - {"text", "image", "instruction"}):
            raise BadItem(f"'{name}' has a field that is not used here", ", ".join(extra))
        if image is not None and text.get("image"):
            raise BadItem(f"two pictures for '{name}'")
        told = _text(text.get("instruction") or told, "instruction")
        text, image = text.get("text"), image or text.get("image")
    if isinstance(image, dict) and image.get("bytes") is not None:
        raise BadItem("a picture inside of the table; give files, or tar shards", name)
    image = image.get("path") if isinstance(image, dict) else image
    file = locate(formats.file_name(image)) if image not in (None, "") else ""
    try:
        return Item.of(_text(text or "", name), file, told)
    except BadItem as bad:
        raise BadItem(bad.reason, f"{name}, {bad.detail}" if bad.detail else name) from None


def _items(texts: Any, images: Any, told: str, locate: Locate, name: str) -> list[Item]:
    """Items of a list of texts and a list of pictures, side by side."""
    words, files = _list(texts), _list(images)
    if words and files and len(words) != len(files):
        detail = f"{len(words)} texts, {len(files)} pictures"
        raise BadItem(f"'{name}' has not a picture (or null) for each text", detail)
    count = max(len(words), len(files))
    words, files = words or [None] * count, files or [None] * count
    return [_item(w, f, told, locate, name) for w, f in zip(words, files, strict=True)]


def _ours(item: dict[str, Any], locate: Locate) -> Group:
    """``query``, ``positive``, ``negatives`` and their pictures; sentence-transformers' columns."""
    likeness = "sentence1" in item and "query" not in item
    for theirs, ours in _ALIASES.items():
        if theirs in item:
            if ours in item:
                raise BadItem(f"both '{theirs}' and '{ours}'; which one is meant?")
            item[ours] = item[theirs]
    told = {
        side: _text(_one_of(item, f"{side}_instruction") or "", f"{side}_instruction")
        for side in ("query", "document")
    }
    if "instruction" in item:
        if told["query"]:
            raise BadItem("both 'instruction' and 'query_instruction'; which one is meant?")
        told["query"] = _text(item["instruction"], "instruction")
    for name in ("query", "query_image"):
        if isinstance(item.get(name), list):
            raise BadItem(f"'{name}' is a list; a record has one query")
    query = _item(item.get("query"), item.get("query_image"), told["query"], locate, "query")
    found = item.get("positive"), _one_of(item, "positive_image", "positive_images")
    positives = _items(*found, told["document"], locate, "positive")
    found = (
        _one_of(item, "negatives", "negative"),
        _one_of(item, "negative_images", "negative_image"),
    )
    negatives = _items(*found, told["document"], locate, "negative")
    numbers = sorted({int(m[1]) for name in item if (m := _NUMBERED.fullmatch(name))})
    for n in numbers:
        pair = item.get(f"negative_{n}"), item.get(f"negative_image_{n}")
        negatives.append(_item(*pair, told["document"], locate, f"negative_{n}"))
    label = item.get("label")
    scores = _list(_one_of(item, "score", "scores"))
    if likeness and not scores:  # theirs: how like the two are
        label, scores = None, _list(label)
    return Group(query, positives, negatives, _checked(label), scores)


def _checked(label: Any) -> Any:
    if isinstance(label, list | dict):
        raise BadItem("'label' is neither text nor a number")
    return label


def _mmeb(item: dict[str, Any], locate: Locate) -> Group:
    """MMEB's columns. Source: VLM2Vec's src/data/dataset/mmeb_dataset.py, ``data_prepare``."""

    def column(name: str) -> Any:
        def seen(text: Any) -> Any:
            return _MMEB_MARK.sub(PLACEHOLDER, text) if isinstance(text, str) else text

        value = item.get(name)
        return [seen(text) for text in value] if isinstance(value, list) else seen(value)

    for name in ("qry", "qry_image_path"):
        if isinstance(item.get(name), list):
            raise BadItem(f"'{name}' is a list; a record has one query")
    query = _item(column("qry"), item.get("qry_image_path"), "", locate, "qry")
    positives = _items(column("pos_text"), item.get("pos_image_path"), "", locate, "pos_text")
    # Lists of nothing but "" are how it writes that there is none.
    found = [_list(column("neg_text")), _list(item.get("neg_image_path"))]
    texts, images = (values if any(values) else [] for values in found)
    negatives = _items(texts, images, "", locate, "neg_text")
    scores = _list(_one_of(item, "score", "scores"))
    return Group(query, positives, negatives, _checked(item.get("label")), scores)


def _messages(item: dict[str, Any], locate: Locate) -> Group:
    """ms-swift's messages. Source: its docs, BestPractices/Embedding.md."""
    query = _said(item.get("messages"), item.get("images"), locate, "messages")
    sides = []
    for side in ("positive", "negative"):
        said, files = _list(item.get(f"{side}_messages")), _list(item.get(f"{side}_images"))
        if files and len(files) != len(said):
            raise BadItem(f"'{side}_images' has not a list for each of '{side}_messages'")
        files = files or [None] * len(said)
        name = f"{side}_messages"
        sides.append([_said(s, f, locate, name) for s, f in zip(said, files, strict=True)])
    # Its label is how like the two are, or whether they are.
    scores = _list(_one_of(item, "label", "score", "scores"))
    return Group(query, sides[0], sides[1], None, scores)


def _said(messages: Any, images: Any, locate: Locate, name: str) -> Item:
    """Messages that are one item: perhaps a system turn, its instruction, and a user turn."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadItem(f"'{name}' is not a list of messages")
    parsed = [formats.message_turn(entry) for entry in messages]
    roles = tuple(turn.role for turn, _ in parsed)
    if roles not in (("user",), ("system", "user")):
        raise BadItem(f"'{name}' is more than a system and a user turn", ", ".join(roles))
    turn, inline = parsed[-1]
    files = [file for file in inline if file] or _list(images)
    if len(files) > 1:
        raise BadItem("several pictures in one item", name)
    told = parsed[0][0].content if len(parsed) > 1 else ""
    return _item(turn.content, files[0] if files else None, told, locate, name)


FORMATS: dict[str, tuple[Callable[[dict[str, Any], Locate], Group], frozenset[str]]] = {
    "qry": (
        _mmeb,
        _COMMON
        | {"qry", "qry_image_path", "pos_text", "pos_image_path", "neg_text", "neg_image_path"},
    ),
    "positive_messages": (
        _messages,
        _COMMON
        | {"messages", "images", "positive_messages", "positive_images"}
        | {"negative_messages", "negative_images"},
    ),
}
"""The key that marks a format -> a function of a record's fields, and the fields that it reads. It
raises BadItem for a record that it can't read."""
