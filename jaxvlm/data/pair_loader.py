"""Queries and documents of a run: batches for training by step, and each side for evaluation."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import ConfigError, DataConfig, refuse_unread
from jaxvlm.data import images, pair_formats
from jaxvlm.data.errors import DataError, Problem, enforce
from jaxvlm.data.examples import Example
from jaxvlm.data.item_rows import RowFormat
from jaxvlm.data.iterate import TrainBatches, ahead
from jaxvlm.data.pair_corpus import PairCorpus, make_corpus
from jaxvlm.data.sampler import Sampler
from jaxvlm.data.sides import Draw, Side
from jaxvlm.data.slots import Given, Unpaged, windows_of
from jaxvlm.data.views import Lookup, Tag
from jaxvlm.types import Batch, Pairs

_OF_CONVERSATIONS = (
    "max_images",
    "max_patches",
    "on_long",
    "packing",
    "share_pictures",
    "virtual_shards",
)
"""Settings of the data that pairs have no use for."""
_AUGMENT, _NEGATIVES = 0x9A6, 0x9E6  # tags of random streams
_log = logging.getLogger("jaxvlm.data")


class PairMeta(NamedTuple):
    """What stands in a batch of pairs, for logs and for cutting it in parts; it stays here."""

    example: np.ndarray
    """i32[b]: each row's example, its index in ``PairDataset.examples``."""
    query_tokens: np.ndarray
    """i32[b]: tokens of each query's row; a picture's counted."""
    document_tokens: np.ndarray
    """i32[b, K]: of each document's; 0 where there is none."""


class PairDataset:
    """Examples that an embedding model is trained on or evaluated with.

    Attributes:
        examples: those that can be used; ``PairMeta.example`` points here.
        problems: records that are skipped, known before the first step.
        queries: all different ones, and how they become rows.
        documents: likewise of positives and hard negatives.
        corpus: which example has which of them.
        cut: texts that were longer than allowed, by side.
    """

    def __init__(
        self,
        name: str,
        examples: Sequence[Example],
        problems: Sequence[Problem],
        config: DataConfig,
        rows: RowFormat,
        document_rows: RowFormat | None = None,
        seed: int = 0,
    ):
        """Encode all items; see :meth:`from_config`."""
        _validate(config)
        self.name, self.config, self.seed = name, config, seed
        found = make_corpus(name, examples, problems, config, (rows, document_rows or rows))
        self.corpus: PairCorpus = found
        self.examples, self.problems, self.cut = found.examples, found.problems, found.cut
        self.total = len(found.examples) + len(found.problems)
        self.queries, self.documents = found.queries, found.documents
        self._skipped: dict[int, Problem] = {}  # example -> why, at run time
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None

    @classmethod
    def from_config(
        cls,
        config: DataConfig,
        rows: RowFormat,
        *,
        document_rows: RowFormat | None = None,
        seed: int = 0,
        spec: str = "",
        read: tuple[list[Example], list[Problem]] | None = None,
    ) -> PairDataset:
        """Read, check and encode a data file.

        Every picture's header is read, none is decoded.

        Args:
            config: what to read; ``config.pairs`` says the rest.
            rows: how the model wants its items: :class:`jaxvlm.data.text_rows.TextRows` or
                :class:`jaxvlm.data.prompt_items.PromptRows`.
            document_rows: of documents, where these differ from queries'.
            seed: of the run.
            spec: what to read; "" is ``config.train``.
            read: what :func:`jaxvlm.data.pair_formats.read` gave for it, if it was read already.

        Raises:
            DataError: the file can't be used, or too many of its records can't.
            ConfigError: a setting that nothing reads.
        """
        name = spec or config.train
        mapping = config.pairs.column_mapping
        found = read or pair_formats.read(name, config.image_root, mapping)
        return cls(name, *found, config, rows, document_rows, seed)

    @property
    def sampler(self) -> Sampler:
        """Examples by step. Raises DataError where there are no such batches."""
        if self._sampler is None:
            corpus, pairs = self.corpus, self.config.pairs
            mixed = pairs.tasks == "mixed"
            self._sampler = Sampler(
                np.stack([corpus.query_content, corpus.positive_content], axis=1),
                np.zeros_like(corpus.task) if mixed else corpus.task,
                corpus.contents,
                self.config.batch_size,
                self.seed,
                pairs.task_alpha,
                pairs.batch_sampler == "random",
                () if mixed else corpus.tasks,
            )
        return self._sampler

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every example is trained on once (where ``task_alpha`` is 1)."""
        return self.sampler.steps_per_epoch

    @property
    def row_shapes(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(tokens, patches) that rows of queries, and those of documents, may have.

        A run compiles a program for each pair of them that it meets.
        """
        return self.queries.shapes, self.documents.shapes

    @property
    def position_rows(self) -> int:
        """R: rotary positions of a token, where there are pictures."""
        return max(side.position_rows for side in (self.queries, self.documents))

    @property
    def preparation(self) -> images.Preparation:
        """How a picture becomes pixels."""
        found, other = self.queries.rows.prepare, self.documents.rows.prepare
        # This is asked where there are pictures; and what is kept of one is found on both sides.
        assert found is not None and other is not None
        assert found.fingerprint == other.fingerprint, "both sides prepare pictures alike"
        return found

    def keep_tokens(self, tokens: int, given: Given) -> Unpaged:
        """From now on, batches for training have room for their pictures' visual tokens.

        Args:
            tokens: that the tower makes of a tile; 0: one of each patch of a picture of any size.
            given: what they are like; :meth:`look_up` says where they come from.

        Raises:
            DataError: there is no picture.
        """
        sides = [side for side in (self.queries, self.documents) if side.images]
        if not sides:
            raise DataError(
                f"{self.name}: no picture, so config.cache has nothing to keep; leave it out"
            )
        for side in sides:
            side.give_tokens(given, tokens)
        room = None if tokens or sides[0].patching is None else sides[0].patching.room
        largest = tokens or max(int(side.patches.max()) for side in sides)
        return Unpaged(windows_of(largest, room))

    def tag_keys(self, tag: Tag) -> None:
        """From now on, tokens of pictures are kept and looked for by their key's ``tag``."""
        for side in (self.queries, self.documents):
            if side.views:
                side.views.tag = tag

    def look_up(self, lookup: Lookup, audited: float) -> None:
        """From now on, pictures whose tokens are known come as these; see ``Views``."""
        for side in (self.queries, self.documents):
            if side.views:
                side.views.lookup, side.views.audited = lookup, audited

    @property
    def skipped(self) -> list[Problem]:
        """Examples left out at run time, so far and on this process: their picture failed."""
        with self._lock:
            return list(self._skipped.values())

    def train(self, local_rows: np.ndarray, start_step: int = 0) -> TrainBatches:
        """Endless (Pairs, PairMeta) from ``start_step`` on, read ahead by threads.

        A picture that fails to decode takes its example out of the batch, whose ``there`` is False
        throughout; a hard negative's only itself. It is logged and counted.

        Args:
            local_rows: i[b]: this process's rows of the global batch.
            start_step: the first step.
        """
        sampler, local = self.sampler, np.asarray(local_rows, np.int64)

        def load(step: int) -> tuple[Pairs, PairMeta]:
            chosen, pass_ = sampler.batch(step)
            query = self.corpus.query[chosen]
            document, score = self._with_negatives(chosen, pass_)
            # All hosts must agree on the shapes: look at the whole batch.
            shapes = self.queries.fit(query), self.documents.fit(document.reshape(-1))
            ids = (step * self.config.batch_size + local) % 2**31
            rows = (chosen[local], query[local], document[local], score[local])
            return self._load(*rows, shapes, ids.astype(np.int32), pass_)

        source = ahead(load, start_step, 2**31 - 1, self.config)
        return TrainBatches(source, start_step, self.fingerprint())

    def items(
        self, side: str, local_rows: np.ndarray, batch_size: int
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """Every different item of a side once, in order: what a retrieval evaluation encodes.

        Args:
            side: query | document.
            local_rows: i[b]: this process's rows of the global batch.
            batch_size: rows of the global batch.

        Yields:
            i32[b], numbers of items as :meth:`relevance` has them, -1 for padding or a picture that
            failed; and their rows.
        """
        found: Side = {"query": self.queries, "document": self.documents}[side]
        local = np.asarray(local_rows, np.int64)
        steps = -(-len(found.items) // batch_size)

        def load(step: int) -> tuple[np.ndarray, Batch]:
            every = np.arange(step * batch_size, (step + 1) * batch_size)
            every = np.where(every < len(found.items), every, -1)
            which = every[local]
            batch, failed = found.load(which.tolist(), found.fit(every))
            for row, reason in failed.items():
                owner = self.corpus.owner(side, int(which[row]))
                self._skip(owner, Problem(self.examples[owner].id, reason))
            which[list(failed)] = -1
            return which.astype(np.int32), batch

        return iter(ahead(load, 0, steps, self.config))

    def relevance(self) -> list[list[int]]:
        """The documents that each query should find, see :func:`jaxvlm.data.examples.relevant`."""
        return self.corpus.relevance()

    def scored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each scored pair: query i32[n], document i32[n], and how like they are f32[n]."""
        return self.corpus.scored()

    def fingerprint(self) -> dict[str, Any]:
        """What batches are a function of, besides the step; JSON-able."""
        config, pairs = self.config, dataclasses.asdict(self.config.pairs)
        picked = {
            f"data.{n}": getattr(config, n) for n in ("batch_size", "buckets", "flip", "shift")
        }
        ours = ("max_negatives", "batch_sampler", "tasks", "task_alpha")
        picked |= {f"data.pairs.{name}": pairs[name] for name in ours}
        for side in (self.queries, self.documents):
            picked |= {f"{side.name} {k}": v for k, v in side.rows.fingerprint().items()}
        rest = {"seed": self.seed, "examples": len(self.examples), "content": self.corpus.digest}
        return picked | rest

    def _with_negatives(self, chosen: np.ndarray, pass_: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents i32[B, K] of examples, -1 where there is none, and their scores f32[B, K]."""
        corpus, most = self.corpus, self.corpus.num_documents - 1
        document = np.full((len(chosen), most + 1), -1, np.int32)
        score = np.zeros(document.shape, np.float32)
        for row, example in enumerate(chosen.tolist()):
            own, scores = corpus.documents_of(example)
            if len(own) > most + 1:
                rng = np.random.default_rng([self.seed, _NEGATIVES, pass_, example])
                drawn = np.sort(rng.choice(len(own) - 1, most, replace=False)) + 1
                kept = np.concatenate([[0], drawn])
                own, scores = own[kept], scores[kept]
            document[row, : len(own)], score[row, : len(own)] = own, scores
        return document, score

    def _load(
        self,
        example: np.ndarray,
        query: np.ndarray,
        document: np.ndarray,
        score: np.ndarray,
        shapes: tuple[tuple[int, int], tuple[int, int]],
        example_id: np.ndarray,
        pass_: int,
    ) -> tuple[Pairs, PairMeta]:
        """Decode pictures and lay out rows."""
        corpus, (b, K) = self.corpus, document.shape
        drawn = self._drawn(example, pass_)
        queries, bad = self.queries.load(query.tolist(), shapes[0], drawn, pass_)
        drawn, flat = self._drawn(example, pass_, K), document.reshape(-1).tolist()
        documents, worse = self.documents.load(flat, shapes[1], drawn, pass_)
        there = document >= 0
        for row, reason in bad.items():
            there[row] = False
            self._skip(int(example[row]), Problem(self.examples[example[row]].id, reason))
        for place, reason in worse.items():
            row, column = divmod(place, K)
            there[row, column if column else slice(None)] = False
            self._skip(int(example[row]), Problem(self.examples[example[row]].id, reason))
        seen = np.where(there, document, -1)
        pairs = Pairs(
            query=queries,
            document=jax.tree.map(lambda x: x.reshape(b, K, *x.shape[1:]), documents),
            there=there,
            query_key=corpus.key("query", query),
            document_key=corpus.key("document", seen),
            group=None if corpus.label is None else corpus.label[example],
            teacher=score if corpus.has_scores else None,
            example_id=example_id,
        )
        tokens = np.append(self.documents.num_tokens, 0).astype(np.int32)
        return pairs, PairMeta(example, self.queries.num_tokens[query], tokens[seen])

    def _drawn(self, example: np.ndarray, pass_: int, width: int = 0) -> Draw | None:
        """Augmentations of the rows' pictures: ``width`` documents an example, 0: its query."""
        config = self.config
        if not (config.flip or config.shift):
            return None

        def draw(row: int) -> tuple[int, ...]:
            where, place = divmod(row, max(width, 1))
            tags = [self.seed, _AUGMENT, pass_, int(example[where]), int(width > 0), place]
            return images.draw(np.random.default_rng(tags), config.flip, config.shift)

        return draw

    def _skip(self, example: int, problem: Problem) -> None:
        """Count an example whose picture failed, once, and stop the run where it is too much."""
        with self._lock:
            if self._skipped.setdefault(example, problem) is problem:
                _log.warning("%s: left out: %s", self.name, problem)
        failed, config = self.skipped, self.config
        enforce(failed, self.total, config.on_bad, 1.0, self.name)
        enforce([*self.problems, *failed], self.total, "skip", config.max_skip_share, self.name)


def _validate(config: DataConfig) -> None:
    """Refuse settings that are none of their choices, and those that nothing would read."""
    pairs = config.pairs
    choices = {
        "data.on_bad": (config.on_bad, ("refuse", "skip")),
        "data.pairs.tasks": (pairs.tasks, ("mixed", "homogeneous")),
        "data.pairs.batch_sampler": (pairs.batch_sampler, ("no_duplicates", "random")),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise DataError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")
    least = {
        "data.batch_size": (config.batch_size, 1),
        "data.max_length": (config.max_length, 1),
        "data.pairs.max_query_length": (pairs.max_query_length, 0),
        "data.pairs.max_document_length": (pairs.max_document_length, 0),
        "data.pairs.max_negatives": (pairs.max_negatives, -1),
        "data.pairs.task_alpha": (pairs.task_alpha, 0),
    }
    for name, (number, lowest) in least.items():
        if number < lowest:
            raise DataError(f"{name}={number} must be at least {lowest}")
    refuse_unread(pairs, "config.data.pairs")
    for name in _OF_CONVERSATIONS:
        if (value := getattr(config, name)) != getattr(DataConfig(), name):
            raise ConfigError(
                f"config.data.{name}={value!r} is read of conversations alone, not of pairs"
            )
