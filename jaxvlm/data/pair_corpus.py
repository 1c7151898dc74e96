"""Examples -> tables of different queries and documents, and which example has which."""

from __future__ import annotations

import collections
import hashlib
import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data import images, item_rows
from jaxvlm.data.errors import DataError, Problem, enforce
from jaxvlm.data.examples import Example, Item, relevant
from jaxvlm.data.item_rows import Bad, Encoded, RowFormat
from jaxvlm.data.sides import Side

_log = logging.getLogger("jaxvlm.data")


class PairCorpus(NamedTuple):
    """What a data set of pairs holds.

    A *content* is a text and a picture, whatever its vector is for; it has one number on both
    sides.
    """

    examples: list[Example]
    problems: list[Problem]
    queries: Side
    documents: Side
    contents: list[str]
    """Of each number, words for people."""
    query: np.ndarray
    """i32[N]: each example's query ..."""
    document: np.ndarray
    """i32[total]: ... and its positive and negatives, those of all examples in a row."""
    first: np.ndarray
    """i64[N + 1]: where an example's begin."""
    score: np.ndarray
    """f32[total]; 0 where there is none."""
    has_scores: bool
    content: dict[str, np.ndarray]
    """Side -> i32[items]: each item's content."""
    label: np.ndarray | None
    """i32[N]: equal where labels are, -1 is none; ``None``: no example has one."""
    task: np.ndarray
    """i64[N]: index into ``tasks``."""
    tasks: list[str]
    num_documents: int
    """K."""
    cut: dict[str, int]
    """Side -> texts that were longer than allowed."""
    digest: str
    """Of everything that batches are made of."""

    @property
    def positive(self) -> np.ndarray:
        """i32[N]: each example's positive."""
        return self.document[self.first[:-1]]

    @property
    def query_content(self) -> np.ndarray:
        """i64[N]: contents of queries."""
        return self.key("query", self.query).astype(np.int64)

    @property
    def positive_content(self) -> np.ndarray:
        """i64[N]: contents of positives."""
        return self.key("document", self.positive).astype(np.int64)

    def key(self, side: str, items: np.ndarray) -> np.ndarray:
        """i32, as ``items`` of a side: their contents; -1 where there is none."""
        return np.append(self.content[side], -1).astype(np.int32)[items]

    def documents_of(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        """An example's documents and their scores."""
        here = slice(self.first[example], self.first[example + 1])
        return self.document[here], self.score[here]

    def owner(self, side: str, item: int) -> int:
        """An example that has this item."""
        if side == "query":
            return int(np.argmax(self.query == item))
        place = int(np.argmax(self.document == item))
        return int(np.searchsorted(self.first, place, "right")) - 1

    def relevance(self) -> list[list[int]]:
        """See :meth:`jaxvlm.data.pair_loader.PairDataset.relevance`."""
        return relevant(self.examples, self.queries.items, self.documents.items)

    def scored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`jaxvlm.data.pair_loader.PairDataset.scored`."""
        count = np.diff(self.first) if self.has_scores else np.zeros(len(self.query), np.int64)
        total = int(count.sum())
        return np.repeat(self.query, count), self.document[:total], self.score[:total]


def make_corpus(
    name: str,
    examples: Sequence[Example],
    problems: Sequence[Problem],
    config: DataConfig,
    rows: tuple[RowFormat, RowFormat],
) -> PairCorpus:
    """Encode what examples hold, leave out what can't be used, and number the rest.

    Args:
        name: of the data, for messages.
        examples: what :func:`jaxvlm.data.pair_formats.read` gave.
        problems: likewise.
        config: of the data.
        rows: how queries and documents become rows.

    Raises:
        DataError: too much can't be used.
    """
    pairs, total = config.pairs, len(examples) + len(problems)
    told = {"query": pairs.query_instruction, "document": pairs.document_instruction}
    longest = {"query": pairs.max_query_length, "document": pairs.max_document_length}
    prepared = [_instructed(example, told) for example in examples]
    tables: dict[str, dict[Item, int]] = {"query": {}, "document": {}}
    for example in prepared:
        for side, item in _items(example):
            tables[side].setdefault(item, len(tables[side]))
    encoded: dict[str, Encoded] = {}
    bad: dict[str, Bad] = {}
    for side, table, made in zip(tables, tables.values(), rows, strict=True):
        limit = longest[side] or config.max_length
        limit = min(limit, made.lengths[1] or limit)
        encoded[side], bad[side] = made.encode(list(table), limit)
        if cut := encoded[side].cut:
            text = "%s: %d of %d %s texts are longer than %d tokens and were cut"
            _log.warning(text, name, cut, len(table), side, limit)
    unread = _unreadable(tables, rows, config.max_pixels)
    scored = any(example.scores for example in prepared)
    kept, lost = [], list(problems)
    for example in prepared:
        why = _why_not(example, tables, bad, unread, scored, config)
        kept += [] if why else [example]
        lost += [Problem(example.id, *why)] if why else []
    enforce(lost, total, config.on_bad, config.max_skip_share, name)
    if not kept:
        raise DataError(f"{name}: no example is left; {lost[0] if lost else 'it holds none'}")
    return _numbered(name, kept, lost, config, rows, tables, encoded, scored)


def _instructed(example: Example, told: dict[str, str]) -> Example:
    """The example, its items with the data's instructions where they have none of their own."""

    def given(item: Item, side: str) -> Item:
        return item if item.instruction else item._replace(instruction=told[side])

    return example._replace(
        query=given(example.query, "query"),
        positive=given(example.positive, "document"),
        negatives=tuple(given(item, "document") for item in example.negatives),
    )


def _items(example: Example) -> list[tuple[str, Item]]:
    documents = (example.positive, *example.negatives)
    return [("query", example.query), *(("document", item) for item in documents)]


def _unreadable(
    tables: dict[str, dict[Item, int]], rows: tuple[RowFormat, RowFormat], max_pixels: int
) -> dict[str, str]:
    """Pictures whose headers are bad, and why."""
    paths = {
        item.image: None
        for table, made in zip(tables.values(), rows, strict=True)
        for item in table
        if item.image and made.prepare is not None
    }
    found = {path: images.check(path, max_pixels) for path in paths}
    return {path: reason for path, reason in found.items() if reason is not None}


def _why_not(
    example: Example,
    tables: dict[str, dict[Item, int]],
    bad: dict[str, Bad],
    unread: dict[str, str],
    scored: bool,
    config: DataConfig,
) -> tuple[str, str] | None:
    """Reason and detail where an example can't be used."""
    for side, item in _items(example):
        if item.image in unread:
            return unread[item.image], item.image
        if why := bad[side].get(tables[side][item]):
            return why
    if config.pairs.require_negatives and not example.negatives:
        return "no negative, which data.pairs.require_negatives asks for", ""
    if scored and not example.scores:
        return "no score, which others have", ""
    return None


def _numbered(
    name: str,
    examples: list[Example],
    problems: list[Problem],
    config: DataConfig,
    rows: tuple[RowFormat, RowFormat],
    tables: dict[str, dict[Item, int]],
    encoded: dict[str, Encoded],
    scored: bool,
) -> PairCorpus:
    """The corpus of examples that can all be used."""
    examples = _without_known_positives(name, examples, scored)
    used: dict[str, dict[Item, int]] = {"query": {}, "document": {}}
    contents: dict[tuple[str, str], int] = {}
    for example in examples:
        for side, item in _items(example):
            used[side].setdefault(item, len(used[side]))
            contents.setdefault(item.content, len(contents))
    sides, memory = {}, _memory(rows, config)
    for side, made in zip(used, rows, strict=True):
        own = item_rows.take(encoded[side], [tables[side][item] for item in used[side]])
        sides[side] = Side(side, list(used[side]), own, made, memory[side], config.buckets)
        if (config.flip or config.shift) and sides[side].images > 1:
            raise DataError(
                f"{name}: data.flip and data.shift would move each tile of a picture by itself; "
                "set --config.data.flip=False --config.data.shift=0"
            )
    lists = [[used["document"][item] for _, item in _items(e)[1:]] for e in examples]
    count = [len(documents) for documents in lists]
    flat = itertools.chain.from_iterable
    scores = [e.scores if scored else (0.0,) * n for e, n in zip(examples, count, strict=True)]
    most = max(count) - 1 if config.pairs.max_negatives < 0 else config.pairs.max_negatives
    labels = _numbers([e.label for e in examples])
    tasks = {name: i for i, name in enumerate(dict.fromkeys(e.task for e in examples))}
    corpus = PairCorpus(
        examples=examples,
        problems=problems,
        queries=sides["query"],
        documents=sides["document"],
        contents=[" ".join(filter(None, content))[:80] for content in contents],
        query=np.asarray([used["query"][e.query] for e in examples], np.int32),
        document=np.asarray(list(flat(lists)), np.int32),
        first=np.concatenate([[0], np.cumsum(count)]).astype(np.int64),
        score=np.asarray(list(flat(scores)), np.float32),
        has_scores=scored,
        content={
            side: np.asarray([contents[item.content] for item in table], np.int32)
            for side, table in used.items()
        },
        label=labels if any(e.label for e in examples) else None,
        task=np.asarray([tasks[e.task] for e in examples], np.int64),
        tasks=list(tasks),
        num_documents=1 + min(most, max(count) - 1),
        cut={side: encoded[side].cut for side in used},
        digest="",
    )
    return corpus._replace(digest=_digest(corpus))


def _without_known_positives(name: str, examples: list[Example], scored: bool) -> list[Example]:
    """Examples without negatives that are a positive of the same query elsewhere."""
    known: dict[tuple[str, str], set[tuple[str, str]]] = collections.defaultdict(set)
    for example in examples:
        if not scored or example.scores[0] > 0:
            known[example.query.content].add(example.positive.content)
    out, dropped = [], 0
    for example in examples:
        good = [
            i
            for i, item in enumerate(example.negatives)
            if item.content not in known[example.query.content]
        ]
        if len(good) < len(example.negatives):
            dropped += len(example.negatives) - len(good)
            scores = example.scores and (example.scores[0], *(example.scores[i + 1] for i in good))
            negatives = tuple(example.negatives[i] for i in good)
            example = example._replace(negatives=negatives, scores=tuple(scores))
        out.append(example)
    if dropped:
        text = "%s: %d hard negatives were left out: they are positives of the same query"
        _log.warning(text, name, dropped)
    return out


def _memory(
    rows: tuple[RowFormat, RowFormat], config: DataConfig
) -> dict[str, images.Pictures | None]:
    """What decodes each side's pictures; one for both where they are prepared alike."""
    made: dict[str, images.Pictures] = {}
    found: dict[str, images.Pictures | None] = {}
    for side, own in zip(("query", "document"), rows, strict=True):
        prepare = own.prepare
        found[side] = prepare and made.setdefault(
            prepare.fingerprint, images.Pictures(prepare, config.max_pixels, config.image_cache_mb)
        )
    return found


def _numbers(names: Sequence[str]) -> np.ndarray:
    """i32: equal where names are; -1 for ""."""
    known: dict[str, int] = {}
    return np.asarray([known.setdefault(n, len(known)) if n else -1 for n in names], np.int32)


def _digest(corpus: PairCorpus) -> str:
    """Hash of ids, pictures' names and sizes (not where the folder lies), and who has which."""
    out = hashlib.blake2b(digest_size=8)
    for side in (corpus.queries, corpus.documents):
        own = side.encoded
        for array in (own.tokens, own.first, own.length, own.picture):
            out.update(array.tobytes())
        out.update(repr([images.name_and_size(path) for path in own.paths]).encode())
    arrays = (corpus.query, corpus.document, corpus.first, corpus.score, corpus.task)
    for array in (*arrays, *([] if corpus.label is None else [corpus.label])):
        out.update(array.tobytes())
    return out.hexdigest()
