"""Evaluation of an embedding model: its vectors of examples, the metrics, and a contact sheet."""

from __future__ import annotations

import dataclasses
import io
import pathlib
import time
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvlm.build.embedding import Embedding, in_memory
from jaxvlm.build.encoder import Encoder
from jaxvlm.build.examples import Gathered, gather
from jaxvlm.build.loaded import Loaded
from jaxvlm.config import ConfigError
from jaxvlm.data import tars
from jaxvlm.data.examples import Example, Item
from jaxvlm.evals import retrieval
from jaxvlm.evals.retrieval import RANDOM, REVERSE, Relevance, Retrieval
from jaxvlm.evals.sheet import Found, Shown, draw_found
from jaxvlm.evals.zero_shot import unit
from jaxvlm.infer.quantize import KINDS, kept, ranges_of

_ROWS, _SHOWN, _SEED = 12, 5, 0x5E


@dataclasses.dataclass(frozen=True)
class Report:
    """An evaluation's figures."""

    metrics: dict[str, float]
    """See :func:`jaxvlm.evals.retrieval.evaluate`; and ``documents``."""
    beside: tuple[Sequence[int], Sequence[str]]
    """Prefixes and precisions that were measured."""
    seconds: float

    def lines(self) -> list[str]:
        """For people."""
        return [f"evaluated in {self.seconds:.1f} s", *tables(self.metrics, *self.beside)]


def tables(
    metrics: Mapping[str, float], dims: Sequence[int], precisions: Sequence[str] = ()
) -> list[str]:
    """Tables for people, one each way: a line a metric, a column a prefix or a precision.

    Args:
        metrics: of :func:`measured`.
        dims: prefixes that were measured.
        precisions: that were.
    """
    count, documents = (int(metrics[n]) for n in ("queries", "documents"))
    lines = [f"{count} queries, {documents} documents; per cent"]
    names = dict.fromkeys(n.rpartition("/")[2] for n in metrics if "@" in n)
    for way, title in (("", "query to document"), (REVERSE, "document to query")):
        parts = ("", *(f"dims{n}/" for n in dims), *(f"{p}/" for p in precisions), RANDOM)
        parts = tuple(p for p in parts if f"{way}{p}{next(iter(names))}" in metrics)
        if not parts:
            continue
        heads = "".join(f"{part[:-1] or 'all dims':>10}" for part in parts)
        lines.append(f"  {title:<18}{heads}")
        for name in names:
            found = (metrics[way + part + name] for part in parts)
            lines.append(f"    {name:<16}" + "".join(f"{100 * x:10.2f}" for x in found))
    return lines


def check(gathered: Gathered, what: Retrieval, size: int, precisions: Sequence[str] = ()) -> None:
    """Refuse what could not be measured, before vectors are made.

    Args:
        gathered: queries and documents.
        what: to measure.
        size: dims of the model's vectors.
        precisions: likewise.

    Raises:
        ConfigError: fewer than two documents, a cut-off beyond them, too many dims, or a precision
            that is not known.
    """
    count = len(gathered.documents)
    if count < 2:
        raise ConfigError(f"retrieval: a corpus of {count} has nothing to rank")
    if max(what.ks) > count:
        raise ConfigError(f"ks: {max(what.ks)} is more than the {count} documents there are")
    if max(what.dims, default=0) > size:
        raise ConfigError(f"dims={max(what.dims)}: the model's vectors have {size}")
    if unknown := [p for p in few_bits(precisions) if p not in KINDS]:
        raise ConfigError(f"precisions: {unknown[0]!r}; known: float32, {', '.join(KINDS)}")


def evaluate(
    model: Encoder | Loaded,
    examples: Sequence[Example],
    what: Retrieval,
    query: Embedding,
    document: Embedding,
    more: Sequence[Item] = (),
    sheet: str = "",
    precisions: tuple[str, ...] = (),
) -> Report:
    """How well a model's vectors find the positives of examples among all documents.

    Args:
        model: what makes vectors.
        examples: their positives are right, and those of the same query or label; everything else
            is not.
        what: to measure.
        query: how queries become vectors; its ``dims`` is 0.
        document: how documents do.
        more: further documents to search in.
        sheet: write some queries and what they found to this PNG.
        precisions: see :func:`measured`.

    Raises:
        ConfigError: as :func:`check`.
        DataError: a picture can't be read.
    """
    begun = time.monotonic()
    gathered = gather(examples, more)
    check(gathered, what, model.width, precisions)
    queries = in_memory(model, gathered.queries, query, "queries")
    documents = in_memory(model, gathered.documents, document, "documents")
    relevance = Relevance.of(gathered.right, len(documents))
    metrics = measured(queries, documents, relevance, model.model.mesh, what, precisions)
    if sheet:
        asked, known = (gathered.queries, queries), (gathered.documents, documents)
        found_sheet(asked, known, gathered.right, pathlib.Path(sheet), what.cosine)
    return Report(metrics, (what.dims, few_bits(precisions)), time.monotonic() - begun)


def measured(
    queries: np.ndarray,
    documents: np.ndarray,
    relevance: Relevance,
    mesh: Mesh,
    what: Retrieval,
    precisions: Sequence[str] = (),
) -> dict[str, float]:
    """What vectors find; and what they find when they are kept in fewer bits.

    Args:
        queries: f32[Q, E].
        documents: f32[N, E]; ranges of eight bits are theirs.
        relevance: of these.
        mesh: to search on.
        what: to measure.
        precisions: ``int8``, ``binary``; names are behind ``int8/``, ``reverse/int8/``.

    Returns:
        As :func:`jaxvlm.evals.retrieval.evaluate`, and ``documents``.
    """
    found = retrieval.evaluate(queries, documents, relevance, mesh, what)
    for kind in few_bits(precisions):
        ranges = ranges_of([documents]) if kind == "int8" else None
        asked, known = (kept(x, kind, ranges) for x in (queries, documents))
        few = dataclasses.replace(what, dims=(), random=False)
        for name, value in retrieval.evaluate(asked, known, relevance, mesh, few).items():
            if "@" in name:
                way = REVERSE if name.startswith(REVERSE) else ""
                found[f"{way}{kind}/{name.removeprefix(way)}"] = value
    return found | {"documents": float(len(documents))}


def few_bits(precisions: Sequence[str]) -> tuple[str, ...]:
    """Those of ``precisions`` that are measured beside the vectors as they are."""
    return tuple(p for p in precisions if p != "float32")


def found_sheet(
    queries: tuple[Sequence[Item], np.ndarray],
    documents: tuple[Sequence[Item], np.ndarray],
    right: Sequence[Collection[int]],
    path: pathlib.Path,
    cosine: bool = True,
) -> None:
    """Draw some queries, the documents that are best for each, and where the first right one is.

    Args:
        queries: items, and their vectors f32[Q, E].
        documents: likewise, f32[N, E].
        right: of each query, the documents that are right.
        path: PNG; process 0 writes it.
        cosine: compare by it, or by products as they are.
    """
    if jax.process_index():
        return
    some = np.random.default_rng(_SEED).permutation(len(queries[0]))[:_ROWS].tolist()
    asked, known = (unit(x) if cosine else x for x in (queries[1][some], documents[1]))
    scores = asked @ known.T
    rows = []
    for i, score in zip(some, scores):
        order = np.argsort(-score, kind="stable")
        ours = np.isin(order, list(right[i]))
        rows.append(
            Found(
                _shown(queries[0][i]),
                [_shown(documents[0][n]) for n in order[:_SHOWN]],
                score[order[:_SHOWN]].tolist(),
                ours[:_SHOWN].tolist(),
                1 + int(ours.argmax()) if ours.any() else 0,
            )
        )
    draw_found(rows, path)


def _shown(item: Item) -> Shown:
    inside = tars.is_member(item.image)
    return Shown(item.words, io.BytesIO(tars.read(item.image)) if inside else item.image)
