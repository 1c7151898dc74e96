"""A run that trains vectors: what it is made of, and how it is evaluated."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxvlm.build import adapters, dual, pair_cache, pretrained
from jaxvlm.build.encoder import Encoder
from jaxvlm.build.inputs import Prepared
from jaxvlm.build.loaded import Loaded
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.model import Model
from jaxvlm.build.pairs import Chunks, chunks_of, group_of, pair_runner
from jaxvlm.build.retrieval import few_bits, found_sheet, measured, tables
from jaxvlm.build.scorer import Report
from jaxvlm.build.training import pipeline_line
from jaxvlm.build.words import make_tokenizer, with_vocab
from jaxvlm.config import ConfigError, DualConfig, TrainConfig, VectorConfig
from jaxvlm.data import check as checks
from jaxvlm.data import images, pair_formats
from jaxvlm.data.errors import DataError, ImageError, Problem
from jaxvlm.data.examples import Example
from jaxvlm.data.pair_loader import PairDataset, PairMeta
from jaxvlm.data.prompt_items import PromptRows
from jaxvlm.data.text_rows import TextRows
from jaxvlm.evals import retrieval
from jaxvlm.models.families import sentences
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.parallel.sharding import local_rows, replicated, to_global
from jaxvlm.train.pairs import Chunk
from jaxvlm.types import Batch, Pairs, Params

METRIC = "recall@1"
"""What names the best checkpoint where nothing is said."""
WHOLE: Chunks = (Chunk(), Chunk())


def prepare(given: TrainConfig, workdir: pathlib.Path | None) -> Prepared:
    """What a run that trains vectors is made of; see :func:`jaxvlm.build.inputs.prepare`."""
    _check(given)
    mapping = given.data.pairs.column_mapping
    read = pair_formats.read(given.data.train, given.data.image_root, mapping)
    if given.encoder == "dual":
        made = dual.make(given, workdir, lambda: _texts(read[0]))
        config = dataclasses.replace(given, dual=made.config)
        prepared = Prepared(config, made.source, made.tokenizer, made.pictures, None, made)
    else:
        source = pretrained.find(given.model.checkpoint, workdir)
        if source is not None:
            sentences.check_no_map(pretrained.modules(source.files))
        given = pretrained.with_source(given, source)
        given = adapters.with_adapter(given, source, workdir)
        saved = workdir / "tokenizer" if workdir else None
        words = make_tokenizer(given, saved, lambda: _texts(read[0]), source)
        pretrained.check_tokens(source, words)
        pictures = pretrained.pictures(given, source, words)
        config = dataclasses.replace(given, model=with_vocab(given.model, words.vocab_size))
        prepared = Prepared(config, source, words, pictures, None)
    rows = _rows(config, prepared.tokenizer, prepared.pictures)
    dataset = PairDataset.from_config(given.data, rows, seed=given.seed, read=read)
    return prepared._replace(dataset=dataset)


def _rows(config: TrainConfig, tokenizer: Any, pictures: Any) -> Any:
    """How a run's items become rows."""
    if config.encoder == "dual":
        return TextRows(tokenizer, pictures)
    return PromptRows(tokenizer, pictures, config.model.decoder.visual_mask)


def _texts(examples: Sequence[Example]) -> Iterator[str]:
    for example in examples:
        for item in (example.query, example.positive, *example.negatives):
            yield item.instruction + item.words


def _check(config: TrainConfig) -> None:
    """Refuse settings of other models and other losses, which nothing would read.

    Raises:
        ConfigError: which, and what would do.
    """
    if config.encoder not in ("vlm", "dual"):
        raise ConfigError(f"config.encoder={config.encoder!r}; known: vlm, dual")
    of = {"vlm": ("dual", DualConfig()), "dual": ("vectors", VectorConfig())}
    name, default = of[config.encoder]
    if getattr(config, name) != default:
        raise ConfigError(f"config.{name} is not read with config.encoder={config.encoder!r}")
    on_one, whole = "vectors are trained on one mesh", "a corpus is searched whole"
    for where, on, why in (
        (f"eval_records={config.eval_records}", config.eval_records > 0, whole),
        (f"tower.devices={config.tower.devices}", config.tower.devices != 0, on_one),
        (
            f"microbatches={config.microbatches}",
            config.microbatches > 1,
            "the parts of a batch, on a pipeline too, are the chunks of config.grad_cache: set "
            "its query and document, rows of a data shard",
        ),
    ):
        if on:
            raise ConfigError(f"config.{where} does not go with config.loss={config.loss!r}: {why}")
    pair_cache.check(config)


def check(config: TrainConfig, spec: str) -> checks.Report:
    """What a run of a recipe would refuse of a file; every picture is decoded.

    Args:
        config: of the recipe.
        spec: the file.

    Raises:
        DataError: the file as a whole can't be used.
    """
    data = dataclasses.replace(config.data, train=spec, on_bad="skip", max_skip_share=1.0)
    dataset = prepare(dataclasses.replace(config, data=data), None).dataset
    problems, broken = list(dataset.problems), {}
    read: set[str] = set()
    for side in (dataset.queries, dataset.documents):
        for path in set(side.encoded.paths) - read:
            read.add(path)
            try:
                images.load(path, side.rows.prepare, data.max_pixels)
            except ImageError as error:
                broken[path] = str(error)
    good = 0
    for example in dataset.examples:
        items = (example.query, example.positive, *example.negatives)
        why = [broken[item.image] for item in items if item.image in broken]
        good += not why
        problems += [Problem(example.id, why[0])] if why else []
    lengths = [dataset.queries.num_tokens, dataset.documents.num_tokens]
    return checks.Report(
        name=spec,
        total=dataset.total,
        good=good,
        pictures=len(read) - len(broken),
        problems=checks.by_reason(problems),
        tokens=checks.percentiles(np.concatenate(lengths)),
        images_most=int(bool(read)),
        of="examples",
    )


def introduction(run: Any, local: Pairs) -> list[str]:
    """Lines that say what is about to be trained on.

    Args:
        run: a ``Run``.
        local: its first batch, this process's examples.

    Raises:
        DataError: there is nothing to learn from it.
    """
    data, config = run.dataset, run.config
    b, K = config.data.batch_size, local.there.shape[1]
    if config.loss == "info_nce" and (len(data.documents.items) == 1 or b * K == 1):
        raise DataError(
            "config.loss='info_nce' tells a positive from other documents, and "
            + (
                "the data have one"
                if b * K > 1
                else "a batch of one query and its positive has none"
            )
        )
    lengths = [x.tokens.shape[-1] for x in (local.query, local.document)]
    negatives = f"a positive and {K - 1} hard negatives" if K > 1 else "a positive"
    queries, documents = (
        _cut(run.model, name, rows, length, chunk)
        for name, rows, length, chunk in zip(
            ("queries", "documents"), (b, b * K), lengths, chunks_of(config.grad_cache)
        )
    )
    return [
        f"{len(data.examples):,} examples, {len(data.queries.items):,} different queries, "
        f"{len(data.documents.items):,} documents; {run.steps} steps of {b} queries x "
        f"{lengths[0]} tokens, each with {negatives} x {lengths[1]} tokens",
        f"loss {config.loss}; {queries}; {documents}",
    ]


def _cut(model: Model, name: str, rows: int, length: int, chunk: Chunk) -> str:
    """How a side is run."""
    stages, local = model.mesh.shape["stage"], rows // batch_shards(model.mesh)
    parts = chunk.parts(length, local, group_of(model))
    filled = f" and {-local % parts} of padding" if local % parts else ""
    line = f"a data shard's {local} {name}{filled} in {parts} chunk{'s' * (parts > 1)}"
    if stages > 1:
        line += f", {pipeline_line(model.strategies['decoder'], stages, parts)}"
    return line


def shown(dataset: PairDataset, meta: PairMeta, most: int = 3) -> list[str]:
    """Lines that show a batch's first examples.

    Args:
        dataset: that it is of.
        meta: what stands in it.
        most: examples.
    """
    lines = []
    for number in meta.example[:most].tolist():
        found = dataset.examples[number]
        sides = [("query", found.query), ("positive", found.positive)]
        sides += [("negative", item) for item in found.negatives]
        lines.append(f"example {found.id}" + (f", label {found.label}" if found.label else ""))
        for name, item in sides:
            told = f"[{item.instruction}] " if item.instruction else ""
            lines.append(f"  {name:<9}{told}{item.text}{'  ' * bool(item.image)}{item.image}")
    return lines


def is_run(model: Loaded | Encoder) -> bool:
    """Whether a model is of a run that trained vectors."""
    config = model.run if isinstance(model, Encoder) else model.config
    return config is not None and of_vectors(config)


def evaluate(
    model: Loaded | Encoder, spec: str = "", blind: bool = True, sheet: str = ""
) -> Report:
    """Evaluate a trained model on what it was trained for.

    Args:
        model: of a run.
        spec: the data file; the run's own ``data.eval`` if empty.
        blind: whether to run the control.

    Raises:
        ConfigError: no data is named, or the model is no run's.
    """
    config = model.run if isinstance(model, Encoder) else model.config
    if not is_run(model):
        assert isinstance(model, Loaded)
        return model.evaluate(spec, blind=blind, sheet=sheet)
    assert config is not None
    rows = _rows(config, model.tokenizer, model.pictures)
    made = scorer(config, model.model, rows, spec)
    report = made.report(model.params, 0, blind)
    if sheet:
        made.sheet(pathlib.Path(sheet))
    return report


def scorer(config: TrainConfig, model: Model, rows: Any, spec: str = "") -> PairScorer:
    """What evaluates vectors.

    Args:
        config: of the run.
        model: of vectors.
        rows: how items become rows, see ``RowFormat``.
        spec: the data file; ``config.data.eval`` if empty.

    Raises:
        DataError: it can't be used, or has one document.
    """
    data = dataclasses.replace(config.data, flip=False, shift=0)
    if not (spec := spec or data.eval):
        raise ConfigError("eval: the run has no config.data.eval; give --data=FILE")
    dataset = PairDataset.from_config(data, rows, seed=config.seed, spec=spec)
    if len(dataset.documents.items) < 2:
        raise DataError(f"{spec}: a corpus of one document has nothing to rank")
    parts = batch_shards(model.mesh)
    count = -(-data.batch_size // parts) * parts
    chunks = chunks_of(config.grad_cache)
    asked = config.pair_loss
    return PairScorer(model, dataset, count, asked.dims, chunks, asked.precisions)


class PairScorer:
    """Encodes all queries and all documents of a data set, and measures what finds what.

    Args:
        model: of vectors.
        dataset: of pairs.
        batch_size: rows at a time, over all devices.
        dims: prefixes of the vectors that are measured too.
        chunks: rows that are run at once.
        precisions: of the vectors that are measured too.
    """

    def __init__(
        self,
        model: Model,
        dataset: PairDataset,
        batch_size: int,
        dims: tuple[int, ...] = (),
        chunks: Chunks = WHOLE,
        precisions: Sequence[str] = (),
    ):
        self.precisions = few_bits(precisions)
        self.model, self.dataset, self.batch_size = model, dataset, batch_size
        self.what = retrieval.Retrieval(dims=dims)
        self.rows = local_rows(model.mesh, batch_size)
        self.right = dataset.relevance()
        self.relevance = retrieval.Relevance.of(self.right, len(dataset.documents.items))
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        runner = pair_runner(model, model.shapes, chunks)

        def embed(params: Params, batch: Batch, side: str) -> jax.Array:
            return runner.made(params, getattr(runner, side), batch).hidden

        everywhere = replicated(model.mesh)
        self._embed = jax.jit(embed, static_argnames="side", out_shardings=everywhere)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the figures that may say which checkpoint is best."""
        kinds = ("hit", "recall", "ndcg", "mrr", "map")
        return tuple(f"{kind}@{k}" for k in self.what.ks for kind in kinds)

    def vectors(self, params: Params, side: str) -> np.ndarray:
        """f32[items, E] of all ``query`` or ``document`` items; 0 where a picture failed.

        Every process has all of them.
        """
        side_of = self.dataset.queries if side == "query" else self.dataset.documents
        count, made = len(side_of.items), []
        for _, local in self.dataset.items(side, self.rows, self.batch_size):
            rows = to_global(self.model.mesh, local, self.batch_size)
            made.append(np.asarray(self._embed(params, rows, side=side)))
        return np.concatenate(made)[:count]

    def report(self, params: Params, limit: int = 0, blind: bool = True) -> Report:
        """How well queries find their documents, and documents their queries.

        Args:
            params: all parameters.
            limit: 0; a corpus is searched whole.
            blind: whether the random control is beside it.
        """
        start = time.perf_counter()
        self._last = self.vectors(params, "query"), self.vectors(params, "document")
        query, document = self._last
        what = dataclasses.replace(self.what, random=blind)
        mesh = self.model.mesh
        found = measured(query, document, self.relevance, mesh, what, self.precisions)
        most = max(self.what.ks)
        shown = {n: x for n, x in found.items() if "recall@" in n or n.endswith(f"ndcg@{most}")}
        shown |= {n: x for n, x in found.items() if "@" not in n}
        lines = tables(shown, self.what.dims, self.precisions)
        return Report(found, {}, time.perf_counter() - start, lines)

    def sheet(self, path: pathlib.Path) -> bool:
        """Draw some queries and what they found in the last report.

        Args:
            path: PNG to write.

        Returns:
            False if there was no report; nothing is written then.
        """
        if self._last is None:
            return False
        sides = (self.dataset.queries.items, self.dataset.documents.items)
        asked, known = zip(sides, self._last, strict=True)
        found_sheet(asked, known, self.right, path)
        return True
