"""Data set of queries and documents: training batches by step, and each column for evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxvlm.config import ConfigError, DataConfig, refuse_unread
from jaxvlm.data.conversations.content import is_packed
from jaxvlm.data.errors import DataError, Part, Problem, SkippedRecords
from jaxvlm.data.image_inputs import Lookup, Tag
from jaxvlm.data.images import image_files
from jaxvlm.data.packed.mapped_arrays import Concatenated
from jaxvlm.data.page_allocation import NoPages, TokenShape, windows_of
from jaxvlm.data.pairs import packed_pairs
from jaxvlm.data.pairs.collate_items import Collator
from jaxvlm.data.pairs.column import Column, Draw
from jaxvlm.data.pairs.corpus import PairCorpus, make_corpus
from jaxvlm.data.pairs.examples import Example
from jaxvlm.data.pairs.sampler import Sampler
from jaxvlm.data.prefetch import TrainBatches, prefetch
from jaxvlm.data.sources import pair_formats
from jaxvlm.types import Batch, Pairs

_OF_CONVERSATIONS = (
    "loss_turns",
    "max_images_per_sequence",
    "max_patches_per_sequence",
    "mixture",
    "mixture_temperature",
    "on_too_long",
    "packing",
    "share_images",
    "video",
)
"""Data settings that are not read for pairs."""
_AUGMENT, _NEGATIVES = 0x9A6, 0x9E6  # tags of random streams


class PairMeta(NamedTuple):
    """Contents of a batch of pairs, for logs and for splitting it; it stays on the host."""

    example: np.ndarray
    """i32[b]: each row's example, as an index into ``PairDataset.examples``."""


class PairDataset:
    """Examples that an embedding model is trained on or evaluated with.

    Attributes:
        examples: usable examples; ``PairMeta.example`` is an index into them.
        problems: records that are skipped, as detected before the first step.
        queries: all unique queries, and their collator.
        documents: all unique positives and hard negatives, and their collator.
        corpus: queries and documents of each example.
        truncated: number of texts that were truncated, by column.
    """

    def __init__(self, name: str, corpus: PairCorpus, config: DataConfig, seed: int = 0):
        self.name, self.config, self.seed = name, config, seed
        self.corpus = corpus
        self.examples, self.problems = corpus.examples, corpus.problems
        self.truncated = corpus.truncated
        self.total = len(corpus.examples) + len(corpus.problems)
        self.queries, self.documents = corpus.queries, corpus.documents
        part = Part(name, self.total, corpus.problems, corpus.check)
        self._skipped = SkippedRecords([part], config)
        self._sampler: Sampler | None = None

    @classmethod
    def from_config(
        cls,
        config: DataConfig,
        collator: Collator,
        *,
        document_collator: Collator | None = None,
        seed: int = 0,
        spec: str = "",
        read: tuple[list[Example], list[Problem]] | None = None,
    ) -> PairDataset:
        """Read, validate and tokenize a data file, or open a packed set.

        The header of every image of a file is read; no image is decoded.

        Args:
            config: data settings, with those of pairs in ``config.pairs``.
            collator: collator for the model's input format:
                :class:`jaxvlm.data.pairs.collate_texts.TextCollator` or
                :class:`jaxvlm.data.pairs.collate_prompt_items.PromptCollator`.
            document_collator: collator of documents, if it differs from that of queries.
            seed: seed of the run.
            spec: file or pattern of files to read, or a packed set; "" is ``config.train``.
            read: result of :func:`jaxvlm.data.sources.pair_formats.read` for ``spec``, if it was
                read before.

        Raises:
            DataError: the file, or too many of its records, can't be used.
            ConfigError: a setting is changed that is not read for pairs.
        """
        _validate(config)
        name, both = spec or config.train, (collator, document_collator or collator)
        if read is None and is_packed(name, config):
            corpus = packed_pairs.open_set(name, config, both)
        else:
            examples, problems = read or pair_formats.read(name, config)
            corpus = make_corpus(name, examples, problems, config, both)
        return cls(name, corpus, config, seed)

    @property
    def is_packed(self) -> bool:
        """Whether it was packed before."""
        return self.corpus.group is not None

    @property
    def num_documents(self) -> int:
        """K: documents of an example in a batch, its positive included."""
        most, limit = self.corpus.most_documents, self.config.pairs.max_negatives
        return most if limit < 0 else min(most, 1 + limit)

    @property
    def modalities(self) -> set[str]:
        """What usable examples hold: ``text``, ``vision`` (images), or both."""
        columns = [self.queries.encoded, self.documents.encoded]
        has = {
            "text": any(column.length.any() for column in columns),
            "vision": any((column.image >= 0).any() for column in columns),
        }
        return {name for name, any_has in has.items() if any_has}

    @property
    def sampler(self) -> Sampler:
        """Examples by step; raises DataError if the data can't fill batches as configured."""
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
                corpus.group,
            )
        return self._sampler

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every example is trained on once (if ``task_alpha`` is 1)."""
        return self.sampler.steps_per_epoch

    @property
    def sequence_shapes(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Static shapes (tokens, patches) of queries, and of documents, in a batch.

        A run compiles a program for each combination of the two that occurs.
        """
        return self.queries.shapes, self.documents.shapes

    @property
    def position_rows(self) -> int:
        """R: rotary positions of a token, if there are images."""
        return max(column.position_rows for column in (self.queries, self.documents))

    @property
    def preparation(self) -> image_files.Preparation:
        """The preprocessing of images; queries and documents must have the same."""
        own, other = self.queries.collator.prepare, self.documents.collator.prepare
        # Called only if there are images; both columns share the cached tokens of an image.
        assert own is not None and other is not None
        text = "queries and documents must preprocess images in the same way"
        assert own.fingerprint == other.fingerprint, text
        return own

    def allocate_tokens(self, tokens: int, token_shape: TokenShape) -> NoPages:
        """Add the fields of cached visual tokens to training batches.

        Args:
            tokens: visual tokens that the vision encoder computes for a tile; 0: one for each
                patch of an image of any size.
            token_shape: width and dtype of the tokens, which :meth:`look_up` finds.

        Returns:
            The sizes of the tokens; pairs have no cache pages.

        Raises:
            DataError: the data has no image.
        """
        columns = [column for column in (self.queries, self.documents) if column.images]
        if not columns:
            text = "the data has no image, so config.cache has nothing to cache; leave it out"
            raise DataError(f"{self.name}: {text}")
        for column in columns:
            column.allocate_tokens(token_shape, tokens)
        patching = columns[0].patching
        padded_count = patching.padded_count if patching and not tokens else None
        largest = tokens or max(int(column.patches.max()) for column in columns)
        return NoPages(windows_of(largest, padded_count))

    def tag_keys(self, tag: Tag) -> None:
        """Store and look up the visual tokens of images under the ``tag`` of their key."""
        for column in (self.queries, self.documents):
            if column.image_inputs:
                column.image_inputs.tag = tag

    def look_up(self, lookup: Lookup, audited: float) -> None:
        """Replace pixels by cached visual tokens on a hit; see :class:`ImageInputs`."""
        for column in (self.queries, self.documents):
            if column.image_inputs:
                column.image_inputs.lookup, column.image_inputs.audited = lookup, audited

    @property
    def skipped(self) -> list[Problem]:
        """Examples skipped at run time because an image failed, so far and on this process."""
        return self._skipped.problems()

    def check_batches(self) -> None:
        """Raise DataError where the examples do not fill batches."""
        _ = self.sampler

    def train(self, local_rows: np.ndarray, start_step: int = 0) -> TrainBatches:
        """Iterate over training batches endlessly, prefetched by threads.

        An image of a query or positive that fails to decode invalidates its example in the batch
        (``Pairs.valid`` is False for all its documents); that of a hard negative invalidates only
        itself. It is logged and counted.

        Args:
            local_rows: i[b]: this process's rows of the global batch.
            start_step: step of the first batch.

        Returns:
            An iterator of (Pairs, PairMeta).
        """
        sampler, local = self.sampler, np.asarray(local_rows, np.int64)

        def load(step: int) -> tuple[Pairs, PairMeta]:
            chosen, pass_ = sampler.batch(step)
            query = self.corpus.query[chosen]
            document, score = self._with_negatives(chosen, pass_)
            # All hosts must agree on the shapes: use the global batch.
            shapes = self.queries.fit(query), self.documents.fit(document.reshape(-1))
            ids = (step * self.config.batch_size + local) % 2**31
            own = (chosen[local], query[local], document[local], score[local])
            return self._load(*own, shapes, ids.astype(np.int32), pass_)

        source = prefetch(load, start_step, 2**31 - 1, self.config)
        return TrainBatches(source, start_step, self.fingerprint())

    def keys(self, step: int) -> Pairs:
        """Contents and groups of a step's whole batch, without its texts and images."""
        chosen, pass_ = self.sampler.batch(step)
        document, _ = self._with_negatives(chosen, pass_)
        corpus = self.corpus
        return Pairs(
            query=None,  # type: ignore[arg-type]  # keys alone
            document=None,  # type: ignore[arg-type]  # keys alone
            valid=document >= 0,
            query_key=corpus.key("query", corpus.query[chosen]),
            document_key=corpus.key("document", document),
            group=None if corpus.label is None else corpus.label[chosen],
        )

    def items(
        self, side: str, local_rows: np.ndarray, batch_size: int
    ) -> Iterator[tuple[np.ndarray, Batch]]:
        """Iterate over every unique item of a column once, in order, for a retrieval evaluation.

        Args:
            side: query | document.
            local_rows: i[b]: this process's rows of the global batch.
            batch_size: rows of the global batch.

        Yields:
            i32[b], indices of items as in :meth:`relevance`, -1 for padding or an image that
            failed; and their batch.
        """
        column: Column = {"query": self.queries, "document": self.documents}[side]
        local = np.asarray(local_rows, np.int64)
        steps = -(-len(column.items) // batch_size)

        def load(step: int) -> tuple[np.ndarray, Batch]:
            every = np.arange(step * batch_size, (step + 1) * batch_size)
            every = np.where(every < len(column.items), every, -1)
            which = every[local]
            batch, failed = column.load(which.tolist(), column.fit(every))
            for row, reason in failed.items():
                owner = self.corpus.owner(side, int(which[row]))
                self._skip(owner, reason)
            which[list(failed)] = -1
            return which.astype(np.int32), batch

        return iter(prefetch(load, 0, steps, self.config))

    def relevance(self) -> list[list[int]]:
        """List the relevant documents of each query.

        See :func:`jaxvlm.data.pairs.examples.relevant`.
        """
        return self.corpus.relevance()

    def scored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the scored pairs: query i32[n], document i32[n], and similarity score f32[n]."""
        return self.corpus.scored()

    def fingerprint(self) -> dict[str, Any]:
        """Settings and data that batches are a function of, besides the step; JSON-able."""
        config, pairs = self.config, dataclasses.asdict(self.config.pairs)
        picked = {
            f"data.{n}": getattr(config, n) for n in ("batch_size", "buckets", "flip", "max_shift")
        }
        names = ("max_negatives", "batch_sampler", "tasks", "task_alpha")
        picked |= {f"data.pairs.{name}": pairs[name] for name in names}
        for column in (self.queries, self.documents):
            picked |= {f"{column.name} {k}": v for k, v in column.collator.fingerprint().items()}
        rest = {"seed": self.seed, "examples": len(self.examples), "content": self.corpus.digest}
        return picked | rest

    def sample_digest(self) -> str:
        """Hash of some images' bytes, by which processes find that they read different files."""
        return image_files.sample_digest(
            Concatenated(self.queries.encoded.paths, self.documents.encoded.paths)
        )

    def _with_negatives(self, chosen: np.ndarray, pass_: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose the documents i32[B, K] of examples, -1 is padding, and their scores f32[B, K]."""
        corpus, most = self.corpus, self.num_documents - 1
        document = np.full((len(chosen), most + 1), -1, np.int32)
        score = np.zeros(document.shape, np.float32)
        for row, example in enumerate(chosen.tolist()):
            own, scores = corpus.documents_of(example)
            if len(own) > most + 1:
                rng = np.random.default_rng([self.seed, _NEGATIVES, pass_, example])
                sampled = np.sort(rng.choice(len(own) - 1, most, replace=False)) + 1
                kept = np.concatenate([[0], sampled])
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
        """Decode images and collate a batch."""
        corpus, (b, K) = self.corpus, document.shape
        draw = self._augmentations(example, pass_)
        queries, bad = self.queries.load(query.tolist(), shapes[0], draw, pass_)
        draw, flat = self._augmentations(example, pass_, K), document.reshape(-1).tolist()
        documents, worse = self.documents.load(flat, shapes[1], draw, pass_)
        valid = document >= 0
        for row, reason in bad.items():
            valid[row] = False
            self._skip(int(example[row]), reason)
        for place, reason in worse.items():
            row, column = divmod(place, K)
            valid[row, column if column else slice(None)] = False
            self._skip(int(example[row]), reason)
        used = np.where(valid, document, -1)
        pairs = Pairs(
            query=queries,
            document=jax.tree.map(lambda x: x.reshape(b, K, *x.shape[1:]), documents),
            valid=valid,
            query_key=corpus.key("query", query),
            document_key=corpus.key("document", used),
            group=None if corpus.label is None else corpus.label[example],
            teacher=score if corpus.has_scores else None,
            example_id=example_id,
        )
        return pairs, PairMeta(example)

    def _augmentations(self, example: np.ndarray, pass_: int, width: int = 0) -> Draw | None:
        """Draw augmentations of ``width`` documents per example; 0: of the queries."""
        config = self.config
        if not (config.flip or config.max_shift):
            return None

        def draw(row: int) -> tuple[int, ...]:
            where, place = divmod(row, max(width, 1))
            tags = [self.seed, _AUGMENT, pass_, int(example[where]), int(width > 0), place]
            return image_files.draw(np.random.default_rng(tags), config.flip, config.max_shift)

        return draw

    def _skip(self, example: int, reason: str) -> None:
        """Count an example whose image failed, once, and stop the run if too many have."""
        self._skipped.add({example: Problem(self.examples[example].id, reason)})


def _validate(config: DataConfig) -> None:
    """Refuse invalid settings, and changed settings that are not read for pairs."""
    pairs = config.pairs
    choices = {
        "data.on_bad_record": (config.on_bad_record, ("refuse", "skip")),
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
                f"config.data.{name}={value!r} is read for conversations only, not for pairs; leave"
                " it out"
            )
