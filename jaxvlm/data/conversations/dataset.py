"""Data set of conversations: batches for training by step, and for evaluation record by record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import Config, DataConfig, VideoConfig
from jaxvlm.data import errors
from jaxvlm.data.conversations import mixture_records, packed_set, packing, tokenize
from jaxvlm.data.conversations.collate import Layout, Meta, collate, collate_inputs
from jaxvlm.data.conversations.content import (
    Content,
    ModelInputs,
    build,
    is_packed,
    make_pieces,
    validate_settings,
)
from jaxvlm.data.conversations.mixture import MixtureOrder
from jaxvlm.data.conversations.packing import EMPTY, PackedSequence, SequenceOrder
from jaxvlm.data.errors import MIXTURE, DataError, ImageError, Problem, SkippedRecords
from jaxvlm.data.image_inputs import ImageCache, ImageInput, ImageInputs, Lookup, Tag
from jaxvlm.data.image_placeholders import ImageSpans
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.page_allocation import PageAllocation, TokenShape, WrittenPages
from jaxvlm.data.prefetch import TrainBatches, prefetch
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.types import Batch

_AUGMENT, _BLIND, _SUBSET = 0xA6, 0xB1, 0x5B  # tags of random streams


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
        content: Content,
        config: DataConfig,
        tokenizer: ChatTokenizer,
        settings: ModelInputs,
    ):
        """Serve what a data set holds; see :func:`load_dataset`."""
        self.name, self.config, self.settings = name, config, settings
        self.content, self.tokenizer = content, tokenizer
        self.records, self.corpus, self.pieces, self.facts = content[:4]
        parts = content.parts
        self.total = sum(part.total for part in parts)
        self.problems = [problem for part in parts for problem in part.problems]
        image_files.refuse_augmented_tiles(name, config, self.facts.tiles)
        image_cache = ImageCache(settings.prepare, config.max_pixels, config.image_cache_mb)
        images = self.corpus.paths, self.corpus.spans
        self.image_inputs = ImageInputs(*images, image_cache, settings.patching)
        self._skipped = SkippedRecords(parts, config, errors.numbers(config))
        self._order: SequenceOrder | MixtureOrder | None = None
        self._pages: PageAllocation | None = None
        self._written_pages: WrittenPages | None = None

    def sample_digest(self) -> str:
        """Hash of some images' bytes, by which processes find that they read different files."""
        return image_files.sample_digest(self.corpus.paths)

    @property
    def modalities(self) -> set[str]:
        """What usable records hold: ``text``, and ``vision`` if one has an image."""
        return {"text", *(["vision"] if self.facts.has_images else [])}

    @property
    def order(self) -> SequenceOrder | MixtureOrder:
        """Packed sequences by step; raises DataError if a batch has more than there are pieces."""
        if self._order is None:
            given, sources = (self.config, self.settings.seed), self.content.sources
            if sources:
                each = [(own.pieces, own.sequences, own.tokens) for own in sources]
                self._order = MixtureOrder(each, *given)
            else:
                self._order = SequenceOrder(self.pieces, *given, self.content.sequences)
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
            tiles, tokens_of = len(spans[image].starts), int((spans[image].tile > 0).sum())
            return tiles, patching.per_token * tokens_of // tiles

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
        most = self.facts.patches  # patches are in proportion to tokens
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
            DataError: ``shuffled_images`` with fewer than two images, or a packed set.
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
        picked |= {"videos": settings.prepare.video_fingerprint} if self.facts.has_videos else {}
        if settings.patching:
            picked["data.max_patches_per_sequence"] = config["max_patches_per_sequence"]
            picked["patches"] = self.facts.patches
        if self.config.mixture:
            picked |= mixture_records.fingerprint(self.config)
        return picked | {"content": self.facts.digest}

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

    def _layout(self) -> Layout:
        most = self.facts.slots
        if self.config.packing:  # an upper bound for any choice of records in a sequence
            fit = int(self.facts.density * self.config.max_length)
            most = min(self.config.max_images_per_sequence, max(most, fit))
        return Layout(
            image_id=self.tokenizer.image_id,
            pad_id=self.tokenizer.pad_id,
            max_images=most if len(self.corpus.paths) else 0,
            has_parents=self.facts.has_parents,
            mask=self._mask(),
            taps=self.facts.taps,
            position_rows=self.position_rows,
        )

    @property
    def position_rows(self) -> int:
        """R: rotary positions of a token."""
        return self.facts.position_rows

    def _mask(self) -> str:
        mask = self.settings.visual_mask
        return mask if len(self.corpus.paths) or mask == "prompt" else "causal"

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
        kept: list[list[int]] = [[] for _ in chosen]
        inputs: list[ImageInput] = []
        pages: list[np.ndarray] = []
        slots = self._pages if train else None
        work = [(k, piece) for k, own in enumerate(chosen) for piece in own.pieces.tolist()]

        def load(item: tuple[int, int]) -> list[ImageInput] | ImageError:
            k, piece = item
            if self.content.check:
                self.content.check(piece)
            try:
                return self._inputs_of(pieces.images[piece], piece, chosen[k], other, train)
            except ImageError as error:
                return error

        for (k, piece), tiles in zip(work, self.content.each(load, work), strict=True):
            if isinstance(tiles, ImageError):
                if other is None:  # a failure in the blind control is not the piece's own
                    self._skip(corpus, pieces, piece, str(tiles))
                continue
            kept[k].append(piece)
            inputs += tiles
            if slots:
                row, own = chosen[k].row, pieces.images[piece]
                pages += [page for p in own for page in slots.pages(row, p)]
        layout = self._layout()
        whole = [np.asarray(good, np.int32) for good in kept]
        batch, meta, places = collate(corpus, pieces, whole, shape[0], layout)
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
        records = map(int, corpus.source[lost[lost >= 0]])
        self._skipped.add({i: Problem(self.records[i].id, reason) for i in records})

    def usable(self) -> list[int]:
        """Indices of the records that are in the data set and were not skipped at run time."""
        return [i for i in self.corpus.source[:].tolist() if i not in self._skipped]

    def subset(self, num_records: int) -> tuple[tokenize.Corpus, packing.Pieces]:
        """Choose ``num_records`` records, in complete pieces as far as possible; 0: all."""
        if self.content.check:
            raise DataError(f"{self.name} is packed: only training reads it; evaluate on a file")
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


def make_dataset(
    config: Config,
    spec: str,
    chat_tokenizer: ChatTokenizer,
    image_format: image_files.ImageFormat,
    read: Any = None,
) -> Dataset:
    """Build the data set ``spec``, tokenized for the run's model."""
    return load_dataset(
        config.data,
        chat_tokenizer,
        image_size=image_format.size,
        num_patches=image_format.of_file,
        seed=config.seed,
        visual_mask=config.model.decoder.visual_mask,
        prepare=image_format.prepare,
        patching=image_format.patching,
        spec=spec,
        read=read,
    )


def load_dataset(
    config: DataConfig,
    tokenizer: ChatTokenizer,
    *,
    image_size: int,
    num_patches: ImageSpans,
    seed: int = 0,
    visual_mask: str = "causal",
    prepare: image_files.Preparation | None = None,
    patching: Patching | None = None,
    spec: str = "",
    read: Any = None,
) -> Dataset:
    """Read, validate and tokenize a data file.

    The header of every image is read; no image is decoded.

    Args:
        config: settings of what to read and how to pack it.
        tokenizer: tokenizer with a chat template.
        image_size: height and width of the model's images in pixels.
        num_patches: token span of an image: a number of tokens, or a function of its file.
        seed: seed of the run.
        visual_mask: causal | prefix | prompt: which tokens attend bidirectionally.
        prepare: preprocessing of images; ``None`` follows ``config.resize``.
        patching: how images of any size are cut into patches; ``None``: all have one size.
        spec: file or named source to read; "" is ``config.train`` or ``config.mixture``.
        read: what was read of ``spec``, or :func:`mixture_records.read`, if it was before.

    Raises:
        DataError: the file, or too many of its records, can't be used.
    """
    spec = spec or config.train
    if spec:
        config = dataclasses.replace(config, mixture={})
    name = spec or MIXTURE
    prepare = prepare or image_files.squares(image_size, config.resize)
    settings = ModelInputs(image_size, prepare, num_patches, seed, visual_mask, patching)
    validate_settings(config, settings)
    given = config, tokenizer, settings
    if config.mixture:
        read = mixture_records.read(config) if read is None else read
        content = mixture_records.load(*given, read)
    elif is_packed(spec, config):
        content = packed_set.open_set(spec, *given)
    else:
        records, problems = read or conversation_formats.read(spec, config)
        content = build(name, records, problems, *given)
    if config.video != VideoConfig() and not content.facts.has_videos and not config.eval:
        raise DataError(f"{name}: data.video is set, but no record has a video; leave it out")
    return Dataset(name, content, *given)
