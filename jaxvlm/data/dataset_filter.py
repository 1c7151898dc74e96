"""Filter the records of a tokenized corpus before packing, and compute its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.errors import Problem
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.conversation_formats import Record


def take(corpus: Corpus, chosen: np.ndarray) -> Corpus:
    """Select some records of a corpus."""
    return corpus._replace(
        first=corpus.first[chosen],
        last=corpus.last[chosen],
        length=corpus.length[chosen],
        images=tuple(corpus.images[i] for i in chosen.tolist()),
        source=corpus.source[chosen],
    )


def with_readable_images(
    corpus: Corpus, records: Sequence[Record], max_pixels: int
) -> tuple[Corpus, list[Problem]]:
    """Select records whose image headers can be read; also returns the problems of the others."""
    reasons = {
        i: reason
        for i, path in enumerate(corpus.paths)
        if (reason := image_files.check(path, max_pixels)) is not None
    }
    if not reasons:
        return corpus, []
    good, problems = [], []
    for i, images in enumerate(corpus.images):
        bad = next((p for p in images if p in reasons), None)
        if bad is None:
            good.append(i)
        else:
            record = records[int(corpus.source[i])]
            problems.append(Problem(record.id, reasons[bad], corpus.paths[bad]))
    return take(corpus, np.asarray(good, np.int64)), problems


def digest(corpus: Corpus) -> str:
    """Hash token ids, loss masks, and the images' file names and sizes (not their folder)."""
    out = hashlib.blake2b(digest_size=8)
    for array in (corpus.tokens, corpus.loss, corpus.first, corpus.last):
        out.update(array.tobytes())
    used = sorted({p for images in corpus.images for p in images})
    digests: dict[int, bytes] = {}  # images of the same size share a span
    for span in (corpus.spans[i] for i in used):
        parts = [span.ids, span.tile, span.positions, np.int64(span.advance)]
        parts += [] if span.sources is None else [span.sources.feature]
        out.update(digests.setdefault(id(span), b"".join(part.tobytes() for part in parts)))
    names = [image_files.name_and_size(corpus.paths[i]) for i in used]
    out.update(repr((corpus.images, names)).encode())
    return out.hexdigest()
