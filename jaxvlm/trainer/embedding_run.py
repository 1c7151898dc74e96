"""A run that trains embeddings: what it is made of, and how it is evaluated."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxvlm.cache import pair_batches
from jaxvlm.config import Config, ConfigError, check_choice, refuse_changed
from jaxvlm.data import validate
from jaxvlm.data.conversations.content import is_packed
from jaxvlm.data.errors import NothingUsable, Problem
from jaxvlm.data.pairs.dataset import PairDataset, PairMeta
from jaxvlm.data.pairs.examples import Example
from jaxvlm.data.sources import pair_formats
from jaxvlm.hf import dual_encoder, peft_folder, pretrained
from jaxvlm.hf.families import sentences
from jaxvlm.hf.run_processor import image_format_of, make_tokenizer, with_vocab
from jaxvlm.inference import input_types
from jaxvlm.inference.embedding_evaluator import collator_of
from jaxvlm.losses.registry import loss_setting
from jaxvlm.parallel.mesh import batch_shards
from jaxvlm.spmd.gradcache import grad_cache_mini_batches, group_of
from jaxvlm.spmd.model import Model
from jaxvlm.train.gradcache import MiniBatch
from jaxvlm.trainer import pair_design
from jaxvlm.trainer.inputs import Prepared
from jaxvlm.trainer.run import Run
from jaxvlm.trainer.training import pipeline_line
from jaxvlm.types import Pairs


def prepare_pairs(
    given: Config,
    workdir: pathlib.Path | None,
    read: tuple[list[Example], list[Problem]] | None = None,
) -> Prepared:
    """What a run that trains embeddings is made of; see :class:`jaxvlm.trainer.inputs.Prepared`.

    Args:
        given: settings of the run.
        workdir: the run's folder.
        read: the training data, if they were read before.
    """
    _check(given)
    if read is None and not is_packed(given.data.train, given.data):
        read = pair_formats.read(given.data.train, given.data)
    examples = read[0] if read else ()  # a packed set has its tokenizer
    if given.embedder == "dual":
        made = dual_encoder.make_dual_encoder(given, workdir, lambda: texts(examples))
        config = dataclasses.replace(given, dual=made.config)
        prepared = Prepared(config, made.source, made.tokenizer, made.image_processor, None, made)
    else:
        source = pretrained.find_for(given.model, workdir)
        if source is not None:
            sentences.check_no_map(pretrained.modules(source.files))
            given = pretrained.with_source(given, source)
        given = peft_folder.with_adapter(given, source, workdir)
        saved = workdir / "tokenizer" if workdir else None
        words = make_tokenizer(given, saved, lambda: texts(examples), source)
        if source is not None:
            pretrained.check_tokens(source, words)
        images = image_format_of(given, source, words)
        config = dataclasses.replace(given, model=with_vocab(given.model, words.vocab_size))
        prepared = Prepared(config, source, words, images, None)
    rows = collator_of(config, prepared.tokenizer, prepared.image_format)
    dataset = PairDataset.from_config(given.data, rows, seed=given.seed, read=read)
    return prepared._replace(dataset=dataset)


def texts(examples: Sequence[Example]) -> Iterator[str]:
    """Yield the texts of all queries and documents: what a tokenizer is built from."""
    for example in examples:
        for item in (example.query, example.positive, *example.negatives):
            yield item.instruction + item.words


def _check(config: Config) -> None:
    """Refuse settings of other models and other losses, which nothing would read.

    Raises:
        ConfigError: which, and what would do.
    """
    others = {"vlm": ("dual",), "dual": ("model", "embedding")}
    check_choice("config.embedder", config.embedder, others)
    why = f"with config.embedder={config.embedder!r}"
    refuse_changed(config, others[config.embedder], "config", why)
    on_one, whole = "embeddings are trained on one mesh", "a corpus is searched whole"
    for where, on, why in (
        (f"eval_records={config.eval_records}", config.eval_records > 0, whole),
        (f"encoder.devices={config.encoder.devices}", config.encoder.devices != 0, on_one),
        (
            f"microbatches={config.microbatches}",
            config.microbatches > 1,
            "the parts of a batch, on a pipeline too, are GradCache's mini-batches: set "
            "config.grad_cache.query_mini_batch and document_mini_batch",
        ),
    ):
        if on:
            raise ConfigError(f"config.{where} does not go with {loss_setting(config)}: {why}")
    pair_batches.check_pair_cache(config)


def validate_file(config: Config, spec: str) -> validate.ValidationReport:
    """What a run of a recipe would refuse of a file; every image is decoded.

    Args:
        config: of the recipe.
        spec: the file.

    Raises:
        DataError: the file as a whole can't be used.
    """
    data = dataclasses.replace(config.data, train=spec, on_bad_record="skip", max_skip_fraction=1.0)
    read = pair_formats.read(spec, data)
    try:
        dataset = prepare_pairs(dataclasses.replace(config, data=data), None, read).dataset
    except NothingUsable as error:
        return _report(spec, error.problems, [], np.zeros(0, np.int32), 0)
    corpus, good, problems = dataset.corpus, [], list(dataset.problems)
    broken = {
        column.name: [column.problem(item) for item in range(len(column.items))]
        for column in (dataset.queries, dataset.documents)
    }
    for i, example in enumerate(dataset.examples):
        documents = corpus.documents_of(i)[0].tolist()
        reasons = [broken["query"][corpus.query[i]], *(broken["document"][d] for d in documents)]
        items = (example.query, example.positive, *example.negatives)
        why = [(reason, item.image) for reason, item in zip(reasons, items, strict=True) if reason]
        good += [] if why else [i]
        problems += [Problem(example.id, *why[0])] if why else []
    lengths = np.concatenate([dataset.queries.num_tokens, dataset.documents.num_tokens])
    images = {
        item.image
        for column in (dataset.queries, dataset.documents)
        for item, reason in zip(column.items, broken[column.name], strict=True)
        if item.image and not reason
    }
    return _report(spec, problems, good, lengths, len(images))


def _report(
    spec: str, problems: Sequence[Problem], good: Sequence[int], lengths: np.ndarray, images: int
) -> validate.ValidationReport:
    return validate.ValidationReport(
        name=spec,
        total=len(problems) + len(good),
        good=len(good),
        images=images,
        problems=validate.by_reason(problems),
        details=validate.by_reason(problems, "detail"),
        tokens=validate.percentiles(lengths),
        images_most=int(images > 0),
        of="examples",
    )


def introduction(run: Run, local: Pairs) -> list[str]:
    """Lines that say what is about to be trained on.

    Args:
        run: built.
        local: its first batch, this process's examples.

    Raises:
        DataError: there is nothing to learn from it.
    """
    data, config = run.dataset, run.config
    b, K = config.data.batch_size, local.valid.shape[1]
    lengths = [x.tokens.shape[-1] for x in (local.query, local.document)]
    negatives = f"a positive and {K - 1} hard negatives" if K > 1 else "a positive"
    queries, documents = (
        _cut(run.model, name, rows, length, mini_batch)
        for name, rows, length, mini_batch in zip(
            ("queries", "documents"),
            (b, b * K),
            lengths,
            grad_cache_mini_batches(config.grad_cache),
        )
    )
    return [
        f"{len(data.examples):,} examples, {len(data.queries.items):,} different queries, "
        f"{len(data.documents.items):,} documents; {run.steps} steps of {b} queries x "
        f"{lengths[0]} tokens, each with {negatives} x {lengths[1]} tokens",
        f"loss {config.loss.target or config.loss.name}; {queries}; {documents}",
        *pair_design.check(config, data, batch_shards(run.model.mesh)),
        *pair_design.unread(config, data),
        *_folder_lines(run),
    ]


def _folder_lines(run: Run) -> list[str]:
    """What the run does otherwise than the sentence-transformers folder that it starts from."""
    if run.source is None:
        return []
    return input_types.lines_of_folder(pretrained.sentence_settings(run.source), run.config)


def _cut(model: Model, name: str, rows: int, length: int, mini_batch: MiniBatch) -> str:
    """How a side is run."""
    stages, local = model.mesh.shape["pipeline"], rows // batch_shards(model.mesh)
    parts = mini_batch.parts(length, local, group_of(model))
    filled = f" and {-local % parts} of padding" if local % parts else ""
    line = f"a data shard's {local} {name}{filled} in {parts} mini-batch{'es' * (parts > 1)}"
    if stages > 1:
        line += f", {pipeline_line(model.strategies['decoder'], stages, parts)}"
    return line


def example_lines(dataset: PairDataset, meta: PairMeta, most: int = 3) -> list[str]:
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
