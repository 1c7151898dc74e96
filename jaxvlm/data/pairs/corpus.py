"""Number the unique queries and documents of examples, and record which example has which."""

from __future__ import annotations

import array
import collections
import hashlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import NothingUsable, Problem, enforce
from jaxvlm.data.image_inputs import ImageCache
from jaxvlm.data.images import image_files
from jaxvlm.data.pairs import collate_items
from jaxvlm.data.pairs.collate_items import Collator, Encoded, Rejected
from jaxvlm.data.pairs.column import Column
from jaxvlm.data.pairs.examples import Example, Item, matching, relevant

_log = logging.getLogger("jaxvlm.data")


class PairCorpus(NamedTuple):
    """Contents of a data set of pairs.

    A *content* is a text and an image, whatever the instruction of its embedding; it has one
    number in both columns. Texts that are the same after truncation have one number too.
    """

    examples: Sequence[Example]
    problems: list[Problem]
    queries: Column
    documents: Column
    contents: Sequence[str]
    """Description of each content, for error messages."""
    query: np.ndarray
    """i32[N]: each example's query."""
    document: np.ndarray
    """i32[total]: each example's positive and negatives, concatenated over all examples."""
    first: np.ndarray
    """i64[N + 1]: index in ``document`` of each example's positive."""
    score: np.ndarray
    """f32[total]: score of each document; 0 if there is none."""
    has_scores: bool
    """Whether the examples have scores."""
    content: dict[str, np.ndarray]
    """Column name -> i32[items]: each item's content."""
    label: np.ndarray | None
    """i32[N]: equal for equal labels, -1 is none; ``None`` if no example has one."""
    task: np.ndarray
    """i64[N]: index into ``tasks``."""
    tasks: list[str]
    """Names of the tasks."""
    most_documents: int
    """Documents of an example, its positive included, at most."""
    truncated: dict[str, int]
    """Column name -> number of texts that were truncated."""
    digest: str
    """Hash of all data that batches are a function of."""
    group: np.ndarray | None = None
    """i64[N]: result of :func:`jaxvlm.data.pairs.sampler.groups_of`; ``None``: not known yet."""
    check: str = ""
    """Command that lists what was left out; see :func:`jaxvlm.data.errors.enforce`."""

    @property
    def positive(self) -> np.ndarray:
        """i32[N]: each example's positive."""
        return self.document[self.first[:-1]]

    @property
    def query_content(self) -> np.ndarray:
        """i32[N]: content of each example's query."""
        return self.key("query", self.query)

    @property
    def positive_content(self) -> np.ndarray:
        """i32[N]: content of each example's positive."""
        return self.key("document", self.positive)

    def key(self, side: str, items: np.ndarray) -> np.ndarray:
        """Contents of items, i32 in the shape of ``items``; -1 for an item of -1."""
        return np.where(items >= 0, self.content[side][items], -1).astype(np.int32)

    def documents_of(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents of an example, and their scores."""
        own = slice(self.first[example], self.first[example + 1])
        return self.document[own], self.score[own]

    def owner(self, side: str, item: int) -> int:
        """Find an example that has this item."""
        if side == "query":
            return int(np.argmax(self.query == item))
        place = int(np.argmax(self.document == item))
        return int(np.searchsorted(self.first, place, "right")) - 1

    def relevance(self) -> list[list[int]]:
        """See :meth:`jaxvlm.data.pairs.dataset.PairDataset.relevance`."""
        return relevant(self.examples, self.queries.items, self.documents.items)

    def scored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See :meth:`jaxvlm.data.pairs.dataset.PairDataset.scored`."""
        count = np.diff(self.first) if self.has_scores else np.zeros(len(self.query), np.int64)
        total = int(count.sum())
        return np.repeat(self.query, count), self.document[:total], self.score[:total]


def make_corpus(
    name: str,
    examples: Sequence[Example],
    problems: Sequence[Problem],
    config: DataConfig,
    collators: tuple[Collator, Collator],
) -> PairCorpus:
    """Tokenize the items of examples, drop unusable examples, and number the others.

    Args:
        name: name of the data, for messages.
        examples: examples from :func:`jaxvlm.data.sources.pair_formats.read`.
        problems: problems from the same call.
        config: data settings.
        collators: collators of queries and of documents.

    Raises:
        DataError: too many examples can't be used.
        NothingUsable: none can.
    """
    pairs, total = config.pairs, len(examples) + len(problems)
    instructions = {"query": pairs.query_instruction, "document": pairs.document_instruction}
    longest = {"query": pairs.max_query_length, "document": pairs.max_document_length}
    prepared = [_instructed(example, instructions) for example in examples]
    scored = any(example.scores for example in prepared)
    prepared = _without_false_negatives(name, prepared)
    tables: dict[str, dict[Item, int]] = {"query": {}, "document": {}}
    for example in prepared:
        for side, item in _items(example):
            tables[side].setdefault(item, len(tables[side]))
    encoded: dict[str, Encoded] = {}
    rejected: dict[str, Rejected] = {}
    for side, table, collator in zip(tables, tables.values(), collators, strict=True):
        limit = longest[side] or config.max_length
        limit = min(limit, collator.lengths[1] or limit)
        encoded[side], rejected[side] = collator.encode(list(table), limit)
        if truncated := encoded[side].truncated:
            text = "%s: %d of %d %s texts are longer than %d tokens and were truncated"
            _log.warning(text, name, truncated, len(table), side, limit)
    unreadable = _unreadable_images(tables, collators, config.max_pixels)
    kept, refused = [], list(problems)
    for example in prepared:
        reason = _problem_of(example, tables, rejected, unreadable, scored, config)
        kept += [] if reason else [example]
        refused += [Problem(example.id, *reason)] if reason else []
    enforce(refused, total, config.on_bad_record, config.max_skip_fraction, name)
    if not kept:
        first = refused[0] if refused else "the data has none"
        raise NothingUsable(f"{name}: no usable example is left; {first}", refused)
    return _build(name, kept, refused, config, collators, tables, encoded, scored)


def _instructed(example: Example, instructions: dict[str, str]) -> Example:
    """Add the default instructions to those of an example's items that have none."""
    if not any(instructions.values()):
        return example

    def instructed(item: Item, side: str) -> Item:
        return item if item.instruction else item._replace(instruction=instructions[side])

    return example._replace(
        query=instructed(example.query, "query"),
        positive=instructed(example.positive, "document"),
        negatives=tuple(instructed(item, "document") for item in example.negatives),
    )


def _items(example: Example) -> list[tuple[str, Item]]:
    documents = (example.positive, *example.negatives)
    return [("query", example.query), *(("document", item) for item in documents)]


def _unreadable_images(
    tables: dict[str, dict[Item, int]], collators: tuple[Collator, Collator], max_pixels: int
) -> dict[str, str]:
    """Map each image with an unreadable header to the reason."""
    paths = {
        item.image: None
        for table, collator in zip(tables.values(), collators, strict=True)
        for item in table
        if item.image and collator.prepare is not None
    }
    reasons = {path: image_files.check(path, max_pixels) for path in paths}
    return {path: reason for path, reason in reasons.items() if reason is not None}


def _problem_of(
    example: Example,
    tables: dict[str, dict[Item, int]],
    rejected: dict[str, Rejected],
    unreadable: dict[str, str],
    scored: bool,
    config: DataConfig,
) -> tuple[str, str] | None:
    """Reason and detail why an example can't be used; ``None`` if it can."""
    for side, item in _items(example):
        if item.image in unreadable:
            return unreadable[item.image], item.image
        if reason := rejected[side].get(tables[side][item]):
            return reason
    if config.pairs.require_negatives and not example.negatives:
        return "no negative, but data.pairs.require_negatives is set", ""
    if scored and not example.scores:
        return "no score, but other records have one", ""
    return None


def _build(
    name: str,
    examples: list[Example],
    problems: list[Problem],
    config: DataConfig,
    collators: tuple[Collator, Collator],
    tables: dict[str, dict[Item, int]],
    encoded: dict[str, Encoded],
    scored: bool,
) -> PairCorpus:
    """Build the corpus of examples that can all be used."""
    used: dict[str, dict[Item, int]] = {"query": {}, "document": {}}
    contents: dict[tuple[str, str], int] = {}
    content: dict[str, list[int]] = {"query": [], "document": []}
    document = array.array("i")
    for example in examples:
        for side, item in _items(example):
            if (place := used[side].setdefault(item, len(used[side]))) == len(content[side]):
                content[side].append(contents.setdefault(item.content, len(contents)))
            if side == "document":
                document.append(place)
    del contents  # before more is made of all items
    columns, memory = {}, image_caches(collators, config)
    for side, collator in zip(used, collators, strict=True):
        own = collate_items.take(encoded[side], [tables[side].pop(item) for item in used[side]])
        columns[side] = Column(side, list(used[side]), own, collator, memory[side], config.buckets)
        image_files.refuse_augmented_tiles(name, config, columns[side].images)
    same = _same_to_the_model(name, columns, content)
    kinds = {side: same[numbers] for side, numbers in content.items()}
    count = np.asarray([1 + len(example.negatives) for example in examples], np.int64)
    scores = itertools.chain.from_iterable(e.scores for e in examples if scored)
    labels = _numbers([e.label for e in examples])
    tasks = {name: i for i, name in enumerate(dict.fromkeys(e.task for e in examples))}
    corpus = PairCorpus(
        examples=examples,
        problems=problems,
        queries=columns["query"],
        documents=columns["document"],
        contents=Contents(kinds, {side: column.items for side, column in columns.items()}),
        query=np.asarray([used["query"][e.query] for e in examples], np.int32),
        document=np.asarray(document, np.int32),
        first=np.concatenate([[0], np.cumsum(count)]).astype(np.int64),
        score=np.fromiter(scores, np.float32) if scored else np.zeros(len(document), np.float32),
        has_scores=scored,
        content=kinds,
        label=labels if any(e.label for e in examples) else None,
        task=np.asarray([tasks[e.task] for e in examples], np.int64),
        tasks=list(tasks),
        most_documents=int(count.max()),
        truncated={side: encoded[side].truncated for side in used},
        digest="",
    )
    return corpus._replace(digest=digest_of(corpus))


def _same_to_the_model(
    name: str, columns: dict[str, Column], content: dict[str, list[int]]
) -> np.ndarray:
    """i32[contents]: one number for contents that are the same tokens and image to the model.

    Long texts may differ only behind what is left of them; as negatives of each other they could
    never be told apart.
    """
    parent = list(range(1 + max(max(numbers) for numbers in content.values())))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for column in columns.values():
        first: dict[bytes, int] = {}  # by digests, which take less memory than what they are of
        merged = 0
        for i, own in enumerate(content[column.name]):
            image = column.encoded.image[i]
            path = column.encoded.paths[image] if image >= 0 else ""
            ids = column.encoded.ids(i).tobytes()
            told = b"%d %b" % (len(ids), ids) + path.encode("utf-8", "surrogateescape")
            other = first.setdefault(hashlib.blake2b(told, digest_size=16).digest(), own)
            merged += root(own) != root(other)
            parent[root(own)] = root(other)
        if merged:
            text = "%s: %d %s texts are the same tokens as another and count as the same text"
            _log.warning(text, name, merged, column.name)
    return np.asarray([root(i) for i in range(len(parent))], np.int32)


class Contents(Sequence[str]):
    """Description of each content, for error messages: looked for among the items.

    Args:
        content: column name -> i32[items]: each item's content.
        items: column name -> items.
    """

    def __init__(self, content: dict[str, np.ndarray], items: dict[str, Sequence[Item]]):
        self._content, self._items = content, items

    def __len__(self) -> int:
        return 1 + max(int(own.max(initial=-1)) for own in self._content.values())

    def __getitem__(self, index: Any) -> Any:
        for side, own in self._content.items():
            if len(found := np.flatnonzero(own == index)):
                return " ".join(filter(None, self._items[side][int(found[0])].content))[:80]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return ""  # it is the same to the model as another one


def _without_false_negatives(name: str, examples: list[Example]) -> list[Example]:
    """Drop hard negatives that are the query itself, or its positive in another example."""
    if not any(example.negatives for example in examples):
        return examples
    positives_of: dict[tuple[str, str], set[tuple[str, str]]] = collections.defaultdict(set)
    for example in matching(examples):
        positives_of[example.query.content].add(example.positive.content)
    out, dropped = [], 0
    for example in examples:
        known = positives_of[example.query.content] | {example.query.content}
        good = [i for i, item in enumerate(example.negatives) if item.content not in known]
        if len(good) < len(example.negatives):
            dropped += len(example.negatives) - len(good)
            scores = example.scores and (example.scores[0], *(example.scores[i + 1] for i in good))
            negatives = tuple(example.negatives[i] for i in good)
            example = example._replace(negatives=negatives, scores=tuple(scores))
        out.append(example)
    if dropped:
        text = "%s: %d hard negatives were dropped: they are their query, or a positive of it"
        _log.warning(text, name, dropped)
    return out


def image_caches(
    collators: tuple[Collator, Collator], config: DataConfig
) -> dict[str, ImageCache | None]:
    """Create each column's image cache; one for both if they preprocess images in the same way."""
    by_fingerprint: dict[str, ImageCache] = {}
    caches: dict[str, ImageCache | None] = {}
    for side, own in zip(("query", "document"), collators, strict=True):
        prepare = own.prepare
        caches[side] = prepare and by_fingerprint.setdefault(
            prepare.fingerprint,
            ImageCache(prepare, config.max_pixels, config.image_cache_mb),
        )
    return caches


def _numbers(names: Sequence[str]) -> np.ndarray:
    """Number names, i32: equal for equal names; -1 for ""."""
    numbers: dict[str, int] = {}
    return np.asarray([numbers.setdefault(n, len(numbers)) if n else -1 for n in names], np.int32)


def digest_of(corpus: PairCorpus) -> str:
    """Hash token ids, images' file names and sizes (not their folder), and the examples' items."""
    out = hashlib.blake2b(digest_size=8)
    for side in (corpus.queries, corpus.documents):
        own = side.encoded
        content = corpus.content[side.name]  # of both columns together
        for part in (own.tokens, own.first, own.length, own.image, content):
            out.update(part.tobytes())
        out.update(repr([image_files.name_and_size(path) for path in own.paths]).encode())
    arrays = (corpus.query, corpus.document, corpus.first, corpus.score, corpus.task)
    for part in (*arrays, *([] if corpus.label is None else [corpus.label])):
        out.update(part.tobytes())
    return out.hexdigest()
