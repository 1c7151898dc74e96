"""Data set of conversations: batches for training by step, and for evaluation record by record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data import errors, image_placeholders
from jaxvlm.data.conversations import mixture_records, packing, tokenize
from jaxvlm.data.conversations.collate import Layout, Meta, collate, collate_inputs
from jaxvlm.data.conversations.mixture import MixtureOrder
from jaxvlm.data.conversations.packing import EMPTY, PackedSequence, SequenceOrder
from jaxvlm.data.errors import DataError, ImageError, Problem, SkippedRecords
from jaxvlm.data.image_inputs import ImageInput, ImageInputs, Lookup, Tag
from jaxvlm.data.image_placeholders import ImageSpans
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.page_allocation import PageAllocation, TokenShape, WrittenPages
from jaxvlm.data.prefetch import TrainBatches, prefetch
from jaxvlm.data.sources.conversation_formats import Record
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.types import Batch

_AUGMENT, _BLIND, _SUBSET = 0xA6, 0xB1, 0x5B  # tags of random streams


class ModelInputs(NamedTuple):
    """Properties of the model and the run that the data depends on."""

    image_size: int
    """Height and width of an image in pixels."""
    prepare: image_files.Preparation
    """Preprocessing of an image to pixels."""
    num_patches: ImageSpans
    """Token span of an image."""
    seed: int = 0
    visual_mask: str = "causal"
    """causal | prefix | prompt; see ``DecoderConfig``."""
    patching: Patching | None = None
    """How images of any size are cut into patches; ``None`` if all have the same size."""


class Dataset:
    """Records of conversations that a run trains on or is evaluated on.

    Attributes:
        records: all records read; ``Meta.record`` is an index into them.
        problems: records that are skipped, as detected before the first step.
        corpus: token ids and loss masks.
        image_inputs: decoder and cache lookup of the images.
    """

    def __init__(
        self,
        name: str,
        records: Sequence[Record],
        problems: Sequence[Problem],
        config: DataConfig,
        tokenizer: ChatTokenizer,
        settings: ModelInputs,
    ):
        """Tokenize records and group them into pieces; see ``run_data.load_dataset``."""
        self.name, self.config, self.settings = name, config, settings
        self.records, self.tokenizer = tokenize.split_turns(records, config.loss_turns), tokenizer
        self.total = len(self.records) + len(problems)
        corpus, pieces, bad, too_long = select(self.records, config, tokenizer, settings)
        ids = [record.id for record in self.records]
        parts = errors.enforce_limits(name, config, ids, problems, bad, too_long)
        self.problems = [problem for part in parts for problem in part.problems]
        if not len(pieces.num_tokens):
            reasons = f"`{errors.check_command(name, config)}` lists the reasons"
            raise DataError(f"{name}: no usable record is left; {reasons}")
        different = {id(span): span for span in corpus.spans}.values()
        tiles_of_image = max((len(span.starts) for span in different), default=1)
        image_files.refuse_augmented_tiles(name, config, tiles_of_image)
        self.corpus, self.pieces = corpus, pieces
        image_cache = image_files.ImageCache(
            settings.prepare, config.max_pixels, config.image_cache_mb
        )
        self.image_inputs = ImageInputs(corpus.paths, corpus.spans, image_cache, settings.patching)
        self._max_patches = self._max_patches_of_sequence()
        self._taps = image_placeholders.max_taps(different)
        tiles = [packing.count_tiles(corpus, images) for images in corpus.images]
        self._density = float(np.max(tiles / corpus.length, initial=0.0))
        self._skipped = SkippedRecords(parts, config, errors.numbers(config))
        self._order: SequenceOrder | MixtureOrder | None = None
        self._pages: PageAllocation | None = None
        self._written_pages: WrittenPages | None = None
        self._digest = tokenize.digest(corpus)

    def sample_digest(self) -> str:
        """Hash of some images' bytes, by which processes find that they read different files."""
        return image_files.sample_digest(self.corpus.paths)

    @property
    def modalities(self) -> set[str]:
        """What usable records hold: ``text``, and ``vision`` if one has an image."""
        return {"text", *(["vision"] if any(self.pieces.images) else [])}

    @property
    def order(self) -> SequenceOrder | MixtureOrder:
        """Packed sequences by step; raises DataError if a batch has more than there are pieces."""
        if self._order is None:
            given = self.pieces, self.config, self.settings.seed
            if self.config.mixture:
                sources = tokenize.source_of_records(self.config, self.records, self.corpus)
                self._order = MixtureOrder(*given, packing.of_pieces(self.pieces, sources))
            else:
                self._order = SequenceOrder(*given)
        return self._order

    def check_batches(self) -> None:
        """Raise TooFewRecords where the data do not fill a batch."""
        _ = self.order

    def allocate_tokens(
        self, tokens: int, limit: int = 0, unused: bool = False,
        given: TokenShape | None = None, beyond: int = 0,
    ) -> PageAllocation:  # fmt: skip
        """Allocate cache pages; training batches then hold the pages of their images' tokens.

        Args:
            tokens: visual tokens that the vision encoder computes for a tile; 0: one for each
                patch of an image of any size.
            limit: see :class:`jaxvlm.data.page_allocation.PageAllocation`.
            unused: see ``PageAllocation``.
            given: see ``PageAllocation``; ``image_inputs.lookup`` finds the tokens.
            beyond: see ``PageAllocation``.

        Returns:
            The allocation, a function of the data order alone.
        """
        patching, spans = self.settings.patching, self.corpus.spans

        def size(image: int) -> tuple[int, int]:
            if tokens or not patching:
                return len(spans[image].starts), tokens
            return 1, patching.per_token * int((spans[image].tile > 0).sum())

        room = patching.padded_count if patching and not tokens else None
        self._pages = PageAllocation(
            self.order, self.pieces, size, limit, room, unused, given, beyond
        )
        return self._pages

    def tag_keys(self, tag: Tag) -> None:
        """Store and look up the visual tokens of images under the ``tag`` of their key."""
        self.image_inputs.tag = tag

    def look_up(self, lookup: Lookup, audited: float) -> None:
        """Replace pixels by cached visual tokens on a hit; see :class:`ImageInputs`."""
        self.image_inputs.lookup, self.image_inputs.audited = lookup, audited

    def omit_written(self, written: WrittenPages | None) -> None:
        """Omit the pixels of images whose tokens are in their pages; ``None`` omits none."""
        self._written_pages = written

    @property
    def preparation(self) -> image_files.Preparation:
        """The preprocessing of images."""
        return self.settings.prepare

    @property
    def skipped(self) -> list[Problem]:
        """Records skipped at run time because an image failed, so far and on this process."""
        return self._skipped.problems()

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every record has been trained on once."""
        return self.order.steps_per_epoch

    @property
    def sequence_shapes(self) -> tuple[tuple[int, int], ...]:
        """Static shapes (tokens, patches) of sequences: a run compiles a program for each.

        Patches are those of images of any size; 0 if all images have the same size.
        """
        config, patching = self.config, self.settings.patching
        count = 1 if config.packing else config.buckets
        lengths = packing.buckets(config.max_length, count)
        if patching is None:
            return tuple((length, 0) for length in lengths)
        most = self._max_patches  # patches are in proportion to tokens
        return tuple((n, patching.padded_count(most * n // lengths[-1])) for n in lengths)

    def train(self, local_rows: np.ndarray, start_step: int = 0) -> TrainBatches:
        """Iterate over training batches endlessly, prefetched by ``config.workers`` threads.

        Args:
            local_rows: i[b]: this process's rows of the global batch.
            start_step: step of the first batch.

        Returns:
            An iterator of (Batch, Meta).
        """
        config, order = self.config, self.order
        local, written = [int(row) for row in local_rows], self._written_pages

        def load(step: int) -> tuple[Batch, tuple[Meta, int]]:
            generation = written.generation if written else 0  # before any page is looked up
            chosen = [order.sequence(step, row) for row in local]
            shape = self.sequence_shapes[-1]
            if not config.packing:  # all hosts must agree on the shape: use the global batch
                every = [order.sequence(step, row) for row in range(config.batch_size)]
                shape = self._fitting_shape(every)
            ids = step * config.batch_size + np.asarray(local, np.int64)
            batch, meta = self._load(self.corpus, self.pieces, chosen, shape, ids)
            return batch, (meta, generation)

        def revalidate(step: int, loaded: tuple[Batch, tuple[Meta, int]]) -> tuple[Batch, Meta]:
            """Load a prefetched batch again if the cache pages that it relies on were evicted."""
            batch, (meta, generation) = loaded
            evicted = written is not None and generation != written.generation
            if evicted and batch.in_pages is not None and batch.in_pages.any():
                return revalidate(step, load(step))
            return batch, meta

        source = prefetch(load, start_step, 2**31 - 1, config)
        return TrainBatches(source, start_step, self.fingerprint(), revalidate)

    def eval(
        self,
        local_rows: np.ndarray,
        batch_size: int,
        num_records: int = 0,
        shuffled_images: bool = False,
    ) -> Iterator[tuple[Batch, Meta]]:
        """Iterate over every record once, in sequences packed as in training; padding comes last.

        Args:
            local_rows: i[b]: this process's rows of the global batch.
            batch_size: sequences of the global batch.
            num_records: maximum number of records, from a fixed random choice of pieces; 0: all.
            shuffled_images: replace each image by another one: the blind control.

        Returns:
            An iterator of (Batch, Meta).

        Raises:
            DataError: ``shuffled_images`` with fewer than two images.
        """
        corpus, pieces = self.subset(num_records)
        other = self.other_images() if shuffled_images else None
        every_piece = np.arange(len(pieces.num_tokens))
        packed = [PackedSequence(own) for own in packing.pack(every_piece, pieces, self.config)]
        steps = -(-len(packed) // batch_size)
        packed += [EMPTY] * (steps * batch_size - len(packed))
        local = [int(row) for row in local_rows]

        def load(step: int) -> tuple[Batch, Meta]:
            every = packed[step * batch_size : (step + 1) * batch_size]
            shape = self.sequence_shapes[-1]
            if not self.config.packing:
                shape = self._fitting_shape(every, pieces)
            ids = step * batch_size + np.asarray(local, np.int64)
            chosen = [every[row] for row in local]
            return self._load(corpus, pieces, chosen, shape, ids, other, train=False)

        return iter(prefetch(load, 0, steps, self.config))

    def fingerprint(self) -> dict[str, Any]:
        """Settings and data that batches are a function of, besides the step; JSON-able."""
        settings, config = self.settings, dataclasses.asdict(self.config)
        names = [
            *("batch_size", "max_length", "max_images_per_sequence", "packing", "share_images"),
            *("buckets", "flip", "max_shift"),
        ]
        picked = {f"data.{name}": config[name] for name in names}
        picked |= {"images": settings.prepare.fingerprint, "seed": settings.seed}
        picked |= {"image_size": settings.image_size, "visual_mask": settings.visual_mask}
        picked |= {"records": len(self.corpus.first), "order_version": packing.ORDER_VERSION}
        if settings.patching:
            picked["data.max_patches_per_sequence"] = config["max_patches_per_sequence"]
            picked["patches"] = self._max_patches
        if self.config.mixture:
            picked |= mixture_records.fingerprint(self.config)
        return picked | {"content": self._digest}

    def _record_id(self, corpus: tokenize.Corpus, record: int) -> str:
        return self.records[int(corpus.source[record])].id

    def _fitting_shape(
        self, chosen: Sequence[PackedSequence], pieces: packing.Pieces | None = None
    ) -> tuple[int, int]:
        """Find the smallest of ``sequence_shapes`` that fits all these sequences."""
        pieces = pieces or self.pieces
        tokens, patches = (
            max((int(sizes[sequence.pieces].sum()) for sequence in chosen), default=0)
            for sizes in (pieces.num_tokens, pieces.num_patches)
        )
        return next(s for s in self.sequence_shapes if s[0] >= tokens and s[1] >= patches)

    def _max_patches_of_sequence(self) -> int:
        """Maximum patches of a sequence: the setting, or what its tokens and images allow."""
        config, patching, pieces = self.config, self.settings.patching, self.pieces
        if patching is None or not config.packing:
            return int(pieces.num_patches.max())
        limits = packing.limits_of(config, patching)
        used = {image for images in pieces.images for image in images}
        largest = max((limits.patches(self.corpus, (p,)) for p in used), default=0)
        most = min(patching.per_token * config.max_length, config.max_images_per_sequence * largest)
        return min(most, config.max_patches_per_sequence or most)

    def _layout(self, pieces: packing.Pieces) -> Layout:
        most = int(pieces.num_images.max())
        if self.config.packing:  # an upper bound for any choice of records in a sequence
            fit = int(self._density * self.config.max_length)
            most = min(self.config.max_images_per_sequence, max(most, fit))
        return Layout(
            image_id=self.tokenizer.image_id,
            pad_id=self.tokenizer.pad_id,
            max_images=most if self.corpus.paths else 0,
            has_parents=bool((pieces.record < 0).any()),
            mask=self._mask(),
            taps=self._taps,
            position_rows=self.position_rows,
        )

    @property
    def position_rows(self) -> int:
        """R: rotary positions of a token."""
        return max((len(span.positions) for span in self.corpus.spans[:1]), default=1)

    def _mask(self) -> str:
        mask = self.settings.visual_mask
        return mask if self.corpus.paths or mask == "prompt" else "causal"

    def _load(
        self,
        corpus: tokenize.Corpus,
        pieces: packing.Pieces,
        chosen: Sequence[PackedSequence],
        shape: tuple[int, int],
        example_id: np.ndarray,
        other: np.ndarray | None = None,
        train: bool = True,
    ) -> tuple[Batch, Meta]:
        """Decode images, skip pieces whose images fail, and collate the rest."""
        kept: list[np.ndarray] = []
        inputs: list[ImageInput] = []
        pages: list[np.ndarray] = []
        slots = self._pages if train else None
        for sequence in chosen:
            good = []
            for piece in sequence.pieces.tolist():
                images = pieces.images[piece]
                try:
                    tiles = self._inputs_of(images, piece, sequence, other, train)
                except ImageError as error:
                    if other is None:  # a failure in the blind control is not the piece's own
                        self._skip(corpus, pieces, piece, str(error))
                    continue
                good.append(piece)
                inputs += tiles
                if slots:
                    pages += [page for p in images for page in slots.pages(sequence.row, p)]
            kept.append(np.asarray(good, np.int32))
        layout = self._layout(self.pieces)
        batch, meta, places = collate(corpus, pieces, kept, shape[0], layout)
        batch = batch._replace(example_id=(example_id % 2**31).astype(np.int32))
        if layout.max_images:
            slots_shape, settings = (len(chosen), layout.max_images), self.settings
            cached = None
            if slots and slots.given:
                cached = slots.given, 0 if settings.patching else slots.windows[-1]
            rest = (settings.image_size, settings.patching, shape[1], cached)
            batch = batch._replace(**collate_inputs(inputs, places, slots_shape, *rest))
            if slots:
                image_pages = np.full((*slots_shape, slots.per_tile), -1, np.int32)
                if pages:
                    image_pages[places.row, places.slot] = pages
                in_pages = np.zeros(slots_shape, bool)
                in_pages[places.row, places.slot] = [v.in_pages for v in inputs]
                batch = batch._replace(image_pages=image_pages, in_pages=in_pages)
        return batch, meta

    def _inputs_of(
        self,
        images: tuple[int, ...],
        piece: int,
        sequence: PackedSequence,
        other: np.ndarray | None,
        train: bool,
    ) -> list[ImageInput]:
        """Load and augment the images of a piece; raises ImageError."""
        config = self.config
        rng = None
        if train and (config.flip or config.max_shift):
            rng = np.random.default_rng([self.settings.seed, _AUGMENT, sequence.pass_, piece])
        out = []
        for image in images:
            drawn = image_files.draw(rng, config.flip, config.max_shift) if rng else ()
            cached = train and rng is None and not self.image_inputs.audits(image, sequence.pass_)
            written = self._written_tiles(sequence, image) if cached else None
            out += self.image_inputs.get(image, drawn, other, cached, written)
        return out

    def _written_tiles(
        self, sequence: PackedSequence, image: int
    ) -> Callable[[int, bytes], bool] | None:
        """Tell which tiles of an image are in their pages; see :meth:`ImageInputs.get`."""
        slots, written = self._pages, self._written_pages
        if slots is None or written is None:
            return None
        first = slots.pages(sequence.row, image)[:, 0].tolist()
        return lambda tile, key: written.has(first[tile], key)

    def _skip(
        self, corpus: tokenize.Corpus, pieces: packing.Pieces, piece: int, reason: str
    ) -> None:
        """Count a piece whose image failed, once, and stop the run if too many have."""
        lost = pieces.record[pieces.start[piece] : pieces.start[piece + 1]]
        self._skipped.add(
            {
                int(corpus.source[record]): Problem(self._record_id(corpus, record), reason)
                for record in lost[lost >= 0].tolist()
            }
        )

    def usable(self) -> list[int]:
        """Indices of the records that are in the data set and were not skipped at run time."""
        return [i for i in self.corpus.source.tolist() if i not in self._skipped]

    def subset(self, num_records: int) -> tuple[tokenize.Corpus, packing.Pieces]:
        """Choose ``num_records`` records, in complete pieces as far as possible; 0: all."""
        if not 0 < num_records < len(self.corpus.first):
            return self.corpus, self.pieces
        order = np.random.default_rng([0, _SUBSET]).permutation(len(self.pieces.num_tokens))
        start = self.pieces.start
        segments = np.concatenate([np.arange(start[i], start[i + 1]) for i in order.tolist()])
        records = self.pieces.record[segments]
        chosen = np.sort(records[records >= 0][:num_records])
        corpus = tokenize.take(self.corpus, chosen)
        return corpus, make_pieces(corpus, self.config, self.tokenizer, self.settings)[0]

    def other_images(self) -> np.ndarray:
        """Return i64[images], a different image for each image: the blind control.

        Raises:
            DataError: fewer than two images.
        """
        # Images of refused records are in no record of the corpus and must not be used.
        used = np.unique([i for images in self.corpus.images for i in images]).astype(int)
        if len(used) < 2:
            raise DataError(f"{self.name}: the blind control needs two images, not {len(used)}")
        cycle = np.random.default_rng([0, _BLIND]).permutation(used)
        other = np.arange(len(self.corpus.paths))
        other[cycle] = np.roll(cycle, 1)
        return other


class Selected(NamedTuple):
    """The records that a run can use, and the problems of the others."""

    corpus: tokenize.Corpus
    pieces: packing.Pieces
    """Pieces of the usable records."""
    bad: list[Problem]
    """Records that ``data.on_bad_record`` is about."""
    too_long: list[Problem]
    """Records that ``data.on_too_long`` is about."""


def select(
    records: Sequence[Record], config: DataConfig, tokenizer: ChatTokenizer, settings: ModelInputs
) -> Selected:
    """Tokenize records and select those that can be used: in a run, and in `jaxvlm data check`.

    Every image's header is read, and no image is decoded.
    """
    corpus, unfit = tokenize.encode(records, tokenizer, settings.num_patches)
    corpus, broken = tokenize.with_readable_images(corpus, records, config.max_pixels)
    apart = tokenize.source_of_records(config, records, corpus)
    pieces, long = make_pieces(corpus, config, tokenizer, settings, apart)
    too_long = [Problem(records[int(corpus.source[i])].id, *reason) for i, *reason in long]
    return Selected(corpus, pieces, [*unfit, *broken], too_long)


def make_pieces(
    corpus: tokenize.Corpus,
    config: DataConfig,
    tokenizer: ChatTokenizer,
    settings: ModelInputs,
    apart: Sequence[int] = (),
) -> tuple[packing.Pieces, list[tuple[int, str, str]]]:
    """Group a corpus into pieces as the settings say; see :func:`packing.build_pieces`."""
    # With one record a sequence nothing can be shared; nor can an image that attends to its
    # question.
    share = config.share_images and config.packing and settings.visual_mask != "prompt"
    limits = packing.limits_of(config, settings.patching)
    return packing.build_pieces(corpus, tokenizer.image_id, limits, share, apart)
