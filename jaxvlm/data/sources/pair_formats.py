"""Read records of queries, positives and negatives in several formats into examples.

A format is a function in ``FORMATS``, chosen by a key that the record has; a record with none of
these keys is read in jaxvlm's own format (docs/embedding_data.md).
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxvlm.config import DataConfig, extension
from jaxvlm.data.errors import DataError, Problem
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.sources import conversation_formats, custom_format, fetched, members, tables
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER
from jaxvlm.data.sources.fetched import OfUrl
from jaxvlm.data.sources.fields import OF_IMAGE, Allowed, BadItem, Splits, is_empty, name_of
from jaxvlm.data.sources.member_names import InFile, is_video
from jaxvlm.data.sources.visuals import file_name

_ALIASES = {"anchor": "query", "sentence1": "query", "sentence2": "positive"}
"""sentence-transformers' columns -> jaxvlm's fields."""
_OF_TAR = dict.fromkeys(tables.IMAGES, "query_image") | {"txt": "positive"}
"""Fields of a tar's plain ``KEY.jpg`` and ``KEY.txt``: the image is the query of its caption."""
_NUMBERED = re.compile(r"negative(?:_image)?_(\d+)")
_MMEB_MARK = re.compile(r"<\|image_\d+\|>")
_COMMON = frozenset(["id", "task", "label", "score", "scores"])
OWN_FIELDS = _COMMON | {
    *("query", "query_image", "instruction", "query_instruction", "document_instruction"),
    *("positive", "positive_image", "positive_images"),
    *("negative", "negatives", "negative_image", "negative_images"),
}


class Group(NamedTuple):
    """A parsed record: a query, its positives and its hard negatives."""

    query: Item
    positives: Sequence[Item]
    negatives: Sequence[Item]
    label: str = ""
    scores: Sequence[Any] = ()


class Context(NamedTuple):
    """What the parser of a record needs beside its fields."""

    locate: Callable[[str], str]
    """Function of an image's name in the record that returns its file."""
    allowed: Allowed


def read(
    spec: str, config: DataConfig = tables.DEFAULT, of_url: OfUrl | None = None
) -> tuple[list[Example], list[Problem]]:
    """Read the examples of a file or a pattern of files; see ``jaxvlm.data.sources.tables.each``.

    Args:
        spec: file or pattern of files.
        config: data settings; of these, ``image_root``, ``ignored_fields``, ``literal_markers``,
            ``format``, ``column_mapping`` (applied first), ``tsv_quoting`` and ``fetched`` are
            read.
        of_url: gives the files of images at URLs; ``None``: as ``data.fetched`` says.

    Returns:
        Examples in the files' order, one for each positive, and a Problem for each invalid record.

    Raises:
        DataError: a file as a whole can't be used, a mapped column does not exist, or two records
            have the same id.
    """
    raw: Iterable[tables.Raw | Problem]
    if extension.is_set(config.format, custom_format.PATH):
        items = custom_format.read_items(config, spec, Example)
        raw = tables.raw_records(items, spec, config)
    else:
        raw = tables.each(spec, config)
    allowed = Allowed.of(
        config.ignored_fields, config.literal_markers, of_url or fetched.of_config(config)
    )
    examples: list[Example] = []
    unread, problems = list[Problem](), list[Problem]()
    seen: collections.Counter[str] = collections.Counter()
    columns, splits = tables.Columns(spec, config), Splits(spec, config)
    for record in raw:
        if isinstance(record, Problem):
            unread.append(record)
            continue
        identifier = record.where
        try:
            if isinstance(record.fields, Problem):
                problems.append(record.fields)
                continue
            if isinstance(record.fields, Example):
                identifier = conversation_formats.id_of(record.fields.id, record.where)
                seen[identifier] += 1
                examples.append(_own_example(record.fields)._replace(id=identifier))
                continue
            if not isinstance(record.fields, dict):
                raise BadItem("not a JSON object")
            columns.add(record.fields)
            read = {
                k: v
                for k, v in record.fields.items()
                if k not in config.ignored_fields and not is_empty(v)
            }
            is_marked = any(key in read for key in FORMATS)
            item = tables.renamed(read, columns.names, {} if is_marked else _OF_TAR)
            splits.add(item)
            identifier = conversation_formats.id_of(item.get("id"), record.where)
            seen[identifier] += 1
            examples += _examples(identifier, item, record, allowed)
        except BadItem as bad:
            problems.append(Problem(identifier, bad.reason, bad.detail))
    columns.check()
    splits.check()
    if twice := [name for name, count in seen.items() if count > 1]:
        more = ", ..." if len(twice) > 3 else ""
        raise DataError(
            f"{spec}: ids that several records share: {', '.join(twice[:3])}{more} ({len(twice)} "
            "in all); give each record its own, or none"
        )
    return examples, [*unread, *problems]


def _examples(
    identifier: str, item: dict[str, Any], raw: tables.Raw, allowed: Allowed
) -> list[Example]:
    """Parse a record to examples, one for each of its positives; raises BadItem."""
    keys = [key for key in FORMATS if key in item]
    if len(keys) > 1:
        raise BadItem(f"both {' and '.join(map(repr, keys))}; which one is meant?")
    if not keys:
        _refuse_conversation(item)
    parse, known = FORMATS[keys[0]] if keys else (_own_format, OWN_FIELDS)
    numbered = [] if keys else [name for name in item if _known(name)]
    item = allowed.fields_of("record", item, known.union(numbered))
    group = parse(item, Context(raw.locate, allowed))
    if not group.positives:
        raise BadItem("no positive")
    count = len(group.positives)
    scores = _scores(group.scores, count, len(group.negatives))
    label = group.label or (f"id:{identifier}" if count > 1 else "")
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


def _refuse_conversation(item: Mapping[str, Any]) -> None:
    """Refuse a record that is no pair at all, rather than one field of it."""
    for name in conversation_formats.FORMATS:
        if name in item and not any(_known(n) or n in OWN_FIELDS - _COMMON for n in item):
            reason = "a conversation, where pairs are wanted: a query and its positive"
            raise BadItem(reason, f"{name!r} is not read")


def _known(name: str) -> bool:
    return name in _ALIASES or _NUMBERED.fullmatch(name) is not None


def _scores(raw: Sequence[Any], positives: int, negatives: int) -> tuple[float, ...]:
    if not raw:
        return ()
    if len(raw) != positives + negatives:
        detail = f"{len(raw)} scores, {positives} positives, {negatives} negatives"
        raise BadItem("needs one score for each positive and then each negative", detail)
    return tuple(_number(value) for value in raw)


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadItem("a score that is not a finite number", repr(value)[:60])
    return number


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadItem(f"'{name}' is not text", repr(value)[:60])
    return members.text(value) if isinstance(value, InFile) else value


def _list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _one_of(item: Mapping[str, Any], *names: str) -> Any:
    """Value of the one of these fields that the item has; None if it has none."""
    present = [name for name in names if name in item]
    if len(present) > 1:
        raise BadItem(f"both {' and '.join(map(repr, present))}; which one is meant?")
    return item[present[0]] if present else None


def _item(text: Any, image: Any, instruction: str, context: Context, name: str) -> Item:
    """Build one item; ``text`` may be an object with text and image; raises BadItem."""
    if isinstance(text, dict):
        text = context.allowed.fields_of(f"'{name}'", text, {"text", "image", "instruction"})
        if image is not None and text.get("image"):
            raise BadItem(f"two images for '{name}'")
        instruction = _text(text.get("instruction") or instruction, "instruction")
        text, image = text.get("text"), image or text.get("image")
    if isinstance(image, dict):
        image = context.allowed.fields_of(f"image of '{name}'", image, {"path"}, OF_IMAGE)
        image = image.get("path")
    if isinstance(image, list):
        if len(image) > 1:
            raise _several_images(name, len(image))
        image = image[0] if image else None
    file = context.locate(file_name(image, context.allowed)) if not is_empty(image) else ""
    try:
        if file:
            context.allowed.refuse_markers(_text(text or "", name))
        return Item.of(_text(text or "", name), file, instruction)
    except BadItem as bad:
        raise BadItem(bad.reason, f"{name}, {bad.detail}" if bad.detail else name) from None


def _several_images(name: str, count: int) -> BadItem:
    detail = f"{name}, {count} images; put them into one image file, or into an item each"
    return BadItem("several images in one item", detail)


def _items(texts: Any, images: Any, instruction: str, context: Context, name: str) -> list[Item]:
    """Build items from a list of texts and a list of images of equal length."""
    words, files = _list(texts), _list(images)
    if words and files and len(words) != len(files):
        detail = f"{len(words)} texts, {len(files)} images"
        raise BadItem(f"'{name}' needs an image (or null) for each text", detail)
    count = max(len(words), len(files))
    words, files = words or [None] * count, files or [None] * count
    return [_item(w, f, instruction, context, name) for w, f in zip(words, files, strict=True)]


def _check_one_query(item: Mapping[str, Any], name: str) -> None:
    if isinstance(item.get(name), list):
        raise BadItem(f"'{name}' is a list; a record has one query")


def _own_format(item: dict[str, Any], context: Context) -> Group:
    """Parse jaxvlm's own fields (``query``, ``positive``, ``negatives``, images) and those of
    sentence-transformers."""
    is_similarity = ("sentence1" in item or "anchor" in item) and "query" not in item
    for theirs, ours in _ALIASES.items():
        if (value := _one_of(item, theirs, ours)) is not None:
            item[ours] = value
    instruction = {
        column: _text(_one_of(item, f"{column}_instruction") or "", f"{column}_instruction")
        for column in ("query", "document")
    }
    if "instruction" in item:
        if instruction["query"]:
            raise BadItem("both 'instruction' and 'query_instruction'; which one is meant?")
        instruction["query"] = _text(item["instruction"], "instruction")
    _check_one_query(item, "query")
    query = _item(
        item.get("query"), item.get("query_image"), instruction["query"], context, "query"
    )
    fields = item.get("positive"), _one_of(item, "positive_image", "positive_images")
    positives = _items(*fields, instruction["document"], context, "positive")
    fields = (
        _one_of(item, "negatives", "negative"),
        _one_of(item, "negative_images", "negative_image"),
    )
    negatives = _items(*fields, instruction["document"], context, "negative")
    numbers = sorted({int(m[1]) for name in item if (m := _NUMBERED.fullmatch(name))})
    for n in numbers:
        pair = item.get(f"negative_{n}"), item.get(f"negative_image_{n}")
        negatives.append(_item(*pair, instruction["document"], context, f"negative_{n}"))
    label = item.get("label")
    scores = _list(_one_of(item, "score", "scores"))
    if is_similarity and not scores:  # sentence-transformers' label is the similarity
        label, scores = None, _list(label)
    return Group(query, positives, negatives, _label(label), scores)


def _label(value: Any) -> str:
    """A label as text, by which examples are of one group; "" is none."""
    name = "" if value is None else name_of(value)
    if name is None:
        raise BadItem("'label' is neither text nor a number", repr(value)[:60])
    conversation_formats.check_unicode(name)
    return name


def _own_example(example: Example) -> Example:
    """An Example that a format of the user's own made; raises BadItem where a text is no text."""
    for item in (example.query, example.positive, *example.negatives):
        for text in (*item, example.label, example.task):
            if not isinstance(text, str):
                raise BadItem("a text that is not text", f"{type(text).__name__}: {text!r}"[:60])
            conversation_formats.check_unicode(text)
    return example


def _mmeb(item: dict[str, Any], context: Context) -> Group:
    """Parse MMEB's columns.

    Source: VLM2Vec's src/data/dataset/mmeb_dataset.py, ``data_prepare``.
    """

    def column(name: str) -> Any:
        def replaced(text: Any) -> Any:
            is_text = isinstance(text, str) and not isinstance(text, InFile)
            return _MMEB_MARK.sub(PLACEHOLDER, text) if is_text else text

        value = item.get(name)
        return [replaced(text) for text in value] if isinstance(value, list) else replaced(value)

    _check_one_query(item, "qry")
    query = _item(column("qry"), item.get("qry_image_path"), "", context, "qry")
    positives = _items(column("pos_text"), item.get("pos_image_path"), "", context, "pos_text")
    # A list of only "" means that there is none.
    columns = [_list(column("neg_text")), _list(item.get("neg_image_path"))]
    texts, images = (values if any(values) else [] for values in columns)
    negatives = _items(texts, images, "", context, "neg_text")
    scores = _list(_one_of(item, "score", "scores"))
    return Group(query, positives, negatives, _label(item.get("label")), scores)


def _flag_embedding(item: dict[str, Any], context: Context) -> Group:
    """Parse FlagEmbedding's fields. Source: its examples/finetune/embedder/README.md."""
    if (kind := item.get("type", "normal")) != "normal":
        # Its other types take no negatives from the batch, or give documents an instruction.
        detail = f"{str(kind)[:60]}; data.ignored_fields can pass over it"
        raise BadItem("'type' is not normal", detail)
    _check_one_query(item, "query")
    prompt = _text(item.get("prompt", ""), "prompt")
    query = _item(item.get("query"), None, prompt, context, "query")
    positives, negatives = (_items(item.get(k), None, "", context, k) for k in ("pos", "neg"))
    scores = {kind: _list(item.get(f"{kind}_scores")) for kind in ("pos", "neg")}
    counts = {"pos": len(positives), "neg": len(negatives)}
    if any(scores.values()) and counts != {kind: len(given) for kind, given in scores.items()}:
        detail = ", ".join(
            f"{len(scores[k])} scores of {n} texts in '{k}'" for k, n in counts.items()
        )
        raise BadItem("'pos_scores' and 'neg_scores' need one score for each text", detail)
    return Group(query, positives, negatives, scores=[*scores["pos"], *scores["neg"]])


def _messages(item: dict[str, Any], context: Context) -> Group:
    """Parse ms-swift's messages. Source: its docs, BestPractices/Embedding.md."""
    query = _message_item(item.get("messages"), item.get("images"), context, "messages")
    parsed = []
    for kind in ("positive", "negative"):
        messages, files = _list(item.get(f"{kind}_messages")), _list(item.get(f"{kind}_images"))
        if files and len(files) != len(messages):
            raise BadItem(f"'{kind}_images' needs a list for each of '{kind}_messages'")
        files = files or [None] * len(messages)
        name = f"{kind}_messages"
        parsed.append(
            [_message_item(s, f, context, name) for s, f in zip(messages, files, strict=True)]
        )
    # ms-swift's label is the similarity of the two, or whether they match.
    scores = _list(_one_of(item, "label", "score", "scores"))
    return Group(query, parsed[0], parsed[1], scores=scores)


def _message_item(messages: Any, images: Any, context: Context, name: str) -> Item:
    """Parse messages that are one item: an optional system turn (instruction) and a user turn."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise BadItem(f"'{name}' is not a list of messages")
    parsed = [conversation_formats.message_turn(entry, context.allowed) for entry in messages]
    roles = tuple(turn.role for turn, _ in parsed)
    if roles not in (("user",), ("system", "user")):
        raise BadItem(f"'{name}' is not a user turn, or a system and a user turn", ", ".join(roles))
    turn, inline = parsed[-1]
    if any(map(is_video, inline)):
        raise BadItem("a video in a pair, where only images are read")
    files = [file for file in inline if file] or _list(images)
    if len(files) > 1:
        raise _several_images(name, len(files))
    instruction = parsed[0][0].content if len(parsed) > 1 else ""
    return _item(turn.content, files[0] if files else None, instruction, context, name)


FORMATS: dict[str, tuple[Callable[[dict[str, Any], Context], Group], frozenset[str]]] = {
    "qry": (
        _mmeb,
        _COMMON
        | {"qry", "qry_image_path", "pos_text", "pos_image_path", "neg_text", "neg_image_path"},
    ),
    "pos": (
        _flag_embedding,
        frozenset(["id", "task", "query", "pos", "neg", "pos_scores", "neg_scores"])
        | {"prompt", "type"},
    ),
    "positive_messages": (
        _messages,
        _COMMON
        | {"messages", "images", "positive_messages", "positive_images"}
        | {"negative_messages", "negative_images"},
    ),
}
"""Key that identifies a format -> parser of a record's fields, and the fields that it reads. The
parser raises BadItem for an invalid record."""
