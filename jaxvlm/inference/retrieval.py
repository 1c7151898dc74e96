"""Evaluates the retrieval of an embedding model: embeddings, metrics, and a prediction grid."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvlm.config import ConfigError
from jaxvlm.data.pairs.examples import Example, Item, never_retrieved
from jaxvlm.evals import retrieval
from jaxvlm.evals.retrieval import RANDOM, REVERSE, Relevance, Retrieval
from jaxvlm.evals.zero_shot import unit
from jaxvlm.inference.embed_corpus import EmbedConfig, in_memory
from jaxvlm.inference.encoder import Encoder
from jaxvlm.inference.examples import Gathered, gather
from jaxvlm.inference.prediction_grid import GridItem, RetrievedRow, draw_retrieval
from jaxvlm.inference.quantize import KINDS, dequantized, ranges_of
from jaxvlm.inference.vlm import VLM

_QUERIES, _DOCUMENTS, _SEED = 12, 5, 0x5E  # of the prediction grid


@dataclasses.dataclass(frozen=True)
class RetrievalReport:
    """The metrics of a retrieval evaluation."""

    metrics: dict[str, float]
    """The result of :func:`jaxvlm.evals.retrieval.evaluate`, and ``documents``, their number."""
    variants: tuple[Sequence[int], Sequence[str]]
    """Numbers of dims and precisions that were measured in addition to the full embeddings."""
    seconds: float
    """Duration of the evaluation."""

    def lines(self) -> list[str]:
        """Formats the metrics as tables for people."""
        return [f"evaluated in {self.seconds:.1f} s", *tables(self.metrics, *self.variants)]


def tables(
    metrics: Mapping[str, float], dims: Sequence[int], precisions: Sequence[str] = ()
) -> list[str]:
    """Formats metrics as tables for people, one per direction of the search.

    A table has one line per metric, and one column per number of dims or precision.

    Args:
        metrics: result of :func:`measure`.
        dims: numbers of dims that were measured.
        precisions: precisions that were measured.
    """
    count, documents = (int(metrics[n]) for n in ("queries", "documents"))
    lines = [f"{count} queries, {documents} documents; per cent"]
    if excluded := int(metrics.get("excluded", 0)):
        lines.append(f"{excluded} queries are documents too, which they are not to find: left out")
    names = dict.fromkeys(n.rpartition("/")[2] for n in metrics if "@" in n)
    for direction, title in (("", "query to document"), (REVERSE, "document to query")):
        parts = ("", *(f"dims{n}/" for n in dims), *(f"{p}/" for p in precisions), RANDOM)
        parts = tuple(p for p in parts if f"{direction}{p}{next(iter(names))}" in metrics)
        if not parts:
            continue
        heads = "".join(f"{part[:-1] or 'all dims':>10}" for part in parts)
        lines.append(f"  {title:<18}{heads}")
        for name in names:
            values = (metrics[direction + part + name] for part in parts)
            lines.append(f"    {name:<16}" + "".join(f"{100 * x:10.2f}" for x in values))
    return lines


def check(
    gathered: Gathered, settings: Retrieval, size: int, precisions: Sequence[str] = ()
) -> None:
    """Refuses settings that can't be measured, before the embeddings are computed.

    Args:
        gathered: queries and documents.
        settings: metrics to compute.
        size: number of dims of the model's embeddings.
        precisions: precisions to measure.

    Raises:
        ConfigError: there are fewer than two documents, a cut-off exceeds their number, ``dims``
            exceeds ``size``, or a precision is unknown.
    """
    count = len(gathered.documents)
    if count < 2:
        raise ConfigError(f"retrieval: the corpus has {count} documents; ranking needs at least 2")
    if max(settings.ks) > count:
        raise ConfigError(f"ks={max(settings.ks)} is more than the {count} documents of the corpus")
    if max(settings.dims, default=0) > size:
        raise ConfigError(f"dims={max(settings.dims)}: the model's embeddings have {size}")
    if unknown := [p for p in quantized_precisions(precisions) if p not in KINDS]:
        raise ConfigError(f"precisions: {unknown[0]!r} is unknown; use float32, {', '.join(KINDS)}")


def evaluate(
    model: Encoder | VLM,
    examples: Sequence[Example],
    settings: Retrieval,
    query: EmbedConfig,
    document: EmbedConfig,
    more: Sequence[Item] = (),
    prediction_grid: str = "",
    precisions: tuple[str, ...] = (),
) -> RetrievalReport:
    """Measures how well a model's embeddings retrieve the positives of examples.

    Args:
        model: model that computes the embeddings.
        examples: a query's positives, and those of examples with the same query or label, are
            relevant to it; all other documents are not.
        settings: metrics to compute.
        query: settings of how queries are embedded; its ``dims`` is 0.
        document: settings of how documents are embedded.
        more: further documents to search.
        prediction_grid: PNG file to draw some queries and their best documents to; "" for none.
        precisions: see :func:`measure`.

    Raises:
        ConfigError: as for :func:`check`.
        DataError: an image can't be read.
    """
    begun = time.monotonic()
    gathered = gather(examples, more)
    check(gathered, settings, model.width, precisions)
    queries = in_memory(model, gathered.queries, query, "queries")
    documents = in_memory(model, gathered.documents, document, "documents")
    relevance = Relevance.of(gathered.positives, len(documents))
    exclude, mesh = never_retrieved(gathered.same, gathered.positives), model.model.mesh
    metrics = measure(queries, documents, relevance, mesh, settings, precisions, exclude)
    if prediction_grid:
        retrieval_grid(
            (gathered.queries, queries),
            (gathered.documents, documents),
            gathered.positives,
            pathlib.Path(prediction_grid),
            settings.cosine,
            exclude,
        )
    variants = (settings.dims, quantized_precisions(precisions))
    return RetrievalReport(metrics, variants, time.monotonic() - begun)


def measure(
    queries: np.ndarray,
    documents: np.ndarray,
    relevance: Relevance,
    mesh: Mesh,
    settings: Retrieval,
    precisions: Sequence[str] = (),
    exclude: Sequence[Collection[int]] = (),
) -> dict[str, float]:
    """Measures the retrieval of embeddings, and of the same embeddings after quantization.

    Args:
        queries: f32[Q, E].
        documents: f32[N, E]; the ranges of int8 are computed from them.
        relevance: which of the documents are relevant to which of the queries.
        mesh: mesh to search on.
        settings: metrics to compute.
        precisions: ``int8`` or ``binary``, whose metrics have the prefixes ``int8/`` and
            ``reverse/int8/``; ``float32`` is ignored.
        exclude: for each query, the documents to leave out of its results, and of which it is left
            out in the other direction; () leaves out none.

    Returns:
        The metrics of :func:`jaxvlm.evals.retrieval.evaluate`, ``documents``, their number, and
        ``excluded``, the number of queries with a document that is left out.
    """
    out = exclude if any(exclude) else None
    metrics = retrieval.evaluate(queries, documents, relevance, mesh, settings, out)
    for kind in quantized_precisions(precisions):
        ranges = ranges_of([documents]) if kind == "int8" else None
        q, d = (dequantized(x, kind, ranges) for x in (queries, documents))
        all_dims = dataclasses.replace(settings, dims=(), random=False)
        for name, value in retrieval.evaluate(q, d, relevance, mesh, all_dims, out).items():
            if "@" in name:
                direction = REVERSE if name.startswith(REVERSE) else ""
                metrics[f"{direction}{kind}/{name.removeprefix(direction)}"] = value
    excluded = float(sum(map(bool, exclude)))
    return metrics | {"documents": float(len(documents)), "excluded": excluded}


def quantized_precisions(precisions: Sequence[str]) -> tuple[str, ...]:
    """The precisions that need quantization: all but ``float32``."""
    return tuple(p for p in precisions if p != "float32")


def retrieval_grid(
    queries: tuple[Sequence[Item], np.ndarray],
    documents: tuple[Sequence[Item], np.ndarray],
    positives: Sequence[Collection[int]],
    path: pathlib.Path,
    cosine: bool = True,
    exclude: Sequence[Collection[int]] = (),
) -> None:
    """Draws some queries with their best documents and the rank of the first relevant one.

    Args:
        queries: items, and their embeddings f32[Q, E].
        documents: items, and their embeddings f32[N, E].
        positives: for each query, the indices of its relevant documents.
        path: PNG file, which process 0 writes.
        cosine: whether to compare by cosine instead of by dot product.
        exclude: see :func:`measure`.
    """
    if jax.process_index():
        return
    some = np.random.default_rng(_SEED).permutation(len(queries[0]))[:_QUERIES].tolist()
    q, d = (unit(x) if cosine else x for x in (queries[1][some], documents[1]))
    scores = q @ d.T
    rows = []
    for i, score in zip(some, scores):
        order = np.argsort(-score, kind="stable")
        order = order[~np.isin(order, list(exclude[i]) if exclude else [])]
        is_right = np.isin(order, list(positives[i]))
        rows.append(
            RetrievedRow(
                _grid_item(queries[0][i]),
                [_grid_item(documents[0][n]) for n in order[:_DOCUMENTS]],
                score[order[:_DOCUMENTS]].tolist(),
                is_right[:_DOCUMENTS].tolist(),
                1 + int(is_right.argmax()) if is_right.any() else 0,
            )
        )
    draw_retrieval(rows, path)


def _grid_item(item: Item) -> GridItem:
    return GridItem(item.words, item.image)
