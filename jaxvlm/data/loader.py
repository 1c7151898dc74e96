"""The data of a run: batches for training by step, and for evaluation record by record."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.config import DataConfig, PairsConfig
from jaxvlm.data import chat, corpora, formats, images, packing, spans
from jaxvlm.data.batch import Layout, Meta, assemble, lay_pictures, lay_tokens
from jaxvlm.data.errors import DataError, ImageError, Problem, enforce
from jaxvlm.data.formats import Record
from jaxvlm.data.iterate import TrainBatches, ahead
from jaxvlm.data.order import EMPTY, Order, Row, rows
from jaxvlm.data.patches import Patching
from jaxvlm.data.slots import Given, Slots, Written
from jaxvlm.data.spans import Spans
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.data.views import Lookup, Tag, View, Views
from jaxvlm.types import Batch

_AUGMENT, _BLIND, _SUBSET = 0xA6, 0xB1, 0x5B  # tags of random streams
_log = logging.getLogger("jaxvlm.data")


class Settings(NamedTuple):
    """What the data must know about the model and the run."""

    image_size: int
    """Pixels a side."""
    prepare: images.Preparation
    """How a picture becomes them."""
    num_patches: Spans
    """What a picture is in a row."""
    seed: int = 0
    visual_mask: str = "causal"
    """causal | prefix | prompt; see ``DecoderConfig``."""
    patching: Patching | None = None
    """How pictures of any size are cut; ``None`` where they have one size."""


class Dataset:
    """Records that a run trains on or is evaluated on.

    Attributes:
        records: what was read; ``Meta.record`` points here.
        problems: records that are skipped, known before the first step.
        corpus: ids and loss masks.
        views: its pictures.
    """

    def __init__(
        self,
        name: str,
        records: Sequence[Record],
        problems: Sequence[Problem],
        config: DataConfig,
        tokenizer: ChatTokenizer,
        settings: Settings,
    ):
        """Encode and group records; see :meth:`from_config`."""
        _validate(config, settings)
        self.name, self.config, self.settings = name, config, settings
        self.records, self.tokenizer = list(records), tokenizer
        self.total = len(records) + len(problems)
        corpus, unfit = chat.encode(self.records, tokenizer, settings.num_patches)
        corpus, broken = corpora.with_good_pictures(corpus, self.records, config.max_pixels)
        bad = [*problems, *unfit, *broken]
        enforce(bad, self.total, config.on_bad, config.max_skip_share, name)
        pieces, long = _pieces(corpus, config, tokenizer, settings)
        too_long = [Problem(self._record_id(corpus, i), *why) for i, *why in long]
        enforce(too_long, self.total, config.on_long, 1.0, name)
        self.problems = bad + too_long
        enforce(self.problems, self.total, "skip", config.max_skip_share, name)
        if not len(pieces.num_tokens):
            raise DataError(f"{name}: no record is left; `jaxvlm data check` says why")
        different = {id(span): span for span in corpus.spans}.values()
        if (config.flip or config.shift) and any(len(s.starts) > 1 for s in different):
            raise DataError(
                f"{name}: data.flip and data.shift would move each tile of a picture by itself; "
                "set --config.data.flip=False --config.data.shift=0"
            )
        self.corpus, self.pieces = corpus, pieces
        pictures = images.Pictures(settings.prepare, config.max_pixels, config.image_cache_mb)
        self.views = Views(corpus.paths, corpus.spans, pictures, settings.patching)
        self._most_patches = self._patches_of_a_row()
        self._taps = spans.most_taps(different)
        tiles = [packing.count_tiles(corpus, pictures) for pictures in corpus.pictures]
        self._density = float(np.max(tiles / corpus.length, initial=0.0))
        self._skipped: dict[int, Problem] = {}  # record -> why, at run time
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._slots: Slots | None = None
        self._written: Written | None = None
        self._digest = corpora.digest(corpus)

    @classmethod
    def from_config(
        cls,
        config: DataConfig,
        tokenizer: ChatTokenizer,
        *,
        image_size: int,
        num_patches: Spans,
        seed: int = 0,
        visual_mask: str = "causal",
        prepare: images.Preparation | None = None,
        patching: Patching | None = None,
        spec: str = "",
        read: tuple[list[Record], list[Problem]] | None = None,
    ) -> Dataset:
        """Read, check and encode a data file.

        Every picture's header is read, none is decoded.

        Args:
            config: what to read and how to pack it.
            tokenizer: gives the ids.
            image_size: pixels a side of the model's pictures.
            num_patches: what a picture is in a row: a number of tokens, or a function of its file.
            seed: of the run.
            visual_mask: causal | prefix | prompt: which tokens see each other both ways.
            prepare: how a picture becomes pixels; ``None`` does as ``config.resize`` says.
            patching: how pictures of any size are cut; ``None`` where they have one size.
            spec: what to read; "" is ``config.train``.
            read: what :func:`jaxvlm.data.formats.read` gave for it, if it was read already.

        Raises:
            DataError: the file can't be used, or too many of its records can't.
        """
        name = spec or config.train
        records, problems = read or formats.read(name, config.image_root)
        prepare = prepare or images.squares(image_size, config.resize)
        settings = Settings(image_size, prepare, num_patches, seed, visual_mask, patching)
        return cls(name, records, problems, config, tokenizer, settings)

    @property
    def order(self) -> Order:
        """Rows by step. Raises DataError where a batch has more rows than there are pieces."""
        if self._order is None:
            self._order = Order(self.pieces, self.config, self.settings.seed)
        return self._order

    def keep_tokens(
        self, tokens: int, limit: int = 0, unused: bool = False,
        given: Given | None = None, beyond: int = 0,
    ) -> Slots:  # fmt: skip
        """From now on, batches for training say where their pictures' visual tokens are kept.

        Args:
            tokens: that the tower makes of a tile; 0: one of each patch of a picture of any size.
            limit: see :class:`jaxvlm.data.slots.Slots`.
            unused: likewise.
            given: likewise; ``views.lookup`` says where they come from.
            beyond: likewise.
        """
        patching, spans = self.settings.patching, self.corpus.spans

        def size(picture: int) -> tuple[int, int]:
            if tokens or not patching:
                return len(spans[picture].starts), tokens
            return 1, patching.per_token * int((spans[picture].tile > 0).sum())

        room = patching.room if patching and not tokens else None
        self._slots = Slots(self.order, self.pieces, size, limit, room, unused, given, beyond)
        return self._slots

    def tag_keys(self, tag: Tag) -> None:
        """From now on, tokens of pictures are kept and looked for by their key's ``tag``."""
        self.views.tag = tag

    def look_up(self, lookup: Lookup, audited: float) -> None:
        """From now on, pictures whose tokens are known come as these; see :class:`Views`."""
        self.views.lookup, self.views.audited = lookup, audited

    def leave_out(self, written: Written | None) -> None:
        """From now on, pictures whose tokens are in their pages come without pixels; ``None``: all
        come with them.
        """
        self._written = written

    @property
    def preparation(self) -> images.Preparation:
        """How a picture becomes pixels."""
        return self.settings.prepare

    @property
    def skipped(self) -> list[Problem]:
        """Records left out at run time, so far and on this process: their picture failed."""
        with self._lock:
            return list(self._skipped.values())

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every record has been trained on once."""
        return self.order.steps_per_epoch

    @property
    def row_shapes(self) -> tuple[tuple[int, int], ...]:
        """(tokens, patches) of the rows that batches may have: what a run compiles for.

        Patches are those of pictures of any size; 0 where pictures have one size.
        """
        config, patching = self.config, self.settings.patching
        count = 1 if config.packing else config.buckets
        lengths = packing.buckets(config.max_length, count)
        if patching is None:
            return tuple((length, 0) for length in lengths)
        most = self._most_patches  # a row of half the tokens has half the patches
        return tuple((n, patching.room(most * n // lengths[-1])) for n in lengths)

    def train(self, local_rows: np.ndarray, start_step: int = 0) -> TrainBatches:
        """Endless batches from ``start_step`` on, read ahead by ``config.workers`` threads.

        Args:
            local_rows: i[b]: this process's rows of the global batch.
            start_step: the first step.
        """
        config, order = self.config, self.order
        local, written = [int(row) for row in local_rows], self._written or Written()

        def load(step: int) -> tuple[Batch, tuple[Meta, int]]:
            turn = written.turn  # before any page is asked for
            chosen = [order.row(step, row) for row in local]
            shape = self.row_shapes[-1]
            if not config.packing:  # all hosts must agree on it: look at the whole batch
                every = [order.row(step, row) for row in range(config.batch_size)]
                shape = self._fit(every)
            ids = step * config.batch_size + np.asarray(local, np.int64)
            batch, meta = self._load(self.corpus, self.pieces, chosen, shape, ids)
            return batch, (meta, turn)

        def good(step: int, made: tuple[Batch, tuple[Meta, int]]) -> tuple[Batch, Meta]:
            """What was read ahead, or read again where the pages that it counts on are gone."""
            batch, (meta, turn) = made
            if turn == written.turn or batch.in_pages is None or not batch.in_pages.any():
                return batch, meta
            return good(step, load(step))

        source = ahead(load, start_step, 2**31 - 1, config)
        return TrainBatches(source, start_step, self.fingerprint(), good)

    def eval(
        self,
        local_rows: np.ndarray,
        batch_size: int,
        num_records: int = 0,
        shuffled_pictures: bool = False,
    ) -> Iterator[tuple[Batch, Meta]]:
        """Every record once, in rows that are packed as in training; the last are padding.

        Args:
            local_rows: i[b]: this process's rows of the global batch.
            batch_size: rows of the global batch.
            num_records: at most; a fixed random choice of pieces. 0: all.
            shuffled_pictures: give each picture's records another picture: the blind control.

        Raises:
            DataError: ``shuffled_pictures`` with fewer than two pictures.
        """
        corpus, pieces = self._subset(num_records)
        other = self._other_pictures() if shuffled_pictures else None
        packed = [Row(row) for row in rows(np.arange(len(pieces.num_tokens)), pieces, self.config)]
        steps = -(-len(packed) // batch_size)
        packed += [EMPTY] * (steps * batch_size - len(packed))
        local = [int(row) for row in local_rows]

        def load(step: int) -> tuple[Batch, Meta]:
            every = packed[step * batch_size : (step + 1) * batch_size]
            shape = self.row_shapes[-1] if self.config.packing else self._fit(every, pieces)
            ids = step * batch_size + np.asarray(local, np.int64)
            chosen = [every[row] for row in local]
            return self._load(corpus, pieces, chosen, shape, ids, other, train=False)

        return iter(ahead(load, 0, steps, self.config))

    def fingerprint(self) -> dict[str, Any]:
        """What batches are a function of, besides the step; JSON-able."""
        settings, config = self.settings, dataclasses.asdict(self.config)
        names = [
            *("batch_size", "max_length", "max_images", "packing", "share_pictures"),
            *("buckets", "virtual_shards", "flip", "shift"),
        ]
        picked = {f"data.{name}": config[name] for name in names}
        picked |= {
            "pictures": settings.prepare.fingerprint,
            "seed": settings.seed,
            "image_size": settings.image_size,
        }
        picked |= {"visual_mask": settings.visual_mask, "records": len(self.corpus.first)}
        if settings.patching:
            picked |= {"data.max_patches": config["max_patches"], "patches": self._most_patches}
        return picked | {"content": self._digest}

    def _record_id(self, corpus: chat.Corpus, record: int) -> str:
        return self.records[int(corpus.source[record])].id

    def _fit(self, chosen: Sequence[Row], pieces: packing.Pieces | None = None) -> tuple[int, int]:
        """The smallest of ``row_shapes`` that fits every row."""
        pieces = pieces or self.pieces
        tokens, patches = (
            max((int(sizes[row.pieces].sum()) for row in chosen), default=0)
            for sizes in (pieces.num_tokens, pieces.num_patches)
        )
        return next(s for s in self.row_shapes if s[0] >= tokens and s[1] >= patches)

    def _patches_of_a_row(self) -> int:
        """Patches that no row has more of: the setting, or what its tokens and pictures allow."""
        config, patching, pieces = self.config, self.settings.patching, self.pieces
        if patching is None or not config.packing:
            return int(pieces.num_patches.max())
        limits = packing.limits_of(config, patching)
        used = {picture for pictures in pieces.pictures for picture in pictures}
        largest = max((limits.patches(self.corpus, (p,)) for p in used), default=0)
        most = min(patching.per_token * config.max_length, config.max_images * largest)
        return min(most, config.max_patches or most)

    def _layout(self, pieces: packing.Pieces) -> Layout:
        most = int(pieces.num_images.max())
        if self.config.packing:  # no more than the records of a row can have, whichever they are
            fit = int(self._density * self.config.max_length)
            most = min(self.config.max_images, max(most, fit))
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
        corpus: chat.Corpus,
        pieces: packing.Pieces,
        chosen: Sequence[Row],
        shape: tuple[int, int],
        example_id: np.ndarray,
        other: np.ndarray | None = None,
        train: bool = True,
    ) -> tuple[Batch, Meta]:
        """Decode pictures, leave out pieces whose pictures fail, and lay out the rest."""
        kept: list[np.ndarray] = []
        views: list[View] = []
        pages: list[np.ndarray] = []
        slots = self._slots if train else None
        for row in chosen:
            good = []
            for piece in row.pieces.tolist():
                pictures = pieces.pictures[piece]
                try:
                    seen = self._seen(pictures, piece, row, other, train)
                except ImageError as error:
                    if other is None:  # the blind control says nothing of the piece itself
                        self._skip(corpus, pieces, piece, str(error))
                    continue
                good.append(piece)
                views += seen
                if slots:
                    pages += [page for p in pictures for page in slots.pages(row.shard, p)]
            kept.append(np.asarray(good, np.int32))
        layout = self._layout(self.pieces)
        batch, meta, places = assemble(corpus, pieces, kept, shape[0], layout)
        batch = batch._replace(example_id=(example_id % 2**31).astype(np.int32))
        if layout.max_images:
            seats, settings = (len(chosen), layout.max_images), self.settings
            image_key = np.zeros((*seats, 4), np.uint32)
            if views:
                image_key[places.row, places.slot] = [view.key for view in views]
            how = (settings.image_size, settings.patching, shape[1], [v.grid for v in views])
            laid = lay_pictures([v.pixels for v in views], places, seats, *how)
            batch = batch._replace(image_key=image_key, **laid)
            if slots:
                image_pages = np.full((*seats, slots.per_tile), -1, np.int32)
                if pages:
                    image_pages[places.row, places.slot] = pages
                in_pages = np.zeros(seats, bool)
                in_pages[places.row, places.slot] = [v.in_pages for v in views]
                batch = batch._replace(image_pages=image_pages, in_pages=in_pages)
            if slots and slots.given:
                size = (shape[1],) if settings.patching else (seats[1], slots.windows[-1])
                whole = (seats[0], *size, slots.given.width)
                tokens, where = [v.tokens for v in views], (places, whole, seats[1])
                laid = lay_tokens(tokens, *where, slots.given.dtype, batch.grid)
                batch = batch._replace(**laid)
        return batch, meta

    def _seen(
        self,
        pictures: tuple[int, ...],
        piece: int,
        row: Row,
        other: np.ndarray | None,
        train: bool,
    ) -> list[View]:
        """The pictures of a piece, augmented; raises ImageError."""
        config = self.config
        rng = None
        if train and (config.flip or config.shift):
            rng = np.random.default_rng([self.settings.seed, _AUGMENT, row.pass_, piece])
        out = []
        for picture in pictures:
            drawn = images.draw(rng, config.flip, config.shift) if rng else ()
            look = train and rng is None and not self.views.audits(picture, row.pass_)
            written = self._written_of(row, picture) if look else None
            out += self.views.get(picture, drawn, other, look, written)
        return out

    def _written_of(self, row: Row, picture: int) -> Callable[[int, bytes], bool] | None:
        """Which tiles of a picture are in their pages; see :meth:`Views.get`."""
        slots, written = self._slots, self._written
        if slots is None or written is None:
            return None
        first = slots.pages(row.shard, picture)[:, 0].tolist()
        return lambda tile, key: written.has(first[tile], key)

    def _skip(self, corpus: chat.Corpus, pieces: packing.Pieces, piece: int, reason: str) -> None:
        """Count a piece whose picture failed, once, and stop the run where it is too much."""
        lost = pieces.record[pieces.start[piece] : pieces.start[piece + 1]]
        with self._lock:
            for record in lost[lost >= 0].tolist():
                problem = Problem(self._record_id(corpus, record), reason)
                if self._skipped.setdefault(int(corpus.source[record]), problem) is problem:
                    _log.warning("%s: left out: %s", self.name, problem)
        failed = self.skipped
        enforce(failed, self.total, self.config.on_bad, 1.0, self.name)
        enforce(self.problems + failed, self.total, "skip", self.config.max_skip_share, self.name)

    def usable(self) -> list[int]:
        """Indices of the records that are in the data set and have not failed since."""
        return [i for i in self.corpus.source.tolist() if i not in self._skipped]

    def _subset(self, num_records: int) -> tuple[chat.Corpus, packing.Pieces]:
        """About ``num_records`` records, in whole pieces as far as it goes."""
        if not 0 < num_records < len(self.corpus.first):
            return self.corpus, self.pieces
        order = np.random.default_rng([0, _SUBSET]).permutation(len(self.pieces.num_tokens))
        start = self.pieces.start
        segments = np.concatenate([np.arange(start[i], start[i + 1]) for i in order.tolist()])
        records = self.pieces.record[segments]
        chosen = np.sort(records[records >= 0][:num_records])
        corpus = corpora.take(self.corpus, chosen)
        return corpus, _pieces(corpus, self.config, self.tokenizer, self.settings)[0]

    def _other_pictures(self) -> np.ndarray:
        """i64[pictures]: for each picture another one."""
        # Pictures of refused records are in no record of the corpus, and are not handed out.
        used = np.unique([i for pictures in self.corpus.pictures for i in pictures]).astype(int)
        if len(used) < 2:
            raise DataError(f"{self.name}: the blind control needs two pictures, not {len(used)}")
        cycle = np.random.default_rng([0, _BLIND]).permutation(used)
        other = np.arange(len(self.corpus.paths))
        other[cycle] = np.roll(cycle, 1)
        return other


def _validate(config: DataConfig, settings: Settings) -> None:
    """Raise DataError for a setting that is none of its choices."""
    choices = {
        "data.on_long": (config.on_long, ("refuse", "skip")),
        "data.on_bad": (config.on_bad, ("refuse", "skip")),
        "data.resize": (config.resize, images.RESIZE),
        "model.decoder.visual_mask": (
            settings.visual_mask,
            ("causal", "prefix", "prompt"),
        ),
    }
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise DataError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")
    if config.pairs != PairsConfig():
        raise DataError("data.pairs is set, but these data are conversations, not pairs")
    for name in ("batch_size", "max_length", "virtual_shards"):
        if getattr(config, name) < 1:
            raise DataError(f"data.{name}={getattr(config, name)} must be at least 1")


def _pieces(
    corpus: chat.Corpus, config: DataConfig, tokenizer: ChatTokenizer, settings: Settings
) -> tuple[packing.Pieces, list[tuple[int, str, str]]]:
    # One record a row has nobody to share with; a picture that sees its question can't be shared.
    share = config.share_pictures and config.packing and settings.visual_mask != "prompt"
    limits = packing.limits_of(config, settings.patching)
    return packing.build_pieces(corpus, tokenizer.image_id, limits, share)
