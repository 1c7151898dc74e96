"""What a run is fed with: tokenizer, data sets, and global batches on the mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxvlm.cache import settings
from jaxvlm.cache.host_cache import HostCache
from jaxvlm.config import CacheConfig, Config, ConfigError, Extension
from jaxvlm.data.conversations import mixture_records, tokenize
from jaxvlm.data.conversations.content import is_packed
from jaxvlm.data.conversations.dataset import make_dataset
from jaxvlm.data.prefetch import TrainBatches
from jaxvlm.data.sources import conversation_formats
from jaxvlm.data.sources.conversation_formats import Record
from jaxvlm.hf import peft_folder, pretrained
from jaxvlm.hf.families import sentences
from jaxvlm.hf.run_processor import image_format_of, make_tokenizer, with_vocab
from jaxvlm.train.callbacks import StepBatch
from jaxvlm.types import Batch, Pairs


class Prepared(NamedTuple):
    """What a run is made of, before its model is built."""

    config: Config
    """With what checkpoint and data say filled in."""
    source: pretrained.Source | None
    """The checkpoint that it starts from."""
    tokenizer: Any
    """A ChatTokenizer; of a dual encoder a TextTokenizer, or ``None`` where it reads no texts."""
    image_format: Any
    """An ImageFormat; of a dual encoder a Processor, or ``None`` where it takes none."""
    dataset: Any
    """A Dataset, or a PairDataset."""
    dual: Any = None
    """The dual encoder, see :mod:`jaxvlm.hf.dual_encoder`."""


def prepare_conversations(given: Config, workdir: pathlib.Path | None) -> Prepared:
    """What a run that trains tokens is made of.

    Args:
        given: its settings.
        workdir: its folder; what it has kept comes first.

    Raises:
        ConfigError: settings that can't be used.
        DataError: data that can't be used.
    """
    source = None
    if given.model.checkpoint or given.model.family != Extension():
        source = pretrained.find_for(given.model, workdir)
    if source is not None:
        sentences.check_tokens(pretrained.modules(source.files))
        given = pretrained.with_source(given, source)
    if source is not None or given.model.lora.checkpoint:
        given = peft_folder.with_adapter(given, source, workdir)
    read, records = _read(given)
    saved = workdir / "tokenizer" if workdir else None
    made = make_tokenizer(given, saved, lambda: tokenize.texts(records), source)
    if source is not None:
        pretrained.check_tokens(source, made)
    images = image_format_of(given, source, made)
    config = dataclasses.replace(given, model=with_vocab(given.model, made.vocab_size))
    if config.cache != CacheConfig():
        settings.check_cache(config)
    check_questions(config)
    dataset = make_dataset(config, given.data.train, made, images, read)
    return Prepared(config, source, made, images, dataset)


def _read(config: Config) -> tuple[Any, Iterable[Record]]:
    """What is read of the training data, for :func:`make_dataset`, and all their records."""
    data = config.data
    if not data.train:
        sources = mixture_records.read(data)
        return sources, itertools.chain.from_iterable(records for records, _ in sources.values())
    if is_packed(data.train, data):
        return None, []
    read = conversation_formats.read(data.train, data)
    return read, read[0]


def check_questions(config: Config) -> None:
    """Refuse tokens chosen by a question where no one question has its images, or none at all.

    Raises:
        ConfigError: which setting, and what would do.
    """
    asks, data = config.model.connector.relevance, config.data
    where = f"config.model.connector.relevance.budget={asks.budget}"
    if not asks.budget:
        return
    if config.model.checkpoint:
        raise ConfigError(
            f"{where} with config.model.checkpoint={config.model.checkpoint}: no family's files "
            "have such weights, so what is trained could not be read elsewhere; leave one out"
        )
    alone = not data.packing or config.model.decoder.visual_mask == "prompt"
    if asks.query and data.share_images and not alone:
        raise ConfigError(
            f"{where} with config.data.share_images=True: questions that share an image would "
            "need other tokens each; set --config.data.share_images=False, or "
            "--config.model.connector.relevance.query=False"
        )


class GlobalBatches:
    """An iterator of global batches that knows where it is.

    Args:
        source: this process's rows of each batch, numpy.
        place: puts rows on the mesh.
        host_cache: fills in the visual tokens that it holds, if there is one.

    Attributes:
        last: the batch that was taken last.
    """

    def __init__(
        self, source: TrainBatches, place: Callable[[Any], Any], host_cache: HostCache | None
    ):
        self.source, self.place, self._host_cache = source, place, host_cache
        self._peeked: tuple[Any, Batch | Pairs] | None = None
        self._taken = source.state()
        self.last: StepBatch | None = None

    @contextlib.contextmanager
    def explained(self, run: Any) -> Iterator[None]:
        """Turn an out-of-memory error of ``run`` on these batches into what to change.

        Raises:
            TrainingStopped: device memory ran out.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            from jaxvlm.trainer import out_of_memory  # opened by runs that fail alone

            out_of_memory.explain(run, self.last, error)
            raise

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> StepBatch:
        local = self.peek()
        assert self._peeked is not None
        given, _ = self._peeked
        self._peeked, self._taken = None, self.source.state()
        self.last = StepBatch(self.place(local), local, given)
        return self.last

    def peek(self) -> Batch | Pairs:
        """This process's rows of the next batch, without taking it."""
        if self._peeked is None:
            given: Any = next(self.source)[0]
            self._peeked = given, self._host_cache.fill(given) if self._host_cache else given
        return self._peeked[1]

    def state(self) -> dict[str, Any]:
        """The iterator's state after the batches that were taken."""
        return self._taken
