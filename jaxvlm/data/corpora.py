"""What is done to an encoded corpus before it is packed: choosing records, and naming it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxvlm.data import images
from jaxvlm.data.chat import Corpus
from jaxvlm.data.errors import Problem
from jaxvlm.data.formats import Record


def take(corpus: Corpus, chosen: np.ndarray) -> Corpus:
    """The corpus with some of its records."""
    return corpus._replace(
        first=corpus.first[chosen],
        last=corpus.last[chosen],
        length=corpus.length[chosen],
        pictures=tuple(corpus.pictures[i] for i in chosen.tolist()),
        source=corpus.source[chosen],
    )


def with_good_pictures(
    corpus: Corpus, records: Sequence[Record], max_pixels: int
) -> tuple[Corpus, list[Problem]]:
    """Records whose pictures' headers are good, and the problems of the others."""
    reasons = {
        i: reason
        for i, path in enumerate(corpus.paths)
        if (reason := images.check(path, max_pixels)) is not None
    }
    if not reasons:
        return corpus, []
    good, problems = [], []
    for i, pictures in enumerate(corpus.pictures):
        bad = next((p for p in pictures if p in reasons), None)
        if bad is None:
            good.append(i)
        else:
            record = records[int(corpus.source[i])]
            problems.append(Problem(record.id, reasons[bad], corpus.paths[bad]))
    return take(corpus, np.asarray(good, np.int64)), problems


def digest(corpus: Corpus) -> str:
    """Hash of ids, masks, and the pictures' names and sizes (not where the folder lies)."""
    out = hashlib.blake2b(digest_size=8)
    for array in (corpus.tokens, corpus.loss, corpus.first, corpus.last):
        out.update(array.tobytes())
    used = sorted({p for pictures in corpus.pictures for p in pictures})
    known: dict[int, bytes] = {}  # pictures of one size share a span
    for span in (corpus.spans[i] for i in used):
        parts = [span.ids, span.tile, span.positions, np.int64(span.advance)]
        parts += [] if span.sources is None else [span.sources.feature]
        out.update(known.setdefault(id(span), b"".join(part.tobytes() for part in parts)))
    names = [images.name_and_size(corpus.paths[i]) for i in used]
    out.update(repr((corpus.pictures, names)).encode())
    return out.hexdigest()
